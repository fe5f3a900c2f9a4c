"""Rules that end a trial by what it records: divergence, and validation losses that are judged hopeless."""

from __future__ import annotations

import os
import signal
from typing import Any

import pytest

from spes_core.config import DataConfig, RunConfig, ValidationConfig
from workbench.settings import Divergence
from workbench.stopping import DivergenceRule, PruningRule, StopRequest, stop_on_signals

Event = tuple[str, dict[str, Any]]


def train(process: str, step: int, loss: float | str) -> Event:
    return process, {"kind": "train", "step": step, "loss_nats": loss}


def losses(*values: float | str, process: str = "node-0") -> list[Event]:
    return [train(process, step, loss) for step, loss in enumerate(values, start=1)]


@pytest.mark.parametrize("loss", ["nan", "inf", float("nan")])
def test_a_loss_that_is_not_finite_has_diverged_whatever_the_settings(loss: float | str) -> None:
    verdict = DivergenceRule(Divergence()).see(losses(3.0, loss))
    assert verdict is not None
    assert (verdict.status, verdict.process) == ("diverged", "node-0")
    assert "by step 2" in verdict.message


@pytest.mark.parametrize(
    ("values", "step"),
    [
        ((4, 2, 4.1, 4.1, 4.1), 5),
        ((4, 2, 4.1, 4.1, 3.9, 4.1, 4.1), None),
        ((9, 8, 7, 9, 9, 9), None),
        ((4, 2, 4, 4, 4, 4), None),
    ],
)
def test_it_takes_as_many_points_in_a_row_above_the_lowest(values: tuple[float, ...], step: int | None) -> None:
    verdict = DivergenceRule(Divergence(factor=2.0, points=3)).see(losses(*values))
    assert (verdict is None) == (step is None)
    if verdict is not None:
        assert f"is 4.1 at step {step}, 3 points in a row above divergence.factor (2) times its" in verdict.message


def test_without_a_factor_no_height_is_too_high_and_other_nodes_do_not_count() -> None:
    assert DivergenceRule(Divergence()).see(losses(1, *[99] * 9)) is None
    rule = DivergenceRule(Divergence(factor=2.0, points=2))
    assert rule.see([train("node-0", 1, 1.0), train("node-1", 1, 9.0), train("node-0", 2, 9.0)]) is None
    assert rule.see([train("node-1", 2, 9.0)]) is None
    assert rule.see([train("node-0", 3, 9.0)]) is not None


def test_the_verdict_does_not_depend_on_how_events_were_dealt_out() -> None:
    events = losses(4, 2, 5, 5, 5, 1)
    whole = DivergenceRule(Divergence(factor=2.0)).see(events)
    rule = DivergenceRule(Divergence(factor=2.0))
    assert next(verdict for event in events if (verdict := rule.see([event])) is not None) == whole


def validation(process: str, step: int, loss_sum: float, tokens: int = 10) -> Event:
    return process, {"kind": "validation", "step": step, "loss_sum_nats": loss_sum, "target_tokens": tokens}


def pruned_run(nodes: int) -> RunConfig:
    """20 steps, with a place after every 5."""
    data = DataConfig(sequence_length=16, global_batch_sequences=8)
    return RunConfig(nodes=nodes, data=data, budget_tokens=20 * 128, validation=ValidationConfig(interval_tokens=640))


def test_pruning_sees_the_mean_over_all_nodes_and_not_the_last_step() -> None:
    seen: list[tuple[int, float]] = []

    def judge(place: int, loss: float) -> bool:
        seen.append((place, loss))
        return place == 2

    rule = PruningRule(pruned_run(2), judge)
    assert rule.see([validation("node-0", 5, 30.0, 10), validation("node-0", 10, 10.0, 10)]) is None
    assert rule.see([validation("node-1", 5, 10.0, 30), validation("node-0", 20, 1.0)]) is None
    assert rule.see([validation("node-1", 20, 1.0)]) is None
    verdict = rule.see([validation("node-1", 10, 20.0, 10)])
    assert seen == [(1, 1.0), (2, 1.5)]
    assert verdict is not None and verdict.status == "pruned"
    assert verdict.message == "pruned at step 10 of 20: its validation loss 1.5000 is behind"


@pytest.mark.parametrize(
    ("steps", "told"),
    [((5, 10, 15), [1, 2, 3]), ((6, 12, 18), [2, 3]), ((7, 14), [2]), ((8, 16), [2, 3]), ((11,), [])],
)
def test_runs_that_validate_at_other_steps_are_compared_at_the_same_places(
    steps: tuple[int, ...], told: list[int]
) -> None:
    seen: dict[int, float] = {}
    rule = PruningRule(pruned_run(1), lambda place, loss: bool(seen.update({place: loss})))
    rule.see([validation("node-0", step, 10 * (50 - step)) for step in steps])
    assert seen == {place: pytest.approx(50 - 5 * place) for place in told}


def test_a_request_says_who_made_it() -> None:
    request = StopRequest()
    assert not request.made
    request.reason = "another trial failed"
    assert (request.made, request.words) == (True, "stopped: another trial failed")
    request.signal = 2
    assert request.words == "stopped by SIGINT"


@pytest.mark.parametrize("ignored", [True, False])
def test_a_terminal_that_closes_stops_a_study_but_not_one_under_nohup(ignored: bool) -> None:
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN if ignored else signal.SIG_DFL)
    try:
        with stop_on_signals() as request:
            os.kill(os.getpid(), signal.SIGHUP)
            assert request.made is not ignored
        assert signal.getsignal(signal.SIGHUP) is (signal.SIG_IGN if ignored else signal.SIG_DFL)
    finally:
        signal.signal(signal.SIGHUP, before)
