"""What a trial's folder says of its job: slurm.json (which job), slurm.stop (that it is to end), and a settled result.

::

    slurm.json    written before the job is submitted, and again with its id
    slurm.stop    written by the controller: the job ends the trial with the status in it
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Literal

from workbench.durable import read_mapping, write_json
from workbench.execute import exclusive
from workbench.failures import Failure, Status, last_lines, tail
from workbench.results import build_result
from workbench.slurm.queue import find_job

RECORD, STOP = "slurm.json", "slurm.stop"
MORE_MEMORY = "raise launcher.slurm.memory_gb, or lower the model or data.micro_batch_sequences"
_MEMORY_WORDS = re.compile(r"oom-kill event|Out Of Memory|oom_kill")
"""How slurmstepd and srun say in a job's log that the kernel killed something in it for memory."""


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


def settle(
    trial_dir: Path, status: Status, message: str, log_tail: Sequence[str], *, process: str | None = None
) -> dict[str, Any]:
    """Write outcome.json and result.json of a trial whose job could not. Raises TrialBusy when something runs it."""
    with exclusive(trial_dir):
        earlier = read_mapping(trial_dir / "outcome.json")
        error = asdict(Failure(message=message, process=process, log_tail=list(log_tail)))
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
    if not logs and record is not None:
        logs = _job_logs(record)
    return last_lines(max(logs, key=lambda log: log.stat().st_mtime_ns)) if logs else []


def ran_out_of_memory(record: Record) -> bool:
    """Whether a job's log says that something in it was killed for memory: Slurm may call such a job FAILED."""
    return any(tells_of_memory(line) for log in _job_logs(record) for line in tail(log))


def tells_of_memory(words: str) -> bool:
    """Whether words of Slurm's are of something that the kernel killed for memory."""
    return _MEMORY_WORDS.search(words) is not None


def _job_logs(record: Record) -> list[Path]:
    """What the job itself has said, where it has said anything."""
    if record.job is None:
        return []
    return [log for log in Path(record.log_dir).glob(f"{record.job}_0_log.*") if log.stat().st_size]
