"""The README is true: its commands run in an empty folder, and the study that it shows plans."""

from __future__ import annotations

import contextlib
import io
import json
import os
import re
import runpy
import shlex
import subprocess
import sys
import tarfile
import warnings
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml

from spes_core.config import RunConfig
from spes_core.rules import check
from spes_core.structure import build

# One worker for the file: what one test runs, others read.
pytestmark = [pytest.mark.processes, pytest.mark.xdist_group("readme")]

ROOT = Path(__file__).resolve().parents[2]
README = (ROOT / "README.md").read_text(encoding="utf-8")
# Training for as long as a reader would is left to the reader; the path is the same with fewer tokens.
SHORTER = ["run.budget_tokens=20_480", "run.validation.max_sequences=8"]


def commands() -> list[str]:
    blocks = re.findall(r"```console\n(.*?)```", README, re.DOTALL)
    lines = [
        line[2:].split(" #")[0].strip() for block in blocks for line in block.splitlines() if line.startswith("$ ")
    ]
    return [line for line in lines if line.startswith("python -m ")]


def run(command: str, folder: Path, extra: list[str]) -> str:
    words = [sys.executable, *shlex.split(command)[1:], *extra]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "COLUMNS": "200"}
    done = subprocess.run(words, cwd=folder, env=environment, capture_output=True, text=True, check=False, timeout=300)
    assert done.returncode == 0, f"{command}\n{done.stdout}\n{done.stderr}"
    return done.stdout


@pytest.fixture(scope="module")
def empty_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("a user's folder")
    (folder / "studies").symlink_to(ROOT / "studies")
    return folder


ELSEWHERE = {
    "spes_core.hf": "tests/unit/test_hf_*.py: they need transformers and a dense model",
    "spes_core.server": "tests/processes/test_credentials.py and test_server_process.py: they go on for ever",
    "spes_core.node": "tests/processes/test_killed_nodes.py",
    "spes_core.data.tokenize": "tests/unit/test_data_formats.py: there is no such text",
    "workbench.evaluate": "tests/unit/test_evaluate.py: the second needs copies of data",
    "workbench.study studies/quickstart.yaml +run.init": "tests/processes/test_initial_weights.py: it trains",
}
"""What of the README's shell lines is not run here, and where it is."""


def shell_lines() -> list[str]:
    """The commands of the ```sh blocks, without comments."""
    blocks = re.findall(r"```sh\n(.*?)```", README, re.DOTALL)
    lines = [line.split(" #")[0].strip() for block in blocks for line in block.splitlines()]
    return [line for line in lines if line and not line.startswith("#")]


@contextlib.contextmanager
def inside(folder: Path) -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        yield


def quickly(command: str, folder: Path) -> str:
    """What a command prints that must end with 0, run in this process: importing everything again would take most."""
    module, *words = shlex.split(command)[2:]
    out = io.StringIO()
    with inside(folder), pytest.MonkeyPatch.context() as patch, warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of running a module that is imported already
        patch.setattr(sys, "argv", [module, *words])
        with contextlib.redirect_stdout(out), pytest.raises(SystemExit) as ended:
            runpy.run_module(module, run_name="__main__")
    assert ended.value.code == 0, f"{command}\n{out.getvalue()}"
    return out.getvalue()


@pytest.fixture(scope="module")
def results(empty_folder: Path) -> Path:
    """The folder in which the quickstart has run."""
    if not (empty_folder / "reports/quickstart/index.html").exists():
        quickstart = next(command for command in commands() if "quickstart" in command and "--dry-run" not in command)
        run(quickstart, empty_folder, SHORTER)
    return empty_folder


def test_the_readme_opens_with_the_two_commands() -> None:
    assert [line.split("#")[0].strip() for line in README.splitlines()[2:4]] == ["make demo", "make test"]


def test_the_commands_run_in_their_order_and_the_second_run_has_nothing_to_do(empty_folder: Path) -> None:
    quickstart = [command for command in commands() if "quickstart" in command]
    dry, first, again = quickstart
    assert "--dry-run" in dry
    assert "3 of 3 trials will run" in run(dry, empty_folder, SHORTER)
    assert not (empty_folder / "results").exists()
    assert "report: reports/quickstart/index.html" in run(first, empty_folder, SHORTER)
    assert (empty_folder / "reports/quickstart/index.html").exists()
    before = {path: path.stat().st_mtime_ns for path in empty_folder.glob("results/*/trials/*/result.json")}
    assert len(before) == 3
    run(again, empty_folder, SHORTER)
    assert before == {path: path.stat().st_mtime_ns for path in empty_folder.glob("results/*/trials/*/result.json")}


def test_every_other_study_command_plans(empty_folder: Path) -> None:
    others = [command for command in commands() if "workbench.study" in command and "quickstart" not in command]
    assert others
    for command in others:
        assert "will run" in run(command, empty_folder, ["--dry-run"])


def test_the_study_that_it_shows_plans(empty_folder: Path) -> None:
    shown, _ = re.findall(r"```yaml\n(.*?)```", README, re.DOTALL)
    (empty_folder / "shown.yaml").write_text(shown, encoding="utf-8")
    assert "9 of 9 trials will run" in run("python -m workbench.study shown.yaml", empty_folder, ["--dry-run"])


def test_each_line_for_a_shell_runs_or_is_run_by_another_test(results: Path) -> None:
    """Plans, a simulation, and what reads results: each succeeds and says what its comment promises."""
    trial = next((results / "results/quickstart/trials").glob("spes-*")).name
    told = {}
    for line in shell_lines():
        assert line.startswith("python -m "), line
        command = line.removeprefix("python -m ")
        if any(command.startswith(known) for known in ELSEWHERE):
            continue
        # Training (again) is for tests/processes/test_verify.py and test_study_end_to_end.py.
        trains = {"workbench.verify": " --quick", "workbench.study studies/": " --dry-run"}
        quick = next((flag for start, flag in trains.items() if command.startswith(start)), "")
        told[command] = quickly(line.replace("TRIAL", trial) + quick, results)
    assert len(told) >= 8
    expected = {
        "workbench.plan studies": "GPU-hours for all",
        "workbench.plan --model": "utilisation",
        "workbench.simulate": "servers' links are the bottleneck",
        "workbench.study status": "3 trials, 3 done",
        "workbench.study table": "spes",
        "workbench.study compare": "eval/loss - centralized",
        "workbench.study export": "SHA-256",
        "workbench.verify": "PASS",
    }
    for start, words in expected.items():
        outputs = [out for command, out in told.items() if command.startswith(start)]
        assert outputs and all(words in out for out in outputs), (start, outputs)
    with tarfile.open(results / "quickstart.tar.gz") as archive:
        assert any(name.endswith("result.json") for name in archive.getnames())


def test_the_schema_command_that_it_gives_writes_a_schema(results: Path) -> None:
    (command,) = re.findall(r"`(python -m workbench\.study schema) > ([\w.]+)`", README)
    schema = json.loads(quickly(command[0], results))
    assert {"name", "question", "arms"} <= schema["properties"].keys()
    assert f"$schema={command[1]}" in README


def test_what_it_says_for_a_notebook_runs(results: Path) -> None:
    (block,) = re.findall(r"```python\n(.*?)```", README, re.DOTALL)
    *before, last = block.strip().splitlines()
    names: dict[str, object] = {}
    with inside(results):
        exec("\n".join(before), names)
        table = eval(last, names)
    assert sorted(table.index) == ["centralized", "dilico", "spes"]
    assert table["count"].tolist() == [1, 1, 1]


def test_the_mixture_that_it_shows_is_valid() -> None:
    _, mixture = re.findall(r"```yaml\n(.*?)```", README, re.DOTALL)
    config = build(RunConfig, yaml.safe_load(mixture))
    assert list(config.data.domains) == ["code", "wiki", "web"]
    assert check(config) == []
