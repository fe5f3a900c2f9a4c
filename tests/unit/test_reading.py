"""Status, tables and comparisons of a study on a terminal, and as a data frame."""

from __future__ import annotations

import csv
import fcntl
import io
import json
import os
from pathlib import Path
from typing import IO, Any

import pytest

import workbench
from tests.reference.report_fixture import final_loss, write_study
from workbench import summaries as reader
from workbench.durable import write_json
from workbench.study import main


class CountingFile:
    """Notes how much is read at a time."""

    def __init__(self, file: IO[bytes], read_bytes: list[int]) -> None:
        self._file, self._read_bytes = file, read_bytes

    def __enter__(self) -> CountingFile:
        return self

    def __exit__(self, *_: object) -> None:
        self._file.close()

    def read(self, size: int) -> bytes:
        piece = self._file.read(size)
        self._read_bytes.append(len(piece))
        return piece


@pytest.fixture
def study_dir(tmp_path: Path) -> Path:
    """Two arms, one axis, three seeds; one trial failed, two have not been started."""
    return write_study(
        tmp_path / "results" / "sync_interval",
        intervals=(10, 50),
        arms=("centralized", "spes"),
        failed=["spes-interval_steps=50-seed=1"],
        missing=["spes-interval_steps=50-seed=2", "spes-interval_steps=10-seed=0"],
    )


def shown(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    assert main(list(arguments)) == 0
    return capsys.readouterr().out


def test_status_counts_trials_and_gives_the_last_words_of_those_that_failed(
    study_dir: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = shown(capsys, "status", str(study_dir))
    assert "9 trials, 6 done, 2 new, 1 failed" in out
    (line,) = [
        line for line in out.splitlines() if line.startswith("spes-interval_steps=50-seed=1") and "failed" in line
    ]
    assert "node 2 left: exit code 1" in line
    assert "last words of its log:\n  step 36 loss 9.81\n  error: loss is not finite at step 37" in out
    assert out.endswith("The command that ran the study continues it.\n")


def test_a_trial_whose_folder_is_held_runs_and_another_without_result_was_interrupted(study_dir: Path) -> None:
    trials = {entry["name"]: entry for entry in json.loads((study_dir / "study.json").read_text())["trials"]}
    running, dead = [name for name in trials if not (study_dir / "trials" / name).exists()]
    for name in (running, dead):
        (study_dir / "trials" / name / "events").mkdir(parents=True)
    events = [{"kind": "train", "step": step, "loss_nats": 1.0} for step in (10, 20)]
    text = "".join(json.dumps(event) + "\n" for event in [{"kind": "start"}, *events])
    (study_dir / "trials" / running / "events" / "node-0.jsonl").write_text(text + '{"kind": "tra')
    config = {"budget_tokens": 4096 * 480, "data": {"global_batch_sequences": 32, "sequence_length": 128}}
    (study_dir / "trials" / running / "run.json").write_text(json.dumps({"config": config}))
    held = os.open(study_dir / "trials" / running, os.O_RDONLY)
    fcntl.flock(held, fcntl.LOCK_EX)
    try:
        found = {trial.name: trial for trial in reader.summaries(study_dir)}
    finally:
        os.close(held)
    assert (found[running].status, found[running].step, found[running].total_steps) == ("running", 20, 480)
    assert found[dead].status == "interrupted"


def test_a_result_of_other_settings_counts_as_none(study_dir: Path) -> None:
    done = next(path for path in study_dir.glob("trials/*/result.json") if '"done"' in path.read_text())
    result = json.loads(done.read_text())
    result["trial"]["id"] = "another"
    write_json(done, result)
    statuses = {trial.name: trial.status for trial in reader.summaries(study_dir)}
    assert statuses[done.parent.name] == "interrupted"


def test_a_long_trial_is_summed_up_without_reading_its_curves(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """5,000 points a trial: one open and one small read of each, and the metrics are those of the whole file."""
    study_dir = write_study(tmp_path / "long", arms=("centralized",), curve_points=5_000)
    whole = {path: json.loads(path.read_text()) for path in study_dir.glob("trials/*/result.json")}
    for path, result in whole.items():
        write_json(path, result)
        assert path.stat().st_size > 500_000
    opened: list[str] = []
    read_bytes: list[int] = []
    plain_open = Path.open

    def counting_open(path: Path, *arguments: Any, **options: Any) -> Any:
        opened.append(path.name)
        file = plain_open(path, *arguments, **options)
        return CountingFile(file, read_bytes) if path.name == "result.json" else file

    monkeypatch.setattr(Path, "open", counting_open)
    found = reader.summaries(study_dir)
    monkeypatch.undo()
    assert len(found) == len(whole) == 3
    assert opened.count("result.json") == 3
    assert not [name for name in opened if name.endswith(".jsonl")]
    assert len(read_bytes) == 3
    assert sum(read_bytes) <= 3 * (1 << 16)
    by_name = {path.parent.name: result for path, result in whole.items()}
    for trial in found:
        assert trial.metrics == by_name[trial.name]["metrics"]


@pytest.mark.parametrize("indent", [None, 1, 4])
def test_a_result_that_is_laid_out_otherwise_is_read_whole(tmp_path: Path, indent: int | None) -> None:
    text = 'a text with "curves": and \n "curves": in it'
    result = {"status": "done", "error": {"message": text}, "metrics": {"eval/loss": 2.5}, "curves": {"train": []}}
    path = tmp_path / "result.json"
    path.write_text(json.dumps(result, indent=indent))
    head = reader.result_head(path)
    assert head["metrics"] == {"eval/loss": 2.5}
    assert head["error"]["message"] == text


def test_the_table_as_csv_has_every_digit(study_dir: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = shown(capsys, "table", str(study_dir), "--metrics", "eval/loss", "--csv")
    rows = list(csv.DictReader(io.StringIO(out)))
    assert len(rows) == 9
    found = {(row["arm"], row["sync.interval_steps"], row["seed"]): row["eval/loss"] for row in rows}
    assert found["spes", "10", "1"] == repr(final_loss("spes", 10, 1))
    assert found["spes", "10", "0"] == ""


def test_the_table_has_a_dash_for_what_is_missing(study_dir: Path, capsys: pytest.CaptureFixture[str]) -> None:
    lines = shown(capsys, "table", str(study_dir), "--metrics", "eval/loss", "merge/count").splitlines()
    assert lines[1].split() == ["arm", "interval_steps", "seed", "eval/loss", "merge/count", "status"]
    assert ["spes", "50", "2", "-", "-", "new"] in [line.split() for line in lines]
    assert ["centralized", "-", "0", f"{final_loss('centralized', None, 0):.5g}", "0", "done"] in [
        line.split() for line in lines
    ]


def test_the_comparison_pairs_by_seed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Worked out here: mean of the differences of equal seeds, and t(0.975, 2) = 4.302653 for three of them."""
    study_dir = write_study(tmp_path / "s", intervals=(10, 50), arms=("centralized", "spes"))
    out = shown(capsys, "compare", str(study_dir))
    apart = [final_loss("spes", 50, seed) - final_loss("centralized", None, seed) for seed in (0, 1, 2)]
    mean = sum(apart) / 3
    spread = (sum((value - mean) ** 2 for value in apart) / 2) ** 0.5
    half = 4.302653 * spread / 3**0.5
    assert f"{mean:+.4g} [{mean - half:+.4g}, {mean + half:+.4g}]" in out
    assert "eval/loss - centralized" in out


def test_the_comparison_names_another_arm_to_subtract(study_dir: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = shown(capsys, "compare", str(study_dir), "--against", "spes", "--metric", "comm/uplink_gb")
    assert "comm/uplink_gb - spes" in out
    # The centralized arm has no point on the axis, so it has two counterparts and none is chosen for it.
    (line,) = [line for line in out.splitlines() if line.startswith("centralized")]
    assert line.split()[-2:] == ["-", "-"]


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["table", "--metrics", "eval/los"], 'did you mean "eval/loss"'),
        (["compare", "--metric", "loss"], "is not a metric"),
        (["compare", "--against", "spec"], "must be an arm of the study: centralized, spes"),
    ],
)
def test_a_wrong_name_has_status_2(
    study_dir: Path, arguments: list[str], says: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([arguments[0], str(study_dir), *arguments[1:]]) == 2
    assert says in capsys.readouterr().err


def test_a_study_is_found_by_name_by_file_and_by_folder(
    study_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("any.yaml").write_text("schema: 1\nname: sync_interval\n")
    outs = {shown(capsys, "status", given) for given in ("sync_interval", "any.yaml", str(study_dir))}
    assert len(outs) == 1
    assert main(["status", "sync_intervall"]) == 2
    assert "studies in results: sync_interval" in capsys.readouterr().err


def test_the_frame_has_a_row_for_each_trial_and_every_metric(study_dir: Path) -> None:
    frame = workbench.load(study_dir)
    assert len(frame) == 9
    assert list(frame.columns[:9]) == [
        *("trial", "id", "arm", "role", "method", "seed", "status", "error", "sync.interval_steps"),
    ]
    assert frame["status"].value_counts().to_dict() == {"done": 6, "new": 2, "failed": 1}
    done = frame[(frame.arm == "spes") & (frame["sync.interval_steps"] == 10) & (frame.status == "done")]
    assert done.set_index("seed")["eval/loss"].to_dict() == {seed: final_loss("spes", 10, seed) for seed in (1, 2)}
    assert frame[frame.status != "done"]["eval/loss"].isna().all()
    assert workbench.load("sync_interval", study_dir.parent).equals(frame)
