"""What a preparation that was killed has finished, so that the next one goes on from there."""

from __future__ import annotations

import json
import os
from dataclasses import asdict, dataclass, field
from pathlib import Path

FETCHED = "fetched-"
"""Files with this prefix are whole and stay."""
_STATE = "unfinished.json"
_VERSION = 1


@dataclass
class Sizes:
    """Of one domain: training and validation."""

    tokens: list[int] = field(default_factory=lambda: [0, 0])
    documents: list[int] = field(default_factory=lambda: [0, 0])
    bytes: list[int] = field(default_factory=lambda: [0, 0])


@dataclass
class Unfinished:
    """The survey's results and how much is encoded, as far as it is on the disk."""

    made_by: str
    """Versions and settings that decide the order of the work; others start again."""
    total_bytes: int
    tokenizer_documents: int
    tokenizer_bytes: int
    parts: list[Sizes]
    batches: int = 0
    """Batches whose tokens are in the files."""
    file_bytes: list[int] = field(default_factory=lambda: [0, 0])
    """Lengths of the token files at that point."""

    def save(self, folder: Path) -> None:
        """Replace the state on disk, after the caller has brought the files there."""
        partial = folder / f"{_STATE}.partial"
        with partial.open("w", encoding="utf-8") as file:
            json.dump({"version": _VERSION, **asdict(self)}, file)
            file.flush()
            os.fsync(file.fileno())
        partial.rename(folder / _STATE)


def load(folder: Path, made_by: str, token_files: tuple[str, str]) -> Unfinished | None:
    """The state that a folder was left in; None when it has none that can be gone on from."""
    try:
        data = json.loads((folder / _STATE).read_text(encoding="utf-8"))
        if data.pop("version") != _VERSION or data["made_by"] != made_by:
            return None
        found = Unfinished(**{**data, "parts": [Sizes(**part) for part in data["parts"]]})
        whole = [
            found.batches == 0 or (folder / name).stat().st_size >= size
            for name, size in zip(token_files, found.file_bytes, strict=True)
        ]
        return found if all(whole) else None
    except (OSError, ValueError, TypeError, KeyError):
        return None


def remove(folder: Path) -> None:
    """Remove the state."""
    (folder / _STATE).unlink(missing_ok=True)
