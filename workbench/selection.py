"""`--only PATTERN`: the trials of a study that a pattern names, by name, by arm, or by a value on an axis."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from fnmatch import fnmatchcase
from typing import Any

from spes_core.structure import nearest
from workbench.errors import StudyError
from workbench.sweep import axis_label, value_text
from workbench.trials import Trial, Variant

_ID = re.compile(r"-[0-9a-f]{8}$")
"""What ends a trial's name; it is not known before the data are prepared."""


def select(patterns: Sequence[str], variants: Iterable[Variant]) -> None:
    """Check that each pattern names something. Raises StudyError, with the nearest names, for those that do not."""
    names = [name for variant in variants for name in _names(variant)]
    unknown = [pattern for pattern in patterns if not any(_matches(pattern, name) for name in names)]
    if unknown:
        rule = "names no trial, arm or axis=value of this study"
        raise StudyError([f"--only: ({pattern}) {rule}{nearest(pattern, set(names))}" for pattern in unknown])


def is_selected(patterns: Sequence[str], trial: Trial | Variant) -> bool:
    """Whether one of the patterns names the trial; without any, all are meant."""
    return not patterns or any(_matches(pattern, name) for pattern in patterns for name in _names(trial))


def _names(trial: Trial | Variant) -> list[str]:
    """All that a trial goes by."""
    if isinstance(trial, Variant):
        return [trial.label, trial.arm.name, *_settings(trial.axes, trial.seed)]
    return [trial.name, _ID.sub("", trial.name), trial.arm, *_settings(trial.axes, trial.seed)]


def _settings(axes: Mapping[str, Any], seed: int) -> list[str]:
    found = [f"seed={seed}"]
    for path, value in axes.items():
        words = dict.fromkeys((path, axis_label(path, tuple(axes)), path.rpartition(".")[2]))
        found += [f"{word}={value_text(value)}" for word in words]
    return found


def _matches(pattern: str, name: str) -> bool:
    return name in (pattern, _ID.sub("", pattern)) or fnmatchcase(name, pattern)
