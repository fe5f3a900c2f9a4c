"""The search section of a study file: what is refused, and what the plan says of it."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.unit.test_search import STUDY
from workbench.study import main


@pytest.fixture
def study_file(tmp_path: Path, tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> Path:
    corpus = tmp_path_factory.mktemp("corpus")
    (corpus / "text.txt").write_text("a few words")
    monkeypatch.setenv("XDG_CACHE_HOME", str(corpus / "cache"))
    monkeypatch.chdir(tmp_path)
    path = tmp_path / "probe.yaml"
    path.write_text(STUDY.replace("CORPUS", str(corpus)))
    return path


@pytest.mark.parametrize(
    ("old", "new", "mistake"),
    [
        ("n_trials: 6", "n_trial: 6", '13: search.n_trial is not a setting; did you mean "n_trials"?'),
        ("n_trials: 6", "n_trials: 0", "13: search.n_trials (0) must be at least 1"),
        ("sync.interval_steps:", "sync.intervall_steps:", "14: search.space.sync.intervall_steps is not a setting"),
        (
            "[1, 2, 4, 8, 16, 32, 64, 128]",
            "[1, x]",
            "14: search.space.sync.interval_steps ('x') must be a whole number",
        ),
        ("[1, 2, 4, 8, 16, 32, 64, 128]", "[0, 2]", "14: search.space.sync.interval_steps (0) must be at least 1"),
        ("[1, 2, 4, 8, 16, 32, 64, 128]", "[2, 2]", "14: search.space.sync.interval_steps (2) is listed twice"),
        ("[1, 2, 4, 8, 16, 32, 64, 128]", "5", "14: search.space.sync.interval_steps (5) must be a list of values, or"),
        ("[1, 2, 4, 8, 16, 32, 64, 128]", "{low: 9, high: 5}", "14: search.space.sync.interval_steps.low (9) must be"),
        ("[1, 2, 4, 8, 16, 32, 64, 128]", "{low: 9, hig: 5}", "14: search.space.sync.interval_steps.hig is not a sett"),
        ("[1, 2, 4, 8, 16, 32, 64, 128]", "{low: 0, high: 5}", "14: search.space.sync.interval_steps"),
        ("sync.interval_steps:", "data.corpus:", "14: search.space.data.corpus cannot be searched: it makes another"),
        ("sync.interval_steps:", "seed:", "14: search.space.seed cannot be an axis"),
        ("comm/uplink_gb", "comm/uplink", '15: search.objective.metric (comm/uplink) is not a metric; did you mean "c'),
        ("comm/uplink_gb", "[]", "15: search.objective must name at least one metric"),
        ("tolerance: 0.02", "at_mots: 1", '16: search.constraints[0].at_mots is not a setting; did you mean "at_most"'),
        (", tolerance: 0.02", "", "16: search.constraints[0] must give one of tolerance, at_most and at_least"),
        (", role: reference", "", "12: search.arm is missing: it names the arm that is searched, and 2 arms have"),
        ("seeds: [7, 8, 9]", "seeds: [1, 8]", "17: search.confirm.seeds (1) must be fresh"),
        ("  n_trials", "  arm: sparse\n  n_trials", "13: search.arm (sparse) is not an arm"),
        ("  n_trials", "  pruner: median\n  n_trials", "13: search.pruner (median) sees the objective alone"),
        ("  n_trials", "  pruner: hyperband\n  n_trials", "13: search.pruner ('hyperband') must be one of median"),
        ("method: spes}", "method: spes, sweep: {grid: {optim.lr: [0.1]}}}", "11: arms.spes.sweep must be left out"),
    ],
)
def test_mistake_in_a_search_exits_2_and_creates_nothing(
    study_file: Path, capsys: pytest.CaptureFixture[str], old: str, new: str, mistake: str
) -> None:
    study_file.write_text(study_file.read_text().replace(old, new))
    assert main(["probe.yaml"]) == 2
    lines = capsys.readouterr().err.splitlines()
    assert any(line.startswith(f"error: probe.yaml:{mistake}") for line in lines), lines
    assert [path.name for path in study_file.parent.iterdir()] == ["probe.yaml"]


def test_all_mistakes_of_a_search_are_listed_at_once(study_file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    text = study_file.read_text().replace("n_trials: 6", "n_trials: 0").replace("eval/loss", "eval/los")
    study_file.write_text(text.replace("[7, 8, 9]", "[7, 7]").replace("[1, 2, 4", "[0, 2, 4"))
    assert main(["probe.yaml"]) == 2
    assert len(capsys.readouterr().err.splitlines()) >= 3


def test_several_objectives_refuse_a_pruner(study_file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    overrides = ["search.objective=[eval/loss,comm/uplink_gb]", "search.pruner=median", "search.constraints=[]"]
    assert main(["probe.yaml", *overrides]) == 2
    assert "search.pruner (median) cannot rank points by several objectives; leave it" in capsys.readouterr().err


def test_a_reference_of_several_points_is_refused(study_file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["probe.yaml", "arms.centralized.method=dilico", "sweep.grid.sync.interval_steps=[1,2]"]) == 2
    assert "must be one point where there is a search, and has 2: take sync.interval_steps" in capsys.readouterr().err


def test_dry_run_of_a_search_says_space_points_and_costs_and_needs_no_optuna(study_file: Path) -> None:
    code = (
        "import sys; from workbench.study import main; code = main(['probe.yaml', '--dry-run']);"
        "heavy = {'torch', 'numpy', 'optuna', 'mlflow', 'pandas'} & sys.modules.keys();"
        "assert not heavy, heavy; sys.exit(code)"
    )
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    assert "search of spes: minimize comm/uplink_gb\n  subject to eval/loss at most 1.02 times the ref" in done.stdout
    assert "space: 8 points; 6 of them are tried (tpe) with 2 seeds each" in done.stdout
    assert "cost: at most 18 trials, each of steps 160, rounds 2 to 160" in done.stdout
    assert [path.name for path in study_file.parent.iterdir()] == ["probe.yaml"]
