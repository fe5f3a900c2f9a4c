"""Running several trials at the same time: each in a thread of its own, as many as the budget has room for."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Generator, Sequence

from workbench.budget import Budget, Need, Slot
from workbench.stopping import StopRequest
from workbench.store import Stored
from workbench.trials import Trial

Ends = Generator[tuple[Trial, Stored], None, None]
"""Trials as they end."""


STUDY_ENDED = "the study ended"
"""Why trials stop whose study could not go on."""


class Crew:
    """Carries trials out; `most` of them at the same time, or as many as the budget has room for."""

    def __init__(
        self,
        run: Callable[[Trial, Slot], Stored],
        need: Callable[[Trial], Need],
        budget: Budget,
        most: int | None,
        stop_request: StopRequest,
    ) -> None:
        """``run`` is called in a thread for each trial and ends early when a stop is requested."""
        self._run, self._need, self._budget, self._stop_request = run, need, budget, stop_request
        self._most = most
        self._needs: dict[str, Need] = {}
        """By trial id: predicting one's memory takes longer than looking for room."""
        self._ended: queue.SimpleQueue[tuple[Trial, Slot, Stored | BaseException]] = queue.SimpleQueue()
        self._threads: dict[str, threading.Thread] = {}

    def carry_out(self, trials: Sequence[Trial], on_start: Callable[[Trial], None]) -> Ends:
        """Run the trials, each begun in order as soon as there is room, a smaller one before a larger that must wait.

        Yields each when it has ended. Ends early when a stop is requested, and leaves no trial running even when an
        exception comes; one that ``run`` raised is raised here.
        """
        waiting = list(trials)
        try:
            while True:
                while not self._stop_request.made and (chosen := self._next(waiting)) is not None:
                    trial, slot = chosen
                    waiting.remove(trial)
                    on_start(trial)
                    self._start(trial, slot)
                if not self._threads:
                    return
                yield self._await_one()
        finally:
            if self._threads:
                self._stop_request.reason = self._stop_request.reason or STUDY_ENDED
                for thread in self._threads.values():
                    thread.join()

    def _next(self, waiting: Sequence[Trial]) -> tuple[Trial, Slot] | None:
        """The first trial that there is room for."""
        if self._most is not None and len(self._threads) >= self._most:
            return None
        for trial in waiting:
            if trial.id not in self._needs:
                self._needs[trial.id] = self._need(trial)
            if (slot := self._budget.take(self._needs[trial.id])) is not None:
                return trial, slot
        return None

    def _start(self, trial: Trial, slot: Slot) -> None:
        def work() -> None:
            try:
                outcome: Stored | BaseException = self._run(trial, slot)
            except BaseException as error:
                outcome = error
            self._ended.put((trial, slot, outcome))

        thread = threading.Thread(target=work, name=trial.name)
        self._threads[trial.id] = thread
        thread.start()

    def _await_one(self) -> tuple[Trial, Stored]:
        trial, slot, outcome = self._ended.get()
        self._threads.pop(trial.id).join()
        self._budget.give_back(slot)
        if isinstance(outcome, BaseException):
            raise outcome
        return trial, outcome
