"""Where the numbers of a report come from: what the trials themselves recorded, not what the study is today."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from workbench.report.evidence import Evidence, Trial


@dataclass(frozen=True, kw_only=True)
class Origin:
    """One state of code and machine, and the trials that were run by it."""

    provenance: dict[str, Any]
    trials: tuple[Trial, ...]


def origins(evidence: Evidence) -> list[Origin]:
    """The different provenances of the trials that left a result, in the order of the trials."""
    found: list[tuple[dict[str, Any], list[Trial]]] = []
    for trial in evidence.trials:
        if provenance := trial.part("provenance"):
            own = next((trials for known, trials in found if known == provenance), None)
            if own is None:
                found.append((provenance, own := []))
            own.append(trial)
    return [Origin(provenance=provenance, trials=tuple(trials)) for provenance, trials in found]


def started_at(evidence: Evidence) -> str:
    """When the first trial that left a result was started, in ISO form; empty when none did."""
    return min((str(time) for trial in evidence.trials if (time := trial.result.get("started_at"))), default="")


def different(evidence: Evidence, read: Callable[[dict[str, Any]], str]) -> list[str]:
    """What ``read`` makes of the provenances, without repeats and empty words."""
    return [word for word in dict.fromkeys(read(origin.provenance) for origin in origins(evidence)) if word]


def present(evidence: Evidence) -> dict[str, Any]:
    """The provenance in study.json: of the run of the study that rendered the report."""
    return dict(evidence.study.get("provenance") or {})


def commit(provenance: dict[str, Any]) -> str:
    """ "3f2a9c1d, with uncommitted changes (diff 9b9b9b9b9b9b)"; empty without a commit."""
    if not (found := str(provenance.get("commit") or "")):
        return ""
    if not provenance.get("dirty"):
        return f"{found}, without uncommitted changes"
    diff = str(provenance.get("diff_sha256") or "")[:12]
    return f"{found}, with uncommitted changes{f' (diff {diff})' if diff else ''}"


def codes(evidence: Evidence) -> dict[str, list[Trial]]:
    """The finished trials, also those set aside, by the digest of the code that ran them."""
    found: dict[str, list[Trial]] = {}
    for trial in evidence.trials:
        if trial.result.get("status") != "done":
            continue
        if code := trial.part("provenance").get("code_digest"):
            found.setdefault(str(code), []).append(trial)
    return found
