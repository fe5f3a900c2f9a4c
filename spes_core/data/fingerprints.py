"""Texts told apart by 64 bits of their hash: what is held out is not trained on, and repeated texts are counted."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np

_MOST_AT_ONCE = 1 << 20


def fingerprint(content: bytes) -> int:
    """64 bits of SHA-256: among 10^7 documents two different texts share one with a probability of 3e-6."""
    return int.from_bytes(hashlib.sha256(content).digest()[:8], "little")


class Fingerprints:
    """A set of fingerprints, eight bytes each."""

    def __init__(self, values: Any) -> None:
        self._sorted_F = np.unique(np.asarray(values, dtype=np.uint64))

    def __contains__(self, value: int) -> bool:
        place = int(np.searchsorted(self._sorted_F, np.uint64(value)))
        return place < len(self._sorted_F) and int(self._sorted_F[place]) == value

    def __len__(self) -> int:
        return len(self._sorted_F)

    def save(self, path: Path) -> None:
        """Write the set."""
        self._sorted_F.astype("<u8").tofile(path)

    @classmethod
    def load(cls, path: Path) -> Fingerprints:
        """The set that `save` wrote."""
        return cls(np.fromfile(path, dtype="<u8"))


def count_repeated(path: Path) -> int:
    """How many of the fingerprints in a file (8 bytes each, little endian) occur earlier in it.

    Memory does not grow with the file: it is read once for each range of values that fits.
    """
    total = path.stat().st_size // 8
    ranges = max(1, -(-total // _MOST_AT_ONCE))
    edges = [(number << 64) // ranges for number in range(ranges + 1)]
    repeated = 0
    for low, high in pairwise(edges):
        inside_F = np.concatenate([c[(c >= np.uint64(low)) & (c <= np.uint64(high - 1))] for c in _chunks(path)])
        repeated += len(inside_F) - len(np.unique(inside_F))
    return repeated


def _chunks(path: Path) -> Iterator[Any]:
    with path.open("rb") as file:
        while True:
            chunk_F = np.fromfile(file, dtype="<u8", count=_MOST_AT_ONCE)
            yield chunk_F
            if len(chunk_F) < _MOST_AT_ONCE:
                return
