"""Why a study cannot go on: mistakes that its author can mend, each with its place, and trials that others hold."""

from __future__ import annotations

import re
from collections.abc import Iterable

from spes_core.errors import SpesError


class StudyError(SpesError, ValueError):
    """A study cannot be planned or started; ``mistakes`` holds one clear line for each reason, without repeats, by file
    and line."""

    def __init__(self, mistakes: Iterable[str]) -> None:
        self.mistakes = tuple(sorted(dict.fromkeys(mistakes), key=_place))
        assert self.mistakes
        super().__init__("\n".join(self.mistakes))


class TrialBusy(SpesError):
    """Another controller, or an evaluation, holds this trial."""


def _place(mistake: str) -> tuple[str, int]:
    """File and line of "file:line: ..."; what has neither comes first, in the given order."""
    match = re.match(r"(.*?):(\d+):", mistake)
    return (match[1], int(match[2])) if match else ("", 0)
