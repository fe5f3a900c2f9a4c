"""Everything that decides the numbers of one run: `RunConfig`, its frozen parts, and its digest.

Two runs with equal `digest` on the same data, machine and thread count give the same weights. What decides no number
(where files lie, which host, how many threads, how often to log) is in `RunFile` or in `NOT_IDENTITY`.
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import asdict, dataclass, field
from operator import attrgetter
from typing import Any, Literal

from spes_core.dataconfig import DataConfig as DataConfig
from spes_core.dataconfig import DomainConfig as DomainConfig
from spes_core.errors import ConfigError
from spes_core.partition import Partition, PartitionKind, make_partition
from spes_core.rules import check
from spes_core.sharding import server_names
from spes_core.structure import build

Method = Literal["spes", "dilico", "diloco", "centralized", "local"]


@dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """Shape of a Mixture-of-Experts decoder (design, section 8)."""

    num_layers: int = 4
    """Number of decoder layers."""
    d_model: int = 128
    """Width of the residual stream."""
    num_heads: int = 4
    """Attention (query) heads."""
    num_kv_heads: int = 4
    """Key/value heads; divides num_heads."""
    head_dim: int | None = None
    """Width of one head, even; d_model / num_heads when null."""
    num_experts: int = 8
    """Experts per layer."""
    top_k: int = 2
    """Experts that each token is sent to."""
    expert_hidden: int = 128
    """Inner width of one expert's SwiGLU."""
    vocab_size: int = 4096
    """Rows of the embedding; at least the tokenizer's size."""
    qk_norm: Literal["full", "per_head", "none"] = "full"
    """RMSNorm of queries and keys: over the whole projection (OLMoE), per head (Qwen3-MoE) or not at all."""
    normalize_top_k: bool = False
    """Whether the top-k router weights are rescaled to sum to one."""
    tie_embeddings: bool = False
    """Whether the unembedding is the embedding."""
    rope_theta: float = 10_000.0
    """Base of the rotary position embedding."""
    norm_eps: float = 1e-5
    """Epsilon of every RMSNorm."""
    init_std: float = 0.02
    """Standard deviation of the initial weights."""

    @property
    def resolved_head_dim(self) -> int:
        """Width of one head after the default is applied."""
        return self.head_dim if self.head_dim is not None else self.d_model // self.num_heads


@dataclass(frozen=True, kw_only=True)
class OptimConfig:
    """The inner optimizer and its learning-rate schedule."""

    name: Literal["adamw", "adamw_8bit", "muon", "sgd"] = "adamw"
    """Optimizer: AdamW; AdamW with 8-bit moments (needs the extra "eightbit"); Muon for matrices, each expert on its
    own, and AdamW for embeddings, router and norms; SGD."""
    lr: float = 3e-3
    """Highest learning rate."""
    beta1: float = 0.9
    """AdamW: decay of the first moment, below 1."""
    beta2: float = 0.95
    """AdamW: decay of the second moment, below 1."""
    eps: float = 1e-8
    """AdamW: added to the denominator."""
    weight_decay: float = 0.1
    """Decoupled weight decay of matrices; vectors (norms) are not decayed."""
    schedule: Literal["constant", "linear", "cosine"] = "cosine"
    """Shape of the decay after the warm-up."""
    warmup_fraction: float = 0.05
    """Share of the steps in which the learning rate rises from 0."""
    final_lr_fraction: float = 0.1
    """Learning rate at the last step, as a share of lr."""
    clip_norm: float | None = 1.0
    """Largest norm of a node's gradient (shared and own experts together); null for no clipping."""


@dataclass(frozen=True, kw_only=True)
class LossConfig:
    """Weights of the auxiliary losses that are added to the cross-entropy."""

    z_weight: float = 1e-5
    """Square of the log-partition of the output softmax."""
    balance_weight: float = 0.01
    """Load balancing over experts: per layer E · Σ_e f_e·p_e / top_k, mean over layers."""
    balance_fractions: Literal["accumulated", "whole_batch"] = "accumulated"
    """Tokens behind the shares f_e where micro-batches add up: "accumulated": this micro-batch and those before it
    in the step (arXiv 2501.11873), at no cost; "whole_batch": all of the step, from one forward pass more."""
    router_z_weight: float = 1e-3
    """Square of the log-partition of the router softmax."""


@dataclass(frozen=True, kw_only=True)
class InitConfig:
    """How the initial weights come to be; they are the same on all nodes and the server."""

    kind: Literal["random", "weights"] = "random"
    """"random": drawn from seed and model.init_std; "weights": read from a file (spes_core.checkpoint, hf.upcycle)."""
    weights: str | None = None
    """The file, by canonical tensor names; every host of the run has it at this path."""
    digest: str | None = None
    """SHA-256 (hex) of the file: this, not its path, is part of a run's identity. The workbench fills it in."""


@dataclass(frozen=True, kw_only=True)
class PartitionConfig:
    """Who trains which experts."""

    kind: PartitionKind = "sparse"
    """"sparse": each node its share of the experts (SPES); "full": every node all of them (DiLiCo, FedAvg)."""


@dataclass(frozen=True, kw_only=True)
class SyncConfig:
    """When and how nodes exchange."""

    exchange: Literal["rounds", "gradients", "none"] = "rounds"
    """"rounds": weights, every interval_steps, through the server; "gradients": every step, in one process group
    (centralized FSDP); "none": never (each node on its own)."""
    interval_steps: int = 50
    """H: optimizer steps between two rounds."""


@dataclass(frozen=True, kw_only=True)
class MergeConfig:
    """Merging of similar experts early in training (design, section 7)."""

    enabled: bool = True
    """Whether experts are merged at all."""
    num_neighbours: int = 2
    """K: how many most similar experts each expert is pulled to; below model.num_experts."""
    alpha: float = 0.1
    """α: weight of the pull at step 0, falling linearly to 0 at until_step."""
    interval_steps: int = 50
    """A merge is due at the first round at or after each multiple of this many steps."""
    until_step: int = 400
    """T_merge: no merge from this step on."""


@dataclass(frozen=True, kw_only=True)
class OuterConfig:
    """Optimizer of the server, applied to (old − mean): DiLoCo's outer step."""

    kind: Literal["none", "sgd", "nesterov"] = "none"
    """"none" adopts the mean."""
    lr: float = 0.7
    """Outer learning rate."""
    momentum: float = 0.9
    """Nesterov momentum."""


@dataclass(frozen=True, kw_only=True)
class WireConfig:
    """How tensors travel."""

    dtype: Literal["float32", "bfloat16", "int8", "int4"] = "float32"
    """Codec of the tensors on the wire: exact values; or changes since the last round, rounded to bfloat16, or to
    blocks of 8 or 4 bit integers with error feedback."""
    chunk_bytes: int = 1 << 20
    """Largest payload of one message."""


@dataclass(frozen=True, kw_only=True)
class RoundConfig:
    """When a round counts as complete."""

    timeout_s: float = 600.0
    """How long after its first upload a round waits for the others; then it closes with those present, or fails by
    name where they are too few for the quorum."""
    quorum: float = 1.0
    """Share of the nodes that a round needs. 1.0: all, and results depend on no timing. Below: a round closes without
    those that are lost or late; an absent owner's experts keep their last value."""
    reassign_after: int = 3
    """Below quorum 1.0: rounds of absence after which a node's experts move to present ones; 0 for never."""
    local_time_s: float | None = None
    """Longest time between two rounds that a node spends on local steps: a slow one then uploads fewer steps, weighted
    by its tokens. Null: always sync.interval_steps."""
    heartbeat_s: float = 5.0
    """Time between two signs of life of a node."""
    lost_after_s: float = 60.0
    """A node not heard from for so long counts as lost."""
    retry_s: float = 300.0
    """How long a node tries again, with growing pauses, to reach a server that went away."""


@dataclass(frozen=True, kw_only=True)
class AggregateConfig:
    """How the values of several nodes for one tensor become one (shared tensors; experts with several owners)."""

    rule: Literal["mean", "clipped", "trimmed", "median"] = "mean"
    """"mean" by tokens; "clipped": the mean of updates of which none is longer than clip_factor × their median length;
    "trimmed": value by value the mean without the trim_fraction largest and smallest; "median": value by value."""
    trim_fraction: float = 0.25
    """Share of the nodes cut off at each end by "trimmed"; below 0.5."""
    clip_factor: float = 1.0
    """Longest update under "clipped", in median lengths."""
    quarantine_factor: float | None = None
    """A node whose update is longer than so many median lengths is left out of the round and named; null: never."""


@dataclass(frozen=True, kw_only=True)
class LinkConfig:
    """The link between a node and the server: what predictions assume, and what may be emulated on one machine."""

    uplink_mbps: float | None = None
    """Bandwidth from a node to the server, in 10^6 bits a second; null: not limited."""
    downlink_mbps: float | None = None
    """Bandwidth from the server to a node."""
    rtt_ms: float = 0.0
    """Round-trip time."""
    loss: float = 0.0
    """Share of packets that are lost, below 1."""
    emulate: bool = False
    """Whether nodes slow their own connection down to these numbers."""


@dataclass(frozen=True, kw_only=True)
class ServerConfig:
    """The server side of the rounds."""

    shards: int = 1
    """Server processes (on one host or several) that share the tensors by size, where one server's link or disk is the
    bottleneck: a round then takes about so many times less of its time there. Changes no bit."""


@dataclass(frozen=True, kw_only=True)
class FaultsConfig:
    """A node that misbehaves on purpose, for studies of robustness."""

    kind: Literal["none", "noise", "sign_flip", "scale"] = "none"
    """What the node sends instead of its update: noise of scale × its length; the update times −scale; times scale."""
    node: int = 0
    """The node."""
    scale: float = 1.0
    """Strength."""
    from_round: int = 0
    """First round in which it misbehaves."""


@dataclass(frozen=True, kw_only=True)
class FrozenConfig:
    """How a node stores the experts that it does not train."""

    dtype: Literal["float32", "bfloat16"] = "float32"
    """Storage type of frozen experts; they are rounded to it when they arrive."""


@dataclass(frozen=True, kw_only=True)
class ComputeConfig:
    """How one process computes a step."""

    precision: Literal["float32", "bfloat16"] = "float32"
    """Type of activations and of matrix products; weights that are trained, norms, router softmax and losses stay
    float32 always. "bfloat16" is for GPUs: most CPUs are slower in it."""
    activation_checkpointing: Literal["none", "selective", "block"] = "none"
    """What is made again in the backward pass instead of kept: nothing; the hidden layer of the experts (the largest
    part, for one product in nine of theirs); all of a layer but its input (for a third more FLOPs)."""
    compile: bool = False
    """Whether layers go through torch.compile: faster steps after a first one that takes a minute on a CPU."""


@dataclass(frozen=True, kw_only=True)
class ParallelConfig:
    """Parallelism inside one node."""

    ranks_per_node: int = 1
    """Processes (GPUs) of one node, which form one torchrun group."""
    strategy: Literal["fsdp", "ddp"] = "fsdp"
    """"fsdp": weights (frozen ones too), gradients and moments are divided over the ranks; "ddp": every rank holds all
    of them. Gradients are averaged over the ranks either way."""


@dataclass(frozen=True, kw_only=True)
class CheckpointConfig:
    """How often a run stores what it needs to go on after a crash, with the same bits (spes_core.snapshots)."""

    interval_rounds: int = 10
    """With rounds: rounds between two checkpoints; 0 for none."""
    interval_steps: int = 500
    """Without rounds: optimizer steps between two checkpoints; 0 for none."""
    keep: int = 2
    """Newest checkpoints that are kept; at least 2, since processes may have come one checkpoint apart."""


@dataclass(frozen=True, kw_only=True)
class ValidationConfig:
    """Evaluation of the global model on held-out text while training."""

    interval_tokens: int = 200_000
    """A validation is due at the first synchronized step at or after each multiple; the last step always has one."""
    max_sequences: int = 128
    """Held-out sequences used, spread evenly over the validation split; all of them when it has fewer. Of several
    domains each gives as many, whatever its share of the training."""


@dataclass(frozen=True, kw_only=True)
class LogConfig:
    """How often a node writes a training event."""

    interval_steps: int = 10
    """Optimizer steps between two training events."""


@dataclass(frozen=True, kw_only=True)
class RunConfig:
    """One fully resolved run."""

    method: Method = "spes"
    """Name of the method, for people; the parts below decide what happens."""
    seed: int = 0
    """Seed of the initial weights and of the data order."""
    nodes: int = 4
    """Number of nodes; with sync.exchange "gradients", the number of participants of the one process group."""
    budget_tokens: int = 1_000_000
    """Training tokens of all nodes together; rounded down to whole steps."""
    model: ModelConfig = field(default_factory=ModelConfig)
    data: DataConfig = field(default_factory=DataConfig)
    optim: OptimConfig = field(default_factory=OptimConfig)
    loss: LossConfig = field(default_factory=LossConfig)
    init: InitConfig = field(default_factory=InitConfig)
    partition: PartitionConfig = field(default_factory=PartitionConfig)
    sync: SyncConfig = field(default_factory=SyncConfig)
    merge: MergeConfig = field(default_factory=MergeConfig)
    outer: OuterConfig = field(default_factory=OuterConfig)
    wire: WireConfig = field(default_factory=WireConfig)
    round: RoundConfig = field(default_factory=RoundConfig)
    aggregate: AggregateConfig = field(default_factory=AggregateConfig)
    link: LinkConfig = field(default_factory=LinkConfig)
    server: ServerConfig = field(default_factory=ServerConfig)
    faults: FaultsConfig = field(default_factory=FaultsConfig)
    frozen: FrozenConfig = field(default_factory=FrozenConfig)
    compute: ComputeConfig = field(default_factory=ComputeConfig)
    parallel: ParallelConfig = field(default_factory=ParallelConfig)
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)
    validation: ValidationConfig = field(default_factory=ValidationConfig)
    log: LogConfig = field(default_factory=LogConfig)

    @property
    def tokens_per_step(self) -> int:
        """Training tokens of one step over all nodes."""
        return self.data.global_batch_sequences * self.data.sequence_length

    @property
    def total_steps(self) -> int:
        """Optimizer steps that every node takes."""
        return self.budget_tokens // self.tokens_per_step

    @property
    def micro_batch_sequences(self) -> int:
        """Sequences of one forward and backward pass of one process."""
        share = self.data.global_batch_sequences // self.world_size
        return min(share, self.data.micro_batch_sequences or share)

    @property
    def world_size(self) -> int:
        """Number of training processes over all nodes."""
        return self.nodes * self.parallel.ranks_per_node

    @property
    def group_size(self) -> int:
        """Number of processes in one torchrun group: all of them when they exchange gradients, else those of a node."""
        return self.world_size if self.sync.exchange == "gradients" else self.parallel.ranks_per_node

    @property
    def servers(self) -> tuple[str, ...]:
        """The server processes by name, in the order of their shards; none without rounds."""
        return server_names(self.server.shards) if self.sync.exchange == "rounds" else ()

    @property
    def num_recorders(self) -> int:
        """Number of participants with an event file: every rank when they exchange gradients, else every node."""
        return self.world_size if self.sync.exchange == "gradients" else self.nodes

    def make_partition(self) -> Partition:
        """The assignment of experts to nodes; in one process group everyone trains everything."""
        kind = "full" if self.sync.exchange == "gradients" else self.partition.kind
        return make_partition(kind, self.model.num_experts, self.nodes)


NOT_IDENTITY = (
    *("method", "log", "checkpoint", "server", "wire.chunk_bytes", "init.weights"),
    *("data.tokenizer", "data.text_field", "data.max_repetition"),
    *(f"round.{name}" for name in ("timeout_s", "heartbeat_s", "lost_after_s", "retry_s")),
)
"""Settings that change no weight and no validation, given the token files; they are outside a run's identity."""

_NOT_WRITTEN_AT_DEFAULT = ("data.document_attention",)
"""Settings that are newer than stored trials: at their default they are left out of the identity, which so stays."""

_ROUND_SETTINGS = ("sync.interval_steps", "merge", "outer", "wire", "round", "aggregate", "link", "server", "faults")


def inapplicable(config: RunConfig) -> tuple[str, ...]:
    """Paths of settings that this run does not read, given its other settings. They multiply no trial."""
    paths: list[str] = []
    if config.group_size == 1:
        paths += ["parallel.strategy"]
    if config.sync.exchange != "rounds":
        paths += _ROUND_SETTINGS
        if config.sync.exchange == "gradients":
            paths += ["partition", "frozen"]
    elif not config.merge.enabled:
        paths += [f"merge.{name}" for name in ("num_neighbours", "alpha", "interval_steps", "until_step")]
    if config.outer.kind == "none":
        paths += ["outer.lr", "outer.momentum"]
    elif config.outer.kind == "sgd":
        paths += ["outer.momentum"]
    if config.init.kind == "random":
        paths += ["init.weights", "init.digest"]
    else:
        paths += ["model.init_std"]
    paths += _inapplicable_to_rounds(config)
    if config.optim.name == "sgd":
        paths += ["optim.beta1", "optim.beta2", "optim.eps"]
    paths += ["data.corpus"] if config.data.domains else ["data.domains", "data.per_node"]
    if config.data.micro_batch_sequences is None or config.loss.balance_weight == 0:
        paths += ["loss.balance_fractions"]
    return tuple(paths)


def _inapplicable_to_rounds(config: RunConfig) -> list[str]:
    """Parts of the round's settings that its other settings leave without effect."""
    used = {"mean": (), "clipped": ("clip_factor",), "trimmed": ("trim_fraction",), "median": ()}[config.aggregate.rule]
    paths = [f"aggregate.{name}" for name in ("trim_fraction", "clip_factor") if name not in used]
    if config.round.quorum == 1.0:
        paths += ["round.reassign_after"]
    if config.faults.kind == "none":
        paths += ["faults.node", "faults.scale", "faults.from_round"]
    return paths


def to_dict(config: Any) -> dict[str, Any]:
    """The nested dict of a config dataclass as JSON has it (lists, no tuples); `from_dict` is its inverse."""
    plain: dict[str, Any] = _plain(asdict(config))
    return plain


def _plain(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _plain(item) for key, item in value.items()}
    return [_plain(item) for item in value] if isinstance(value, list | tuple) else value


def from_dict(data: object) -> RunConfig:
    """Read a RunConfig strictly and check it.

    Raises ConfigError with every unknown key (and its nearest valid name), wrong type and broken rule.
    """
    config = build(RunConfig, data)
    if problems := check(config):
        raise ConfigError(problems)
    return config


def digest(config: RunConfig) -> str:
    """SHA-256 (hex) of all that decides this run's numbers: inapplicable and non-identity settings are left out."""
    tree, default = to_dict(config), RunConfig()
    unchanged = [path for path in _NOT_WRITTEN_AT_DEFAULT if attrgetter(path)(config) == attrgetter(path)(default)]
    for path in (*NOT_IDENTITY, *inapplicable(config), *unchanged):
        *parents, leaf = path.split(".")
        branch = tree
        for key in parents:
            branch = branch.get(key, {})
        branch.pop(leaf, None)
    text = json.dumps(tree, sort_keys=True, separators=(",", ":"), allow_nan=False)
    return hashlib.sha256(text.encode()).hexdigest()
