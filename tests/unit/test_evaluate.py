"""`python -m workbench.evaluate`: what it writes, what it does not do twice, and how it ends."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("lm_eval", reason="needs the evaluation extra")

from tests.small_trials import prepare_corpus, write_tasks, write_trial
from workbench import evaluation
from workbench.evaluate import BUSY, main
from workbench.evaluating_tasks import Task
from workbench.execute import exclusive
from workbench.integrity import check_files
from workbench.results import build_result

pytestmark = pytest.mark.xdist_group("lm_eval")


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return prepare_corpus(tmp_path_factory.mktemp("corpus"))


@pytest.fixture(scope="module")
def data_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tasks(tmp_path_factory.mktemp("eval"), items=6)


@pytest.fixture(scope="module", autouse=True)
def dataset_cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("datasets.config.HF_DATASETS_CACHE", str(tmp_path_factory.mktemp("datasets")))
        yield


@pytest.fixture
def ran(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Labels of the tasks that the harness has run."""
    labels: list[str] = []
    run_task = evaluation.run_task

    def noting(lm: Any, task: Task, *rest: Any) -> dict[str, Any]:
        labels.append(task.label)
        return run_task(lm, task, *rest)

    monkeypatch.setattr(evaluation, "run_task", noting)
    return labels


def stored(folder: Path, name: str = "result.json") -> dict[str, Any]:
    content: dict[str, Any] = json.loads((folder / name).read_text())
    return content


def test_scores_reach_the_result_which_can_be_rebuilt_and_nothing_runs_twice(
    tmp_path: Path, corpus: Path, data_dir: Path, ran: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    trial = write_trial(tmp_path / "trials" / "t", corpus)
    loss_only = stored(trial)
    command = [str(tmp_path / "t"), "--data-dir", str(data_dir), "--limit", "5", "--tasks"]
    assert main([*command, "arc_easy,blimp_causative"]) == 0
    result = stored(trial)
    assert set(result["metrics"]) - set(loss_only["metrics"]) == {
        "lm_eval/arc_easy/acc", "lm_eval/arc_easy/acc_stderr", "lm_eval/arc_easy/acc_norm",
        "lm_eval/arc_easy/acc_norm_stderr", "lm_eval/blimp_causative/acc", "lm_eval/blimp_causative/acc_stderr",
    }  # fmt: skip
    entry = result["evaluation"]["tasks"]["arc_easy"]
    about = {key: entry[key] for key in ("shots", "version", "n", "limit", "split", "dtype", "source", "context")}
    assert about == {
        "shots": 0, "version": "1.0", "n": 5, "limit": 5, "split": "test", "dtype": "float32",
        "source": "arc_easy/test.jsonl.gz", "context": 48,
    }  # fmt: skip
    assert entry["lm_eval"] and entry["chance"] == pytest.approx(1 / 3)
    assert build_result(trial) == result
    checks = {check.name: check.passed for check in check_files(trial)}
    assert checks["evaluation.json"] and checks["result.json"]

    assert main([*command, "arc_easy,blimp_causative"]) == 0
    assert "all 2 tasks are in evaluation.json already; nothing is run" in capsys.readouterr().out
    assert main([*command, "arc_easy,hellaswag:2"]) == 0
    assert ran == ["arc_easy", "blimp_causative", "hellaswag:2"]
    assert list(stored(trial)["evaluation"]["tasks"]) == ["arc_easy", "blimp_causative", "hellaswag:2"]

    shutil.copy(trial / "evaluation.json", tmp_path / "other.json")
    forged = stored(trial, "evaluation.json")
    forged["tasks"]["arc_easy"]["metrics"]["acc"]["value"] = 0.99
    (trial / "evaluation.json").write_text(json.dumps(forged))
    assert not all(check.passed for check in check_files(trial))


def test_the_exported_model_gets_the_same_scores_which_enter_no_result(
    tmp_path: Path, corpus: Path, data_dir: Path
) -> None:
    trial = write_trial(tmp_path / "t", corpus)
    command = [str(trial), "--data-dir", str(data_dir), "--tasks", "arc_easy,blimp_causative,blimp_wh_island"]
    assert main([*command, "--hf"]) == 0
    assert not any(name.startswith("lm_eval/") for name in stored(trial)["metrics"])
    assert main(command) == 0
    ours, theirs = (stored(trial, name)["tasks"] for name in ("evaluation.json", "evaluation-hf.json"))
    assert {task: entry["metrics"] for task, entry in ours.items()} == {
        task: entry["metrics"] for task, entry in theirs.items()
    }


def test_a_task_that_cannot_be_loaded_is_missing_and_stops_no_other(
    tmp_path: Path, corpus: Path, data_dir: Path, ran: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    trial, copies = write_trial(tmp_path / "t", corpus), tmp_path / "copies"
    shutil.copytree(data_dir, copies)
    (copies / "blimp" / "causative.jsonl.gz").write_bytes(b"no gzip")
    command = [str(trial), "--data-dir", str(copies), "--tasks", "sciq,blimp_causative,arc_easy"]
    assert main(command) == 1
    tasks = stored(trial)["evaluation"]["tasks"]
    assert [entry["status"] for entry in tasks.values()] == ["missing", "missing", "done"]
    assert "sciq holds no" in tasks["sciq"]["reason"] and tasks["blimp_causative"]["reason"]
    assert "missing: data_dir has no copy" in capsys.readouterr().out
    assert main([*command, "--keep-missing"]) == 1
    assert "nothing is run" in capsys.readouterr().out
    shutil.copy(data_dir / "blimp" / "causative.jsonl.gz", copies / "blimp")
    assert main(command) == 1
    assert ran[-1] == "blimp_causative" and ran.count("arc_easy") == 1


def test_weights_of_nodes_that_never_exchanged_count_by_their_mean(
    tmp_path: Path, corpus: Path, data_dir: Path
) -> None:
    trial = write_trial(tmp_path / "local", corpus, seeds=(5, 6))
    assert main([str(trial), "--data-dir", str(data_dir), "--tasks", "arc_easy"]) == 0
    single = [write_trial(tmp_path / str(seed), corpus, seeds=(seed,)) for seed in (5, 6)]
    for folder in single:
        assert main([str(folder), "--data-dir", str(data_dir), "--tasks", "arc_easy"]) == 0
    scores = [stored(folder)["metrics"]["lm_eval/arc_easy/acc_norm"] for folder in single]
    assert stored(trial)["metrics"]["lm_eval/arc_easy/acc_norm"] == pytest.approx(sum(scores) / 2)
    assert len(set(scores)) > 1


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        (["--tasks", "arc_esay"], "--tasks: (arc_esay) is not a task of lm-eval; did you mean arc_easy"),
        (["--tasks", ","], "--tasks: must name at least one task"),
        (["--tasks", "sciq", "--limit", "1"], "--limit: (1) must be at least 2"),
        (["--tasks", "sciq", "--data-dir", "/nowhere"], "--data-dir: (/nowhere) is no folder"),
    ],
)
def test_a_wrong_argument_is_one_line_and_runs_nothing(
    tmp_path: Path, corpus: Path, capsys: pytest.CaptureFixture[str], arguments: list[str], reason: str
) -> None:
    trial = write_trial(tmp_path / "t", corpus)
    assert main([str(trial), *arguments]) == 2
    said = capsys.readouterr().err
    assert reason in said and said.count("\n") == 1
    assert not (trial / "evaluation.json").exists()


def test_a_trial_without_weights_tokenizer_or_end_is_said_so(
    tmp_path: Path, corpus: Path, data_dir: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    trial = write_trial(tmp_path / "t", corpus)
    command = [str(trial), "--data-dir", str(data_dir), "--tasks", "arc_easy"]
    with exclusive(trial):
        assert main(command) == BUSY
    assert "being run by another process" in capsys.readouterr().err
    run = stored(trial, "run.json")
    (trial / "run.json").write_text(json.dumps(run | {"data_dir": str(tmp_path / "gone")}))
    assert main(command) == 1
    assert "tokenizer cannot be read" in stored(trial)["evaluation"]["tasks"]["arc_easy"]["reason"]
    shutil.rmtree(trial / "weights")
    assert main(command) == 2
    assert "no final weights" in capsys.readouterr().err
    (trial / "result.json").write_text(json.dumps(stored(trial) | {"status": "failed"}))
    assert main(command) == 2
    assert "ended as failed" in capsys.readouterr().err
