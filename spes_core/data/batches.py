"""Batches of token ids for one training process, read from memory-mapped shards.

Shape suffixes: B sequences, T tokens of a sequence, W = T + 1 tokens of a window, N tokens of a split.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch

from spes_core.config import DataConfig
from spes_core.data import order, shards
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


class TokenSource:
    """The training and validation sequences of a tokenized folder.

    A sequence is a window of sequence_length + 1 tokens at stride sequence_length; its targets are its tokens shifted
    by one. Nothing here has state: a batch depends on (seed, step, part, parts) alone. Raises DataError for a folder
    that is torn, or too small to hold one sequence.
    """

    def __init__(self, data_dir: Path | str, config: DataConfig, seed: int) -> None:
        folder = Path(data_dir)
        self.header = shards.read_header(folder)
        if self.header.vocab_size > config.tokenizer_vocab_size:
            raise DataError(
                f"{folder} has {self.header.vocab_size} token ids, more than data.tokenizer_vocab_size"
                f" ({config.tokenizer_vocab_size}); prepare the corpus with this size"
            )
        self.num_train_sequences = self.header.train.num_sequences(config.sequence_length)
        self.num_validation_sequences = self.header.validation.num_sequences(config.sequence_length)
        if self.num_train_sequences == 0:
            raise DataError(
                f"{folder} holds {self.header.train.tokens} training tokens, too few for one sequence of"
                f" data.sequence_length ({config.sequence_length}); shorten sequences or give more text"
            )
        self._config, self._seed = config, seed
        self._train_N = self._map(folder / shards.TRAIN)
        self._validation_N = self._map(folder / shards.VALIDATION)
        self._bytes_V = np.fromfile(folder / shards.TOKEN_BYTES, dtype="<u4").astype(np.int64)

    def train_batch(self, step: int, part: int, parts: int) -> tuple[torch.Tensor, torch.Tensor]:
        """(tokens_BT, targets_BT), int64, that ``part`` of ``parts`` trains on in optimizer step ``step`` (from 1).

        The parts' sequences are disjoint and together the step's global batch, whatever ``parts`` is.
        """
        places = order.positions(step, part, parts, self._config.global_batch_sequences)
        samples = [order.sample_index(self._seed, place, self.num_train_sequences) for place in places]
        windows_BW = self._windows(self._train_N, np.array(samples))
        return _tensor(windows_BW[:, :-1]), _tensor(windows_BW[:, 1:])

    def validation_batches(
        self, part: int, parts: int, batch_sequences: int, max_sequences: int
    ) -> list[ValidationBatch]:
        """The share of ``part`` of at most ``max_sequences`` sequences spread evenly over the validation split.

        The set does not depend on ``parts``. Every part gets the same number of batches with the same shapes, each of
        at most ``batch_sequences``; where sequences run out, a row repeats token 0 and its targets are IGNORED_TARGET.
        """
        assert 0 <= part < parts and batch_sequences >= 1
        available = self.num_validation_sequences
        chosen = min(max_sequences, available)
        share = np.arange(part, chosen, parts)  # dealt like cards: parts differ by at most one sequence
        windows_BW = self._windows(self._validation_N, share * available // max(1, chosen))
        rows = -(-chosen // parts)
        tokens_BT = np.zeros((rows, self._config.sequence_length), dtype=np.int64)
        targets_BT = np.full_like(tokens_BT, IGNORED_TARGET)
        tokens_BT[: len(share)], targets_BT[: len(share)] = windows_BW[:, :-1], windows_BW[:, 1:]
        bytes_B = np.zeros(rows, dtype=np.int64)
        bytes_B[: len(share)] = self._bytes_V[windows_BW[:, 1:]].sum(axis=1)
        # Sizes that differ by at most one keep a batch without any real target as rare as can be.
        pieces = np.array_split(np.arange(rows), -(-rows // batch_sequences)) if rows else []
        return [ValidationBatch(_tensor(tokens_BT[p]), _tensor(targets_BT[p]), int(bytes_B[p].sum())) for p in pieces]

    def _map(self, path: Path) -> np.ndarray[Any, Any]:
        """The ids of a split, mapped into memory: pages are read when they are used."""
        if path.stat().st_size == 0:
            return np.zeros(0, dtype=np.uint16)
        mapped_N = np.memmap(path, dtype=np.dtype(self.header.dtype).newbyteorder("<"), mode="r")
        return mapped_N.view(np.ndarray)  # slices of a memmap are slow to make

    def _windows(self, ids_N: np.ndarray[Any, Any], indices_B: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
        """Copies of the windows with these indices, as int64."""
        length = self._config.sequence_length
        windows_BW = np.empty((len(indices_B), length + 1), dtype=np.int64)
        for row, start in enumerate((indices_B * length).tolist()):
            windows_BW[row] = ids_N[start : start + length + 1]
        return windows_BW


def _tensor(array: np.ndarray[Any, Any]) -> torch.Tensor:
    return torch.from_numpy(np.ascontiguousarray(array))
