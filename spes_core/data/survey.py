"""The first reading of a corpus: what is held out, and the sample that the tokenizer is trained on."""

from __future__ import annotations

import hashlib
import heapq
from array import array
from dataclasses import dataclass, field

from spes_core.data.documents import Skipped
from spes_core.data.fingerprints import Fingerprints, fingerprint
from spes_core.data.preparation import FoundCorpora
from spes_core.data.sources import is_held_out
from spes_core.errors import DataError

SAMPLE_BYTES = 16_000_000
"""The tokenizer is trained on about this much text: more changes the vocabulary little and costs time and memory."""


@dataclass(frozen=True)
class Survey:
    """What the first reading of a corpus gives."""

    sample: list[str]
    """Training texts to train the tokenizer on, by hash order; none when it is not trained."""
    sample_bytes: int
    held_out: Fingerprints
    """Of the validation texts: a training document with the same text would leak."""
    total_bytes: int


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
    asked = found.preparation
    sample, held_out, total_bytes, documents = _Sample(), array("Q"), 0, 0
    for domain in range(len(found.corpora)):
        skipped, kept = Skipped(), [0, 0]
        for document in found.documents(domain, skipped):
            content = document.text.encode()
            total_bytes += len(content)
            split = is_held_out(document.name, asked.validation_fraction)
            kept[split] += 1
            if split:
                held_out.append(fingerprint(content))
            elif asked.tokenizer == "bpe":
                sample.add(document.name, document.text, len(content))
        documents = sum(kept)
        require_both_splits(found, domain, documents, (kept[0], kept[1]), skipped)
    texts = Fingerprints(held_out)
    clean = [item for item in sorted(sample.heap, reverse=True) if fingerprint(item[2].encode()) not in texts]
    if asked.tokenizer == "bpe" and not clean:
        require_both_splits(found, 0, documents, (0, 1), Skipped())
    return Survey([item[2] for item in clean], sum(item[3] for item in clean), texts, total_bytes)


def require_both_splits(
    found: FoundCorpora, domain: int, documents: int, kept: tuple[int, int], skipped: Skipped
) -> None:
    """Raises DataError for a domain without a document to train or to validate on; ``kept`` counts both."""
    asked = found.preparation
    shown, fraction = asked.domains[domain].shown, asked.validation_fraction
    left_out = f"; left out: {skipped}" if skipped.counts else ""
    if documents == 0:
        raise DataError(
            f"{shown} has no usable document{left_out}; give text files, or JSON lines with a"
            f' field "{asked.text_field}"'
        )
    if not all(kept):
        split, move = ("validation", "raise") if kept[0] else ("training", "lower")
        raise DataError(
            f"{shown} has no {split} document: each of its {documents} documents is held out with"
            f" probability data.validation_fraction ({fraction:g}), and text that is held out is not trained on; {move}"
            f" the fraction or give more documents{left_out}"
        )


def _rank(name: str) -> int:
    """Place of a document in hash order; independent of the hash that holds documents out."""
    return int.from_bytes(hashlib.sha256(b"sample:" + name.encode("utf-8", "surrogateescape")).digest()[:8], "big")
