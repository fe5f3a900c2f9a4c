"""The evaluation of a study's trials in a process of its own: its failures, its end, and who is evaluated when."""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("lm_eval", reason="needs the evaluation extra")

from tests.small_trials import prepare_corpus, write_tasks, write_trial
from workbench.evaluating import LOG, Evaluations
from workbench.execute import exclusive
from workbench.settings import Evaluation

LIMIT_S = 60.0


def never() -> bool:
    return False


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return prepare_corpus(tmp_path_factory.mktemp("corpus"))


def evaluations(tasks: tuple[str, ...] = ("arc_easy", "piqa"), **more: Any) -> Evaluations:
    settings = {"device": "cpu", "threads": 1, "timeout_s": None}
    return Evaluations(settings=Evaluation(tasks=tasks), **{**settings, **more})


def stored(trial: Path) -> dict[str, Any]:
    content: dict[str, Any] = json.loads((trial / "result.json").read_text())
    return content


def instead(monkeypatch: pytest.MonkeyPatch, program: str) -> None:
    """Run a program in place of the command."""
    monkeypatch.setattr(Evaluations, "_command", lambda *_, **__: [sys.executable, "-c", program])


@pytest.mark.parametrize(
    ("program", "reason"),
    [
        ("import os; os.kill(os.getpid(), 9)", "its process ended with status -9: without a word"),
        ("raise RuntimeError('it broke')", "its process ended with status 1: RuntimeError: it broke"),
        ("print('error: nothing'); raise SystemExit(2)", "its process ended with status 2: error: nothing"),
    ],
)
def test_an_evaluation_that_fails_leaves_the_trial_done_and_says_what_is_missing(
    tmp_path: Path, corpus: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str],
    program: str, reason: str,
) -> None:  # fmt: skip
    trial = write_trial(tmp_path / "t", corpus)
    instead(monkeypatch, program)
    wanted = evaluations()
    result = wanted.complete(trial, stored(trial), never)
    assert result == stored(trial) and result["status"] == "done"
    assert {entry["reason"] for entry in result["evaluation"]["tasks"].values()} == {reason}
    wanted.say_missing([trial])
    assert f"missing: the score of piqa of t: {reason}" in capsys.readouterr().out
    instead(monkeypatch, "raise SystemExit('it must not be run again by itself')")
    assert wanted.catch_up([trial], never, retry=False) == 0
    instead(monkeypatch, "raise SystemExit(1)")
    assert wanted.catch_up([trial], never, retry=True) == 1
    again = wanted.complete(trial, stored(trial), never, retry=True)["evaluation"]["tasks"]["piqa"]["reason"]
    assert again in (reason, "its process ended with status 1: without a word"), "no words of an earlier process"


def test_the_user_s_stop_ends_the_process_and_the_next_run_takes_it_up(
    tmp_path: Path, corpus: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    trial = write_trial(tmp_path / "t", corpus)
    pid_file = tmp_path / "pid"
    instead(monkeypatch, f"import os, time; open({str(pid_file)!r}, 'w').write(str(os.getpid())); time.sleep(600)")
    before = stored(trial)
    assert evaluations().complete(trial, before, lambda: pid_file.exists() and pid_file.read_text() != "") == before
    with pytest.raises(ProcessLookupError):
        os.kill(int(pid_file.read_text()), 0)
    assert stored(trial) == before
    started_s = time.monotonic()
    result = evaluations(timeout_s=0.3).complete(trial, before, never)
    assert time.monotonic() - started_s < LIMIT_S
    assert result["evaluation"]["tasks"]["piqa"]["reason"] == "resources.timeout (0.3 s) was reached"


@pytest.mark.parametrize(("gpus", "seen"), [(("1", "GPU-3"), "1,GPU-3"), ((), ""), (None, "as it was")])
def test_an_evaluation_sees_the_gpus_of_its_trial_alone(
    tmp_path: Path, corpus: Path, monkeypatch: pytest.MonkeyPatch, gpus: tuple[str, ...] | None, seen: str
) -> None:
    trial = write_trial(tmp_path / "t", corpus)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "as it was")
    instead(
        monkeypatch, "import os; print('error: sees', os.environ['CUDA_VISIBLE_DEVICES'] + '|'); raise SystemExit(2)"
    )
    result = evaluations().complete(trial, stored(trial), never, gpus=gpus)
    assert result["evaluation"]["tasks"]["piqa"]["reason"].endswith(f"error: sees {seen}|")


def test_what_another_process_evaluates_is_left_to_it(tmp_path: Path, corpus: Path) -> None:
    trial = write_trial(tmp_path / "t", corpus)
    before = stored(trial)
    with exclusive(trial):
        assert evaluations().complete(trial, before, never) == before
    assert "is being run by another process" in (trial / "logs" / LOG).read_text()
    assert stored(trial) == before and not (trial / "evaluation.json").exists()


def test_why_an_evaluation_crashed_is_stored_only_while_no_other_has_the_trial(
    tmp_path: Path, corpus: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    trial = write_trial(tmp_path / "t", corpus)
    instead(monkeypatch, "raise SystemExit(1)")
    before = stored(trial)
    with exclusive(trial):
        assert evaluations().complete(trial, before, never) == before
    assert not (trial / "evaluation.json").exists()
    evaluations().complete(trial, before, never)
    assert (trial / "evaluation.json").exists()


def test_only_trials_that_are_done_and_lack_scores_are_evaluated(
    tmp_path: Path, corpus: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    trial = write_trial(tmp_path / "t", corpus)
    instead(monkeypatch, "raise SystemExit('no')")
    assert evaluations(()).catch_up([trial], never, retry=True) == 0
    failed = stored(trial) | {"status": "failed"}
    assert evaluations().complete(trial, failed, never) == failed
    assert evaluations().catch_up([trial, tmp_path / "none"], never, retry=False) == 1
    more = evaluations(("arc_easy", "sciq"))
    assert more.catch_up([trial], never, retry=False) == 1
    assert list(stored(trial)["evaluation"]["tasks"]) == ["arc_easy", "piqa", "sciq"]


def test_the_real_process_scores_a_trial(tmp_path: Path, corpus: Path) -> None:
    trial, data_dir = write_trial(tmp_path / "t", corpus), write_tasks(tmp_path / "eval", items=4)
    settings = Evaluation(tasks=("blimp_causative", "sciq"), data_dir=str(data_dir), limit=3)
    real = Evaluations(settings=settings, device="cpu", threads=1, timeout_s=None)
    result = real.complete(trial, stored(trial), never)
    assert 0 <= result["metrics"]["lm_eval/blimp_causative/acc"] <= 1, (trial / "logs" / LOG).read_text()
    assert "data_dir has no copy" in result["evaluation"]["tasks"]["sciq"]["reason"]
    assert "blimp_causative  acc" in (trial / "logs" / LOG).read_text()
    assert real.catch_up([trial], never, retry=False) == 0
