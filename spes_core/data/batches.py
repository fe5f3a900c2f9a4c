"""Batches of token ids for one training process, read from memory-mapped shards.

Shape suffixes: B sequences, T tokens of a sequence, W = T + 1 tokens of a window, N tokens of a split.
"""

from __future__ import annotations

import mmap
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch

from spes_core.config import DataConfig
from spes_core.data import shards
from spes_core.data.mixture import Mixture
from spes_core.errors import DataError
from spes_core.model.losses import IGNORED_TARGET


class ValidationBatch(NamedTuple):
    """Held-out sequences, as many as in every other part's batch; targets of rows that fill up are IGNORED_TARGET."""

    tokens: torch.Tensor
    """(B, T) int64."""
    targets: torch.Tensor
    """(B, T) int64."""
    target_bytes: int
    """Bytes of text that the targets which are not IGNORED_TARGET stand for (an end of text stands for none)."""
    domain: str
    """Of all these sequences; "" where the corpus is not divided."""


class TokenSource:
    """The training and validation sequences of a tokenized folder.

    A sequence is a window of sequence_length + 1 tokens at stride sequence_length in one domain; its targets are its
    tokens shifted by one. Nothing here has state: a batch depends on (seed, step, part, parts) alone. Raises DataError
    for a folder that is torn, of other domains than ``config``'s, or too small to hold a sequence of each.
    """

    def __init__(self, data_dir: Path | str, config: DataConfig, seed: int) -> None:
        folder = Path(data_dir)
        self.header = shards.read_header(folder)
        if self.header.vocab_size > config.tokenizer_vocab_size:
            raise DataError(
                f"{folder} has {self.header.vocab_size} token ids, more than data.tokenizer_vocab_size"
                f" ({config.tokenizer_vocab_size}); prepare the corpus with this size"
            )
        if self.header.domains.keys() != config.domains.keys():
            raise DataError(
                f"{folder} has the domains {list(self.header.domains)}, but data.domains names {list(config.domains)};"
                " prepare the corpus with these domains"
            )
        self._train = self.header.spans("train", config.sequence_length)
        self._validation = self.header.spans("validation", config.sequence_length)
        for name, span in self._train.items():
            if span.sequences == 0:
                tokens = self.header.domains[name].train.tokens if name else self.header.train.tokens
                raise DataError(
                    f"{folder} holds {tokens} training tokens{f' of {name}' if name else ''}, too few for one sequence"
                    f" of data.sequence_length ({config.sequence_length}); shorten sequences or give more text"
                )
        self.separator_id = self.header.end_of_text_id if config.document_attention == "separate" else None
        """Token that ends a document, where attention must not leave one."""
        self._config = config
        self._mixture = Mixture(config, {name: span.sequences for name, span in self._train.items()}, seed)
        dtype = np.dtype(self.header.dtype).newbyteorder("<")
        self._train_N = _Mapped(folder / shards.TRAIN, dtype)
        self._validation_N = _Mapped(folder / shards.VALIDATION, dtype)
        self._bytes_V = np.fromfile(folder / shards.TOKEN_BYTES, dtype="<u4").astype(np.int64)

    def train_batch(self, step: int, part: int, parts: int) -> tuple[torch.Tensor, torch.Tensor]:
        """(tokens_BT, targets_BT), int64, that ``part`` of ``parts`` trains on in optimizer step ``step`` (from 1).

        The parts' sequences are disjoint and together the step's global batch, whatever ``parts`` is.
        """
        samples = self._mixture.samples(step, part, parts)
        length = self._config.sequence_length
        starts = [self._train[sample.domain].start + sample.number * length for sample in samples]
        windows_BW = self._train_N.windows(starts, length + 1)
        return _tensor(windows_BW[:, :-1]), _tensor(windows_BW[:, 1:])

    def validation_batches(
        self, part: int, parts: int, batch_sequences: int, max_sequences: int
    ) -> list[ValidationBatch]:
        """The share of ``part`` of at most ``max_sequences`` held-out sequences; each batch is of one domain.

        The set does not depend on ``parts``, nor on what is trained on: equally many of each domain (`even_shares`),
        spread evenly over its part of the split. Every part gets the same number of batches with the same shapes, each
        of at most ``batch_sequences``; where a domain's sequences run out, a row repeats token 0 and its targets are
        IGNORED_TARGET.
        """
        assert 0 <= part < parts and batch_sequences >= 1
        chosen = even_shares(max_sequences, {name: span.sequences for name, span in self._validation.items()})
        return [
            batch
            for name, count in chosen.items()
            for batch in self._of_domain(name, count, part, parts, batch_sequences)
        ]

    def _of_domain(
        self, name: str, chosen: int, part: int, parts: int, batch_sequences: int
    ) -> Iterator[ValidationBatch]:
        """The batches of ``part`` with its share of ``chosen`` sequences of one domain."""
        span, length = self._validation[name], self._config.sequence_length
        share = np.arange(part, chosen, parts)  # dealt like cards: parts differ by at most one sequence
        starts = span.start + share * span.sequences // max(1, chosen) * length
        windows_BW = self._validation_N.windows(starts.tolist(), length + 1)
        rows = -(-chosen // parts)
        tokens_BT = np.zeros((rows, length), dtype=np.int64)
        targets_BT = np.full_like(tokens_BT, IGNORED_TARGET)
        tokens_BT[: len(share)], targets_BT[: len(share)] = windows_BW[:, :-1], windows_BW[:, 1:]
        bytes_B = np.zeros(rows, dtype=np.int64)
        bytes_B[: len(share)] = self._bytes_V[windows_BW[:, 1:]].sum(axis=1)
        # Sizes that differ by at most one keep a batch without any real target as rare as can be.
        for p in np.array_split(np.arange(rows), -(-rows // batch_sequences)) if rows else []:
            yield ValidationBatch(_tensor(tokens_BT[p]), _tensor(targets_BT[p]), int(bytes_B[p].sum()), name)


class _Mapped:
    """The ids of a split, mapped into memory: pages are read when they are used, and not held afterwards."""

    def __init__(self, path: Path, dtype: np.dtype[Any]) -> None:
        self._mapped: mmap.mmap | None = None
        self._ids_N: np.ndarray[Any, Any] = np.zeros(0, dtype)
        if path.stat().st_size:
            with path.open("rb") as file:
                self._mapped = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
            self._ids_N = np.frombuffer(self._mapped, dtype)

    def windows(self, starts_B: Sequence[int], width: int) -> np.ndarray[Any, Any]:
        """Copies of the ``width`` ids from each start, (B, width) int64."""
        windows_BW = np.empty((len(starts_B), width), dtype=np.int64)
        for row, start in enumerate(starts_B):
            windows_BW[row] = self._ids_N[start : start + width]
        if self._mapped is not None and hasattr(mmap, "MADV_DONTNEED"):
            # Else every page ever read would count as this process's memory, in the end the whole corpus.
            self._mapped.madvise(mmap.MADV_DONTNEED)
        return windows_BW


def even_shares(total: int, available: Mapping[str, int]) -> dict[str, int]:
    """``total`` divided evenly over domains of which none gives more than it has; what one lacks the others give.

    Remainders go to the first domains that have more.
    """
    counts = dict.fromkeys(available, 0)
    left = min(total, sum(available.values()))
    while left:
        open_names = [name for name in available if counts[name] < available[name]]
        for at, name in enumerate(open_names):
            even = -(-left // (len(open_names) - at))
            taken = min(even, available[name] - counts[name])
            counts[name] += taken
            left -= taken
    return counts


def _tensor(array: np.ndarray[Any, Any]) -> torch.Tensor:
    return torch.from_numpy(np.ascontiguousarray(array))
