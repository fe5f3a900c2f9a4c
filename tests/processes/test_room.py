"""What a run is predicted to hold on a disk, against what its processes hold there while they run."""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from spes_core.config import RunConfig
from spes_core.data.tokenize import prepare
from spes_core.schedules import round_steps
from tests.equivalence.participants import tiny
from tests.processes.runs import run_all, save_run, with_corpus, write_corpus
from workbench.launch.remote import Placement
from workbench.launch.room import rooms, stored_bytes

pytestmark = pytest.mark.processes

MODEL = {"d_model": 64, "num_experts": 8, "expert_hidden": 256}
RUNS: dict[str, dict[str, Any]] = {
    "rounds": {"merge": {"interval_steps": 2, "until_step": 100}, "checkpoint": {"interval_rounds": 3}},
    "two servers": {"outer": {"kind": "nesterov"}, "server": {"shards": 2}, "checkpoint": {"interval_rounds": 2}},
    "gradients": {"sync": {"exchange": "gradients"}, "checkpoint": {"interval_steps": 4}},
}


def run(**changes: Any) -> RunConfig:
    usual = {"nodes": 2, "model": MODEL, "sync": {"interval_steps": 1}, "budget_tokens": 9 * 8 * 16}
    return tiny(**{**usual, **changes})


@pytest.mark.parametrize("kind", RUNS)
def test_the_most_that_a_run_holds_on_the_disk_is_what_was_predicted(kind: str, tmp_path: Path) -> None:
    (tmp_path / "corpus").mkdir()
    config = with_corpus(run(**RUNS[kind]), write_corpus(tmp_path / "corpus"))
    save_run(config, prepare(config.data, tmp_path / "cache"), tmp_path / "run")
    most = [0]
    done = threading.Event()
    watching = threading.Thread(target=lambda: repeat(done, lambda: most.append(held_bytes(tmp_path / "run"))))
    watching.start()
    try:
        run_all(tmp_path / "run")
    finally:
        done.set()
        watching.join()
    predicted = stored_bytes(
        config, Placement(("a",) * config.server.shards, ("a", "a"), is_group=kind == "gradients")
    )["a"]
    # Between one checkpoint and all of it; a tensor's name and shape come to its values.
    assert 0.5 * predicted < max(most) < 1.05 * predicted


def repeat(done: threading.Event, look: Callable[[], None]) -> None:
    while not done.wait(0.002):
        look()


def held_bytes(folder: Path) -> int:
    """Of what a run stores; files and folders come and go meanwhile."""
    total = 0
    for inside, _, names in os.walk(folder):
        if Path(inside).relative_to(folder).parts[:1] not in ((), ("logs",), ("events",)):
            for name in names:
                with contextlib.suppress(FileNotFoundError):
                    total += (Path(inside) / name).stat().st_size
    return total


def test_each_host_needs_room_for_its_own_processes_and_the_text_once(tmp_path: Path) -> None:
    (tmp_path / "train.bin").write_bytes(b"1" * 1000)
    config = run(checkpoint={"interval_rounds": 0})
    assert len(round_steps(config)) == 9
    placement = Placement(("a",), ("b", "c"))
    sizes = stored_bytes(config, placement)
    assert sizes["b"] == sizes["c"] == 0 < sizes["a"], "without checkpoints only the server stores"
    often = stored_bytes(run(checkpoint={"interval_rounds": 2, "keep": 4}), placement)
    seldom = stored_bytes(run(checkpoint={"interval_rounds": 2, "keep": 2}), placement)
    assert often["b"] * 3 == seldom["b"] * 5
    found = rooms([(config, placement, tmp_path)] * 3, at_once=2)
    assert found.keys() == {"a", "b", "c"}
    assert list(found["b"].copies.values()) == [1000]
    assert found["a"].trials_bytes - found["b"].trials_bytes == 2 * sizes["a"]
