"""What a folder of tokenized text holds and says about itself: its header, read without numpy or torch.

::

    train.bin, validation.bin    token ids, little endian, one file a split; every document ends with the end of text
    token_bytes.bin              uint32 a token id: the bytes of text that the token stands for (end of text: 0)
    tokenizer.json               the tokenizer, as the `tokenizers` library reads it (a given one: with its other files)
    header.json                  `ShardHeader`; written last
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field
from math import ceil
from pathlib import Path
from typing import Literal, NamedTuple

from spes_core.config import RunConfig
from spes_core.data import mixture
from spes_core.errors import ConfigError, DataError, Problem
from spes_core.structure import build

SCHEMA = 1
"""Version of the folder's format; part of the cache key."""

TRAIN, VALIDATION, TOKEN_BYTES = "train.bin", "validation.bin", "token_bytes.bin"
TOKENIZER, HEADER = "tokenizer.json", "header.json"
ITEM_BYTES = {"uint16": 2, "uint32": 4}


@dataclass(frozen=True, kw_only=True)
class SplitCounts:
    """Size of one split."""

    tokens: int
    """Token ids in the file, the ends of text included."""
    documents: int
    bytes: int
    """UTF-8 bytes of the documents' text."""

    def num_sequences(self, sequence_length: int) -> int:
        """Whole windows of sequence_length + 1 tokens at stride sequence_length."""
        return max(0, self.tokens - 1) // sequence_length


class Span(NamedTuple):
    """Sequences of one domain in the file of one split."""

    start: int
    """Index of the domain's first token."""
    sequences: int
    """Whole windows of sequence_length + 1 tokens at stride sequence_length."""


@dataclass(frozen=True, kw_only=True)
class DomainCounts:
    """Part of one domain in both splits; the files hold the domains one after another, in the header's order."""

    corpus: str
    train: SplitCounts
    validation: SplitCounts


@dataclass(frozen=True, kw_only=True)
class FileRecord:
    """What one file of the folder must be."""

    bytes: int
    sha256: str


@dataclass(frozen=True, kw_only=True)
class ShardHeader:
    """Everything known about a tokenized corpus."""

    schema: int = SCHEMA
    dtype: Literal["uint16", "uint32"]
    """Type of a token id in train.bin and validation.bin."""
    vocab_size: int
    """Token ids of the tokenizer; below vocab_size_asked when the corpus has too few different words."""
    vocab_size_asked: int
    end_of_text_id: int
    tokenizer_digest: str
    """SHA-256 of tokenizer.json."""
    tokenizer_documents: int
    """Training documents that the tokenizer was trained on (a bounded sample; 0 for one that was not trained)."""
    tokenizer_bytes: int
    """Their UTF-8 bytes."""
    digest: str
    """SHA-256 over the token files (see `token_digest`): the data's part of a trial's identity."""
    train: SplitCounts
    validation: SplitCounts
    validation_fraction: float
    unigram_entropy_nats: float
    """Entropy of the training tokens' frequencies: the loss of the best model that ignores context."""
    corpus: str
    """`data.corpus` as it was given, or the names of the domains."""
    corpus_digest: str
    """SHA-256 over the names and texts of the documents used, in order."""
    python_version: str
    tokenizers_version: str
    files: dict[str, FileRecord]
    tokenizer: str = "bpe"
    """`data.tokenizer` as it was given."""
    domains: dict[str, DomainCounts] = field(default_factory=dict)
    """Domain -> its part, in file order; empty for a corpus that is not divided. The parts add up to the splits."""
    preparation_key: str = ""
    """Follows from the settings and files that the folder was made from (`preparation.FoundCorpora.key`)."""
    repeated_documents: int = 0
    """Documents used whose whole text another document before them has."""
    skipped: dict[str, int] = field(default_factory=dict)
    """Reason -> number of rows, documents or files left out."""
    skipped_first: dict[str, tuple[str, ...]] = field(default_factory=dict)
    """Reason -> where the first few of them are ("file:line")."""

    def spans(self, split: Literal["train", "validation"], sequence_length: int) -> dict[str, Span]:
        """Domain -> where its sequences lie in the file of ``split``; one domain "" for a corpus that is not divided.

        No sequence crosses the end of a domain.
        """
        counts: dict[str, SplitCounts] = {name: getattr(domain, split) for name, domain in self.domains.items()}
        spans, start = {}, 0
        for name, part in (counts or {"": getattr(self, split)}).items():
            spans[name] = Span(start, part.num_sequences(sequence_length))
            start += part.tokens
        return spans


def read_header(folder: Path) -> ShardHeader:
    """The header of a tokenized folder, after cheap checks: known version, every file there with its recorded size.

    Raises DataError for a folder that is foreign, of another version, or torn. Contents are not hashed (`verify` does).
    """
    path = folder / HEADER
    again = "prepare the corpus again with python -m spes_core.data.tokenize"
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise DataError(f"{folder} is not a folder of tokenized text ({path.name}: {error}); {again}") from error
    if not isinstance(data, dict) or data.get("schema") != SCHEMA:
        version = data.get("schema") if isinstance(data, dict) else None
        raise DataError(f"{path} has schema {version}, but this version reads schema {SCHEMA}; {again}")
    try:
        header = build(ShardHeader, data)
    except ConfigError as error:
        raise DataError(f"{path} is not a valid header: {'; '.join(map(str, error.problems))}; {again}") from error
    for name, expected in _expected_bytes(header).items():
        recorded = header.files[name].bytes if name in header.files else None
        actual = (folder / name).stat().st_size if (folder / name).is_file() else None
        wanted = recorded if expected is None else expected
        if actual is None or not actual == recorded == wanted:
            found = "is missing" if actual is None else f"has {actual} bytes"
            raise DataError(f"{folder / name} {found}, but its header says {wanted}; {again}")
    return header


def write_header(folder: Path, header: ShardHeader) -> None:
    """Write header.json (the last file of a folder)."""
    (folder / HEADER).write_text(json.dumps(asdict(header), indent=1) + "\n", encoding="utf-8")


def verify(folder: Path) -> ShardHeader:
    """`read_header`, and hash every file. Raises DataError naming the first file whose bytes have changed."""
    header = read_header(folder)
    for name, record in header.files.items():
        with (folder / name).open("rb") as file:
            if hashlib.file_digest(file, "sha256").hexdigest() != record.sha256:
                raise DataError(
                    f"{folder / name} does not have the SHA-256 that its header records ({record.sha256});"
                    " delete the folder and prepare the corpus again"
                )
    if header.digest != token_digest(header.files, header.domains):
        raise DataError(f"{folder / HEADER} records a digest that is not that of its files; prepare the corpus again")
    return header


def token_digest(files: Mapping[str, FileRecord], domains: Mapping[str, DomainCounts]) -> str:
    """SHA-256 (hex) over all that decides a run's numbers: names and SHA-256 of files, and where domains end in them.

    tokenizer.json is left out: its spelling may change with the library while every token stays the same.
    """
    lines = "".join(f"{name} {files[name].sha256}\n" for name in (TRAIN, VALIDATION, TOKEN_BYTES))
    lines += "".join(f"{name} {part.train.tokens} {part.validation.tokens}\n" for name, part in domains.items())
    return hashlib.sha256(lines.encode()).hexdigest()


def require_enough(header: ShardHeader, config: RunConfig) -> None:
    """Check that the corpus is large enough for a run. Raises ConfigError with every rule broken.

    One step's global batch must not repeat a sequence, every domain must give a sequence of both splits, and every
    training process must have held-out text to evaluate.
    """
    length, batch, parts = config.data.sequence_length, config.data.global_batch_sequences, config.world_size
    train_spans, held_out_spans = header.spans("train", length), header.spans("validation", length)
    train = sum(span.sequences for span in train_spans.values())
    held_out = sum(span.sequences for span in held_out_spans.values())
    problems: list[Problem] = []
    size = f"of data.sequence_length ({length}) tokens that the corpus ({header.corpus}) gives"
    if parts > train:
        message = f"({config.nodes}) needs {parts} training sequences, more than the {train} {size}; "
        problems.append(Problem("nodes", message + "use fewer nodes, shorter sequences or more text"))
    elif batch > train:
        message = f"({batch}) must not exceed the {train} training sequences {size}; "
        problems.append(
            Problem("data.global_batch_sequences", message + "lower it, shorten sequences or give more text")
        )
    if parts > held_out:
        message = f"({config.nodes}) needs {parts} validation sequences, more than the {held_out} {size}; "
        problems.append(Problem("nodes", message + "use fewer nodes or raise data.validation_fraction"))
    if problems := problems or list(_domain_problems(header, config)):
        raise ConfigError(problems)


def _domain_problems(header: ShardHeader, config: RunConfig) -> Iterator[Problem]:
    """What single domains are too small for."""
    length, batch = config.data.sequence_length, config.data.global_batch_sequences
    train = {name: span.sequences for name, span in header.spans("train", length).items()}
    held_out = {name: span.sequences for name, span in header.spans("validation", length).items()}
    for name in header.domains:
        path = f"data.domains.{name}"
        needed = ceil(mixture.shares(config.data, train).get(name, 0) * batch)
        if train[name] < max(1, needed):
            yield Problem(
                path,
                f"gives {train[name]} training sequences of data.sequence_length ({length}) tokens, fewer than the"
                f" {max(1, needed)} that one step takes; lower its weight, shorten sequences or give it more text",
            )
        if held_out[name] < 1:
            yield Problem(
                path,
                f"has no validation sequence of data.sequence_length ({length}) tokens; raise data.validation_fraction,"
                " shorten sequences or give it more text",
            )


def _expected_bytes(header: ShardHeader) -> dict[str, int | None]:
    """File -> bytes that follow from the counts; None where only the record says."""
    item = ITEM_BYTES[header.dtype]
    return {
        TRAIN: header.train.tokens * item,
        VALIDATION: header.validation.tokens * item,
        TOKEN_BYTES: header.vocab_size * 4,
        TOKENIZER: None,
    }
