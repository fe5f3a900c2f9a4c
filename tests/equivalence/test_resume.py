"""A run that is cut off at any step and started again ends with the bits of a run that never stopped."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from torch import Tensor

from spes_core import snapshots
from spes_core.config import RunConfig
from spes_core.errors import DataError
from spes_core.events import EventWriter, read_events
from spes_core.node import build_decoder
from spes_core.schedules import checkpoint_steps
from spes_core.train.loop import Place, Training
from spes_core.train.resume import Checkpoints
from tests.equivalence.participants import CPU, RandomTokens, assert_bitwise_equal, tiny


class Crash(Exception):
    """Stands for a kill -9: nothing after it happens."""


class Reader(RandomTokens):
    """Notes which steps' data are read, and stops the process before the batch of one step."""

    def __init__(self, config: RunConfig, crash_at: int | None) -> None:
        super().__init__(config)
        self.crash_at, self.steps = crash_at, []

    def train_batch(self, step: int, part: int, parts: int) -> tuple[Tensor, Tensor]:
        if step == self.crash_at:
            raise Crash
        self.steps.append(step)
        return super().train_batch(step, part, parts)


def alone(**changes: Any) -> RunConfig:
    settings: dict[str, Any] = {
        "method": "local",
        "nodes": 1,
        "sync": {"exchange": "none"},
        "checkpoint": {"interval_steps": 3},
        "log": {"interval_steps": 4},
        "validation": {"max_sequences": 8, "interval_tokens": 2 * 8 * 16},
    }
    return tiny(**(settings | changes))


def train(config: RunConfig, folder: Path, crash_at: int | None = None) -> tuple[Training, Reader]:
    checkpoints = Checkpoints(config, folder, "node-0")
    events = EventWriter(folder / "events" / "node-0.jsonl", checkpoints.events_bytes)
    reader = Reader(config, crash_at)
    training = Training(
        config,
        build_decoder(config, config.make_partition().experts_by_node[0], CPU),
        reader,
        events,
        Place(0, 1, 0, 1),
        exchange=None,
        device=CPU,
        checkpoints=checkpoints,
    )
    try:
        training.run()
    finally:
        events.close()
    return training, reader


def state_of(training: Training) -> dict[str, Tensor]:
    """Weights and moments at the end."""
    names = {id(parameter): name for name, parameter in training.decoder.named_parameters()}
    moments = {
        f"{names[id(parameter)]} {key}": value
        for parameter, state in training.optimizer.state.items()
        for key, value in state.items()
    }
    return {**training.decoder.tensors(), **moments}


@pytest.mark.parametrize("optim", [{"name": "adamw"}, {"name": "sgd"}])
@pytest.mark.parametrize("crash_at", [1, 3, 4, 7, 8, 11, 12])
def test_a_crash_at_any_step_changes_no_bit_of_weights_or_moments(
    crash_at: int, optim: dict[str, Any], tmp_path: Path
) -> None:
    config = alone(optim=optim)
    expected, _ = train(config, tmp_path / "whole")
    with pytest.raises(Crash):
        train(config, tmp_path / "cut", crash_at)
    resumed, reader = train(config, tmp_path / "cut")
    assert_bitwise_equal(state_of(resumed), state_of(expected))
    last = (crash_at - 1) // 3 * 3
    assert reader.steps == list(range(last + 1, config.total_steps + 1)), "data go on where the checkpoint ends"


def test_many_crashes_leave_the_events_of_a_run_that_never_stopped(tmp_path: Path) -> None:
    config = alone()
    train(config, tmp_path / "whole")
    for crash_at in (2, 5, 4, 8, 7, 7, 10, 12):
        with pytest.raises(Crash):
            train(config, tmp_path / "cut", crash_at)
    train(config, tmp_path / "cut")

    def lasting(folder: Path) -> list[dict[str, Any]]:
        timed = {"time_s", "step_time_s", "tokens_per_s", "duration_s", "wall_time_s", "rss_peak_bytes"}
        events = read_events(folder / "events" / "node-0.jsonl")
        return [
            {key: value for key, value in event.items() if key not in timed and not key.endswith("_s")}
            for event in events
            if event["kind"] != "resume"
        ]

    assert lasting(tmp_path / "cut") == lasting(tmp_path / "whole")


def test_the_newest_two_checkpoints_are_kept_and_none_at_the_end(tmp_path: Path) -> None:
    config = alone()
    train(config, tmp_path)
    assert checkpoint_steps(config) == [3, 6, 9] and config.total_steps == 12
    names = sorted(path.name for path in snapshots.folder_of(tmp_path, "node-0").iterdir())
    assert names == ["6.json", "6.tensors", "9.json", "9.tensors"]


def test_a_torn_newest_checkpoint_is_not_there_and_a_damaged_one_is_named(tmp_path: Path) -> None:
    config = alone()
    train(config, tmp_path)
    folder = snapshots.folder_of(tmp_path, "node-0")
    whole = (folder / "9.tensors").read_bytes()
    (folder / "9.tensors").write_bytes(whole[:-1])
    assert Checkpoints(config, tmp_path, "node-0").step == 6
    flipped = bytearray(whole)
    flipped[-5] ^= 1
    (folder / "9.tensors").write_bytes(flipped)
    with pytest.raises(DataError, match=r"9\.tensors is damaged .* remove .*9\.json"):
        Checkpoints(config, tmp_path, "node-0")
    (folder / "9.json").unlink()
    assert Checkpoints(config, tmp_path, "node-0").step == 6


def test_a_checkpoint_of_another_run_is_none(tmp_path: Path) -> None:
    train(alone(), tmp_path)
    assert Checkpoints(alone(seed=1), tmp_path, "node-0").step == 0
    assert Checkpoints(alone(log={"interval_steps": 5}), tmp_path, "node-0").step == 9


def test_ranks_go_on_from_the_newest_step_that_all_of_their_node_have_and_the_server_from_its_own(
    tmp_path: Path,
) -> None:
    config = tiny(parallel={"ranks_per_node": 2})
    have = {
        "server": [5, 10],
        "node-0": [10, 15],
        "node-0-rank-1": [5, 10],
        "node-1": [10, 15],
        "node-1-rank-1": [10, 15],
    }
    assert snapshots.participants(config) == list(have)
    for name, steps in have.items():
        for step in steps:
            keep(config, tmp_path, name, step)
    assert [snapshots.resume_step(config, tmp_path, name) for name in have] == [10, 10, 10, 15, 15]
    (snapshots.folder_of(tmp_path, "node-0-rank-1") / "10.json").unlink()
    assert [snapshots.resume_step(config, tmp_path, name) for name in have] == [10, 0, 0, 15, 15]


def test_nodes_without_exchange_go_on_each_from_its_own_newest_step(tmp_path: Path) -> None:
    config = tiny(sync={"exchange": "none"})
    keep(config, tmp_path, "node-0", 3)
    keep(config, tmp_path, "node-1", 6)
    assert [snapshots.resume_step(config, tmp_path, f"node-{node}") for node in range(2)] == [3, 6]


def keep(config: RunConfig, folder: Path, participant: str, step: int) -> None:
    def write(path: Path) -> str:
        path.write_bytes(b"data")
        return ""

    where = snapshots.folder_of(folder, participant)
    snapshots.store(config, where, write, step=step, round=0, events_bytes=0, values={})
