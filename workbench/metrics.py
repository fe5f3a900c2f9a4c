"""The one table of metrics: name, unit and meaning of every number in ``metrics`` of a result.json.

GB is 1e9 bytes. A metric that cannot be computed (a trial that failed early, a method without rounds) is absent. Where
gradients are exchanged at every step, bytes follow from the formula of a ring, and the speed of computing alone and the
shares of the time are absent: the exchange runs inside the step.

Scores of an evaluation are called lm_eval/<task>/<metric>, their standard errors lm_eval/<task>/<metric>_stderr. Where
a corpus has several domains, each has metrics of its own: eval/loss/<domain>, eval/perplexity/<domain> and
eval/bits_per_byte/<domain>, over the validation sequences of that domain.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

SCORE = re.compile(r"lm_eval/[\w.+-]+(?::\d+)?/[\w.+-]+")
"""Names of scores, which are as many as there are tasks."""

_BY_DOMAIN = ("eval/loss", "eval/perplexity", "eval/bits_per_byte")
DOMAIN = re.compile(rf"({'|'.join(_BY_DOMAIN)})/([\w-]+)")
"""Names of metrics of one domain."""


@dataclass(frozen=True)
class Metric:
    """Unit and meaning of one number."""

    unit: str
    meaning: str


METRICS: dict[str, Metric] = {
    "eval/loss": Metric("nats/token", "validation cross-entropy after the last step: Σ loss / Σ tokens over nodes"),
    "eval/perplexity": Metric("1", "exp(eval/loss)"),
    "eval/bits_per_byte": Metric("bits/byte", "validation cross-entropy over the bytes of text it predicts"),
    "train/loss": Metric("nats/token", "training cross-entropy since the last but one training event, over nodes"),
    "comm/uplink_gb": Metric("GB", "sent by a node, mean over nodes: counted payload and framing, or the ring formula"),
    "comm/downlink_gb": Metric("GB", "received by a node, mean over nodes: counted like the uplink"),
    "comm/uplink_predicted_gb": Metric("GB", "payload that a node should send, by arithmetic, mean over nodes"),
    "comm/downlink_predicted_gb": Metric("GB", "payload that a node should receive, by arithmetic, mean over nodes"),
    "comm/framing_fraction": Metric("1", "framing over all bytes, both directions, all nodes"),
    "comm/rounds": Metric("1", "rounds completed"),
    "mem/weights_gb": Metric("GB", "weights held by a node, largest node"),
    "mem/gradients_gb": Metric("GB", "gradients of what a node trains, largest node"),
    "mem/moments_gb": Metric("GB", "optimizer moments of what a node trains, largest node"),
    "mem/activations_gb": Metric("GB", "saved for one backward pass, largest node"),
    "mem/sync_buffers_gb": Metric("GB", "buffers for rounds, largest node"),
    "mem/trained_state_gb": Metric("GB", "weights, gradients and moments together, largest node"),
    "mem/rss_peak_gb": Metric("GB", "largest resident set of a node process, largest node"),
    "mem/cuda_peak_gb": Metric("GB", "largest CUDA memory allocated by a node process, largest node"),
    "mem/server_rss_peak_gb": Metric("GB", "largest resident set of a server process"),
    "perf/tokens_per_s": Metric("tokens/s", "all nodes, with synchronization, without validation"),
    "perf/tokens_per_s_compute": Metric("tokens/s", "all nodes, forward, backward and optimizer only"),
    "perf/share_compute": Metric("1", "share of a node's time without validation: forward, backward, optimizer"),
    "perf/share_data": Metric("1", "share of a node's time without validation: reading batches"),
    "perf/share_serialise": Metric("1", "share of a node's time without validation: encoding and decoding tensors"),
    "perf/share_transfer": Metric("1", "share of a node's time without validation: bytes on their way"),
    "perf/share_wait": Metric("1", "share of a node's time without validation: waiting for other nodes"),
    "perf/share_aggregate": Metric("1", "share of a node's time without validation: the server's mean"),
    "perf/share_merge": Metric("1", "share of a node's time without validation: the server's merge"),
    "perf/round_time_s": Metric("s", "a node's time in one round, all its parts: mean over nodes and rounds"),
    "perf/round_time_predicted_s": Metric(
        "s", "what a round's bytes need on the stated link: largest node, mean round"
    ),
    "perf/wall_time_s": Metric("s", "from the first step's start to the end of training, slowest node"),
    "perf/launch_to_first_step_s": Metric("s", "from the start of the first process until every node took a step"),
    "merge/count": Metric("1", "rounds in which experts were merged"),
    "moe/load_imbalance": Metric("1", "largest over mean expert load, mean over layers, at the last training event"),
}


def is_metric(name: str) -> bool:
    """Whether a result can have a metric of this name."""
    return name in METRICS or any(pattern.fullmatch(name) for pattern in (SCORE, DOMAIN))


def domain_of(name: str) -> str | None:
    """The domain that a metric is about; None where it is about no single one."""
    found = DOMAIN.fullmatch(name)
    return found[2] if found else None


def unit(name: str) -> str:
    """Unit of a metric; empty where it is not known."""
    found = DOMAIN.fullmatch(name)
    metric = METRICS.get(found[1] if found else name)
    return metric.unit if metric else ""
