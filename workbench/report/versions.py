"""One version of code and data for each cell: trials of a cell that another version made are set aside, not averaged.

The rule. A cell is an arm at one value of every axis; its trials should differ in the seed alone. Where they were made
by different code or from different data, those of one version count: of the code that made most trials of the study,
then of the version that made most of the cell, then of the smaller digest. The others get the status "set aside" with
the reason, so that no mean, difference, verdict or figure contains them, and tables list them one by one. Different
versions in different cells all count; the report warns of those.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

from workbench.report.evidence import Evidence, Trial

SET_ASIDE = "set aside"


def one_version_a_cell(evidence: Evidence) -> Evidence:
    """The evidence with every trial set aside whose cell has another version that counts."""
    codes = Counter(_version(trial)[0] for trial in evidence.done)
    aside: dict[str, Trial] = {}
    for cell in evidence.cells:
        here = Counter(_version(trial) for trial in cell.done)
        if len(here) < 2:
            continue
        kept = min(here, key=lambda version: (-codes[version[0]], -here[version], version))
        for trial in cell.done:
            if _version(trial) != kept:
                aside[trial.name] = replace(trial, status=SET_ASIDE, reason=_reason(_version(trial), kept))
    if not aside:
        return evidence
    return replace(evidence, trials=tuple(aside.get(trial.name, trial) for trial in evidence.trials))


def _version(trial: Trial) -> tuple[str, str]:
    return str(trial.part("provenance").get("code_digest") or ""), str(trial.part("data").get("digest") or "")


def _reason(own: tuple[str, str], kept: tuple[str, str]) -> str:
    parts = [
        f"made by {kind} {mine[:12] or 'unknown'}, the cell's numbers by {theirs[:12] or 'unknown'}"
        for kind, mine, theirs in zip(("code", "data"), own, kept, strict=True)
        if mine != theirs
    ]
    return "; ".join(parts)
