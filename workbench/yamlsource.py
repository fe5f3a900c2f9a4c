"""YAML files as plain data that remembers the line of every key, with the traps of YAML 1.1 taken out.

``1e-4`` and ``1e2`` are numbers, only ``true`` and ``false`` are booleans, dates stay text, and a key that is given
twice is a mistake instead of a silent last word.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml
from yaml.nodes import MappingNode, Node, ScalarNode, SequenceNode

from spes_core.structure import nearest
from workbench.errors import StudyError


@dataclass(frozen=True, kw_only=True)
class Source:
    """One YAML file: its mapping, and the line (from 1) of each key and list item.

    ``lines`` goes by the path as error messages write it: "run.merge.alpha", "seeds[1]". A key that itself contains
    dots ("sync.interval_steps") has the same path as the nested keys that it stands for.
    """

    path: str
    data: dict[str, Any]
    lines: Mapping[str, int]
    mistakes: tuple[str, ...]
    """What is wrong in a readable file, with lines: repeated keys, unreadable values."""
    broken: tuple[str, ...] = ()
    """The paths that are concerned."""


def read_yaml(path: Path) -> Source:
    """Read a file that holds one mapping.

    Raises StudyError when it is missing or unreadable, is not valid YAML (with line and column) or is no mapping.
    """
    shown = str(path)
    try:
        text = path.read_text(encoding="utf-8")
    except FileNotFoundError:
        raise StudyError([f"{shown}: no such file{_neighbours(path)}"]) from None
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is not UTF-8 text"
        raise StudyError([f"{shown}: cannot be read: {reason}"]) from error
    try:
        loader = _Loader(text)
        root = loader.get_single_node()
        reading = _Reading(loader)
        data = reading.value(root, "") if root is not None else {}
    except yaml.YAMLError as error:
        raise StudyError([_syntax_line(shown, error)]) from error
    if not isinstance(data, dict):
        raise StudyError([f"{shown}:1: must be a mapping of settings, not {_kind(root)}"])
    mistakes = tuple(f"{shown}:{line}: {message}" for line, message in sorted(reading.mistakes))
    return Source(path=shown, data=data, lines=reading.lines, mistakes=mistakes, broken=tuple(reading.broken))


@dataclass
class _Reading:
    """The walk over one document's nodes: gathers lines and mistakes beside the values."""

    loader: _Loader
    lines: dict[str, int] = field(default_factory=dict)
    mistakes: list[tuple[int, str]] = field(default_factory=list)
    broken: list[str] = field(default_factory=list)
    _written: dict[str, Node] = field(default_factory=dict)
    _open: list[Node] = field(default_factory=list)

    def value(self, node: Node, at: str) -> Any:
        """The plain value of the node at a path."""
        if any(node is outer for outer in self._open):
            self._mistake(node, f"{at} refers to itself; write the value out")
            self.broken.append(at)
            return None
        self._open.append(node)
        try:
            if isinstance(node, MappingNode):
                return self._mapping(node, at)
            if isinstance(node, SequenceNode):
                return [self._item(child, f"{at}[{index}]") for index, child in enumerate(node.value)]
            return self._scalar(node, at)
        finally:
            self._open.pop()

    def _item(self, node: Node, at: str) -> Any:
        self.lines[at] = _line(node)
        return self.value(node, at)

    def _mapping(self, node: MappingNode, at: str) -> dict[str, Any]:
        for key_node, _ in node.value:
            self._refuse_repeat(key_node, at)
        self.loader.flatten_mapping(node)
        values: dict[str, Any] = {}
        for key_node, value_node in node.value:
            if _is_name(key_node):
                place = _join(at, key_node.value)
                self.lines[place] = _line(key_node)
                values[key_node.value] = self.value(value_node, place)
        return values

    def _refuse_repeat(self, node: Node, at: str) -> None:
        if not _is_name(node):
            shown = repr(node.value) if isinstance(node, ScalarNode) else _kind(node)
            self._mistake(node, f"a key must be a name or names joined by dots, not {shown}")
        elif node.tag != "tag:yaml.org,2002:merge":
            place = _join(at, node.value)
            other = self._written.setdefault(place, node)
            if other is not node:
                self.broken.append(place)
                first, second = sorted((_line(other), _line(node)))
                self.mistakes.append((second, f"{place} is given twice, first on line {first}; keep one"))

    def _scalar(self, node: Node, at: str) -> Any:
        try:
            return self.loader.construct_object(node)
        except (ValueError, yaml.constructor.ConstructorError):
            self._mistake(node, f"{at} ({getattr(node, 'value', '')}) cannot be read as {node.tag}")
            self.broken.append(at)
            return None

    def _mistake(self, node: Node, message: str) -> None:
        self.mistakes.append((_line(node), message))


class _Loader(yaml.SafeLoader):
    """SafeLoader whose plain scalars follow YAML 1.2 in numbers and booleans."""

    yaml_implicit_resolvers: dict[str, Any] = {}  # noqa: RUF012  (PyYAML reads it from the class)


for _tag, _pattern, _first in (
    ("bool", r"true|True|TRUE|false|False|FALSE", "tTfF"),
    ("int", r"[-+]?[0-9][0-9_]*|0x[0-9a-fA-F_]+", "-+0123456789"),
    ("float", r"[-+]?(?:[0-9][0-9_]*\.?[0-9_]*|\.[0-9][0-9_]*)(?:[eE][-+]?[0-9]+)?", "-+0123456789."),
    ("float", r"[-+]?\.(?:inf|Inf|INF)|\.(?:nan|NaN|NAN)", "-+."),
    ("null", r"~|null|Null|NULL|", ["~", "n", "N", ""]),
    ("merge", r"<<", "<"),
):
    _Loader.add_implicit_resolver(f"tag:yaml.org,2002:{_tag}", re.compile(f"^(?:{_pattern})$"), list(_first))


def _decimal_int(loader: _Loader, node: ScalarNode) -> int:
    """A whole number in base 10 whatever zeros lead it (YAML 1.1 would read 010 as 8), or 0x in base 16."""
    text = str(loader.construct_scalar(node)).replace("_", "")
    return int(text, 16) if text.lower().startswith("0x") else int(text)


_Loader.add_constructor("tag:yaml.org,2002:int", _decimal_int)


def _syntax_line(path: str, error: yaml.YAMLError) -> str:
    mark = getattr(error, "problem_mark", None) or getattr(error, "context_mark", None)
    where = f"{path}:{mark.line + 1}:{mark.column + 1}" if mark is not None else path
    parts = [getattr(error, "problem", None), getattr(error, "context", None)]
    reason = ", ".join(str(part) for part in parts if part) or " ".join(str(error).split())
    return f"{where}: not valid YAML: {reason}"


def _is_name(node: Node) -> bool:
    return isinstance(node, ScalarNode) and re.search(r"^$|^\.|\.$|\.\.|[\[\]]", node.value) is None


def _join(at: str, key: str) -> str:
    return f"{at}.{key}" if at else key


def _line(node: Node) -> int:
    return int(node.start_mark.line) + 1


def _kind(node: Node | None) -> str:
    if isinstance(node, MappingNode):
        return "a mapping"
    return "a list" if isinstance(node, SequenceNode) else "a single value"


def _neighbours(path: Path) -> str:
    """What else could have been meant: the YAML files beside the missing one."""
    beside = sorted(item.name for item in path.parent.glob("*.yaml")) if path.parent.is_dir() else []
    return f" in {path.parent}{nearest(path.name, beside)}" if beside else ""
