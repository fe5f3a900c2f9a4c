"""Starting the real processes of a run for tests, to their end or to a kill."""

from __future__ import annotations

import signal
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor

from spes_core.checkpoint import load_weights
from spes_core.config import RunConfig
from spes_core.runfile import RunFile
from workbench.processes import plan


def write_corpus(folder: Path) -> Path:
    """A folder of small documents with enough sequences for a few steps."""
    for index in range(40):
        words = (f"document {index} counts {number} and says {number * index % 17}." for number in range(60))
        (folder / f"{index:02}.txt").write_text(" ".join(words), encoding="utf-8")
    return folder


def with_corpus(config: RunConfig, corpus: Path) -> RunConfig:
    return replace(config, data=replace(config.data, corpus=str(corpus)))


def save_run(config: RunConfig, data_dir: Path, folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    RunFile(trial=config.method, config=config, data_dir=str(data_dir), device="cpu").save(folder / "run.json")


def start_all(folder: Path, *, but: str | None = None) -> dict[str, subprocess.Popen[str]]:
    """The processes that the planner names, or all ``but`` one, each in a session of its own."""
    return {
        spec.name: subprocess.Popen(
            spec.argv,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
        )
        for spec in plan(RunFile.load(folder / "run.json"), folder, sys.executable)
        if spec.name != but
    }


def outputs(processes: dict[str, subprocess.Popen[str]], timeout_s: float = 60) -> dict[str, tuple[int, str]]:
    """Exit status and output of each; everything is killed once that has taken ``timeout_s``."""
    timer = threading.Timer(timeout_s, lambda: [process.kill() for process in processes.values()])
    timer.start()
    with ThreadPoolExecutor(len(processes)) as pool:
        texts = list(pool.map(lambda process: process.communicate()[0], processes.values()))
    timer.cancel()
    return {name: (process.returncode, text) for (name, process), text in zip(processes.items(), texts, strict=True)}


def run_all(folder: Path) -> None:
    """Run everything to a good end."""
    found = outputs(start_all(folder))
    assert all(status == 0 for status, _ in found.values()), "\n".join(f"{n}: {out}" for n, (_, out) in found.items())


def kill_all(processes: dict[str, subprocess.Popen[str]]) -> None:
    """SIGKILL to everything at once; ranks die with their torchrun."""
    for process in processes.values():
        process.send_signal(signal.SIGKILL)
    for process in processes.values():
        process.communicate(timeout=20)


def final_weights(folder: Path, name: str = "final") -> dict[str, Tensor]:
    return load_weights(folder / "weights" / f"{name}.safetensors")


def largest_difference(one: dict[str, Tensor], other: dict[str, Tensor]) -> float:
    """Largest over tensors of ‖a − b‖ / ‖b‖."""
    assert one.keys() == other.keys()
    norms = ((one[name] - other[name]).norm() / other[name].norm() for name in one)
    return max(float(torch.nan_to_num(norm)) for norm in norms)


def difference(one: dict[str, Tensor], other: dict[str, Tensor]) -> float:
    """‖a − b‖ / ‖b‖ of all tensors together."""
    assert one.keys() == other.keys()
    squares = [((one[name] - other[name]).square().sum(), other[name].square().sum()) for name in one]
    return float((sum(a for a, _ in squares) / sum(b for _, b in squares)) ** 0.5)
