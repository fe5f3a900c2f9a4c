"""What a run takes on stated devices and links: seconds, utilisation, GPU-hours, money. Arithmetic, without torch.

A step takes its floating-point operations over the speed that devices reach; a round takes what its bytes need on the
node's link. Reading data, encoding, the optimizer and waiting for others are not in it: a real run is slower.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from spes_core.config import LinkConfig, RunConfig
from spes_core.link import round_s, transfer_s
from spes_core.model.counting import collective_bytes_per_step, flops_per_token, round_bytes
from spes_core.schedules import merge_steps, round_steps


@dataclass(frozen=True, kw_only=True)
class Machine:
    """What a node is made of; its link is that of the run."""

    device_tflops: float
    """10^12 floating-point operations a second that one device reaches in training, not those of its data sheet."""
    price_per_gpu_hour: float | None = None
    """Any currency; None when no cost is wanted."""


@dataclass(frozen=True, kw_only=True)
class Cost:
    """Time and money of one run."""

    step_s: float
    """Computing of one optimizer step, slowest node."""
    round_s: float
    """What the bytes of one round need, slowest node, mean over rounds; of one step where gradients are exchanged."""
    wall_h: float
    """All steps, rounds or exchanges, one after another."""
    utilisation: float
    """Share of that time in which devices compute."""
    gpu_hours: float
    price: float | None


def cost(config: RunConfig, machine: Machine) -> Cost:
    """Time and money of a run on a number of equal machines."""
    step_s = slowest_step_s(config, machine.device_tflops)
    exchanges, exchange_s = _exchanges(config)
    compute_s = config.total_steps * step_s
    wall_s = compute_s + exchanges * exchange_s
    gpu_hours = wall_s / 3600 * config.world_size
    price = None if machine.price_per_gpu_hour is None else gpu_hours * machine.price_per_gpu_hour
    return Cost(
        step_s=step_s,
        round_s=exchange_s,
        wall_h=wall_s / 3600,
        utilisation=compute_s / wall_s if wall_s else 0.0,
        gpu_hours=gpu_hours,
        price=price,
    )


def slowest_step_s(config: RunConfig, device_tflops: float) -> float:
    """Seconds of one optimizer step of the node that computes most."""
    most = max(config.make_partition().experts_by_node, key=len)
    return step_s(config, most, device_tflops)


def step_s(config: RunConfig, trained_experts: tuple[int, ...], device_tflops: float) -> float:
    """Seconds of one optimizer step of a device on its share of the global batch."""
    flops = flops_per_token(config.model, trained_experts, config.data.sequence_length)
    again = flops.forward if config.compute.activation_checkpointing == "block" else 0.0
    tokens = config.tokens_per_step / config.world_size
    return tokens * (flops.total + again) / (device_tflops * 1e12)


def with_link(config: RunConfig, uplink_mbps: float | None, downlink_mbps: float | None, rtt_ms: float) -> RunConfig:
    """The run on a link, where it states none of its own."""
    if config.link.uplink_mbps is not None or config.link.downlink_mbps is not None:
        return config
    return replace(config, link=LinkConfig(uplink_mbps=uplink_mbps, downlink_mbps=downlink_mbps, rtt_ms=rtt_ms))


def _exchanges(config: RunConfig) -> tuple[int, float]:
    """How often nodes exchange, and the seconds that the bytes of one exchange need."""
    if config.sync.exchange == "none":
        return 0, 0.0
    if config.sync.exchange == "gradients":
        sent = collective_bytes_per_step(config.model, config.world_size)
        return config.total_steps, max(transfer_s(config.link, sent, "up"), transfer_s(config.link, sent, "down"))
    rounds, merges = len(round_steps(config)), len(merge_steps(config))
    plain_s, merged_s = (_slowest_round_s(config, merged) for merged in (False, True))
    return rounds, (plain_s * (rounds - merges) + merged_s * merges) / rounds if rounds else 0.0


def _slowest_round_s(config: RunConfig, merged: bool) -> float:
    experts = config.make_partition().experts_by_node
    nodes = {
        len(owned): node for node, owned in enumerate(experts)
    }.values()  # equally many experts, equally many bytes
    sizes = [round_bytes(config, node, merged) for node in nodes]
    return max(round_s(config.link, size.uplink_payload_bytes, size.downlink_payload_bytes) for size in sizes)
