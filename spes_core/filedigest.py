"""SHA-256 of a large file, remembered for as long as the file's size and time of change stay.

A weights file of many gigabytes takes a minute to hash, and each process of a run asks for it.
"""

from __future__ import annotations

import hashlib
import json
import os
from pathlib import Path

from spes_core.errors import DataError


def file_digest(path: Path, cache: Path | None = None) -> str:
    """SHA-256 (hex) of a file's bytes. Raises DataError when it cannot be read.

    Known digests lie one file each in ``cache`` (default: $XDG_CACHE_HOME or ~/.cache, /spes-workbench/digests).
    """
    try:
        with path.open("rb") as file:
            status = os.fstat(file.fileno())
            state: list[str | int] = [str(path.resolve()), status.st_size, status.st_mtime_ns, status.st_ino]
            record = (cache or _default_cache()) / hashlib.sha256(json.dumps(state[:1]).encode()).hexdigest()
            known = _read(record, state)
            if known is not None:
                return known
            digest = hashlib.file_digest(file, "sha256").hexdigest()
    except OSError as error:
        raise DataError(f"{path} cannot be read: {error.strerror or error}") from error
    _write(record, [*state, digest])
    return digest


def _default_cache() -> Path:
    home = os.environ.get("XDG_CACHE_HOME")
    return (Path(home) if home else Path.home() / ".cache") / "spes-workbench" / "digests"


def _read(record: Path, state: list[str | int]) -> str | None:
    """The digest in a record of the file in this very state; None when there is none."""
    try:
        *recorded, digest = json.loads(record.read_text(encoding="utf-8"))
    except (OSError, ValueError, TypeError):
        return None
    return str(digest) if recorded == state else None


def _write(record: Path, content: list[str | int]) -> None:
    draft = record.with_name(f".{record.name}.{os.getpid()}")
    try:
        record.parent.mkdir(parents=True, exist_ok=True)
        draft.write_text(json.dumps(content), encoding="utf-8")
        draft.replace(record)
    except OSError:
        # Without a place to remember it, the digest is taken anew each time.
        return
