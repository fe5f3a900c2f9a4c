"""Pruning within a run: a point behind the median of the others is stopped at a validation, once and for good."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from spes_core.schedules import validation_steps
from tests.unit.test_search import SearchEngine, cache, corpus, engine, searched, stored, study_file
from workbench import campaign
from workbench.spec import read_study
from workbench.stopping import Rule, StopRequest
from workbench.study import main
from workbench.trials import Trial

__all__ = ["cache", "corpus", "engine", "study_file"]

OVERRIDES = [
    "search.pruner=median", "search.objective=eval/loss", "search.constraints=[]", "search.n_trials=8",
    "run.validation.interval_tokens=8192", "search.space.sync.interval_steps=[1,2,4,8,10,16,20,32]",
]  # fmt: skip
DEATH = KeyboardInterrupt


class Trains:
    """A run validates as often as it would, and hands its losses to the rules of the controller."""

    def __init__(self, engine: SearchEngine) -> None:
        self.engine = engine
        self.whole = engine.run_trial
        self.pruned: list[str] = []
        self.die_in: int | None = None
        """The run that the controller dies in, after its first validation; from 1."""
        self.die_before_telling = False

    def run_trial(
        self,
        trial: Trial,
        trial_dir: Path,
        settings: Any,
        launcher: Any,
        on_progress: Any,
        stop_request: StopRequest,
        rules: Sequence[Rule],
    ) -> dict[str, Any]:
        result = self.whole(trial, trial_dir, settings, launcher, on_progress, stop_request, rules)
        steps = validation_steps(trial.config)
        assert len(steps) >= 3
        for step in steps:
            sums = {"loss_sum_nats": 10 * self.loss(trial, step), "target_tokens": 10}
            shares = [(f"node-{node}", {"kind": "validation", "step": step, **sums}) for node in (0, 1)]
            for verdict in filter(None, (rule.see(shares) for rule in rules)):
                self.pruned.append(trial.name.rpartition("-")[0])
                result |= {"status": verdict.status, "error": {"message": verdict.message}}
                (trial_dir / "result.json").write_text(json.dumps(result))
                if self.die_before_telling:
                    raise DEATH
                return result
            if self.die_in == len(self.engine.ran):
                (trial_dir / "result.json").unlink()
                raise DEATH
        return result

    def loss(self, trial: Trial, step: int) -> float:
        """Falls with the steps, and ends where the engine says."""
        return self.engine.loss(trial) + 0.01 * (trial.config.total_steps - step)


@pytest.fixture
def trains(engine: SearchEngine, monkeypatch: pytest.MonkeyPatch) -> Trains:
    trains = Trains(engine)
    monkeypatch.setattr(campaign, "run_trial", trains.run_trial)
    return trains


def test_a_run_behind_the_median_is_stopped_and_its_seeds_are_spared(
    study_file: Path, engine: SearchEngine, trains: Trains, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["probe.yaml", *OVERRIDES]) == 0
    points = [point for point in stored()["points"] if point["state"] == "pruned"]
    assert points
    assert len(trains.pruned) == len(points)
    assert all(name.endswith("seed=0") for name in trains.pruned)
    assert {len(point["trials"]) for point in points} == {1}
    assert all(point["reason"].startswith("pruned at step ") for point in points)
    assert len(searched(engine)) == 2 * 8 - len(points)
    assert points_of("pruned") and min(points_of("pruned")) > min(points_of("done"))
    assert "pruned: pruned at step" in capsys.readouterr().out
    before, ran = stored(), len(engine.ran)
    assert main(["probe.yaml", *OVERRIDES, "--retry-failed"]) == 0
    assert (stored(), len(engine.ran)) == (before, ran)


def points_of(state: str) -> list[int]:
    return [point["axes"]["sync.interval_steps"] for point in stored()["points"] if point["state"] == state]


@pytest.mark.parametrize("when", ["within a run", "before it is told"])
def test_a_search_that_died_continues_to_the_same_points_and_prunes_the_same(
    study_file: Path, engine: SearchEngine, trains: Trains, when: str
) -> None:
    main(["probe.yaml", *OVERRIDES, "--results", "whole"])
    whole = json.loads(Path("whole/probe/search/search.json").read_text())
    ran, pruned = list(engine.ran), list(trains.pruned)
    engine.ran.clear()
    trains.pruned.clear()
    trains.die_before_telling = when == "before it is told"
    trains.die_in = None if trains.die_before_telling else ran.index(pruned[0]) + 1
    assert main(["probe.yaml", *OVERRIDES]) == 130
    stopped = len(engine.ran)
    trains.die_before_telling, trains.die_in = False, None
    assert main(["probe.yaml", *OVERRIDES]) == 0
    assert stored() == whole
    assert trains.pruned == pruned
    repeated = [] if when == "before it is told" else [engine.ran[stopped - 1]]
    assert engine.ran == ran[:stopped] + repeated + ran[stopped:]


def test_one_seed_is_enough_where_runs_are_stopped_and_runs_of_other_objectives_are_not(study_file: Path) -> None:
    def prunes(*overrides: str) -> bool | str:
        study = read_study(study_file, [*OVERRIDES, *overrides])
        assert study.search is not None
        return study.mistakes[0] if study.mistakes else study.search.prunes_runs

    assert prunes("seeds=[0]", "search.confirm.seeds=[]") is True
    assert prunes("search.objective=comm/uplink_gb") is False
    assert prunes("search.objective={metric: eval/loss, goal: maximize}") is False
    assert "(median) stops a point between two seeds" in str(prunes("seeds=[0]", "search.objective=comm/uplink_gb"))


def test_only_other_arms_run_where_only_they_are_named(study_file: Path, engine: SearchEngine) -> None:
    assert main(["probe.yaml", "--only", "centralized"]) == 0
    assert engine.ran == ["centralized-seed=0", "centralized-seed=1"]
    assert not Path("results/probe/search/journal.log").exists()
