"""Verification of a real trial: the untouched one passes and repeats its bits, every kind of forgery fails."""

from __future__ import annotations

import json
import os
import re
import shutil
import sys
import tarfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.small_corpora import texts
from workbench import study, verify
from workbench.corpora import prepare_corpus
from workbench.execute import ExecutionSettings, run_trial
from workbench.launch.local import open_launcher
from workbench.provenance import collect
from workbench.spec import read_study
from workbench.store import StudyFolder
from workbench.trials import Corpus, expand, identify

pytestmark = [
    pytest.mark.processes,
    pytest.mark.skipif(sys.platform != "linux", reason="needs Linux: the fork server ends its children with prctl"),
]

STUDY = """\
schema: 1
name: small
question: Does the same run give the same bits?
run:
  nodes: 2
  budget_tokens: 1_024
  model: {num_layers: 1, d_model: 16, num_heads: 2, num_kv_heads: 2, num_experts: 4, expert_hidden: 16, vocab_size: 300}
  data: {corpus: corpus, tokenizer_vocab_size: 300, validation_fraction: 0.2, sequence_length: 32,
         global_batch_sequences: 8}
  sync: {interval_steps: 2}
  merge: {num_neighbours: 1, interval_steps: 2, until_step: 4}
  validation: {max_sequences: 8}
  log: {interval_steps: 1}
arms: {spes: {method: spes}}
"""


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of results of a study that has run once, under a path that shells and URLs misread."""
    folder = tmp_path_factory.mktemp('l\'été "ä" 日本 $HOME %41')
    (folder / "corpus").mkdir()
    for number, words in enumerate(texts(80)):
        (folder / "corpus" / f"{number}.txt").write_text(words, encoding="utf-8")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(folder / "cache"))
        patch.chdir(folder)
        (folder / "small.yaml").write_text(STUDY, encoding="utf-8")
        plan = read_study(Path("small.yaml"))
        variants = expand(plan)
        corpus = prepare_corpus(Corpus.of(variants[0].config.data))
        (trial,) = identify(plan, variants, lambda _: corpus.header.digest)
        results = StudyFolder(folder / "results" / "small")
        results.write_study(plan, [trial], "python -m workbench.study small.yaml", collect())
        settings = ExecutionSettings(data_dir=corpus.folder, device="cpu", provenance=collect())
        with open_launcher() as launcher:
            assert run_trial(trial, results.trial_dir(trial), settings, launcher)["status"] == "done"
    return folder / "results" / "small"


def trial_of(study_dir: Path) -> Path:
    (trial_dir,) = (study_dir / "trials").iterdir()
    return trial_dir


@pytest.fixture
def copy(made: Path, tmp_path: Path) -> Path:
    """A copy of the trial in a folder of results that was moved elsewhere."""
    shutil.copytree(made, tmp_path / "moved" / "small")
    return trial_of(tmp_path / "moved" / "small")


def contents(folder: Path) -> dict[str, tuple[bytes, int]]:
    files = (path for path in folder.rglob("*") if path.is_file())
    return {str(path.relative_to(folder)): (path.read_bytes(), path.stat().st_mtime_ns) for path in files}


def change(path: Path, old: str, new: str) -> None:
    text = path.read_text(encoding="utf-8")
    assert re.search(old, text), f"{old} is not in {path}"
    path.write_text(re.sub(old, new, text, count=1), encoding="utf-8")


def test_a_trial_run_again_gives_the_same_bits_and_its_folder_is_only_read(
    made: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    before = contents(made)
    for path in [made, *made.rglob("*")]:
        path.chmod(0o555 if path.is_dir() else 0o444)
    try:
        status = verify.main([str(made / trial_of(made).name), "--scratch", str(tmp_path)])
    finally:
        for path in [made, *made.rglob("*")]:
            path.chmod(0o755 if path.is_dir() else 0o644)
    out = capsys.readouterr().out
    assert status == 0, out
    assert "code, packages and hardware are those of the trial" in out
    assert "equal bits are asked for" in out
    for line in ("weights after each round", "weights/final.safetensors", "eval/loss", "uplink_payload_bytes by round"):
        assert re.search(rf"^{line}.*PASS$", out, re.MULTILINE), f"{line}\n{out}"
    assert contents(made) == before
    assert list(tmp_path.iterdir()) == []


def test_an_invented_trial_whose_files_fit_together_is_found_out_by_running_it(
    copy: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Events and result.json tell of lower losses, consistently; only training shows that they are not so."""
    from workbench.durable import write_json
    from workbench.results import build_result

    for path in copy.glob("events/node-*.jsonl"):
        events = [json.loads(line) for line in path.read_text().splitlines()]
        for event in events:
            if event["kind"] == "validation":
                event["loss_sum_nats"] *= 0.9999
        path.write_text("".join(json.dumps(event) + "\n" for event in events))
    write_json(copy / "result.json", build_result(copy))
    assert verify.main([str(copy), "--quick"]) == 0
    assert verify.main([str(copy)]) == 1
    out = capsys.readouterr().out
    assert re.search(r"^eval/loss.*\(\+0\.01%\).*FAIL$", out, re.MULTILINE), out
    assert "do not hold: eval/loss, validation curve" in out


def _flip_weights(trial: Path) -> None:
    path = trial / "weights/final.safetensors"
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)


FORGERIES: dict[str, tuple[Callable[[Path], Any], str]] = {
    "a loss in result.json": (
        lambda trial: change(trial / "result.json", r'"eval/loss": \d', '"eval/loss": 0'),
        "result.json: metrics.eval/loss",
    ),
    "a loss in an event": (
        lambda trial: change(trial / "events/node-1.jsonl", r'"loss_sum_nats": ', '"loss_sum_nats": 1'),
        "result.json: curves.validation[0].loss_nats",
    ),
    "bytes at the server": (
        lambda trial: change(trial / "events/server.jsonl", r'payload_bytes": \{"0": \d', 'payload_bytes": {"0": 7'),
        "result.json: rounds[0].uplink_payload_bytes[0]",
    ),
    "a setting": (
        lambda trial: change(trial / "run.json", r'"lr": 0\.003', '"lr": 0.004'),
        "result.json: config.optim.lr",
    ),
    "the same setting in both files": (
        lambda trial: [change(trial / name, r'"lr": 0\.003', '"lr": 0.004') for name in ("run.json", "result.json")],
        "trial id",
    ),
    "the data": (
        lambda trial: change(trial / "trial.json", r'"digest": "\w', '"digest": "0x'),
        "result.json: data.digest",
    ),
    "the weights of a round at one node": (
        lambda trial: change(trial / "events/node-0.jsonl", r'"digest": "\w', '"digest": "0x'),
        "weights of node 0",
    ),
    "one bit of the final weights": (_flip_weights, "weights/final.safetensors"),
    "a torn line": (
        lambda trial: change(trial / "events/node-0.jsonl", r"\}\n", "\n"),
        "events/node-0.jsonl:1",
    ),
    "no events of a node": (lambda trial: (trial / "events/node-1.jsonl").unlink(), "result.json"),
    "a missing field": (lambda trial: change(trial / "events/server.jsonl", '"merged"', '"was_merged"'), "files"),
}


@pytest.mark.parametrize("forgery", FORGERIES)
def test_a_forgery_is_named_without_training(copy: Path, forgery: str, capsys: pytest.CaptureFixture[str]) -> None:
    forge, named = FORGERIES[forgery]
    assert verify.main([str(copy), "--quick"]) == 0
    forge(copy)
    capsys.readouterr()
    assert verify.main([str(copy), "--quick"]) == 1
    lines = capsys.readouterr().out.splitlines()
    assert any(line.startswith(named) and line.endswith("FAIL") for line in lines), "\n".join(lines)


def test_a_forged_trial_is_not_trained(copy: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(verify, "_repeat", lambda *_: pytest.fail("trained"))
    change(copy / "result.json", r'"eval/loss": \d', '"eval/loss": 0')
    assert verify.main([str(copy)]) == 1


def test_other_data_are_a_failure_without_training(
    copy: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(verify, "_train", lambda *_: pytest.fail("trained"))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    (tmp_path / "other").mkdir()
    for number, words in enumerate(texts(80, seed=1)):
        (tmp_path / "other" / f"{number}.txt").write_text(words, encoding="utf-8")
    assert verify.main([str(copy), "--corpus", str(tmp_path / "other")]) == 1
    assert re.search(r"^data digest.*FAIL$", capsys.readouterr().out, re.MULTILINE)


@pytest.mark.parametrize(
    ("break_it", "says"),
    [
        (lambda trial: shutil.rmtree(trial), "does not exist"),
        (lambda trial: (trial / "result.json").unlink(), "no readable result.json"),
        (lambda trial: (trial / "run.json").write_text("{"), "no readable run.json"),
    ],
)
def test_bad_input_has_status_2(
    copy: Path, break_it: Callable[[Path], Any], says: str, capsys: pytest.CaptureFixture[str]
) -> None:
    break_it(copy)
    assert verify.main([str(copy)]) == 2
    assert says in capsys.readouterr().err


# --- Export ---


def test_an_exported_study_unpacks_elsewhere_and_verifies(
    made: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    report = tmp_path / "reports" / "small"
    report.mkdir(parents=True)
    (report / "index.html").write_text("<p>report")
    archive = tmp_path / "une étude.tar.gz"
    assert study.main(["export", str(made), "--out", str(archive), "--weights"]) == 0
    with tarfile.open(archive) as packed:
        names = packed.getnames()
        packed.extractall(tmp_path / "there", filter="data")
    assert "small/report/index.html" in names
    assert not [name for name in names if "token" in name or "address" in name or "checkpoints" in name]
    trial_dir = trial_of(tmp_path / "there" / "small")
    capsys.readouterr()
    assert verify.main([str(trial_dir), "--quick"]) == 0
    assert re.search(r"^manifest.json.*PASS$", capsys.readouterr().out, re.MULTILINE)
    log = next(trial_dir.glob("logs/*.log"))
    log.write_text(log.read_text() + "and more")
    assert verify.main([str(trial_dir), "--quick"]) == 1
    assert f"changed or missing: logs/{log.name}" in capsys.readouterr().out


def test_the_same_results_give_the_same_archive_and_none_is_overwritten(
    made: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    shutil.copytree(made, tmp_path / "small")
    for path in (tmp_path / "small").rglob("*"):
        os.utime(path, (1, 1))
    one, other = tmp_path / "one.tar.gz", tmp_path / "other.tar.gz"
    reports = ["--reports", str(tmp_path / "none")]
    for source, out in ((made, one), (tmp_path / "small", other)):
        assert study.main(["export", str(source), "--out", str(out), *reports]) == 0
    assert one.read_bytes() == other.read_bytes()
    before = one.read_bytes()
    assert study.main(["export", str(made), "--out", str(one), *reports]) == 2
    assert "is not overwritten" in capsys.readouterr().err
    assert one.read_bytes() == before
    assert not list(tmp_path.glob(".*"))
