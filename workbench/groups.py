"""The config groups that ship in workbench/conf: model, data, method, launcher, hardware."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from spes_core.structure import nearest
from workbench.yamlsource import read_yaml

CONF = Path(__file__).parent / "conf"


def group_options(group: str) -> list[str]:
    """Names of the configs in a group."""
    return sorted(file.stem for file in (CONF / group).glob("*.yaml"))


def group_names() -> list[str]:
    """Names of all config groups."""
    return sorted(folder.name for folder in CONF.iterdir() if folder.is_dir() and group_options(folder.name))


def wrong_choice(group: str, option: Any) -> str | None:
    """Why a group has no such config, with the valid names; None when it has."""
    if group not in group_names():
        return f"names no config group{nearest(group, group_names())}"
    options = group_options(group)
    if option in options:
        return None
    hint = nearest(str(option), options)
    suggestion = hint if "did you mean" in hint else ""
    return f"names no config of the group {group}{suggestion}; valid names: {', '.join(options)}"


def header_package(group: str, option: str) -> str:
    """The package that a group file asks for in its first line ("# @package run.model"), else its group's name."""
    first = (CONF / group / f"{option}.yaml").read_text(encoding="utf-8").split("\n", 1)[0]
    return first.removeprefix("# @package").strip() if first.startswith("# @package") else group


def group_line(choice: str, path: str) -> str | None:
    """ "file:line" of a setting in the config "group/name"; None when it is not set there."""
    file = CONF / f"{choice}.yaml"
    line = read_yaml(file).lines.get(path) if file.exists() else None
    return f"{file}:{line}" if line else None
