"""Nested dicts addressed by dotted paths: the shape in which settings travel before they are typed."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

Tree = dict[str, Any]


def nest(path: str, value: Any) -> Tree:
    """``{"a": {"b": value}}`` for the path "a.b"."""
    for key in reversed(path.split(".")):
        value = {key: value}
    return dict(value)


def nested(value: Any) -> Any:
    """A value with dotted keys taken apart: {sync.interval_steps: 5} is {sync: {interval_steps: 5}}."""
    if not isinstance(value, dict):
        return value
    tree: Tree = {}
    for key, item in value.items():
        tree = merge(tree, nest(key, nested(item)))
    return tree


def merge(below: Mapping[str, Any], above: Mapping[str, Any]) -> Tree:
    """A new tree with the settings of both, mappings joined key by key; where both have a value, ``above`` wins."""
    merged = dict(below)
    for key, value in above.items():
        old = merged.get(key)
        merged[key] = merge(old, value) if isinstance(old, Mapping) and isinstance(value, Mapping) else value
    return merged


def leaves(tree: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """(path, value) of everything in the tree that is no mapping, in order."""
    for key, value in tree.items():
        path = f"{prefix}.{key}" if prefix else key
        if isinstance(value, Mapping):
            yield from leaves(value, path)
        else:
            yield path, value


def lookup(tree: Any, path: str, default: Any = None) -> Any:
    """The value at a path; ``default`` when there is none."""
    for key in path.split("."):
        if not isinstance(tree, Mapping) or key not in tree:
            return default
        tree = tree[key]
    return tree


def without(tree: Mapping[str, Any], path: str) -> Tree:
    """A new tree that lacks the value at a path; unchanged when there is none."""
    key, _, rest = path.partition(".")
    if key not in tree:
        return dict(tree)
    if not rest:
        return {name: value for name, value in tree.items() if name != key}
    child = tree[key]
    return {**tree, key: without(child, rest)} if isinstance(child, Mapping) else dict(tree)


def covers(outer: str, inner: str) -> bool:
    """Whether the setting at ``inner`` is the one at ``outer`` or lies below it."""
    return inner == outer or inner.startswith(outer + ".")
