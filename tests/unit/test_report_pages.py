"""Comparisons of several studies, the index over all reports, and what a real browser makes of a page."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.reference import report_fixture as made_up
from tests.unit.test_report import Page, plain
from workbench.report.__main__ import main
from workbench.report.parallel import in_parallel
from workbench.report.render import render, render_comparison

BROWSER = next(
    (found for name in ("chromium", "chromium-browser", "google-chrome") if (found := shutil.which(name))), ""
)


@pytest.fixture(scope="module")
def studies(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    folder = tmp_path_factory.mktemp("pages") / "results"
    first = made_up.write_study(folder / "first", seeds=[0, 1], intervals=(10, 50), curve_points=8)
    second = made_up.write_study(folder / "second", seeds=[0, 1], intervals=(10,), curve_points=8, failed=["dilico"])
    for path in second.glob("trials/*/result.json"):
        result = json.loads(path.read_text())
        result["provenance"]["code_digest"] = "beef" * 16
        if result["trial"]["arm"] == "spes" and result["trial"]["seed"] == 0:
            result["metrics"]["eval/loss"] *= 1.001
        path.write_text(json.dumps(result))
    for path, date in ((first, "2026-11-01"), (second, "2026-11-02")):
        content = json.loads((path / "study.json").read_text())
        content |= {"name": path.name, "question": f"What of {path.name}?"}
        content["report"]["formats"] = ["html"]
        (path / "study.json").write_text(json.dumps(content))
        for file in path.glob("trials/*/result.json"):
            result = json.loads(file.read_text())
            file.write_text(json.dumps(result | {"started_at": f"{date}T10:00:00+00:00"}))
    return first, second


@pytest.fixture(scope="module")
def reports(studies: tuple[Path, Path]) -> Path:
    """Reports of both, and of the two together."""
    folder = studies[0].parents[1] / "reports"
    render(studies[0], folder / "first")
    with pytest.MonkeyPatch.context() as blank:
        blank.setattr("workbench.report.render._pictures", undrawn)
        render(studies[1], folder / "second")
        render_comparison(studies, folder / "both")
    return folder


def undrawn(figure: object) -> dict[str, str]:
    """Stands in for drawing, where a test is about words and tables."""
    return {"wide": "<svg/>", "narrow": "<svg/>"}


def test_a_comparison_sets_every_arm_beside_its_own_reference(reports: Path) -> None:
    page = Page((reports / "both" / "index.html").read_text(encoding="utf-8"))
    head, *rows = page.tables["arms"]
    cells = [dict(zip(head, row, strict=True)) for row in rows]
    assert [(c["study"], c["arm"], plain(c["at"])) for c in cells] == [
        ("first", "centralized", "–"), ("first", "dilico", "H = 10"), ("first", "dilico", "H = 50"),
        ("first", "spes", "H = 10"), ("first", "spes", "H = 50"), ("second", "centralized", "–"),
        ("second", "spes", "H = 10"),
    ]  # fmt: skip
    factor = {0: 1.001, 1: 1.0}
    relative = [
        factor[seed] * made_up.final_loss("spes", 10, seed) / made_up.final_loss("centralized", None, seed) - 1
        for seed in (0, 1)
    ]
    assert plain(cells[-1]["difference"]) == f"{100 * sum(relative) / 2:+.2f} %"
    assert len({cell["setting"] for cell in cells}) == 1
    assert "2 versions of the code" in page.text
    assert "4 of 6, 2 without" in page.column("origin", "finished")
    assert [link for link in page.links if link.startswith("../")] == ["../first/index.html", "../second/index.html"]


def test_trials_that_both_studies_have_are_compared_in_time(reports: Path) -> None:
    page = Page((reports / "both" / "index.html").read_text(encoding="utf-8"))
    (row,) = page.tables["shared"][1:]
    assert [plain(cell) for cell in row] == ["first", "second", "4", "3", "0.100 %", "1.00 to 1.00"]


def test_a_comparison_has_the_verdict_of_each_study_and_every_format(reports: Path) -> None:
    folder = reports / "both"
    page = Page((folder / "index.html").read_text(encoding="utf-8"))
    own = json.loads((reports / "first" / "provenance.json").read_text())["verdict"]
    assert plain(own[0]) in plain(page.text)
    assert {"index.html", "report.pdf", "figure_across.csv", "table_arms.tex", "provenance.json"} <= {
        path.name for path in folder.iterdir()
    }


def test_studies_of_other_settings_are_not_called_comparable(
    studies: tuple[Path, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("workbench.report.render._pictures", undrawn)
    other = Path(shutil.copytree(studies[1], tmp_path / "other"))
    for path in other.glob("trials/*/result.json"):
        result = json.loads(path.read_text())
        result["config"]["budget_tokens"] = 1
        path.write_text(json.dumps(result))
    page = Page(render_comparison([studies[0], other], tmp_path / "out").html.read_text(encoding="utf-8"))
    assert "their losses are no measure of one another" in page.text


def test_the_index_lists_every_report_newest_first_with_question_and_verdict(
    reports: Path, studies: tuple[Path, Path], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("workbench.report.render._pictures", undrawn)
    assert main(["--index", str(reports)]) == 0
    assert capsys.readouterr().out == f"{reports / 'index.html'}\n"
    html = (reports / "index.html").read_text(encoding="utf-8")
    page = Page(html)
    titles = [
        title for title in ("First and second compared", "What of second?", "What of first?") if title in page.text
    ]
    assert len(titles) == 3
    assert page.text.index("What of second?") < page.text.index("What of first?")
    verdict = json.loads((reports / "first" / "provenance.json").read_text())["verdict"][0]
    assert plain(verdict) in plain(page.text)
    assert all((reports / link).is_file() for link in page.links)
    before = html.count("<li>")
    shutil.rmtree(reports / "both")
    render(studies[1], reports / "second")
    assert (reports / "index.html").read_text(encoding="utf-8").count("<li>") == before - 1, "a rendering refreshes it"


def test_a_page_of_another_origin_is_never_overwritten(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "a").mkdir()
    (tmp_path / "a" / "provenance.json").write_text('{"name": "a"}')
    (tmp_path / "index.html").write_text("mine")
    assert main(["--index", str(tmp_path)]) == 2
    assert "is no index of reports and is left as it is" in capsys.readouterr().err
    assert (tmp_path / "index.html").read_text() == "mine"
    assert main(["--index", str(tmp_path / "a")]) == 2
    assert "holds no report" in capsys.readouterr().err


def test_calls_in_parallel_keep_their_order_and_raise_what_they_raise() -> None:
    assert in_parallel([lambda number=number: number**2 for number in range(5)]) == [0, 1, 4, 9, 16]

    def fails() -> None:
        raise ValueError("this one")

    with pytest.raises(ValueError, match="this one"):
        in_parallel([fails, lambda: 1])


def test_without_pango_the_page_is_written_and_one_line_says_what_to_install(
    studies: tuple[Path, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "weasyprint", None)
    content = json.loads((studies[0] / "study.json").read_text())
    (tmp_path / "study.json").write_text(json.dumps(content | {"trials": [], "report": {}}))
    paths = render(tmp_path, tmp_path / "out")
    assert paths.pdf is None
    assert paths.html.is_file()
    assert len(paths.remarks) == 1
    assert "libpango-1.0-0" in paths.remarks[0]


@pytest.mark.skipif(not BROWSER, reason="no headless Chromium here")
@pytest.mark.parametrize("page", ["first/index.html", "index.html"])
def test_a_browser_opens_a_page_without_an_error_and_its_table_can_be_sorted(
    reports: Path, tmp_path: Path, page: str
) -> None:
    main(["--index", str(reports)])
    argv = [BROWSER, "--headless", "--no-sandbox", "--disable-gpu", "--disable-background-networking", "--no-first-run",
            f"--user-data-dir={tmp_path}", "--enable-logging=stderr", "--dump-dom",
            f"file://{reports / page}"]  # fmt: skip
    done = subprocess.run(argv, capture_output=True, text=True, timeout=120, check=False)
    assert "</html>" in done.stdout
    assert not re.findall(r".*CONSOLE.*", done.stderr)
    if page == "first/index.html":
        headings = re.findall(r"<th [^>]*>\s*<button type=\"button\">", done.stdout)
        assert len(headings) >= 8


def test_nothing_heavy_is_imported_before_a_report_is_rendered() -> None:
    code = (
        "import sys, workbench.report.render, workbench.report.__main__, workbench.statistics as s\n"
        "heavy = {'matplotlib', 'pandas', 'weasyprint', 'torch', 'scipy'} & set(sys.modules)\n"
        "assert not heavy, heavy"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)
