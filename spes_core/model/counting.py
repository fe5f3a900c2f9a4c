"""What a model costs, by arithmetic: tensor shapes, parameters, FLOPs, memory parts, bytes on the wire. No torch.

Every figure has a measured counterpart in events, and reports show the two side by side.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from math import ceil, prod

from spes_core.config import ComputeConfig, ModelConfig, OptimConfig, RunConfig
from spes_core.names import expert_of, expert_tensor, layer_of, parse_expert
from spes_core.partition import downloads
from spes_core.schedules import merge_steps, round_steps
from spes_core.sharding import deal
from spes_core.wireformat import FORMATS

FLOAT32_BYTES = 4
BFLOAT16_BYTES = 2
INT64_BYTES = 8


def tensor_shapes(model: ModelConfig) -> dict[str, tuple[int, ...]]:
    """The shape of every tensor under its canonical name, in the order of the wire (spes_core.names)."""
    shapes: dict[str, tuple[int, ...]] = {"embedding": (model.vocab_size, model.d_model)}
    for layer in range(model.num_layers):
        shapes |= _layer_shapes(model, layer)
    shapes["final_norm"] = (model.d_model,)
    if not model.tie_embeddings:
        shapes["unembedding"] = (model.vocab_size, model.d_model)
    return shapes


def tensors_by_shard(config: RunConfig) -> tuple[tuple[str, ...], ...]:
    """The names of each server's tensors (server.shards), in canonical order; see `sharding.deal`."""
    all_changed = config.outer.kind != "none"
    return deal(tensor_shapes(config.model), config.server.shards, config.make_partition(), all_changed=all_changed)


def _layer_shapes(model: ModelConfig, layer: int) -> dict[str, tuple[int, ...]]:
    head, d_model = model.resolved_head_dim, model.d_model
    query_width, kv_width = model.num_heads * head, model.num_kv_heads * head
    shared: dict[str, tuple[int, ...]] = {
        "attention_norm": (d_model,),
        "attention.q": (query_width, d_model),
        "attention.k": (kv_width, d_model),
        "attention.v": (kv_width, d_model),
        "attention.o": (d_model, query_width),
    }
    if model.qk_norm != "none":
        per_head = model.qk_norm == "per_head"
        shared["attention.q_norm"] = (head if per_head else query_width,)
        shared["attention.k_norm"] = (head if per_head else kv_width,)
    shared |= {"moe_norm": (d_model,), "router": (model.num_experts, d_model)}
    shapes = {f"layers.{layer}.{name}": shape for name, shape in shared.items()}
    for expert in range(model.num_experts):
        shapes[expert_tensor(layer, expert, "gate_up")] = (2 * model.expert_hidden, d_model)
        shapes[expert_tensor(layer, expert, "down")] = (d_model, model.expert_hidden)
    return shapes


@dataclass(frozen=True, kw_only=True)
class ParameterCounts:
    """Numbers of parameters."""

    total: int
    """All of the model, trained or frozen."""
    active: int
    """Those that one token meets: shared ones and top_k experts in each layer."""
    trained: int
    """Shared ones and the trained experts, in all layers."""
    shared: int
    """Embeddings, attention, norms, routers."""
    per_expert: int
    """One expert index, in all layers."""


def parameter_counts(model: ModelConfig, trained_experts: Collection[int]) -> ParameterCounts:
    """Count the parameters of a node that trains ``trained_experts`` (indices)."""
    sizes = {name: prod(shape) for name, shape in tensor_shapes(model).items()}
    shared = sum(size for name, size in sizes.items() if expert_of(name) is None)
    per_expert = sum(size for name, size in sizes.items() if expert_of(name) == 0)
    return ParameterCounts(
        total=shared + model.num_experts * per_expert,
        active=shared + model.top_k * per_expert,
        trained=shared + len(set(trained_experts)) * per_expert,
        shared=shared,
        per_expert=per_expert,
    )


@dataclass(frozen=True, kw_only=True)
class FlopCounts:
    """Floating-point operations of one token of training; a multiply-add is two."""

    forward: float
    backward_inputs: float
    """Products that carry the gradient down to the inputs, attention's own backward included."""
    backward_weights: float
    """Products that give the gradients of the trained weights."""
    skipped_weights: float
    """Products that a full-model step would take for the weights of the frozen experts, and this one does not."""

    @property
    def total(self) -> float:
        """Forward and backward."""
        return self.forward + self.backward_inputs + self.backward_weights


def flops_per_token(model: ModelConfig, trained_experts: Collection[int], sequence_length: int) -> FlopCounts:
    """Count the matrix products of one token of training, with tokens spread evenly over experts.

    Attention is counted over the whole sequence_length × sequence_length square, as FLOP counters do, though a
    causal kernel skips up to half; its backward has five such products against two forward, as in FlashAttention
    (arXiv 2205.14135). Elementwise work, norms, the embedding look-up and the optimizer are not counted.
    """
    head, d_model = model.resolved_head_dim, model.d_model
    projections = 2 * model.num_heads * head * d_model + 2 * model.num_kv_heads * head * d_model
    dense = model.num_layers * (projections + model.num_experts * d_model) + model.vocab_size * d_model
    experts = model.num_layers * model.top_k * 3 * d_model * model.expert_hidden
    square = model.num_layers * model.num_heads * head * sequence_length
    trained_share = len(set(trained_experts)) / model.num_experts
    return FlopCounts(
        forward=2 * (dense + experts) + 2 * 2 * square,
        backward_inputs=2 * (dense + experts) + 5 * 2 * square,
        backward_weights=2 * (dense + experts * trained_share),
        skipped_weights=2 * experts * (1 - trained_share),
    )


@dataclass(frozen=True, kw_only=True)
class MemoryParts:
    """Bytes of one training process, by purpose."""

    weights_bytes: int
    """All weights, trained and frozen."""
    gradients_bytes: int
    """Gradients of the trained weights."""
    moments_bytes: int
    """Optimizer moments of the trained weights."""
    activations_bytes: int
    """What the forward pass of one micro-batch keeps for the backward pass."""
    sync_buffers_bytes: int
    """What rounds keep of the global weights, and what is under way (`sync_buffers_bytes`); 0 without rounds."""

    @property
    def total_bytes(self) -> int:
        """Sum of the parts."""
        return (
            self.weights_bytes
            + self.gradients_bytes
            + self.moments_bytes
            + self.activations_bytes
            + self.sync_buffers_bytes
        )


def memory(config: RunConfig, node: int) -> MemoryParts:
    """Predict the memory of one process of ``node`` (with sync.exchange "gradients": of one rank).

    In a torchrun group each rank holds a part of every parameter, rounded up (parallel.strategy "fsdp"), so the figure
    is that of rank 0, which holds the most.
    """
    model = config.model
    if config.sync.exchange == "gradients":
        node //= config.parallel.ranks_per_node
    ranks = config.group_size if config.parallel.strategy == "fsdp" else 1
    num_trained = len(config.make_partition().experts_by_node[node])
    trained_elements = _shard_elements(model, ranks, num_trained)
    frozen_elements = _bank_shard_elements(model, ranks, model.num_experts - num_trained)
    moments = FLOAT32_BYTES * trained_elements * _MOMENTS[config.optim.name]
    if ranks == 1:
        shapes = tensor_shapes(model)
        moments = moments_bytes(config.optim, {name: shapes[name] for name in trained_tensors(config, node)})
    frozen_width = BFLOAT16_BYTES if config.frozen.dtype == "bfloat16" else FLOAT32_BYTES
    sequences, length = config.micro_batch_sequences, config.data.sequence_length
    return MemoryParts(
        weights_bytes=FLOAT32_BYTES * trained_elements + frozen_width * frozen_elements,
        gradients_bytes=FLOAT32_BYTES * trained_elements,
        moments_bytes=moments,
        activations_bytes=activation_bytes(model, sequences, length, config.compute) + _mask_bytes(config),
        sync_buffers_bytes=sync_buffers_bytes(config, node),
    )


_MOMENTS = {"adamw": 2, "adamw_8bit": 2, "muon": 2, "sgd": 0}
"""Moments of one element, in float32 unless `moments_bytes` says otherwise."""
_BLOCK_8BIT, _SMALLEST_8BIT, _LOOKUP_8BIT = 256, 4096, 256


def moments_bytes(optim: OptimConfig, trained: Mapping[str, tuple[int, ...]]) -> int:
    """Bytes of the optimizer's moments of the trained tensors; the experts of a layer are one tensor per matrix.

    8 bits: one byte a value, a float32 scale for each 256 of them and a look-up table of 256; tensors that are small
    or no multiple of 256 stay float32 (torchao). Muon keeps one moment of what it takes.
    """
    elements: dict[str, int] = {}
    for name, shape in trained.items():
        parsed = parse_expert(name)
        parameter = name if parsed is None else f"layers.{parsed[0]}.experts.{parsed[2]}"
        elements[parameter] = elements.get(parameter, 0) + prod(shape)
    total = 0
    for name, size in elements.items():
        moments = 1 if optim.name == "muon" and uses_muon(name) else _MOMENTS[optim.name]
        bytes_each = FLOAT32_BYTES * size
        if optim.name == "adamw_8bit" and size >= _SMALLEST_8BIT and size % _BLOCK_8BIT == 0:
            bytes_each = size + FLOAT32_BYTES * (size // _BLOCK_8BIT + _LOOKUP_8BIT)
        total += moments * bytes_each
    return total


def uses_muon(name: str) -> bool:
    """Whether Muon takes this parameter: matrices of attention and experts; AdamW has embeddings, routers and norms."""
    return layer_of(name) is not None and (".experts." in name or name.rsplit(".", 1)[-1] in ("q", "k", "v", "o"))


DELTA_CODECS = ("bfloat16", "int8", "int4")
"""Values of wire.dtype that send changes: a node keeps, in float32, the global values that they change."""
FEEDBACK_CODECS = ("int8", "int4")
"""Those whose sender also keeps, in float32, what was lost of each value it trains."""


def keeps_rounded(config: RunConfig) -> bool:
    """Whether a node keeps the exact values behind weights that it holds rounded (frozen.dtype).

    It must where changes are sent, which count from the exact value, and where a round may leave a tensor out.
    """
    in_every_round = config.round.quorum == 1.0 and config.aggregate.quarantine_factor is None
    return config.wire.dtype in DELTA_CODECS or not in_every_round


def sync_buffers_bytes(config: RunConfig, node: int) -> int:
    """Host memory that rounds take beside the model in the process of ``node`` that talks to the server.

    Kept between rounds: a float32 copy of what the node trains, for a codec of changes, and another with error
    feedback; one of the frozen experts where they are rounded (`keeps_rounded`). For a round: the largest trained
    tensor as encoded changes, a chunk, and a float32 buffer for the largest tensor that lies in no float32 memory of
    the process: of all where ranks divide the model, of frozen experts where they are rounded (on a GPU of all, which
    is not predicted here).
    """
    if config.sync.exchange != "rounds":
        return 0
    sizes = {name: prod(shape) for name, shape in tensor_shapes(config.model).items()}
    trained = [sizes[name] for name in trained_tensors(config, node)]
    is_rounded = config.frozen.dtype != "float32"
    rounded = [sizes[name] for name in sizes.keys() - set(trained_tensors(config, node))] if is_rounded else []
    largest, wire = max(sizes.values()), config.wire.dtype
    kept = sum(trained) * ((wire in DELTA_CODECS) + (wire in FEEDBACK_CODECS))
    kept += sum(rounded) if keeps_rounded(config) else 0
    encoded_bytes = FORMATS[wire].encoded_bytes(max(trained)) if wire in DELTA_CODECS else 0
    staged = largest if config.group_size > 1 else max(rounded, default=0)
    chunk_bytes = min(config.wire.chunk_bytes, FLOAT32_BYTES * largest)
    return FLOAT32_BYTES * (kept + staged) + encoded_bytes + chunk_bytes


def _shard_elements(model: ModelConfig, ranks: int, num_trained: int) -> int:
    """Trained parameters on rank 0 when each is cut along its first dimension, and banks as `_bank_shard_elements`."""
    shapes = tensor_shapes(model).items()
    shared = sum(ceil(shape[0] / ranks) * prod(shape[1:]) for name, shape in shapes if expert_of(name) is None)
    return shared + _bank_shard_elements(model, ranks, num_trained)


def _bank_shard_elements(model: ModelConfig, ranks: int, num_experts: int) -> int:
    """Parameters on rank 0 of the banks of ``num_experts`` experts in all layers.

    They are cut by rows, or by experts where the rows do not divide (`train.parallel`).
    """
    elements = 0
    for name, shape in tensor_shapes(model).items():
        if expert_of(name) == 0:
            by_rows = shape[0] % ranks == 0
            elements += num_experts * prod(shape) // ranks if by_rows else ceil(num_experts / ranks) * prod(shape)
    return elements


def activation_bytes(
    model: ModelConfig, sequences: int, sequence_length: int, compute: ComputeConfig | None = None
) -> int:
    """Bytes that autograd keeps at the end of a forward pass: exact, whatever the routing, since no token is dropped.

    Counted are the tensors that attention, norms, router, experts and loss save, each storage once; not counted
    are weights, the input tokens, the rotation tables, and the gradient of the unembedding, which the loss makes
    during the forward pass and which is counted with the gradients. Exact for eager float32 on a CPU, but for the few
    numbers that micro-batches and ranks share; compiled or bfloat16 layers keep what their kernels save, for which
    this is an estimate. With activation checkpointing the backward pass adds what it makes again, one layer at a time:
    `recomputed_bytes`.
    """
    compute = compute or ComputeConfig()
    tokens = sequences * sequence_length
    width = BFLOAT16_BYTES if compute.precision == "bfloat16" else FLOAT32_BYTES
    head = tokens * (2 * width * model.d_model + FLOAT32_BYTES)  # the final norm's input and scale, its gradient
    if compute.activation_checkpointing == "block":
        return model.num_layers * tokens * width * model.d_model + head
    keeps_hidden = compute.activation_checkpointing == "none"
    return model.num_layers * _layer_activation_bytes(model, tokens, width, keeps_hidden) + head


def _mask_bytes(config: RunConfig) -> int:
    """The mask that keeps documents apart, one for all layers: each layer saves it, or keeps it to be made again."""
    width = BFLOAT16_BYTES if config.compute.precision == "bfloat16" else FLOAT32_BYTES
    is_separate = config.data.document_attention == "separate"
    return config.micro_batch_sequences * config.data.sequence_length**2 * width if is_separate else 0


def recomputed_bytes(model: ModelConfig, sequences: int, sequence_length: int, compute: ComputeConfig) -> int:
    """Bytes that the backward pass makes again and holds at one time, one layer's; beside `activation_bytes`."""
    tokens = sequences * sequence_length
    width = BFLOAT16_BYTES if compute.precision == "bfloat16" else FLOAT32_BYTES
    if compute.activation_checkpointing == "block":
        return _layer_activation_bytes(model, tokens, width, True) - tokens * width * model.d_model
    return 0 if compute.activation_checkpointing == "none" else tokens * width * 2 * model.top_k * model.expert_hidden


def _layer_activation_bytes(model: ModelConfig, tokens: int, width: int, keeps_hidden: bool) -> int:
    """Bytes that one layer keeps of ``tokens``, with ``width`` bytes for a value of the computation's type."""
    head, d_model = model.resolved_head_dim, model.d_model
    query_width, kv_width = model.num_heads * head, model.num_kv_heads * head
    values = 2 * 2 * d_model  # input and output of both norms
    values += 2 * query_width + 2 * kv_width  # rotated q, k; v; output of attention
    exact = 2 + model.num_heads  # scales of both norms, log-partitions of attention
    if model.qk_norm != "none":
        values += query_width + kv_width  # projections before their norm
        exact += model.num_heads + model.num_kv_heads if model.qk_norm == "per_head" else 2
    exact += model.num_experts + 1 + model.top_k  # router: probabilities, log-partition, weights
    values += model.top_k * 2 * model.expert_hidden if keeps_hidden else 0  # gate and up before the activation
    indices = 2 * model.top_k  # chosen experts, order of the slots
    per_token = width * values + FLOAT32_BYTES * exact + INT64_BYTES * indices
    return tokens * per_token + model.num_experts * INT64_BYTES


@dataclass(frozen=True, kw_only=True)
class WireBytes:
    """Payload that one node sends and receives; framing is not counted."""

    uplink_payload_bytes: int
    downlink_payload_bytes: int


def round_bytes(config: RunConfig, node: int, merged: bool) -> WireBytes:
    """Payload of one round in which all nodes take part (design, section 6), as wire.dtype encodes it.

    Up goes what the node trains, down comes what it lacks (`partition.downloads`).
    """
    if config.sync.exchange != "rounds":
        return WireBytes(uplink_payload_bytes=0, downlink_payload_bytes=0)
    partition, has_stepped = config.make_partition(), config.outer.kind != "none"
    uplink = downlink = 0
    for name, shape in tensor_shapes(config.model).items():
        tensor_bytes = FORMATS[config.wire.dtype].encoded_bytes(prod(shape))
        uplink += tensor_bytes if partition.trains(node, name) else 0
        lacks = downloads(partition, node, name, experts_changed=merged, all_changed=has_stepped)
        downlink += tensor_bytes if lacks else 0
    return WireBytes(uplink_payload_bytes=uplink, downlink_payload_bytes=downlink)


def collective_bytes_per_step(model: ModelConfig, ranks: int) -> int:
    """Bytes that one rank sends, and receives, in one FSDP2 step with ring collectives.

    Forward all-gathers every parameter, backward gathers the layers again (what is outside them stays gathered) and
    reduce-scatters every gradient; a ring moves (R − 1)/R of a tensor per rank in each.
    """
    total = FLOAT32_BYTES * sum(map(prod, tensor_shapes(model).values()))
    return (2 * total + layer_bytes(model)) * (ranks - 1) // ranks


def run_bytes(config: RunConfig, node: int) -> WireBytes:
    """Payload of a whole run: all rounds, or the collectives of all steps."""
    if config.sync.exchange == "gradients":
        sent = config.total_steps * collective_bytes_per_step(config.model, config.world_size)
        return WireBytes(uplink_payload_bytes=sent, downlink_payload_bytes=sent)
    merged, rounds = len(merge_steps(config)), len(round_steps(config))
    plain, merging = round_bytes(config, node, False), round_bytes(config, node, True)
    return WireBytes(
        uplink_payload_bytes=rounds * plain.uplink_payload_bytes,
        downlink_payload_bytes=(rounds - merged) * plain.downlink_payload_bytes
        + merged * merging.downlink_payload_bytes,
    )


def trained_tensors(config: RunConfig, node: int) -> list[str]:
    """Names of the tensors that ``node`` trains, in canonical order."""
    partition = config.make_partition()
    return [name for name in tensor_shapes(config.model) if partition.trains(node, name)]


def layer_bytes(model: ModelConfig) -> int:
    """Bytes of the tensors inside the layers (all but embeddings and the final norm)."""
    shapes = tensor_shapes(model)
    return FLOAT32_BYTES * sum(prod(shape) for name, shape in shapes.items() if layer_of(name) is not None)
