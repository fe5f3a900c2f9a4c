"""The layout of a weights file (safetensors) without torch: its header, digests of its values, and one made of parts.

A file is the length of its header (8 bytes, little endian), a JSON header, and the values with no gap between them.
"""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import xxhash

from spes_core.errors import DataError

VALUES_DIGEST = "values_xxh3"
"""Metadata key: XXH3-64 (hex) of all values in the file's order."""
FINAL = "final.safetensors"
"""The trained weights of a trial, in its folder weights/."""
HEX_DIGITS = 16
_LARGEST_HEADER_BYTES = 100_000_000
_PIECE_BYTES = 1 << 20


@dataclass(frozen=True)
class Header:
    """What a file says of itself."""

    entries: dict[str, dict[str, Any]]
    """dtype, shape and data_offsets (bytes from the first value) of each tensor, in the file's order."""
    metadata: dict[str, str]
    num_bytes: int
    """Where the values begin."""

    def span(self, name: str) -> tuple[int, int]:
        """First byte and end of a tensor in the file."""
        start, end = self.entries[name]["data_offsets"]
        return self.num_bytes + start, self.num_bytes + end


def header_bytes(entries: Mapping[str, tuple[str, Sequence[int], int]], metadata: Mapping[str, str]) -> bytes:
    """The beginning of a file whose tensors, in order, have these (dtype code, shape, bytes)."""
    header: dict[str, Any] = {"__metadata__": dict(metadata)}
    start = 0
    for name, (code, shape, num_bytes) in entries.items():
        header[name] = {"dtype": code, "shape": list(shape), "data_offsets": [start, start + num_bytes]}
        start += num_bytes
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)  # so that values are aligned
    return len(text).to_bytes(8, "little") + text


def read_header(path: Path) -> Header:
    """The header of a file. Raises DataError, FileNotFoundError where there is none."""
    try:
        with path.open("rb") as file:
            length = int.from_bytes(file.read(8), "little")
            if length > _LARGEST_HEADER_BYTES:
                raise ValueError("its header is too long")
            entries = json.loads(file.read(length))
            metadata = entries.pop("__metadata__", {})
    except FileNotFoundError:
        raise
    except (OSError, ValueError, AttributeError) as error:
        raise DataError(f"{path} is no readable weights file: {error}") from error
    return Header(entries, metadata, 8 + length)


def recorded_digest(path: Path) -> str | None:
    """The digest of the values that the file's header gives; None when it gives none. Raises DataError."""
    try:
        recorded = read_header(path).metadata.get(VALUES_DIGEST)
    except (FileNotFoundError, AttributeError) as error:
        raise DataError(f"{path} is no readable weights file: {error}") from error
    return None if recorded is None else str(recorded)


def values_digest(path: Path, names: Collection[str] | None = None) -> str:
    """XXH3-64 (hex) of the file's values as they are now, in its order; of the tensors ``names`` alone where given.

    Raises DataError.
    """
    hasher = xxhash.xxh3_64()
    try:
        with path.open("rb") as file:
            if names is None:
                file.seek(8 + int.from_bytes(file.read(8), "little"))
                while piece := file.read(_PIECE_BYTES):
                    hasher.update(piece)
            else:
                header = read_header(path)
                for name in (name for name in header.entries if name in names):
                    for piece in _pieces(file, header.span(name)):
                        hasher.update(piece)
    except (OSError, ValueError, OverflowError, LookupError, TypeError) as error:
        raise DataError(f"{path} cannot be read: {error}") from error
    return hasher.hexdigest()


def part_file(server: str) -> str:
    """The file in weights/ with the tensors of one of several servers, until all are there."""
    return f"{server}.part"


def join_parts(folder: Path, servers: Sequence[str], names: Sequence[str]) -> bool:
    """Make `FINAL` in ``folder`` from the parts of all ``servers``, and remove them; whether it is there.

    It has the bytes that one server would have written of the tensors ``names``, in this order. Whoever comes last
    calls this; a part that is left from a server that was started again goes when it holds what the file holds. Raises
    DataError when a part is no part of these weights, or the disk does not take them.
    """
    final, parts = folder / FINAL, [folder / part_file(server) for server in servers]
    try:
        if all(part.exists() for part in parts):
            _join(final, parts, names)
        elif final.exists():
            parts = [part for part in parts if part.exists() and _is_in(part, final)]
        else:
            return False
    except FileNotFoundError:
        return final.exists()  # another server was here at the same time
    except (OSError, LookupError, ValueError, TypeError) as error:
        raise DataError(f"{final} cannot be made from the parts of {len(servers)} servers: {error!r}") from error
    for part in parts:
        part.unlink(missing_ok=True)
    return True


def _join(final: Path, parts: Sequence[Path], names: Sequence[str]) -> None:
    headers = {part: read_header(part) for part in parts}
    holder = {name: part for part, header in headers.items() for name in header.entries}
    forms: dict[str, tuple[str, Sequence[int], int]] = {}
    for name in names:
        entry = headers[holder[name]].entries[name]
        start, end = entry["data_offsets"]
        forms[name] = (entry["dtype"], entry["shape"], end - start)
    metadata = headers[parts[0]].metadata
    partial, hasher = final.with_name(f".{final.name}.{os.getpid()}.partial"), xxhash.xxh3_64()
    try:
        with contextlib.ExitStack() as stack, partial.open("wb") as target:
            files = {part: stack.enter_context(part.open("rb")) for part in parts}
            target.write(header_bytes(forms, metadata | {VALUES_DIGEST: "0" * HEX_DIGITS}))
            for name in names:
                part = holder[name]
                for piece in _pieces(files[part], headers[part].span(name)):
                    hasher.update(piece)
                    target.write(piece)
            target.seek(0)  # the digest is only known now; it takes the place that was kept for it
            target.write(header_bytes(forms, metadata | {VALUES_DIGEST: hasher.hexdigest()}))
            target.flush()
            os.fsync(target.fileno())
        partial.replace(final)
    finally:
        partial.unlink(missing_ok=True)


def _is_in(part: Path, final: Path) -> bool:
    """Whether a file holds all that a part holds. Raises FileNotFoundError when the part has gone meanwhile."""
    header = read_header(part)
    return values_digest(final, header.entries) == header.metadata.get(VALUES_DIGEST)


def _pieces(file: Any, span: tuple[int, int]) -> Iterator[bytes]:
    """The bytes of a file from one place to another. Raises ValueError when it ends before."""
    start, end = span
    file.seek(start)
    while start < end:
        piece: bytes = file.read(min(_PIECE_BYTES, end - start))
        if not piece:
            raise ValueError(f"it ends {end - start} bytes too early")
        start += len(piece)
        yield piece
