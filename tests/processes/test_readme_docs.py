"""The pages of docs/ are true, as the README is: each command runs here, or says why it does not."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import yaml

from tests.processes.test_readme import ROOT, quickly

pytestmark = [pytest.mark.processes, pytest.mark.xdist_group("readme")]

PAGES = sorted((ROOT / "docs").glob("*.md"))
NOT_EXECUTED = "# not executed: "


def commands(page: Path) -> list[tuple[str, str]]:
    """The commands of a page's ```sh blocks, each with the last comment above it in its block."""
    found = []
    for block in re.findall(r"```sh\n(.*?)```", page.read_text(encoding="utf-8"), re.DOTALL):
        comment = ""
        for line in filter(None, block.splitlines()):
            if line.startswith("#"):
                comment = line
            else:
                found.append((line.split(" #")[0].strip(), comment))
    return found


def shown_outputs(page: Path) -> dict[str, str]:
    """What a page says that a command prints: a ```text block whose first line is "$ COMMAND"."""
    blocks = re.findall(r"```text\n\$ (.*?)\n(.*?)```", page.read_text(encoding="utf-8"), re.DOTALL)
    return dict(blocks)


def words(text: str) -> list[list[str]]:
    return [line.split() for line in text.strip().splitlines()]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("a reader's folder")
    (folder / "studies").symlink_to(ROOT / "studies")
    return folder


def test_there_are_pages_and_the_readme_links_to_each() -> None:
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    assert PAGES
    assert all(f"(docs/{page.name})" in readme for page in PAGES)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_every_command_runs_or_says_why_it_does_not_and_which_test_does_as_much(page: Path, folder: Path) -> None:
    assert commands(page)
    for command, comment in commands(page):
        assert command.startswith("python -m "), command
        if not comment.startswith(NOT_EXECUTED):
            quickly(command, folder)
            continue
        for test in re.findall(r"tests/[\w/.]+\.py", comment):
            module = command.split()[2]
            assert module in (ROOT / test).read_text(encoding="utf-8"), f"{test} does not run {module}"


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_what_a_page_says_that_a_command_prints_is_what_it_prints(page: Path, folder: Path) -> None:
    for command, shown in shown_outputs(page).items():
        assert words(quickly(command, folder)) == words(shown), command


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_links_between_files_lead_somewhere(page: Path) -> None:
    for target in re.findall(r"\]\(([^)#:]+)(?:#[^)]*)?\)", page.read_text(encoding="utf-8")):
        assert (page.parent / target).exists(), target


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_each_yaml_block_is_yaml(page: Path) -> None:
    for block in re.findall(r"```yaml\n(.*?)```", page.read_text(encoding="utf-8"), re.DOTALL):
        assert yaml.safe_load(block)
