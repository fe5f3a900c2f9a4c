"""The axes of a sweep: what varies between the trials of an arm."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from spes_core.config import RunConfig
from spes_core.errors import ConfigError, Problem
from spes_core.structure import build
from workbench.trees import Tree, leaves, lookup, merge, nest

Values = tuple[Any, ...]


@dataclass(frozen=True, kw_only=True)
class Sweep:
    """All combinations of the ``grid`` axes with the rows of ``zip``, less those that ``exclude`` matches."""

    grid: dict[str, Values] = field(default_factory=dict)
    """Values by RunConfig path."""
    zip: dict[str, Values] = field(default_factory=dict)
    """Values by RunConfig path, of equal number, that vary together."""
    exclude: tuple[dict[str, Any], ...] = ()
    """Points, or parts of points, that are left out."""

    @property
    def axes(self) -> tuple[str, ...]:
        """Paths of all axes, in order."""
        return (*self.grid, *self.zip)

    def points(self) -> list[dict[str, Any]]:
        """The value of every axis at each point, the last grid axis varying fastest; one empty point without axes."""
        rows = list(zip(*self.zip.values(), strict=True)) if self.zip else [()]
        points = [
            dict(zip(self.axes, (*choice, *row), strict=True))
            for choice in itertools.product(*self.grid.values())
            for row in rows
        ]
        return [point for point in points if not any(rule.items() <= point.items() for rule in self.exclude)]


@dataclass(frozen=True, kw_only=True)
class SweepKeys:
    """The keys of a sweep in a study file, for strict reading."""

    grid: dict[str, Any] = field(default_factory=dict)
    """A list of values for each setting; all combinations are run."""
    zip: dict[str, Any] = field(default_factory=dict)
    """Lists of equal length for settings that vary together."""
    exclude: tuple[dict[str, Any], ...] = ()
    """Points, or parts of points, that are left out."""


def read_axes(tree: Tree, prefix: str, problems: list[Problem]) -> Tree:
    """{"grid": {path: values}, "zip": ..., "exclude": [...]} with flat paths and typed values, less what is wrong.

    A null instead of values stays: under an arm it takes the study's axis away.
    """
    axes: Tree = {}
    for kind in ("grid", "zip"):
        read = {}
        for path, values in leaves(tree.get(kind, {})):
            if values is None or (values := read_values(path, values, f"{prefix}.{kind}", problems)):
                read[path] = values
        if read:
            axes[kind] = read
    if "exclude" in tree:
        axes["exclude"] = [dict(leaves(rule)) for rule in tree["exclude"]]
    return axes


def combine(shared: Tree, own: Tree, prefix: str, problems: list[Problem]) -> Sweep:
    """The sweep of an arm: the study's axes, the arm's own ones replacing those of the same path."""
    # An axis that the arm grids itself leaves the study's zip, and the other way round.
    for kind, other in (("grid", "zip"), ("zip", "grid")):
        moved = {path: None for path in own.get(kind, {}) if path in shared.get(other, {})}
        shared = merge(shared, {other: moved}) if moved else shared
    axes = merge(shared, own)
    grid = {path: values for path, values in axes.get("grid", {}).items() if values is not None}
    zipped = {path: values for path, values in axes.get("zip", {}).items() if values is not None}
    for path in grid.keys() & zipped.keys():
        problems.append(Problem(f"{prefix}.zip.{path}", "is also an axis of the grid; keep one"))
        del zipped[path]
    if len({len(values) for values in zipped.values()}) > 1:
        counts = ", ".join(f"{path} has {len(values)}" for path, values in zipped.items())
        where = prefix if zipped.keys() & own.get("zip", {}).keys() else "sweep"
        problems.append(Problem(f"{where}.zip", f"must have as many values on each axis: {counts}"))
        zipped = {}
    where = f"{prefix if 'exclude' in own else 'sweep'}.exclude"
    problems += _idle_exclusions(axes.get("exclude", []), {**grid, **zipped}, shared, where)
    return Sweep(grid=grid, zip=zipped, exclude=tuple(axes.get("exclude", [])))


def _idle_exclusions(rules: list[Tree], axes: dict[str, Values], shared: Tree, where: str) -> Iterator[Problem]:
    """Exclusions that can match no point: of what is no axis, or of a value that lies on none."""
    for index, rule in enumerate(rules):
        for path, value in rule.items():
            # A rule of the study may be about the study's values, also under an arm with values of its own.
            values = [*axes.get(path, ()), *(shared.get("grid", {}).get(path) or shared.get("zip", {}).get(path) or ())]
            if path not in axes:
                known = ", ".join(axes) or "none"
                yield Problem(f"{where}[{index}]", f"({path}) is no axis of this sweep; axes: {known}")
            elif value not in values:
                shown = ", ".join(map(value_text, axes[path]))
                yield Problem(f"{where}[{index}]", f"({path}: {value_text(value)}) lies on no axis; values: {shown}")


def read_values(path: str, values: Any, prefix: str, problems: list[Problem]) -> Values:
    """The typed values of one axis; empty, with the reason in ``problems``, when they cannot be used."""
    wrong = None
    if path == "seed":
        wrong = "cannot be an axis: seeds are replicates; list them under seeds"
    elif path == "method":
        wrong = "cannot be an axis: methods are compared as arms; add an arm for each"
    elif not isinstance(values, list) or not values:
        wrong = f"({values}) must be a list of at least one value"
    if wrong:
        problems.append(Problem(f"{prefix}.{path}", wrong))
        return ()
    typed = []
    for value in values:
        try:
            config = build(RunConfig, nest(path, value), prefix)
        except ConfigError as error:
            problems += [problem for problem in error.problems if problem not in problems]
            continue
        typed.append(value if isinstance(value, dict) else _setting(config, path))
    return tuple(typed)


def _setting(config: RunConfig, path: str) -> Any:
    value: Any = config
    for name in path.split("."):
        value = getattr(value, name)
    return value


def axis_label(path: str, axes: tuple[str, ...]) -> str:
    """The shortest ending of an axis' path that no other axis shares: "interval_steps"."""
    parts = path.split(".")
    for start in range(len(parts) - 1, 0, -1):
        label = ".".join(parts[start:])
        if not any(other != path and other.endswith("." + label) for other in axes):
            return label
    return path


def at(axes: dict[str, Any]) -> Tree:
    """The settings of one point as a tree."""
    tree: Tree = {}
    for path, value in axes.items():
        tree = merge(tree, nest(path, value))
    return tree


def value_text(value: Any) -> str:
    """An axis value as it appears in names and tables."""
    if value is None or isinstance(value, bool):
        return {None: "null", True: "true", False: "false"}[value]
    if isinstance(value, dict):
        return ",".join(f"{path}={value_text(lookup(value, path))}" for path, _ in leaves(value))
    return f"{value:g}" if isinstance(value, float) and float(f"{value:g}") == value else str(value)
