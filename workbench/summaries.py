"""What is known of each trial of a study, without its curves: quick to read however long the trials were.

A result.json holds metrics before curves; only the part before them is read. Of a trial that is running, the end of one
event file says how far it is.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from workbench.durable import read_mapping
from workbench.errors import StudyError

_CURVES = b'\n "curves":'
"""Where curves begin in a file that `durable.write_json` wrote: inside a text no line break is left as it is."""
_PIECE_BYTES = 1 << 16
_TAIL_BYTES = 1 << 16


@dataclass(frozen=True, kw_only=True)
class Summary:
    """One trial of a study."""

    id: str
    name: str
    arm: str
    role: str
    method: str | None
    axes: dict[str, Any]
    seed: int
    status: str
    """"new": not started; "pending": its Slurm job waits; "running"; "interrupted": started, and not running; else the
    status of its result."""
    error: str | None = None
    """Why it is not done, in one line; of a Slurm job its id and state."""
    log_tail: tuple[str, ...] = ()
    """Last lines of the log of the process that failed."""
    step: int | None = None
    """Of a running trial: the step of its newest training event."""
    total_steps: int | None = None
    metrics: dict[str, float] = field(default_factory=dict)
    """Every metric of the result, by name."""


def read_study_file(study_dir: Path) -> dict[str, Any]:
    """The content of study.json. Raises StudyError."""
    study = read_mapping(study_dir / "study.json")
    if not isinstance(study.get("trials"), list) or not isinstance(study.get("arms"), list):
        raise StudyError([f"{study_dir / 'study.json'} is no study's; run the study again, which writes it anew"])
    return study


def summaries(study_dir: Path) -> list[Summary]:
    """Every trial that study.json lists, in its order. Raises StudyError."""
    study = read_study_file(study_dir)
    methods = {arm["name"]: arm.get("method") for arm in study["arms"]}
    locked = _locked_inodes()
    known = [_summary(study_dir / "trials" / entry["name"], entry, methods, locked) for entry in study["trials"]]
    return _with_jobs(study_dir, known)


def result_head(path: Path) -> dict[str, Any]:
    """The part of a result.json before its curves; all of a file that is laid out otherwise, {} for none."""
    content = b""
    try:
        with path.open("rb") as file:
            while piece := file.read(_PIECE_BYTES):
                start = max(0, len(content) - len(_CURVES))
                content += piece
                if (end := content.find(_CURVES, start)) >= 0:
                    content = content[:end].rstrip().removesuffix(b",") + b"}"
                    break
        head = json.loads(content)
    except (OSError, ValueError):
        return {}
    return head if isinstance(head, dict) else {}


def _summary(trial_dir: Path, entry: Mapping[str, Any], methods: Mapping[str, Any], locked: set[int] | None) -> Summary:
    known = {key: entry[key] for key in ("id", "name", "arm", "role", "axes", "seed")}
    known["method"] = methods.get(entry["arm"])
    head = result_head(trial_dir / "result.json")
    if head.get("trial", {}).get("id") == entry["id"]:
        error = head.get("error") or {}
        return Summary(
            **known,
            status=str(head.get("status")),
            error=error.get("message"),
            log_tail=tuple(error.get("log_tail", ())),
            metrics=dict(head.get("metrics", {})),
        )
    try:
        inode = trial_dir.stat().st_ino
    except OSError:
        return Summary(**known, status="new")
    if locked is not None and inode not in locked:
        return Summary(**known, status="interrupted", error="its controller ended before it; the next run continues it")
    step, total = _progress(trial_dir)
    return Summary(**known, status="running", step=step, total_steps=total)


def _with_jobs(study_dir: Path, known: list[Summary]) -> list[Summary]:
    """The trials, of which those that a Slurm job has, or had, say so; Slurm is asked only where there are any."""
    open_trials = {trial.id for trial in known if trial.status in ("new", "running", "interrupted")}
    if not any((study_dir / "trials" / trial.name / "slurm.json").exists() for trial in known):
        return known
    from workbench.slurm.status import job_notes

    notes = job_notes(study_dir, open_trials)
    shown = []
    for trial in known:
        if trial.id in notes:
            status, words = notes[trial.id]
            status = status or trial.status
            step, total = _progress(study_dir / "trials" / trial.name) if status == "running" else (None, None)
            trial = replace(trial, status=status, error=words, log_tail=(), step=step, total_steps=total)
        shown.append(trial)
    return shown


def _progress(trial_dir: Path) -> tuple[int | None, int | None]:
    """(steps taken, steps in all) of a trial that is running."""
    step, total = None, None
    for event in _last_events(trial_dir / "events" / "node-0.jsonl"):
        step = event["step"] if event.get("kind") == "train" else step
    config = read_mapping(trial_dir / "run.json").get("config", {})
    try:
        tokens = config["data"]["global_batch_sequences"] * config["data"]["sequence_length"]
        total = config["budget_tokens"] // tokens
    except (LookupError, TypeError, ArithmeticError):
        pass  # run.json is being written
    return step, total


def _last_events(path: Path) -> list[dict[str, Any]]:
    """The whole events at the end of a file that may be growing."""
    try:
        with path.open("rb") as file:
            file.seek(max(0, os.fstat(file.fileno()).st_size - _TAIL_BYTES))
            lines = file.read().split(b"\n")[1:-1]
        return [json.loads(line) for line in lines]
    except (OSError, ValueError):
        return []


def _locked_inodes() -> set[int] | None:
    """Inodes of all files and folders that a process holds locked; None where the system does not tell.

    Only inodes, as some file systems give another device number there than elsewhere.

    `execute` holds a trial's folder while it runs it. Trying to lock it would disturb a controller that starts then.
    """
    try:
        lines = Path("/proc/locks").read_text(encoding="ascii").splitlines()
    except OSError:
        return None
    return {int(word.rpartition(":")[2]) for line in lines for word in line.split() if word.count(":") == 2}
