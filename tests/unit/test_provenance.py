"""Provenance: what is recorded of code and machine, inside and outside a checkout."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

import pytest

from workbench.provenance import collect, git_state


def git(folder: Path, *arguments: str) -> str:
    identity = ("-c", "user.name=n", "-c", "user.email=e")
    command = ["git", "-C", str(folder), *identity, *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    git(tmp_path, "init", "--quiet")
    (tmp_path / "code.py").write_text("a = 1\n")
    git(tmp_path, "add", "code.py")
    git(tmp_path, "commit", "--quiet", "--message", "first")
    return tmp_path


def test_clean_checkout_has_a_commit_and_no_difference(checkout: Path) -> None:
    state = git_state(checkout)
    assert state == {
        "commit": git(checkout, "rev-parse", "HEAD"),
        "dirty": False,
        "diff_sha256": None,
        "untracked": [],
    }


def test_changed_and_new_files_make_a_checkout_dirty(checkout: Path) -> None:
    (checkout / "code.py").write_text("a = 2\n")
    changed = git_state(checkout)
    assert changed["dirty"] is True
    (checkout / "new ü.py").write_text("b = 1\n")
    added = git_state(checkout)
    assert added["untracked"] == ["new ü.py"]
    assert added["diff_sha256"] != changed["diff_sha256"]
    (checkout / "code.py").write_text("a = 1\n")
    assert git_state(checkout)["dirty"] is True


def test_what_studies_write_makes_no_checkout_dirty(checkout: Path) -> None:
    for folder in ("results", "reports"):
        (checkout / folder).mkdir()
        (checkout / folder / "index.html").write_text("report")
    assert git_state(checkout)["dirty"] is False


def test_outside_a_checkout_the_commit_is_unknown(tmp_path: Path, checkout: Path) -> None:
    unknown = {"commit": None, "dirty": None, "diff_sha256": None, "untracked": None}
    installed = checkout / "site-packages"
    installed.mkdir()
    assert git_state(installed) == unknown
    (tmp_path / ".git").rename(tmp_path / "no-git")
    assert git_state(tmp_path) == unknown


def test_everything_asked_for_is_recorded_as_plain_data() -> None:
    record = json.loads(json.dumps(collect()))
    assert len(record["code_digest"]) == 64
    assert record["packages"]["torch"]
    assert record["hardware"]["cores"] >= 1
    assert record["hardware"]["memory_gib"] > 0
    assert record["hardware"]["cpu"]
    assert isinstance(record["hardware"]["gpus"], list)
