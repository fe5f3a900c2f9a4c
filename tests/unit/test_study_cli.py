"""The command `python -m workbench.study`: exit codes, what bad input leaves behind, the plan, and continuing."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from workbench import campaign
from workbench.mirrored import DATABASE, digest, note
from workbench.progress import Progress
from workbench.stopping import Rule, StopRequest
from workbench.store import StudyFolder
from workbench.study import main
from workbench.terminal import LiveLines, PlainLines, duration, progress_text
from workbench.trials import Trial

STUDY = """\
schema: 1
name: probe
question: What happens?
defaults: [model/tiny, data/default]
run:
  nodes: 2
  budget_tokens: 40_960
  data: {corpus: CORPUS, tokenizer_vocab_size: 300, sequence_length: 16}
arms:
  dilico: {method: dilico}
  spes: {method: spes}
sweep: {grid: {sync.interval_steps: [5, 10]}}
"""


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("cache")


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("corpus")
    for number in range(60):
        (folder / f"{number}.txt").write_text(" ".join(f"word{number * index % 97}" for index in range(400)))
    return folder


@pytest.fixture
def study_file(tmp_path: Path, corpus: Path, cache: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A study in an empty current folder, with a cache of its own."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(cache))
    monkeypatch.chdir(tmp_path)
    path = tmp_path / "probe.yaml"
    path.write_text(STUDY.replace("CORPUS", str(corpus)))
    return path


class Engine:
    """Stands in for processes, MLflow and the report: answers each trial with a result of the wanted status."""

    def __init__(self) -> None:
        self.statuses: dict[str, str] = {}
        self.errors: dict[str, dict[str, Any]] = {}
        self.ran: list[str] = []
        self.mirrored: list[str] = []
        self.caught_up = 0
        self.reports = 0
        self.stop_after: int | None = None

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
        status = self.statuses.get(self.ran[-1], "done")
        if self.stop_after == len(self.ran):
            stop_request.signal, status = 2, "interrupted"
        result = {
            "trial": {"id": trial.id},
            "status": status,
            "error": None if status == "done" else self.errors.get(self.ran[-1], {"message": "it broke"}),
            "metrics": {"eval/loss": 2.5, "comm/uplink_gb": 0.25} if status == "done" else {},
            "provenance": settings.provenance,
        }
        trial_dir.mkdir(parents=True, exist_ok=True)
        (trial_dir / "result.json").write_text(json.dumps(result))
        return result

    def render_report(self, study_dir: Path, report_dir: Path) -> Path:
        self.reports += 1
        report_dir.mkdir(parents=True, exist_ok=True)
        (report_dir / "index.html").write_text("report")
        return report_dir / "index.html"


class NoLauncher:
    def __enter__(self) -> NoLauncher:
        return self

    def __exit__(self, *_: object) -> None:
        pass


@pytest.fixture
def engine(monkeypatch: pytest.MonkeyPatch) -> Engine:
    engine = Engine()

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
    monkeypatch.setattr(campaign, "Mirror", Mirror)
    monkeypatch.setattr(campaign, "render_report", engine.render_report)
    return engine


ALL = [f"{arm}-interval_steps={interval}-seed=0" for arm in ("dilico", "spes") for interval in (5, 10)]


# --- Bad input ---


def test_no_argument_shows_help(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([]) == 0
    shown = capsys.readouterr().out
    assert "exit codes:" in shown
    assert "run.nodes=2" in shown


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["run.nods=2"], 'run.nods is not a setting; did you mean "nodes"?'),
        (["run.merge.num_neighbours=16"], "run.merge.num_neighbours (16) must be below model.num_experts (16)"),
        (["sweep.grid.sync.interval_steps=[0]"], "sweep.grid.sync.interval_steps (0) must be at least 1"),
        (["run.data.sequence_length=128", "run.nodes=16"], "run.nodes (16) needs 16 validation sequences"),
        (
            ["run.budget_tokens=1e6", "run.data.global_batch_sequences=10000"],
            "run.data.global_batch_sequences (10000) must not exceed the",
        ),
        (["run.data.corpus=/no/such"], "run.data.corpus cannot be used: "),
        (["launcher.port=70000"], "launcher.port (70000) must be between 0 and 65535"),
    ],
)
def test_bad_setting_exits_2_with_one_line_and_creates_nothing(
    study_file: Path, capsys: pytest.CaptureFixture[str], arguments: list[str], message: str
) -> None:
    assert main(["probe.yaml", *arguments]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith(f"error: override {arguments[-1]}: {message}")
    assert [path.name for path in study_file.parent.iterdir()] == ["probe.yaml"]


@pytest.mark.parametrize(
    ("old", "new", "mistake"),
    [
        ("nodes: 2", "nods: 2", '6: run.nods is not a setting; did you mean "nodes"?'),
        ("nodes: 2", "nodes: 2\n  nodes: 4", "7: run.nodes is given twice, first on line 6; keep one"),
        ("question: What", "question: [What", "3:24: not valid YAML: "),
        ("nodes: 2", "nodes: 3", "6: run.data.global_batch_sequences (16) must be a multiple of nodes"),
    ],
)
def test_bad_file_exits_2_with_one_line_and_creates_nothing(
    study_file: Path, capsys: pytest.CaptureFixture[str], old: str, new: str, mistake: str
) -> None:
    study_file.write_text(study_file.read_text().replace(old, new))
    assert main(["probe.yaml"]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith(f"error: probe.yaml:{mistake}")
    assert [path.name for path in study_file.parent.iterdir()] == ["probe.yaml"]


def test_taken_port_exits_2_and_creates_nothing(study_file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        assert main(["probe.yaml", f"launcher.port={port}"]) == 2
        assert f"launcher.port ({port}) cannot be listened on: Address already in use" in capsys.readouterr().err
        assert main(["probe.yaml", f"launcher.port={port - 1}", "run.server.shards=2"]) == 2
    assert f"launcher.port ({port - 1}; one of 2 servers takes {port}) cannot be" in capsys.readouterr().err
    assert [path.name for path in study_file.parent.iterdir()] == ["probe.yaml"]


@pytest.mark.parametrize("option", ["--results", "--reports"])
def test_folder_that_takes_no_files_exits_2(study_file: Path, capsys: pytest.CaptureFixture[str], option: str) -> None:
    assert main(["probe.yaml", option, "probe.yaml"]) == 2
    assert capsys.readouterr().err.startswith(f"error: {option}: {study_file} is a file; name another")


def test_corpus_of_unprepared_unreadable_files_exits_2(
    study_file: Path, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    (tmp_path / "broken.jsonl").write_text("not json\n")
    assert main(["probe.yaml", "run.data.corpus=broken.jsonl"]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("error: override run.data.corpus=broken.jsonl: run.data.corpus cannot be used: ")
    assert not (tmp_path / "results").exists()


def test_missing_study_exits_2(study_file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["prob.yaml"]) == 2
    assert capsys.readouterr().err == 'error: prob.yaml: no such file in .; did you mean "probe.yaml"?\n'


def test_unreadable_study_exits_2(study_file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    study_file.write_bytes(b"name: \xff\xfe")
    assert main(["probe.yaml"]) == 2
    assert capsys.readouterr().err == "error: probe.yaml: cannot be read: it is not UTF-8 text\n"
    assert main(["."]) == 2
    assert "cannot be read: Is a directory" in capsys.readouterr().err


# --- The plan ---


def test_dry_run_lists_the_trials_and_creates_nothing(
    study_file: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "empty"))
    assert main(["probe.yaml", "--dry-run"]) == 0
    shown = capsys.readouterr().out
    assert [name for name in ALL if name in shown] == ALL
    assert "data not prepared yet" in shown
    assert [path.name for path in tmp_path.iterdir()] == ["probe.yaml"]


def test_dry_run_says_what_is_done(study_file: Path, engine: Engine, capsys: pytest.CaptureFixture[str]) -> None:
    engine.statuses = {ALL[1]: "failed"}
    engine.stop_after = 3
    main(["probe.yaml"])
    capsys.readouterr()
    assert main(["--dry-run", "probe.yaml"]) == 0
    lines = [line for line in capsys.readouterr().out.splitlines() if "seed=0" in line]
    endings = ("done", "failed (--retry-failed runs it again)", "will run (was interrupted)", "will run")
    assert all(line.endswith(ending) for line, ending in zip(lines, endings, strict=True))


def test_dry_run_loads_no_heavy_package(study_file: Path) -> None:
    code = (
        "import sys; from workbench.study import main; code = main(['probe.yaml', '--dry-run']);"
        "heavy = {'torch', 'numpy', 'mlflow', 'grpc', 'pandas', 'matplotlib', 'tokenizers'} & sys.modules.keys();"
        "assert not heavy, heavy; sys.exit(code)"
    )
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")


# --- Running and continuing ---


def test_study_runs_every_trial_mirrors_it_and_reports(
    study_file: Path, engine: Engine, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["probe.yaml", "run.optim.lr=1e-3"]) == 0
    assert engine.ran == ALL
    assert [name.rpartition("-")[0] for name in engine.mirrored] == ALL
    study = json.loads((study_file.parent / "results/probe/study.json").read_text())
    assert study["command"] == "python -m workbench.study probe.yaml run.optim.lr=1e-3"
    assert [trial["name"].rpartition("-")[0] for trial in study["trials"]] == ALL
    assert study["arms"][1] == {"name": "spes", "method": "spes", "role": "treatment"}
    assert study["overrides"] == ["run.optim.lr=1e-3"]
    lines = capsys.readouterr().out.splitlines()
    assert lines[-1] == "report: reports/probe/index.html"
    assert lines[-2].split() == ["spes", "10", "0", "2.5000", "0.25", "-", "-", "done"]


def test_same_command_again_runs_nothing_and_says_so(
    study_file: Path, engine: Engine, capsys: pytest.CaptureFixture[str]
) -> None:
    main(["probe.yaml"])
    engine.ran.clear()
    capsys.readouterr()
    assert main(["probe.yaml"]) == 0
    assert engine.ran == []
    assert engine.reports == 1
    shown = capsys.readouterr().out
    assert "4 of 4 trials are done already and are not run again" in shown
    assert shown.endswith("report: reports/probe/index.html\n")


@pytest.mark.parametrize("change", ["report", "setting", "result"])
def test_report_is_written_again_when_it_may_differ(study_file: Path, engine: Engine, change: str) -> None:
    main(["probe.yaml"])
    if change == "report":
        (study_file.parent / "reports/probe/index.html").unlink()
    if change == "result":
        next(study_file.parent.glob("results/probe/trials/*/result.json")).touch()
    main(["probe.yaml", *(["report.tolerance=0.5"] if change == "setting" else [])])
    assert engine.reports == 2


def test_mirror_catches_up_when_nothing_is_left_to_run_and_is_not_started_for_nothing(
    study_file: Path, engine: Engine
) -> None:
    main(["probe.yaml"])
    study_dir = study_file.parent / "results/probe"
    main(["probe.yaml"])
    assert engine.caught_up == 2
    (study_dir.parent / DATABASE).touch()
    for path in study_dir.glob("trials/*/result.json"):
        note(path.parent, digest(path.read_bytes()))
    main(["probe.yaml"])
    assert engine.caught_up == 2
    (study_dir.parent / DATABASE).unlink()
    main(["probe.yaml"])
    assert engine.caught_up == 3


def test_study_keeps_when_it_was_first_written(study_file: Path, engine: Engine) -> None:
    main(["probe.yaml"])
    file = study_file.parent / "results/probe/study.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"created_at": "2001-02-03T04:05:06+00:00"}))
    main(["probe.yaml", "report.tolerance=0.5"])
    study = json.loads(file.read_text())
    assert (study["created_at"], study["report"]["tolerance"]) == ("2001-02-03T04:05:06+00:00", 0.5)


def test_command_and_study_file_are_without_the_folders_of_this_machine(study_file: Path, engine: Engine) -> None:
    folder = study_file.parent
    corpus = f"run.data.corpus={folder / 'elsewhere'}"
    elsewhere = folder.parent / "outside.yaml"
    elsewhere.write_text(study_file.read_text())
    (folder / "elsewhere").symlink_to(next(line for line in study_file.read_text().split("{") if "corpus:" in line)
                                      .split(",")[0].removeprefix("corpus: "))  # fmt: skip
    main([str(elsewhere), corpus, "--results", str(folder / "r")])
    study = json.loads((folder / "r/probe/study.json").read_text())
    assert study["command"] == "python -m workbench.study outside.yaml run.data.corpus=elsewhere --results r"
    assert study["study_file"] == "outside.yaml"


def test_added_values_run_only_what_is_new(study_file: Path, engine: Engine) -> None:
    main(["probe.yaml"])
    engine.ran.clear()
    assert main(["probe.yaml", "sweep.grid.sync.interval_steps=[5,7]", "~arms.dilico", "launcher.threads=2"]) == 0
    assert engine.ran == ["spes-interval_steps=7-seed=0"]


def test_failed_trials_stay_failed_until_asked_for(
    study_file: Path, engine: Engine, capsys: pytest.CaptureFixture[str]
) -> None:
    engine.statuses = {ALL[2]: "failed", ALL[3]: "timeout"}
    engine.errors = {ALL[2]: {"message": "node-1: no space left", "log_tail": ["error: no space left"]}}
    assert main(["probe.yaml"]) == 1
    assert engine.reports == 1
    assert "failed: node-1: no space left" in capsys.readouterr().out
    engine.ran.clear()
    engine.statuses = {}
    assert main(["probe.yaml"]) == 1
    assert engine.ran == []
    assert "2 trials failed earlier and stay so; --retry-failed runs them again" in capsys.readouterr().out
    assert main(["probe.yaml", "--retry-failed"]) == 0
    assert engine.ran == ALL[2:]


def test_interruption_stops_at_once_and_the_same_command_continues(study_file: Path, engine: Engine) -> None:
    engine.stop_after = 2
    assert main(["probe.yaml"]) == 130
    assert engine.ran == ALL[:2]
    assert engine.reports == 0
    engine.stop_after = None
    assert main(["probe.yaml"]) == 0
    assert engine.ran == [*ALL[:2], *ALL[1:]]


@pytest.mark.parametrize(
    ("log_tail", "starts"),
    [
        ([], 3),
        (["step 5"], 3),
        (["error: the corpus is gone"], 1),
        (["Traceback (most recent call last):"], 1),
    ],
)
def test_only_a_process_that_died_without_a_word_is_started_again(
    study_file: Path, engine: Engine, log_tail: list[str], starts: int
) -> None:
    engine.statuses, engine.errors = {ALL[0]: "failed"}, {ALL[0]: {"message": "died", "log_tail": log_tail}}
    main(["probe.yaml", "resources.retries=2"])
    assert engine.ran.count(ALL[0]) == starts
    assert engine.ran.count(ALL[1]) == 1


def test_results_of_other_code_are_kept_but_named(
    study_file: Path, engine: Engine, capsys: pytest.CaptureFixture[str]
) -> None:
    main(["probe.yaml"])
    (result_file, *_) = sorted(study_file.parent.glob("results/probe/trials/*/result.json"))
    result = json.loads(result_file.read_text())
    result["provenance"]["code_digest"] = "0" * 64
    result_file.write_text(json.dumps(result))
    capsys.readouterr()
    assert main(["probe.yaml"]) == 0
    assert "warning: 1 of the done trials were made by other code than the present" in capsys.readouterr().out


def test_result_of_another_identity_or_torn_by_hand_is_no_result(study_file: Path, engine: Engine) -> None:
    main(["probe.yaml"])
    engine.ran.clear()
    first, second, *_ = sorted(study_file.parent.glob("results/probe/trials/*/result.json"))
    first.write_text(first.read_text().replace('"id": "', '"id": "0'))
    second.write_text("{")
    main(["probe.yaml"])
    assert len(engine.ran) == 2


def test_results_and_reports_go_where_they_are_told(study_file: Path, engine: Engine, tmp_path: Path) -> None:
    assert main(["probe.yaml", "--results", "a b/ü", "--reports", "c"]) == 0
    assert len(list(tmp_path.glob("a b/ü/probe/trials/*/result.json"))) == len(ALL)
    assert not (tmp_path / "results").exists()


def test_folder_of_a_trial_is_its_name(tmp_path: Path) -> None:
    trial = Trial.__new__(Trial)
    object.__setattr__(trial, "name", "spes-seed=0-0123abcd")
    assert StudyFolder(tmp_path).trial_dir(trial) == tmp_path / "trials" / "spes-seed=0-0123abcd"


# --- Progress ---


def test_progress_is_one_line_with_everything_asked_for(capsys: pytest.CaptureFixture[str]) -> None:
    progress = Progress(
        trial="t", step=120, total_steps=390, loss_nats=4.3214, tokens_per_s=12345.6, round=12, elapsed_s=60.0
    )
    assert progress_text(progress) == "step 120/390  loss 4.321  12,346 tokens/s  round 12  ETA 2:15"
    with PlainLines(9) as lines:
        lines.start(2, "t")
        lines.update(progress)
        lines.finish("t", "done")
    assert capsys.readouterr().out == "[2/9] t  starting\n[2/9] t  done\n"


@pytest.mark.parametrize("kind", [PlainLines, LiveLines])
def test_each_of_several_running_trials_has_its_own_line(
    kind: type[PlainLines | LiveLines], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    monkeypatch.setattr("workbench.terminal.PLAIN_INTERVAL_S", 0.0)
    known = {"total_steps": 10, "loss_nats": 2.5, "tokens_per_s": 7.0, "round": 1, "elapsed_s": 1.0}
    with kind(3) as lines:
        lines.start(1, "first")
        lines.start(2, "second")
        lines.update(Progress(trial="second", step=5, **known))
        lines.update(Progress(trial="first", step=4, **known))
        lines.finish("second", "done [2]")
    shown = capsys.readouterr().out.splitlines()
    assert "[2/3] second  done [2]" in shown
    assert any("first" in line and "step 4/10" in line for line in shown)


def test_progress_before_the_first_step_has_no_numbers() -> None:
    progress = Progress(trial="t", step=0, total_steps=9, loss_nats=None, tokens_per_s=None, round=0, elapsed_s=1.0)
    assert progress_text(progress) == "step 0/9  loss ?  ? tokens/s  round 0  ETA ?"


@pytest.mark.parametrize(("seconds", "text"), [(0.4, "0:00"), (65, "1:05"), (3723, "1:02:03"), (None, "?")])
def test_durations_read_like_a_clock(seconds: float | None, text: str) -> None:
    assert duration(seconds) == text


def test_a_study_nested_without_end_is_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "deep.yaml"
    path.write_text("schema: 1\nname: deep\nquestion: " + "[" * 3000 + "]" * 3000 + "\n")
    assert main([str(path), "--dry-run"]) == 2
    assert len(capsys.readouterr().err.splitlines()) == 1


def test_a_reader_that_has_seen_enough_is_no_traceback(study_file: Path) -> None:
    command = f"{sys.executable} -m workbench.study {study_file} --dry-run | head -c 1"
    done = subprocess.run(["bash", "-c", command], capture_output=True, text=True, check=False)
    assert "Traceback" not in done.stderr
