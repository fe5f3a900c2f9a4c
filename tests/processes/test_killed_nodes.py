"""kill -9 of a node in any phase of a round, and the same command again: the bits of a run that was left alone."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from spes_core.data.batches import TokenSource
from spes_core.data.tokenize import prepare
from spes_core.events import read_events
from tests.equivalence.participants import assert_bitwise_equal, tiny, train_in_rounds
from tests.processes.killed_node import PHASES
from tests.processes.runs import Started, final_weights, outputs, save_run, start_all, with_corpus, write_corpus
from workbench.processes import ProcessSpec

pytestmark = pytest.mark.processes

LIVES = {
    "float32": ("local steps", "upload", "waiting", "applying"),
    "int8": ("encoding", "upload", "download", "applied", "applying", "checkpoint"),
}
"""By codec, how a node dies in round 1, 2, ….; its checkpoints lie after rounds 1, 3, …, so most are repeated."""


def test_every_phase_is_tried() -> None:
    assert {phase for phases in LIVES.values() for phase in phases} == set(PHASES)


@pytest.mark.parametrize("codec", LIVES)
def test_a_node_that_is_killed_again_and_again_changes_no_bit(codec: str, tmp_path: Path) -> None:
    phases = LIVES[codec]
    rounds = len(phases) + 2
    config = tiny(
        budget_tokens=2 * rounds * 8 * 16,
        sync={"interval_steps": 2},
        merge={"interval_steps": 6, "until_step": 100, "alpha": 0.3},
        wire={"dtype": codec, "chunk_bytes": 1024},
        checkpoint={"interval_rounds": 2},
        log={"interval_steps": 1},
    )
    corpus = tmp_path / "corpus"
    corpus.mkdir()
    config = with_corpus(config, write_corpus(corpus))
    data_dir = prepare(config.data, tmp_path / "cache")
    folder = tmp_path / "run"
    save_run(config, data_dir, folder)
    processes = start_all(folder, but="node-0")
    command = (sys.executable, "-m", "tests.processes.killed_node", str(folder / "run.json"), "0", *phases)
    processes["node-0"] = Started(ProcessSpec(name="node-0", argv=command, env={}), folder / "node-0.log")
    found = outputs(processes, 120)
    assert all(status == 0 for status, _ in found.values()), found
    source = TokenSource(data_dir, config.data, config.seed)
    expected = train_in_rounds(config, tmp_path / "inside", source)
    assert_bitwise_equal(final_weights(folder), expected[0])
    check_events(folder, rounds)


def check_events(folder: Path, rounds: int) -> None:
    """Every step and round is told once by each node, and all agree on every digest."""
    told = []
    for node in range(2):
        events = list(read_events(folder / "events" / f"node-{node}.jsonl"))
        assert [event["step"] for event in events if event["kind"] == "train"] == list(range(1, 2 * rounds + 1))
        told.append([(event["round"], event["digest"]) for event in events if event["kind"] == "round"])
        assert not [event for event in events if event["kind"] == "skipped"]
    assert told[0] == told[1] and [round for round, _ in told[0]] == list(range(rounds))
