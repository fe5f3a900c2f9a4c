"""What Slurm says of jobs, and the cancelling of them: its own commands squeue, sacct, scancel.

A job is named as Slurm names it: "12", or "12_3" in an array.
"""

from __future__ import annotations

import shutil
import subprocess
import threading
import time
from collections.abc import Collection, Iterable
from dataclasses import dataclass

from workbench.launch.launcher import LaunchError

ENDED = (
    "COMPLETED", "FAILED", "TIMEOUT", "DEADLINE", "OUT_OF_MEMORY", "CANCELLED", "PREEMPTED", "NODE_FAIL", "BOOT_FAIL",
    "GONE",
)  # fmt: skip
"""States of jobs that will not run again; GONE, our own word: Slurm does not remember the job."""
WAITING = ("PENDING", "CONFIGURING", "REQUEUED", "REQUEUE_FED", "REQUEUE_HOLD", "SPECIAL_EXIT", "RESV_DEL_HOLD")
_COMMAND_TIMEOUT_S = 60.0
_SHORTEST_S, _LONGEST_S = 1.0, 15.0
"""Seconds between two questions: short after a change, long while nothing changes."""


class QueueSilent(LaunchError):
    """Slurm does not answer at present, or is not there."""


@dataclass(frozen=True)
class JobState:
    """What Slurm says of one job."""

    state: str
    """In Slurm's words, such as PENDING or RUNNING."""
    reason: str = ""
    """Why it waits; empty where nothing is said."""

    @property
    def ended(self) -> bool:
        """Whether the job will not run again."""
        return self.state in ENDED

    @property
    def words(self) -> str:
        """State and reason for people."""
        return f"{self.state} ({self.reason})" if self.reason else self.state


def job_states(jobs: Collection[str]) -> dict[str, JobState]:
    """The state of each job, in one question. Raises QueueSilent."""
    if not jobs:
        return {}
    bases = ",".join(dict.fromkeys(job.partition("_")[0] for job in jobs))
    form = "--format=%i|%T|%r"
    done = _ask("squeue", "--noheader", "--array", "--states=all", f"--jobs={bases}", form)
    if done.returncode != 0 and "Invalid job id" not in done.stderr:
        raise QueueSilent(f"squeue fails: {_last_line(done.stderr)}")
    found = {}
    for line in done.stdout.splitlines() if done.returncode == 0 else []:
        job, state, reason = line.strip().split("|", 2)
        found[job] = JobState(state, "" if reason in ("None", state) else reason)
    if lost := [job for job in jobs if job not in found]:
        found |= _accounted(lost)
    return {job: found.get(job, JobState("GONE")) for job in jobs}


def find_job(name: str) -> str | None:
    """The id of the submission with a name, whose jobs have not been forgotten; None for none. Raises QueueSilent."""
    done = _ask("squeue", "--noheader", "--array", "--states=all", f"--name={name}", "--format=%F")
    if done.returncode != 0:
        raise QueueSilent(f"squeue fails: {_last_line(done.stderr)}")
    return next(iter(done.stdout.split()), None)


def cancel_jobs(jobs: Iterable[str]) -> None:
    """Ask Slurm to end jobs; nothing happens to those that have ended. Raises QueueSilent."""
    if names := list(jobs):
        done = _ask("scancel", *names)
        if done.returncode != 0 and "Invalid job id" not in done.stderr:
            raise QueueSilent(f"scancel fails: {_last_line(done.stderr)}")


class Queue:
    """The newest known states of jobs, asked for together and not too often; may be shared by threads."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._jobs: set[str] = set()
        self._known: dict[str, JobState] = {}
        self._asked_at_s = -1e9
        self._interval_s = _SHORTEST_S

    def state(self, job: str, *, at_once: bool = False) -> JobState | None:
        """The state of a job, a few seconds old at most; None while Slurm has not told. ``at_once``: asks again."""
        with self._lock:
            is_new = job not in self._jobs
            self._jobs.add(job)
            age_s = time.monotonic() - self._asked_at_s
            if at_once or is_new or age_s >= self._interval_s:
                self._ask_again()
            return self._known.get(job)

    def _ask_again(self) -> None:
        try:
            states = job_states([job for job in self._jobs if not self._has_ended(job)])
        except QueueSilent:
            states = {}  # what was known stays so: a controller of Slurm that is restarted has ended no job
        changed = any(self._known.get(job) != state for job, state in states.items())
        self._interval_s = _SHORTEST_S if changed else min(_LONGEST_S, 1.5 * self._interval_s)
        self._known |= states
        self._asked_at_s = time.monotonic()

    def _has_ended(self, job: str) -> bool:
        # A requeued job shows for a moment how it ended; GONE alone cannot change.
        return job in self._known and self._known[job].state == "GONE"


def _accounted(jobs: Collection[str]) -> dict[str, JobState]:
    """What the accounting database says of jobs that squeue has forgotten; nothing where there is no such database."""
    if shutil.which("sacct") is None:
        return {}
    bases = ",".join(dict.fromkeys(job.partition("_")[0] for job in jobs))
    done = _ask("sacct", "--noheader", "--parsable2", "--allocations", f"--jobs={bases}", "--format=JobID,State")
    lines = done.stdout.splitlines() if done.returncode == 0 else []
    pairs = (line.split("|", 1) for line in lines if "|" in line)
    return {job: JobState(state.split()[0]) for job, state in pairs if job in jobs and state.strip()}


def _ask(*argv: str) -> subprocess.CompletedProcess[str]:
    try:
        return subprocess.run(
            argv, capture_output=True, text=True, check=False, timeout=_COMMAND_TIMEOUT_S, stdin=subprocess.DEVNULL
        )
    except FileNotFoundError as error:
        raise QueueSilent(f"{argv[0]} is not on this machine; ask on one of the cluster's login machines") from error
    except subprocess.TimeoutExpired as error:
        raise QueueSilent(f"{argv[0]} does not answer within {_COMMAND_TIMEOUT_S:g} s") from error


def _last_line(text: str) -> str:
    return next((line.strip() for line in reversed(text.splitlines()) if line.strip()), "it said nothing")
