"""The methods are what they claim to be: plain training, data-parallel SGD, FedAvg, owner-only expert training."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
import torch

from spes_core.config import RunConfig
from spes_core.errors import Diverged
from spes_core.events import read_events
from spes_core.partition import sparse
from tests.equivalence.participants import (
    RandomTokens,
    assert_bitwise_equal,
    tiny,
    train_alone,
    train_in_rounds,
)
from tests.reference.data_parallel import Batch, data_parallel_sgd

SGD = {
    "name": "sgd",
    "lr": 0.5,
    "schedule": "constant",
    "warmup_fraction": 0,
    "weight_decay": 0,
    "clip_norm": None,
}


@pytest.mark.parametrize("kind", ["sparse", "full"])
def test_one_node_with_rounds_is_plain_training_bitwise(tmp_path: Path, kind: str) -> None:
    config = tiny(nodes=1, partition={"kind": kind}, merge={"enabled": False})
    (in_rounds,) = train_in_rounds(config, tmp_path)
    assert_bitwise_equal(in_rounds, train_alone(config, tmp_path))


@pytest.mark.parametrize("nodes", [2, 4])
def test_full_partition_with_h_1_and_sgd_is_data_parallel_sgd(tmp_path: Path, nodes: int) -> None:
    config = tiny(
        nodes=nodes,
        partition={"kind": "full"},
        sync={"interval_steps": 1},
        merge={"enabled": False},
        optim=SGD,
    )
    everyone = range(nodes)
    expected = data_parallel_sgd(config, shards_of(config, nodes), lambda name: everyone)
    for weights in train_in_rounds(config, tmp_path):
        for name, tensor in weights.items():
            torch.testing.assert_close(tensor, expected[name], rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("nodes", [2, 3, 4, 8])
def test_sparse_partition_with_h_1_and_sgd_trains_each_expert_on_its_owners_gradients_only(
    tmp_path: Path, nodes: int
) -> None:
    # 3 nodes divide 4 experts unevenly; of 8 nodes two own each expert.
    sequences = 24 if nodes == 3 else 8
    config = tiny(
        nodes=nodes,
        budget_tokens=6 * sequences * 16,
        data={"global_batch_sequences": sequences},
        sync={"interval_steps": 1},
        merge={"enabled": False},
        optim=SGD,
    )
    partition = sparse(4, nodes)
    expected = data_parallel_sgd(config, shards_of(config, nodes), partition.trainers)
    for weights in train_in_rounds(config, tmp_path):
        for name, tensor in weights.items():
            torch.testing.assert_close(tensor, expected[name], rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("kind", ["sparse", "full"])
@pytest.mark.parametrize("is_merging", [True, False])
@pytest.mark.parametrize("outer", ["none", "nesterov"])
def test_all_nodes_hold_the_same_bits_after_the_last_round(
    tmp_path: Path, kind: str, is_merging: bool, outer: str
) -> None:
    config = tiny(partition={"kind": kind}, merge={"enabled": is_merging}, outer={"kind": outer})
    first, *others = train_in_rounds(config, tmp_path)
    for other in others:
        assert_bitwise_equal(first, other)


def test_the_same_seed_gives_the_same_bits_again_and_another_seed_does_not(tmp_path: Path) -> None:
    first = train_in_rounds(tiny(), tmp_path)[0]
    assert_bitwise_equal(first, train_in_rounds(tiny(), tmp_path)[0])
    other = train_in_rounds(tiny(seed=1), tmp_path)[0]
    assert not torch.equal(first["embedding"], other["embedding"])


def test_a_run_that_diverges_ends_by_name_and_not_as_done(tmp_path: Path) -> None:
    wild = tiny(optim={**SGD, "lr": 1e30}, log={"interval_steps": 1})
    with pytest.raises(Diverged, match=r"the training loss is (nan|inf) by step \d+: .* lower optim\.lr"):
        train_alone(wild, tmp_path)
    assert "end" not in {event["kind"] for event in read_events(tmp_path / "alone.jsonl")}


def test_optimizer_moments_live_through_rounds(tmp_path: Path) -> None:
    # With identical data on both nodes a mean changes nothing, so rounds would only show if they reset the moments.
    config = tiny(nodes=2, partition={"kind": "full"}, merge={"enabled": False})

    class SameForAll(RandomTokens):
        def train_batch(self, step: int, part: int, parts: int) -> Batch:
            return super().train_batch(step, 0, 1)

    source = SameForAll(config)
    assert_bitwise_equal(train_in_rounds(config, tmp_path, source)[0], train_alone(config, tmp_path, source))


def test_merging_changes_weights_and_alpha_zero_does_not(tmp_path: Path) -> None:
    without = train_in_rounds(tiny(merge={"enabled": False}), tmp_path)[0]
    assert_bitwise_equal(train_in_rounds(tiny(merge={"alpha": 0}), tmp_path)[0], without)
    merged = train_in_rounds(tiny(merge={"alpha": 0.5}), tmp_path)[0]
    assert not torch.equal(merged["layers.0.experts.0.gate_up"], without["layers.0.experts.0.gate_up"])


def test_events_tell_each_round_and_the_final_one_comes_after_the_last_step(tmp_path: Path) -> None:
    config = tiny()
    train_in_rounds(config, tmp_path)
    for node in range(config.nodes):
        events = list(read_events(tmp_path / f"node-{node}.jsonl"))
        rounds = [event for event in events if event["kind"] == "round"]
        assert [event["step"] for event in rounds] == [5, 10, 12]
        assert [event["merged"] for event in rounds] == [True, True, False]
        assert rounds[-1]["tokens"] == config.total_steps * config.tokens_per_step
        (end,) = (event for event in events if event["kind"] == "end")
        assert end["tokens"] * config.nodes == rounds[-1]["tokens"]
        assert json.dumps(events)


def shards_of(config: RunConfig, nodes: int) -> Callable[[int], Sequence[Batch]]:
    source = RandomTokens(config)

    def of_step(step: int) -> Sequence[Batch]:
        return [source.train_batch(step, node, nodes) for node in range(nodes)]

    return of_step
