"""How alike experts are: against a loop, in the rounds of a real server, in result.json and in a report's figure."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from spes_core.config import ModelConfig, RunConfig, ValidationConfig
from spes_core.events import EventWriter
from spes_core.runfile import RunFile
from spes_core.schedules import validation_steps
from spes_core.sync.inprocess import LocalClient
from spes_core.sync.ledger import Standing
from spes_core.sync.merge import nearest_experts
from spes_core.sync.similarity import mean_similarity
from tests.reference import report_fixture as made_up
from tests.round_node import Node, nodes_of, one_round, whole_run
from tests.small_rounds import FULL, MODEL, Recorder, make_server, run_rounds, running, small_config
from workbench.curves import experts_curve
from workbench.recording import Recording
from workbench.report.compose import compose
from workbench.report.document import PAGE, PHONE, Document
from workbench.report.evidence import read
from workbench.results import build_result

CONFIG = small_config(validation=ValidationConfig(interval_tokens=900), budget_tokens=8 * 240)
"""Rounds after steps 2, 4, 6 and 8 of 240 tokens; 900 and 1800 tokens are passed by the second and the last."""


def similarity_loop(gate_up: list[list[float]]) -> float:
    """Mean cosine over pairs, one multiplication after another."""
    half = len(gate_up[0]) // 2
    cosines = []
    for i, left in enumerate(gate_up):
        for right in gate_up[i + 1 :]:
            a, b = left[:half], right[:half]
            norms = math.sqrt(sum(x * x for x in a)) * math.sqrt(sum(x * x for x in b))
            cosines.append(sum(x * y for x, y in zip(a, b, strict=True)) / norms if norms else 0.0)
    return sum(cosines) / len(cosines)


@pytest.mark.parametrize(("experts", "values"), [(2, 6), (5, 40), (3, 70_002)])
def test_the_mean_cosine_is_that_of_a_loop_and_the_bank_stays_as_it_is(experts: int, values: int) -> None:
    flat = torch.randn(experts * (values + 7) + 3, generator=torch.Generator().manual_seed(values))
    bank = flat.as_strided((experts, values), (values + 7, 1), 3)
    bank += 0.3
    before = flat.clone()
    assert mean_similarity(bank) == pytest.approx(similarity_loop(bank.tolist()), rel=0, abs=1e-12)
    assert torch.equal(flat, before)


def test_the_ends_of_the_scale_and_an_expert_of_zeros() -> None:
    same = torch.tensor([[1.0, 2.0, 9.0, 0.0]]).repeat(3, 1)
    assert mean_similarity(same) == pytest.approx(1.0, abs=1e-15)
    assert mean_similarity(torch.tensor([[1.0, 0.0, 5.0, 5.0], [0.0, 1.0, 5.0, 5.0]])) == 0.0
    assert mean_similarity(torch.tensor([[1.0, 0.0], [-1.0, 0.0]])) == -1.0
    same[0] = 0.0
    assert mean_similarity(same) == pytest.approx(1 / 3, abs=1e-15)


def test_merging_still_finds_the_same_neighbours() -> None:
    gate = torch.tensor([[1.0, 0.0], [1.0, 0.1], [0.0, 1.0], [0.0, 0.0]])
    assert nearest_experts(gate, 2).tolist() == [[1, 2], [0, 2], [1, 0], [0, 1]]


# In the rounds of a server


def by_hand(config: RunConfig, recorder: Recorder, rounds: int) -> list[list[float]]:
    """Take a server through its rounds; the similarities of its state after each, by layer, by the loop."""
    server, found = make_server(config, recorder), []
    with running(server) as outcome:
        nodes = nodes_of(server, config)
        for round in range(rounds):
            one_round(nodes, round)
            layers = range(config.model.num_layers)
            found.append([similarity_loop(server.state.bank(layer, "gate_up").tolist()) for layer in layers])
    assert outcome == [None]
    return found


def test_the_server_records_them_where_a_validation_is_due_and_nowhere_else() -> None:
    recorder = Recorder()
    truth = by_hand(CONFIG, recorder, rounds=4)
    events = recorder.of("experts")
    assert validation_steps(CONFIG) == [4, 8]
    assert [(event["round"], event["step"]) for event in events] == [(1, 4), (3, 8)]
    for event in events:
        assert event["similarity"] == pytest.approx(truth[event["round"]], rel=0, abs=1e-12)


def test_recording_them_alters_no_bit(monkeypatch: pytest.MonkeyPatch) -> None:
    with_them = whole_run(small_config())
    monkeypatch.setattr("spes_core.sync.closing.validation_steps", lambda config: [])
    assert whole_run(small_config()) == with_them


def test_a_model_of_one_expert_has_no_pairs_and_no_event() -> None:
    config = small_config(
        model=replace(MODEL, num_experts=1), partition=FULL, merge=replace(CONFIG.merge, enabled=False)
    )
    recorder = Recorder()
    server = make_server(config, recorder)
    with running(server) as outcome:
        run_rounds(config, lambda node: LocalClient(server))
    assert outcome == [None]
    assert len(recorder.of("round")) == 2 and recorder.of("experts") == []


def test_the_event_is_in_the_file_before_the_checkpoint_that_ends_its_round() -> None:
    recorder, told = Recorder(), []

    def save(standing: Standing) -> None:
        told.append((standing.step, [event["step"] for event in recorder.of("experts")]))

    server = make_server(CONFIG, recorder, checkpoint_steps=(2, 4))
    with running(server, save):
        nodes: list[Node] = nodes_of(server, CONFIG)
        for round in range(4):
            one_round(nodes, round)
    assert told == [(2, []), (4, [4])]


# In result.json and the report


def test_the_curve_has_the_mean_over_layers_and_the_newest_event_of_a_step(tmp_path: Path) -> None:
    config = RunConfig(model=ModelConfig(num_layers=2))
    (tmp_path / "events").mkdir()
    RunFile(trial="t", config=config, data_dir="data").save(tmp_path / "run.json")
    assert "experts" not in build_result(tmp_path)["curves"]
    writer = EventWriter(tmp_path / "events" / "server.jsonl")
    for step, similarity in ((2, [0.9, 0.9]), (4, [math.nan, 0.5]), (2, [0.25, 0.75])):
        writer.write("experts", round=step // 2 - 1, step=step, similarity=similarity)
    writer.close()
    tokens = config.tokens_per_step
    assert experts_curve(config, Recording(tmp_path / "events"))[0] == {
        "step": 2, "tokens": 2 * tokens, "similarity": 0.5, "similarity_by_layer": [0.25, 0.75],
    }  # fmt: skip
    last = build_result(tmp_path)["curves"]["experts"][1]
    assert last == {"step": 4, "tokens": 4 * tokens, "similarity": None, "similarity_by_layer": [None, 0.5]}


def report(folder: Path, arms: tuple[str, ...] = ("dilico", "spes")) -> Document:
    """A report of a study whose trials of ``arms`` recorded similarities; spes merges, dilico does not."""
    made_up.write_study(folder, seeds=[0, 1], intervals=(10, 50), curve_points=8)
    for path in folder.glob("trials/*/result.json"):
        result: dict[str, Any] = json.loads(path.read_text())
        if result["trial"]["arm"] in arms:
            rise = 0.1 * result["config"]["merge"]["enabled"] + 0.02 * result["trial"]["seed"]
            result["curves"]["experts"] = [
                {"step": step, "tokens": step * made_up.STEP_TOKENS, "similarity": rise * step / made_up.STEPS,
                 "similarity_by_layer": [0.0, 2 * rise * step / made_up.STEPS]}
                for step in (120, 240, 480)
            ]  # fmt: skip
            path.write_text(json.dumps(result))
    return compose(read(folder), folder)


def test_the_figure_shows_each_arm_and_tells_merged_ones_from_others(tmp_path: Path) -> None:
    found = report(tmp_path / "study")
    figure = next(figure for figure in found.figures if figure.id == "similarity")
    assert len(figure.data) == 2 * 2 * 2 * 3
    assert {(row["arm"], row["merged"]) for row in figure.data.to_dict("records")} == {
        ("dilico", False), ("spes", True),
    }  # fmt: skip
    assert figure.data["layer_1"].tolist() == pytest.approx((2 * figure.data["similarity"]).tolist())
    (axes,) = figure.draw(PAGE).axes
    styles = {line.get_linestyle(): line.get_ydata()[-1] for line in axes.lines}  # type: ignore[index]
    assert styles == {"-": pytest.approx(0.11), "--": pytest.approx(0.01)}
    assert len(axes.lines) == 4 and axes.get_xlabel() == "tokens (million)"
    assert np.isclose(axes.lines[0].get_xdata()[-1], 480 * made_up.STEP_TOKENS / 1e6)  # type: ignore[index]
    caption = figure.caption.replace("\u00a0", " ")
    assert "(n = 2)" in caption and "dashed: they are not" in caption and "Arms that are not shown" in caption
    figure.draw(PHONE)


def test_results_without_it_have_no_figure(tmp_path: Path) -> None:
    found = report(tmp_path / "study", arms=())
    assert "similarity" not in [figure.id for figure in found.figures]
    assert "similarity" not in [section.id for section in found.sections]
