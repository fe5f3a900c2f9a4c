"""Loss curves of one trial against step, tokens, time and bytes, from what its nodes recorded."""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Callable, Iterable, Mapping
from itertools import accumulate
from typing import Any

from spes_core.config import RunConfig
from spes_core.events import as_float
from workbench.recording import Event, Recording, mean_of, newest, total

_TRAIN_MEANS = (
    "loss_nats",
    "grad_norm",
    "learning_rate",
    "step_time_s",
    "z_loss",
    "balance_loss",
    "router_z_loss",
)


def train_curve(config: RunConfig, recording: Recording) -> list[dict[str, Any]]:
    """One point per step that all nodes reported: means over nodes, which all see equally many tokens in a step.

    tokens_per_s is the sum over nodes; elapsed_s is when the last node reported, counted from `first_step_s`;
    uplink_bytes is what `uplink_by_step` says.
    """
    points = []
    where = _axes(config, recording)
    for step, events in recording.by_step("train").items():
        if len(events) == config.num_recorders:
            means = {field: mean_of(events, field) for field in _TRAIN_MEANS}
            points.append({**where(step, events), **means, "tokens_per_s": total(events, "tokens_per_s")})
    return points


def validation_curve(config: RunConfig, recording: Recording) -> list[dict[str, Any]]:
    """One point per validation that all nodes finished: Σ loss / Σ tokens over their shares.

    Where the corpus has several domains, "loss_nats/<domain>" and "bits_per_byte/<domain>" are those of each.
    """
    points = []
    where = _axes(config, recording)
    for step, events in recording.by_step("validation").items():
        if len(events) < config.num_recorders or not total(events, "target_tokens"):
            continue
        point = where(step, events) | _validated(events)
        for name in events[0].get("domains", {}):
            of_domain = _validated([event["domains"][name] for event in events])
            point |= {f"{field}/{name}": value for field, value in of_domain.items()}
        points.append(point)
    return points


def experts_curve(config: RunConfig, recording: Recording) -> list[dict[str, Any]]:
    """One point per "experts" event of the server: mean cosine over pairs of experts, by layer and over layers.

    Of several servers each tells of the layers that it has, and a point needs them all.
    """
    points = []
    by_server = [newest(events, "experts", "step") for events in recording.servers]
    for step in sorted({step for told in by_server for step in told}):
        events = [told[step] for told in by_server if step in told]
        if len(events) < sum(map(bool, by_server)):
            continue
        pairs = [pair for event in events for pair in zip(_layers_of(event), event["similarity"], strict=True)]
        by_layer = [as_float(value) for _, value in sorted(pairs, key=lambda pair: pair[0])]
        mean = sum(by_layer) / len(by_layer)
        tokens = step * config.tokens_per_step
        points.append({"step": step, "tokens": tokens, "similarity": mean, "similarity_by_layer": by_layer})
    return points


def _layers_of(event: Event) -> Iterable[int]:
    """The layers that an "experts" event tells of; all, in order, where it is older than several servers."""
    layers: Iterable[int] = event.get("layers", range(len(event["similarity"])))
    return layers


def validated_domains(point: Mapping[str, Any]) -> list[str]:
    """The domains that a point of a validation curve tells of; none where the corpus is not divided."""
    return [key.removeprefix("loss_nats/") for key in point if key.startswith("loss_nats/")]


def _validated(shares: list[Event]) -> dict[str, float | None]:
    """Loss over all shares of a validation set."""
    loss_sum_nats, tokens, target_bytes = (total(shares, f) for f in ("loss_sum_nats", "target_tokens", "target_bytes"))
    return {
        "loss_nats": loss_sum_nats / tokens,
        "bits_per_byte": loss_sum_nats / math.log(2) / target_bytes if target_bytes else None,
    }


def first_step_s(recording: Recording) -> float | None:
    """When the first node had taken its first step (seconds since 1970): the origin of elapsed_s."""
    return min((event["time_s"] for event in recording.last_by_node("first_step").values()), default=None)


def uplink_by_step(recording: Recording) -> Callable[[int], float]:
    """A function of the step: payload and framing that a node has sent by its end, mean over nodes.

    In one process group the ring formula gives the bytes of the whole run, of which each step sends an equal share.
    """
    nodes = len(recording.nodes) or 1
    rounds = [event for node in recording.nodes for event in recording.rounds_of_node(node)]
    rounds.sort(key=lambda event: event["step"])
    steps = [event["step"] for event in rounds]
    sent = [event["uplink_payload_bytes"] + event["uplink_framing_bytes"] for event in rounds]
    sums = [0, *accumulate(sent)]
    collectives = recording.last_by_node("collective").values()
    per_step = sum(event["bytes_sent"] / event["steps"] for event in collectives)
    return lambda step: (sums[bisect_right(steps, step)] + per_step * step) / nodes


def _axes(config: RunConfig, recording: Recording) -> Callable[[int, list[Event]], dict[str, Any]]:
    """A function from a step and its events to the step's place on every horizontal axis."""
    origin_s = first_step_s(recording) or 0.0
    uplink_bytes = uplink_by_step(recording)
    return lambda step, events: {
        "step": step,
        "tokens": step * config.tokens_per_step,
        "elapsed_s": max(event["time_s"] for event in events) - origin_s,
        "uplink_bytes": uplink_bytes(step),
    }
