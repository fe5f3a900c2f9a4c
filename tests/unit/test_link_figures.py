"""A stated link in plans, results and reports: the predicted time of a round, and time against bandwidth."""

from __future__ import annotations

import csv
import json
from dataclasses import replace
from pathlib import Path

import pytest

from spes_core.config import LinkConfig, MergeConfig, RunConfig, SyncConfig
from spes_core.link import GOODPUT
from spes_core.model.counting import round_bytes
from tests.reference import report_fixture as made_up
from workbench.plan import predict
from workbench.report.render import render
from workbench.study import main

LINK = LinkConfig(uplink_mbps=10, downlink_mbps=100, rtt_ms=20)


def test_the_plan_gives_a_round_the_time_of_its_slower_direction() -> None:
    config = RunConfig(link=LINK, merge=MergeConfig(enabled=False))
    sent = max(round_bytes(config, node, False).uplink_payload_bytes for node in range(config.nodes))
    assert predict(config).round_transfer_s == pytest.approx(sent * 8 / (10e6 * GOODPUT) + 3 * 0.02)


def test_rounds_that_merge_take_their_own_share_of_the_mean() -> None:
    link = replace(LINK, uplink_mbps=None)
    config = RunConfig(link=link, sync=SyncConfig(interval_steps=50), merge=MergeConfig(interval_steps=100))
    received = [round_bytes(config, 0, merged).downlink_payload_bytes for merged in (False, True)]
    prediction = predict(config)
    assert 0 < prediction.merges < prediction.rounds and received[0] < received[1]
    plain, merged = ((bytes_ * 8 / (100e6 * GOODPUT) + 0.06) for bytes_ in received)
    mean_s = plain + (merged - plain) * prediction.merges / prediction.rounds
    assert prediction.round_transfer_s == pytest.approx(mean_s)


def test_without_a_stated_bandwidth_nothing_is_predicted() -> None:
    assert predict(RunConfig()).round_transfer_s is None
    assert predict(RunConfig(link=LINK, sync=SyncConfig(exchange="none"))).round_transfer_s is None


def test_a_dry_run_shows_the_time_of_a_round_s_bytes_where_a_link_is_stated(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    text = (
        "schema: 1\nname: links\nquestion: How fast must a link be?\ndefaults: [model/tiny, data/default]\n"
        "run: {nodes: 2, budget_tokens: 40_960, data: {corpus: ., tokenizer_vocab_size: 300, sequence_length: 16}}\n"
        "arms: {spes: {method: spes}}\nsweep: {grid: {link.uplink_mbps: [10, 20]}}\n"
    )
    Path("links.yaml").write_text(text)
    assert main(["links.yaml", "--dry-run"]) == 0
    assert "transfer s/round" in capsys.readouterr().out
    Path("links.yaml").write_text(text.replace("link.uplink_mbps: [10, 20]", "sync.interval_steps: [5, 10]"))
    assert main(["links.yaml", "--dry-run"]) == 0
    assert "transfer s/round" not in capsys.readouterr().out


def test_round_time_against_bandwidth_is_a_figure_where_bandwidth_is_x(tmp_path: Path) -> None:
    study = made_up.write_study(tmp_path / "link", seeds=[0, 1], intervals=[10, 50], curve_points=12)
    for path in [study / "study.json", *study.rglob("result.json")]:
        path.write_text(path.read_text().replace('"sync.interval_steps"', '"link.uplink_mbps"'))
    for path in study.rglob("result.json"):
        result = json.loads(path.read_text())
        if mbps := result["trial"]["axes"].get("link.uplink_mbps"):
            result["metrics"] |= {"perf/round_time_s": 30 / mbps + 1, "perf/round_time_predicted_s": 30 / mbps}
            path.write_text(json.dumps(result))
    content = json.loads((study / "study.json").read_text())
    content["report"]["formats"] = ["html", "csv"]
    (study / "study.json").write_text(json.dumps(content))
    paths = render(study, tmp_path / "report")
    assert "Time of one round against uplink bandwidth" in paths.html.read_text()
    with (paths.html.parent / "figure_bandwidth.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert {(row["arm"], float(row["x"]), float(row["round_time_s"])) for row in rows} == {
        (arm, mbps, 30 / mbps + 1) for arm in ("dilico", "spes") for mbps in (10, 50)
    }
