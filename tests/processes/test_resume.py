"""kill -9 of every process of a run, and the same commands again: the bits of a run that was left alone."""

from __future__ import annotations

import random
import time
from pathlib import Path
from typing import Any

import pytest
from torch import Tensor

from spes_core import snapshots
from spes_core.config import RunConfig
from spes_core.data.tokenize import prepare
from spes_core.events import read_events
from spes_core.schedules import checkpoint_steps, round_steps
from spes_core.tensorfile import read_tensors
from tests.equivalence.participants import assert_bitwise_equal, tiny
from tests.processes.runs import final_weights, kill_all, run_all, save_run, start_all, with_corpus, write_corpus
from workbench.recording import Recording
from workbench.results import round_table

pytestmark = pytest.mark.processes

STEPS = 72
METHODS: dict[str, dict[str, Any]] = {
    "spes": {"merge": {"alpha": 0.3, "until_step": STEPS}, "outer": {"kind": "nesterov"}},
    "spes groups": {"nodes": 1, "parallel": {"ranks_per_node": 2}, "merge": {"alpha": 0.3, "until_step": STEPS}},
    "centralized": {"sync": {"exchange": "gradients"}},
}


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_corpus(tmp_path_factory.mktemp("corpus ü"))


@pytest.mark.parametrize("method", METHODS)
def test_a_run_that_was_killed_ends_with_the_bits_of_one_that_was_not(
    method: str, corpus: Path, tmp_path: Path
) -> None:
    common = {"checkpoint": {"interval_rounds": 3, "interval_steps": 13}, "log": {"interval_steps": 1}}
    config = with_corpus(tiny(budget_tokens=STEPS * 8 * 16, **common, **METHODS[method]), corpus)
    data_dir = prepare(config.data, tmp_path / "cache")
    for folder in ("whole", "cut"):
        save_run(config, data_dir, tmp_path / folder)
    run_all(tmp_path / "whole")
    kill_at(random.Random(method).randint(20, STEPS - 20), tmp_path / "cut")
    run_all(tmp_path / "cut")
    assert_bitwise_equal(final_weights(tmp_path / "cut"), final_weights(tmp_path / "whole"))
    last = checkpoint_steps(config)[-1]
    for participant in snapshots.participants(config):
        assert_bitwise_equal(stored(tmp_path / "cut", participant, last), stored(tmp_path / "whole", participant, last))
    check_events(config, tmp_path / "cut")


def kill_at(step: int, folder: Path) -> None:
    """Start everything and kill it once a node has taken so many steps."""
    processes = start_all(folder)
    events, deadline_s = folder / "events" / "node-0.jsonl", time.monotonic() + 60
    while not any(event.get("step", 0) >= step for event in read_events(events)):
        assert time.monotonic() < deadline_s and all(process.poll() is None for process in processes.values())
        time.sleep(0.005)
    kill_all(processes)
    assert not (folder / "weights").exists(), "the run was over before it could be killed"


def stored(folder: Path, participant: str, step: int) -> dict[str, Tensor]:
    """Weights and moments in a checkpoint."""
    _, path = snapshots.load(folder, participant, step)
    return dict(read_tensors(path))


def check_events(config: RunConfig, folder: Path) -> None:
    """Every step and round is told once, and the resume, which was not at the start, is told too."""
    steps, rounds = list(range(1, config.total_steps + 1)), list(range(len(round_steps(config))))
    for path in (folder / "events").glob("node-*.jsonl"):
        events = list(read_events(path))
        assert [event["step"] for event in events if event["kind"] == "train"] == steps
        assert [event["round"] for event in events if event["kind"] == "round"] == rounds
        (resume,) = [event for event in events if event["kind"] == "resume"]
        assert resume["step"] in checkpoint_steps(config)
    assert [row["round"] for row in round_table(Recording(folder / "events"))] == rounds
