"""A study through its real command, both trials at once: what the page prints is what the event files say."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.small_corpora import texts
from tests.unit.test_report import Page

pytestmark = [
    pytest.mark.processes,
    pytest.mark.skipif(sys.platform != "linux", reason="needs Linux: the fork server ends its children with prctl"),
]

STUDY = """\
schema: 1
name: small
question: Does the page print what the events say?
run:
  nodes: 2
  budget_tokens: 1_536
  model: {num_layers: 1, d_model: 16, num_heads: 2, num_kv_heads: 2, num_experts: 4, expert_hidden: 16, vocab_size: 300}
  data: {corpus: corpus, tokenizer_vocab_size: 300, validation_fraction: 0.2, sequence_length: 32,
         global_batch_sequences: 8}
  sync: {interval_steps: 2}
  merge: {num_neighbours: 1, interval_steps: 2, until_step: 4}
  validation: {max_sequences: 8}
arms:
  centralized: {method: centralized, role: reference}
  spes: {method: spes}
resources: {parallel_trials: 2, cpus: 4}
report: {formats: [html, csv]}
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An empty user's folder in which the study has run once."""
    folder = tmp_path_factory.mktemp("a user's folder")
    (folder / "corpus").mkdir()
    for number, text in enumerate(texts(80)):
        (folder / "corpus" / f"{number}.txt").write_text(text, encoding="utf-8")
    (folder / "small.yaml").write_text(STUDY, encoding="utf-8")
    run(folder)
    return folder


def run(folder: Path) -> str:
    command = [sys.executable, "-m", "workbench.study", "small.yaml"]
    root = str(Path(__file__).resolve().parents[2])
    environment = {**os.environ, "PYTHONPATH": root, "XDG_CACHE_HOME": str(folder / "cache"), "COLUMNS": "200"}
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr}"
    return done.stdout


@pytest.fixture(scope="module")
def page(folder: Path) -> Page:
    return Page((folder / "reports/small/index.html").read_text(encoding="utf-8"))


def events(folder: Path, arm: str) -> list[dict[str, Any]]:
    """What the two nodes of an arm's one trial recorded."""
    files = sorted(folder.glob(f"results/small/trials/{arm}-*/events/node-*.jsonl"))
    assert len(files) == 2
    return [json.loads(line) for path in files for line in path.read_text().splitlines()]


def of_kind(folder: Path, arm: str, kind: str) -> list[dict[str, Any]]:
    return [event for event in events(folder, arm) if event["kind"] == kind]


def row(page: Page, table: str, arm: str) -> dict[str, str]:
    head, *rows = page.tables[table]
    (found,) = [dict(zip(head, row, strict=True)) for row in rows if row[0] == arm]
    return found


def three_figures(value: float) -> float:
    return float(f"{value:.2e}")


def megabytes(row: dict[str, str], heading: str) -> float:
    return float(row[f"{heading} (MB)"].replace(",", ""))


@pytest.mark.parametrize("arm", ["centralized", "spes"])
def test_the_loss_is_the_sum_of_losses_over_the_sum_of_tokens(folder: Path, page: Page, arm: str) -> None:
    shares = [event for event in of_kind(folder, arm, "validation") if event["step"] == 6]
    assert len(shares) == 2
    loss = sum(share["loss_sum_nats"] for share in shares) / sum(share["target_tokens"] for share in shares)
    assert row(page, "summary", arm)["validation loss (nats per token)"] == f"{loss:.3f}"


def test_the_bytes_are_those_that_the_nodes_counted_in_their_rounds(folder: Path, page: Page) -> None:
    rounds = of_kind(folder, "spes", "round")
    assert len(rounds) == 2 * 3
    for way in ("uplink", "downlink"):
        payload = sum(event[f"{way}_payload_bytes"] for event in rounds) / 2
        whole = payload + sum(event[f"{way}_framing_bytes"] for event in rounds) / 2
        assert row(page, "predicted_bytes", "spes")[way] == f"{payload:,.0f}"
        assert megabytes(row(page, "summary", "spes"), way) == pytest.approx(three_figures(whole / 1e6))


def test_the_bytes_of_the_group_are_those_of_its_closing_events(folder: Path, page: Page) -> None:
    sent = [event["bytes_sent"] for event in of_kind(folder, "centralized", "collective")]
    assert megabytes(row(page, "summary", "centralized"), "uplink") == pytest.approx(three_figures(sum(sent) / 2e6))


@pytest.mark.parametrize("arm", ["centralized", "spes"])
def test_the_memory_is_that_of_the_largest_node(folder: Path, page: Page, arm: str) -> None:
    parts = ("weights_bytes", "gradients_bytes", "moments_bytes")
    nodes = of_kind(folder, arm, "memory")
    state = max(sum(node[part] for part in parts) for node in nodes)
    assert megabytes(row(page, "summary", arm), "trained state") == pytest.approx(three_figures(state / 1e6))
    all_parts = (*parts, "activations_bytes", "sync_buffers_bytes")
    largest = max(nodes, key=lambda node: sum(node[part] for part in all_parts))
    printed = row(page, "predicted_memory", arm)
    for part in parts:
        assert printed[part.removesuffix("_bytes")].split()[0] == f"{largest[part] / 1e6:,.2f}"


def test_the_speed_is_tokens_over_the_slowest_node_s_time_without_validation(folder: Path, page: Page) -> None:
    for arm in ("centralized", "spes"):
        ends = of_kind(folder, arm, "end")
        speed = sum(end["tokens"] for end in ends) / max(end["wall_time_s"] - end["validate_s"] for end in ends)
        assert row(page, "summary", arm)["tokens/s"] == f"{speed:,.0f}"


def test_the_same_command_again_runs_nothing_and_changes_nothing(folder: Path, page: Page) -> None:
    before = {path: path.stat().st_mtime_ns for path in folder.rglob("*") if path.is_file()}
    said = run(folder)
    assert "2 of 2 trials are done already" in said
    assert not re.search(r"to run|MLflow", said)
    assert {path: path.stat().st_mtime_ns for path in folder.rglob("*") if path.is_file()} == before
