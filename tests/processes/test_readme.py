"""The README is true: its commands run in an empty folder, and the study that it shows plans."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from spes_core.config import RunConfig
from spes_core.rules import check
from spes_core.structure import build

pytestmark = pytest.mark.processes

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


def test_the_mixture_that_it_shows_is_valid() -> None:
    _, mixture = re.findall(r"```yaml\n(.*?)```", README, re.DOTALL)
    config = build(RunConfig, yaml.safe_load(mixture))
    assert list(config.data.domains) == ["code", "wiki", "web"]
    assert check(config) == []
