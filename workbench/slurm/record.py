"""What a trial's folder says of its job: slurm.json (which job), slurm.stop (that it is to end), and a settled result.

::

    slurm.json    written before the job is submitted, and again with its id
    slurm.stop    written by the controller: the job ends the trial with the status in it
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Literal

from workbench.durable import read_mapping, write_json
from workbench.execute import exclusive
from workbench.failures import Failure, Status, last_lines
from workbench.results import build_result
from workbench.slurm.queue import find_job

RECORD, STOP = "slurm.json", "slurm.stop"


@dataclass(frozen=True, kw_only=True)
class Record:
    """The newest job of a trial."""

    trial: str
    """The trial's id."""
    submission: str
    """Name of the submission in Slurm, made up beforehand, so that a job is found whose id nobody could note."""
    index: int | None
    """Place in the submission's array; None for a job of its own."""
    job: str | None = None
    """As Slurm names it: "12" or "12_3"; None while it is being submitted."""
    log_dir: str = ""
    """Folder of what the job itself says."""
    submitted_at: str = ""

    def resolved(self) -> Record:
        """The record with its job's id, which Slurm is asked for where it was not noted. Raises QueueSilent."""
        if self.job is not None or (found := find_job(self.submission)) is None:
            return self
        job = found if self.index is None else f"{found}_{self.index}"
        return Record(**{**asdict(self), "job": job})

    def save(self, trial_dir: Path) -> None:
        """Write slurm.json."""
        write_json(trial_dir / RECORD, {"schema": 1, **asdict(self)})

    @classmethod
    def load(cls, trial_dir: Path, trial_id: str) -> Record | None:
        """The record of this trial; None when it has none."""
        content = read_mapping(trial_dir / RECORD)
        if content.pop("schema", None) != 1 or content.get("trial") != trial_id:
            return None
        try:
            return cls(**content)
        except TypeError:
            return None  # only a hand could have written it


def now() -> str:
    """The time for people."""
    return datetime.now(UTC).isoformat(timespec="seconds")


def ask_to_stop(trial_dir: Path, status: Literal["pruned", "interrupted"], message: str) -> None:
    """Have the job end its trial with a status."""
    write_json(trial_dir / STOP, {"status": status, "message": message})


def asked_to_stop(trial_dir: Path) -> dict[str, Any]:
    """The content of slurm.stop; empty while nothing was asked."""
    return read_mapping(trial_dir / STOP)


def settle(trial_dir: Path, status: Status, message: str, log_tail: Sequence[str]) -> dict[str, Any]:
    """Write outcome.json and result.json of a trial whose job could not. Raises TrialBusy when something runs it."""
    with exclusive(trial_dir):
        earlier = read_mapping(trial_dir / "outcome.json")
        error = asdict(Failure(message=message, process=None, log_tail=list(log_tail)))
        times = {key: earlier.get(key) for key in ("launched_at_s", "started_at")}
        outcome = {"status": status, "error": error, **times, "finished_at": now()}
        if "resumed_at_step" in earlier:
            outcome["resumed_at_step"] = earlier["resumed_at_step"]
        write_json(trial_dir / "outcome.json", outcome)
        result = build_result(trial_dir)
        write_json(trial_dir / "result.json", result)
        return result


def last_words(trial_dir: Path, record: Record | None) -> list[str]:
    """The end of the log that was written to last: a process's of the trial, else the job's own."""
    logs = [log for log in (trial_dir / "logs").glob("*.log") if log.stat().st_size]
    if not logs and record is not None and record.job is not None:
        logs = [log for log in Path(record.log_dir).glob(f"{record.job}_0_log.*") if log.stat().st_size]
    return last_lines(max(logs, key=lambda log: log.stat().st_mtime_ns)) if logs else []
