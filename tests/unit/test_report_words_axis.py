"""Reports along an axis of words, and about bytes: order, figures, verdict."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.reference import report_fixture as made_up
from tests.unit.test_report import Page, number, plain
from workbench.report.compose import compose
from workbench.report.evidence import read
from workbench.report.figures import axis_of
from workbench.report.findings import analyse
from workbench.report.render import render
from workbench.report.words import verdict

CODECS = {10: "bfloat16", 25: "int8", 200: "int4"}
"""The made-up study knows intervals: the longer, the fewer bytes and the larger the loss, as with codecs."""


@pytest.fixture
def study(tmp_path: Path) -> Path:
    return codec_study(tmp_path / "results" / "wire_codecs")


def codec_study(folder: Path, hero: str = "bytes", seeds: tuple[int, ...] = (0, 1, 2)) -> Path:
    made_up.write_study(folder, seeds=seeds, intervals=tuple(CODECS), arms=("centralized", "spes"), curve_points=8)
    for path in (folder / "study.json", *folder.glob("trials/*/result.json")):
        content = json.loads(path.read_text())
        for trial in content["trials"] if path.name == "study.json" else [content["trial"]]:
            if interval := trial["axes"].pop("sync.interval_steps", None):
                trial["axes"]["wire.dtype"] = CODECS[interval]
        if path.name == "study.json":
            content["report"] = {"x": "wire.dtype", "hero": hero, "tolerance": 0.02, "formats": ["html"]}
        path.write_text(json.dumps(content))
    return folder


def test_words_stand_in_the_order_of_the_study(study: Path) -> None:
    evidence = read(study)
    assert evidence.x_values == ["bfloat16", "int8", "int4"]
    axis = axis_of(evidence)
    assert axis.ticks == ("bfloat16", "int8", "int4") and not axis.joined and not axis.log
    assert [cell.x for cell in evidence.cells_of(evidence.series[1])] == ["bfloat16", "int8", "int4"]


def test_a_study_about_bytes_opens_with_loss_against_bytes(study: Path) -> None:
    assert [figure.id for figure in compose(read(study), study).figures][:3] == ["pareto", "loss", "forest"]
    other = codec_study(study.parent / "other", hero="loss")
    assert [figure.id for figure in compose(read(other), other).figures][:4] == ["loss", "forest", "uplink", "pareto"]


def test_its_verdict_names_what_sends_least_within_the_tolerance(study: Path) -> None:
    evidence = read(study)
    losses = {
        codec: [made_up.final_loss("spes", interval, seed) for seed in (0, 1, 2)] for interval, codec in CODECS.items()
    }
    level = sum(made_up.final_loss("centralized", None, seed) for seed in (0, 1, 2)) / 3
    assert sum(losses["int8"]) / 3 < 1.02 * level < sum(losses["int4"]) / 3
    text = [plain(sentence) for sentence in verdict(analyse(evidence))]
    assert text[0].startswith("At wire dtype = int8, spes lost")
    assert text[1] == "The fewest bytes whose upper bound stays within 2 % are those of spes at wire dtype = int8."


def test_with_one_seed_the_points_decide(tmp_path: Path) -> None:
    text = [plain(sentence) for sentence in verdict(analyse(read(codec_study(tmp_path / "one", seeds=(0,)))))]
    assert text[0].startswith("At wire dtype = int8, spes lost")
    assert text[1] == "The fewest bytes whose loss stays within 2 % are those of spes at wire dtype = int8."


def test_without_any_point_within_the_tolerance_it_says_so(study: Path) -> None:
    content = json.loads((study / "study.json").read_text())
    content["report"]["tolerance"] = 0.0
    (study / "study.json").write_text(json.dumps(content))
    text = [plain(sentence) for sentence in verdict(analyse(read(study)))]
    assert text[0].startswith("At wire dtype = bfloat16, spes lost")
    assert text[1] == "No point of spes has its upper bound within 0 %."


def test_the_page_shows_codecs_as_words_and_their_bytes(study: Path) -> None:
    page = Page(render(study, study.parent / "report").html.read_text(encoding="utf-8"))
    assert page.column("summary", "wire dtype") == ["–", "bfloat16", "int8", "int4"]
    sent = [number(text) for text in page.column("summary", "uplink (GB)")]
    assert sent[1] > sent[2] > sent[3]
    pareto = next(label for label in page.labels if label.startswith("Validation loss against uplink"))
    assert "spes: " in pareto
    assert "Words: wire dtype. Dashed: the reference +2 % (tolerance)." in plain(page.text)


def test_rounds_with_absent_nodes_are_not_called_wrong(study: Path) -> None:
    path = next(iter(study.glob("trials/spes*/result.json")))
    content = json.loads(path.read_text())
    for field in ("uplink_payload_bytes", "downlink_payload_bytes"):
        content["rounds"][0][field][1] = None
    path.write_text(json.dumps(content))
    table = next(table for table in compose(read(study), study).tables if table.id == "predicted_bytes")
    assert "some were absent" in table.caption and "wrong" not in table.caption
    assert table.frame["differs"].tolist().count(True) == 1
