"""Write one folder of tokenized text from a corpus: survey it, train the tokenizer, encode, describe.

The corpus is read twice and never held: memory is bounded by the tokenizer's sample, one batch, and the digests of
the held-out documents.
"""

from __future__ import annotations

import hashlib
import heapq
import json
import math
import platform
import sys
from array import array
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import IO, TYPE_CHECKING, Literal

from spes_core.config import DataConfig
from spes_core.data import shards, vocabulary
from spes_core.data.sources import Corpus, Document, Skipped, is_held_out
from spes_core.errors import DataError

if TYPE_CHECKING:
    from tokenizers import Tokenizer

SAMPLE_BYTES = 16_000_000
"""The tokenizer is trained on about this much text: more changes the vocabulary little and costs time and memory."""
_BATCH_BYTES = 4_000_000

Progress = Callable[[str], None]


def write_folder(folder: Path, corpus: Corpus, config: DataConfig, tell: Progress) -> None:
    """Write all files of a tokenized folder (which exists and is empty), the header last. Raises DataError."""
    import tokenizers

    tell(f"reading {corpus.name}")
    survey = _survey(corpus, config.validation_fraction)
    tell(f"training a vocabulary of {config.tokenizer_vocab_size} on {megabytes(survey.sample_bytes)}")
    tokenizer = vocabulary.train(survey.sample, config.tokenizer_vocab_size)
    vocab_size = tokenizer.get_vocab_size()
    tokenizer.save(str(folder / shards.TOKENIZER))
    with (folder / shards.TOKEN_BYTES).open("wb") as file:
        _append(file, vocabulary.token_bytes(tokenizer))
    encoded = _encode(folder, corpus, config, tokenizer, survey, tell)
    names = (shards.TRAIN, shards.VALIDATION, shards.TOKEN_BYTES, shards.TOKENIZER)
    files = {name: _record(folder / name) for name in names}
    shards.write_header(
        folder,
        shards.ShardHeader(
            dtype=_dtype(vocab_size),
            vocab_size=vocab_size,
            vocab_size_asked=config.tokenizer_vocab_size,
            end_of_text_id=vocabulary.END_OF_TEXT_ID,
            tokenizer_digest=files[shards.TOKENIZER].sha256,
            tokenizer_documents=len(survey.sample),
            tokenizer_bytes=survey.sample_bytes,
            digest=shards.token_digest(files),
            train=encoded.train,
            validation=encoded.validation,
            validation_fraction=config.validation_fraction,
            unigram_entropy_nats=_entropy_nats(folder / shards.TRAIN, _dtype(vocab_size)),
            corpus=config.corpus,
            corpus_digest=encoded.corpus_digest,
            python_version=platform.python_version(),
            tokenizers_version=tokenizers.__version__,
            files=files,
            skipped=encoded.skipped.counts,
            skipped_first={reason: tuple(first) for reason, first in encoded.skipped.first.items()},
        ),
    )


def megabytes(num_bytes: int) -> str:
    """ "12.1 MB" (1e6 bytes)."""
    return f"{num_bytes / 1e6:.1f} MB"


@dataclass(frozen=True)
class _Survey:
    """What the first reading of a corpus gives."""

    sample: list[str]
    """Training texts to train the tokenizer on, by hash order."""
    sample_bytes: int
    held_out_digests: frozenset[bytes]
    """SHA-256 of the validation texts: a training document with the same text would leak."""
    total_bytes: int


def _survey(corpus: Corpus, validation_fraction: float) -> _Survey:
    """Read the corpus, keeping the shortest prefix of at least SAMPLE_BYTES of its training texts in hash order.

    Raises DataError when a split would be empty.
    """
    skipped, held_out = Skipped(), set()
    total_bytes = sample_bytes = documents = 0
    sample: list[tuple[int, str, str, int]] = []  # a heap with the largest hash on top
    for document in corpus.documents(skipped):
        size = len(document.text.encode())
        total_bytes += size
        documents += 1
        if is_held_out(document.name, validation_fraction):
            held_out.add(_digest(document.text))
            continue
        heapq.heappush(sample, (-_rank(document.name), document.name, document.text, size))
        sample_bytes += size
        while sample_bytes - sample[0][3] >= SAMPLE_BYTES:
            sample_bytes -= heapq.heappop(sample)[3]
    kept = [item for item in sorted(sample, reverse=True) if _digest(item[2]) not in held_out]
    _require_both_splits(corpus, documents, bool(kept), bool(held_out), validation_fraction, skipped)
    return _Survey([item[2] for item in kept], sum(item[3] for item in kept), frozenset(held_out), total_bytes)


def _require_both_splits(
    corpus: Corpus, documents: int, train: bool, held_out: bool, fraction: float, skipped: Skipped
) -> None:
    left_out = f"; left out: {skipped}" if skipped.counts else ""
    if documents == 0:
        raise DataError(
            f'data.corpus ("{corpus.name}") has no usable document{left_out}; give text files, or JSON lines with a'
            ' field "text"'
        )
    if not (train and held_out):
        split, move = ("validation", "raise") if train else ("training", "lower")
        raise DataError(
            f'data.corpus ("{corpus.name}") has no {split} document: each of its {documents} documents is held out with'
            f" probability data.validation_fraction ({fraction:g}), and text that is held out is not trained on; {move}"
            f" the fraction or give more documents{left_out}"
        )


@dataclass(frozen=True)
class _Encoded:
    """What the second reading of a corpus gives, beside the token files."""

    train: shards.SplitCounts
    validation: shards.SplitCounts
    corpus_digest: str
    skipped: Skipped


def _encode(
    folder: Path, corpus: Corpus, config: DataConfig, tokenizer: Tokenizer, survey: _Survey, tell: Progress
) -> _Encoded:
    """Write both splits' token files, reading the corpus a second time in batches."""
    code = "H" if _dtype(tokenizer.get_vocab_size()) == "uint16" else "I"
    tokens, documents, sizes = [0, 0], [0, 0], [0, 0]
    skipped, digest = Skipped(), hashlib.sha256()
    with (folder / shards.TRAIN).open("wb") as train, (folder / shards.VALIDATION).open("wb") as validation:
        files = (train, validation)
        for batch in _batches(_without_leaks(corpus, config.validation_fraction, survey, skipped)):
            encodings = tokenizer.encode_batch_fast([document.text for document in batch], add_special_tokens=False)
            for document, encoding in zip(batch, encodings, strict=True):
                content = document.text.encode()
                split = int(is_held_out(document.name, config.validation_fraction))
                ids = array(code, encoding.ids)
                ids.append(vocabulary.END_OF_TEXT_ID)
                _append(files[split], ids)
                tokens[split] += len(ids)
                documents[split] += 1
                sizes[split] += len(content)
                digest.update(json.dumps([document.name, len(content)]).encode() + content)
            tell(f"encoded {megabytes(sum(sizes))} of {megabytes(survey.total_bytes)}")
    counts = [
        shards.SplitCounts(tokens=t, documents=d, bytes=b) for t, d, b in zip(tokens, documents, sizes, strict=True)
    ]
    return _Encoded(counts[0], counts[1], digest.hexdigest(), skipped)


def _without_leaks(corpus: Corpus, fraction: float, survey: _Survey, skipped: Skipped) -> Iterator[Document]:
    """The documents, less training documents whose text is also held out."""
    for document in corpus.documents(skipped):
        if not is_held_out(document.name, fraction) and _digest(document.text) in survey.held_out_digests:
            skipped.add("with the text of a validation document", document.name)
        else:
            yield document


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


def _rank(name: str) -> int:
    """Place of a document in hash order; independent of the hash that holds documents out."""
    return int.from_bytes(hashlib.sha256(b"sample:" + name.encode("utf-8", "surrogateescape")).digest()[:8], "big")


def _digest(text: str) -> bytes:
    return hashlib.sha256(text.encode()).digest()


def _record(path: Path) -> shards.FileRecord:
    with path.open("rb") as file:
        return shards.FileRecord(bytes=path.stat().st_size, sha256=hashlib.file_digest(file, "sha256").hexdigest())
