"""`evaluation:` in a study: read strictly, outside a trial's identity, carried out after a trial, and reported."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import pandas as pd
import pytest

pytest.importorskip("lm_eval", reason="needs the evaluation extra")

from tests.reference import report_fixture
from tests.unit import test_study_cli
from tests.unit.test_study_cli import Engine
from workbench import campaign
from workbench.report import scores
from workbench.report.compose import compose
from workbench.report.document import PAGE, Figure, Paragraph, Table
from workbench.report.evidence import read
from workbench.report.findings import analyse
from workbench.report.latex import to_latex
from workbench.report.svg import to_svg
from workbench.spec import read_study
from workbench.statistics import standard_deviation
from workbench.study import main
from workbench.trials import expand, identify

cache, corpus = test_study_cli.cache, test_study_cli.corpus
study_file, engine = test_study_cli.study_file, test_study_cli.engine


class Recorded:
    """Stands in for the evaluation of trials."""

    completed: list[str]
    caught_up: list[list[str]]
    owed: int

    def __init__(self, **settings: Any) -> None:
        self.tasks = settings["settings"].tasks

    def complete(
        self, trial_dir: Path, result: dict[str, Any], stopped: Callable[[], bool], *, gpus: Sequence[str] | None
    ) -> dict[str, Any]:
        self.completed.append(trial_dir.name)
        scored = result | {"metrics": result["metrics"] | {"lm_eval/sciq/acc": 0.25}}
        (trial_dir / "result.json").write_text(json.dumps(scored))
        return scored

    def catch_up(self, trial_dirs: Iterable[Path], stopped: Callable[[], bool], *, retry: bool) -> int:
        self.caught_up.append([folder.name for folder in trial_dirs])
        return self.owed

    def say_missing(self, trial_dirs: Iterable[Path]) -> None:
        print(f"asked about {len(list(trial_dirs))}")


@pytest.fixture
def recorded(monkeypatch: pytest.MonkeyPatch) -> type[Recorded]:
    Recorded.completed, Recorded.caught_up, Recorded.owed = [], [], 0
    monkeypatch.setattr(campaign, "Evaluations", Recorded)
    return Recorded


def test_each_trial_is_evaluated_when_done_and_earlier_ones_before(
    study_file: Path, engine: Engine, recorded: type[Recorded], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([str(study_file), "sweep.grid.sync.interval_steps=[5]", "evaluation.tasks=[sciq]"]) == 0
    assert len(recorded.completed) == 2 == len(engine.ran)
    assert main([str(study_file), "evaluation.tasks=[sciq]"]) == 0
    assert len(recorded.completed) == 4 == len(engine.ran)
    assert [len(names) for names in recorded.caught_up] == [2, 4]
    assert recorded.completed[:2] == [name for name in recorded.caught_up[1] if "interval_steps=5" in name]
    assert "asked about 4" in capsys.readouterr().out


def test_only_the_selected_trials_of_earlier_runs_are_evaluated(
    study_file: Path, engine: Engine, recorded: type[Recorded]
) -> None:
    assert main([str(study_file)]) == 0
    assert main([str(study_file), "evaluation.tasks=[sciq]", "--only", "dilico", "--retry-failed"]) == 0
    selected = recorded.caught_up[-1]
    assert len(selected) == 2 and all(name.startswith("dilico") for name in selected)


def test_the_evaluation_is_outside_the_identity_of_a_trial(study_file: Path) -> None:
    overrides = [[], ["evaluation.tasks=[sciq,'arc_challenge:25',spes_suite]", "evaluation.limit=7"]]
    studies = [read_study(study_file, more) for more in overrides]
    first, second = ([trial.id for trial in identify(study, expand(study), lambda _: "d")] for study in studies)
    assert first == second and studies[1].evaluation.tasks[1] == "arc_challenge:25"


def test_a_misspelt_task_is_named_with_its_line_before_anything_runs(
    study_file: Path, engine: Engine, capsys: pytest.CaptureFixture[str]
) -> None:
    study_file.write_text(study_file.read_text() + "evaluation:\n  tasks: [sciq, arc_esay]\n  limt: 3\n")
    assert main([str(study_file)]) == 2
    said = capsys.readouterr().err
    assert "evaluation.tasks[1] (arc_esay) is not a task of lm-eval; did you mean arc_easy" in said
    assert "evaluation.limt" in said and "probe.yaml:14" in said and engine.ran == []


def test_a_study_plans_without_the_offline_copies_and_does_not_start_without_them(
    study_file: Path, engine: Engine, capsys: pytest.CaptureFixture[str]
) -> None:
    missing = ["evaluation.tasks=[sciq]", "evaluation.data_dir=nowhere"]
    assert expand(read_study(study_file, missing))
    assert main([str(study_file), *missing]) == 2
    assert "evaluation.data_dir (nowhere) is no folder; leave it out to use the hub" in capsys.readouterr().err
    assert engine.ran == []


def entry(value: float, stderr: float, name: str) -> dict[str, Any]:
    metrics = {"acc": {"value": value, "stderr": stderr, "higher_is_better": True}}
    return {
        "status": "done", "name": name, "shots": 0, "version": "1.0", "headline": "acc", "metrics": metrics, "n": 100,
        "limit": 100, "chance": 0.25, "lm_eval": "0.4.13", "context": 128, "truncated": 3, "requests": 400,
        "split": "test",
    }  # fmt: skip


@pytest.fixture
def evaluated(tmp_path: Path) -> Path:
    """A study of made-up numbers: dilico lacks a task with one seed, spes was not evaluated on the third."""
    folder = report_fixture.write_study(tmp_path / "scored", seeds=[0, 1], intervals=[50], curve_points=6)
    study = json.loads((folder / "study.json").read_text())
    study["report"]["formats"] = ["html", "csv", "latex"]
    study["composed"] = {"evaluation": {"tasks": ["sciq", "arc_easy", "piqa"]}}
    (folder / "study.json").write_text(json.dumps(study))
    for path in folder.glob("trials/*/result.json"):
        result = json.loads(path.read_text())
        seed, arm = result["trial"]["seed"], result["trial"]["arm"]
        tasks = {task: entry(0.3 + 0.1 * seed + 0.01 * n, 0.05, task) for n, task in enumerate(("sciq", "arc_easy"))}
        tasks["piqa"] = entry(0.5, 0.02, "piqa")
        if arm == "dilico" and seed == 1:
            tasks["piqa"] = {"status": "missing", "name": "piqa", "reason": "no copy", "headline": "acc"}
        if arm == "spes":
            del tasks["piqa"]
        path.write_text(json.dumps(result | {"evaluation": {"weights": {}, "tasks": tasks}}))
    return folder


def test_the_table_keeps_spread_over_seeds_and_error_over_items_apart(evaluated: Path) -> None:
    table = scores.scores_table(read(evaluated))
    assert table is not None
    rows = table.frame.set_index(["task", "arm"])
    row = rows.loc[("arc_easy", "spes")]
    assert row["mean"] == pytest.approx(0.36) and row["n"] == 2
    assert row["seed_sd"] == pytest.approx(standard_deviation([0.31, 0.41])) and row["item_se"] == pytest.approx(0.05)
    assert row["chance"] == 0.25 and row["items"] == 100
    assert pd.isna(rows.loc[("piqa", "dilico")]["seed_sd"]) and rows.loc[("piqa", "dilico")]["n"] == 1
    headings = [column.heading for column in table.columns]
    assert {"s.d. over seeds", "s.e. over items", "guessing"} <= set(headings)


def test_a_mean_over_tasks_is_only_given_where_it_compares(evaluated: Path) -> None:
    table = scores.scores_table(read(evaluated))
    assert table is not None
    means = table.frame[table.frame["task"] == scores.AVERAGE].set_index("arm")
    assert list(means.index) == ["centralized", "dilico"]
    assert means.loc["centralized"]["mean"] == pytest.approx((0.3 + 0.31 + 0.5 + 0.4 + 0.41 + 0.5) / 6)
    assert means.loc["centralized"]["item_se"] == pytest.approx((0.05**2 + 0.05**2 + 0.02**2) ** 0.5 / 3)
    assert means.loc["dilico"]["n"] == 1


def test_missing_scores_are_listed_with_their_reasons(evaluated: Path) -> None:
    table = scores.missing_scores_table(read(evaluated))
    assert table is not None
    listed = [(row["task"], row["arm"], row["seeds"], row["reason"]) for _, row in table.frame.iterrows()]
    assert ("piqa", "dilico", "1", "no copy") in listed
    assert ("piqa", "spes", "0, 1", "not evaluated; the study's next run does") in listed and len(listed) == 2


def test_the_report_has_the_section_with_a_figure_of_the_same_numbers(evaluated: Path, tmp_path: Path) -> None:
    document = compose(read(evaluated), tmp_path / "report")
    (section,) = [section for section in document.sections if section.id == "scores"]
    paragraph, figure, table, missing = section.blocks
    assert isinstance(paragraph, Paragraph) and "Only the first 100 items of each task were used" in paragraph.text
    assert isinstance(table, Table) and isinstance(missing, Table) and "tab:scores" in to_latex(table)
    assert isinstance(figure, Figure)
    spes = figure.data[(figure.data["task"] == "sciq") & (figure.data["arm"] == "spes")]
    assert list(spes["score"]) == [0.3, 0.4]
    drawn = to_svg(figure.draw(PAGE), "scores")
    assert all(f">{text}<" in drawn for text in ("sciq", "arc_easy", "piqa", "mean of the tasks"))


def test_a_study_without_evaluation_has_no_such_section(tmp_path: Path) -> None:
    folder = report_fixture.write_study(tmp_path / "plain", seeds=[0], intervals=[50], curve_points=6)
    assert scores.section(analyse(read(folder))) is None
