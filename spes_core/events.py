"""Events: one JSON line each, appended to a process's own file; with result.json they are the truth of a trial.

Names carry their unit (``loss_nats``, ``step_time_s``, ``uplink_bytes``). A line is written in one ``write`` call
and flushed, so a reader that follows the file sees whole lines or a last line without a newline, which it leaves
for later. Non-finite numbers are written as the strings "nan", "inf" and "-inf": JSON has none.

What a node tells of its rounds, each with the ``step`` after which it holds::

    round       a round that it took part in: `train.exchange.RoundReport`; its times add up to the round's duration,
                ``local_tokens`` is this node's weight, ``nodes_present`` who took part, ``experts`` what it trains next
    skipped     rounds that went on without it: ``rounds``, ``steps`` of theirs that it never takes, ``steps_dropped``
                that it had taken for nothing, the server's ``reason``; it goes on from a snapshot
    partition   it trains other ``experts`` from here on: those ``taken`` over and those ``given`` away
    resume      it goes on from its checkpoint; what the file told after that is cut off

What the server tells of the experts, after each round at whose step a validation is due::

    experts     ``similarity``, a list by layer: mean cosine (-1 to 1) over pairs of experts, by their input projections

``train`` events count the steps that have passed; below quorum 1.0 a node may have taken fewer (``end`` has the sum).
"""

from __future__ import annotations

import fcntl
import json
import math
import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Protocol, TextIO

from spes_core.errors import ConfigError, Problem

_LOCK_WAIT_S = 5.0
"""How long a process that is just ending may still hold its file."""


class Events(Protocol):
    """Where a process records what happens."""

    @property
    def size_bytes(self) -> int:
        """Bytes recorded so far."""

    def write(self, kind: str, **fields: Any) -> None:
        """Record one event of ``kind``."""

    def close(self) -> None:
        """Record nothing from now on."""


class NoEvents:
    """Records nothing: for the ranks of a node other than rank 0, which records for the whole node."""

    size_bytes = 0

    def write(self, kind: str, **fields: Any) -> None:
        """See `Events`."""

    def close(self) -> None:
        """See `Events`."""


class EventWriter:
    """Appends events to one file; creates its folder. One process at a time: the file is locked until that one ends.

    The lock also guards what else that process writes in the run's folder. A process that resumes gives ``keep_bytes``,
    what the file had at its checkpoint: later events tell of work that is going to be done again, and are cut off.
    """

    def __init__(self, path: Path, keep_bytes: int | None = None) -> None:
        """Raises ConfigError when another process writes this file."""
        path.parent.mkdir(parents=True, exist_ok=True)
        self._file = path.open("a", encoding="utf-8")
        _lock(self._file, path)
        if keep_bytes is not None:
            cut_events(path, keep_bytes)
        _drop_torn_line(path)
        self._file.seek(0, os.SEEK_END)

    @property
    def size_bytes(self) -> int:
        """Bytes in the file."""
        return self._file.tell()

    def write(self, kind: str, **fields: Any) -> None:
        """Append one event of ``kind`` with the present time as ``time_s`` (seconds since 1970)."""
        line = json.dumps(_finite({"kind": kind, "time_s": time.time(), **fields}), allow_nan=False)
        self._file.write(line + "\n")
        self._file.flush()

    def close(self) -> None:
        """Close the file; further writes fail."""
        self._file.close()


def read_events(path: Path) -> Iterator[dict[str, Any]]:
    """The whole events of a file, oldest first; a torn last line is left out. A missing file has none."""
    if not path.exists():
        return
    with path.open(encoding="utf-8", errors="replace") as file:
        for line in file:
            if not line.endswith("\n"):
                return
            yield json.loads(line)


def cut_events(path: Path, keep_bytes: int) -> None:
    """Cut a file down to its first ``keep_bytes``; a missing or shorter file stays as it is."""
    if path.exists() and path.stat().st_size > keep_bytes:
        os.truncate(path, keep_bytes)


def as_float(value: Any) -> float:
    """The number behind an event field, also where it was written as "nan" or "inf"."""
    return float(value)


def _lock(file: TextIO, path: Path) -> None:
    deadline_s = time.monotonic() + _LOCK_WAIT_S
    while True:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            if time.monotonic() < deadline_s:
                time.sleep(0.05)
                continue
            file.close()
            message = f"{path} is being written by another process; is the same one running already? End it first"
            raise ConfigError([Problem("", message)]) from error
        except OSError:
            pass  # A file system without locks.
        return


def _drop_torn_line(path: Path) -> None:
    """Cut off what a killed writer left after the last newline, so that the next event starts a line."""
    if not path.exists():
        return
    with path.open("r+b") as file:
        content = file.read()
        file.truncate(content.rfind(b"\n") + 1)


def _finite(value: Any) -> Any:
    if isinstance(value, float) and not math.isfinite(value):
        return "nan" if math.isnan(value) else ("inf" if value > 0 else "-inf")
    if isinstance(value, dict):
        return {key: _finite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(item) for item in value]
    return value
