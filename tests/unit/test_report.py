"""Reports: every number equals one recomputed from the files, every output is whole, and nothing is hidden."""

from __future__ import annotations

import csv
import json
import re
from collections.abc import Callable
from html.parser import HTMLParser
from pathlib import Path
from typing import Any, get_args

import numpy as np
import pypdf
import pytest
import scipy.stats

from spes_core.errors import ConfigError
from tests.reference import report_fixture as made_up
from workbench.mirrored import digest, note_run
from workbench.report.__main__ import main
from workbench.report.render import ReportPaths, render
from workbench.report.svg import to_svg
from workbench.spec import Role

H_VALUES = (10, 25, 50)
SEEDS = (0, 1, 2)


class Page(HTMLParser):
    """What a reader finds in a page: tables as rows of text, links, ids, images and words, without figures' insides."""

    def __init__(self, html: str) -> None:
        super().__init__()
        self.tables: dict[str, list[list[str]]] = {}
        self.links: list[str] = []
        self.ids: list[str] = []
        self.labels: list[str] = []
        self.addresses: list[str] = []
        self.words: list[str] = []
        self._table, self._silent = "", 0
        self.feed(html)

    def handle_starttag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        given = dict(attributes)
        self.ids += [given["id"]] if given.get("id") else []
        self.labels += [given["aria-label"] or ""] if given.get("role") == "img" else []
        self.addresses += [given[name] or "" for name in ("src", "href", "xlink:href", "srcset") if name in given]
        self._silent += tag in ("svg", "style", "script")
        if tag == "a":
            self.links.append(given.get("href") or "")
        elif tag == "div" and (given.get("id") or "").startswith("table-"):
            self._table = (given["id"] or "").removeprefix("table-")
            self.tables[self._table] = []
        elif tag == "tr":
            self.tables[self._table].append([])
        elif tag in ("td", "th"):
            self.tables[self._table][-1].append("")

    def handle_endtag(self, tag: str) -> None:
        self._silent -= tag in ("svg", "style", "script")
        self._table = "" if tag == "table" else self._table

    def handle_data(self, data: str) -> None:
        if self._silent:
            return
        self.words.append(data)
        if self._table and self.tables[self._table] and self.tables[self._table][-1]:
            self.tables[self._table][-1][-1] += data.strip()

    @property
    def text(self) -> str:
        return re.sub(r"\s+", " ", " ".join(self.words))

    def column(self, table: str, heading: str) -> list[str]:
        """Cells below a heading."""
        head, *rows = self.tables[table]
        return [row[head.index(heading)] for row in rows]


def number(text: str) -> float:
    """The first number in a printed cell."""
    return float(re.findall(r"[+-]?[\d.]+", text.replace("−", "-").replace(",", ""))[0])


def plain(text: str) -> str:
    return text.replace("\u00a0", " ").replace("−", "-")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("reports")


@pytest.fixture(scope="module")
def study(folder: Path) -> Path:
    return made_up.write_study(folder / "results" / "sync", seeds=SEEDS, intervals=H_VALUES, curve_points=16)


@pytest.fixture(scope="module")
def paths(folder: Path, study: Path) -> ReportPaths:
    return render(study, folder / "reports" / "sync")


@pytest.fixture(scope="module")
def page(paths: ReportPaths) -> Page:
    return Page(paths.html.read_text(encoding="utf-8"))


def only_html(study_dir: Path, **report: object) -> Page:
    """Render a study without its PDF, with changes to the report settings in its study.json."""
    content = json.loads((study_dir / "study.json").read_text())
    content["report"] |= {"formats": ["html"], **report}
    (study_dir / "study.json").write_text(json.dumps(content))
    return Page(render(study_dir, study_dir.parent / f"report-{study_dir.name}").html.read_text(encoding="utf-8"))


@pytest.fixture
def undrawn(monkeypatch: pytest.MonkeyPatch) -> None:
    """Leaves figures blank, for tests that are about words and tables."""
    monkeypatch.setattr("workbench.report.render._pictures", lambda figure: {"wide": "<svg/>", "narrow": "<svg/>"})


def reference_cells() -> list[tuple[str, int | None]]:
    return [("centralized", None), *(("dilico", h) for h in H_VALUES), *(("spes", h) for h in H_VALUES)]


def losses(arm: str, interval: int | None) -> np.ndarray:
    return np.array([made_up.final_loss(arm, interval, seed) for seed in SEEDS])


def test_mean_losses_and_intervals_equal_those_recomputed(page: Page) -> None:
    means = page.column("summary", "validation loss (nats per token)")
    intervals = page.column("summary", "95 % interval")
    for (arm, interval), mean, bounds in zip(reference_cells(), means, intervals, strict=True):
        values = losses(arm, interval)
        low, high = scipy.stats.t.interval(0.95, 2, loc=values.mean(), scale=scipy.stats.sem(values))
        assert mean == f"{values.mean():.3f}"
        assert bounds == f"[{low:.3f}, {high:.3f}]"


def test_paired_differences_equal_those_recomputed(page: Page) -> None:
    rows = page.tables["differences"][1:]
    cells = reference_cells()[1:]
    reference = losses("centralized", None)
    assert len(rows) == len(cells)
    for row, (arm, interval) in zip(rows, cells, strict=True):
        relative = (losses(arm, interval) - reference) / reference
        low, high = scipy.stats.t.interval(0.95, 2, loc=relative.mean(), scale=scipy.stats.sem(relative))
        shown = [number(cell) for cell in (*row[3:6], row[7])]
        assert shown == pytest.approx([*(100 * relative), 100 * relative.mean()], abs=0.0051)
        assert plain(row[8]) == f"[{100 * low:+.2f}, {100 * high:+.2f}] %"
        expected = "within" if high <= 0.02 else "outside" if low > 0.02 else "inconclusive"
        assert row[9] == expected


def test_every_trial_is_listed_with_its_numbers_and_a_link_to_its_folder(page: Page, paths: ReportPaths) -> None:
    results = [json.loads(path.read_text()) for path in (paths.html.parents[2] / "results").rglob("result.json")]
    assert len(page.tables["trials"]) - 1 == len(results) == 21
    shown = sorted(zip(page.column("trials", "trial"), page.column("trials", "validation loss"), strict=True))
    expected = sorted((r["trial"]["id"][:8], f"{r['metrics']['eval/loss']:.3f}") for r in results)
    assert shown == expected
    events = [link for link in page.links if link.endswith("/events/")]
    assert len(events) == 21
    assert all((paths.html.parent / link / "node-0.jsonl").is_file() for link in events)
    folders = [link for link in page.links if "/trials/" in link and link not in events]
    assert len(folders) == 21
    assert all((paths.html.parent / link / "result.json").is_file() for link in folders)


def test_a_trial_links_to_its_run_in_mlflow_where_that_is_known(tmp_path: Path, undrawn: None) -> None:
    study = made_up.write_study(tmp_path / "results" / "sync", seeds=[0], intervals=[10], curve_points=4)
    assert "MLflow run" not in only_html(study).tables["trials"][0]
    linked, stale, _ = sorted(study.glob("trials/*"))
    note_run(linked, digest((linked / "result.json").read_bytes()), "3", "0123456789abcdef", None)
    note_run(stale, "of a former result", "3", "fedcba9876543210", None)
    page = only_html(study)
    runs = dict(zip(page.column("trials", "trial"), page.column("trials", "MLflow run"), strict=True))
    assert sorted(runs.values()) == ["01234567", "–", "–"]
    assert runs[json.loads((linked / "result.json").read_text())["trial"]["id"][:8]] == "01234567"
    assert [link for link in page.links if "/runs/" in link] == [
        "http://127.0.0.1:5000/#/experiments/3/runs/0123456789abcdef"
    ]
    assert "mlflow ui --backend-store-uri sqlite:///results/mlflow.db" in page.text


def test_payload_bytes_are_those_of_the_formula_to_the_byte(page: Page) -> None:
    rows = page.tables["predicted_bytes"][1:]
    for row, (arm, interval) in zip(rows, reference_cells()[1:], strict=True):
        assert row[3] == f"{made_up.uplink_payload_bytes(arm, interval):,}"
        assert row[5] == f"{made_up.downlink_payload_bytes(arm, interval):,}"
        assert (row[4], row[6]) == ("0", "0")
    assert "They agree to the byte." in page.text


def test_verdict_states_loss_bytes_memory_and_sample(page: Page) -> None:
    relative = losses("spes", 25) / losses("centralized", None) - 1
    low, high = scipy.stats.t.interval(0.95, 2, loc=relative.mean(), scale=scipy.stats.sem(relative))
    share = made_up.uplink_payload_bytes("spes", 25) / made_up.uplink_payload_bytes("dilico", 25)
    text = plain(page.text)
    assert f"At H = 25, spes lost {100 * relative.mean():.1f} % [{100 * low:.2f}, {100 * high:.2f}]" in text
    assert f"sent {100 * share:.0f} % of dilico's uplink bytes" in text
    assert "of its trained-state memory (n = 3, paired by seed, 95 % t interval)" in text
    assert "no sign-flip p below 0.25 can be reached" in text
    assert "6.214 nats per token" in text


def test_figure_data_lies_beside_every_figure_and_is_raw(page: Page, paths: ReportPaths) -> None:
    figures = [name.removeprefix("figure-") for name in page.ids if name.startswith("figure-")]
    assert [path.name for path in paths.csv] == [f"figure_{name}.csv" for name in figures]
    assert set(figures) == {"loss", "forest", "uplink", "pareto", "curves", "memory", "throughput", "load"}
    with (paths.html.parent / "figure_loss.csv").open() as file:
        rows = list(csv.DictReader(file))
    found = {(row["arm"], row["x"], row["seed"]): float(row["validation_loss"]) for row in rows}
    for arm, interval in reference_cells():
        for seed in SEEDS:
            x = "" if interval is None else f"{interval:.1f}"
            assert found[arm, x, str(seed)] == pytest.approx(made_up.final_loss(arm, interval, seed), abs=1e-12)


def test_page_asks_for_nothing_outside_itself(page: Page, paths: ReportPaths) -> None:
    html = paths.html.read_text(encoding="utf-8")
    loaded = [address for address in page.addresses if address not in page.links]
    assert loaded
    assert all(address.startswith(("data:", "#")) for address in loaded)
    assert all(not re.match(r"[a-z]+:|//", link) for link in page.links)
    assert all(target.startswith(("data:", "#")) for target in re.findall(r"url\(['\"]?([^)'\"]+)", html))
    assert "@import" not in html
    assert len(html) < 2_000_000


def test_ids_are_unique_and_every_figure_says_its_data_in_words(page: Page) -> None:
    assert len(page.ids) == len(set(page.ids))
    assert len(page.labels) == 16
    assert f"{losses('spes', 50).mean():.3f} at H = 50" in plain(" ".join(page.labels))


def test_pdf_holds_the_same_words_with_every_font_embedded(page: Page, paths: ReportPaths) -> None:
    assert paths.pdf is not None
    reader = pypdf.PdfReader(paths.pdf)
    text = re.sub(r"\s+", " ", " ".join(sheet.extract_text() for sheet in reader.pages))
    sought = [
        "How far can H grow",
        "Matched budget",
        "Where each number comes from",
        f"1 / {len(reader.pages)}",
    ]
    sought += [cell for row in page.tables["summary"][1:] for cell in row if cell]
    assert [words for words in sought if plain(words) not in plain(text)] == []
    fonts = [font.get_object() for sheet in reader.pages for font in sheet["/Resources"]["/Font"].values()]
    assert fonts
    for font in fonts:
        described = font["/DescendantFonts"][0].get_object()["/FontDescriptor"].get_object()
        assert any(kind in described for kind in ("/FontFile2", "/FontFile3"))
        assert "Workbench" in described["/FontName"]
    assert not [a for sheet in reader.pages for a in sheet.get("/Annots", []) if "/URI" in a.get_object().get("/A", {})]


def test_numbers_written_in_a_figure_are_not_rounded_with_its_coordinates() -> None:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(2, 1))
    figure.text(0.123456789, 0.5, "3.41592")
    svg = to_svg(figure, "numbers")
    assert ">3.41592<" in svg
    assert not re.search(r"<[^>]*\d\.\d{3}[^>]*>", svg)


def test_figures_in_the_pdf_are_vectors(paths: ReportPaths) -> None:
    assert paths.pdf is not None
    assert sum(len(sheet.images) for sheet in pypdf.PdfReader(paths.pdf).pages) == 0


def test_every_table_is_latex_with_booktabs_rules(page: Page, paths: ReportPaths) -> None:
    assert [path.name for path in paths.tex] == [f"table_{name}.tex" for name in page.tables]
    for path in paths.tex:
        content = path.read_text(encoding="utf-8")
        body = re.sub(r"\\(textbackslash|dots|textasciitilde|&|%|\$|#|_|\{|\})", "", content)
        assert all(rule in content for rule in (r"\toprule", r"\midrule", r"\bottomrule"))
        assert not re.search(r"(?<!\\)[#]|[−±×–…Σα]", body), path
        widths = {len(re.findall(r"(?<!\\)&", line)) for line in content.splitlines() if line.endswith(r" \\")}
        assert len(widths) == 1, path


def test_provenance_names_the_digest_of_every_result(study: Path, paths: ReportPaths) -> None:
    import hashlib

    content = json.loads(paths.provenance.read_text())
    for trial in content["trials"]:
        file = study / "trials" / trial["name"] / "result.json"
        assert trial["result_sha256"] == hashlib.sha256(file.read_bytes()).hexdigest()
    assert [origin["commit"][:8] for origin in content["provenance"]] == ["3f2a9c1d"]


def change_results(study: Path, pattern: str, change: Callable[[dict[str, Any]], None]) -> None:
    for path in study.glob(f"trials/{pattern}/result.json"):
        result = json.loads(path.read_text())
        change(result)
        path.write_text(json.dumps(result))


def test_numbers_are_credited_to_the_trials_code_and_time_and_not_to_the_study_s(tmp_path: Path, undrawn: None) -> None:
    study = made_up.write_study(tmp_path / "moved", seeds=[0], intervals=[10, 50], curve_points=12)
    file = study / "study.json"
    content = json.loads(file.read_text())
    content["provenance"] |= {"commit": "f" * 40, "dirty": False, "code_digest": "0123456789abcdef" * 4}
    file.write_text(json.dumps(content | {"created_at": "2030-01-01T00:00:00+00:00"}))
    page = only_html(study)
    assert "started 2026-11-29 · run by commit 3f2a9c1d with uncommitted changes" in page.text
    assert "run by another version of the code than the present one" in page.text
    assert "code 0123456789ab (the present one): no trial" in page.text
    rows = dict(page.tables["provenance"])
    assert rows["started"] == "2026-11-29T10:00:05+00:00"
    assert rows["commit"].startswith("3f2a9c1d")
    assert rows["rendered with"] == f"{'f' * 40}, without uncommitted changes, code 0123456789abcdef"


def test_trials_of_different_code_are_named_by_code(tmp_path: Path, undrawn: None) -> None:
    study = made_up.write_study(tmp_path / "mixed", seeds=[0], intervals=[10, 50], curve_points=12)
    other = {"commit": "a1" * 20, "dirty": False, "code_digest": "beef" * 16}
    change_results(study, "spes*", lambda result: result["provenance"].update(other))
    page = only_html(study)
    assert "run by 2 different versions of the code" in page.text
    assert "code beefbeefbeef: 2 trials, spes" in page.text
    assert "code c0dec0dec0de (the present one): 3 trials, centralized and dilico" in page.text
    assert "run by commits 3f2a9c1d with uncommitted changes and a1a1a1a1" in page.text


def test_no_sentence_claims_a_synchronization_share_where_gradients_are_exchanged_inside_the_step(
    tmp_path: Path,
) -> None:
    """Not even of a result that still carries such a number."""
    study = made_up.write_study(tmp_path / "inside", seeds=[0], intervals=[10, 50], curve_points=12)
    claim = {"perf/tokens_per_s_compute": 1e9, "perf/share_transfer": 0.003}
    change_results(study, "centralized*", lambda result: result["metrics"].update(claim))
    page = only_html(study, formats=["html", "csv"])
    (costs,) = re.findall(r"Synchronization and data loading cost.*?(?=In centralized)", plain(page.text))
    assert re.findall(r"% \(H = 50\) in (\w+)", costs) == ["dilico", "spes"]
    assert "centralized" not in costs
    assert page.text.count("In centralized gradients are exchanged inside the step, which is not separable") == 2
    with (tmp_path / "report-inside" / "figure_throughput.csv").open() as file:
        rows = {row["label"]: row for row in csv.DictReader(file)}
    inside = rows["centralized"]
    assert inside["tokens_per_s_compute"] == ""
    spent = {name for name, value in inside.items() if name.startswith("share_") and float(value) > 0}
    assert spent == {"share_data", "share_step (compute and gradient exchange)"}
    assert all(float(row["share_step (compute and gradient exchange)"]) == 0 for row in rows.values() if row != inside)


def test_roles_decide_what_is_compared_with_what_and_names_do_not(tmp_path: Path, undrawn: None) -> None:
    study = made_up.write_study(tmp_path / "roles", seeds=[0], intervals=[10, 50], curve_points=12)
    file = study / "study.json"
    content = json.loads(file.read_text())
    swapped = {"dilico": "treatment", "spes": "baseline", "centralized": "reference"}
    for entry in (*content["trials"], *content["arms"]):
        entry["role"] = swapped[entry.get("arm") or entry["name"]]
    file.write_text(json.dumps(content))
    text = plain(only_html(study).text)
    assert re.search(r"dilico (lost|gained) [\d.]+ % of validation loss against centralized", text)
    assert "of spes's uplink bytes" in text
    assert "of dilico's uplink bytes" not in text


def test_fixture_is_a_study_that_the_workbench_could_have_written() -> None:
    assert set(made_up.METHODS.values()) <= set(get_args(Role))


def test_report_names_no_folder_of_the_machine_and_links_only_what_is_there(tmp_path: Path, undrawn: None) -> None:
    study = made_up.write_study(tmp_path / "private", seeds=[0], intervals=[10], missing=["dilico"], curve_points=12)
    change_results(study, "*", lambda result: result["config"]["data"].update(corpus="/home/someone/texts/novels"))
    page = only_html(study)
    assert "novels" in page.text
    assert "/home" not in page.text
    links = [link for link in page.links if "/trials/" in link and not link.endswith("/events/")]
    assert len(links) == 2
    assert len(page.column("trials", "trial")) == 3


def test_same_files_give_the_same_bytes(study: Path, paths: ReportPaths, tmp_path: Path) -> None:
    before = {path.name: path.read_bytes() for path in paths.html.parent.iterdir()}
    again = render(study, paths.html.parent)
    assert {path.name: path.read_bytes() for path in again.html.parent.iterdir()} == before


def test_one_seed_gives_points_and_no_interval(tmp_path: Path) -> None:
    page = only_html(made_up.write_study(tmp_path / "one", seeds=[4], intervals=[10, 200]))
    text = plain(page.text)
    assert "(n = 1, one seed, so no interval)" in text
    assert "With one seed no interval can be given" in text
    assert set(page.column("summary", "95 % interval")) == {"–"}
    assert set(page.column("differences", "2\u00a0% tolerance")) <= {"point within", "point outside"}
    assert "p, Holm" not in page.tables["differences"][0]


def test_sweet_spot_is_not_identified_where_the_rule_fails(tmp_path: Path, undrawn: None) -> None:
    study = made_up.write_study(tmp_path / "strict", seeds=[0, 1], intervals=[50, 200], curve_points=12)
    page = only_html(study, tolerance=0.001)
    assert "is not identified for dilico and spes" in plain(page.text)


def test_report_of_a_study_whose_trials_all_failed_says_so(tmp_path: Path) -> None:
    study = made_up.write_study(tmp_path / "bad", seeds=[0], intervals=[10], failed=["all"])
    page = only_html(study)
    assert "None of the 3 trials finished (3 failed), so this report has no numbers" in page.text
    assert [row[-1] for row in page.tables["missing"][1:]] == [
        "node-2: node 2 left: exit code 1, error: loss is not finite at step 37"
    ] * 3
    assert not page.labels


def test_failed_and_missing_trials_are_counted_listed_and_left_out_of_means(tmp_path: Path, undrawn: None) -> None:
    study = made_up.write_study(
        tmp_path / "partial", seeds=[0, 1], intervals=[10, 50], curve_points=12,
        failed=["spes-interval_steps=50-seed=1"], missing=["dilico-interval_steps=50-seed=0"],
    )  # fmt: skip
    page = only_html(study)
    assert "2 trials of 10 gave no result (1 missing and 1 failed)" in page.text
    assert len(page.tables["missing"]) == 3
    row = next(row for row in page.tables["summary"] if row[:2] == ["spes", "50"])
    assert row[2:4] == ["1", f"{made_up.final_loss('spes', 50, 0):.3f}"]


def test_result_of_another_identity_is_not_used(tmp_path: Path, undrawn: None) -> None:
    study = made_up.write_study(tmp_path / "stale", seeds=[0], intervals=[10], curve_points=12)
    path = next(study.glob("trials/spes*/result.json"))
    result = json.loads(path.read_text())
    result["trial"]["id"] = "0123456789abcdef"
    path.write_text(json.dumps(result))
    page = only_html(study)
    assert "result.json is of trial 0123456789abcdef" in page.tables["missing"][1][-1]
    assert "spes" not in page.column("summary", "arm")


def test_study_without_a_reference_is_reported_without_comparison(tmp_path: Path, undrawn: None) -> None:
    study = made_up.write_study(tmp_path / "free", seeds=[0], intervals=[10, 50], arms=["dilico", "spes"])
    page = only_html(study)
    assert "the study has no reference arm" in page.text
    assert "differences" not in page.tables


@pytest.mark.parametrize("values", [[False, True], [0.05, 0.1], [2, 8]])
def test_any_axis_can_be_x(tmp_path: Path, values: list[object], undrawn: None) -> None:
    study = made_up.write_study(tmp_path / "axis", seeds=[0], intervals=[10, 50], curve_points=12)
    rename_axis(study, "merge.alpha", dict(zip([10, 50], values, strict=True)))
    page = only_html(study, x="merge.alpha", log_x=True)
    shown = ["off" if value is False else "on" if value is True else str(value) for value in values]
    assert page.column("summary", "α") == ["–", *shown, *shown]


def test_axis_of_words_is_drawn_side_by_side(tmp_path: Path) -> None:
    study = made_up.write_study(tmp_path / "words", seeds=[0], intervals=[10, 50], curve_points=12)
    rename_axis(study, "wire.dtype", {10: "float32", 50: "int8"})
    page = only_html(study, x="wire.dtype", log_x=True)
    assert page.column("summary", "wire dtype") == ["–", "float32", "int8", "float32", "int8"]
    assert "at wire dtype = int8" in plain(" ".join(page.labels))


def test_study_without_an_axis_sets_the_arms_side_by_side(tmp_path: Path) -> None:
    study = made_up.write_study(tmp_path / "flat", seeds=[0, 1], intervals=[10], curve_points=12)
    rename_axis(study, None, {})
    page = only_html(study, x=None)
    assert page.column("summary", "arm") == ["centralized", "dilico", "spes"]
    assert "H" not in page.tables["summary"][0]


def rename_axis(study: Path, path: str | None, values: dict[int, object]) -> None:
    """Give the fixture's trials another axis, or none."""
    file = study / "study.json"
    content = json.loads(file.read_text())
    for trial in content["trials"]:
        interval = trial["axes"].get("sync.interval_steps")
        trial["axes"] = {path: values[interval]} if path and interval else {}
    file.write_text(json.dumps(content))


def test_command_line_writes_where_it_is_told_and_says_where(
    study: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    content = json.loads((study / "study.json").read_text())
    content["report"]["formats"] = ["html"]
    copy = tmp_path / "copy"
    copy.mkdir()
    (copy / "study.json").write_text(json.dumps(content | {"trials": []}))
    assert main([str(copy), "--out", str(tmp_path / "out")]) == 0
    assert capsys.readouterr().out == f"{tmp_path / 'out' / 'index.html'}\n"
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == ["index.html", "provenance.json"]


def test_folder_that_is_no_study_exits_2_and_writes_nothing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([str(tmp_path / "none"), "--out", str(tmp_path / "out")]) == 2
    assert "study.json does not exist; give the folder of a study" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()
    (tmp_path / "study.json").write_text("[1]")
    with pytest.raises(ConfigError, match="one JSON object"):
        render(tmp_path, tmp_path / "out")
