"""Predictions against measurements: parameters, FLOPs, activations, memory parts, bytes of a round."""

from __future__ import annotations

from dataclasses import replace
from math import prod

import pytest
import torch
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode, sdpa_backward_flop_count, sdpa_flop_count

from spes_core.config import (
    AggregateConfig,
    DataConfig,
    FrozenConfig,
    LossConfig,
    MergeConfig,
    ModelConfig,
    OptimConfig,
    OuterConfig,
    ParallelConfig,
    PartitionConfig,
    RoundConfig,
    RunConfig,
    SyncConfig,
    WireConfig,
)
from spes_core.model import counting
from spes_core.model.decoder import Decoder
from spes_core.model.initialise import initialise
from spes_core.names import expert_of
from spes_core.sync.codec import make_codec
from spes_core.train.step import make_optimizer, train_step
from spes_core.wireformat import FORMATS

SMALL = ModelConfig(
    num_layers=2,
    d_model=32,
    num_heads=4,
    num_kv_heads=4,
    num_experts=4,
    top_k=2,
    expert_hidden=24,
    vocab_size=96,
)
SHAPES = [
    SMALL,
    replace(SMALL, qk_norm="per_head", num_kv_heads=2, head_dim=12, normalize_top_k=True),
    replace(SMALL, qk_norm="none", num_kv_heads=1, normalize_top_k=True, tie_embeddings=True, top_k=1),
    replace(SMALL, num_layers=3, num_experts=6, top_k=5, expert_hidden=40),
]
SEVEN_B = ModelConfig(
    num_layers=16,
    d_model=2048,
    num_heads=16,
    num_kv_heads=16,
    num_experts=32,
    top_k=4,
    expert_hidden=2048,
    vocab_size=151_665,
)


def make_decoder(model: ModelConfig, trained: list[int]) -> Decoder:
    decoder = Decoder(model, trained)
    initialise(decoder, 0)
    return decoder


def make_batch(model: ModelConfig, sequences: int, length: int) -> tuple[Tensor, Tensor]:
    tokens_BT = torch.randint(model.vocab_size, (sequences, length + 1), generator=torch.Generator().manual_seed(0))
    return tokens_BT[:, :-1].contiguous(), tokens_BT[:, 1:].contiguous()


def test_published_shapes_have_the_published_sizes() -> None:
    counts = counting.parameter_counts(SEVEN_B, range(8))
    assert [round(value / 1e9, 2) for value in (counts.total, counts.active, counts.trained)] == [
        7.33,
        1.70,
        2.50,
    ]
    run = RunConfig(model=SEVEN_B, nodes=4)
    assert round(counting.round_bytes(run, 0, False).uplink_payload_bytes / 1e9, 1) == 10.0
    full = replace(run, partition=PartitionConfig(kind="full"))
    assert round(counting.round_bytes(full, 0, False).uplink_payload_bytes / 1e9, 1) == 29.3


@pytest.mark.parametrize("model", SHAPES)
@pytest.mark.parametrize("trained", [[], [1, 2], [0, 1, 2, 3]])
def test_parameter_counts_are_those_of_the_decoder(model: ModelConfig, trained: list[int]) -> None:
    decoder, counts = make_decoder(model, trained), counting.parameter_counts(model, trained)
    assert counts.total == sum(item.numel() for item in decoder.parameters())
    assert counts.trained == sum(item.numel() for item in decoder.parameters() if item.requires_grad)
    assert counts.active == counts.total - (model.num_experts - model.top_k) * counts.per_expert


def _attention_forward(
    q: tuple[int, ...],
    k: tuple[int, ...],
    v: tuple[int, ...],
    *args: object,
    out_shape: object = None,
    **kwargs: object,
) -> int:
    return int(sdpa_flop_count(q, (*k[:1], q[1], *k[2:]), (*v[:1], q[1], *v[2:])))


def _attention_backward(
    grad: tuple[int, ...],
    q: tuple[int, ...],
    k: tuple[int, ...],
    v: tuple[int, ...],
    *args: object,
    out_shape: object = None,
    **kwargs: object,
) -> int:
    return int(sdpa_backward_flop_count(grad, q, (*k[:1], q[1], *k[2:]), (*v[:1], q[1], *v[2:])))


# torch's counter knows the attention of GPUs only; the same formulas hold for the kernel of CPUs
CPU_ATTENTION = {
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu: _attention_forward,
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward: _attention_backward,
}


@pytest.mark.parametrize("model", SHAPES)
@pytest.mark.parametrize("trained", [[1], [0, 1, 2, 3, 4, 5]])
def test_flops_are_within_two_percent_of_the_flop_counter(model: ModelConfig, trained: list[int]) -> None:
    trained = [expert for expert in trained if expert < model.num_experts]
    decoder, (sequences, length) = make_decoder(model, trained), (8, 32)
    with FlopCounterMode(display=False, custom_mapping=CPU_ATTENTION) as forward:
        output = decoder(*make_batch(model, sequences, length), LossConfig())
    with FlopCounterMode(display=False, custom_mapping=CPU_ATTENTION) as backward:
        output.loss.backward()
    # the loss makes its gradients in the forward pass: two of its three products belong to backward
    early = 2 * 2 * model.vocab_size * model.d_model * sequences * length
    # the counter sees this routing, the prediction an even one
    even = sequences * length * model.top_k * len(trained) / model.num_experts * model.num_layers
    routed = int(output.expert_tokens_LE[:, trained].sum())
    uneven = (routed - even) * 2 * 3 * model.d_model * model.expert_hidden
    predicted = counting.flops_per_token(model, trained, length)
    tokens = sequences * length
    assert predicted.forward * tokens == pytest.approx(forward.get_total_flops() - early, rel=0.02)
    measured_backward = backward.get_total_flops() + early - uneven
    assert (predicted.backward_inputs + predicted.backward_weights) * tokens == pytest.approx(
        measured_backward, rel=0.02
    )
    full = counting.flops_per_token(model, range(model.num_experts), length)
    assert predicted.total + predicted.skipped_weights == pytest.approx(full.total)


def saved_bytes(decoder: Decoder, batch: tuple[Tensor, Tensor]) -> int:
    """Bytes of distinct storages that autograd saves in one forward pass, weights and inputs left out."""
    known = {tensor.untyped_storage().data_ptr() for tensor in (*decoder.parameters(), *decoder.buffers(), *batch)}
    saved: dict[int, Tensor] = {}

    def pack(tensor: Tensor) -> Tensor:
        saved[tensor.untyped_storage().data_ptr()] = tensor
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        output = decoder(*batch, LossConfig())
    assert output.loss.requires_grad  # the graph is alive, so no storage was freed and used again
    return sum(tensor.untyped_storage().nbytes() for pointer, tensor in saved.items() if pointer not in known)


@pytest.mark.parametrize("model", SHAPES)
@pytest.mark.parametrize(("sequences", "length"), [(1, 16), (4, 33), (16, 8)])
@pytest.mark.parametrize("trained", [[2], [0, 1, 2, 3]])
def test_activations_are_predicted_to_the_byte(
    model: ModelConfig, sequences: int, length: int, trained: list[int]
) -> None:
    decoder, batch = make_decoder(model, trained), make_batch(model, sequences, length)
    assert counting.activation_bytes(model, sequences, length) == saved_bytes(decoder, batch)


@pytest.mark.parametrize("method", ["spes", "dilico", "sgd"])
@pytest.mark.parametrize("node", [0, 2])
def test_weights_gradients_and_moments_are_predicted_to_the_byte(method: str, node: int) -> None:
    config = RunConfig(
        model=SMALL,
        nodes=3,
        partition=PartitionConfig(kind="full" if method == "dilico" else "sparse"),
        optim=OptimConfig(name="sgd" if method == "sgd" else "adamw"),
        data=DataConfig(sequence_length=8, global_batch_sequences=6),
    )
    decoder = make_decoder(SMALL, list(config.make_partition().experts_by_node[node]))
    optimizer = make_optimizer(decoder, config.optim)
    train_step(decoder, optimizer, [make_batch(SMALL, 2, 8)], config.loss, 1.0, 1e-3)
    parts = counting.memory(config, node)
    assert parts.weights_bytes == sum(item.nbytes for item in decoder.parameters())
    assert parts.gradients_bytes == sum(item.grad.nbytes for item in decoder.parameters() if item.grad is not None)
    moments = [
        value for state in optimizer.state.values() for value in state.values() if value is not None and value.dim()
    ]
    assert parts.moments_bytes == sum(value.nbytes for value in moments)
    assert parts.activations_bytes == counting.activation_bytes(SMALL, 2, 8)
    assert parts.sync_buffers_bytes == min(config.wire.chunk_bytes, 4 * 96 * 32)
    assert parts.total_bytes == sum(getattr(parts, name) for name in parts.__dataclass_fields__)


@pytest.mark.parametrize("ranks", [1, 2, 3, 5])
def test_full_sharding_divides_rows_of_each_matrix_rounded_up_or_experts_where_they_do_not_divide(ranks: int) -> None:
    config = RunConfig(
        model=SMALL,
        nodes=ranks,
        sync=SyncConfig(exchange="gradients"),
        data=DataConfig(global_batch_sequences=30),
    )
    parameters = list(make_decoder(SMALL, [0, 1, 2, 3]).parameters())
    cut = [int(item.dim() == 3 and item.shape[1] % ranks == 0) for item in parameters]
    largest_shard = sum(item.chunk(ranks, dim=dim)[0].nbytes for item, dim in zip(parameters, cut, strict=True))
    parts = counting.memory(config, 0)
    assert (parts.weights_bytes, parts.gradients_bytes, parts.moments_bytes) == (
        largest_shard,
        largest_shard,
        2 * largest_shard,
    )
    assert parts.sync_buffers_bytes == 0


def encoded_bytes(wire: str, num_elements: int) -> int:
    """From the definition: blocks of 128 values, each with a scale of two bytes, and a short one at the end."""
    bits = {"float32": 32, "bfloat16": 16, "int8": 8, "int4": 4}[wire]
    blocks, rest = divmod(num_elements, 128)
    scale_bytes = 2 if bits < 16 else 0
    return blocks * (scale_bytes + 16 * bits) + (scale_bytes + (rest * bits + 7) // 8 if rest else 0)


def numbers(config: RunConfig, node: int, merged: bool = False) -> tuple[int, int]:
    found = counting.round_bytes(config, node, merged)
    return found.uplink_payload_bytes, found.downlink_payload_bytes


def shared_and_expert_bytes(model: ModelConfig, wire: str = "float32") -> tuple[int, int]:
    shapes = counting.tensor_shapes(model).items()
    sizes = {name: encoded_bytes(wire, prod(shape)) for name, shape in shapes}
    experts = sum(size for name, size in sizes.items() if expert_of(name) is not None)
    return sum(sizes.values()) - experts, experts


def test_a_sparse_node_sends_its_share_and_receives_the_rest() -> None:
    shared, experts = shared_and_expert_bytes(SMALL)
    config = RunConfig(model=SMALL, nodes=4)
    assert numbers(config, 1) == (shared + experts // 4, shared + experts * 3 // 4)
    assert numbers(config, 1, merged=True) == (shared + experts // 4, shared + experts)


@pytest.mark.parametrize("wire", ["float32", "bfloat16", "int8", "int4"])
@pytest.mark.parametrize("model", [SMALL, replace(SMALL, d_model=36, expert_hidden=12, vocab_size=97)])
def test_bytes_follow_the_codec_tensor_by_tensor(model: ModelConfig, wire: str) -> None:
    shared, experts = shared_and_expert_bytes(model, wire)
    config = RunConfig(model=model, nodes=4, wire=WireConfig(dtype=wire))  # type: ignore[arg-type]
    assert numbers(config, 2) == (shared + experts // 4, shared + experts * 3 // 4)
    assert numbers(config, 2, merged=True) == (shared + experts // 4, shared + experts)


def test_a_round_of_7b_on_4_nodes_moves_what_was_promised() -> None:
    config = RunConfig(model=SEVEN_B, nodes=4)
    up, down = numbers(config, 0)
    # The released design sends everything back to everyone; its paper says 9.8 + 28.6 = 38.4 GB for its own 7B.
    assert (up + 4 * counting.parameter_counts(SEVEN_B, ()).total) / 1e9 == pytest.approx(38.4, rel=0.03)
    moved = {
        wire: sum(numbers(replace(config, wire=WireConfig(dtype=wire)), node=0)) / 1e9  # type: ignore[arg-type]
        for wire in ("float32", "bfloat16", "int8", "int4")
    }
    assert moved["float32"] == (up + down) / 1e9
    assert moved["bfloat16"] <= 16.5
    assert moved["int8"] <= 8.4
    assert moved["int4"] <= 4.3


@pytest.mark.parametrize(("wire", "copies"), [("float32", 0), ("bfloat16", 1), ("int8", 2), ("int4", 2)])
def test_changes_need_copies_of_what_a_node_trains(wire: str, copies: int) -> None:
    config = RunConfig(model=SMALL, nodes=4, wire=WireConfig(dtype=wire))  # type: ignore[arg-type]
    trained, embedding = counting.parameter_counts(SMALL, (1,)).trained, 96 * 32
    chunk_and_encoded = 4 * embedding + (encoded_bytes(wire, embedding) if copies else 0)
    assert counting.memory(config, 1).sync_buffers_bytes == 4 * copies * trained + chunk_and_encoded
    grouped = replace(config, parallel=ParallelConfig(ranks_per_node=2))
    assert counting.sync_buffers_bytes(grouped, 1) - counting.sync_buffers_bytes(config, 1) == 4 * embedding


def test_rounded_frozen_experts_need_their_exact_values_where_a_round_may_not_send_them() -> None:
    config = RunConfig(model=SMALL, nodes=4, frozen=FrozenConfig(dtype="bfloat16"))
    frozen, staged, chunk = 3 * counting.parameter_counts(SMALL, ()).per_expert, 2 * 24 * 32, 96 * 32
    assert counting.sync_buffers_bytes(config, 1) == 4 * (staged + chunk)
    for dropping in (
        replace(config, round=RoundConfig(quorum=0.5)),
        replace(config, aggregate=AggregateConfig(quarantine_factor=3.0)),
    ):
        assert counting.sync_buffers_bytes(dropping, 1) == 4 * (staged + chunk + frozen)
    rounded, exact = (
        replace(config, wire=WireConfig(dtype="int8"), frozen=FrozenConfig(dtype=dtype))  # type: ignore[arg-type]
        for dtype in ("bfloat16", "float32")
    )
    more = counting.sync_buffers_bytes(rounded, 1) - counting.sync_buffers_bytes(exact, 1)
    assert more == 4 * (frozen + staged)


def test_every_codec_is_counted_as_it_is() -> None:
    codecs = {name: make_codec(name) for name in FORMATS}
    assert tuple(name for name, codec in codecs.items() if codec.is_delta) == counting.DELTA_CODECS
    assert tuple(name for name, codec in codecs.items() if codec.has_feedback) == counting.FEEDBACK_CODECS


def test_an_expert_with_two_owners_comes_back_to_both() -> None:
    shared, experts = shared_and_expert_bytes(SMALL)
    config = RunConfig(model=SMALL, nodes=5)  # 4 experts on 5 nodes: one expert has two owners
    owners = [len(config.make_partition().owners(expert)) for expert in range(4)]
    for node, (expert,) in enumerate(config.make_partition().experts_by_node):
        own = experts // 4 if owners[expert] == 1 else 0
        assert numbers(config, node) == (shared + experts // 4, shared + experts - own)


def test_full_partition_and_outer_optimizer_move_everything_both_ways() -> None:
    shared, experts = shared_and_expert_bytes(SMALL)
    full = RunConfig(model=SMALL, nodes=2, partition=PartitionConfig(kind="full"))
    assert numbers(full, 0) == (shared + experts, shared + experts)
    outer = RunConfig(model=SMALL, nodes=2, outer=OuterConfig(kind="nesterov"))
    assert numbers(outer, 0) == (shared + experts // 2, shared + experts)


def test_one_node_downloads_only_what_merging_or_an_outer_optimizer_changed() -> None:
    shared, experts = shared_and_expert_bytes(SMALL)
    alone = RunConfig(model=SMALL, nodes=1)
    assert numbers(alone, 0) == (shared + experts, 0)
    assert numbers(alone, 0, merged=True) == (shared + experts, experts)
    assert numbers(replace(alone, outer=OuterConfig(kind="sgd")), 0) == (shared + experts, shared + experts)


def test_a_run_is_the_sum_of_its_rounds_with_merges_and_a_last_partial_round() -> None:
    config = RunConfig(
        model=SMALL,
        nodes=2,
        budget_tokens=25 * 64,
        data=DataConfig(sequence_length=8, global_batch_sequences=8),
        sync=SyncConfig(interval_steps=10),
        merge=MergeConfig(num_neighbours=1, interval_steps=10, until_step=15),
    )
    shared, experts = shared_and_expert_bytes(SMALL)
    run = counting.run_bytes(config, 0)  # rounds after steps 10 (merges), 20, 25
    assert run.uplink_payload_bytes == 3 * (shared + experts // 2)
    assert run.downlink_payload_bytes == 3 * shared + experts + 2 * experts // 2


def test_a_run_without_exchange_sends_nothing() -> None:
    config = RunConfig(model=SMALL, nodes=2, sync=SyncConfig(exchange="none"))
    nothing = counting.WireBytes(uplink_payload_bytes=0, downlink_payload_bytes=0)
    assert counting.run_bytes(config, 0) == nothing


def test_a_process_group_moves_every_parameter_in_each_ring_collective_of_each_step() -> None:
    config = RunConfig(model=SMALL, nodes=4, sync=SyncConfig(exchange="gradients"))
    shared, experts = shared_and_expert_bytes(SMALL)
    outside_layers = 4 * (2 * SMALL.vocab_size * SMALL.d_model + SMALL.d_model)
    # All-gathers forward and backward (without what stays gathered), one reduce-scatter; each sends 3 of 4 parts.
    per_step = (3 * (shared + experts) - outside_layers) * 3 // 4
    sent = per_step * config.total_steps
    assert counting.run_bytes(config, 0) == counting.WireBytes(uplink_payload_bytes=sent, downlink_payload_bytes=sent)
