"""Why a trial is ended before its last step: a request of the user or the study, or a rule that sees its events."""

from __future__ import annotations

import math
import signal
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Literal, Protocol

from spes_core.config import RunConfig
from spes_core.events import as_float
from workbench.settings import Divergence

Events = Sequence[tuple[str, dict[str, Any]]]
"""Events, oldest first in each process, with the name of the process that wrote each."""


class StopRequest:
    """Whether trials are to stop: set by signal handlers, or by the study itself; read by whoever waits."""

    def __init__(self) -> None:
        self.signal: int | None = None
        self.reason: str | None = None
        """Why the study stops of its own accord."""

    @property
    def made(self) -> bool:
        """Whether a stop was asked for."""
        return self.signal is not None or self.reason is not None

    @property
    def words(self) -> str:
        """What a trial that is stopped says of it."""
        return (
            f"stopped by {signal.Signals(self.signal).name}" if self.signal is not None else f"stopped: {self.reason}"
        )


@contextmanager
def stop_on_signals(request: StopRequest | None = None) -> Iterator[StopRequest]:
    """Turn Ctrl-C, SIGTERM and SIGHUP into a request (the given one), so that nothing is interrupted half-way.

    A SIGHUP that is ignored (nohup) stays ignored. In another than the main thread, where Python allows no handlers,
    the request is never made.
    """
    request = StopRequest() if request is None else request
    numbers = [signal.SIGINT, signal.SIGTERM]
    if signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN:
        numbers.append(signal.SIGHUP)
    if threading.current_thread() is not threading.main_thread():
        yield request
        return
    before = {number: signal.signal(number, lambda got, _: setattr(request, "signal", got)) for number in numbers}
    try:
        yield request
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


@dataclass(frozen=True, kw_only=True)
class Verdict:
    """The end of a trial by a rule."""

    status: Literal["diverged", "pruned"]
    message: str
    """One sentence."""
    process: str | None = None
    """Name of the process whose events decided it."""


class Rule(Protocol):
    """Decides from a trial's events alone, so that it decides the same however often they are looked at."""

    def see(self, events: Events) -> Verdict | None:
        """Take in new events; the verdict once there is one."""


class DivergenceRule:
    """Ends a trial whose training loss is not finite, or stays above a factor times its lowest on one node."""

    def __init__(self, settings: Divergence) -> None:
        self._settings = settings
        self._lowest: dict[str, float] = {}
        self._high: dict[str, int] = {}
        """Points in a row that were too high."""

    def see(self, events: Events) -> Verdict | None:
        """See `Rule`."""
        for process, event in events:
            if event["kind"] == "train" and (message := self._wrong(process, event)) is not None:
                return Verdict(status="diverged", message=f"{message}; lower optim.lr", process=process)
        return None

    def _wrong(self, process: str, event: dict[str, Any]) -> str | None:
        loss, step = as_float(event["loss_nats"]), event["step"]
        if not math.isfinite(loss):
            return f"the training loss of {process} is {loss} by step {step}: the run has diverged"
        factor, points = self._settings.factor, self._settings.points
        lowest = self._lowest[process] = min(loss, self._lowest.get(process, loss))
        is_high = factor is not None and loss > factor * lowest
        self._high[process] = self._high.get(process, 0) + 1 if is_high else 0
        if self._high[process] < points:
            return None
        return (
            f"the training loss of {process} is {loss:.4g} at step {step}, {points} points in a row above"
            f" divergence.factor ({factor:g}) times its lowest ({lowest:.4g}): the run has diverged"
        )


class PruningRule:
    """Ends a trial when its validation losses so far, told one by one, are judged hopeless.

    ``is_hopeless`` gets a place k (from 1) and the loss after k × validation.interval_tokens. A run validates after the
    first round behind such a place, so its loss there is interpolated between the validations around it: otherwise runs
    with long rounds would look better for being looked at later. What is known at the last step only is not told, as
    nothing is left to save then.
    """

    def __init__(self, config: RunConfig, is_hopeless: Callable[[int, float], bool]) -> None:
        self._config, self._is_hopeless = config, is_hopeless
        self._shares: dict[int, dict[str, tuple[float, float]]] = {}
        """By step and process: (sum of losses, tokens)."""
        self._former: tuple[int, float] | None = None
        """Step and loss of the newest validation that all took part in."""

    def see(self, events: Events) -> Verdict | None:
        """See `Rule`."""
        config = self._config
        for process, event in events:
            step = event.get("step", 0)
            if event["kind"] != "validation" or step == config.total_steps:
                continue
            shares = self._shares.setdefault(step, {})
            shares[process] = (as_float(event["loss_sum_nats"]), event["target_tokens"])
            tokens = sum(share[1] for share in shares.values())
            if len(shares) < config.num_recorders or not tokens:
                continue
            loss = sum(share[0] for share in shares.values()) / tokens
            told = [self._is_hopeless(place, value) for place, value in self._places(step, loss)]
            self._former = (step, loss)
            if any(told):
                message = f"pruned at step {step} of {config.total_steps}: its validation loss {loss:.4f} is behind"
                return Verdict(status="pruned", message=message)
        return None

    def _places(self, step: int, loss: float) -> Iterator[tuple[int, float]]:
        """The places since the former validation, with the loss there; none before the first validation."""
        interval, per_step = self._config.validation.interval_tokens, self._config.tokens_per_step
        former_step, former_loss = self._former or (step - 1, math.nan)
        for place in range(former_step * per_step // interval + 1, step * per_step // interval + 1):
            behind = (step - place * interval / per_step) / (step - former_step)
            value = loss if behind == 0 else loss + behind * (former_loss - loss)
            if not math.isnan(value):
                yield place, value
