"""What a run will cost, by arithmetic: steps, rounds, merges, parameters, bytes and memory, without running it."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from spes_core.config import RunConfig
from spes_core.link import round_s
from spes_core.model.counting import memory, parameter_counts, round_bytes, run_bytes
from spes_core.schedules import merge_steps, round_steps
from workbench.trees import covers

if TYPE_CHECKING:
    from workbench.trials import Variant

_MERGE_SCHEDULE = ("merge.enabled", "merge.interval_steps", "merge.until_step")


@dataclass(frozen=True, kw_only=True)
class Prediction:
    """The cost of one run; per-node figures are those of the node where they are largest. GB is 1e9 bytes."""

    steps: int
    rounds: int
    merges: int
    parameters_total: int
    parameters_trained: int
    uplink_gb: float
    downlink_gb: float
    memory_gb: float
    """Weights, gradients, moments, activations and synchronization buffers of one process."""
    round_transfer_s: float | None
    """Seconds that the bytes of a round need on the run's link, mean over rounds; None without rounds or a link."""

    def uplink_time_s(self, link_gbit_per_s: float) -> float:
        """Seconds for one node's uplink of the whole run on an otherwise idle link."""
        return self.uplink_gb * 8 / link_gbit_per_s


def predict(config: RunConfig) -> Prediction:
    """The cost of one run."""
    partition, model = config.make_partition(), config.model
    # Nodes that train equally many experts cost the same: look at one of each kind.
    nodes = list({len(experts): node for node, experts in enumerate(partition.experts_by_node)}.values())
    counts = [parameter_counts(model, partition.experts_by_node[node]) for node in nodes]
    payloads = [run_bytes(config, node) for node in nodes]
    return Prediction(
        steps=config.total_steps,
        rounds=len(round_steps(config)),
        merges=len(merge_steps(config)),
        parameters_total=counts[0].total,
        parameters_trained=max(count.trained for count in counts),
        uplink_gb=max(payload.uplink_payload_bytes for payload in payloads) / 1e9,
        downlink_gb=max(payload.downlink_payload_bytes for payload in payloads) / 1e9,
        memory_gb=max(memory(config, node).total_bytes for node in nodes) / 1e9,
        round_transfer_s=round_transfer_s(config),
    )


def round_transfer_s(config: RunConfig) -> float | None:
    """Seconds that the bytes of a round need on the run's link, of the node where they are most, mean over rounds.

    None when the run has no rounds or states no bandwidth. Time spent on anything but moving bytes comes on top.
    """
    rounds, merges = len(round_steps(config)), len(merge_steps(config))
    if not rounds or (config.link.uplink_mbps is None and config.link.downlink_mbps is None):
        return None

    def slowest_s(merged: bool) -> float:
        sizes = [round_bytes(config, node, merged) for node in range(config.nodes)]
        return max(round_s(config.link, size.uplink_payload_bytes, size.downlink_payload_bytes) for size in sizes)

    return (slowest_s(False) * (rounds - merges) + slowest_s(True) * merges) / rounds


def merge_warning(variants: Sequence[Variant]) -> str | None:
    """A warning when runs that merge do not merge equally often, though no axis asks for that; else None."""
    counts: dict[int, list[str]] = {}
    for variant in variants:
        config = variant.config
        if config.sync.exchange == "rounds" and config.merge.enabled:
            counts.setdefault(len(merge_steps(config)), []).append(variant.label)
    axes = {path for variant in variants for path in variant.axes}
    if len(counts) < 2 or any(covers(axis, path) for axis in axes for path in _MERGE_SCHEDULE):
        return None
    shown = "; ".join(f"{count} in {labels[0]}{_others(labels)}" for count, labels in sorted(counts.items()))
    return f"runs differ in how often they merge ({shown}): an effect of merging may hide in the comparison"


def _others(labels: Sequence[str]) -> str:
    return f" and {len(labels) - 1} more" if len(labels) > 1 else ""


if __name__ == "__main__":
    from workbench.plancommand import main

    sys.exit(main())
