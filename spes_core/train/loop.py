"""The training loop of one participant: H local steps, a round, validation when due; for every method the same.

What differs between methods comes in as arguments: the experts that the decoder trains, an `Exchange` (rounds) or a
sharded decoder (gradients exchanged in every backward pass) or neither (local training).
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import asdict, dataclass, field
from typing import Protocol

import torch
from torch import Tensor

from spes_core import schedules
from spes_core.config import RunConfig
from spes_core.events import EventWriter
from spes_core.model.decoder import Decoder
from spes_core.processlife import rss_peak_bytes
from spes_core.train import footprint
from spes_core.train.clock import Clock
from spes_core.train.exchange import RoundReport
from spes_core.train.step import StepMetrics, make_optimizer, train_step
from spes_core.train.validate import validate

_VALIDATION_BATCH_SEQUENCES = 16


class BatchSource(Protocol):
    """What the loop needs of `data.batches.TokenSource`."""

    def train_batch(self, step: int, part: int, parts: int) -> tuple[Tensor, Tensor]:
        """(tokens_BT, targets_BT) of one participant in one step."""

    def validation_batches(
        self, part: int, parts: int, batch_sequences: int, max_sequences: int
    ) -> Sequence[tuple[Tensor, Tensor, int]]:
        """(tokens_BT, targets_BT, bytes of text behind the targets) of one participant."""


class RoundExchange(Protocol):
    """What the loop needs of `train.exchange.Exchange`."""

    @property
    def buffer_bytes(self) -> int:
        """Host memory that a round takes beside the model."""

    def run_round(self, round: int, step: int, tokens: int) -> RoundReport:
        """Exchange trained tensors for the new global model, in place."""


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


@dataclass
class _SinceLog:
    """Sums since the last training event."""

    steps: int = 0
    started: float = field(default_factory=time.perf_counter)
    metrics: list[StepMetrics] = field(default_factory=list)


class Training:
    """One participant's training run; `run` does all of it.

    Owns the optimizer, whose moments live through all rounds. Events go to ``events`` (contract: events.py).
    """

    def __init__(
        self,
        config: RunConfig,
        decoder: Decoder,
        source: BatchSource,
        events: EventWriter,
        place: Place,
        *,
        exchange: RoundExchange | None,
        device: torch.device,
    ) -> None:
        self.config, self.decoder, self.events, self.place, self.exchange = (
            config,
            decoder,
            events,
            place,
            exchange,
        )
        self.optimizer = make_optimizer(decoder, config.optim)
        self.clock = Clock()
        self._source, self._device = source, device
        self._saved = footprint.SavedActivations(decoder)
        self._since_log = _SinceLog()
        self._tokens_per_step = config.tokens_per_step // place.parts

    def run(self) -> None:
        """Take every step of the configuration, then write the closing events."""
        config = self.config
        total_steps = config.total_steps
        round_steps, validation_steps = schedules.round_steps(config), set(schedules.validation_steps(config))
        due_rounds = {step: index for index, step in enumerate(round_steps)}
        previous_round_step = 0
        self.clock = Clock()
        for step in range(1, total_steps + 1):
            self._step(step)
            if step == 1:
                self.events.write("first_step")
            if step % config.log.interval_steps == 0 or step == total_steps:
                self._log(step)
            if step in due_rounds and self.exchange is not None:
                self._round(due_rounds[step], step, step - previous_round_step)
                previous_round_step = step
            if step in validation_steps:
                self._validate(step)
        self._close(total_steps)

    def _step(self, step: int) -> None:
        optim = self.config.optim
        with self.clock.phase("data"):
            tokens_BT, targets_BT = self._source.train_batch(step, self.place.part, self.place.parts)
        batch = (tokens_BT.to(self._device), targets_BT.to(self._device))
        size = self.config.micro_batch_sequences
        micro_batches = [tuple(item[at : at + size] for item in batch) for at in range(0, len(tokens_BT), size)]
        with self.clock.phase("compute"), self._saved.measure(batch) if step == 1 else nullcontext():
            metrics = train_step(
                self.decoder,
                self.optimizer,
                micro_batches,  # type: ignore[arg-type]
                self.config.loss,
                optim.clip_norm,
                schedules.learning_rate(optim, step, self.config.total_steps),
            )
        self._since_log.steps += 1
        self._since_log.metrics.append(metrics)

    def _log(self, step: int) -> None:
        """Bring the metrics of the last steps to the host and write them as one event."""
        with self.clock.phase("compute"):
            since, self._since_log = self._since_log, _SinceLog()
            mean = {name: _mean([getattr(item, name) for item in since.metrics]) for name in _SCALARS}
            expert_tokens_LE = torch.stack([item.expert_tokens_LE for item in since.metrics]).sum(dim=0).tolist()
        elapsed_s = self._since_log.started - since.started
        self.events.write(
            "train",
            step=step,
            tokens=step * self.config.tokens_per_step,
            loss_nats=mean.pop("cross_entropy"),
            learning_rate=schedules.learning_rate(self.config.optim, step, self.config.total_steps),
            step_time_s=elapsed_s / since.steps,
            tokens_per_s=self._tokens_per_step * since.steps / elapsed_s,
            **mean,
        )
        self.events.write("load", step=step, expert_tokens=expert_tokens_LE)

    def _round(self, round: int, step: int, steps: int) -> None:
        assert self.exchange is not None
        with self._outside_training():
            report = self.exchange.run_round(round, step, steps * self._tokens_per_step)
        for phase in ("serialise", "transfer", "wait", "merge", "aggregate"):
            self.clock.add(phase, getattr(report, f"{phase}_s"))
        self.events.write("round", **asdict(report))

    def _validate(self, step: int) -> None:
        place = self.place
        batches = self._source.validation_batches(
            place.validation_part,
            place.validation_parts,
            _VALIDATION_BATCH_SEQUENCES,
            self.config.validation.max_sequences,
        )
        with self._outside_training(), self.clock.phase("validate"):
            started = time.perf_counter()
            sums = validate(self.decoder, batches, self.config.loss, self._device)
            duration_s = time.perf_counter() - started
        self.events.write(
            "validation",
            step=step,
            tokens=step * self.config.tokens_per_step,
            part=place.validation_part,
            parts=place.validation_parts,
            duration_s=duration_s,
            **asdict(sums),
        )

    @contextmanager
    def _outside_training(self) -> Iterator[None]:
        """Keep the time of the block out of the training events' step time."""
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
        started = time.perf_counter()
        yield
        self._since_log.started += time.perf_counter() - started

    def _close(self, total_steps: int) -> None:
        wall_time_s = self.clock.wall_s()
        self.events.write(
            "memory",
            weights_bytes=footprint.weights_bytes(self.decoder),
            gradients_bytes=footprint.gradients_bytes(self.decoder),
            moments_bytes=footprint.moments_bytes(self.optimizer),
            activations_bytes=self._saved.nbytes,
            sync_buffers_bytes=self.exchange.buffer_bytes if self.exchange else 0,
            rss_peak_bytes=rss_peak_bytes(),
            cuda_peak_bytes=footprint.cuda_peak_bytes(),
        )
        seconds = {f"{phase}_s": seconds for phase, seconds in self.clock.seconds.items()}
        self.events.write(
            "end",
            steps=total_steps,
            tokens=total_steps * self._tokens_per_step,
            wall_time_s=wall_time_s,
            **seconds,
        )


_SCALARS = ("cross_entropy", "grad_norm", "z_loss", "balance_loss", "router_z_loss")


def _mean(values: list[Tensor]) -> float:
    return float(torch.stack(values).double().mean())
