"""The MLflow mirror: what it writes, that it writes nothing twice, and that its failures stop nothing."""

import json
import os
import shutil
import signal
import sqlite3
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from workbench.mirror import Mirror
from workbench.mirrored import digest, note_run, run_of, unmirrored
from workbench.tracking import Store, run_metrics, run_params, run_tags

pytestmark = pytest.mark.processes

STUDY = "eine Studie é"


def make_result(name: str = "spes-seed=0-01234567", status: str = "done", **changes: Any) -> dict[str, Any]:
    """A small result.json."""
    where = {"step": 10, "tokens": 100, "elapsed_s": 1.5, "uplink_bytes": 2e9}
    later = {"step": 20, "tokens": 200, "elapsed_s": 3.0, "uplink_bytes": 4e9}
    return {
        "schema": 1,
        "trial": {"id": f"id of {name}", "name": name, "study": STUDY, "arm": "spes", "role": "treatment",
                  "method": "spes", "seed": 0, "axes": {}},
        "status": status,
        "error": None if status == "done" else {"message": "no memory", "process": "node-1", "log_tail": []},
        "started_at": "2026-01-02T03:04:05.000+00:00",
        "finished_at": "2026-01-02T03:04:15.500+00:00",
        "config": {"method": "spes", "model": {"num_layers": 4, "head_dim": None}, "data": {"corpus": "x" * 9000}},
        "data": {"digest": "d1"},
        "metrics": {"eval/loss": 3.0, "train/loss": 3.5, "comm/uplink_gb": 4.0, "perf/launch_to_first_step_s": 2.0},
        "non_finite": ["eval/perplexity"],
        "curves": {
            "train": [{**where, "loss_nats": 5.0, "grad_norm": None}, {**later, "loss_nats": 3.5, "grad_norm": 1.0}],
            "validation": [{**later, "loss_nats": 3.0, "bits_per_byte": 1.0}],
        },
        "provenance": {"commit": "c0ffee", "dirty": True, "code_digest": "cd"},
        **changes,
    }  # fmt: skip


def write_trial(results_dir: Path, result: dict[str, Any]) -> Path:
    """The folder of a finished trial."""
    folder = results_dir / STUDY / "trials" / result["trial"]["name"]
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "result.json").write_text(json.dumps(result))
    (folder / "run.json").write_text("{}")
    return folder


@pytest.fixture(scope="module")
def empty_store(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A results folder whose MLflow store exists: making one takes seconds."""
    results_dir = tmp_path_factory.mktemp("template")
    Store("template", f"sqlite:///{results_dir}/mlflow.db")
    return results_dir


@pytest.fixture
def results_dir(tmp_path: Path, empty_store: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    shutil.copy(empty_store / "mlflow.db", tmp_path / "mlflow.db")
    monkeypatch.chdir(tmp_path)  # without a location of their own, artifacts lie in the working directory
    return tmp_path


@pytest.fixture
def warnings() -> list[str]:
    return []


def open_store(results_dir: Path) -> Store:
    return Store(STUDY, f"sqlite:///{results_dir}/mlflow.db")


def rows(results_dir: Path, query: str) -> list[tuple[Any, ...]]:
    with sqlite3.connect(results_dir / "mlflow.db") as database:
        return database.execute(query).fetchall()


def live_runs(results_dir: Path) -> list[tuple[Any, ...]]:
    return rows(results_dir, "SELECT name, status FROM runs WHERE lifecycle_stage = 'active' ORDER BY name")


def test_a_finished_trial_becomes_one_run_with_params_tags_and_metrics(results_dir: Path) -> None:
    open_store(results_dir).mirror(write_trial(results_dir, make_result()))
    assert live_runs(results_dir) == [("spes-seed=0-01234567", "FINISHED")]
    assert dict(rows(results_dir, "SELECT key, value FROM params")) == {
        "method": "spes",
        "model.num_layers": "4",
        "model.head_dim": "None",
        "data.corpus": "x" * 500,
    }
    tags = dict(rows(results_dir, "SELECT key, value FROM tags"))
    assert (tags["arm"], tags["commit"], tags["dirty"], tags["status"]) == ("spes", "c0ffee", "True", "done")
    assert (tags["trial_id"], tags["non_finite"]) == ("id of spes-seed=0-01234567", "eval/perplexity")
    points = rows(results_dir, "SELECT key, step, value FROM metrics")
    assert {point for point in points if point[0] == "train/loss"} == {
        ("train/loss", 10, 5.0),
        ("train/loss", 20, 3.5),
    }
    assert {point for point in points if point[0] == "train/grad_norm"} == {("train/grad_norm", 20, 1.0)}
    assert ("eval/tokens", 20, 200.0) in points and ("comm/uplink_gb", 20, 4.0) in points
    assert [point[0] for point in points].count("eval/loss") == 1
    assert rows(results_dir, "SELECT end_time - start_time FROM runs") == [(10500,)]


def test_status_is_mapped_and_the_error_is_a_tag(results_dir: Path) -> None:
    store = open_store(results_dir)
    for status in ("failed", "timeout", "interrupted"):
        store.mirror(write_trial(results_dir, make_result(status, status)))
    assert live_runs(results_dir) == [("failed", "FAILED"), ("interrupted", "KILLED"), ("timeout", "KILLED")]
    assert rows(results_dir, "SELECT DISTINCT value FROM tags WHERE key = 'error'") == [("no memory",)]


def test_the_same_result_is_never_logged_twice_and_a_new_one_replaces_it(results_dir: Path) -> None:
    store = open_store(results_dir)
    folder = write_trial(results_dir, make_result(status="failed"))
    for mirror in (store, store, open_store(results_dir)):
        mirror.mirror(folder)
    assert rows(results_dir, "SELECT count(*) FROM runs") == [(1,)]
    write_trial(results_dir, make_result())
    store.mirror(folder)
    assert live_runs(results_dir) == [("spes-seed=0-01234567", "FINISHED")]


def test_a_run_that_was_cut_short_is_replaced(results_dir: Path) -> None:
    folder = write_trial(results_dir, make_result())
    open_store(results_dir).mirror(folder)
    with sqlite3.connect(results_dir / "mlflow.db") as database:  # as a killed mirror leaves it
        database.execute("DELETE FROM tags WHERE key = 'result_digest'")
        database.execute("UPDATE runs SET status = 'RUNNING'")
    open_store(results_dir).mirror(folder)
    assert live_runs(results_dir) == [("spes-seed=0-01234567", "FINISHED")]


def test_the_experiment_of_a_study_is_restored_when_it_was_deleted(results_dir: Path) -> None:
    open_store(results_dir)
    with sqlite3.connect(results_dir / "mlflow.db") as database:
        database.execute("UPDATE experiments SET lifecycle_stage = 'deleted'")
    open_store(results_dir).mirror(write_trial(results_dir, make_result()))
    assert len(live_runs(results_dir)) == 1


def test_a_mirror_makes_store_and_artifacts_in_any_folder_and_catches_up(tmp_path: Path, warnings: list[str]) -> None:
    """Also past a result that is broken: one warning, and the others are mirrored."""
    results_dir = tmp_path / "100% 'réssultats'? :#1 \"x\""
    broken = write_trial(results_dir, make_result("a-broken"))
    (broken / "result.json").write_text("{")
    write_trial(results_dir, make_result("missed by the last mirror"))
    mirror = Mirror(results_dir, STUDY, warn=warnings.append)
    assert mirror.wait_ready()
    mirror.add(write_trial(results_dir, make_result()))
    mirror.close()
    assert len(warnings) == 1 and warnings[0].startswith("a-broken is not in MLflow")
    assert [name for name, _ in live_runs(results_dir)] == [
        "missed by the last mirror",
        "spes-seed=0-01234567",
    ]
    assert unmirrored(results_dir / STUDY) == [broken], "a later run has only this left to mirror"
    runs = rows(results_dir, "SELECT run_uuid, experiment_id FROM runs ORDER BY name")
    folders = [results_dir / STUDY / "trials" / name for name, _ in live_runs(results_dir)]
    found = [run_of(folder, digest((folder / "result.json").read_bytes())) for folder in folders]
    assert found == [(run, f"http://127.0.0.1:5000/#/experiments/{experiment}/runs/{run}") for run, experiment in runs]
    assert not (broken / "mlflow.json").exists()
    write_trial(results_dir, make_result(status="failed"))
    assert [path.name for path in unmirrored(results_dir / STUDY)] == ["a-broken", "spes-seed=0-01234567"]
    files = [path.name for path in (results_dir / "mlartifacts").rglob("*") if path.is_file()]
    assert sorted(files) == ["result.json", "result.json", "run.json", "run.json"]
    assert (STUDY,) in rows(results_dir, "SELECT name FROM experiments")


def test_two_studies_can_create_one_new_store_at_once(tmp_path: Path, warnings: list[str]) -> None:
    mirrors = [Mirror(tmp_path, study, warn=warnings.append) for study in ("one", "two")]
    for mirror in mirrors:
        mirror.close()
    assert warnings == []
    assert {("one",), ("two",)} < set(rows(tmp_path, "SELECT name FROM experiments"))


def test_an_unusable_store_warns_once_and_stops_nothing(tmp_path: Path, warnings: list[str]) -> None:
    (tmp_path / "mlflow.db").write_text("this is no database, and long enough that SQLite looks at it" * 20)
    folders = [write_trial(tmp_path, make_result(name)) for name in "ab"]
    mirror = Mirror(tmp_path, STUDY, warn=warnings.append)
    for folder in folders:
        mirror.add(folder)
    mirror.close()
    (warning,) = warnings
    assert warning.startswith("MLflow cannot be used: ") and "results are complete without it" in warning


def test_adding_never_waits_and_a_mirror_that_hangs_is_ended(tmp_path: Path, warnings: list[str]) -> None:
    folder = write_trial(tmp_path, make_result())
    mirror = Mirror(tmp_path, STUDY, warn=warnings.append)
    (process,) = [child for child in psutil.Process().children() if "workbench.tracking" in child.cmdline()]
    process.send_signal(signal.SIGSTOP)
    started = time.monotonic()
    for _ in range(2000):
        mirror.add(folder)
    assert time.monotonic() - started < 0.5
    mirror.close(timeout_s=0.2)
    assert time.monotonic() - started < 8
    assert not process.is_running()
    assert warnings[0].startswith("MLflow has not caught up within 0.2 s")


@pytest.mark.skipif(sys.platform != "linux", reason="needs Linux: prctl tells the mirror of its controller's death")
def test_the_mirror_does_not_outlive_its_controller(tmp_path: Path) -> None:
    script = "import sys, time; from pathlib import Path; from workbench.mirror import Mirror\n"
    script += "mirror = Mirror(Path(sys.argv[1]), 's'); time.sleep(60)"
    controller = subprocess.Popen([sys.executable, "-c", script, str(tmp_path)])
    deadline = time.monotonic() + 20
    while not (children := psutil.Process(controller.pid).children()):
        assert time.monotonic() < deadline
        time.sleep(0.02)
    time.sleep(0.3)
    os.kill(controller.pid, signal.SIGKILL)
    controller.wait()
    gone, _ = psutil.wait_procs(children, timeout=5)
    assert len(gone) == 1


def test_the_controller_does_not_import_mlflow() -> None:
    script = "import sys, workbench.mirror, workbench.execute; assert not {'mlflow', 'torch'} & set(sys.modules)"
    subprocess.run([sys.executable, "-c", script], check=True)


def test_points_lie_at_the_time_they_were_measured() -> None:
    points = list(run_metrics(make_result(), started_ms=1000, finished_ms=9000))
    assert ("train/loss", 5.0, 1000 + 2000 + 1500, 10) in points
    assert ("comm/uplink_gb", 4.0, 9000, 20) in points


def test_tags_and_params_survive_missing_provenance() -> None:
    assert "commit" not in run_tags(make_result(provenance={}))
    assert run_params(make_result(config={"a": {"b": [1, 2]}})) == {"a.b": "[1, 2]"}


@pytest.fixture(autouse=True)
def no_process_is_left() -> Iterator[None]:
    yield
    assert not [child for child in psutil.Process().children() if "workbench.tracking" in child.cmdline()]


def test_the_note_of_a_run_counts_for_its_result_alone_and_holds_no_password(tmp_path: Path) -> None:
    note_run(tmp_path, "d1", "7", "abc", "https://me:secret@tracking.example:8443/base/")
    assert "secret" not in (tmp_path / "mlflow.json").read_text()
    assert run_of(tmp_path, "d1") == ("abc", "https://tracking.example:8443/base/#/experiments/7/runs/abc")
    assert run_of(tmp_path, "d2") is None
    note_run(tmp_path, "d1", "7", "abc", "databricks")
    assert run_of(tmp_path, "d1") == ("abc", ""), "no address that a browser opens"
    note_run(tmp_path, "d1", "7", '"><script>', None)
    assert run_of(tmp_path, "d1") is None
    (tmp_path / "mlflow.json").write_text("[torn")
    assert run_of(tmp_path, "d1") is None
