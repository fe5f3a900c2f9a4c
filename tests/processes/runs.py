"""Starting the real processes of a run for tests, to their end or to a kill."""

from __future__ import annotations

import atexit
import contextlib
import functools
import os
import signal
import sys
import threading
import time
from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor

from spes_core.checkpoint import load_weights
from spes_core.config import RunConfig
from spes_core.runfile import RunFile
from workbench.launch.forkserver import ForkLauncher
from workbench.processes import ProcessSpec, plan


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


class Started:
    """A process of a run, started by this test process's fork server: it need not import the engine again."""

    def __init__(self, spec: ProcessSpec, log: Path) -> None:
        self._log, self._start_bytes = log, log.stat().st_size if log.exists() else 0
        self._running = _launcher().start(spec, log)

    def poll(self) -> int | None:
        """Its exit status, None while it runs."""
        return self._running.returncode

    def kill(self) -> None:
        """SIGKILL to it alone."""
        if self._running.returncode is None and self._running.pid is not None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self._running.pid, signal.SIGKILL)

    def wait(self, timeout_s: float) -> int:
        """Its exit status, once it has ended."""
        deadline_s = time.monotonic() + timeout_s
        while (status := self.poll()) is None:
            left_s = deadline_s - time.monotonic()
            assert left_s > 0, f"{self._running.name} does not end"
            _launcher().wait([self._running], left_s)
        return status

    @property
    def output(self) -> str:
        """What it has written to stdout and stderr."""
        return self._log.read_bytes()[self._start_bytes :].decode("utf-8", "replace")


@functools.cache
def _launcher() -> ForkLauncher:
    launcher = ForkLauncher()
    atexit.register(launcher.close)
    return launcher


def start_all(folder: Path, *, but: str | None = None) -> dict[str, Started]:
    """The processes that the planner names, or all ``but`` one, each in a session of its own."""
    return {
        spec.name: Started(spec, folder / f"{spec.name}.log")
        for spec in plan(RunFile.load(folder / "run.json"), folder, sys.executable)
        if spec.name != but
    }


def outputs(processes: dict[str, Started], timeout_s: float = 60) -> dict[str, tuple[int, str]]:
    """Exit status and output of each; everything is killed once that has taken ``timeout_s``."""
    timer = threading.Timer(timeout_s, lambda: [process.kill() for process in processes.values()])
    timer.start()
    statuses = {name: process.wait(timeout_s + 30) for name, process in processes.items()}
    timer.cancel()
    return {name: (statuses[name], process.output) for name, process in processes.items()}


def run_all(folder: Path) -> None:
    """Run everything to a good end."""
    found = outputs(start_all(folder))
    assert all(status == 0 for status, _ in found.values()), "\n".join(f"{n}: {out}" for n, (_, out) in found.items())


def kill_all(processes: dict[str, Started]) -> None:
    """SIGKILL to everything at once; ranks die with their torchrun."""
    for process in processes.values():
        process.kill()
    for process in processes.values():
        process.wait(20)


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
