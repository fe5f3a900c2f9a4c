"""Write one folder of tokenized text: survey the corpora, choose or train the tokenizer, encode, describe.

Everything is read twice and never held: memory is bounded by the tokenizer's sample, a few batches, and eight bytes for
each held-out document. What was encoded before a kill is not encoded again: the corpora are read to that place and
encoding goes on.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import platform
import shutil
import sys
from array import array
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import IO, NamedTuple, TypeVar

from spes_core.data import given, shards, unfinished, vocabulary
from spes_core.data.documents import Document, Skipped
from spes_core.data.fingerprints import Fingerprints, count_repeated, fingerprint
from spes_core.data.preparation import FoundCorpora
from spes_core.data.progress import Progress, bar, megabytes
from spes_core.data.sources import is_held_out
from spes_core.data.survey import require_both_splits, survey
from spes_core.data.unfinished import Sizes, Unfinished
from spes_core.data.vocabulary import Vocabulary
from spes_core.errors import DataError

_BATCH_BYTES = 1_000_000
_COMMIT_BYTES = 64_000_000
_HELD_OUT, _SEEN = "held_out.bin", "seen.bin"
_SPLITS = (shards.TRAIN, shards.VALIDATION)
_IN_FLIGHT = 3


T = TypeVar("T")
R = TypeVar("R")


class _Item(NamedTuple):
    """One document on its way into the files."""

    document: Document
    content: bytes
    split: int
    """0: training, 1: validation."""
    fingerprint: int


def write_folder(folder: Path, found: FoundCorpora, tell: Progress) -> None:
    """Write all files of a tokenized folder, the header last, going on from what is whole in it. Raises DataError."""
    import tokenizers

    found = found.fetched(folder, unfinished.FETCHED, tell)
    made_by = f"tokenizers {tokenizers.__version__}, batches of {_BATCH_BYTES}"
    state = unfinished.load(folder, made_by, _SPLITS)
    if state is None:
        _clear(folder)
        vocabulary, state = _survey(folder, found, made_by, tell)
    else:
        vocabulary = _vocabulary(folder, found.preparation.tokenizer)
    encoder = _Encoder(folder, found, vocabulary, state, tell)
    encoder.run()
    header = _header(folder, found, vocabulary, state, encoder)
    _clear(folder, kept=header.files)
    shards.write_header(folder, header)


def _header(
    folder: Path, found: FoundCorpora, vocabulary: Vocabulary, state: Unfinished, encoder: _Encoder
) -> shards.ShardHeader:
    import tokenizers

    asked = found.preparation
    names = (*_SPLITS, shards.TOKEN_BYTES, shards.TOKENIZER, *(path.name for path in vocabulary.files))
    files = {name: _record(folder / name) for name in dict.fromkeys(names)}
    domains = _domains(found, state.parts)
    return shards.ShardHeader(
        dtype=vocabulary.dtype,
        vocab_size=vocabulary.size,
        vocab_size_asked=asked.vocab_size,
        end_of_text_id=vocabulary.end_of_text_id,
        tokenizer_digest=files[shards.TOKENIZER].sha256,
        tokenizer_documents=state.tokenizer_documents,
        tokenizer_bytes=state.tokenizer_bytes,
        digest=shards.token_digest(files, domains),
        train=_total(state.parts, 0),
        validation=_total(state.parts, 1),
        validation_fraction=asked.validation_fraction,
        unigram_entropy_nats=_entropy_nats(folder / shards.TRAIN, vocabulary.dtype),
        corpus=asked.name,
        corpus_digest=encoder.digest.hexdigest(),
        python_version=platform.python_version(),
        tokenizers_version=tokenizers.__version__,
        files=files,
        tokenizer=asked.tokenizer,
        preparation_key=found.key,
        domains=domains,
        repeated_documents=count_repeated(folder / _SEEN),
        skipped=encoder.skipped.counts,
        skipped_first={reason: tuple(first) for reason, first in encoder.skipped.first.items()},
    )


def _clear(folder: Path, kept: Iterable[str] | None = None) -> None:
    """Remove what is not among the files to keep; without any, all but what was fetched whole."""
    for path in folder.iterdir():
        if path.name not in kept if kept is not None else not path.name.startswith(unfinished.FETCHED):
            path.unlink()


def _survey(folder: Path, found: FoundCorpora, made_by: str, tell: Progress) -> tuple[Vocabulary, Unfinished]:
    """Read the corpora once, choose or train the tokenizer, and leave both in the folder."""
    asked = found.preparation
    known = None if asked.tokenizer == "bpe" else _vocabulary(folder, asked.tokenizer)
    if known is not None and known.size > asked.vocab_size:
        raise DataError(
            f"data.tokenizer_vocab_size ({asked.vocab_size}) must be at least the {known.size} ids of data.tokenizer"
            f' ("{asked.tokenizer}"); set it to {known.size}, and model.vocab_size to no less'
        )
    tell(f"reading {asked.name}")
    surveyed = survey(found)
    if known is None:
        tell(f"training a vocabulary of {asked.vocab_size} on {megabytes(surveyed.sample_bytes)}")
        known = vocabulary.trained(surveyed.sample, asked.vocab_size)
    for path in known.files:
        shutil.copyfile(path, folder / path.name)
    if not (folder / shards.TOKENIZER).exists():
        known.tokenizer.save(str(folder / shards.TOKENIZER))
    with (folder / shards.TOKEN_BYTES).open("wb") as file:
        _append(file, known.token_bytes)
    surveyed.held_out.save(folder / _HELD_OUT)
    state = Unfinished(
        made_by=made_by,
        total_bytes=surveyed.total_bytes,
        tokenizer_documents=len(surveyed.sample),
        tokenizer_bytes=surveyed.sample_bytes,
        parts=[Sizes() for _ in found.corpora],
    )
    state.save(folder)
    return known, state


def _vocabulary(folder: Path, tokenizer: str) -> Vocabulary:
    """The vocabulary of a setting; one that is trained, as the folder holds it."""
    if tokenizer == "bytes":
        return vocabulary.of_bytes()
    return vocabulary.of_trained(vocabulary.load(folder)) if tokenizer == "bpe" else given.read(tokenizer)


class _Encoder:
    """The second reading: writes both splits' token files, the domains one after another, in batches."""

    def __init__(
        self, folder: Path, found: FoundCorpora, vocabulary: Vocabulary, state: Unfinished, tell: Progress
    ) -> None:
        self.digest, self.skipped = hashlib.sha256(), Skipped()
        self._folder, self._found, self._vocabulary, self._state, self._tell = folder, found, vocabulary, state, tell
        self._held_out = Fingerprints.load(folder / _HELD_OUT)
        self._done_before, self._read_bytes, self._uncommitted_bytes = state.batches, 0, 0
        self._files: list[IO[bytes]] = []

    def run(self) -> None:
        """Bring both files to their end. Raises DataError when a split of a domain is empty."""
        asked = self._found.preparation
        self._files = [
            _opened_at(self._folder / name, size) for name, size in zip(_SPLITS, self._state.file_bytes, strict=True)
        ]
        with self._files[0], self._files[1], (self._folder / _SEEN).open("wb") as seen:
            batches_before = 0
            for domain, part in enumerate(self._state.parts):
                if asked.divided:
                    self.digest.update(json.dumps({"domain": asked.domains[domain].name}).encode())
                batches = self._noted(_batches(self._items(domain)), seen)
                for _ in range(self._done_before - batches_before):
                    if next(batches, None) is None:
                        break
                    batches_before += 1
                for batch, ids in _in_order(batches, self._encoded):
                    self._write(part, batch, ids)
                kept = (part.documents[0], part.documents[1])
                require_both_splits(self._found, domain, sum(kept), kept, self.skipped)

    def _items(self, domain: int) -> Iterator[_Item]:
        """The documents of a domain, less training documents whose text some domain holds out."""
        fraction, reserved = self._found.preparation.validation_fraction, self._vocabulary.reserved
        mine = self._found.named(domain, self.skipped)
        for document in self._found.documents(domain, self.skipped):
            content = document.text.encode()
            item = _Item(document, content, int(is_held_out(document.name, fraction)), fingerprint(content))
            if item.split == 0 and item.fingerprint in self._held_out:
                mine.add("with the text of a validation document", document.name)
            elif reserved is not None and reserved in document.text:
                mine.add("with the tokenizer's end of text in the text", document.name)
            else:
                yield item

    def _noted(self, batches: Iterable[list[_Item]], seen: IO[bytes]) -> Iterator[list[_Item]]:
        """The batches, after they have entered the corpus's digest and the fingerprints that were seen."""
        for batch in batches:
            for item in batch:
                self.digest.update(json.dumps([item.document.name, len(item.content)]).encode() + item.content)
                self._read_bytes += len(item.content)
            _append(seen, array("Q", [item.fingerprint for item in batch]))
            yield batch

    def _encoded(self, batch: list[_Item]) -> list[array[int]]:
        return self._vocabulary.encode([item.document.text for item in batch])

    def _write(self, part: Sizes, batch: list[_Item], ids: list[array[int]]) -> None:
        state = self._state
        for item, tokens in zip(batch, ids, strict=True):
            tokens.append(self._vocabulary.end_of_text_id)
            _append(self._files[item.split], tokens)
            part.tokens[item.split] += len(tokens)
            part.documents[item.split] += 1
            part.bytes[item.split] += len(item.content)
            state.file_bytes[item.split] += len(tokens) * tokens.itemsize
            self._uncommitted_bytes += len(item.content)
        state.batches += 1
        if self._uncommitted_bytes >= _COMMIT_BYTES:
            for file in self._files:
                file.flush()
                os.fsync(file.fileno())
            state.save(self._folder)
            self._uncommitted_bytes = 0
        done = sum(sum(each.bytes) for each in state.parts)
        self._tell(f"encoded {megabytes(done)} of {megabytes(state.total_bytes)} {bar(done, state.total_bytes)}")


def _opened_at(path: Path, size: int) -> IO[bytes]:
    """The file, cut after what is known to be whole."""
    file = path.open("r+b" if path.exists() else "w+b")
    file.truncate(size)
    file.seek(size)
    return file


def _in_order(items: Iterator[T], work: Callable[[T], R]) -> Iterator[tuple[T, R]]:
    """Each item with its result; two threads work ahead: files are read and written while the library encodes."""
    pending: deque[tuple[T, Future[R]]] = deque()
    with ThreadPoolExecutor(2) as threads:
        for item in items:
            pending.append((item, threads.submit(work, item)))
            if len(pending) >= _IN_FLIGHT:
                first, result = pending.popleft()
                yield first, result.result()
        for first, result in pending:
            yield first, result.result()


def _total(parts: list[Sizes], split: int) -> shards.SplitCounts:
    return shards.SplitCounts(
        tokens=sum(part.tokens[split] for part in parts),
        documents=sum(part.documents[split] for part in parts),
        bytes=sum(part.bytes[split] for part in parts),
    )


def _domains(found: FoundCorpora, parts: list[Sizes]) -> dict[str, shards.DomainCounts]:
    if not found.preparation.divided:
        return {}
    return {
        domain.name: shards.DomainCounts(
            corpus=", ".join(domain.sources), train=_total([part], 0), validation=_total([part], 1)
        )
        for domain, part in zip(found.preparation.domains, parts, strict=True)
    }


def _batches(items: Iterable[_Item]) -> Iterator[list[_Item]]:
    """Runs of documents of about _BATCH_BYTES, so that memory does not grow with the corpus."""
    batch: list[_Item] = []
    size = 0
    for item in items:
        batch.append(item)
        size += len(item.content)
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

    kind = np.dtype(dtype).newbyteorder("<")
    num_ids, frequencies_V = path.stat().st_size // kind.itemsize, np.zeros(1, dtype=np.int64)
    with path.open("rb") as file:
        while len(ids_N := np.fromfile(file, dtype=kind, count=1 << 22)):
            counts_V = np.bincount(ids_N, minlength=len(frequencies_V))
            counts_V[: len(frequencies_V)] += frequencies_V
            frequencies_V = counts_V
    counts = frequencies_V[frequencies_V > 0].tolist()
    return math.fsum(count / num_ids * math.log(num_ids / count) for count in counts)


def _record(path: Path) -> shards.FileRecord:
    with path.open("rb") as file:
        return shards.FileRecord(bytes=path.stat().st_size, sha256=hashlib.file_digest(file, "sha256").hexdigest())
