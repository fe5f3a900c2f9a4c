"""Real processes give the bits that the same run gives inside one process; FSDP on two ranks gives those of one."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from spes_core.checkpoint import load_weights
from spes_core.data.batches import TokenSource
from spes_core.data.tokenize import prepare
from spes_core.events import read_events
from tests.equivalence.participants import assert_bitwise_equal, tiny, train_alone, train_in_rounds
from tests.processes.runs import run_all, save_run, with_corpus, write_corpus

pytestmark = pytest.mark.processes

METHODS = {
    "spes": {"partition": {"kind": "sparse"}},
    "dilico": {"partition": {"kind": "full"}, "merge": {"enabled": False}},
    "diloco": {"partition": {"kind": "full"}, "merge": {"enabled": False}, "outer": {"kind": "nesterov"}},
}


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_corpus(tmp_path_factory.mktemp("corpus ü"))


@pytest.mark.parametrize("method", METHODS)
def test_processes_over_grpc_give_the_bits_of_one_process(method: str, corpus: Path, tmp_path: Path) -> None:
    config = with_corpus(tiny(method=method, **METHODS[method]), corpus)
    data_dir = prepare(config.data, tmp_path / "cache")
    save_run(config, data_dir, tmp_path)
    run_all(tmp_path)
    expected = train_in_rounds(config, tmp_path / "inside", TokenSource(data_dir, config.data, config.seed))
    assert_bitwise_equal(load_weights(tmp_path / "weights" / "final.safetensors"), expected[0])
    digests = [last_round(tmp_path / "events" / f"node-{node}.jsonl")["digest"] for node in range(config.nodes)]
    assert len(set(digests)) == 1
    (closing,) = [event for event in read_events(tmp_path / "events" / "server.jsonl") if event["kind"] == "end"]
    assert closing["rounds"] == 3


def test_nodes_that_never_exchange_train_alone_on_their_share(corpus: Path, tmp_path: Path) -> None:
    config = with_corpus(tiny(method="local", partition={"kind": "full"}, sync={"exchange": "none"}), corpus)
    data_dir = prepare(config.data, tmp_path / "cache")
    save_run(config, data_dir, tmp_path)
    run_all(tmp_path)
    finals = [load_weights(tmp_path / "weights" / f"final-node-{node}.safetensors") for node in range(config.nodes)]
    assert not torch.equal(finals[0]["embedding"], finals[1]["embedding"])


def test_fsdp_on_one_rank_is_plain_training_and_on_two_ranks_too(corpus: Path, tmp_path: Path) -> None:
    finals = {}
    for ranks in (1, 2):
        folder = tmp_path / str(ranks)
        config = with_corpus(
            tiny(method="centralized", nodes=ranks, sync={"exchange": "gradients"}, loss={"balance_weight": 0.1}),
            corpus,
        )
        data_dir = prepare(config.data, tmp_path / "cache")
        save_run(config, data_dir, folder)
        run_all(folder)
        finals[ranks] = load_weights(folder / "weights" / "final.safetensors")
        assert (folder / "events" / f"node-{ranks - 1}.jsonl").exists()
    source = TokenSource(data_dir, config.data, config.seed)
    plain = train_alone(replace(config, nodes=1), tmp_path, source)
    assert_bitwise_equal(finals[1], plain)
    for name, tensor in plain.items():
        # The balance loss is of a rank's own batch, so it is off here. AdamW divides by the
        # root of the second moment, which lifts summation-order noise of tiny gradients.
        torch.testing.assert_close(finals[2][name], tensor, rtol=1e-4, atol=1e-5)


def test_a_node_that_finds_no_process_group_says_how_to_start_one(corpus: Path, tmp_path: Path) -> None:
    config = with_corpus(tiny(sync={"exchange": "gradients"}), corpus)
    save_run(config, tmp_path, tmp_path)
    command = [sys.executable, "-m", "spes_core.node", str(tmp_path / "run.json")]
    node = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert node.returncode == 2
    assert node.stderr.splitlines()[-1].startswith('error: sync.exchange ("gradients") needs one process group')


def last_round(events: Path) -> dict[str, object]:
    return [event for event in read_events(events) if event["kind"] == "round"][-1]
