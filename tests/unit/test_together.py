"""Trials at the same time: as many as there is room for, none left behind, the same results in whatever order."""

from __future__ import annotations

import threading
from contextlib import closing
from typing import Any

import pytest

from spes_core.config import RunConfig
from workbench.budget import Budget, Need, Slot
from workbench.stopping import StopRequest
from workbench.store import Stored
from workbench.together import Crew
from workbench.trials import Trial

DONE = Stored(status="done", result={})
PATIENCE_S = 30


def trials(*names: str) -> list[Trial]:
    common: dict[str, Any] = {"study": "s", "arm": "a", "role": "treatment", "axes": {}, "seed": 0}
    return [Trial(id=name, name=name, config=RunConfig(), **common) for name in names]


class Room:
    """A crew whose trials wait until they are let go; remembers who ran with whom."""

    def __init__(self, cores: dict[str, int], most: int | None = None, gpus: int = 0) -> None:
        names = tuple(map(str, range(gpus)))
        budget = Budget(cores=4, memory_bytes=1, gpus=names, divides_gpus=True)
        self.request = StopRequest()
        self.cores, self.gpus = cores, gpus
        self.asked: list[str] = []
        self.begun: list[str] = []
        self.slots: dict[str, Slot] = {}
        self.gates = {name: threading.Event() for name in cores}
        self.is_stopped: list[str] = []
        self.changed = threading.Condition()
        self.crew = Crew(
            self.run,
            self.need,
            budget,
            most,
            self.request,
        )
        self.results: list[tuple[str, Stored]] = []
        self.thread = threading.Thread(target=self.follow, args=(trials(*cores),))
        self.thread.start()

    def need(self, trial: Trial) -> Need:
        self.asked.append(trial.name)
        return Need(cores=self.cores[trial.name], memory_bytes=0, gpus=min(1, self.gpus))

    def run(self, trial: Trial, slot: Slot) -> Stored:
        with self.changed:
            self.slots[trial.name] = slot
            self.changed.notify_all()
        while not self.gates[trial.name].wait(0.01):
            if self.request.made:
                self.is_stopped.append(trial.name)
                return Stored(status="interrupted", result={})
        if trial.name.startswith("bad"):
            raise OSError("no space left")
        return DONE

    def follow(self, given: list[Trial]) -> None:
        try:
            with closing(self.crew.carry_out(given, lambda trial: self.begun.append(trial.name))) as ends:
                for trial, stored in ends:
                    with self.changed:
                        self.results.append((trial.name, stored))
                        self.changed.notify_all()
        except OSError as error:
            self.results.append((str(error), DONE))

    def await_running(self, *names: str) -> None:
        def running() -> set[str]:
            return set(self.slots) - {name for name, _ in self.results}

        with self.changed:
            assert self.changed.wait_for(lambda: running() == set(names), PATIENCE_S), running()

    def end(self, name: str) -> None:
        self.gates[name].set()

    def finish(self) -> list[str]:
        self.thread.join(PATIENCE_S)
        assert not self.thread.is_alive()
        return [name for name, _ in self.results]


def test_as_many_run_as_fit_and_a_smaller_one_goes_before_one_that_must_wait() -> None:
    room = Room({"a": 2, "big": 4, "b": 1, "c": 1, "d": 1})
    room.await_running("a", "b", "c")
    room.end("b")
    room.await_running("a", "c", "d")
    for name in ("a", "c", "d"):
        room.end(name)
    room.await_running("big")
    room.end("big")
    assert sorted(room.finish()) == ["a", "b", "big", "c", "d"]
    assert room.begun == ["a", "b", "c", "d", "big"]
    assert sorted(room.asked) == ["a", "b", "big", "c", "d"], "what a trial needs is found out once"


def test_no_more_run_than_were_asked_for_and_none_shares_a_gpu() -> None:
    room = Room({"a": 1, "b": 1, "c": 1}, most=2, gpus=2)
    room.await_running("a", "b")
    assert {room.slots["a"].gpus, room.slots["b"].gpus} == {("0",), ("1",)}
    room.end("a")
    room.await_running("b", "c")
    assert room.slots["c"].gpus == room.slots["a"].gpus
    room.end("b")
    room.end("c")
    room.finish()


def test_a_stop_starts_nothing_more_and_waits_for_what_runs() -> None:
    room = Room({"a": 2, "b": 2, "c": 2})
    room.await_running("a", "b")
    room.request.signal = 15
    assert sorted(room.finish()) == ["a", "b"]
    assert {stored.status for _, stored in room.results} == {"interrupted"}
    assert room.begun == ["a", "b"]


@pytest.mark.parametrize("others", [1, 3])
def test_an_exception_in_one_trial_stops_the_others_before_it_is_raised(others: int) -> None:
    room = Room({"bad": 1} | {f"o{number}": 1 for number in range(others)})
    room.await_running("bad", *(f"o{number}" for number in range(others)))
    room.end("bad")
    assert room.finish() == ["no space left"]
    assert len(room.is_stopped) == others
