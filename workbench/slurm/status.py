"""A study's Slurm jobs seen from any shell: what they do, and an end to all of them."""

from __future__ import annotations

import time
from collections.abc import Collection
from pathlib import Path

from workbench.launch.launcher import LaunchError
from workbench.slurm.queue import WAITING, QueueSilent, cancel_jobs, job_states
from workbench.slurm.record import Record
from workbench.slurm.submission import records_of

_CANCEL_S = 120.0
_POLL_S = 0.3


def job_notes(study_dir: Path, trials: Collection[str]) -> dict[str, tuple[str | None, str]]:
    """By trial id: the trial's status, None where its job does not decide it, and its job and state in words."""
    records = {id: record for id, (_, record) in records_of(study_dir).items() if id in trials}
    try:
        records = {id: record.resolved() for id, record in records.items()}
        states = job_states([record.job for record in records.values() if record.job is not None])
    except QueueSilent as error:
        return {id: (None, f"job {record.job or '?'}: {error}") for id, record in records.items()}
    notes: dict[str, tuple[str | None, str]] = {}
    for id, record in records.items():
        if record.job is None:
            continue
        state = states[record.job]
        status = "pending" if state.state in WAITING else None if state.ended else "running"
        notes[id] = (status, f"job {record.job} {state.words}")
    return notes


def cancel_study(study_dir: Path) -> None:
    """Cancel every job of the study and wait until none runs. Raises QueueSilent, LaunchError."""
    jobs = _active({id: record for id, (_, record) in records_of(study_dir).items()})
    if not jobs:
        print("no job of this study waits or runs")
        return
    cancel_jobs(jobs)
    print(f"cancelled {len(jobs)} jobs: {', '.join(jobs)}", flush=True)
    deadline_s = time.monotonic() + _CANCEL_S
    while left := [job for job, state in job_states(jobs).items() if not state.ended and state.state not in WAITING]:
        if time.monotonic() > deadline_s:
            raise LaunchError(
                f"{', '.join(left)} still runs {_CANCEL_S:g} s after it was cancelled; ask scontrol show job"
            )
        time.sleep(_POLL_S)


def _active(records: dict[str, Record]) -> list[str]:
    resolved = [record.resolved() for record in records.values()]
    states = job_states([record.job for record in resolved if record.job is not None])
    return [job for job, state in states.items() if not state.ended]
