"""Strict reading of nested plain data into frozen dataclasses, with every mistake named at once."""

from __future__ import annotations

import difflib
import math
import types
import typing
from dataclasses import MISSING, fields, is_dataclass
from typing import Any, Literal, TypeVar, Union

from spes_core.errors import ConfigError, Problem

T = TypeVar("T")


def build(kind: type[T], data: object, path: str = "") -> T:
    """An instance of the dataclass ``kind`` from nested dicts.

    Understands bool, int, float (whole numbers and "1e-4" count), str, Literal, optional, tuple[X, ...],
    dict[str, X] and nested dataclasses. Raises ConfigError with every unknown key, missing key and wrong type found.
    """
    problems: list[Problem] = []
    value = _read(kind, data, path, problems)
    if problems:
        raise ConfigError(problems)
    return typing.cast(T, value)


def nearest(name: str, valid: typing.Iterable[str]) -> str:
    """A hint for a misspelt name: '; did you mean "x"?' or the list of valid names."""
    names = sorted(valid)
    match = difflib.get_close_matches(name, names, n=1, cutoff=0.6)
    return f'; did you mean "{match[0]}"?' if match else f"; valid names: {', '.join(names)}"


def _read(kind: Any, data: object, path: str, problems: list[Problem]) -> Any:
    origin, args = typing.get_origin(kind), typing.get_args(kind)
    if is_dataclass(kind):
        return _read_dataclass(kind, data, path, problems)
    if origin is Literal:
        if data in args and type(data) in {type(option) for option in args}:
            return data
        hint = nearest(data, [str(option) for option in args]) if isinstance(data, str) else ""
        options = ", ".join(str(option) for option in args)
        return _wrong(path, data, f"one of {options}", problems, hint if "did you mean" in hint else "")
    if origin in (Union, types.UnionType):
        return _read_union(args, data, path, problems)
    if origin is tuple:
        if not isinstance(data, list | tuple):
            return _wrong(path, data, "a list", problems)
        return tuple(_read(args[0], item, f"{path}[{index}]", problems) for index, item in enumerate(data))
    if origin is dict:
        if not isinstance(data, dict):
            return _wrong(path, data, "a mapping", problems)
        return {str(key): _read(args[1], item, _join(path, str(key)), problems) for key, item in data.items()}
    if kind is Any or kind is object:
        return data
    return _read_scalar(kind, data, path, problems)


def _read_union(options: tuple[Any, ...], data: object, path: str, problems: list[Problem]) -> Any:
    """Null, a word of a Literal, or what the first other option reads."""
    if data is None and type(None) in options:
        return None
    literals = [option for option in options if typing.get_origin(option) is Literal]
    others = [option for option in options if option not in literals and option is not type(None)]
    words = [word for literal in literals for word in typing.get_args(literal)]
    if not others:
        return _read(literals[0], data, path, problems)
    if isinstance(data, str) and data in words:
        return data
    before = len(problems)
    value = _read(others[0], data, path, problems)
    choice = "".join(f" or {word}" for word in words)
    problems[before:] = [Problem(problem.path, problem.message + choice) for problem in problems[before:]]
    return value


def _read_scalar(kind: type, data: object, path: str, problems: list[Problem]) -> Any:
    if kind is bool:
        return data if isinstance(data, bool) else _wrong(path, data, "true or false", problems)
    if kind is str:
        return data if isinstance(data, str) else _wrong(path, data, "text", problems)
    number = _number(data)
    if kind is int:
        if number is None or number != int(number):
            return _wrong(path, data, "a whole number", problems)
        return data if isinstance(data, int) else int(number)
    assert kind is float, f"no reader for {kind}"
    return float(number) if number is not None else _wrong(path, data, "a number", problems)


def _number(data: object) -> int | float | None:
    """The finite number that ``data`` is, or that YAML 1.1 left as text ("1e-4"); else None."""
    if isinstance(data, bool) or not isinstance(data, int | float | str):
        return None
    try:
        value = float(data) if isinstance(data, str) else data
        return value if math.isfinite(value) else None
    except (ValueError, OverflowError):
        return None


def _read_dataclass(kind: Any, data: object, path: str, problems: list[Problem]) -> Any:
    if not isinstance(data, dict):
        return _wrong(path, data, "a mapping of settings", problems)
    hints = typing.get_type_hints(kind)
    known = {item.name: item for item in fields(kind)}
    for key in data:
        if key not in known:
            problems.append(Problem(_join(path, str(key)), f"is not a setting{nearest(str(key), known)}"))
    values: dict[str, Any] = {}
    for name, item in known.items():
        if name in data:
            values[name] = _read(hints[name], data[name], _join(path, name), problems)
        elif item.default is MISSING and item.default_factory is MISSING:
            problems.append(Problem(_join(path, name), "is missing"))
    missing = any(
        item.default is MISSING and item.default_factory is MISSING and name not in values
        for name, item in known.items()
    )
    return None if missing else kind(**values)


def _wrong(path: str, data: object, rule: str, problems: list[Problem], hint: str = "") -> None:
    shown = "null" if data is None else repr(data) if isinstance(data, str) else str(data)
    problems.append(Problem(path, f"({shown}) must be {rule}{hint}"))


def _join(path: str, name: str) -> str:
    return f"{path}.{name}" if path else name
