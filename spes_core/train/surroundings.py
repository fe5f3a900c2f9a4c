"""What the training loop needs around it: data, an exchange, other ranks, checkpoints, and its place among all."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from spes_core.config import RunConfig
from spes_core.model.decoder import Decoder
from spes_core.train.exchange import Entry, RoundReport


class BatchSource(Protocol):
    """What the loop needs of `data.batches.TokenSource`."""

    @property
    def separator_id(self) -> int | None:
        """Token that ends a document, where attention must not leave one; else None."""

    def train_batch(self, step: int, part: int, parts: int) -> tuple[Tensor, Tensor]:
        """(tokens_BT, targets_BT) of one participant in one step."""

    def validation_batches(
        self, part: int, parts: int, batch_sequences: int, max_sequences: int
    ) -> Sequence[tuple[Tensor, Tensor, int, str]]:
        """(tokens_BT, targets_BT, bytes of text behind the targets, domain) of one participant.

        All participants get the same domains in the same order.
        """


class RoundExchange(Protocol):
    """What the loop needs of `train.exchange.Exchange`."""

    safe_round: int
    """The round with which the newest checkpoint begins; kept up to date by the loop."""

    @property
    def buffer_bytes(self) -> int:
        """Host memory that a round takes beside the model."""

    def join(self, round: int) -> Entry:
        """Take part from ``round`` on, or from a later one with a snapshot of the weights."""

    def rejoin(self) -> Entry:
        """Go on from a snapshot of the weights with which the open round begins."""

    def run_round(self, round: int, step: int, tokens: int) -> RoundReport:
        """Exchange trained tensors for the new global model, in place. Raises StaleRound when the round is over."""

    def redivide(
        self, decoder: Decoder, optimizer: torch.optim.Optimizer, experts: tuple[int, ...]
    ) -> torch.optim.Optimizer:
        """Train other experts from now on; the optimizer to go on with."""

    def heartbeat(self, step: int) -> None:
        """Tell that this node lives; called from a thread of its own."""

    def state(self) -> dict[str, Tensor]:
        """What a checkpoint must hold for the exchange, beside the weights."""

    def restore(self, state: Mapping[str, Tensor]) -> None:
        """Take up what `state` gave."""


class Ranks(Protocol):
    """What the loop needs of `train.parallel.Group`: numbers over all ranks of a node, of which rank 0 records them."""

    size: int

    def sums(self, values: Sequence[float]) -> list[float]:
        """Sum of each number over the ranks."""

    def maxima(self, values: Sequence[float]) -> list[float]:
        """Largest of each number over the ranks."""


class Checkpointing(Protocol):
    """What the loop needs of `train.resume.Checkpoints`."""

    step: int
    """The step from which to go on; 0 for a fresh start."""
    round: int
    """Rounds closed at that step."""

    def is_due(self, step: int) -> bool:
        """Whether a checkpoint is stored after ``step``."""

    def restore(self, module: nn.Module, optimizer: torch.optim.Optimizer) -> tuple[dict[str, Tensor], dict[str, Any]]:
        """Set weights and moments in place; returns what `save` got as ``others`` and ``values``."""

    def save(
        self,
        module: nn.Module,
        optimizer: torch.optim.Optimizer,
        others: dict[str, Tensor],
        values: dict[str, Any],
        *,
        step: int,
        round: int,
        events_bytes: int,
    ) -> None:
        """Store a checkpoint."""


class OneRank:
    """A participant that records for itself alone."""

    size = 1

    def sums(self, values: Sequence[float]) -> list[float]:
        """See `Ranks`."""
        return list(values)

    def maxima(self, values: Sequence[float]) -> list[float]:
        """See `Ranks`."""
        return list(values)


@dataclass(frozen=True)
class Place:
    """Which share of the data this participant reads, and of the validation it computes."""

    part: int
    """Index of this participant among ``parts``."""
    parts: int
    """Number of participants that divide each global batch."""
    validation_part: int
    """Index among ``validation_parts``; differs from ``part`` when everyone validates a model of its own."""
    validation_parts: int
    """Number of participants that divide the validation set."""

    @classmethod
    def of(cls, config: RunConfig, node: int, rank: int) -> Place:
        """The place of one rank of a node; when they exchange gradients ``rank`` counts all, and ``node`` is 0."""
        ranks, parts = config.group_size, config.world_size
        if config.sync.exchange == "none":
            return cls(node * ranks + rank, parts, rank, ranks)
        # A node reads a run of each global batch, but every nodes-th validation sequence, whatever its ranks.
        return cls(node * ranks + rank, parts, rank * (parts // ranks) + node, parts)
