"""result.json of one trial, computed from the files of its folder and nothing else.

Read: trial.json, run.json, outcome.json, events/*.jsonl, evaluation.json. Everything can be recomputed at any time,
and a trial that failed early has fewer numbers, never an exception. What metrics mean is said in `workbench.metrics`.
"""

from __future__ import annotations

import math
from dataclasses import asdict
from pathlib import Path
from typing import Any

from spes_core.config import RunConfig, to_dict
from spes_core.model import counting
from spes_core.runfile import RunFile
from workbench.curves import experts_curve, train_curve, validated_domains, validation_curve
from workbench.durable import read_json
from workbench.evaluating_scores import FILE as EVALUATION
from workbench.evaluating_scores import read_scores, with_scores
from workbench.metrics import is_metric
from workbench.plan import round_transfer_s
from workbench.recording import Recording, largest, last, mean_of, of_kind, total

GB = 1e9
_TIMES = ("compute", "data", "serialise", "transfer", "wait", "aggregate", "merge", "validate")
_SHARES = ("compute", "data", "serialise", "transfer", "wait", "aggregate", "merge")
_ROUND = ("serialise", "transfer", "wait", "aggregate", "merge")
_MEMORY = ("weights", "gradients", "moments", "activations", "sync_buffers", "rss_peak", "cuda_peak")
_TRAINED_STATE = ("weights", "gradients", "moments")
_BYTES = tuple(f"{link}_{part}_bytes" for part in ("payload", "framing") for link in ("uplink", "downlink"))

_UNKNOWN_OUTCOME: dict[str, Any] = {
    "status": "interrupted",
    "error": {"message": "the controller was killed", "process": None, "log_tail": []},
    "started_at": None,
    "finished_at": None,
    "launched_at_s": None,
}


def build_result(trial_dir: Path) -> dict[str, Any]:
    """The content of result.json for the trial in ``trial_dir``, whose processes have ended.

    Numbers that are not finite (a run that diverged) are null in curves; as metrics they are left out and named in
    ``non_finite``. Raises ConfigError when run.json is missing or broken.
    """
    config = RunFile.load(trial_dir / "run.json").config
    about = read_json(trial_dir / "trial.json") or {"trial": {}, "provenance": {}, "data": {}}
    outcome = read_json(trial_dir / "outcome.json") or _UNKNOWN_OUTCOME
    recording = Recording(trial_dir / "events")
    curves = {
        "train": train_curve(config, recording),
        "validation": validation_curve(config, recording),
    }
    if experts := experts_curve(config, recording):
        curves["experts"] = experts
    # The launch that a resumed run's first step followed is not the one that this outcome tells of.
    resumed_at_step = outcome.get("resumed_at_step", 0)
    launched_at_s = None if resumed_at_step else outcome["launched_at_s"]
    metrics = compute_metrics(config, recording, curves, launched_at_s)
    assert all(map(is_metric, metrics))
    finite = {name: value for name, value in metrics.items() if math.isfinite(value)}
    result = {
        "schema": 1,
        "trial": about["trial"],
        "status": outcome["status"],
        "error": outcome["error"],
        "started_at": outcome["started_at"],
        "finished_at": outcome["finished_at"],
        "resumed_at_step": resumed_at_step,
        "config": to_dict(config),
        "data": data_summary(about["data"]),
        "metrics": finite,
        "non_finite": sorted(metrics.keys() - finite.keys()),
        "curves": curves,
        "rounds": round_table(recording),
        "memory": {"measured": measured_memory(recording), "predicted": predicted_memory(config)},
        "time_s": mean_times(recording),
        "expert_load": expert_load(recording),
        "server": server_summary(recording),
        "provenance": about["provenance"],
    }
    cleaned: dict[str, Any] = _without_non_finite(result)
    return with_scores(cleaned, read_scores(trial_dir / EVALUATION))


def compute_metrics(
    config: RunConfig,
    recording: Recording,
    curves: dict[str, list[dict[str, Any]]],
    launched_at_s: float | None,
) -> dict[str, float]:
    """Every metric that the events allow."""
    metrics: dict[str, float | None] = {}
    if curves["validation"] and curves["validation"][-1]["step"] == config.total_steps:
        final = curves["validation"][-1]
        for domain in ("", *(f"/{name}" for name in validated_domains(final))):
            metrics[f"eval/loss{domain}"] = final[f"loss_nats{domain}"]
            metrics[f"eval/perplexity{domain}"] = _exp(final[f"loss_nats{domain}"])
            metrics[f"eval/bits_per_byte{domain}"] = final[f"bits_per_byte{domain}"]
    if curves["train"]:
        metrics["train/loss"] = curves["train"][-1]["loss_nats"]
    metrics |= communication(config, recording)
    metrics |= memory_metrics(recording)
    metrics |= speed(config, recording)
    metrics["perf/launch_to_first_step_s"] = launch_to_first_step_s(config, recording, launched_at_s)
    metrics["moe/load_imbalance"] = load_imbalance(recording)
    return {name: value for name, value in metrics.items() if value is not None}


def communication(config: RunConfig, recording: Recording) -> dict[str, float | None]:
    """comm/* and merge/count; the predicted bytes are payload, to be compared with the measured payload."""
    nodes = list(recording.nodes)
    collective = recording.last_by_node("collective")
    if config.sync.exchange == "gradients":
        sent = mean_of(list(collective.values()), "bytes_sent") / GB if collective else None
        return {"comm/uplink_gb": sent, "comm/downlink_gb": sent, "comm/rounds": 0, "merge/count": 0}
    if config.sync.exchange == "none":
        return {"comm/uplink_gb": 0, "comm/downlink_gb": 0, "comm/rounds": 0, "merge/count": 0}
    rounds = [event for node in nodes for event in recording.rounds_of_node(node)]
    if not rounds:
        return {}
    sums = {field: total(rounds, field) for field in _BYTES}
    predicted = [counting.run_bytes(config, node) for node in range(config.nodes)]
    uplink = sums["uplink_payload_bytes"] + sums["uplink_framing_bytes"]
    downlink = sums["downlink_payload_bytes"] + sums["downlink_framing_bytes"]
    framing = sums["uplink_framing_bytes"] + sums["downlink_framing_bytes"]
    server_rounds = recording.server_rounds()
    return {
        "comm/uplink_gb": uplink / len(nodes) / GB,
        "comm/downlink_gb": downlink / len(nodes) / GB,
        "comm/uplink_predicted_gb": sum(part.uplink_payload_bytes for part in predicted) / config.nodes / GB,
        "comm/downlink_predicted_gb": sum(part.downlink_payload_bytes for part in predicted) / config.nodes / GB,
        "comm/framing_fraction": framing / (uplink + downlink) if uplink + downlink else None,
        "comm/rounds": len(server_rounds),
        "merge/count": sum(bool(event["merged"]) for event in server_rounds),
    }


def memory_metrics(recording: Recording) -> dict[str, float | None]:
    """mem/*: the largest node counts."""
    events = list(recording.last_by_node("memory").values())
    metrics: dict[str, float | None] = {}
    for part in _MEMORY:
        metrics[f"mem/{part}_gb"] = _gb(largest(event[f"{part}_bytes"] for event in events))
    states = (sum(event[f"{part}_bytes"] for part in _TRAINED_STATE) for event in events)
    metrics["mem/trained_state_gb"] = _gb(largest(states))
    metrics["mem/server_rss_peak_gb"] = _gb(server_rss_peak_bytes(recording))
    return metrics


def speed(config: RunConfig, recording: Recording) -> dict[str, float | None]:
    """perf/* that come from the closing event of each node; nothing when a node has none.

    Where gradients are exchanged the collectives run inside forward and backward, so that no clock tells them from
    computing: neither the speed of computing alone nor any share of the time is given.
    """
    events = list(recording.last_by_node("end").values())
    if len(events) < config.num_recorders:
        return {}
    training_s = [event["wall_time_s"] - event["validate_s"] for event in events]
    metrics: dict[str, float | None] = {
        "perf/tokens_per_s": total(events, "tokens") / max(training_s),
        "perf/wall_time_s": max(event["wall_time_s"] for event in events),
    }
    if config.sync.exchange == "gradients":
        return metrics
    metrics["perf/tokens_per_s_compute"] = sum(event["tokens"] / event["compute_s"] for event in events)
    for part in _SHARES:
        metrics[f"perf/share_{part}"] = total(events, f"{part}_s") / sum(training_s)
    if rounds := sum(len(recording.rounds_of_node(node)) for node in recording.nodes):
        metrics["perf/round_time_s"] = sum(total(events, f"{part}_s") for part in _ROUND) / rounds
        metrics["perf/round_time_predicted_s"] = round_transfer_s(config)
    return metrics


def launch_to_first_step_s(config: RunConfig, recording: Recording, launched_at_s: float | None) -> float | None:
    """From the start of the first process (as the controller saw it) until every node had taken a step."""
    first_steps: list[float] = [event["time_s"] for event in recording.last_by_node("first_step").values()]
    if launched_at_s is None or len(first_steps) < config.num_recorders:
        return None
    return max(first_steps) - launched_at_s


def expert_load(recording: Recording) -> list[list[float]]:
    """Share of the routed tokens that each expert got, by layer, over all nodes, at the last training event."""
    by_step = recording.by_step("load")
    if not by_step:
        return []
    events = by_step[max(by_step)]
    shares = []
    for layers in zip(*(event["expert_tokens"] for event in events), strict=True):
        counts = [sum(column) for column in zip(*layers, strict=True)]
        shares.append([count / (sum(counts) or 1) for count in counts])
    return shares


def load_imbalance(recording: Recording) -> float | None:
    """Largest over mean expert load, mean over layers; 1 is perfect balance."""
    shares = expert_load(recording)
    return sum(max(layer) * len(layer) for layer in shares) / len(shares) if shares else None


def round_table(recording: Recording) -> list[dict[str, Any]]:
    """The rounds as the server saw them; byte counts are lists in node order, null for an absent node."""
    table = []
    for event in recording.server_rounds():
        row = {field: event[field] for field in ("round", "step", "merged", "round_time_s")}
        for field in _BYTES:
            by_node = {int(node): count for node, count in event[field].items()}
            row[field] = [by_node.get(node) for node in sorted(recording.nodes)]
        table.append(row)
    return table


def measured_memory(recording: Recording) -> list[dict[str, Any]]:
    """Bytes of each node by part."""
    return [
        {"node": node} | {f"{part}_bytes": event[f"{part}_bytes"] for part in _MEMORY}
        for node, event in recording.last_by_node("memory").items()
    ]


def predicted_memory(config: RunConfig) -> list[dict[str, Any]]:
    """Bytes of each process by part, by arithmetic."""
    return [{"node": node} | asdict(counting.memory(config, node)) for node in range(config.num_recorders)]


def mean_times(recording: Recording) -> dict[str, float]:
    """Seconds by phase, mean over nodes; where gradients are exchanged, "compute" contains their exchange."""
    events = list(recording.last_by_node("end").values())
    return {part: mean_of(events, f"{part}_s") for part in _TIMES} if events else {}


def server_summary(recording: Recording) -> dict[str, Any]:
    """What only the server knows."""
    told = [event for events in recording.servers for event in of_kind(events, "refusal")]
    refusals = [{"node": event["node"], "reason": event["reason"]} for event in told]
    return {"rss_peak_bytes": server_rss_peak_bytes(recording), "refusals": refusals}


def server_rss_peak_bytes(recording: Recording) -> int | None:
    """Largest resident set of a server process; None before one has ended."""
    ends = [last(events, "end") for events in recording.servers]
    return max((end["rss_peak_bytes"] for end in ends if end), default=None)


def data_summary(header: dict[str, Any]) -> dict[str, Any]:
    """What identifies the data, from header.json of the corpus folder."""
    summary = {key: value for key, value in header.items() if not isinstance(value, dict)}
    for split in ("train", "validation"):
        summary |= {f"{split}_{key}": value for key, value in header.get(split, {}).items()}
    if domains := header.get("domains"):
        summary["domains"] = {
            name: {f"{split}_tokens": domain[split]["tokens"] for split in ("train", "validation")}
            for name, domain in domains.items()
        }
    return summary | ({"skipped": header["skipped"]} if "skipped" in header else {})


def _exp(value: float) -> float:
    return math.exp(value) if value < 700 else math.inf


def _gb(nbytes: float | None) -> float | None:
    return None if nbytes is None else nbytes / GB


def _without_non_finite(value: Any) -> Any:
    if isinstance(value, float) and not math.isfinite(value):
        return None
    if isinstance(value, dict):
        return {key: _without_non_finite(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_without_non_finite(item) for item in value]
    return value
