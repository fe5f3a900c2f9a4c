"""How many bytes a study needs on the disks of its hosts: arithmetic from the plan, no host is asked."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from math import prod
from pathlib import Path

from spes_core import snapshots
from spes_core.config import RunConfig
from spes_core.model.counting import (
    FEEDBACK_CODECS,
    FLOAT32_BYTES,
    keeps_rounded,
    memory,
    tensor_shapes,
    tensors_by_shard,
)
from spes_core.model.counting import trained_tensors as trained_by
from spes_core.schedules import checkpoint_steps, merge_steps, round_steps
from spes_core.sharding import is_server
from spes_core.wireformat import FORMATS
from workbench.launch.remote import Placement
from workbench.launch.staging import text_place, weights_place

_OTHER_BYTES = 100_000_000
"""Events, logs, the code, and what files of a tensor take beside its values."""
_ROUNDS_AHEAD = 2
"""How many rounds may have closed before a server hears that the last checkpoint of all is stored."""


@dataclass(kw_only=True)
class Room:
    """What one host needs."""

    trials_bytes: int = 0
    """What the processes of the trials that run at the same time store at most."""
    copies: dict[str, int] = field(default_factory=dict)
    """Bytes of text and first weights, by their place below the work folder: copied where they are not there."""


def rooms(runs: Iterable[tuple[RunConfig, Placement, Path | None]], at_once: int) -> dict[str, Room]:
    """What each host needs for runs, ``at_once`` at the same time; each comes with its text if that is prepared."""
    found: dict[str, Room] = {}
    largest: dict[str, int] = {}
    for config, placement, text in runs:
        for host, size in stored_bytes(config, placement).items():
            largest[host] = max(largest.get(host, 0), size + _OTHER_BYTES)
            copies = found.setdefault(host, Room()).copies
            if text is not None:
                copies[text_place(text)] = sum(path.stat().st_size for path in text.rglob("*") if path.is_file())
            if config.init.kind == "weights":
                copies[weights_place(config.init)] = Path(config.init.weights or "").stat().st_size
    for host, size in largest.items():
        found[host].trials_bytes = at_once * size
    return found


def stored_bytes(config: RunConfig, placement: Placement) -> Counter[str]:
    """By host: what the processes of one run hold on the disk at most; 0 for a host that only computes."""
    total = Counter(dict.fromkeys(placement.hosts, 0))
    files = config.checkpoint.keep + 1 if checkpoint_steps(config) else 0
    shapes = tensor_shapes(config.model)
    model_bytes = FLOAT32_BYTES * sum(map(prod, shapes.values()))
    own_final = [0] if config.sync.exchange == "gradients" else range(config.nodes)
    for name in snapshots.participants(config):
        if not is_server(name):
            node = int(name.split("-")[1])
            total[placement.host_of(name)] += files * _checkpoint_bytes(config, node)
    if config.sync.exchange != "rounds":
        for node in own_final:
            total[placement.host_of(f"node-{node}")] += model_bytes
        return total
    copies = 1 + (config.outer.kind != "none") + (config.wire.dtype in FEEDBACK_CODECS)
    for server, names in zip(config.servers, tensors_by_shard(config), strict=True):
        values_bytes = FLOAT32_BYTES * sum(prod(shapes[name]) for name in names)
        total[placement.host_of(server)] += (files * copies + 1) * values_bytes + _journal_bytes(config, names)
    if len(config.servers) > 1:
        total[placement.host_of(config.servers[-1])] += model_bytes  # the one file, made of the parts
    return total


def _checkpoint_bytes(config: RunConfig, node: int) -> int:
    """One checkpoint of a process of a node, or of a rank that exchanges gradients: weights, moments, its codec's."""
    parts, kept = memory(config, node), 0
    if config.sync.exchange == "rounds":
        sizes = {name: prod(shape) for name, shape in tensor_shapes(config.model).items()}
        trained = sum(sizes[name] for name in trained_by(config, node))
        kept += trained if config.wire.dtype in FEEDBACK_CODECS else 0
        kept += sum(sizes.values()) - trained if config.frozen.dtype != "float32" and keeps_rounded(config) else 0
    return parts.weights_bytes + parts.moments_bytes + FLOAT32_BYTES * kept


def _journal_bytes(config: RunConfig, names: Iterable[str]) -> int:
    """The rounds of some tensors that a server keeps, back to the newest checkpoint of all.

    Of each there are the uploads, and the new values that are nobody's upload.
    """
    shapes, partition = tensor_shapes(config.model), config.make_partition()
    uploads = shared = whole = 0
    for name in names:
        size = FORMATS[config.wire.dtype].encoded_bytes(prod(shapes[name]))
        trainers = sum(partition.trains(node, name) for node in range(config.nodes))
        uploads += trainers * size
        whole += size
        shared += size if trainers > 1 else 0
    plain = whole if config.outer.kind != "none" else shared
    merged = set(merge_steps(config))
    sizes = [uploads + (whole if step in merged else plain) for step in round_steps(config)]
    kept = (config.checkpoint.interval_rounds if checkpoint_steps(config) else 1) + _ROUNDS_AHEAD
    return max(sum(sizes[start : start + kept]) for start in range(max(1, len(sizes) - kept + 1)))
