"""Which process of a trial failed first, of what kind the failure is, and what the process said."""

from __future__ import annotations

import re
import signal
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, Literal

from workbench.launch.launcher import Running

Status = Literal["done", "failed", "oom", "diverged", "timeout", "interrupted", "pruned"]
"""How a trial ended. Not done, and not for a reason of its own: only a "failed" one may be tried again by itself."""

_TAIL_LINES = 20
_TAIL_BYTES = 1 << 16
_EXCEPTION = re.compile(r"\s*(?:\[rank\d+\]:\s*)?((?!\S*ChildFailedError)[A-Za-z_][\w.]*(?:Error|Exception)(?::.*)?)$")
"""The line of a traceback that names the exception, except torchrun's own, which only says that a rank failed."""
_RANK_KILLED = re.compile(r"\s*traceback : (Signal \d+ .*)$")
"""How torchrun says that a rank was killed, in the midst of a frame."""
_OUT_OF_MEMORY = re.compile(
    r"\b(?:OutOfMemoryError|MemoryError|std::bad_alloc|CUBLAS_STATUS_ALLOC_FAILED)\b"
    r"|CUDA (?:error: )?out of memory|not enough memory|(?:[Cc]annot|can't) allocate memory"
)
"""What Python, torch, CUDA and the system say when memory has run out."""
_PEERS_GONE = re.compile(r"[Cc]onnection (?:closed|reset|refused)|[Bb]roken pipe|remote process (?:has )?exit")
"""What gloo, NCCL and torch's store say when the process at the other end has gone."""
_UNWRITTEN = (1, 120)
"""Exit statuses of Python processes that fail, and that cannot write: logs lie on the disk that may be full."""
_BY_THE_KERNEL = "was killed (SIGKILL) by the system, which had run out of memory"
_DIVERGED = re.compile(r"^error: .*\bhas diverged\b")
"""How the engine ends a run that has nothing finite left to train on (spes_core.errors.Diverged)."""


@dataclass(frozen=True, kw_only=True)
class Failure:
    """Why a trial did not come to its end; the ``error`` of result.json."""

    message: str
    """One sentence."""
    process: str | None
    """Name of the process that failed first; None when none did."""
    log_tail: list[str]
    """The last lines of that process's log."""


def first_failed(processes: Sequence[Running]) -> Running | None:
    """The process that failed before the others, which fail as a consequence; None when none has failed."""
    failed = [process for process in processes if process.returncode]
    return min(failed, key=lambda process: process.ended_order, default=None)


def classify(process: Running, log: Path, start_bytes: int = 0, *, killed_for_memory: bool = False) -> Status:
    """The kind of a process's failure; ``killed_for_memory``: whether the kernel has killed something for it.

    A log is appended to over the attempts at a trial; here and below, ``start_bytes`` is where this attempt's begins.
    """
    lines = last_lines(log, start_bytes)
    killed = process.returncode == -signal.SIGKILL or any("SIGKILL" in line for line in lines)
    if (killed and killed_for_memory) or any(_OUT_OF_MEMORY.search(line) for line in lines):
        return "oom"
    return "diverged" if any(_DIVERGED.search(line) for line in lines) else "failed"


def describe(process: Running, log: Path, start_bytes: int = 0, *, killed_for_memory: bool = False) -> Failure:
    """What is known about a failed process: its own last ``error:`` line, or how it ended."""
    lines = tail(log, start_bytes)
    said = [line.removeprefix("error:").strip() for line in lines if line.startswith("error:")]
    message = said[-1] if said else _ending(process, lines, killed_for_memory)
    return Failure(message=message, process=process.name, log_tail=lines[-_TAIL_LINES:])


def fails_with_peers(process: Running, log: Path, start_bytes: int = 0) -> bool:
    """Whether a torchrun failed for no other reason than that ranks elsewhere had gone."""
    lines = tail(log, start_bytes)
    if process.died_with_launcher or (process.returncode or 0) < 0 or any("SIGKILL" in line for line in lines):
        return False
    raised = [match[1] for line in lines if (match := _EXCEPTION.match(line))]
    said = [*raised, *(line for line in lines if line.startswith("error:"))]
    return bool(said) and all(_PEERS_GONE.search(line) for line in said)


def died_silently(result: Mapping[str, Any]) -> bool:
    """Whether a process of a failed trial ended without saying why, as one does that is killed from outside."""
    if result["status"] != "failed":
        return False
    said = (result.get("error") or {}).get("log_tail", [])
    return not any(line.startswith(("error:", "Traceback")) for line in said)


def killed_for_memory(result: Mapping[str, Any]) -> bool:
    """Whether the kernel ended a trial's process because memory had run out, by what its result says."""
    return result["status"] == "oom" and _BY_THE_KERNEL in str((result.get("error") or {}).get("message"))


def last_lines(log: Path, start_bytes: int = 0) -> list[str]:
    """The few last lines of a log that a result keeps."""
    return tail(log, start_bytes)[-_TAIL_LINES:]


def log_bytes(log: Path) -> int:
    """The length of a log: where the next attempt's part of it begins; 0 when there is no log."""
    return log.stat().st_size if log.exists() else 0


def tail(log: Path, start_bytes: int = 0) -> list[str]:
    """The lines in the last 64 KiB of a log, without empty ones; none when there is no log."""
    if not log.exists():
        return []
    with log.open("rb") as file:
        file.seek(max(start_bytes, log.stat().st_size - _TAIL_BYTES))
        text = file.read().decode("utf-8", errors="replace")
    return [line.rstrip() for line in text.splitlines() if line.strip()]


def last_words(stderr: IO[bytes]) -> str:
    """The last line with a word in it that a process wrote to a file."""
    stderr.seek(0)
    lines = stderr.read().decode(errors="replace").split("\n")
    return next((line for line in reversed(lines) if line.strip()), "it said nothing")


def _ending(process: Running, lines: list[str], killed_for_memory: bool) -> str:
    assert process.returncode
    raised = [match[1] for line in lines if (match := _EXCEPTION.match(line) or _RANK_KILLED.match(line))]
    words = [line for line in lines if any(map(str.isalnum, line)) and not line.startswith("[W")]
    last = f": {(raised or words)[-1]}" if raised or words else ""
    if process.returncode == -signal.SIGKILL and killed_for_memory:
        return f"{process.name} {_BY_THE_KERNEL}{last}"
    if process.returncode == -signal.SIGKILL:
        return f"{process.name} was killed (SIGKILL), which the system does when memory runs out{last}"
    if process.returncode < 0:
        return f"{process.name} was ended by signal {-process.returncode} ({_signal_name(process.returncode)}){last}"
    if process.returncode in _UNWRITTEN and not last:
        last = ", and not a word in its log: is its disk full? Make room"
    return f"{process.name} ended with exit status {process.returncode}{last}"


def _signal_name(returncode: int) -> str:
    return signal.strsignal(-returncode) or "unknown"
