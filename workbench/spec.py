"""A study as typed data: what its file says, read strictly, with every mistake and its place kept for one report."""

from __future__ import annotations

import types
import typing
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, is_dataclass, replace
from pathlib import Path
from typing import Any, Literal, TypeVar, Union

from spes_core.config import RunConfig, to_dict
from spes_core.errors import ConfigError, Problem
from spes_core.rules import named_paths
from spes_core.structure import build, nearest
from workbench.compose import NAME, Composition, compose_study
from workbench.doubt import certain_exclusions, is_leaf, is_setting, places, within
from workbench.metrics import METRICS, is_metric
from workbench.searchspace import Search, SearchKeys, read_search
from workbench.settings import Divergence, Evaluation, Hardware, Launcher, Metrics, ReportSettings, Resources
from workbench.studyfile import OWN
from workbench.sweep import Sweep, SweepKeys, combine, read_axes
from workbench.trees import Tree, covers, leaves, lookup, merge, without

Role = Literal["treatment", "baseline", "reference"]
T = TypeVar("T")


@dataclass(frozen=True, kw_only=True)
class Arm:
    """One method setting that a study compares."""

    name: str
    role: Role
    settings: Tree
    """RunConfig settings of this arm: shared ones, then its method's, then its own."""
    sweep: Sweep
    """What varies in it; under a search, points that stand for the space."""
    open_paths: tuple[str, ...] = ()
    """Settings that mistakes leave open (see `workbench.doubt`); none in a study without mistakes."""


@dataclass(frozen=True, kw_only=True)
class Study:
    """A question and the runs that answer it.

    ``mistakes`` holds what is wrong so far; the settings concerned are left out. `trials.expand` adds the rules that
    only whole runs can break, and raises StudyError with all.
    """

    name: str
    question: str
    arms: tuple[Arm, ...]
    seeds: tuple[int, ...]
    equal: tuple[str, ...]
    resources: Resources
    divergence: Divergence
    metrics: Metrics
    report: ReportSettings
    launcher: Launcher
    hardware: Hardware
    evaluation: Evaluation
    composition: Composition
    search: Search | None = None
    mistakes: tuple[str, ...] = ()

    def locate(self, problem: Problem) -> str:
        """One line for a problem whose path is a path of the study file."""
        return f"{self.composition.place(problem.path)}: {problem}"

    def locate_run(self, arm: Arm, axes: Mapping[str, Any], problem: Problem) -> str:
        """One line for a problem of a resolved run, whose path is a RunConfig path: at the place that caused it.

        Of the settings that a broken rule names, the one that was set last is blamed: by an override before by the
        study file before by a config group.
        """
        named = [problem.path, *filter(is_leaf, named_paths(problem)[1:])]
        writings = [self._writing(arm, axes, path) for path in named]
        places = [writing[0] for writing in writings if writing is not None]
        path = writings[0][1] if writings[0] else f"run.{problem.path}"
        note = "" if places else f" (a default; arms.{arm.name} uses it)"
        place = min(places, key=self._rank, default=self.composition.place(f"arms.{arm.name}"))
        return f"{place}: {Problem(path, problem.message + note)}"

    def _writing(self, arm: Arm, axes: Mapping[str, Any], path: str) -> tuple[str, str] | None:
        """(place, path in the study) of the word that decided a setting of a run; None for a default."""
        candidates = ["seeds"] if path == "seed" else []
        if any(covers(axis, path) or covers(path, axis) for axis in axes):
            sections = (f"arms.{arm.name}.sweep", "sweep")
            if self.search is not None and self.search.arm == arm.name:
                candidates += [f"search.space.{path}", f"search.space.{path}.low", f"search.space.{path}.high"]
            candidates += [f"{section}.{kind}.{path}" for section in sections for kind in ("grid", "zip")]
        candidates += [f"arms.{arm.name}.{path}", f"run.{path}"]
        found = ((self.composition.written(candidate), candidate) for candidate in candidates)
        return next(((place, candidate) for place, candidate in found if place is not None), None)

    def _rank(self, place: str) -> int:
        return 0 if place.startswith("override ") else 1 + self.composition.source.rank(place.rpartition(":")[0])


@dataclass(frozen=True, kw_only=True)
class StudyKeys:
    """The keys of a study file, for strict reading."""

    schema: Literal[1]
    """Version of this format."""
    name: str
    """Names the folders of results and report."""
    question: str
    """What the study is to answer, as a sentence; the report's title."""
    arms: dict[str, Any]
    """What is compared: a method and its own settings for each name."""
    run: RunConfig = field(default_factory=RunConfig)
    """Settings of every run, unless an arm says otherwise."""
    sweep: SweepKeys = field(default_factory=SweepKeys)
    """Settings that vary, under every arm that reads them."""
    search: SearchKeys | None = None
    """One arm\'s settings, looked for instead of listed (see searchspace)."""
    seeds: tuple[int, ...] = (0,)
    """Replicates: every arm runs at each point once with each seed."""
    equal: tuple[str, ...] = ("model", "data", "optim", "budget_tokens")
    """Settings, or groups of them, in which arms must not differ."""
    resources: Resources = field(default_factory=Resources)
    divergence: Divergence = field(default_factory=Divergence)
    metrics: Metrics = field(default_factory=Metrics)
    report: ReportSettings = field(default_factory=ReportSettings)
    launcher: Launcher = field(default_factory=Launcher)
    hardware: Hardware = field(default_factory=Hardware)
    evaluation: Evaluation = field(default_factory=Evaluation)


@dataclass(frozen=True, kw_only=True)
class ArmKeys(RunConfig):
    """The keys of one arm: every RunConfig setting, and two of its own."""

    role: Role = "treatment"
    """What the arm is in the comparison: "reference" is what differences are taken from, in at most one arm."""
    sweep: SweepKeys = field(default_factory=SweepKeys)
    """Axes of this arm: they replace the study's of the same path; null takes an axis away."""


def read_study(path: Path, overrides: Sequence[str] = ()) -> Study:
    """Compose and read the study at ``path``; see `Study.mistakes`. Raises StudyError when there is nothing to read."""
    composition = compose_study(path, overrides, is_null_a_value)
    problems: list[Problem] = []
    keys, tree = _read_all(StudyKeys, _plain_durations(composition.tree), "", problems)
    problems = [_as_file_key(problem) for problem in problems]
    shared_axes = read_axes(tree.get("sweep", {}), "sweep", problems)
    arms = [
        _read_arm(name, arm, tree.get("run", {}), shared_axes, problems)
        for name, arm in (tree.get("arms") or {}).items()
        if _is_arm(name, arm, problems)
    ]
    is_equal_known = not any(place.path.split("[")[0] == "equal" or '"equal"' in place.message for place in problems)
    problems += [*_broken_rules(keys), *_seeds_elsewhere(tree), *_several_references(arms)]
    problems += _names_below(keys.name, composition)
    search = _read_search(keys, tree, arms, problems)
    found = places(problems, composition.broken)
    arms = [replace(arm, open_paths=within(arm.name, found)) for arm in arms]
    if search is not None:
        arms = [replace(arm, sweep=search.representatives()) if arm.name == search.arm else arm for arm in arms]
    open_paths = [path for _, path in found]
    problems = certain_exclusions(problems, open_paths)
    lines = [
        f"{composition.place(problem.path)}: {_with_home(problem, len(composition.source.sources) > 1)}"
        for problem in problems
    ]
    return Study(
        name=keys.name,
        question=keys.question,
        arms=tuple(arms),
        seeds=keys.seeds,
        equal=tuple(path for path in keys.equal if is_setting(path) and is_equal_known),
        resources=keys.resources,
        divergence=keys.divergence,
        metrics=keys.metrics,
        report=keys.report,
        launcher=keys.launcher,
        hardware=keys.hardware,
        evaluation=keys.evaluation,
        composition=composition,
        search=search,
        mistakes=(*composition.mistakes, *lines),
    )


def _read_all(kind: type[T], tree: Tree, prefix: str, problems: list[Problem]) -> tuple[T, Tree]:
    """The typed value and the tree without what is wrong in it; a missing text or mapping is read as empty."""
    for _ in range(2):
        try:
            return build(kind, tree, prefix), tree
        except ConfigError as error:
            problems += error.problems
            for problem in error.problems:
                path = problem.path.removeprefix(prefix).lstrip(".").split("[")[0]
                while path and lookup(tree, path, tree) is tree:  # missing, so what lacks it cannot be read
                    path = path.rpartition(".")[0]
                tree = without(tree, path)
            if kind is StudyKeys:
                tree = merge({"schema": 1, "name": "unnamed", "question": "", "arms": {}}, tree)
    raise AssertionError("a tree without its mistakes is readable")


def is_null_a_value(path: str) -> bool:
    """Whether null says something at a path of a study file, instead of that nothing is said there.

    So it does where a setting may be without a value, and on an arm's axes, where it takes the study's axis away.
    """
    kind: Any = StudyKeys
    parts = path.split(".")
    if parts[0] == "arms" and parts[2:3] == ["sweep"] and parts[3:4] in (["grid"], ["zip"]):
        return len(parts) > 4
    for index, part in enumerate(parts):
        options = typing.get_args(kind) if typing.get_origin(kind) in (Union, types.UnionType) else (kind,)
        inner = next((option for option in options if is_dataclass(option) or typing.get_origin(option) is dict), None)
        if parts[0] == "arms" and index == 1:
            kind = ArmKeys
        elif is_dataclass(inner):
            kind = typing.get_type_hints(inner).get(part)
        else:
            kind = typing.get_args(inner)[1] if inner is not None else None
    return type(None) in typing.get_args(kind)


def _as_file_key(problem: Problem) -> Problem:
    """The problem; for a misspelt key of the file that is not read as a setting, with that key."""
    hint = nearest(problem.path, ("defaults", "extends"))
    is_one = problem.message.startswith("is not a setting") and "did you mean" in hint
    return Problem(problem.path, f"is not a setting{hint}") if is_one else problem


def _names_below(name: str, composition: Composition) -> Iterator[Problem]:
    """A study has a folder of results of its own, so no name of what it extends."""
    for below in composition.source.sources[:-1]:
        if below.data.get("name") == name:
            yield Problem("name", f"({name}) is that of {below.path} too, which this study extends; give it another")


def _with_home(problem: Problem, extends: bool) -> Problem:
    """The problem; for a setting of a run that stands outside run, with the place where it belongs."""
    if extends and problem.path in OWN and problem.message == "is missing":
        return Problem(problem.path, "is missing: it is not taken from the file that this study extends")
    if problem.path == "seed":
        return Problem(problem.path, 'is not a setting of a study; did you mean "seeds"?')
    unknown = problem.message.startswith("is not a setting")
    if unknown and is_setting(problem.path):
        return Problem(problem.path, f"is not a setting of a study; write it as run.{problem.path}")
    return problem


def _is_arm(name: str, arm: Any, problems: list[Problem]) -> bool:
    if not NAME.fullmatch(name) or len(name) > 80:
        problems.append(Problem(f"arms.{name}", _NAME_RULE))
    elif not isinstance(arm, Mapping):
        problems.append(Problem(f"arms.{name}", f"({arm}) must be a mapping such as {{method: spes}}"))
    else:
        return True
    return False


def _read_arm(name: str, tree: Tree, shared: Tree, shared_axes: Tree, problems: list[Problem]) -> Arm:
    keys, tree = _read_all(ArmKeys, tree, f"arms.{name}", problems)
    own_axes = read_axes(tree.get("sweep", {}), f"arms.{name}.sweep", problems)
    settings = merge(shared, {key: value for key, value in tree.items() if key not in ("role", "sweep")})
    sweep = combine(shared_axes, own_axes, f"arms.{name}.sweep" if own_axes else "sweep", problems)
    return Arm(name=name, role=keys.role, settings=settings, sweep=sweep)


def _read_search(keys: StudyKeys, tree: Tree, arms: Sequence[Arm], problems: list[Problem]) -> Search | None:
    if keys.search is None:
        return None
    swept = {name: arm["sweep"] for name, arm in (tree.get("arms") or {}).items() if lookup(arm, "sweep")}
    unread = [problem.path for problem in problems if problem.path.startswith("arms.")]
    roles: dict[str, str] = {arm.name: arm.role for arm in arms}
    # An arm whose role, or which itself, cannot be read may be the one that the search needs.
    roles |= {path.split(".")[1]: "unknown" for path in unread if path.count(".") == 1 or path.endswith(".role")}
    return read_search(keys.search, roles, keys.seeds, swept, problems)


def _plain_durations(tree: Tree) -> Tree:
    """The tree with durations that are given as a number of seconds turned into text."""
    timeout, time = lookup(tree, "resources.timeout"), lookup(tree, "launcher.slurm.time")
    if isinstance(timeout, int | float) and not isinstance(timeout, bool):
        tree = merge(tree, {"resources": {"timeout": f"{timeout}s"}})
    if isinstance(time, int | float) and not isinstance(time, bool):
        tree = merge(tree, {"launcher": {"slurm": {"time": f"{time}s"}}})
    return tree


_NAME_RULE = "must be made of at most 80 letters, digits, _, - and +: it names a folder"


def _broken_rules(keys: StudyKeys) -> Iterator[Problem]:
    """Rules beyond the type of each setting that concern no single run."""
    if not NAME.fullmatch(keys.name) or len(keys.name) > 80:
        yield Problem("name", f"({keys.name}) {_NAME_RULE}")
    if not keys.arms:
        yield Problem("arms", "must name at least one arm, such as spes: {method: spes}")
    if not keys.seeds:
        yield Problem("seeds", "must hold at least one seed")
    if len(set(keys.seeds)) < len(keys.seeds):
        yield Problem("seeds", f"({list(keys.seeds)}) must differ from each other")
    for index, path in enumerate(keys.equal):
        if not is_setting(path):
            yield Problem(f"equal[{index}]", f"({path}) is not a setting of a run{_near(path)}")
    if not is_metric(name := keys.metrics.primary.name):
        yield Problem("metrics.primary.name", f"({name}) is not a metric{nearest(name, METRICS)}")
    if keys.report.x is not None and not is_setting(keys.report.x):
        yield Problem("report.x", f"({keys.report.x}) is not a setting of a run{_near(keys.report.x)}")
    yield from keys.resources.problems()
    yield from keys.divergence.problems()
    yield from keys.report.problems()
    yield from keys.launcher.problems()
    yield from keys.hardware.problems()
    yield from keys.evaluation.problems()
    if keys.launcher.port and keys.resources.parallel_trials != 1:
        message = f"({keys.launcher.port}) must be 0 where trials run at the same time: each server needs its own port"
        yield Problem("launcher.port", message)


def _seeds_elsewhere(tree: Tree) -> Iterator[Problem]:
    """Seeds belong to the study, so that every arm has the same ones."""
    places = {"run": tree.get("run"), **{f"arms.{name}": arm for name, arm in (tree.get("arms") or {}).items()}}
    for path, settings in places.items():
        if isinstance(settings, Mapping) and "seed" in settings:
            yield Problem(f"{path}.seed", f"({settings['seed']}) must be given to all arms alike: list it under seeds")


def _several_references(arms: Sequence[Arm]) -> Iterator[Problem]:
    references = [arm.name for arm in arms if arm.role == "reference"]
    if len(references) > 1:
        yield Problem(f"arms.{references[1]}.role", f"(reference) must be one arm's; {references[0]} has it already")


def _near(path: str) -> str:
    settings = [setting for setting, _ in leaves(to_dict(RunConfig()))]
    hint = nearest(path, [*settings, *{setting.split(".")[0] for setting in settings}])
    return hint if "did you mean" in hint else "; write its path as under run, such as merge.alpha"
