"""A search through its command, on an engine that answers by formula: what runs, what repeats, what a stop leaves."""

from __future__ import annotations

import json
import math
import re
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import scipy.stats
from hypothesis import given
from hypothesis import strategies as st

from tests.unit.test_report import Page
from tests.unit.test_study_cli import Engine, NoLauncher, cache, corpus
from workbench import campaign
from workbench.points import Scored, front, winners
from workbench.progress import Progress
from workbench.search import Proposals
from workbench.searchspace import Objective
from workbench.spec import read_study
from workbench.stopping import Rule, StopRequest
from workbench.study import main
from workbench.trials import Trial, expand

__all__ = ["cache", "corpus"]

REAL_RENDER = campaign.render_report
STUDY = """\
schema: 1
name: probe
question: How few bytes?
defaults: [model/tiny, data/default]
run:
  nodes: 2
  budget_tokens: 40_960
  data: {corpus: CORPUS, tokenizer_vocab_size: 300, sequence_length: 16}
arms:
  centralized: {method: centralized, role: reference}
  spes: {method: spes}
search:
  n_trials: 6
  space: {sync.interval_steps: [1, 2, 4, 8, 16, 32, 64, 128]}
  objective: comm/uplink_gb
  constraints: [{metric: eval/loss, tolerance: 0.02}]
  confirm: {top: 1, seeds: [7, 8, 9]}
seeds: [0, 1]
"""


class SearchEngine(Engine):
    """Loss grows with H, bytes fall; each seed has its own level, the same in all arms."""

    def __init__(self) -> None:
        super().__init__()
        self.fails: Callable[[Trial], bool] = lambda trial: False
        self.loss: Callable[[Trial], float] = formula
        self.die_after: int | None = None

    def run_trial(
        self,
        trial: Trial,
        trial_dir: Path,
        settings: Any,
        launcher: Any,
        on_progress: Callable[[Progress], None],
        stop_request: StopRequest,
        rules: Sequence[Rule],
    ) -> dict[str, Any]:
        self.ran.append(trial.name.rpartition("-")[0])
        if self.die_after is not None and len(self.ran) > self.die_after:
            raise KeyboardInterrupt  # as abrupt as a kill for all that is outside this process' memory
        status = "failed" if self.fails(trial) else "done"
        if self.stop_after == len(self.ran):
            stop_request.signal, status = 2, "interrupted"
        metrics = {"eval/loss": self.loss(trial), "comm/uplink_gb": 1 / interval(trial), "mem/trained_state_gb": 0.1}
        result = {
            "trial": {"id": trial.id}, "status": status, "metrics": metrics if status == "done" else {},
            "error": None if status == "done" else {"message": "it broke", "log_tail": ["error: it broke"]},
            "provenance": settings.provenance,
        }  # fmt: skip
        trial_dir.mkdir(parents=True, exist_ok=True)
        (trial_dir / "result.json").write_text(json.dumps(result))
        return result


def interval(trial: Trial) -> int:
    return int(trial.axes.get("sync.interval_steps", 1))


def formula(trial: Trial) -> float:
    """0.4 % above the reference for each doubling of H: 32 is the largest H within 2 %."""
    return (3.0 + 0.1 * trial.seed) * (1 + 0.004 * math.log2(interval(trial)))


@pytest.fixture
def study_file(tmp_path: Path, corpus: Path, cache: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(cache))
    monkeypatch.chdir(tmp_path)
    path = tmp_path / "probe.yaml"
    path.write_text(STUDY.replace("CORPUS", str(corpus)))
    return path


@pytest.fixture
def engine(monkeypatch: pytest.MonkeyPatch) -> SearchEngine:
    engine = SearchEngine()

    class Mirror:
        def __init__(self, *_: object) -> None:
            pass

        def wait_ready(self, timeout_s: float) -> bool:
            return True

        def add(self, trial_dir: Path) -> None:
            engine.mirrored.append(trial_dir.name)

        def close(self, timeout_s: float = 0) -> None:
            engine.caught_up += 1

    monkeypatch.setattr(campaign, "run_trial", engine.run_trial)
    monkeypatch.setattr(campaign, "open_launcher", NoLauncher)
    monkeypatch.setattr(campaign, "collect", lambda: {"code_digest": "c0de" * 16})
    monkeypatch.setattr(campaign, "Mirror", Mirror)
    monkeypatch.setattr(campaign, "render_report", engine.render_report)
    return engine


def stored() -> dict[str, Any]:
    return dict(json.loads(Path("results/probe/search/search.json").read_text()))


def points() -> list[int]:
    return [point["axes"]["sync.interval_steps"] for point in stored()["points"]]


def searched(engine: Engine) -> list[str]:
    """What ran of the searched arm with the seeds of the search."""
    return [name for name in engine.ran if name.startswith("spes") and name.endswith(("seed=0", "seed=1"))]


# --- A whole search ---


def test_search_runs_the_reference_then_as_many_points_as_asked_for_then_confirms(
    study_file: Path, engine: SearchEngine, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["probe.yaml"]) == 0
    assert engine.ran[:2] == ["centralized-seed=0", "centralized-seed=1"]
    assert len(searched(engine)) == 12
    assert len(set(points())) == len(points()) == 6
    best = max(point for point in points() if point <= 32)
    fresh = [f"{arm}-seed={seed}" for arm in ("centralized", f"spes-interval_steps={best}") for seed in (7, 8, 9)]
    assert engine.ran[14:] == fresh
    assert len(engine.ran) == len(set(engine.ran)) == len(engine.mirrored)
    study = json.loads(Path("results/probe/study.json").read_text())
    assert {trial["name"].rpartition("-")[0] for trial in study["trials"]} == set(engine.ran)
    assert "at most 20 trials to run" in capsys.readouterr().out


def test_finished_search_runs_nothing_again_and_writes_no_report(study_file: Path, engine: SearchEngine) -> None:
    main(["probe.yaml"])
    before, ran = stored(), len(engine.ran)
    assert main(["probe.yaml"]) == 0
    assert (stored(), len(engine.ran), engine.reports) == (before, ran, 1)


def test_a_repeated_point_costs_nothing_and_does_not_count(study_file: Path, engine: SearchEngine) -> None:
    assert main(["probe.yaml", "search.n_trials=40"]) == 0
    assert sorted(points()) == [1, 2, 4, 8, 16, 32, 64, 128]
    assert len(searched(engine)) == 16
    assert sum(point["repeats"] for point in stored()["points"]) > 0


# --- Stops ---


@pytest.mark.parametrize(("how", "after"), [("stop", 4), ("stop", 16), ("die", 1), ("die", 5)])
def test_a_stopped_search_continues_to_the_same_points_and_repeats_nothing(
    study_file: Path, engine: SearchEngine, how: str, after: int
) -> None:
    main(["probe.yaml", "--results", "whole"])
    whole = json.loads(Path("whole/probe/search/search.json").read_text())
    engine.ran.clear()
    engine.stop_after, engine.die_after = (after, None) if how == "stop" else (None, after)
    assert main(["probe.yaml"]) == 130
    stopped = len(engine.ran)
    engine.stop_after = engine.die_after = None
    assert main(["probe.yaml"]) == 0
    assert stored() == whole
    assert engine.ran[stopped - 1] == engine.ran[stopped]
    assert len(engine.ran) == len(set(engine.ran)) + 1


def test_kill_while_a_proposal_is_drawn_or_written_loses_no_point(study_file: Path, tmp_path: Path) -> None:
    search = read_study(study_file).search
    assert search is not None
    journal = tmp_path / "journal.log"

    def points_after(told: int) -> list[int]:
        """Continue until so many points are told; what a killed process left open is told first."""
        proposals = Proposals(journal, "form", search)
        for proposal in proposals.history():
            if proposal.state == "open":
                proposals.tell(proposal, [1 / proposal.params["sync.interval_steps"]], {"c": 0.0})
        while len(proposals.history()) < told:
            proposal = proposals.ask()
            proposals.tell(proposal, [1 / proposal.params["sync.interval_steps"]], {"c": 0.0})
        return [proposal.params["sync.interval_steps"] for proposal in proposals.history()]

    whole = points_after(8)
    lines = journal.read_text().splitlines(keepends=True)
    for kept in range(len(lines)):  # every moment of the journal, each with half of the next line
        journal.write_text("".join(lines[:kept]) + lines[kept][: len(lines[kept]) // 2])
        assert points_after(8) == whole, kept


def test_two_controllers_of_one_search_do_not_meet(
    study_file: Path, engine: SearchEngine, capsys: pytest.CaptureFixture[str]
) -> None:
    main(["probe.yaml"])
    code = "import fcntl, sys; f = open('results/probe/search/lock'); fcntl.flock(f, 2); print(flush=True); input()"
    with subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as other:
        assert other.stdout is not None
        other.stdout.readline()
        assert main(["probe.yaml"]) == 1
        other.communicate(b"\n")
    assert "is being searched by another process" in capsys.readouterr().err
    assert main(["probe.yaml"]) == 0


# --- Edits ---


def test_more_points_continue_where_the_search_ended(study_file: Path, engine: SearchEngine) -> None:
    main(["probe.yaml", "search.n_trials=3"])
    first = points()
    main(["probe.yaml"])
    assert points()[:3] == first
    assert len(points()) == 6
    assert len(searched(engine)) == len(set(searched(engine))) == 12


def test_an_edited_space_keeps_the_points_that_lie_in_it(
    study_file: Path, engine: SearchEngine, capsys: pytest.CaptureFixture[str]
) -> None:
    main(["probe.yaml"])
    kept = [point for point in points() if point >= 8]
    engine.ran.clear()
    edited = ["probe.yaml", "search.space.sync.interval_steps=[8,16,32,64,128,256]"]
    assert main(edited) == 0
    assert f"the search was edited: {len(kept)} of 6 earlier points still count" in capsys.readouterr().out
    assert points()[: len(kept)] == kept
    assert sorted(points()) == [8, 16, 32, 64, 128, 256]
    assert len(searched(engine)) == 2 * (6 - len(kept))
    ran = len(engine.ran)
    main(["probe.yaml"])  # back again: what the edited search found of this space counts here too
    assert len(points()) >= 6
    assert not [name for name in engine.ran[ran:] if name.endswith(("seed=0", "seed=1"))]


def test_a_list_may_become_a_range(study_file: Path, engine: SearchEngine) -> None:
    main(["probe.yaml"])
    space = "  space: {sync.interval_steps: {low: 4, high: 128, log: true}}\n"
    lines = study_file.read_text().splitlines(keepends=True)
    study_file.write_text("".join(space if "space:" in line else line for line in lines))
    kept = {point for point in points() if point >= 4}
    assert main(["probe.yaml"]) == 0
    assert kept <= set(points())
    assert len(points()) == 6


def test_another_constraint_is_judged_by_the_stored_results(study_file: Path, engine: SearchEngine) -> None:
    main(["probe.yaml"])
    ran = searched(engine)
    assert main(["probe.yaml", "search.constraints=[{metric: eval/loss, tolerance: 0.005}]"]) == 0
    assert searched(engine) == ran
    (winner,) = stored()["winners"]
    best = next(point for point in stored()["points"] if point["number"] == winner)
    assert best["axes"]["sync.interval_steps"] == max(point for point in points() if point <= 2)


# --- Failures ---


def test_a_failed_point_counts_and_is_made_again_when_asked_for(study_file: Path, engine: SearchEngine) -> None:
    engine.fails = lambda trial: interval(trial) >= 16 and trial.arm == "spes"
    assert main(["probe.yaml"]) == 1
    failed = [point for point in stored()["points"] if point["state"] == "failed"]
    assert failed
    assert "failed" in failed[0]["reason"]
    assert len(points()) == 6
    ran = len(engine.ran)
    assert main(["probe.yaml"]) == 1
    assert len(engine.ran) == ran
    engine.fails = lambda trial: False
    assert main(["probe.yaml", "--retry-failed"]) == 0
    assert {point["state"] for point in stored()["points"]} == {"done"}
    before = stored()
    assert main(["probe.yaml"]) == 0
    assert stored() == before


def test_a_search_waits_for_a_reference_that_failed(
    study_file: Path, engine: SearchEngine, capsys: pytest.CaptureFixture[str]
) -> None:
    engine.fails = lambda trial: trial.arm == "centralized"
    assert main(["probe.yaml"]) == 1
    assert not searched(engine)
    assert "the search waits: its constraints need the reference" in capsys.readouterr().out
    engine.fails = lambda trial: False
    assert main(["probe.yaml", "--retry-failed"]) == 0
    assert len(searched(engine)) == 12


def test_results_that_were_deleted_are_made_again(study_file: Path, engine: SearchEngine) -> None:
    main(["probe.yaml"])
    before = stored()
    lost = next(Path("results/probe/trials").glob("spes-*-seed=1-*"))
    (lost / "result.json").unlink()
    engine.ran.clear()
    assert main(["probe.yaml"]) == 0
    assert engine.ran == [lost.name.rpartition("-")[0]]
    assert stored() == before


# --- Objectives and pruning ---


def test_several_objectives_win_by_the_front(study_file: Path, engine: SearchEngine) -> None:
    overrides = ["search.objective=[eval/loss,comm/uplink_gb]", "search.constraints=[]", "search.confirm.top=3"]
    assert main(["probe.yaml", *overrides]) == 0
    by_number = {point["number"]: point["axes"]["sync.interval_steps"] for point in stored()["points"]}
    won = [by_number[number] for number in stored()["winners"]]
    assert len(won) == 3
    assert won[0] == min(points())  # the front is every point here; its ends are the best in one objective each
    assert won[-1] == max(points())


def test_no_point_within_the_constraint_confirms_nothing(study_file: Path, engine: SearchEngine) -> None:
    engine.loss = lambda trial: 4.0 if trial.arm == "spes" else 3.0
    assert main(["probe.yaml"]) == 0
    assert stored()["winners"] == []
    assert not [name for name in engine.ran if name.endswith(("seed=7", "seed=8", "seed=9"))]


def test_pruning_saves_the_seeds_of_points_behind_the_median_and_survives_a_stop(
    study_file: Path, engine: SearchEngine
) -> None:
    overrides = ["search.pruner=median", "search.objective=eval/loss", "search.constraints=[]", "search.n_trials=8"]
    engine.stop_after = 15
    assert main(["probe.yaml", *overrides]) == 130
    engine.stop_after = None
    assert main(["probe.yaml", *overrides]) == 0
    pruned = [point for point in stored()["points"] if point["state"] == "pruned"]
    assert pruned
    assert {len(point["trials"]) for point in pruned} == {1}
    assert pruned[0]["reason"] == "pruned after 1 of 2 seeds"
    assert len(set(searched(engine))) == 16 - len(pruned)
    before = stored()
    assert main(["probe.yaml", *overrides]) == 0
    assert stored() == before


def test_importance_names_the_setting_that_matters(study_file: Path, engine: SearchEngine) -> None:
    overrides = ["+search.space.merge.alpha=[0.1,0.2,0.3,0.4]", "search.n_trials=24", "search.objective=eval/loss"]
    assert main(["probe.yaml", "seeds=[0]", *overrides]) == 0
    importances = {row["setting"]: row["importance"] for row in stored()["importances"]}
    assert importances["sync.interval_steps"] > 5 * importances["merge.alpha"]


# --- The report ---


def report(monkeypatch: pytest.MonkeyPatch, *overrides: str) -> Page:
    monkeypatch.setattr(campaign, "render_report", REAL_RENDER)
    assert main(["probe.yaml", "report.formats=[html,csv]", *overrides]) in (0, 1)
    return Page(Path("reports/probe/index.html").read_text(encoding="utf-8"))


def test_report_shows_points_winner_and_the_interval_of_fresh_seeds(
    study_file: Path, engine: SearchEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    noise = {7: -0.001, 8: 0.0, 9: 0.0013}
    engine.loss = lambda trial: formula(trial) * (1 + noise.get(trial.seed, 0) * (trial.arm == "spes"))
    page = report(monkeypatch, "search.space.sync.interval_steps=[1,2,4,8,16,64]")
    assert [int(row[1]) for row in page.tables["search_history"][1:]] == points()
    (row,) = page.tables["search_confirmation"][1:]
    relative = [(1 + 0.004 * math.log2(16)) * (1 + noise[seed]) - 1 for seed in (7, 8, 9)]
    bounds = scipy.stats.t.interval(0.95, 2, np.mean(relative), scipy.stats.sem(relative))
    shown = [float(number.replace("−", "-")) for number in re.findall(r"[+−]?\d+\.\d+", " ".join(row[2:4]))]
    assert shown[0] == pytest.approx(100 * np.mean(relative), abs=0.006)
    assert shown[1:3] == pytest.approx([100 * bound for bound in bounds], abs=0.06)
    assert "Sweet spot H\u202f=\u202f16" in " ".join(page.words).replace("\xa0", "\u202f")


def test_report_does_not_identify_a_sweet_spot_that_fresh_seeds_do_not_show(
    study_file: Path, engine: SearchEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine.loss = lambda trial: formula(trial) * (1.05 if trial.seed == 9 and trial.arm == "spes" else 1)
    assert "Sweet spot not identified: no winner qualifies" in " ".join(report(monkeypatch).words)


def test_report_of_several_axes_and_objectives_marks_the_front_and_names_importances(
    study_file: Path, engine: SearchEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine.fails = lambda trial: interval(trial) == 16
    overrides = ["+search.space.merge.alpha=[0.1,0.2]", "search.objective=[eval/loss,comm/uplink_gb]", "seeds=[0]"]
    page = report(monkeypatch, *overrides, "search.n_trials=12", "search.confirm.seeds=[]")
    header, *rows = page.tables["search_history"]
    assert len(rows) == 12
    on_front = {row[1] for row in rows if row[header.index("on the front")] == "yes"}
    assert on_front == {row[1] for row in rows if row[header.index("keeps limits")] == "yes"}
    assert page.tables["search_importances"][1:]
    assert any("failed" in row[-1] for row in rows)
    assert "the choice is not confirmed" in " ".join(page.words)
    assert len(page.tables["trials"]) == 1 + 1 + 12


@given(st.lists(st.tuples(st.integers(0, 4), st.integers(0, 4), st.booleans()), max_size=12))
def test_front_is_what_no_feasible_point_dominates(drawn: list[tuple[int, int, bool]]) -> None:
    objectives = [Objective(metric="a"), Objective(metric="b", goal="maximize")]
    scores = [Scored(values=(float(a), float(b)), violations=(0.0 if keeps else 1.0,)) for a, b, keeps in drawn]
    expected = [
        index
        for index, (a, b, keeps) in enumerate(drawn)
        if keeps and not any(k and x <= a and y >= b and (x < a or y > b) for x, y, k in drawn)
    ]
    assert front(scores, objectives) == expected
    assert set(winners(scores, objectives, 3)) <= set(expected)


# --- Proposals ---


def test_what_was_told_is_what_the_results_say(study_file: Path, engine: SearchEngine) -> None:
    import optuna

    main(["probe.yaml"])
    backend = optuna.storages.journal.JournalFileBackend("results/probe/search/journal.log")
    storage = optuna.storages.JournalStorage(backend)
    (name,) = [summary.study_name for summary in optuna.get_all_study_summaries(storage)]
    for trial in optuna.load_study(study_name=name, storage=storage).trials:
        steps = trial.params["sync.interval_steps"]
        assert trial.values == [1 / steps]
        (violation,) = trial.constraints.values()
        assert violation == pytest.approx(0.004 * math.log2(steps) - 0.02)


def test_a_damaged_journal_is_one_clear_line(
    study_file: Path, engine: SearchEngine, capsys: pytest.CaptureFixture[str]
) -> None:
    main(["probe.yaml"])
    journal = Path("results/probe/search/journal.log")
    journal.write_text("nonsense\n" + journal.read_text())
    capsys.readouterr()
    assert main(["probe.yaml"]) == 2
    assert "journal.log is damaged" in capsys.readouterr().err
    journal.unlink()
    ran = len(engine.ran)
    assert main(["probe.yaml"]) == 0
    assert len([name for name in engine.ran[ran:] if name in engine.ran[:ran]]) == 0


def test_a_range_gives_whole_numbers_within_it(study_file: Path, engine: SearchEngine) -> None:
    text = study_file.read_text().replace("[1, 2, 4, 8, 16, 32, 64, 128]", "{low: 3, high: 20, log: true}")
    study_file.write_text(text)
    main(["probe.yaml"])
    assert all(isinstance(point, int) and 3 <= point <= 20 for point in points())
    assert len(expand(read_study(study_file))) == 2 * (1 + 18)


def test_chance_proposes_other_points_with_another_seed(study_file: Path, tmp_path: Path) -> None:
    asked = []
    for seed in (0, 1):
        search = read_study(study_file, ["search.sampler=random", f"search.sampler_seed={seed}"]).search
        assert search is not None
        proposals = Proposals(tmp_path / f"{seed}.log", "form", search)
        asked.append([])
        for _ in range(5):
            proposal = proposals.ask()
            proposals.tell(proposal, [1.0], {})
            asked[-1].append(proposal.params["sync.interval_steps"])
    assert asked[0] != asked[1]
