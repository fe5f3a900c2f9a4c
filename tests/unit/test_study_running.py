"""How a study is run: chosen by --only, ended by --fail-fast, together under a budget, with the same results."""

from __future__ import annotations

import json
import threading
import time
from pathlib import Path
from typing import Any

import pytest

from tests.unit.test_study_cli import ALL, Engine, cache, corpus, engine, study_file
from workbench import budget, campaign
from workbench.errors import TrialBusy
from workbench.selection import is_selected, select
from workbench.spec import read_study
from workbench.study import main
from workbench.trials import Trial, Variant, expand

__all__ = ["cache", "corpus", "engine", "study_file"]

VARIANTS: list[Variant] = []
TOGETHER = ["resources.parallel_trials=auto", "resources.cpus=4"]


# --- --only ---


@pytest.mark.parametrize(
    ("patterns", "expected"),
    [
        ([], ALL),
        (["spes"], ALL[2:]),
        (["sync.interval_steps=10"], [ALL[1], ALL[3]]),
        (["interval_steps=5"], [ALL[0], ALL[2]]),
        ([ALL[1]], [ALL[1]]),
        ([f"{ALL[1]}-0123abcd"], [ALL[1]]),
        (["*=10-seed=0", "dilico"], [ALL[0], ALL[1], ALL[3]]),
        (["seed=0"], ALL),
    ],
)
def test_a_pattern_is_a_name_an_arm_or_a_value_on_an_axis(
    study_file: Path, patterns: list[str], expected: list[str]
) -> None:
    variants = VARIANTS or VARIANTS.extend(expand(read_study(study_file))) or VARIANTS
    trials = [
        Trial(
            id="0", name=f"{one.label}-0123abcd", study="s", arm=one.arm.name, role="treatment", axes=one.axes,
            seed=one.seed, config=one.config,
        )
        for one in variants
    ]  # fmt: skip
    select(patterns, variants)
    assert [one.label for one in variants if is_selected(patterns, one)] == expected
    assert [trial.name[:-9] for trial in trials if is_selected(patterns, trial)] == expected


def test_only_runs_what_the_patterns_name_and_the_study_stays_whole(study_file: Path, engine: Engine) -> None:
    assert main(["probe.yaml", "--only", "spes", "--only", ALL[1]]) == 0
    assert engine.ran == ALL[1:]
    assert len(json.loads(Path("results/probe/study.json").read_text())["trials"]) == len(ALL)
    engine.ran.clear()
    assert main(["probe.yaml"]) == 0
    assert engine.ran == ALL[:1]


def test_only_what_does_not_exist_exits_2_with_the_nearest_name_and_creates_nothing(
    study_file: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["probe.yaml", "--only", "interval_step=10", "--only", "spes", "--only", "dilco"]) == 2
    assert capsys.readouterr().err.splitlines() == [
        'error: --only: (interval_step=10) names no trial, arm or axis=value of this study; did you mean "interval_ste'
        'ps=10"?',
        'error: --only: (dilco) names no trial, arm or axis=value of this study; did you mean "dilico"?',
    ]
    assert [path.name for path in study_file.parent.iterdir()] == ["probe.yaml"]


def test_only_retries_no_other_trial_and_plans_no_other(
    study_file: Path, engine: Engine, capsys: pytest.CaptureFixture[str]
) -> None:
    engine.statuses = dict.fromkeys(ALL, "oom")
    assert main(["probe.yaml", "resources.retries=2"]) == 1
    assert engine.ran == ALL, "what ran out of memory is not tried again by itself"
    engine.ran.clear()
    engine.statuses = {}
    assert main(["probe.yaml", "--only", "spes", "--retry-failed"]) == 0
    assert engine.ran == ALL[2:]
    capsys.readouterr()
    assert main(["probe.yaml", "--only", "dilico", "--dry-run"]) == 0
    shown = capsys.readouterr().out
    assert [name for name in ALL if name in shown] == ALL[:2]


# --- --fail-fast ---


def test_fail_fast_stops_at_the_first_failure_and_still_reports(study_file: Path, engine: Engine) -> None:
    engine.statuses = {ALL[1]: "diverged"}
    assert main(["probe.yaml", "--fail-fast"]) == 1
    assert engine.ran == ALL[:2]
    assert engine.reports == 1
    assert main(["probe.yaml", "--fail-fast"]) == 1, "the failed one stays so"
    assert engine.ran == ALL


def test_fail_fast_stops_what_runs_beside_it(study_file: Path, engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    both = threading.Barrier(2)
    answer = engine.run_trial

    def run_trial(trial: Trial, trial_dir: Path, settings: Any, launcher: Any, show: Any, stop: Any, rules: Any) -> Any:
        both.wait(30)
        if trial.name.startswith(ALL[1]):
            while not stop.made:
                time.sleep(0.01)
            engine.statuses[ALL[1]] = "interrupted"
            engine.errors[ALL[1]] = {"message": stop.words}
        return answer(trial, trial_dir, settings, launcher, show, stop, rules)

    monkeypatch.setattr(campaign, "run_trial", run_trial)
    engine.statuses = {ALL[0]: "failed"}
    arguments = ["probe.yaml", "--fail-fast", "resources.parallel_trials=2", "resources.cpus=4"]
    assert main(arguments) == 1
    assert set(engine.ran) == set(ALL[:2])
    results = [json.loads(path.read_text()) for path in Path("results/probe/trials").glob("*/result.json")]
    (stopped,) = (result for result in results if result["status"] == "interrupted")
    assert stopped["error"]["message"].endswith("is failed (--fail-fast)")


# --- Together ---


def test_order_of_results_and_ids_does_not_depend_on_who_ends_first(
    study_file: Path, engine: Engine, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    main(["probe.yaml"])
    study = Path("results/probe/study.json")
    before, table = json.loads(study.read_text())["trials"], capsys.readouterr().out.splitlines()[-6:]
    ends = {name: threading.Event() for name in ALL}
    answer, seen = engine.run_trial, threading.Barrier(2)

    def run_trial(trial: Trial, *rest: Any) -> Any:
        """Two at a time, of which the later one ends first."""
        place = next(place for place, name in enumerate(ALL) if trial.name.startswith(name))
        seen.wait(30)
        if place % 2 == 0:
            assert ends[ALL[place + 1]].wait(30)
        result = answer(trial, *rest)
        ends[ALL[place]].set()
        return result

    monkeypatch.setattr(campaign, "run_trial", run_trial)
    engine.ran.clear()
    assert main(["probe.yaml", "--results", "other", *TOGETHER]) == 0
    assert engine.ran == [ALL[1], ALL[0], ALL[3], ALL[2]]
    assert json.loads(Path("other/probe/study.json").read_text())["trials"] == before
    assert capsys.readouterr().out.splitlines()[-6:] == table


def test_a_trial_that_another_controller_ended_meanwhile_is_not_run_again(
    study_file: Path, engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    answer = engine.run_trial

    def run_trial(trial: Trial, *rest: Any) -> Any:
        if trial.name.startswith(ALL[0]):
            for path in Path("elsewhere/probe/trials").iterdir():  # all that the other controller did in this time
                if not path.name.startswith(ALL[0]):
                    target = Path("results/probe/trials") / path.name
                    target.mkdir(parents=True, exist_ok=True)
                    (target / "result.json").write_bytes((path / "result.json").read_bytes())
        return answer(trial, *rest)

    engine.statuses = {ALL[2]: "failed"}
    main(["probe.yaml", "--results", "elsewhere"])
    monkeypatch.setattr(campaign, "run_trial", run_trial)
    engine.ran.clear()
    assert main(["probe.yaml"]) == 1
    assert engine.ran == [ALL[0]]


def test_what_another_controller_runs_is_left_to_it_and_taken_when_it_has_ended(
    study_file: Path, engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    answer, busy = engine.run_trial, []

    def run_trial(trial: Trial, *rest: Any) -> Any:
        if trial.name.startswith(ALL[0]):
            busy.append((trial, *rest))
            raise TrialBusy("it is being run by another process")
        if trial.name.startswith(ALL[3]):
            answer(*busy[0])
        return answer(trial, *rest)

    monkeypatch.setattr(campaign, "run_trial", run_trial)
    assert main(["probe.yaml"]) == 0
    assert [name.rpartition("-")[0] for name in engine.mirrored] == ALL[1:]


def test_a_trial_pruned_by_a_search_that_is_no_more_is_run_whole(study_file: Path, engine: Engine) -> None:
    engine.statuses = {ALL[0]: "pruned"}
    assert main(["probe.yaml"]) == 0
    engine.statuses = {}
    engine.ran.clear()
    assert main(["probe.yaml"]) == 0
    assert engine.ran == [ALL[0]]


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["resources.cpus=1"], "resources.cpus (1) must be at least the 2 cores of dilico-interval_steps=5-seed=0"),
        (["resources.memory_gb=0.1"], "resources.memory_gb (0.1) must be at least the 4.1"),
        (["resources.parallel_trials=0"], "resources.parallel_trials (0) must be at least 1, or auto"),
        (["resources.parallel_trials=many"], "resources.parallel_trials ('many') must be a whole number or auto"),
        (["resources.gpus=3"], "resources.gpus (3) must not exceed the 2 GPUs that are visible here"),
        (["resources.gpus_per_trial=3"], "resources.gpus_per_trial (3) must not exceed the 2 GPUs of all trials"),
        (["resources.gpus_per_trial=1"], "resources.gpus_per_trial (1) must be 0 or at least the 2 processes of"),
        (["resources.parallel_trials=2", "launcher.port=5200"], "launcher.port (5200) must be 0 where trials run at"),
        (["divergence.factor=1"], "divergence.factor (1) must be above 1"),
    ],
)
def test_what_cannot_fit_is_one_clear_line_before_anything_is_created(
    study_file: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    overrides: list[str],
    message: str,
) -> None:
    monkeypatch.setattr(budget, "visible_gpus", lambda: ("0", "1"))
    assert main(["probe.yaml", *overrides]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith(f"error: override {overrides[-1]}: {message}")
    assert [path.name for path in study_file.parent.iterdir()] == ["probe.yaml"]


def test_memory_that_is_not_there_is_named_with_what_is_free(
    study_file: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(budget, "available_memory_bytes", lambda: 200_000_000)
    assert main(["probe.yaml"]) == 2
    assert "resources.memory_gb (null: 0.2 GB are free here) must be at least the 0." in capsys.readouterr().err
