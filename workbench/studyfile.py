"""A study file and the files that it extends, as one document that remembers where each setting was written."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from spes_core.structure import nearest
from workbench.errors import StudyError
from workbench.trees import Tree, covers, nested
from workbench.yamlsource import Source, read_yaml

OWN = ("name", "question")
"""What a study has for itself: it is not taken from a file that it extends."""


@dataclass(kw_only=True)
class StudyFile:
    """The file at ``path`` over what it extends: what both say, less what nulls take away.

    ``sources`` has every file once, each after those that it extends, the study's own last; ``places`` the file and
    line of every key and list item that counts, by its path as in `Source.lines`.
    """

    path: str
    sources: tuple[Source, ...]
    document: Tree = field(default_factory=dict)
    """Without ``defaults`` and ``extends``; dotted keys taken apart."""
    places: dict[str, tuple[str, int]] = field(default_factory=dict)
    mistakes: list[str] = field(default_factory=list)
    broken: list[str] = field(default_factory=list)

    def where(self, path: str) -> str | None:
        """ "file:line" of exactly this key; None when no file has it."""
        return _shown(self.places[path]) if path in self.places else None

    def first_below(self, path: str) -> str | None:
        """ "file:line" of the first key under a path, of the study's own file if that has one."""
        below = [place for key, place in self.places.items() if key.startswith(f"{path}.")]
        found = min(below, key=lambda place: (self.rank(place[0]), place[1]), default=None)
        return _shown(found) if found else None

    def rank(self, file: str) -> int:
        """0 for the study's own file, more for what it extends, most for what is none of them."""
        order = [source.path for source in reversed(self.sources)]
        return order.index(file) if file in order else len(order)

    def forget(self, path: str) -> None:
        """Leave out the places of a path and of everything in it."""
        self.places = {key: place for key, place in self.places.items() if not _holds(path, key)}


def read_study_file(path: Path, is_null_a_value: Callable[[str], bool]) -> StudyFile:
    """Read a study file and what it extends.

    ``is_null_a_value`` says of which settings null is a value like any other; elsewhere it takes away what a file
    below says. Raises StudyError when one of the files is missing or unreadable or extends itself.
    """
    sources = tuple({os.path.realpath(source.path): source for source in _chain(path, (), [])}.values())
    study = StudyFile(path=str(path), sources=sources)
    for source in sources:
        _lay_over(study, source, is_null_a_value)
    return study


def _chain(path: Path, outer: tuple[Path, ...], mistakes: list[str]) -> Iterator[Source]:
    """The files that one extends, lowest first, and itself; ``outer`` are those on the way to it."""
    try:
        source = read_yaml(path)
    except StudyError as error:
        raise StudyError([*mistakes, *error.mistakes]) from error
    mistakes.extend(source.mistakes)
    way = (*outer, path)
    entries = source.data.get("extends", [])
    is_list = isinstance(entries, list)
    for index, entry in enumerate(entries if is_list else [entries]):
        key = f"extends[{index}]" if is_list else "extends"
        base = path.parent / entry if isinstance(entry, str) and entry else None
        if wrong := _wrong_base(base, way):
            raise StudyError([*mistakes, f"{source.path}:{source.lines[key]}: {key} ({entry}) {wrong}"])
        assert base is not None
        yield from _chain(base, way, mistakes)
    yield source


def _wrong_base(base: Path | None, way: tuple[Path, ...]) -> str | None:
    """Why a file cannot be extended by the last one on the way."""
    if base is None:
        return "must be the path of a study file, as seen from this one, or a list of them"
    if not base.is_file():
        folder = base.parent
        if not folder.is_dir():
            return f"names no file: there is no folder {folder}"
        beside = [item.name for kind in ("*.yaml", "*.yml") for item in folder.glob(kind) if not item.samefile(way[-1])]
        return f"names no file in {folder}{nearest(base.name, beside) if beside else ''}"
    for index, passed in enumerate(way):
        if base.samefile(passed):
            circle = " -> ".join(item.name for item in (*way[index:], base))
            return f"leads back to a file that extends this one: {circle}; take one of these out"
    return None


def _lay_over(study: StudyFile, source: Source, is_null_a_value: Callable[[str], bool]) -> None:
    """Put one file over those below it."""
    for key in (*OWN, "defaults", "extends"):
        study.document.pop(key, None)
        study.forget(key)
    study.mistakes += source.mistakes
    study.broken += source.broken
    document = nested({key: value for key, value in source.data.items() if key not in ("arms", "defaults", "extends")})
    if "arms" in source.data:  # the name of an arm is no path
        arms = source.data["arms"]
        document["arms"] = {name: nested(arm) for name, arm in arms.items()} if isinstance(arms, dict) else arms
    if isinstance(kind := document.get("launcher"), str):
        document["launcher"] = {"kind": kind}
    taken: list[str] = []
    if source is not study.sources[0]:
        document = _joined(study, document, "", study.document, _Nulls(source, is_null_a_value, taken))
    study.document = document
    own = {key: (source.path, line) for key, line in source.lines.items()}
    study.places |= {key: place for key, place in own.items() if not any(_holds(path, key) for path in taken)}


@dataclass(frozen=True)
class _Nulls:
    """What nulls mean in a file that lies over others, and the paths that they took away."""

    source: Source
    is_value: Callable[[str], bool]
    taken: list[str]


def _joined(study: StudyFile, above: Tree, at: str, below: Any, nulls: _Nulls) -> Tree:
    """The settings of both trees, whose paths begin with ``at``; ``below`` counts as empty when it is no mapping."""
    joined: Tree = dict(below) if isinstance(below, Mapping) else {}
    for key, value in above.items():
        path = f"{at}.{key}" if at else key
        if value is None and not nulls.is_value(path) and path not in nulls.source.broken:
            nulls.taken.append(path)
            if key not in joined:
                _refuse_null(study, path, joined, nulls.source)
            study.forget(path)
            joined.pop(key, None)
        elif isinstance(value, Mapping):
            old = joined.get(key)
            if not isinstance(old, Mapping):
                study.forget(path)
            new = _joined(study, dict(value), path, old, nulls)
            if new or not value or not _is_axes(path):
                joined[key] = new
            else:
                joined.pop(key, None)  # "sync: {interval_steps: null}" leaves no axis called sync
        else:
            study.forget(path)
            joined[key] = value
    return joined


def _refuse_null(study: StudyFile, path: str, beside: Tree, source: Source) -> None:
    line = source.lines.get(path)
    place = f"{source.path}:{line}" if line else source.path
    hint = nearest(path.rpartition(".")[2], beside) if beside else ""
    hint = hint if "did you mean" in hint else ""
    study.mistakes.append(f"{place}: {path} (null) takes nothing away: no file that this one extends sets it{hint}")
    study.broken.append(path)
    if hint:
        study.broken.append(f"{path.rpartition('.')[0]}.{hint.split(chr(34))[1]}".lstrip("."))


def _is_axes(path: str) -> bool:
    return any(covers(axes, path) and path != axes for axes in ("sweep.grid", "sweep.zip", "search.space"))


def _holds(outer: str, inner: str) -> bool:
    return covers(outer, inner) or inner.startswith(f"{outer}[")


def _shown(place: tuple[str, int]) -> str:
    return f"{place[0]}:{place[1]}"
