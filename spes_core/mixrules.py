"""The rules that a mixture of domains must satisfy: data.domains and data.per_node."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING

from spes_core.errors import Problem

if TYPE_CHECKING:
    from spes_core.config import DataConfig, RunConfig

MAX_DOMAINS = 64
"""More would make places slow to find and a report unreadable."""


def mixture_problems(config: RunConfig) -> Iterator[Problem]:
    """Every rule that the mixture of a run breaks."""
    data = config.data
    if data.per_node and not data.domains:
        yield Problem("data.per_node", "must be empty without data.domains, which name the corpora that it mixes")
        return
    if len(data.domains) > MAX_DOMAINS:
        yield Problem("data.domains", f"({len(data.domains)} domains) must be at most {MAX_DOMAINS}; join some")
    if (most := config.validation.max_sequences) < len(data.domains):
        message = f"({most}) must be at least 1 for each of data.domains ({len(data.domains)}), which all are validated"
        yield Problem("validation.max_sequences", message)
    yield from _weight_problems(data)
    if data.per_node:
        yield from _per_node_problems(config)


def _weight_problems(data: DataConfig) -> Iterator[Problem]:
    """Weights of the domains: all or none, and none that a mixture per node would leave without effect."""
    given = {name: domain.weight for name, domain in data.domains.items() if domain.weight is not None}
    if data.per_node:
        for name, weight in given.items():
            message = f"({weight:g}) would be ignored, since data.per_node gives each node's weights; use null"
            yield Problem(f"data.domains.{name}.weight", message)
        return
    if not given:
        return
    yield from _positive(given, "data.domains", ".weight")
    for name in data.domains.keys() - given.keys():
        message = "(null) must be given where other domains' weights are; or leave all out to read domains by size"
        yield Problem(f"data.domains.{name}.weight", message)


def _per_node_problems(config: RunConfig) -> Iterator[Problem]:
    data = config.data
    if len(data.per_node) != config.nodes:
        message = f"({len(data.per_node)} mixtures) must give one mixture for each of nodes ({config.nodes})"
        yield Problem("data.per_node", message)
    for node, weights in enumerate(data.per_node):
        path = f"data.per_node[{node}]"
        if unknown := [name for name in weights if name not in data.domains]:
            names = ", ".join(data.domains)
            yield Problem(path, f"names {', '.join(unknown)}, not among data.domains ({names})")
        yield from _positive(weights, path, "")
    named = {name for weights in data.per_node for name in weights}
    for name in data.domains:
        if name not in named:
            message = "is read by no node; name it in data.per_node, with weight 0 to validate on it only"
            yield Problem(f"data.domains.{name}", message)


def _positive(weights: Mapping[str, float], path: str, leaf: str) -> Iterator[Problem]:
    """Weights must be finite and not negative, and one of them above 0."""
    bad = {name: weight for name, weight in weights.items() if not (math.isfinite(weight) and weight >= 0)}
    for name, weight in bad.items():
        yield Problem(f"{path}.{name}{leaf}", f"({weight:g}) must be a finite number and not negative")
    if not bad and not sum(weights.values()) > 0:
        yield Problem(path, "must give at least one domain a weight above 0")
