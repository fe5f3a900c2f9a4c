"""The `search` section of a study file: what is searched, by which rule, read strictly. Pure: no optuna, no files."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, fields
from typing import Any, Literal, TypeVar

from spes_core.errors import ConfigError, Problem
from spes_core.structure import build, nearest
from workbench.metrics import METRICS, is_metric
from workbench.sweep import Sweep, read_values, value_text
from workbench.trees import Tree, covers

T = TypeVar("T")
_MOST_REPRESENTATIVES = 64
_MOST_CORNER_AXES = 6
CORPUS = (
    *("data.corpus", "data.tokenizer", "data.tokenizer_vocab_size", "data.validation_fraction"),
    *("data.text_field", "data.max_repetition"),
)
"""Settings that cannot be searched: each makes another corpus."""


@dataclass(frozen=True, kw_only=True)
class Range:
    """Numbers from ``low`` to ``high``, both included."""

    low: float
    """Smallest value."""
    high: float
    """Largest value."""
    step: float | None = None
    """Distance between neighbours; null for 1 in whole numbers, for none in others."""
    log: bool = False
    """Whether ratios count rather than differences."""


@dataclass(frozen=True, kw_only=True)
class Axis:
    """One searched setting: a list of ``values``, or a range of whole (``is_int``) or real numbers."""

    path: str
    values: tuple[Any, ...] | None = None
    range: Range | None = None
    is_int: bool = False

    @property
    def size(self) -> int | None:
        """How many values it has; None for a continuum."""
        if self.range is None:
            return len(self.values or ())
        step = self.range.step or (1 if self.is_int else None)
        return None if step is None else math.floor((self.range.high - self.range.low) / step + 1e-9) + 1

    @property
    def ends(self) -> tuple[Any, ...]:
        """The first and the last value."""
        if self.range is None:
            assert self.values
            return (self.values[0], self.values[-1]) if len(self.values) > 1 else self.values
        last = self.range.high if self.size is None else self._at(self.size - 1)
        return (self._at(0), last)

    def every(self) -> tuple[Any, ...]:
        """All values of an axis that is no continuum."""
        assert self.size is not None
        return self.values if self.values is not None else tuple(self._at(index) for index in range(self.size))

    def holds(self, value: Any) -> bool:
        """Whether a value lies on the axis."""
        if self.values is not None:
            return any(value == mine and type(value) is type(mine) for mine in self.values)
        if isinstance(value, bool) or not isinstance(value, int | float) or (self.is_int and value != int(value)):
            return False
        assert self.range is not None
        if not self.range.low <= value <= self.range.high:
            return False
        step = self.range.step
        return step is None or abs(round((value - self.range.low) / step) * step - (value - self.range.low)) < 1e-9

    def _at(self, index: int) -> int | float:
        assert self.range is not None
        value = self.range.low + index * (self.range.step or 1)
        return int(value) if self.is_int else value

    def text(self) -> str:
        """The axis in words: "sync.interval_steps: 5 to 100, log"."""
        if self.values is not None:
            return f"{self.path}: {', '.join(map(value_text, self.values))}"
        assert self.range is not None
        low, high = (int(end) if self.is_int else end for end in (self.range.low, self.range.high))
        step = f" in steps of {self.range.step:g}" if self.range.step else ""
        return f"{self.path}: {value_text(low)} to {value_text(high)}{step}{', log' if self.range.log else ''}"


@dataclass(frozen=True, kw_only=True)
class Objective:
    """A metric that is made as good as can be, as its mean over the seeds."""

    metric: str
    """Its name in result.json."""
    goal: Literal["minimize", "maximize"] = "minimize"
    """Which direction is better."""


_LOSS = Objective(metric="eval/loss")


@dataclass(frozen=True, kw_only=True)
class Constraint:
    """What a point must keep; one of the three limits is given. The mean over seeds counts."""

    metric: str
    """Its name in result.json."""
    tolerance: float | None = None
    """At most (1 + tolerance) times the reference's value with the same seed."""
    at_most: float | None = None
    at_least: float | None = None

    def text(self) -> str:
        """The constraint in words: "eval/loss at most 1.02 times the reference's"."""
        if self.tolerance is not None:
            return f"{self.metric} at most {1 + self.tolerance:g} times the reference's"
        limit = f"at most {self.at_most:g}" if self.at_most is not None else f"at least {self.at_least:g}"
        return f"{self.metric} {limit}"


@dataclass(frozen=True, kw_only=True)
class Confirm:
    """The winners are run again with seeds that no choice was made by."""

    top: int = 1
    """How many points count as winners."""
    seeds: tuple[int, ...] = ()
    """Fresh seeds; none for no confirmation."""


@dataclass(frozen=True, kw_only=True)
class SearchKeys:
    """The keys of a search in a study file, for strict reading."""

    n_trials: int = 20
    """Points to evaluate, each with all seeds of the study: the total over all resumes, repeats not counted."""
    space: dict[str, Any] = field(default_factory=dict)
    """By RunConfig path: a list of values, or {low, high, step, log}."""
    arm: str | None = None
    """The arm that is searched; null for the only one of role treatment."""
    sampler: Literal["tpe", "random"] = "tpe"
    """Who proposes the next point: a tree-structured Parzen estimator, or chance."""
    sampler_seed: int = 0
    """Seed of the proposals."""
    objective: Any = "eval/loss"
    """A metric, {metric, goal}, or a list of these: then the points that no other beats in all are the winners."""
    constraints: tuple[dict[str, Any], ...] = ()
    """Limits: {metric, tolerance} against the reference, {metric, at_most} or {metric, at_least}."""
    pruner: Literal["median"] | None = None
    """Median: after each seed, a point whose mean is worse than the median of the others gets no further seed; where
    the objective is eval/loss, the run of its first seed is stopped at a validation already."""
    confirm: Confirm = field(default_factory=Confirm)


@dataclass(frozen=True, kw_only=True)
class Search:
    """A search of one arm's settings."""

    arm: str
    n_trials: int
    axes: tuple[Axis, ...]
    sampler: Literal["tpe", "random"]
    sampler_seed: int
    objectives: tuple[Objective, ...]
    constraints: tuple[Constraint, ...]
    pruner: Literal["median"] | None
    confirm: Confirm

    @property
    def size(self) -> int | None:
        """Number of points of the space; None for a continuum."""
        sizes = [axis.size for axis in self.axes]
        return None if None in sizes else math.prod(size for size in sizes if size is not None)

    @property
    def target(self) -> int:
        """Points to evaluate: as many as asked for, and no more than there are."""
        return self.n_trials if self.size is None else min(self.n_trials, self.size)

    @property
    def prunes_runs(self) -> bool:
        """Whether a run may be stopped at its validations: where their losses are what the search is about."""
        return self.pruner is not None and self.objectives == (_LOSS,)

    def points(self) -> Iterator[dict[str, Any]]:
        """Every point of a space that is no continuum."""
        for values in itertools.product(*(axis.every() for axis in self.axes)):
            yield dict(zip((axis.path for axis in self.axes), values, strict=True))

    def holds(self, point: Mapping[str, Any]) -> bool:
        """Whether a point lies in the space."""
        return point.keys() == {axis.path for axis in self.axes} and all(
            axis.holds(point[axis.path]) for axis in self.axes
        )

    def representatives(self) -> Sweep:
        """Points that stand for the space in plans and checks: all of a small one, else its corners or its two ends."""
        if self.size is not None and self.size <= _MOST_REPRESENTATIVES:
            return Sweep(grid={axis.path: axis.every() for axis in self.axes})
        if len(self.axes) <= _MOST_CORNER_AXES:
            return Sweep(grid={axis.path: axis.ends for axis in self.axes})
        return Sweep(zip={axis.path: (axis.ends[0], axis.ends[-1]) for axis in self.axes})


def read_search(
    keys: SearchKeys, arms: Mapping[str, str], seeds: tuple[int, ...], searched: Tree, problems: list[Problem]
) -> Search | None:
    """The search that the keys describe, without what is wrong in it; None when that leaves no arm or axis.

    The reasons are appended to ``problems``.

    ``arms``: role by name. ``searched``: the own sweep of each arm that has one.
    """
    arm = _arm(keys.arm, arms, problems)
    if arm in searched:
        problems.append(Problem(f"arms.{arm}.sweep", "must be left out: search.space says what varies in this arm"))
    axes = tuple(axis for path, value in _axes(keys.space) if (axis := _axis(path, value, problems)) is not None)
    objectives = _objectives(keys.objective, problems)
    constraints = tuple(
        constraint
        for index, tree in enumerate(keys.constraints)
        if (constraint := _typed(Constraint, tree, f"search.constraints[{index}]", problems)) is not None
    )
    if not keys.space:
        problems.append(
            Problem("search.space", "must hold a setting, such as sync.interval_steps: {low: 5, high: 100}")
        )
    if keys.n_trials < 1:
        problems.append(Problem("search.n_trials", f"({keys.n_trials}) must be at least 1"))
    problems += [*_constraint_rules(constraints, arms), *_pruner_rules(keys, objectives, seeds)]
    problems += _confirm_rules(keys.confirm, seeds)
    if arm is None or not axes:
        return None
    return Search(
        arm=arm,
        n_trials=keys.n_trials,
        axes=axes,
        sampler=keys.sampler,
        sampler_seed=keys.sampler_seed,
        objectives=objectives,
        constraints=constraints,
        pruner=keys.pruner,
        confirm=keys.confirm,
    )


def _arm(name: str | None, arms: Mapping[str, str], problems: list[Problem]) -> str | None:
    treatments = [arm for arm, role in arms.items() if role == "treatment"]
    if name is None and len(treatments) == 1:
        return treatments[0]
    if name is None and "unknown" in arms.values():
        return None
    if name is None:
        message = f"is missing: it names the arm that is searched, and {len(treatments)} arms have role treatment"
        problems.append(Problem("search.arm", message))
    elif name not in arms:
        problems.append(Problem("search.arm", f"({name}) is not an arm{nearest(name, arms)}"))
    elif arms[name] == "reference":
        problems.append(Problem("search.arm", f"({name}) must not be the reference: its points are compared with it"))
    else:
        return name
    return None


def _axes(space: Tree, prefix: str = "") -> Iterator[tuple[str, Any]]:
    """(path, values or range) of every setting of a space: a mapping that holds a word of a range is one."""
    words = {item.name for item in fields(Range)}
    for key, value in space.items():
        path = f"{prefix}.{key}" if prefix else key
        if isinstance(value, Mapping) and not words & value.keys():
            yield from _axes(dict(value), path)
        else:
            yield path, value


def _axis(path: str, value: Any, problems: list[Problem]) -> Axis | None:
    where, before = f"search.space.{path}", len(problems)
    names_corpus = path.startswith("data.domains") and not path.endswith(".weight")
    if names_corpus or any(covers(path, fixed) for fixed in CORPUS):
        problems.append(Problem(where, "cannot be searched: it makes another corpus; give each corpus a study"))
    if isinstance(value, Mapping):
        return _range_axis(path, value, problems)
    if not isinstance(value, list) or not value:
        shown = "null" if value is None else value
        problems.append(Problem(where, f"({shown}) must be a list of values, or a range such as {{low: 5, high: 100}}"))
        return None
    values = read_values(path, value, "search.space", problems)
    if len(problems) > before:
        return None
    if any(isinstance(item, list | dict | tuple) for item in values):
        problems.append(Problem(where, "must be single values: a search cannot propose mappings or lists"))
    repeats = [item for index, item in enumerate(values) if item in values[:index]]
    if repeats:
        problems.append(Problem(where, f"({value_text(repeats[0])}) is listed twice; keep one"))
    return Axis(path=path, values=values) if len(problems) == before else None


def _range_axis(path: str, tree: Mapping[str, Any], problems: list[Problem]) -> Axis | None:
    where, before = f"search.space.{path}", len(problems)
    limits = _typed(Range, dict(tree), where, problems)
    if limits is None:
        return None
    whole = [int(end) if end == int(end) else end for end in (limits.low, limits.high)]
    ends = read_values(path, whole, "search.space", problems)
    if len(problems) > before:
        return None
    if not all(isinstance(end, int | float) and not isinstance(end, bool) for end in ends):
        problems.append(Problem(where, "is no number, so it has no range; list its values"))
        return None
    is_int = all(isinstance(end, int) for end in ends)
    if limits.low >= limits.high:
        problems.append(Problem(f"{where}.low", f"({limits.low:g}) must be below high ({limits.high:g})"))
    if limits.step is not None and (limits.step <= 0 or (is_int and limits.step != int(limits.step))):
        kind = "a whole number above 0" if is_int else "above 0"
        problems.append(Problem(f"{where}.step", f"({limits.step:g}) must be {kind}"))
    if limits.log and limits.low <= 0:
        problems.append(Problem(f"{where}.low", f"({limits.low:g}) must be above 0 where log is true"))
    if limits.log and limits.step is not None:
        problems.append(Problem(f"{where}.step", "cannot be set where log is true; leave one of them out"))
    return Axis(path=path, range=limits, is_int=is_int) if len(problems) == before else None


def _objectives(value: Any, problems: list[Problem]) -> tuple[Objective, ...]:
    items = value if isinstance(value, list) else [value]
    read = []
    for index, item in enumerate(items):
        where = f"search.objective[{index}]" if isinstance(value, list) else "search.objective"
        tree = {"metric": item} if isinstance(item, str) else item
        if (objective := _typed(Objective, tree, where, problems)) is not None:
            read.append(objective)
    if not items:
        problems.append(Problem("search.objective", "must name at least one metric, such as eval/loss"))
    metrics = [objective.metric for objective in read]
    if len(set(metrics)) < len(metrics):
        problems.append(Problem("search.objective", f"({', '.join(metrics)}) must name each metric once"))
    return tuple(read)


def _typed(kind: type[T], tree: Any, where: str, problems: list[Problem]) -> T | None:
    """A part of a search; its metric, if it has one, must exist."""
    try:
        part = build(kind, tree, where)
    except ConfigError as error:
        problems += error.problems
        return None
    metric = getattr(part, "metric", None)
    if metric is not None and not is_metric(metric):
        problems.append(Problem(f"{where}.metric", f"({metric}) is not a metric{nearest(metric, METRICS)}"))
        return None
    return part


def _constraint_rules(constraints: tuple[Constraint, ...], arms: Mapping[str, str]) -> Iterator[Problem]:
    for index, constraint in enumerate(constraints):
        limits = (constraint.tolerance, constraint.at_most, constraint.at_least)
        if sum(limit is not None for limit in limits) != 1:
            yield Problem(f"search.constraints[{index}]", "must give one of tolerance, at_most and at_least")
        if constraint.tolerance is not None and constraint.tolerance < 0:
            where = f"search.constraints[{index}].tolerance"
            yield Problem(where, f"({constraint.tolerance:g}) must not be negative")
        if constraint.tolerance is not None and not {"reference", "unknown"} & {*arms.values()}:
            yield Problem(f"search.constraints[{index}].tolerance", "needs an arm of role reference; add one")


def _pruner_rules(keys: SearchKeys, objectives: tuple[Objective, ...], seeds: tuple[int, ...]) -> Iterator[Problem]:
    if keys.pruner is None:
        return
    why = None
    if len(objectives) > 1:
        why = "cannot rank points by several objectives"
    elif keys.constraints:
        why = "sees the objective alone, so it would favour points that break search.constraints"
    elif len(seeds) < 2 and objectives != (_LOSS,):
        why = "stops a point between two seeds, and seeds has only one (with eval/loss to minimize, within its run too)"
    if why:
        yield Problem("search.pruner", f"({keys.pruner}) {why}; leave it out")


def _confirm_rules(confirm: Confirm, seeds: tuple[int, ...]) -> Iterator[Problem]:
    if confirm.top < 1:
        yield Problem("search.confirm.top", f"({confirm.top}) must be at least 1")
    if len(set(confirm.seeds)) < len(confirm.seeds):
        yield Problem("search.confirm.seeds", f"({list(confirm.seeds)}) must differ from each other")
    if known := sorted(set(confirm.seeds) & set(seeds)):
        message = f"({', '.join(map(str, known))}) must be fresh: the search chooses by them under seeds"
        yield Problem("search.confirm.seeds", message)
