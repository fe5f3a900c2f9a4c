"""The MLflow store of a study rebuilt from its results."""

from __future__ import annotations

import fcntl
import io
import json
import os
import shlex
import shutil
import sqlite3
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlparse

import pytest

from tests.reference.report_fixture import write_study
from workbench import mlflowexport, tracking
from workbench.mirrored import unmirrored
from workbench.study import main
from workbench.tracking import Store

pytestmark = pytest.mark.processes


@pytest.fixture(scope="module")
def empty_store(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder whose MLflow store exists: making one takes seconds."""
    folder = tmp_path_factory.mktemp("template")
    Store("template", f"sqlite:///{folder}/mlflow.db")
    return folder / "mlflow.db"


@pytest.fixture
def study_dir(tmp_path: Path, empty_store: Path) -> Path:
    """Three finished trials, one of them failed, in a folder with a store that knows none of them."""
    results = tmp_path / "résultats d'été"
    folder = write_study(results / "small", arms=("centralized",), failed=["centralized-seed=2"], curve_points=3)
    for result in folder.glob("trials/*/result.json"):
        content = json.loads(result.read_text())
        result.write_text(json.dumps({**content, "non_finite": []}))
        (result.parent / "run.json").write_text("{}")
    shutil.copy(empty_store, results / "mlflow.db")
    return folder


def rows(database: Path, query: str) -> list[tuple[Any, ...]]:
    with sqlite3.connect(database) as connection:
        return connection.execute(query).fetchall()


def live(database: Path) -> list[tuple[Any, ...]]:
    return rows(
        database,
        "SELECT runs.status, experiments.name FROM runs JOIN experiments USING (experiment_id) "
        "WHERE runs.lifecycle_stage = 'active' AND experiments.lifecycle_stage = 'active' ORDER BY runs.name",
    )


ALL = [("FINISHED", "small"), ("FINISHED", "small"), ("FAILED", "small")]


def export_here(study_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The command with its process's work done in this one, where mlflow has been imported; for one folder only, as
    mlflow remembers the store of a relative address."""

    def run(study_dir: Path, store: Path | None, tracking_uri: str | None) -> Any:
        command = mlflowexport.command_of(study_dir, store, tracking_uri)
        replies = io.StringIO()
        with monkeypatch.context() as patch:
            patch.setattr("sys.stdin", io.StringIO())
            patch.setattr("sys.stdout", replies)
            patch.chdir(study_dir)
            assert tracking.main(command[command.index("--results") :]) == 0
        return [json.loads(line) for line in replies.getvalue().splitlines()], []

    with monkeypatch.context() as patch:
        patch.setattr(mlflowexport, "_run", run)
        assert main(["export-mlflow", str(study_dir)]) == 0


def test_the_experiment_is_rebuilt_from_results_alone(
    study_dir: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """What was changed or added in MLflow by hand is gone from it, and artifacts lie where the folder is now."""
    database = study_dir.parent / "mlflow.db"
    export_here(study_dir, monkeypatch)
    assert "3 trials are in the experiment small" in capsys.readouterr().out
    assert sorted(live(database)) == sorted(ALL)
    assert unmirrored(study_dir) == []
    with sqlite3.connect(database) as connection:
        connection.execute("UPDATE metrics SET value = 7 WHERE key = 'comm/uplink_gb'")
        connection.execute("UPDATE experiments SET artifact_location = 'file:///gone' WHERE name = 'small'")
    export_here(study_dir, monkeypatch)
    assert sorted(live(database)) == sorted(ALL)
    current = (
        "SELECT metrics.value FROM metrics JOIN runs USING (run_uuid) JOIN experiments USING (experiment_id) "
        "WHERE experiments.name = 'small' AND metrics.key = 'eval/loss'"
    )
    stored = [json.loads(path.read_text())["metrics"] for path in study_dir.glob("trials/*/result.json")]
    values = {value for (value,) in rows(database, current)}
    assert {metrics["eval/loss"] for metrics in stored if metrics} <= values
    ((location,),) = rows(database, "SELECT artifact_location FROM experiments WHERE name = 'small'")
    assert Path(unquote(urlparse(location).path)).parent == study_dir.parent
    kept = rows(database, "SELECT name FROM experiments WHERE lifecycle_stage = 'deleted'")
    assert [name.startswith("small (replaced ") for (name,) in kept] == [True]


def test_another_folder_takes_the_store_of_results_that_cannot_be_written_to(
    study_dir: Path, tmp_path: Path, empty_store: Path
) -> None:
    (tmp_path / "elsewhere").mkdir()
    shutil.copy(empty_store, tmp_path / "elsewhere" / "mlflow.db")
    (study_dir.parent / "mlflow.db").unlink()
    before = sorted(study_dir.parent.rglob("*"))
    assert main(["export-mlflow", str(study_dir), "--store", str(tmp_path / "elsewhere")]) == 0
    assert sorted(live(tmp_path / "elsewhere" / "mlflow.db")) == sorted(ALL)
    assert sorted(study_dir.parent.rglob("*")) == before


def test_trials_that_mlflow_does_not_take_are_one_error(
    study_dir: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    replies = [{"event": "ready"}, {"event": "mirrored", "trial": "t"}, {"event": "warning", "message": "u is not in"}]
    monkeypatch.setattr(mlflowexport, "_run", lambda *_: (replies, []))
    assert main(["export-mlflow", str(study_dir)]) == 1
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("error: 2 of 3 trials are not in MLflow: u is not in; where results cannot")


def test_the_command_to_look_at_them_can_be_pasted_whatever_the_folder_s_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / 'my "$(results)" of today\'s'
    (folder / "s" / "trials" / "t").mkdir(parents=True)
    (folder / "s" / "trials" / "t" / "result.json").write_text("{}")
    monkeypatch.setattr(mlflowexport, "summaries", lambda _: [])
    monkeypatch.setattr(mlflowexport, "_run", lambda *_: ([{"event": "mirrored"}], []))
    mlflowexport.export_mlflow(folder / "s")
    command = capsys.readouterr().out.partition("look at them: ")[2]
    assert shlex.split(command)[:3] == ["cd", str(folder), "&&"]


def test_a_study_that_is_running_is_left_alone(study_dir: Path, capsys: pytest.CaptureFixture[str]) -> None:
    trial_dir = next(study_dir.glob("trials/*"))
    (trial_dir / "result.json").unlink()
    held = os.open(trial_dir, os.O_RDONLY)
    fcntl.flock(held, fcntl.LOCK_EX)
    try:
        assert main(["export-mlflow", str(study_dir)]) == 2
    finally:
        os.close(held)
    assert "is being run" in capsys.readouterr().err
