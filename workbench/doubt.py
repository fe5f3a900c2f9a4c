"""What cannot be known of a study's runs while its file has mistakes, so that only rules that hold anyway are applied.

A place is a scope and a RunConfig path: the scope is the arm that it is about, None for all of them; the path is
`ANYTHING` where any setting may turn out to be another.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable

from spes_core.config import RunConfig, to_dict
from spes_core.errors import Problem
from spes_core.rules import concerns, named_paths
from workbench.trees import covers, lookup

ANYTHING = ""
_HINT = re.compile(r'did you mean "([^"]+)"')
_AXES = re.compile(r"(?:sweep\.(?:grid|zip)|search\.space)\.(.+)")
_SUBJECT = re.compile(r"\(([a-z_0-9.]+)[):]")

Place = tuple[str | None, str]


def places(problems: Iterable[Problem], broken: Iterable[str]) -> list[Place]:
    """The settings that mistakes leave open: those that have one, and those that a misspelt one was meant to be.

    ``broken``: further paths of the study file at which something is wrong.
    """
    paths = list(broken)
    for problem in problems:
        paths.append(problem.path)
        if problem.path.endswith(".zip"):
            paths += [f"{problem.path}.{name}" for name in named_paths(problem)[1:] if is_setting(name)]
        elif (hint := _HINT.search(problem.message)) and problem.message.startswith("is not a setting"):
            parent = problem.path.rpartition(".")[0]
            paths.append(f"{parent}.{hint[1]}" if parent else hint[1])
    return [place for path in paths if (place := _place(path)) is not None]


def within(arm: str, found: Iterable[Place]) -> tuple[str, ...]:
    """The paths that are open in one arm."""
    return tuple(dict.fromkeys(path for scope, path in found if scope in (None, arm)))


def holds_anyway(problem: Problem, open_paths: Collection[str]) -> bool:
    """Whether a broken rule of a run stays broken however the open settings turn out."""
    if ANYTHING in open_paths:
        return sum(is_setting(name) for name in named_paths(problem)) == 1
    return not concerns(problem, open_paths)


def is_open(path: str, open_paths: Collection[str]) -> bool:
    """Whether the setting, or a part of it, may turn out to be another."""
    return any(other == ANYTHING or covers(other, path) or covers(path, other) for other in open_paths)


def certain_exclusions(problems: Iterable[Problem], open_paths: Collection[str]) -> list[Problem]:
    """The problems less those of exclusions that name an axis that is open, or that another arm has told of."""
    told: set[tuple[str, str]] = set()
    kept = []
    for problem in problems:
        subject = _SUBJECT.match(problem.message) if ".exclude[" in f".{problem.path}" else None
        if subject is not None:
            key = (problem.path, subject[1])
            if key in told or is_open(subject[1], open_paths):
                continue
            told.add(key)
        kept.append(problem)
    return kept


def is_leaf(path: str) -> bool:
    """Whether RunConfig has a single setting at a path."""
    return not isinstance(lookup(to_dict(RunConfig()), path, {}), dict)


def is_setting(path: str) -> bool:
    """Whether RunConfig has a setting, or a group of settings, at a path."""
    missing = object()
    return lookup(to_dict(RunConfig()), path, missing) is not missing


def _is_named_freely(path: str) -> bool:
    """Whether a path leads into a mapping whose keys a study chooses, such as data.domains."""
    parts = path.split(".")
    defaults = to_dict(RunConfig())
    return any(lookup(defaults, ".".join(parts[:end]), None) == {} for end in range(1, len(parts)))


def _place(path: str) -> Place | None:
    scope, rest = None, path.split("[")[0]
    if rest.startswith("arms."):
        _, scope, *below = rest.split(".", 2)
        rest = below[0] if below else "run"
    if rest in ("role", "sweep.exclude"):
        return None
    if rest in ("run", "arms", "defaults", "extends", "method", "sweep", "sweep.grid", "search", "search.space"):
        return scope, ANYTHING
    if axis := _AXES.fullmatch(rest):
        parent = axis[1].rpartition(".")[0]
        rest = parent if is_leaf(parent) else axis[1]  # of a range's low or step, the range
    setting = rest.removeprefix("run.")
    return (scope, setting) if is_setting(setting) or _is_named_freely(setting) else None
