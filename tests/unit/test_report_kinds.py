"""Reports of every kind of study: two axes, zipped axes, node counts, no axis, bandwidths, searches; and how they fit.

What a figure draws is checked by its data and its words; that no text leaves a figure or covers another by measuring.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import scipy.stats
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure as Drawing
from matplotlib.patches import Rectangle
from matplotlib.text import Annotation, Text

from tests.reference import report_fixture as made_up
from tests.unit.test_report import plain
from workbench.report import ink, searchfigures
from workbench.report.compose import compose
from workbench.report.document import PAGE, PHONE, Document, Figure, Layout, Table
from workbench.report.evidence import read
from workbench.report.findings import analyse
from workbench.report.labels import fitting_columns, width_pt, wrap
from workbench.report.observations import communication, setup
from workbench.report.words import verdict

SEEDS = (0, 1, 2)
LONG = {10: "a rule with a long name", 25: "another rule with a long name", 50: "mean"}


def edit(folder: Path, axes: Callable[[int], dict[str, Any]], change: Any = None, **report: Any) -> Path:
    """Give the fixture's trials other axes; ``change`` may alter every result."""
    file = folder / "study.json"
    study = json.loads(file.read_text())
    for trial in study["trials"]:
        interval = trial["axes"].get("sync.interval_steps")
        trial["axes"] = axes(interval) if interval else {}
    study["report"] |= report
    file.write_text(json.dumps(study))
    by_name = {trial["name"]: trial["axes"] for trial in study["trials"]}
    for path in folder.glob("trials/*/result.json"):
        result = json.loads(path.read_text())
        result["trial"]["axes"] = by_name[result["trial"]["name"]]
        if change is not None:
            change(result)
        path.write_text(json.dumps(result))
    return folder


def document(folder: Path) -> Document:
    return compose(read(folder), folder)


def figure_of(found: Document, name: str) -> Figure:
    return next(figure for figure in found.figures if figure.id == name)


def table_of(found: Document, name: str) -> Table:
    return next(table for table in found.tables if table.id == name)


@pytest.fixture(scope="module")
def two_axes(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """H of 10, 20 and 50 by K of 1 and 2, with the losses of the fixture at the interval that stands for the pair."""
    folder = made_up.write_study(
        tmp_path_factory.mktemp("kinds") / "two", seeds=SEEDS, intervals=(10, 11, 20, 21, 90, 91), curve_points=8
    )
    return edit(folder, lambda i: {"sync.interval_steps": i // 10 * 10, "merge.num_neighbours": 1 + i % 10})


def relative(arm: str, interval: int) -> np.ndarray:
    reference = np.array([made_up.final_loss("centralized", None, seed) for seed in SEEDS])
    return np.array([made_up.final_loss(arm, interval, seed) for seed in SEEDS]) / reference - 1


def test_two_axes_open_with_a_heat_map_whose_numbers_are_those_recomputed(two_axes: Path) -> None:
    found = document(two_axes)
    assert found.figures[0].id == "grid"
    rows = found.figures[0].data.to_dict("records")
    assert len(rows) == 12
    for row in rows:
        values = relative(row["arm"], row["sync.interval_steps"] + row["merge.num_neighbours"] - 1)
        low, high = scipy.stats.t.interval(0.95, 2, loc=values.mean(), scale=scipy.stats.sem(values))
        assert (row["difference"], row["low"], row["high"]) == pytest.approx((values.mean(), low, high))


def test_a_field_is_hatched_exactly_where_its_interval_holds_the_tolerance(two_axes: Path) -> None:
    figure = document(two_axes).figures[0]
    unsure = [row for row in figure.data.to_dict("records") if row["low"] <= 0.02 < row["high"]]
    drawn = figure.draw(PAGE)
    hatched = [p for axes in drawn.axes for p in axes.patches if isinstance(p, Rectangle) and p.get_hatch()]
    assert 0 < len(hatched) == len(unsure) < 12
    within = [p for axes in drawn.axes for p in axes.patches if isinstance(p, Rectangle) and p.get_linewidth() > 1]
    assert len(within) == sum(row["high"] <= 0.02 for row in figure.data.to_dict("records"))


def test_zipped_axes_add_nothing_to_the_name_of_an_arm(tmp_path: Path) -> None:
    folder = made_up.write_study(tmp_path / "zip", seeds=[0], intervals=(10, 50), curve_points=8)
    edit(folder, lambda i: {"sync.interval_steps": i, "merge.interval_steps": 2 * i, "merge.alpha": 0.1})
    evidence = read(folder)
    assert [series.label for series in evidence.series] == ["centralized", "dilico", "spes"]
    content = json.loads((folder / "study.json").read_text())
    content["report"].pop("x")
    (folder / "study.json").write_text(json.dumps(content))
    assert read(folder).x_path == "sync.interval_steps"
    assert [cell.x for cell in read(folder).cells] == [None, 10, 50, 10, 50]


@pytest.fixture(scope="module")
def nodes(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = made_up.write_study(
        tmp_path_factory.mktemp("kinds") / "nodes", seeds=[0, 1], intervals=(10, 25, 50), curve_points=8
    )
    count = {10: 2, 25: 4, 50: 8}

    def change(result: dict[str, Any]) -> None:
        result["config"]["nodes"] = result["trial"]["axes"].get("nodes", 1)
        rounds = result["metrics"]["comm/rounds"]
        if result["trial"]["arm"] == "spes" and rounds:
            sent = made_up.SHARED_BYTES + made_up.EXPERT_BYTES // result["config"]["nodes"]
            result["metrics"] |= {
                "comm/uplink_gb": rounds * sent / 1e9,
                "comm/uplink_predicted_gb": rounds * sent / 1e9,
            }

    return edit(folder, lambda i: {"nodes": count[i]}, change, x="nodes")


def test_a_study_of_node_counts_shows_bytes_of_a_round_by_the_formula(nodes: Path) -> None:
    rows = figure_of(document(nodes), "scaling").data.to_dict("records")
    spes = {row["nodes"]: row for row in rows if row["arm"] == "spes"}
    assert sorted(spes) == [2, 4, 8]
    for n, row in spes.items():
        expected = (made_up.SHARED_BYTES + made_up.EXPERT_BYTES // n) / 1e9
        assert row["uplink_per_round_gb"] == pytest.approx(expected)


def test_a_setting_that_varies_is_told_with_its_ends(nodes: Path) -> None:
    assert "tokens per step) over 1 to 8 nodes." in setup(read(nodes))


def test_node_counts_stand_beside_the_published_share(nodes: Path) -> None:
    rows = table_of(document(nodes), "literature").frame.to_dict("records")
    found = {row["quantity"]: row for row in rows}
    share = found["share of the parameters that a node trains"]
    assert share["published"].startswith("33\u00a0% on 16 nodes")
    assert "on 2 nodes" in share["ours"] and "on 8 nodes" in share["ours"]
    assert all(row["source"] == "arXiv 2602.11543" and row["differs"] for row in rows)


def test_published_uplink_stands_beside_ours_and_no_counterpart_is_made_up(tmp_path: Path) -> None:
    folder = made_up.write_study(tmp_path / "h", seeds=[0], intervals=(10, 50), curve_points=8)
    rows = {r["quantity"]: r for r in table_of(document(folder), "literature").frame.to_dict("records")}
    ours = made_up.uplink_payload_bytes("spes", 10) / made_up.uplink_payload_bytes("dilico", 10)
    row = rows["uplink of SPES over full-model averaging, float32"]
    assert plain(row["published"]).startswith("34 % (9.8 of 28.6 GB")
    assert plain(row["ours"]) == f"{100 * ours:.0f} %"
    assert "H from which quality falls" in rows and "merge warm-up against none" not in rows
    alone = made_up.write_study(tmp_path / "alone", seeds=[0], intervals=(10,), arms=["dilico"], curve_points=8)
    assert "literature" not in [table.id for table in document(alone).tables]


def test_merging_stands_beside_the_published_gain_only_against_an_arm_that_does_not_merge(tmp_path: Path) -> None:
    folder = made_up.write_study(tmp_path / "m", seeds=[0], intervals=(10, 50), arms=["centralized", "spes"])
    study = json.loads((folder / "study.json").read_text())
    for arm in (*study["arms"], *study["trials"]):
        arm.update({"method": "spes"})
    (folder / "study.json").write_text(json.dumps(study))
    for path in folder.glob("trials/centralized*/result.json"):
        result = json.loads(path.read_text())
        result["trial"]["method"] = "spes"
        path.write_text(json.dumps(result))
    rows = {r["quantity"]: r for r in table_of(document(folder), "literature").frame.to_dict("records")}
    difference = made_up.final_loss("spes", 10, 0) / made_up.final_loss("centralized", None, 0) - 1
    assert f"{100 * difference:+.2f} %" in plain(rows["merge warm-up against none"]["ours"])


def test_arms_without_an_axis_open_with_a_forest_plot_of_paired_differences(tmp_path: Path) -> None:
    folder = made_up.write_study(tmp_path / "flat", seeds=SEEDS, intervals=(10,), curve_points=8)
    found = document(edit(folder, lambda i: {}, x=None))
    assert [figure.id for figure in found.figures][:2] == ["forest", "loss"]
    for row in found.figures[0].data.to_dict("records"):
        values = relative(row["arm"], 10)
        low, high = scipy.stats.t.interval(0.95, 2, loc=values.mean(), scale=scipy.stats.sem(values))
        assert (row["mean"], row["low"], row["high"]) == pytest.approx((values.mean(), low, high))
        assert [row[f"seed_{seed}"] for seed in SEEDS] == pytest.approx(list(values))


def test_a_bandwidth_has_no_sweet_spot_and_its_verdict_tells_of_speed(tmp_path: Path) -> None:
    folder = made_up.write_study(tmp_path / "links", seeds=[0], intervals=(10, 25, 50), arms=["centralized", "spes"])
    speeds = {5: 0.25, 20: 0.97, 80: 1.0}
    mbps = {10: 5, 25: 20, 50: 80}

    def change(result: dict[str, Any]) -> None:
        share = speeds.get(result["trial"]["axes"].get("link.uplink_mbps"), 1.0)
        result["metrics"] |= {"perf/tokens_per_s": 1000 * share, "comm/uplink_gb": 0.5}

    found = document(edit(folder, lambda i: {"link.uplink_mbps": mbps[i]}, change, x="link.uplink_mbps"))
    assert plain(found.verdict[0]) == (
        "Spes keeps 25 % of centralized's speed at 5 and at least 95 % from 20 Mbit/s on (speed in tokens per second,"
        " n = 1)."
    )
    assert not any("sweet spot" in sentence for sentence in found.verdict)
    assert "sweet spot" not in figure_of(found, "loss").caption


def test_the_verdict_says_inconclusive_where_it_is(tmp_path: Path) -> None:
    folder = made_up.write_study(tmp_path / "h", seeds=SEEDS, intervals=(50,), arms=["centralized", "spes"])
    values = relative("spes", 50)
    low, high = scipy.stats.t.interval(0.95, 2, loc=values.mean(), scale=scipy.stats.sem(values))
    study = json.loads((folder / "study.json").read_text())
    for tolerance, word in ((low - 0.001, "outside"), ((low + high) / 2, "inconclusive at"), (high + 0.001, "within")):
        study["report"]["tolerance"] = tolerance
        (folder / "study.json").write_text(json.dumps(study))
        assert f": {word} " in verdict(analyse(read(folder)))[0]


def test_means_far_beyond_the_rest_become_arrows_with_their_value(tmp_path: Path) -> None:
    folder = made_up.write_study(tmp_path / "far", seeds=[0], intervals=(10, 25, 50), curve_points=8)
    for path in folder.glob("trials/spes-interval_steps=50*/result.json"):
        result = json.loads(path.read_text())
        result["metrics"]["eval/loss"] = 9.25
        path.write_text(json.dumps(result))
    figure = document(folder).figures[0]
    assert "An arrow with its value marks a mean beyond the frame." in figure.caption
    (axes,) = figure.draw(PAGE).axes
    assert axes.get_ylim()[1] < 4
    assert "9.25" in [text.get_text() for text in axes.texts]


def search_of(points: list[tuple[dict[str, Any], float, bool]], importances: list[dict[str, Any]]) -> Any:
    """As much of a search as its figures read."""
    found = [
        SimpleNamespace(number=i + 1, axes=axes, is_winner=i == 1, scored=SimpleNamespace(values=(v,), feasible=kept))
        for i, (axes, v, kept) in enumerate(points)
    ]
    return SimpleNamespace(
        points=found, axes=list(points[0][0]), constraints=[object()],
        record={"seeds": [0, 1], "importances": importances},
        objectives=[SimpleNamespace(metric="comm/uplink_gb", goal="minimize")],
    )  # fmt: skip


def test_a_search_shows_the_best_so_far_slices_and_importances() -> None:
    points = [({"sync.interval_steps": 8, "wire.dtype": "int8"}, 3.0, True),
              ({"sync.interval_steps": 64, "wire.dtype": "int4"}, 1.0, True),
              ({"sync.interval_steps": 1, "wire.dtype": "int4"}, 0.1, False),
              ({"sync.interval_steps": 2, "wire.dtype": "float32"}, 2.0, True)]  # fmt: skip
    shares = [{"objective": "comm/uplink_gb", "setting": path, "importance": share}
              for path, share in (("sync.interval_steps", 0.9), ("wire.dtype", 0.1))]  # fmt: skip
    search = search_of(points, shares)
    history = searchfigures.path_figure(search)
    assert history is not None and history.data["best_so_far"].tolist() == [3.0, 1.0, 1.0, 1.0]
    assert "Winners: point 2 at 1.00" in history.alt
    slices, bars = searchfigures.slices_figure(search), searchfigures.importances_figure(search)
    assert slices is not None and bars is not None
    drawn = slices.draw(PAGE)
    assert [axes.get_xlabel() for axes in drawn.axes] == ["H", "type of tensors on the wire"]
    assert [axes.get_xscale() for axes in drawn.axes] == ["log", "linear"]
    assert [round(patch.get_width(), 2) for patch in bars.draw(PAGE).axes[0].patches] == [0.9, 0.1]
    for figure in (history, slices, bars):
        assert overhanging(figure, PAGE) == overhanging(figure, PHONE) == []
    assert searchfigures.path_figure(search_of(points[:1], [])) is None


def shown_texts(drawing: Drawing) -> Iterator[Text]:
    """Every text that is drawn; ticks outside their axis are not."""
    hidden = set()
    for axes in drawing.axes:
        for axis in (axes.xaxis, axes.yaxis):
            drawn = axis._update_ticks()  # type: ignore[attr-defined]
            ticks = [tick for tick in (*axis.majorTicks, *axis.minorTicks) if tick not in drawn]
            hidden |= {id(label) for tick in ticks for label in (tick.label1, tick.label2)}
    for text in drawing.findobj(Text):
        assert isinstance(text, Text)
        seen = text.get_visible() and (text.axes is None or text.axes.get_visible())
        if seen and text.get_text().strip() and id(text) not in hidden:
            yield text


def overhanging(figure: Figure, layout: Layout) -> list[str]:
    """Texts that reach more than 4 points beyond the figure's edge, where a PDF would cut them off."""
    drawing = figure.draw(layout)
    canvas = FigureCanvasAgg(drawing)
    with ink.drawing("measure"):
        canvas.draw()
        found = []
        for text in shown_texts(drawing):
            box = text.get_window_extent(canvas.get_renderer())
            beyond = max(-box.x0, box.x1 - drawing.bbox.x1, -box.y0, box.y1 - drawing.bbox.y1)
            if box.width and beyond * 72 / drawing.dpi > 4:
                found.append(f"{figure.id}: {text.get_text()}")
    return found


@pytest.fixture(scope="module")
def wordy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Long words on both axes, and one value far from the rest."""
    folder = made_up.write_study(
        tmp_path_factory.mktemp("kinds") / "wordy", seeds=[0], intervals=(10, 11, 25, 26, 50, 51), curve_points=8
    )
    kinds = ("a fault that turns signs round", "noise of many colours")

    def axes(interval: int) -> dict[str, Any]:
        return {"aggregate.rule": LONG.get(interval) or LONG[interval - 1], "faults.kind": kinds[interval not in LONG]}

    edit(folder, axes, x="aggregate.rule")
    path = next(folder.glob("trials/spes-interval_steps=50*/result.json"))
    result = json.loads(path.read_text())
    result["metrics"]["eval/loss"] = 9.1
    path.write_text(json.dumps(result))
    return folder


@pytest.mark.parametrize("layout", [PAGE, PHONE], ids=["page", "phone"])
def test_no_text_of_any_figure_is_cut_off_even_with_long_names(wordy: Path, nodes: Path, layout: Layout) -> None:
    figures = [*document(wordy).figures, figure_of(document(nodes), "scaling")]
    assert len(figures) == 10
    assert [text for figure in figures for text in overhanging(figure, layout)] == []


def test_labels_of_coinciding_points_become_one_and_cover_no_other(tmp_path: Path) -> None:
    folder = made_up.write_study(tmp_path / "same", seeds=[0], intervals=(10, 25, 50), arms=["centralized", "spes"])

    def change(result: dict[str, Any]) -> None:
        if result["trial"]["axes"]:
            result["metrics"] |= {"eval/loss": 3.5, "comm/uplink_gb": 0.4}

    figure = figure_of(
        document(edit(folder, lambda i: {"merge.num_neighbours": i}, change, x="merge.num_neighbours")), "pareto"
    )
    drawing = figure.draw(PAGE)
    canvas = FigureCanvasAgg(drawing)
    canvas.draw()
    labels = [text for text in drawing.axes[0].texts if isinstance(text, Annotation)]
    assert sum("10, 25, 50" in text.get_text() for text in labels) == 1
    boxes = [text.get_window_extent(canvas.get_renderer()) for text in labels]
    assert not [1 for i, one in enumerate(boxes) for other in boxes[:i] if one.overlaps(other)]


def test_text_breaks_at_spaces_and_legends_at_the_width_of_the_page() -> None:
    with ink.drawing("measure"):
        lines = wrap("one rule with a very long name indeed", 60, 8.0).split("\n")
        assert len(lines) > 2 and all(width_pt(line, 8.0) <= 60 for line in lines)
        assert " ".join(lines) == "one rule with a very long name indeed"
        labels = ["a label of some length"] * 6
        wide = 6 * (width_pt(labels[0], 8.0) + 20)
        assert fitting_columns(labels, wide + 1, 8.0, around_pt=20) == 6
        assert fitting_columns(labels, wide / 2 + 1, 8.0, around_pt=20) == 3
        assert fitting_columns(labels, 10, 8.0, around_pt=20) == 1


def test_trials_of_different_code_are_marked_in_the_row_that_holds_both(tmp_path: Path) -> None:
    folder = made_up.write_study(tmp_path / "mixed", seeds=[0, 1], intervals=(10,), curve_points=8)
    path = next(folder.glob("trials/spes-interval_steps=10-seed=1*/result.json"))
    result = json.loads(path.read_text())
    result["provenance"]["code_digest"] = "beef" * 16
    path.write_text(json.dumps(result))
    found = document(folder)
    summary, trials = table_of(found, "summary"), table_of(found, "trials")
    marked = [row["arm"] for row in summary.frame.to_dict("records") if row[summary.mark or ""]]
    assert marked == ["spes"] and "run by different code" in summary.caption
    assert [column.heading for column in trials.columns if column.key == "code"] == ["code"]
    shutil.rmtree(folder)


@pytest.mark.parametrize("part", [("provenance", "code_digest"), ("data", "digest")])
def test_a_trial_of_another_version_than_its_cell_is_in_no_number_and_is_listed(
    tmp_path: Path, part: tuple[str, str]
) -> None:
    folder = made_up.write_study(tmp_path / "mixed", seeds=SEEDS, intervals=(10,), curve_points=8)
    path = next(folder.glob("trials/spes-interval_steps=10-seed=1*/result.json"))
    result = json.loads(path.read_text())
    result[part[0]][part[1]] = "beef" * 16
    result["metrics"]["eval/loss"] = 1000.0
    path.write_text(json.dumps(result))
    found = document(folder)
    row = table_of(found, "summary").frame.set_index("arm").loc["spes"]
    assert row["n"] == 2
    assert row["mean"] == pytest.approx(np.mean([made_up.final_loss("spes", 10, seed) for seed in (0, 2)]))
    difference = table_of(found, "differences").frame.set_index("arm").loc["spes"]
    assert difference["n"] == 2 and abs(difference["mean"]) < 1
    listed = table_of(found, "missing").frame.to_dict("records")
    assert [(entry["arm"], entry["seed"], entry["status"]) for entry in listed] == [("spes", 1, "set aside")]
    assert "beefbeefbeef" in listed[0]["reason"]
    for figure in found.figures:
        if {"arm", "seed"} <= set(figure.data) and figure.id != "load":
            used = figure.data[figure.data["arm"] == "spes"]["seed"].dropna()
            assert 1 not in set(used), figure.id


def test_bootstrap_intervals_stand_beside_student_s_from_five_seeds_on(tmp_path: Path) -> None:
    found = {}
    for n in (3, 6):
        folder = made_up.write_study(tmp_path / str(n), seeds=range(n), intervals=(10,), curve_points=8)
        found[n] = table_of(document(folder), "differences")
    assert "bootstrap" not in [column.heading for column in found[3].columns]
    assert "bootstrap" in [column.heading for column in found[6].columns]
    values = np.array([found[6].frame.to_dict("records")[0][f"seed_{seed}"] for seed in range(6)])
    low, high = scipy.stats.bootstrap((values,), np.mean, method="percentile", n_resamples=20_000).confidence_interval
    shown = [float(text) for text in plain(found[6].frame["bootstrap"][0]).strip("[] %").replace("]", "").split(",")]
    assert shown == pytest.approx([100 * low, 100 * high], abs=0.06)


def test_a_share_of_next_to_nothing_is_not_told(tmp_path: Path) -> None:
    """A reference that is alone receives only what answers its own messages."""

    def alone(result: dict[str, Any]) -> None:
        if result["trial"]["arm"] == "centralized":
            result["metrics"]["comm/downlink_gb"] = 1e-9

    folder = made_up.write_study(tmp_path / "alone", seeds=SEEDS, intervals=(10, 50), curve_points=8)
    before = communication(analyse(read(folder)))
    assert "against centralized, a node of spes sends" in before and before.count(" and receives ") == 2
    edit(folder, lambda interval: {"sync.interval_steps": interval}, alone)
    after = communication(analyse(read(folder)))
    assert "against centralized, a node of spes sends" in after and after.count(" and receives ") == 1
