"""Write one folder of tokenized text: survey the corpora, train the tokenizer, encode, describe.

Everything is read twice and never held: memory is bounded by the tokenizer's sample, a few batches, and eight bytes for
each held-out document.
"""

from __future__ import annotations

import hashlib
import json
import math
import platform
import sys
from array import array
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, TYPE_CHECKING, Literal

from spes_core.data import shards, vocabulary
from spes_core.data.preparation import FoundCorpora
from spes_core.data.progress import Progress, megabytes
from spes_core.data.sources import Document, Skipped, is_held_out
from spes_core.data.survey import Survey, fingerprint, require_both_splits, survey

if TYPE_CHECKING:
    from tokenizers import Tokenizer

_BATCH_BYTES = 4_000_000


def write_folder(folder: Path, found: FoundCorpora, tell: Progress) -> None:
    """Write all files of a tokenized folder (which exists and is empty), the header last. Raises DataError."""
    import tokenizers

    asked = found.preparation
    tell(f"reading {asked.name}")
    surveyed = survey(found)
    tell(f"training a vocabulary of {asked.vocab_size} on {megabytes(surveyed.sample_bytes)}")
    tokenizer = vocabulary.train(surveyed.sample, asked.vocab_size)
    vocab_size = tokenizer.get_vocab_size()
    tokenizer.save(str(folder / shards.TOKENIZER))
    with (folder / shards.TOKEN_BYTES).open("wb") as file:
        _append(file, vocabulary.token_bytes(tokenizer))
    encoded = _encode(folder, found, tokenizer, surveyed, tell)
    names = (shards.TRAIN, shards.VALIDATION, shards.TOKEN_BYTES, shards.TOKENIZER)
    files = {name: _record(folder / name) for name in names}
    shards.write_header(
        folder,
        shards.ShardHeader(
            dtype=_dtype(vocab_size),
            vocab_size=vocab_size,
            vocab_size_asked=asked.vocab_size,
            end_of_text_id=vocabulary.END_OF_TEXT_ID,
            tokenizer_digest=files[shards.TOKENIZER].sha256,
            tokenizer_documents=len(surveyed.sample),
            tokenizer_bytes=surveyed.sample_bytes,
            digest=shards.token_digest(files),
            train=_total(encoded.parts, 0),
            validation=_total(encoded.parts, 1),
            validation_fraction=asked.validation_fraction,
            unigram_entropy_nats=_entropy_nats(folder / shards.TRAIN, _dtype(vocab_size)),
            corpus=asked.name,
            corpus_digest=encoded.corpus_digest,
            python_version=platform.python_version(),
            tokenizers_version=tokenizers.__version__,
            files=files,
            domains=_domains(found, encoded.parts),
            skipped=encoded.skipped.counts,
            skipped_first={reason: tuple(first) for reason, first in encoded.skipped.first.items()},
        ),
    )


@dataclass
class _Part:
    """Sizes of one domain, training and validation."""

    tokens: list[int] = field(default_factory=lambda: [0, 0])
    documents: list[int] = field(default_factory=lambda: [0, 0])
    bytes: list[int] = field(default_factory=lambda: [0, 0])

    def counts(self, split: int) -> shards.SplitCounts:
        return shards.SplitCounts(tokens=self.tokens[split], documents=self.documents[split], bytes=self.bytes[split])


@dataclass(frozen=True)
class _Encoded:
    """What the second reading gives, beside the token files."""

    parts: list[_Part]
    corpus_digest: str
    skipped: Skipped


def _encode(folder: Path, found: FoundCorpora, tokenizer: Tokenizer, surveyed: Survey, tell: Progress) -> _Encoded:
    """Write both splits' token files, reading the domains a second time one after another, in batches."""
    code = "H" if _dtype(tokenizer.get_vocab_size()) == "uint16" else "I"
    fraction = found.preparation.validation_fraction
    parts, skipped, digest, done_bytes = [_Part() for _ in found.corpora], Skipped(), hashlib.sha256(), 0
    with (folder / shards.TRAIN).open("wb") as train, (folder / shards.VALIDATION).open("wb") as validation:
        files = (train, validation)
        for domain, part in enumerate(parts):
            if found.preparation.divided:
                digest.update(json.dumps({"domain": found.preparation.domains[domain].name}).encode())
            for batch in _batches(_without_leaks(found, domain, surveyed, skipped)):
                encodings = tokenizer.encode_batch_fast([document.text for document in batch], add_special_tokens=False)
                for document, encoding in zip(batch, encodings, strict=True):
                    content = document.text.encode()
                    split = int(is_held_out(document.name, fraction))
                    ids = array(code, encoding.ids)
                    ids.append(vocabulary.END_OF_TEXT_ID)
                    _append(files[split], ids)
                    part.tokens[split] += len(ids)
                    part.documents[split] += 1
                    part.bytes[split] += len(content)
                    done_bytes += len(content)
                    digest.update(json.dumps([document.name, len(content)]).encode() + content)
                tell(f"encoded {megabytes(done_bytes)} of {megabytes(surveyed.total_bytes)}")
            require_both_splits(
                found, domain, sum(part.documents), part.documents[0] > 0, part.documents[1] > 0, skipped
            )
    return _Encoded(parts, digest.hexdigest(), skipped)


def _without_leaks(found: FoundCorpora, domain: int, surveyed: Survey, skipped: Skipped) -> Iterator[Document]:
    """The documents of a domain, less training documents whose text some domain holds out."""
    fraction = found.preparation.validation_fraction
    for document in found.documents(domain, skipped):
        if not is_held_out(document.name, fraction) and surveyed.is_held_out_text(fingerprint(document.text.encode())):
            found.named(domain, skipped).add("with the text of a validation document", document.name)
        else:
            yield document


def _total(parts: list[_Part], split: int) -> shards.SplitCounts:
    counts = [part.counts(split) for part in parts]
    return shards.SplitCounts(
        tokens=sum(count.tokens for count in counts),
        documents=sum(count.documents for count in counts),
        bytes=sum(count.bytes for count in counts),
    )


def _domains(found: FoundCorpora, parts: list[_Part]) -> dict[str, shards.DomainCounts]:
    if not found.preparation.divided:
        return {}
    return {
        domain.name: shards.DomainCounts(
            corpus=", ".join(domain.sources), train=part.counts(0), validation=part.counts(1)
        )
        for domain, part in zip(found.preparation.domains, parts, strict=True)
    }


def _batches(documents: Iterable[Document]) -> Iterator[list[Document]]:
    """Runs of documents of about _BATCH_BYTES, so that memory does not grow with the corpus."""
    batch: list[Document] = []
    size = 0
    for document in documents:
        batch.append(document)
        size += len(document.text)
        if size >= _BATCH_BYTES:
            yield batch
            batch, size = [], 0
    if batch:
        yield batch


def _append(file: IO[bytes], values: array[int]) -> None:
    """Write integers in little-endian order."""
    if sys.byteorder == "big":
        values.byteswap()
    values.tofile(file)


def _entropy_nats(path: Path, dtype: str) -> float:
    """-Σ p ln p over the frequencies of a file's token ids."""
    import numpy as np

    ids_N = np.memmap(path, dtype=np.dtype(dtype).newbyteorder("<"), mode="r")
    frequencies_V = np.zeros(1, dtype=np.int64)
    for start in range(0, len(ids_N), 1 << 24):
        counts_V = np.bincount(ids_N[start : start + (1 << 24)], minlength=len(frequencies_V))
        counts_V[: len(frequencies_V)] += frequencies_V
        frequencies_V = counts_V
    counts = frequencies_V[frequencies_V > 0].tolist()
    return math.fsum(count / len(ids_N) * math.log(len(ids_N) / count) for count in counts)


def _dtype(vocab_size: int) -> Literal["uint16", "uint32"]:
    return "uint16" if vocab_size <= 1 << 16 else "uint32"


def _record(path: Path) -> shards.FileRecord:
    with path.open("rb") as file:
        return shards.FileRecord(bytes=path.stat().st_size, sha256=hashlib.file_digest(file, "sha256").hexdigest())
