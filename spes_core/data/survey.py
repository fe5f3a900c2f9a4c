"""The first reading of a corpus: what is held out, and the sample that the tokenizer is trained on."""

from __future__ import annotations

import hashlib
import heapq
from array import array
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from spes_core.data.preparation import FoundCorpora
from spes_core.data.sources import Skipped, is_held_out
from spes_core.errors import DataError

SAMPLE_BYTES = 16_000_000
"""The tokenizer is trained on about this much text: more changes the vocabulary little and costs time and memory."""


@dataclass(frozen=True)
class Survey:
    """What the first reading of a corpus gives."""

    sample: list[str]
    """Training texts to train the tokenizer on, by hash order."""
    sample_bytes: int
    held_out_H: np.ndarray[Any, Any]
    """`fingerprint` of each validation text, sorted: a training document with the same text would leak."""
    total_bytes: int

    def is_held_out_text(self, text_fingerprint: int) -> bool:
        """Whether some domain validates on the text with this fingerprint."""
        place = int(np.searchsorted(self.held_out_H, np.uint64(text_fingerprint)))
        return place < len(self.held_out_H) and int(self.held_out_H[place]) == text_fingerprint


@dataclass
class _Sample:
    """Of the training texts so far, in the order of their names' hash, the shortest prefix of at least SAMPLE_BYTES.

    So each domain has a share of about its size, and places in files do not matter.
    """

    bytes: int = 0
    heap: list[tuple[int, str, str, int]] = field(default_factory=list)  # the largest hash on top

    def add(self, name: str, text: str, size: int) -> None:
        heapq.heappush(self.heap, (-_rank(name), name, text, size))
        self.bytes += size
        while self.bytes - self.heap[0][3] >= SAMPLE_BYTES:
            self.bytes -= heapq.heappop(self.heap)[3]


def survey(found: FoundCorpora) -> Survey:
    """Read every domain once. Raises DataError when a split of one would be empty."""
    fraction = found.preparation.validation_fraction
    sample, held_out, total_bytes = _Sample(), array("Q"), 0
    for domain in range(len(found.corpora)):
        skipped, documents, kept = Skipped(), 0, [0, 0]
        for document in found.documents(domain, skipped):
            content = document.text.encode()
            total_bytes += len(content)
            documents += 1
            kept[is_held_out(document.name, fraction)] += 1
            if is_held_out(document.name, fraction):
                held_out.append(fingerprint(content))
            else:
                sample.add(document.name, document.text, len(content))
        require_both_splits(found, domain, documents, kept[0] > 0, kept[1] > 0, skipped)
    surveyed = Survey([], 0, np.unique(np.array(held_out, dtype=np.uint64)), total_bytes)
    clean = [item for item in sorted(sample.heap, reverse=True) if not _leaks(item[2], surveyed)]
    if not clean:
        require_both_splits(found, 0, documents, False, True, Skipped())
    return Survey([item[2] for item in clean], sum(item[3] for item in clean), surveyed.held_out_H, total_bytes)


def require_both_splits(
    found: FoundCorpora, domain: int, documents: int, train: bool, held_out: bool, skipped: Skipped
) -> None:
    """Raises DataError for a domain without a document to train or to validate on."""
    shown, fraction = found.preparation.domains[domain].shown, found.preparation.validation_fraction
    left_out = f"; left out: {skipped}" if skipped.counts else ""
    if documents == 0:
        raise DataError(f'{shown} has no usable document{left_out}; give text files, or JSON lines with a field "text"')
    if not (train and held_out):
        split, move = ("validation", "raise") if train else ("training", "lower")
        raise DataError(
            f"{shown} has no {split} document: each of its {documents} documents is held out with"
            f" probability data.validation_fraction ({fraction:g}), and text that is held out is not trained on; {move}"
            f" the fraction or give more documents{left_out}"
        )


def fingerprint(content: bytes) -> int:
    """64 bits of SHA-256: among 10^7 documents two different texts share one with a probability of 3e-6."""
    return int.from_bytes(hashlib.sha256(content).digest()[:8], "little")


def _leaks(text: str, surveyed: Survey) -> bool:
    return surveyed.is_held_out_text(fingerprint(text.encode()))


def _rank(name: str) -> int:
    """Place of a document in hash order; independent of the hash that holds documents out."""
    return int.from_bytes(hashlib.sha256(b"sample:" + name.encode("utf-8", "surrogateescape")).digest()[:8], "big")
