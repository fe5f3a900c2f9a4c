"""Whether a node belongs to this run, and in what it differs when it does not."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

from spes_core.config import NOT_IDENTITY
from spes_core.sync.messages import Hello, Schema

_MOST_DIFFERENCES = 5
_NOT_IDENTITY = tuple(f"{path}." for path in NOT_IDENTITY)


def differences(theirs: Hello, ours: Hello) -> list[str]:
    """Each thing in which a node's hello departs from the one this run expects of it; empty when it may join."""
    found: list[str] = []
    if theirs.protocol_version != ours.protocol_version:
        found.append(f"protocol version {theirs.protocol_version}, here {ours.protocol_version}: install one release")
    if theirs.num_nodes != ours.num_nodes:
        found.append(f"nodes {theirs.num_nodes}, here {ours.num_nodes}")
    if theirs.config_digest != ours.config_digest:
        found += _config_differences(theirs.config_json, ours.config_json) or ["configuration digest"]
    if theirs.schema_digest != ours.schema_digest or theirs.schema != ours.schema:
        found.append(_schema_difference(theirs.schema, ours.schema))
    if theirs.experts != ours.experts:
        found.append(f"experts trained {list(theirs.experts)}, here {list(ours.experts)}")
    return found


def _config_differences(theirs: str, ours: str) -> list[str]:
    try:
        left, right = dict(_leaves(json.loads(theirs))), dict(_leaves(json.loads(ours)))
    except (ValueError, RecursionError):
        return []
    paths = [
        path
        for path in sorted(left.keys() | right.keys())
        if left.get(path) != right.get(path) and not f"{path}.".startswith(_NOT_IDENTITY)
    ]
    named = [f"{path} {left.get(path, 'absent')}, here {right.get(path, 'absent')}" for path in paths]
    more = [f"{len(named) - _MOST_DIFFERENCES} more settings"] if len(named) > _MOST_DIFFERENCES else []
    return named[:_MOST_DIFFERENCES] + more


def _leaves(tree: Any, path: str = "") -> Iterator[tuple[str, str]]:
    if not isinstance(tree, dict):
        yield path, repr(tree)
        return
    for key, value in tree.items():
        yield from _leaves(value, f"{path}.{key}" if path else str(key))


def _schema_difference(theirs: Schema, ours: Schema) -> str:
    for index, (left, right) in enumerate(zip(theirs, ours, strict=False)):
        if left != right:
            return f"tensor {index} {left}, here {right}"
    return f"number of tensors {len(theirs)}, here {len(ours)}" if len(theirs) != len(ours) else "schema digest"
