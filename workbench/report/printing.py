"""How numbers, units and axes are printed: the same in every sentence, table and figure."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import PurePath
from typing import Any

from workbench.metrics import domain_of
from workbench.statistics import Interval

DASH = "–"
"""Stands where there is no number."""
NBSP = "\u00a0"
"""Space at which no line breaks."""

_AXES = {
    "sync.interval_steps": ("H", "H, optimizer steps between two rounds"),
    "merge.num_neighbours": ("K", "K, neighbours that an expert is merged with"),
    "merge.alpha": ("α", "α, weight of the merge at step 0"),
    "merge.interval_steps": ("merge interval", "steps between two merges"),
    "merge.until_step": ("T_merge", "T_merge, step at which merging ends"),
    "merge.enabled": ("merging", "merging of similar experts"),
    "nodes": ("N", "N, nodes"),
    "model.num_experts": ("E", "E, experts per layer"),
    "model.top_k": ("top-k", "experts per token"),
    "budget_tokens": ("tokens", "training tokens"),
    "optim.lr": ("learning rate", "learning rate"),
    "outer.lr": ("outer learning rate", "outer learning rate"),
    "link.uplink_mbps": ("uplink bandwidth", "uplink bandwidth (Mbit/s)"),
    "link.downlink_mbps": ("downlink bandwidth", "downlink bandwidth (Mbit/s)"),
    "wire.dtype": ("wire dtype", "type of tensors on the wire"),
    "aggregate.rule": ("rule", "rule by which the nodes' values become one"),
    "faults.kind": ("fault", "what the faulty node sends instead of its update"),
}
_METRICS = {
    "eval/loss": ("validation loss", "nats per token"),
    "eval/perplexity": ("validation perplexity", ""),
    "eval/bits_per_byte": ("validation loss", "bits per byte"),
    "train/loss": ("training loss", "nats per token"),
    "comm/uplink_gb": ("uplink of a node", "GB"),
    "comm/downlink_gb": ("downlink of a node", "GB"),
    "mem/trained_state_gb": ("trained state", "GB"),
    "perf/tokens_per_s": ("speed", "tokens per second"),
}


def axis_symbol(path: str) -> str:
    """Short name of a swept setting: "H"."""
    return _AXES[path][0] if path in _AXES else path.rsplit(".", 1)[-1].replace("_", " ")


def axis_label(path: str) -> str:
    """Name of a swept setting with what it counts."""
    return _AXES[path][1] if path in _AXES else path


def metric_name(metric: str) -> str:
    """Name of a metric in running text."""
    if (domain := domain_of(metric)) is not None:
        return f"{metric_name(metric.removesuffix(f'/{domain}'))} on {domain}"
    return _METRICS[metric][0] if metric in _METRICS else metric


def metric_unit(metric: str) -> str:
    """Unit of a metric; empty when it has none or it is not known."""
    metric = metric.removesuffix(f"/{domain_of(metric)}")
    return _METRICS[metric][1] if metric in _METRICS else ""


def metric_label(metric: str) -> str:
    """Name and unit of a metric, for an axis."""
    unit = metric_unit(metric)
    return f"{metric_name(metric)} ({unit})" if unit else metric_name(metric)


def axis_value(value: Any) -> str:
    """A value of a setting; of an absolute path only its last name, the rest being the machine's."""
    if value is None:
        return DASH
    if isinstance(value, bool):
        return "on" if value else "off"
    if isinstance(value, str) and value.startswith("/"):
        return PurePath(value).name
    if isinstance(value, list | tuple) and value and all(isinstance(item, Mapping) for item in value):
        return "; ".join(", ".join(f"{name} {axis_value(part)}" for name, part in item.items()) for item in value)
    return f"{value:g}" if isinstance(value, float) else str(value)


def setting(path: str | None, value: Any) -> str:
    """ "H = 50", kept on one line."""
    return f"{axis_symbol(path or '')}{NBSP}={NBSP}{axis_value(value)}"


def sample_size(n: int | str) -> str:
    """ "n = 3", kept on one line."""
    return f"n{NBSP}={NBSP}{n}"


def missing(value: Any) -> bool:
    """Whether there is no number: None or NaN (a data frame turns None into NaN)."""
    return value is None or (isinstance(value, float) and math.isnan(value))


def loss(value: Any) -> str:
    """A loss in nats, to the fourth decimal place below 1 and the third above."""
    return DASH if missing(value) else minus(f"{value:.3f}" if abs(value) >= 1 else f"{value:.4f}")


def significant(value: Any, digits: int = 3) -> str:
    """A number to ``digits`` significant figures, never in exponents between 1e-4 and 1e12."""
    if missing(value):
        return DASH
    if value == 0:
        return "0"
    magnitude = math.floor(math.log10(abs(value)))
    if not -4 <= magnitude < 12:
        return minus(f"{value:.{digits - 1}e}")
    return minus(f"{round(value, digits - 1 - magnitude):,.{max(0, digits - 1 - magnitude)}f}")


def integer(value: Any) -> str:
    """A whole number with separators."""
    return DASH if missing(value) else minus(f"{round(value):,}")


def percent(fraction: Any, *, signed: bool = False, digits: int = 1) -> str:
    """A fraction in per cent; with two decimals where it would print as zero."""
    if missing(fraction):
        return DASH
    value = 100 * fraction
    if value and abs(value) < 0.5 * 10**-digits:
        digits = 2
    return minus(f"{value:{'+' if signed else ''}.{digits}f}") + f"{NBSP}%"


def percent_interval(interval: Interval) -> str:
    """ "[+0.20, +1.40] %", or a dash without bounds."""
    if interval.low is None or interval.high is None:
        return DASH
    return minus(f"[{100 * interval.low:+.2f}, {100 * interval.high:+.2f}]{NBSP}%")


def duration(seconds: Any) -> str:
    """A time span in the largest unit that keeps it above 1."""
    if missing(seconds):
        return DASH
    for size, unit in ((3600, "h"), (60, "min")):
        if seconds >= 2 * size:
            return f"{seconds / size:.1f} {unit}"
    return f"{seconds:.1f} s"


def p_value(p: Any) -> str:
    """A permutation p value."""
    return DASH if missing(p) else (f"{p:.3f}" if p >= 0.001 else "< 0.001")


def minus(text: str) -> str:
    """The text with a typographic minus sign."""
    return text.replace("-", "−")


@dataclass(frozen=True, kw_only=True)
class Scale:
    """A unit for quantities stored in GB (1e9 bytes): the factor to multiply with, and its name."""

    factor: float
    unit: str

    def show(self, gigabytes: Any) -> str:
        """The quantity in this unit, without it."""
        return DASH if missing(gigabytes) else significant(gigabytes * self.factor)


def scale_for(gigabytes: Iterable[float]) -> Scale:
    """GB when any quantity reaches 1 GB, otherwise MB (1e6 bytes)."""
    largest = max((value for value in gigabytes if not missing(value)), default=0.0)
    return Scale(factor=1.0, unit="GB") if largest >= 1 else Scale(factor=1e3, unit="MB")


def join(words: Sequence[str], last: str = "and") -> str:
    """ "a, b and c"."""
    return words[0] if len(words) == 1 else f"{', '.join(words[:-1])} {last} {words[-1]}" if words else ""


def sentence(text: str) -> str:
    """The text with a capital first letter; the rest, names of arms above all, as it is."""
    return text[:1].upper() + text[1:]


def count(number: int, noun: str, plural: str | None = None) -> str:
    """ "1 seed", "3 seeds"."""
    return f"{number:,} {noun if number == 1 else plural or noun + 's'}"
