"""A node of two ranks is a node of one rank: same weights after rounds, same loss, and one record for the node."""

from __future__ import annotations

import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from spes_core.address import read_address
from spes_core.config import RunConfig
from spes_core.data.batches import TokenSource
from spes_core.data.tokenize import prepare
from spes_core.events import read_events
from spes_core.model import counting
from spes_core.protocol.credentials import TOKEN_FILE
from spes_core.runfile import RunFile
from tests.equivalence.participants import global_weights, tiny, train_together
from tests.processes.runs import (
    difference,
    final_weights,
    largest_difference,
    outputs,
    run_all,
    save_run,
    start_all,
    with_corpus,
    write_corpus,
)
from workbench.recording import Recording
from workbench.results import communication, measured_memory, speed

pytestmark = pytest.mark.processes

METHODS: dict[str, dict[str, Any]] = {
    "spes": {"merge": {"alpha": 0.3}},
    "diloco": {"partition": {"kind": "full"}, "merge": {"enabled": False}, "outer": {"kind": "nesterov"}},
}


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_corpus(tmp_path_factory.mktemp("corpus ü"))


@pytest.mark.parametrize(
    ("method", "strategy", "codec", "tolerance"),
    [("spes", "fsdp", "float32", 1e-6), ("spes", "fsdp", "int8", 1e-4), ("diloco", "ddp", "float32", 1e-6)],
)
def test_two_nodes_of_two_ranks_are_two_nodes_of_one_rank(
    method: str, strategy: str, codec: str, tolerance: float, corpus: Path, tmp_path: Path
) -> None:
    config = tiny(method=method, wire={"dtype": codec}, **METHODS[method])
    check_equal(config, strategy, corpus, tmp_path, tolerance)


@pytest.mark.parametrize(
    ("strategy", "compute"),
    [
        ("fsdp", {"activation_checkpointing": "block"}),
        ("ddp", {"activation_checkpointing": "selective"}),
    ],
)
def test_what_saves_memory_changes_nothing_in_a_group(
    strategy: str, compute: dict[str, object], corpus: Path, tmp_path: Path
) -> None:
    """Frozen experts in bfloat16, activations made again, two micro-batches a rank, documents apart, all at once."""
    data = {"micro_batch_sequences": 1, "document_attention": "separate"}
    saving = {"frozen": {"dtype": "bfloat16"}, "compute": compute, "data": data}
    check_equal(tiny(method="spes", **METHODS["spes"], **saving), strategy, corpus, tmp_path)


def check_equal(config: RunConfig, strategy: str, corpus: Path, tmp_path: Path, tolerance: float = 1e-6) -> None:
    # The balance weight is large, so that a balance loss of each rank's own tokens would show (0.1 relative). Its
    # fractions are those of the whole batch, since two ranks cut a batch into other micro-batches than one does.
    loss = replace(config.loss, balance_weight=0.1, balance_fractions="whole_batch")
    config = with_corpus(replace(config, loss=loss), corpus)
    data_dir = prepare(config.data, tmp_path / "cache")
    source = TokenSource(data_dir, config.data, config.seed)
    expected = global_weights(train_together(config, tmp_path / "one rank", source)[0])
    grouped = replace(config, parallel=replace(config.parallel, ranks_per_node=2, strategy=strategy))
    save_run(grouped, data_dir, tmp_path)
    run_all(tmp_path)
    # Not bitwise: ranks sum gradients, losses and norms of half the tokens each, in another order than one rank does.
    # The worst single tensor is a little further off: AdamW divides by the root of moments that are nearly zero.
    # Under int8 a last bit more or less may send a value one step of its block further, which the next round mends.
    found = final_weights(tmp_path)
    assert difference(found, expected) < tolerance
    assert largest_difference(found, expected) < 3 * tolerance
    check_records(grouped, tmp_path, tmp_path / "one rank")


def check_records(config: RunConfig, folder: Path, one_rank: Path) -> None:
    assert sorted(path.name for path in (folder / "events").iterdir()) == [
        "node-0.jsonl",
        "node-1.jsonl",
        "server.jsonl",
    ]
    recording = Recording(folder / "events")
    for node, record in enumerate(measured_memory(recording)):
        predicted = counting.memory(config, node)
        for part in ("weights", "gradients", "moments", "sync_buffers"):
            assert record[f"{part}_bytes"] == getattr(predicted, f"{part}_bytes"), part
        # A group keeps a few sums over ranks and micro-batches besides.
        assert record["activations_bytes"] == pytest.approx(predicted.activations_bytes, rel=0.01)
    sent = communication(config, recording)
    assert sent["comm/uplink_gb"] == pytest.approx(sent["comm/uplink_predicted_gb"], rel=0.05)
    assert speed(config, recording)["perf/tokens_per_s"]
    for node, events in recording.nodes.items():
        alone = list(read_events(one_rank / f"node-{node}.jsonl"))
        for kind in ("train", "validation"):
            ours = [event for event in events if event["kind"] == kind]
            theirs = [event for event in alone if event["kind"] == kind]
            assert len(ours) == len(theirs)
            for mine, other in zip(ours, theirs, strict=True):
                assert mine.keys() == other.keys()
                for field in {"loss_nats", "loss_sum_nats", "balance_loss", "grad_norm"} & mine.keys():
                    assert mine[field] == pytest.approx(other[field], rel=1e-5)
                for field in {"step", "tokens", "part", "parts", "target_tokens", "target_bytes"} & mine.keys():
                    assert mine[field] == other[field]
        loads = [[event["expert_tokens"] for event in found if event["kind"] == "load"] for found in (events, alone)]
        assert sum(map(sum, loads[0][0])) == sum(map(sum, loads[1][0]))


def test_a_refusal_ends_all_ranks_with_the_servers_words(corpus: Path, tmp_path: Path) -> None:
    config = with_corpus(tiny(nodes=1), corpus)
    data_dir = prepare(config.data, tmp_path / "cache")
    save_run(config, data_dir, tmp_path / "other")
    server = subprocess.Popen([sys.executable, "-m", "spes_core.server", tmp_path / "other" / "run.json"])
    try:
        address = read_address("127.0.0.1:0", tmp_path / "other")
        grouped = replace(config, seed=1, parallel=replace(config.parallel, ranks_per_node=2))
        folder = tmp_path / "group"
        folder.mkdir()
        RunFile(trial="t", config=grouped, data_dir=str(data_dir), server_address=address).save(folder / "run.json")
        shutil.copy(tmp_path / "other" / TOKEN_FILE, folder)
        processes = start_all(folder)
        processes.pop("server").wait(60)  # its port is taken: it ends by itself
        ((status, output),) = outputs(processes).values()
    finally:
        server.kill()
        server.wait()
    assert status == 1, output
    said = [line for line in output.splitlines() if line.startswith("error: the server refused node 0")]
    assert len(said) == 2 and said[0] == said[1] and "seed 1, here 0" in said[0]
