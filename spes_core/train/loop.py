"""The training loop of one participant: H local steps, a round, validation when due; for every method the same.

What differs between methods comes in as arguments: the experts that the decoder trains, an `Exchange` (rounds) or a
sharded decoder (gradients exchanged in every backward pass) or neither (local training).
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import asdict, dataclass, field
from typing import Any

import torch
from torch import Tensor

from spes_core import schedules
from spes_core.config import RunConfig
from spes_core.errors import Diverged, StaleRound
from spes_core.events import Events
from spes_core.model.decoder import Decoder
from spes_core.processlife import rss_peak_bytes
from spes_core.train import footprint
from spes_core.train.clock import Clock
from spes_core.train.exchange import Entry
from spes_core.train.heartbeats import Heartbeats
from spes_core.train.step import StepMetrics, make_optimizer, train_step
from spes_core.train.surroundings import BatchSource as BatchSource
from spes_core.train.surroundings import Checkpointing, OneRank, Ranks, RoundExchange
from spes_core.train.surroundings import Place as Place
from spes_core.train.validate import validate

_VALIDATION_BATCH_SEQUENCES = 16


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
        events: Events,
        place: Place,
        *,
        exchange: RoundExchange | None,
        device: torch.device,
        ranks: Ranks | None = None,
        checkpoints: Checkpointing | None = None,
    ) -> None:
        """``ranks`` are those of one node, for which rank 0 records; None where each process records for itself.

        With ``checkpoints`` that begin at a step, weights and moments are set here to what they were after it.
        """
        self.config, self.decoder, self.events, self.place, self.exchange = (
            config,
            decoder,
            events,
            place,
            exchange,
        )
        decoder.separator_id = source.separator_id
        self.optimizer = make_optimizer(decoder, config.optim)
        self.clock = Clock()
        self._source, self._device = source, device
        self._saved = footprint.SavedActivations(decoder)
        self._since_log = _SinceLog()
        self._ranks = ranks or OneRank()
        self._checkpoints = checkpoints
        self._round_steps = schedules.round_steps(config) if exchange is not None else []
        self._next_round = 0
        """The round that the local steps are taken for."""
        self._round_began_s, self._steps_in_round = 0.0, 0
        self._steps_taken = 0
        """Fewer than the steps that have passed, where a node was late."""
        self._first_step = 1
        if checkpoints is not None and checkpoints.step:
            self._resume(checkpoints)
        self._step_now = self._first_step - 1
        """Steps that have passed."""

    @property
    def _tokens_per_step(self) -> int:
        """Training tokens of this participant in one step."""
        data = self.config.data
        return data.global_batch_sequences // self.place.parts * self._ranks.size * data.sequence_length

    def run(self) -> None:
        """Take every step of the run that is left: rounds, validations and checkpoints when due.

        Raises Diverged when the training loss is no longer finite, and what an exchange raises.
        """
        if self.exchange is None:
            self._run()
            return
        self._enter(self.exchange)
        with Heartbeats(self.exchange.heartbeat, self.config.round.heartbeat_s, lambda: self._step_now):
            self._run()

    def _run(self) -> None:
        config = self.config
        total_steps, validation_steps = config.total_steps, set(schedules.validation_steps(config))
        if self._first_step == 1:
            self.clock, self._since_log = Clock(), _SinceLog()
        self._round_began_s = time.perf_counter()
        while self._step_now < total_steps:
            self._step_now += 1
            step = self._step_now
            self._step(step)
            if self._steps_taken == 1:
                self.events.write("first_step")
            if step % config.log.interval_steps == 0 or step == total_steps:
                self._log(step)
            if self.exchange is not None and self._is_round_due(step):
                self._round(self.exchange, step)
            if self._step_now in validation_steps:
                self._validate(self._step_now)
            if self._checkpoints is not None and self._checkpoints.is_due(self._step_now):
                self._store(self._checkpoints, self._step_now)
        self._close()

    def _step(self, step: int) -> None:
        optim = self.config.optim
        with self.clock.phase("data"):
            tokens_BT, targets_BT = self._source.train_batch(step, self.place.part, self.place.parts)
        batch = (tokens_BT.to(self._device), targets_BT.to(self._device))
        size = self.config.micro_batch_sequences
        micro_batches = [tuple(item[at : at + size] for item in batch) for at in range(0, len(tokens_BT), size)]
        is_first = step == self._first_step
        with self.clock.phase("compute"), self._saved.measure(batch) if is_first else nullcontext():
            metrics = train_step(
                self.decoder,
                self.optimizer,
                micro_batches,  # type: ignore[arg-type]
                self.config.loss,
                optim.clip_norm,
                schedules.learning_rate(optim, step, self.config.total_steps),
            )
        self._steps_taken += 1
        self._steps_in_round += 1
        self._since_log.steps += 1
        self._since_log.metrics.append(metrics)

    def _log(self, step: int) -> None:
        """Bring the metrics of the last steps to the host and write them as one event."""
        with self.clock.phase("compute"):
            since, self._since_log = self._since_log, _SinceLog()
            means = [_mean([getattr(item, name) for item in since.metrics]) for name in _SCALARS]
            # Ranks see equally many tokens, so the mean over ranks is the mean over the node's tokens.
            means = [value / self._ranks.size for value in self._ranks.sums(means)]
            mean = dict(zip(_SCALARS, means, strict=True))
            tokens_LE = torch.stack([item.expert_tokens_LE for item in since.metrics]).sum(dim=0)
            tokens_S = [int(count) for count in self._ranks.sums(tokens_LE.flatten().tolist())]
            expert_tokens_LE = torch.tensor(tokens_S).view(tokens_LE.shape).tolist()
        elapsed_s = self._since_log.started - since.started
        loss_nats = mean.pop("cross_entropy")
        self.events.write(
            "train",
            step=step,
            tokens=step * self.config.tokens_per_step,
            loss_nats=loss_nats,
            learning_rate=schedules.learning_rate(self.config.optim, step, self.config.total_steps),
            step_time_s=elapsed_s / since.steps,
            tokens_per_s=self._tokens_per_step * since.steps / elapsed_s,
            **mean,
        )
        self.events.write("load", step=step, expert_tokens=expert_tokens_LE)
        if not math.isfinite(loss_nats):
            raise Diverged(f"the training loss is {loss_nats} by step {step}: the run has diverged; lower optim.lr")

    def _enter(self, exchange: RoundExchange) -> None:
        """Join, and go where the server says."""
        exchange.safe_round = self._next_round
        entry = exchange.join(self._next_round)
        if entry.is_snapshot:
            self._skip_to(entry, self._first_step - 1)
            self._first_step = self._step_now + 1
        self._take_experts(exchange, entry.experts, self._first_step - 1)

    def _is_round_due(self, step: int) -> bool:
        """After the round's last step, or once its local steps have taken the time that they may (all ranks agree)."""
        if step == self._round_steps[self._next_round]:
            return True
        limit_s = self.config.round.local_time_s
        if limit_s is None:
            return False
        (elapsed_s,) = self._ranks.maxima([time.perf_counter() - self._round_began_s])
        return elapsed_s >= limit_s

    def _round(self, exchange: RoundExchange, step: int) -> None:
        """Exchange what was trained; afterwards all steps up to the round's last one have passed."""
        round, due_step = self._next_round, self._round_steps[self._next_round]
        with self._outside_training():
            try:
                report = exchange.run_round(round, due_step, self._steps_in_round * self._tokens_per_step)
            except StaleRound as stale:
                self._rejoin(exchange, step, str(stale))
                return
        for phase in ("serialise", "transfer", "wait", "merge", "aggregate"):
            self.clock.add(phase, getattr(report, f"{phase}_s"))
        self.events.write("round", **asdict(report))
        self._pass_to(round + 1, due_step)
        self._take_experts(exchange, report.experts, due_step)

    def _rejoin(self, exchange: RoundExchange, step: int, reason: str) -> None:
        """The round closed without this node: drop its local steps, and go on with the open round."""
        entry = exchange.rejoin()
        self._skip_to(entry, step, reason)
        self._take_experts(exchange, entry.experts, self._step_now)

    def _skip_to(self, entry: Entry, step: int, reason: str = "") -> None:
        """Go on after ``step`` with the round that ``entry`` names; moments stay as they are."""
        target = self._round_steps[entry.round - 1] if entry.round else 0
        self.events.write(
            "skipped",
            step=target,
            rounds=list(range(self._next_round, entry.round)),
            steps=target - step,
            steps_dropped=self._steps_in_round,
            reason=reason,
        )
        self._pass_to(entry.round, target)

    def _pass_to(self, round: int, step: int) -> None:
        """Begin ``round``; steps up to ``step`` that were not taken never will be."""
        logged, interval, total = self._step_now, self.config.log.interval_steps, self.config.total_steps
        self._next_round, self._step_now = round, step
        self._round_began_s, self._steps_in_round = time.perf_counter(), 0
        if step > logged and self._since_log.steps:
            due = total if step == total else step // interval * interval
            if due > logged:
                self._log(due)

    def _take_experts(self, exchange: RoundExchange, experts: tuple[int, ...], step: int) -> None:
        """Train the experts that the server deals to this node from here on."""
        before = self.decoder.trained_experts
        if experts == before:
            return
        self.optimizer = exchange.redivide(self.decoder, self.optimizer, experts)
        taken, given = sorted(set(experts) - set(before)), sorted(set(before) - set(experts))
        self.events.write("partition", step=step, experts=list(experts), taken=taken, given=given)

    def _validate(self, step: int) -> None:
        place = self.place
        parts = place.validation_parts // self._ranks.size
        batches = self._source.validation_batches(
            place.validation_part,
            place.validation_parts,
            _VALIDATION_BATCH_SEQUENCES,
            self.config.validation.max_sequences,
        )
        with self._outside_training(), self.clock.phase("validate"):
            started = time.perf_counter()
            sums = validate(self.decoder, batches, self.config.loss, self._device)
            by_domain = {name: self._ranks.sums(list(asdict(item).values())) for name, item in sums.items()}
            duration_s = time.perf_counter() - started
        self.events.write(
            "validation",
            step=step,
            tokens=step * self.config.tokens_per_step,
            part=place.validation_part % parts,
            parts=parts,
            duration_s=duration_s,
            **_validation_fields(by_domain),
        )

    def _store(self, checkpoints: Checkpointing, step: int) -> None:
        """Store everything that the next steps depend on, and what the events so far have not yet told."""
        with self._outside_training(), self.clock.phase("checkpoint"):
            since = self._since_log
            names = StepMetrics._fields if since.steps else ()
            others = {f"log|{name}": torch.stack([getattr(item, name) for item in since.metrics]) for name in names}
            values = {
                "clock_s": dict(self.clock.seconds),
                "wall_s": self.clock.wall_s(),
                "log_s": time.perf_counter() - since.started,
                "steps_taken": self._steps_taken,
                "experts": list(self.decoder.trained_experts),
            }
            if self.exchange is not None:
                others |= {f"exchange|{name}": tensor for name, tensor in self.exchange.state().items()}
            size_bytes, round = self.events.size_bytes, self._next_round
            checkpoints.save(
                self.decoder, self.optimizer, others, values, step=step, round=round, events_bytes=size_bytes
            )
            if self.exchange is not None:
                # A checkpoint of several ranks is one once each has stored its part.
                self._ranks.maxima([0.0])
                self.exchange.safe_round = round

    def _resume(self, checkpoints: Checkpointing) -> None:
        """Take up what `_store` stored."""
        others, values = checkpoints.restore(self.decoder, self.optimizer)
        self._first_step, self._next_round = checkpoints.step + 1, checkpoints.round
        self._steps_taken = values["steps_taken"]
        kept = [name for name in others if name.startswith("exchange|")]
        state = {name.removeprefix("exchange|"): others.pop(name) for name in kept}
        if self.exchange is not None:
            self.exchange.restore(state)
        self.clock = Clock(values["clock_s"], values["wall_s"])
        self._since_log = _SinceLog(started=time.perf_counter() - values["log_s"])
        if others:
            columns = [others[f"log|{name}"].to(self._device).unbind() for name in StepMetrics._fields]
            self._since_log.metrics = [StepMetrics(*row) for row in zip(*columns, strict=True)]
            self._since_log.steps = len(self._since_log.metrics)
        self.events.write("resume", step=checkpoints.step)

    @contextmanager
    def _outside_training(self) -> Iterator[None]:
        """Keep the time of the block out of the training events' step time."""
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
        started = time.perf_counter()
        yield
        self._since_log.started += time.perf_counter() - started

    def _close(self) -> None:
        wall_time_s = self.clock.wall_s()
        self.events.write("memory", **self._memory())
        seconds = {f"{phase}_s": seconds for phase, seconds in self.clock.seconds.items()}
        self.events.write(
            "end",
            steps=self._steps_taken,
            tokens=self._steps_taken * self._tokens_per_step,
            wall_time_s=wall_time_s,
            **seconds,
        )

    def _memory(self) -> dict[str, int | None]:
        """Bytes of a process by purpose; of the rank that has most of each, where a node has several."""
        bytes_by_part = {
            "weights_bytes": footprint.weights_bytes(self.decoder),
            "gradients_bytes": footprint.gradients_bytes(self.decoder),
            "moments_bytes": footprint.moments_bytes(self.optimizer),
            "activations_bytes": self._saved.nbytes,
            "sync_buffers_bytes": self.exchange.buffer_bytes if self.exchange else 0,
            "rss_peak_bytes": rss_peak_bytes(),
            "cuda_peak_bytes": footprint.cuda_peak_bytes() or 0,
        }
        largest = self._ranks.maxima(list(bytes_by_part.values()))
        found: dict[str, int | None] = {name: int(size) for name, size in zip(bytes_by_part, largest, strict=True)}
        return found if self._device.type == "cuda" else found | {"cuda_peak_bytes": None}


_SCALARS = ("cross_entropy", "grad_norm", "z_loss", "balance_loss", "router_z_loss")


def _validation_fields(by_domain: dict[str, list[float]]) -> dict[str, Any]:
    """The fields of an event for the values of `ValidationSums`: their sums, and each domain's where it has a name."""

    def fields(values: Sequence[float]) -> dict[str, float]:
        return {"loss_sum_nats": values[0], "target_tokens": int(values[1]), "target_bytes": int(values[2])}

    totals = fields([sum(column) for column in zip(*by_domain.values(), strict=True)] or [0.0, 0, 0])
    domains = {name: fields(values) for name, values in by_domain.items() if name}
    return totals | ({"domains": domains} if domains else {})


def _mean(values: list[Tensor]) -> float:
    return float(torch.stack(values).double().mean())
