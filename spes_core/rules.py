"""The rules that a RunConfig must satisfy, beyond the type of each setting."""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Iterator
from dataclasses import replace
from operator import attrgetter
from typing import TYPE_CHECKING

from spes_core.errors import Problem
from spes_core.mixrules import mixture_problems
from spes_core.schedules import checkpoint_steps

if TYPE_CHECKING:
    from spes_core.config import DataConfig, RunConfig

AT_LEAST_ONE = (
    "nodes",
    "budget_tokens",
    "model.num_layers",
    "model.d_model",
    "model.num_heads",
    "model.num_kv_heads",
    "model.num_experts",
    "model.top_k",
    "model.expert_hidden",
    "model.vocab_size",
    "data.sequence_length",
    "data.global_batch_sequences",
    "sync.interval_steps",
    "merge.num_neighbours",
    "merge.interval_steps",
    "server.shards",
    "parallel.ranks_per_node",
    "validation.interval_tokens",
    "validation.max_sequences",
    "log.interval_steps",
)
FRACTIONS = (
    "optim.warmup_fraction",
    "optim.final_lr_fraction",
    "merge.alpha",
    "outer.momentum",
)
BELOW_ONE = ("optim.beta1", "optim.beta2", "link.loss")
POSITIVE = (
    "optim.lr",
    "optim.eps",
    "outer.lr",
    "round.timeout_s",
    "round.heartbeat_s",
    "round.retry_s",
    "aggregate.clip_factor",
    "model.rope_theta",
    "model.norm_eps",
)
POSITIVE_OR_NULL = (
    "optim.clip_norm",
    "round.local_time_s",
    "aggregate.quarantine_factor",
    "link.uplink_mbps",
    "link.downlink_mbps",
)
NOT_NEGATIVE = (
    "optim.weight_decay",
    "loss.z_weight",
    "loss.balance_weight",
    "loss.router_z_weight",
    "model.init_std",
    "merge.until_step",
    "checkpoint.interval_rounds",
    "checkpoint.interval_steps",
    "round.reassign_after",
    "link.rtt_ms",
    "faults.scale",
    "faults.from_round",
    "seed",
)


MOST_TRAINED_IDS = 1 << 20
"""Largest vocabulary that is trained: the library reserves memory for as many as are asked for."""

_DOTTED = re.compile(r"[a-z_0-9]+(?:\.[a-z_0-9]+)*")


def check(config: RunConfig) -> list[Problem]:
    """Every rule that a RunConfig breaks; empty when it can run.

    Rules between settings are only looked at where each setting that they name is in its own range.
    """
    broken = list(_ranges(config))
    paths = [problem.path for problem in broken]
    config = _with_defaults(config, paths)
    between = [
        *_model_rules(config),
        *_batch_rules(config),
        *mixture_problems(config),
        *_merge_rules(config),
        *_round_rules(config),
        *_init_rules(config),
    ]
    return [*broken, *(problem for problem in between if not concerns(problem, paths))]


def named_paths(problem: Problem) -> list[str]:
    """The path of a problem, then every word of its message that could be a path."""
    return list(dict.fromkeys([problem.path, *_DOTTED.findall(problem.message)]))


def concerns(problem: Problem, paths: Collection[str]) -> bool:
    """Whether a problem names one of the settings, or a group of settings that holds one, or a part of one."""
    return any(
        name == path or name.startswith(f"{path}.") or path.startswith(f"{name}.")
        for name in named_paths(problem)
        for path in paths
    )


def _with_defaults(config: RunConfig, paths: Collection[str]) -> RunConfig:
    """The config with the default in place of each setting named."""
    defaults = type(config)()
    for path in paths:
        group, dot, name = path.partition(".")
        value = getattr(defaults, group)
        if dot:
            name = name.partition(".")[0]  # of a part of a setting, such as one domain, the whole
            value = replace(getattr(config, group), **{name: getattr(value, name)})
        config = replace(config, **{group: value})
    return config


def _ranges(config: RunConfig) -> Iterator[Problem]:
    for path in AT_LEAST_ONE:
        if (value := attrgetter(path)(config)) < 1:
            yield Problem(path, f"({value}) must be at least 1")
    for path in FRACTIONS:
        if not 0 <= (value := attrgetter(path)(config)) <= 1:
            yield Problem(path, f"({value:g}) must be between 0 and 1")
    for path in BELOW_ONE:
        if not 0 <= (value := attrgetter(path)(config)) < 1:
            yield Problem(path, f"({value:g}) must be at least 0 and below 1")
    for path in POSITIVE:
        if (value := attrgetter(path)(config)) <= 0:
            yield Problem(path, f"({value:g}) must be above 0")
    for path in NOT_NEGATIVE:
        if (value := attrgetter(path)(config)) < 0:
            yield Problem(path, f"({value:g}) must not be negative")
    if config.seed >= 1 << 63:
        yield Problem("seed", f"({config.seed}) must be below 2^63")
    for path in POSITIVE_OR_NULL:
        if (value := attrgetter(path)(config)) is not None and value <= 0:
            yield Problem(path, f"({value:g}) must be above 0; use null for no limit")
    if not 0 < (quorum := config.round.quorum) <= 1:
        yield Problem("round.quorum", f"({quorum:g}) must be above 0 and at most 1: the share of nodes a round needs")
    if not 0 <= (share := config.aggregate.trim_fraction) < 0.5:
        yield Problem("aggregate.trim_fraction", f"({share:g}) must be at least 0 and below 0.5: it is cut at each end")
    if (keep := config.checkpoint.keep) < 2:
        yield Problem("checkpoint.keep", f"({keep}) must be at least 2: processes may stop one checkpoint apart")
    if not 1024 <= (chunk := config.wire.chunk_bytes) <= 4 << 20:
        yield Problem("wire.chunk_bytes", f"({chunk}) must be between 1024 and {4 << 20}")
    yield from _data_ranges(config.data)


def _data_ranges(data: DataConfig) -> Iterator[Problem]:
    if not data.corpus.strip():
        yield Problem("data.corpus", '("") must name a corpus: stdlib, or a file or folder of text')
    for name, domain in data.domains.items():
        if not re.fullmatch(r"[A-Za-z0-9_][A-Za-z0-9_-]{0,79}", name):
            message = "must have a name of at most 80 ASCII letters, digits, _ and -, with no - at its beginning"
            yield Problem(f"data.domains.{name}", message)
        if not domain.corpus.strip():
            yield Problem(f"data.domains.{name}.corpus", '("") must name a corpus: stdlib, or a file or folder of text')
    if not data.tokenizer.strip():
        yield Problem("data.tokenizer", '("") must be bpe, bytes, or a folder with a Hugging Face tokenizer')
    if not data.text_field:
        yield Problem("data.text_field", '("") must name the field that holds the text')
    if (limit := data.max_repetition) is not None and not 0 < limit < 1:
        yield Problem("data.max_repetition", f"({limit:g}) must lie between 0 and 1, both excluded; null keeps all")
    if not 0 < (fraction := data.validation_fraction) < 1:
        yield Problem("data.validation_fraction", f"({fraction:g}) must lie between 0 and 1, both excluded")
    if (size := data.tokenizer_vocab_size) < 257:
        yield Problem("data.tokenizer_vocab_size", f"({size}) must be at least 257: 256 bytes and the end of text")
    elif data.tokenizer == "bpe" and size > MOST_TRAINED_IDS:
        yield Problem("data.tokenizer_vocab_size", f"({size}) must be at most {MOST_TRAINED_IDS} with tokenizer bpe")


def _model_rules(config: RunConfig) -> Iterator[Problem]:
    model = config.model
    if model.top_k > model.num_experts:
        yield Problem(
            "model.num_experts",
            f"({model.num_experts}) must be at least model.top_k ({model.top_k}); lower top_k or add experts",
        )
    if model.head_dim is None and model.d_model % model.num_heads:
        yield Problem(
            "model.d_model",
            f"({model.d_model}) must be a multiple of model.num_heads ({model.num_heads}); or set model.head_dim",
        )
    elif (head_dim := model.resolved_head_dim) < 2 or head_dim % 2:
        width = "" if model.head_dim is not None else "; null makes it model.d_model / model.num_heads"
        yield Problem(
            "model.head_dim", f"({head_dim}) must be even and at least 2: rotary embedding turns pairs{width}"
        )
    if model.num_heads % model.num_kv_heads:
        yield Problem("model.num_kv_heads", f"({model.num_kv_heads}) must divide model.num_heads ({model.num_heads})")
    for path in ("model.d_model", "model.expert_hidden"):
        if (width := attrgetter(path)(config)) % 4:
            yield Problem(path, f"({width}) must be a multiple of 4: rows are 16-byte aligned")
    if config.data.tokenizer_vocab_size > model.vocab_size:
        yield Problem(
            "data.tokenizer_vocab_size",
            f"({config.data.tokenizer_vocab_size}) must not exceed model.vocab_size ({model.vocab_size})",
        )


def _batch_rules(config: RunConfig) -> Iterator[Problem]:
    if config.data.global_batch_sequences % config.world_size:
        yield Problem(
            "data.global_batch_sequences",
            f"({config.data.global_batch_sequences}) must be a multiple of nodes × parallel.ranks_per_node"
            f" ({config.world_size}), so that every process gets whole sequences",
        )
    share, micro = config.data.global_batch_sequences // config.world_size, config.data.micro_batch_sequences
    if micro is not None and (micro < 1 or share % micro):
        yield Problem(
            "data.micro_batch_sequences",
            f"({micro}) must divide the sequences of one process in one step, data.global_batch_sequences / (nodes ×"
            f" parallel.ranks_per_node) = {share}; or null for all at once",
        )
    if config.total_steps < 1:
        yield Problem(
            "budget_tokens",
            f"({config.budget_tokens}) must be at least one step: data.global_batch_sequences × data.sequence_length"
            f" = {config.tokens_per_step}",
        )
    in_one_process = config.sync.exchange != "gradients" and config.parallel.ranks_per_node == 1
    if config.optim.name in ("muon", "adamw_8bit") and not in_one_process:
        yield Problem(
            "optim.name",
            f'("{config.optim.name}") needs whole parameters in one process: sync.exchange other than "gradients" and'
            " parallel.ranks_per_node 1; or use adamw",
        )
    if config.optim.name == "adamw_8bit" and checkpoint_steps(config):
        yield Problem(
            "optim.name",
            '("adamw_8bit") keeps quantised moments, which no checkpoint can store; set checkpoint.interval_rounds and'
            " checkpoint.interval_steps to 0, or use adamw",
        )
    if config.compute.compile and not in_one_process:
        yield Problem(
            "compute.compile",
            "(true) must be false where several processes divide a model (sync.exchange gradients, or"
            " parallel.ranks_per_node above 1): their sums would break the compiled layers",
        )


def _merge_rules(config: RunConfig) -> Iterator[Problem]:
    merge, num_experts = config.merge, config.model.num_experts
    if config.sync.exchange == "rounds" and merge.enabled and merge.num_neighbours >= num_experts:
        yield Problem(
            "merge.num_neighbours",
            f"({merge.num_neighbours}) must be below model.num_experts ({num_experts}): an expert is no neighbour of"
            " itself; lower K or set merge.enabled to false",
        )


def _round_rules(config: RunConfig) -> Iterator[Problem]:
    if config.sync.exchange != "rounds":
        return
    rounds, faults = config.round, config.faults
    if rounds.lost_after_s <= 2 * rounds.heartbeat_s:
        yield Problem(
            "round.lost_after_s",
            f"({rounds.lost_after_s:g}) must be above two signs of life, 2 × round.heartbeat_s"
            f" ({2 * rounds.heartbeat_s:g}); one alone may be late",
        )
    if rounds.quorum < 1 and rounds.reassign_after and config.parallel.ranks_per_node > 1:
        yield Problem(
            "round.reassign_after",
            f"({rounds.reassign_after}) must be 0 where parallel.ranks_per_node ({config.parallel.ranks_per_node}) is"
            " above 1: a model that ranks divide cannot take over experts",
        )
    if faults.kind != "none" and not 0 <= faults.node < config.nodes:
        yield Problem("faults.node", f"({faults.node}) must be a node of this run: 0 to nodes - 1 = {config.nodes - 1}")
    yield from _aggregate_rules(config)
    if config.server.shards > 1:
        yield from _shard_rules(config)


def _shard_rules(config: RunConfig) -> Iterator[Problem]:
    """What several servers cannot do: each decides by itself, from the part of the tensors that it has."""
    shards, aggregate, ranks = config.server.shards, config.aggregate, config.parallel.ranks_per_node
    factor = aggregate.quarantine_factor
    if shards > config.model.num_layers:
        yield Problem(
            "server.shards",
            f"({shards}) must be at most model.num_layers ({config.model.num_layers}): the experts of a layer stay"
            " together, and further servers would have next to nothing",
        )
    a_part = "each server would judge an update by the part that it has"
    for path, is_broken, rule, reason in (
        ("round.quorum", config.round.quorum < 1, "must be 1.0", "servers could take different nodes for absent"),
        ("aggregate.rule", aggregate.rule == "clipped", 'must not be "clipped"', a_part),
        ("aggregate.quarantine_factor", factor is not None, "must be null", a_part),
        ("faults.kind", config.faults.kind != "none", 'must be "none"', "a fault is made from a whole update"),
        ("parallel.ranks_per_node", ranks > 1, "must be 1", "ranks that divide a model pass on one tensor at a time"),
    ):
        if is_broken:
            value = attrgetter(path)(config)
            shown = f"{value:g}" if isinstance(value, float) else json.dumps(value)
            rest = f"where server.shards ({shards}) is above 1: {reason}; or set server.shards to 1"
            yield Problem(path, f"({shown}) {rule} {rest}")


def _aggregate_rules(config: RunConfig) -> Iterator[Problem]:
    aggregate, nodes = config.aggregate, config.nodes
    if aggregate.rule in ("trimmed", "median") and nodes < 3:
        yield Problem(
            "aggregate.rule",
            f'("{aggregate.rule}") needs at least 3 nodes to tell an outlier, and nodes is {nodes};'
            ' use "mean" or "clipped"',
        )
    elif aggregate.rule == "trimmed" and (share := aggregate.trim_fraction) * nodes < 1 - 1e-9:
        yield Problem(
            "aggregate.trim_fraction",
            f"({share:g}) must cut off at least one node at each end, and {share:g} × nodes ({nodes}) is below 1;"
            f" use at least 1 / {nodes}",
        )
    if (factor := aggregate.quarantine_factor) is None:
        return
    if factor < 1:
        yield Problem("aggregate.quarantine_factor", f"({factor:g}) must be at least 1, the median length itself")
    if nodes < 3:
        yield Problem(
            "aggregate.quarantine_factor",
            f"({factor:g}) needs at least 3 nodes to tell an outlier, and nodes is {nodes}; use null",
        )


def _init_rules(config: RunConfig) -> Iterator[Problem]:
    init = config.init
    if init.kind == "weights" and not init.weights:
        yield Problem("init.weights", '(null) must be the path of a weights file where init.kind is "weights"')
    if init.digest is not None and re.fullmatch(r"[0-9a-f]{64}", init.digest) is None:
        yield Problem("init.digest", f"({init.digest}) must be a SHA-256, 64 lower-case hex digits; or leave it out")
