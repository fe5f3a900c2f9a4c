"""What a server has received, on its disk: the encoded uploads of each round, and where the round's result lies.

::

    rounds/<round>/node-<node>.upload    encoded tensors end to end, as they come in
    rounds/<round>/node-<node>.json      its `UploadRecord`, written when the upload is whole
    rounds/<round>/decision.json         who takes part: written before the first value is formed
    rounds/<round>/result                encoded changes that are no upload's bytes
    rounds/<round>/result.json           the `ResultRecord`, written when the round has closed

The global weights are a pure function of a checkpoint and of the uploads after it, so a server that was killed forms
them again, bit for bit, and a node that was killed can still fetch the results of rounds that it repeats. JSON files
are replaced atomically and carry a checksum; one that is damaged, or belongs to another run, counts as absent.
"""

from __future__ import annotations

import json
import os
import shutil
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, TypeVar

import xxhash

from spes_core.errors import DataError, RoundFailed

Record = TypeVar("Record", "UploadRecord", "Decision", "ResultRecord")


@dataclass(frozen=True, kw_only=True)
class UploadRecord:
    """A whole upload."""

    tokens: int
    tensors: tuple[int, ...]
    payload_bytes: int
    framing_bytes: int
    digest: str
    """XXH3-64 (hex) of the file."""


@dataclass(frozen=True, kw_only=True)
class Decision:
    """Who is in a round's new weights."""

    nodes: tuple[int, ...]
    """Ascending."""
    quarantined: tuple[int, ...]
    """Nodes that uploaded and are left out."""
    absent_before: tuple[int, ...]
    """Nodes whose experts others train in this round."""
    absent: tuple[int, ...]
    """Nodes whose experts others train from the next round on."""
    absences: tuple[int, ...]
    """By node: how many rounds up to this one it has missed in a row."""


@dataclass(frozen=True)
class Segment:
    """Where the encoded change of one tensor lies."""

    file: str
    """Name of a file in the round's folder."""
    offset: int
    length: int


@dataclass(frozen=True, kw_only=True)
class ResultRecord:
    """A closed round."""

    tokens: int
    """Training tokens of all nodes in all rounds up to this one."""
    digest: str
    segments: tuple[Segment | None, ...]
    """By tensor; None: it did not change."""
    aggregate_s: float
    merge_s: float


class UploadFile:
    """One upload as it comes in; used by one thread at a time."""

    def __init__(self, path: Path) -> None:
        """Takes up what an earlier attempt has stored."""
        self.name = path.name
        path.parent.mkdir(parents=True, exist_ok=True)
        self._file = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
        self.size_bytes = os.fstat(self._file).st_size
        self._hasher = self._hash()

    @property
    def digest(self) -> str:
        """XXH3-64 (hex) of all bytes so far."""
        return self._hasher.hexdigest()

    def cut(self, size_bytes: int) -> None:
        """Keep only the first bytes."""
        os.ftruncate(self._file, size_bytes)
        self.size_bytes = size_bytes
        self._hasher = self._hash()

    def append(self, payload: memoryview) -> None:
        """Store the next bytes."""
        written = 0
        while written < len(payload):
            written += os.pwrite(self._file, payload[written:], self.size_bytes + written)
        self._hasher.update(payload)
        self.size_bytes += len(payload)

    def close(self) -> None:
        """Close the file."""
        if self._file >= 0:
            os.close(self._file)
            self._file = -1

    def _hash(self) -> xxhash.xxh3_64:
        """A hasher of all bytes that the file has."""
        hasher = xxhash.xxh3_64()
        for start in range(0, self.size_bytes, 1 << 20):
            hasher.update(os.pread(self._file, min(1 << 20, self.size_bytes - start), start))
        return hasher


class RoundReader:
    """Reads the files of one round; used by one thread."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._files: dict[str, int] = {}

    def read_into(self, name: str, offset: int, buffer: memoryview) -> None:
        """Fill ``buffer`` from a place in a file. Raises DataError when the file ends before."""
        if name not in self._files:
            self._files[name] = os.open(self._folder / name, os.O_RDONLY)
        got = 0
        while got < len(buffer):
            count = os.preadv(self._files[name], [buffer[got:]], offset + got)
            if count == 0:
                raise DataError(f"{self._folder / name} ends at byte {offset + got}: it was cut since it was written")
            got += count

    def close(self) -> None:
        """Close all files."""
        for file in self._files.values():
            os.close(file)
        self._files.clear()


class Journal:
    """The folder ``rounds`` of one run."""

    def __init__(self, folder: Path, identity: str) -> None:
        """``identity`` is the digest of the run's configuration; records of another one are ignored."""
        self.folder, self._identity = folder, identity

    def path(self, round: int) -> Path:
        """The folder of one round."""
        return self.folder / str(round)

    def rounds(self) -> list[int]:
        """The rounds that have a folder, ascending."""
        if not self.folder.is_dir():
            return []
        return sorted(int(path.name) for path in self.folder.iterdir() if path.name.isdecimal())

    def open_upload(self, round: int, node: int) -> UploadFile:
        """The file that an upload goes to. Raises RoundFailed when it cannot be stored."""
        try:
            return UploadFile(self.path(round) / upload_file(node))
        except OSError as error:
            raise self.failed(error) from error

    def finish_upload(self, round: int, node: int, record: UploadRecord) -> None:
        """Declare an upload whole."""
        self._write(round, f"node-{node}", record)

    def upload(self, round: int, node: int) -> UploadRecord | None:
        """The record of a whole upload, or None."""
        record = self._read(round, f"node-{node}", UploadRecord)
        if record is None:
            return None
        path = self.path(round) / upload_file(node)
        return record if path.exists() and path.stat().st_size == record.payload_bytes else None

    def decide(self, round: int, decision: Decision) -> None:
        """Store who takes part."""
        self._write(round, "decision", decision)

    def decision(self, round: int) -> Decision | None:
        """Who takes part, where that is decided."""
        return self._read(round, "decision", Decision)

    def finish(self, round: int, record: ResultRecord) -> None:
        """Declare a round closed."""
        self._write(round, "result", record)

    def result(self, round: int) -> ResultRecord | None:
        """The record of a closed round, or None."""
        return self._read(round, "result", ResultRecord)

    def prune(self, before: int) -> None:
        """Remove the rounds below ``before``."""
        for round in self.rounds():
            if round < before:
                shutil.rmtree(self.path(round), ignore_errors=True)

    def discard(self, since: int) -> None:
        """Remove the rounds from ``since`` on."""
        for round in self.rounds():
            if round >= since:
                shutil.rmtree(self.path(round), ignore_errors=True)

    def failed(self, error: OSError) -> RoundFailed:
        """What to say when something cannot be stored."""
        reason = error.strerror or str(error)
        return RoundFailed(
            f"the server cannot store uploads under {self.folder}: {reason}; mend that (free space, write permission)"
            " and start all processes again: they go on from what is stored"
        )

    def _write(self, round: int, name: str, record: Any) -> None:
        values = asdict(record)
        if isinstance(record, ResultRecord):
            values["segments"] = [
                None if item is None else [item.file, item.offset, item.length] for item in record.segments
            ]
        try:
            folder = self.path(round)
            folder.mkdir(parents=True, exist_ok=True)
            partial = folder / f"{name}.json.partial"
            known = {"run": self._identity, **values}
            partial.write_text(json.dumps({**known, "check": _check(known)}) + "\n", encoding="utf-8")
            partial.replace(folder / f"{name}.json")
        except OSError as error:
            raise self.failed(error) from error

    def _read(self, round: int, name: str, kind: type[Record]) -> Record | None:
        try:
            values = json.loads((self.path(round) / f"{name}.json").read_text(encoding="utf-8"))
            if values.pop("check") != _check(values) or values.pop("run") != self._identity:
                return None
            fields: dict[str, Any] = {
                key: tuple(item) if isinstance(item, list) else item for key, item in values.items()
            }
            if "segments" in fields:
                fields["segments"] = tuple(Segment(*item) if item else None for item in fields["segments"])
            return kind(**fields)
        except (OSError, ValueError, TypeError, KeyError, AttributeError):
            return None


def _check(values: dict[str, Any]) -> str:
    """XXH3-64 (hex) of a record."""
    return xxhash.xxh3_64_hexdigest(json.dumps(values, sort_keys=True).encode())


def upload_file(node: int) -> str:
    """Name of the file of a node's upload in the folder of a round."""
    return f"node-{node}.upload"


RESULT_FILE = "result"
"""Name of the file of encoded changes in the folder of a round."""
