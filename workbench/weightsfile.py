"""Digests of a trial's final weights without torch: a safetensors file is a length, a JSON header, and the values."""

from __future__ import annotations

import json
from pathlib import Path

import xxhash

from spes_core.errors import DataError

VALUES_DIGEST = "values_xxh3"
"""Key of the header's metadata under which the engine leaves XXH3-64 (hex) of all values (spes_core.checkpoint)."""
_LARGEST_HEADER_BYTES = 100_000_000
_PIECE_BYTES = 1 << 20


def recorded_digest(path: Path) -> str | None:
    """The digest of the values that the file's header gives; None when it gives none. Raises DataError."""
    try:
        with path.open("rb") as file:
            length = int.from_bytes(file.read(8), "little")
            if length > _LARGEST_HEADER_BYTES:
                raise ValueError("its header is too long")
            recorded = json.loads(file.read(length)).get("__metadata__", {}).get(VALUES_DIGEST)
    except (OSError, ValueError, AttributeError) as error:
        raise DataError(f"{path} is no readable weights file: {error}") from error
    return None if recorded is None else str(recorded)


def values_digest(path: Path) -> str:
    """XXH3-64 (hex) of the file's values as they are now. Raises DataError."""
    hasher = xxhash.xxh3_64()
    try:
        with path.open("rb") as file:
            file.seek(8 + int.from_bytes(file.read(8), "little"))
            while piece := file.read(_PIECE_BYTES):
                hasher.update(piece)
    except (OSError, ValueError, OverflowError) as error:
        raise DataError(f"{path} cannot be read: {error}") from error
    return hasher.hexdigest()
