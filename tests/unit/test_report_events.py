"""Every number in a report's tables equals one recomputed from the lines of the event files, by code of the test."""

from __future__ import annotations

import csv
import json
import math
import random
from collections import defaultdict
from pathlib import Path
from statistics import fmean
from typing import Any

import pytest
import scipy.stats

from spes_core.events import EventWriter
from spes_core.runfile import RunFile
from tests.unit.test_report import Page, number, plain
from tests.unit.test_results import ROUNDS
from workbench.report.render import render
from workbench.results import build_result

ARMS = {"full": "reference", "sparse": "treatment"}
SEEDS = (0, 1, 2)
PARTS = ("weights", "gradients", "moments", "activations", "sync_buffers", "rss_peak")
TIMES = ("compute", "serialise", "transfer", "wait", "aggregate", "merge", "data")


@pytest.fixture(scope="module")
def study(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("events") / "results" / "traced"
    trials = []
    for arm, role in ARMS.items():
        for seed in SEEDS:
            trial = {"id": f"{arm}{seed}", "name": f"{arm}-seed={seed}", "study": "traced", "arm": arm, "role": role,
                     "method": "spes", "seed": seed, "axes": {}}  # fmt: skip
            write_trial(folder / "trials" / f"{arm}-seed={seed}", trial)
            trials.append(trial)
    study = {
        "schema": 1, "name": "traced", "question": "Is it traced?", "command": "c", "study_file": "f", "trials": trials,
        "arms": [{"name": arm, "method": "spes", "role": role} for arm, role in ARMS.items()], "equal": ["model"],
        "metrics": {"primary": {"name": "eval/loss", "goal": "minimize"}}, "report": {"formats": ["html", "csv"]},
    }  # fmt: skip
    (folder / "study.json").write_text(json.dumps(study))
    return folder


def write_trial(folder: Path, trial: dict[str, Any]) -> None:
    """Two nodes and a server that took four steps in two rounds, with numbers drawn by the trial's name."""
    (folder / "events").mkdir(parents=True)
    draw = random.Random(trial["id"])
    RunFile(trial=trial["name"], config=ROUNDS, data_dir="data").save(folder / "run.json")
    (folder / "trial.json").write_text(json.dumps({"trial": trial, "provenance": {"code_digest": "c"}, "data": {}}))
    outcome = {"status": "done", "error": None, "started_at": "2026-11-30T00:00:00+00:00", "finished_at": None,
               "launched_at_s": 0.0}  # fmt: skip
    (folder / "outcome.json").write_text(json.dumps(outcome))
    sent: dict[int, dict[str, dict[str, int]]] = defaultdict(lambda: defaultdict(dict))
    for node in (0, 1):
        writer = EventWriter(folder / "events" / f"node-{node}.jsonl")
        writer.write("first_step")
        seconds = {f"{part}_s": draw.uniform(0.1, 3) for part in TIMES}
        for index, step in enumerate((2, 4)):
            writer.write("train", step=step, tokens=100 * step, loss_nats=draw.uniform(3, 5), tokens_per_s=30.0,
                         grad_norm=1.0, learning_rate=0.1, step_time_s=0.1, z_loss=0.0, balance_loss=0.0,
                         router_z_loss=0.0)  # fmt: skip
            writer.write("load", step=step, expert_tokens=[[draw.randrange(1, 99) for _ in "ab"] for _ in "ab"])
            counts = {f"{way}_{part}_bytes": draw.randrange(1000, 9000) for way in ("uplink", "downlink")
                      for part in ("payload", "framing")}  # fmt: skip
            writer.write("round", round=index, step=step, tokens=100 * step, merged=index == 0, digest="x", **counts,
                         **{key: value for key, value in seconds.items() if key != "compute_s"})  # fmt: skip
            for field, count in counts.items():
                sent[index][field][str(node)] = count
            writer.write("validation", step=step, tokens=100 * step, part=node, parts=2, duration_s=1.0,
                         loss_sum_nats=draw.uniform(60, 90), target_tokens=20 + node, target_bytes=50)  # fmt: skip
        writer.write(
            "memory", cuda_peak_bytes=None, **{f"{part}_bytes": draw.randrange(10**6, 10**7) for part in PARTS}
        )
        writer.write("end", steps=4, tokens=200, wall_time_s=draw.uniform(20, 30), validate_s=2.0, **seconds)
    server = EventWriter(folder / "events" / "server.jsonl")
    for index in (0, 1):
        server.write("round", round=index, step=2 + 2 * index, merged=index == 0, round_time_s=1.0, alpha=0.1,
                     **sent[index])  # fmt: skip
    server.write("end", rounds=2, merges=1, rss_peak_bytes=4_000)
    (folder / "result.json").write_text(json.dumps(build_result(folder)))


@pytest.fixture(scope="module")
def page(study: Path) -> Page:
    return Page(render(study, study.parents[1] / "reports" / "traced").html.read_text(encoding="utf-8"))


def events(study: Path, arm: str, seed: int, kind: str) -> list[list[dict[str, Any]]]:
    """The events of a kind, by node."""
    folder = study / "trials" / f"{arm}-seed={seed}" / "events"
    files = [(folder / f"node-{node}.jsonl").read_text().splitlines() for node in (0, 1)]
    return [[event for line in lines if (event := json.loads(line))["kind"] == kind] for lines in files]


def final_loss(study: Path, arm: str, seed: int) -> float:
    last = [by_node[-1] for by_node in events(study, arm, seed, "validation")]
    return float(sum(e["loss_sum_nats"] for e in last) / sum(e["target_tokens"] for e in last))


def wire(study: Path, arm: str, seed: int, way: str, *parts: str) -> float:
    """Bytes of one node over the run, mean over nodes."""
    rounds = events(study, arm, seed, "round")
    return fmean(sum(e[f"{way}_{part}_bytes"] for e in by_node for part in parts) for by_node in rounds)


def speed(study: Path, arm: str, seed: int) -> float:
    ends = [by_node[-1] for by_node in events(study, arm, seed, "end")]
    return float(sum(e["tokens"] for e in ends) / max(e["wall_time_s"] - e["validate_s"] for e in ends))


def state(study: Path, arm: str, seed: int) -> float:
    last = [by_node[-1] for by_node in events(study, arm, seed, "memory")]
    return float(max(e["weights_bytes"] + e["gradients_bytes"] + e["moments_bytes"] for e in last))


def over_seeds(values: Any) -> list[float]:
    return [values(seed) for seed in SEEDS]


def close(text: str, expected: float) -> bool:
    """Whether a printed number is ``expected``, rounded as far as it shows."""
    digits = len(text.replace(",", "").partition(".")[2])
    return math.isclose(number(text), expected, rel_tol=1e-9, abs_tol=0.5000001 * 10**-digits)


def test_the_table_of_results_is_that_of_the_events(study: Path, page: Page) -> None:
    head, *rows = page.tables["summary"]
    assert [row[0] for row in rows] == list(ARMS)
    for row in rows:
        cells, arm = dict(zip(head, row, strict=True)), row[0]
        losses = over_seeds(lambda seed, arm=arm: final_loss(study, arm, seed))
        assert close(cells["validation loss (nats per token)"], fmean(losses))
        low, high = scipy.stats.t.interval(0.95, 2, loc=fmean(losses), scale=scipy.stats.sem(losses))
        assert plain(cells["95 % interval"]) == f"[{low:.3f}, {high:.3f}]"
        for way in ("uplink", "downlink"):
            sent = fmean(over_seeds(lambda seed, arm=arm, way=way: wire(study, arm, seed, way, "payload", "framing")))
            assert close(cells[f"{way} (MB)"], sent / 1e6)
        assert close(cells["trained state (MB)"], fmean(over_seeds(lambda s, arm=arm: state(study, arm, s))) / 1e6)
        assert close(cells["tokens/s"], fmean(over_seeds(lambda s, arm=arm: speed(study, arm, s))))
        assert (cells["n"], cells["merges"]) == ("3", "1")


def test_the_table_of_differences_is_that_of_the_events(study: Path, page: Page) -> None:
    (row,) = page.tables["differences"][1:]
    cells = dict(zip(page.tables["differences"][0], row, strict=True))
    ours, theirs = ([final_loss(study, arm, seed) for seed in SEEDS] for arm in ("sparse", "full"))
    relative = [a / b - 1 for a, b in zip(ours, theirs, strict=True)]
    assert [cells[f"seed {seed}"] for seed in SEEDS] == [plus(value) for value in relative]
    low, high = scipy.stats.t.interval(0.95, 2, loc=fmean(relative), scale=scipy.stats.sem(relative))
    assert plain(cells["95 % interval"]) == f"[{100 * low:+.2f}, {100 * high:+.2f}] %"
    exact = scipy.stats.permutation_test(
        (relative,), lambda v, axis: v.mean(axis=axis), permutation_type="samples", n_resamples=1000, vectorized=True
    ).pvalue
    assert cells["p"] == cells["p, Holm"] == f"{exact:.3f}"


def plus(value: float) -> str:
    return f"{100 * value:+.2f}\u00a0%".replace("-", "−")


def test_every_trial_s_row_is_that_of_its_events(study: Path, page: Page) -> None:
    head, *rows = page.tables["trials"]
    assert len(rows) == 6
    for row in rows:
        cells = dict(zip(head, row, strict=True))
        arm, seed = cells["arm"], int(cells["seed"])
        assert close(cells["validation loss"], final_loss(study, arm, seed))
        assert close(cells["uplink (MB)"], wire(study, arm, seed, "uplink", "payload", "framing") / 1e6)
        assert close(cells["trained state (MB)"], state(study, arm, seed) / 1e6)
        assert close(cells["tokens/s"], speed(study, arm, seed))
        wall = max(by_node[-1]["wall_time_s"] for by_node in events(study, arm, seed, "end"))
        assert close(cells["wall-clock"].removesuffix(" s"), wall)


def test_payload_and_memory_tables_are_those_of_the_events(study: Path, page: Page) -> None:
    for row in page.tables["predicted_bytes"][1:]:
        for way, place in (("uplink", 2), ("downlink", 4)):
            payload = fmean(over_seeds(lambda s, arm=row[0], way=way: wire(study, arm, s, way, "payload")))
            assert close(row[place], payload)
    head, *rows = page.tables["predicted_memory"]
    for row in rows:
        last = [by_node[-1] for by_node in events(study, row[0], 0, "memory")]
        largest = max(last, key=lambda e: sum(e[f"{part}_bytes"] for part in PARTS[:5]))
        for name, cell in zip(head[1:], row[1:], strict=True):
            assert close(cell.split(" ")[0], largest[f"{name.replace(' ', '_')}_bytes"] / 1e6)
    tokens, steps = (next(row[1] for row in page.tables["budget"] if row[0] == name)
                     for name in ("training tokens", "optimizer steps"))  # fmt: skip
    assert (tokens, steps) == ("400", "4")


def test_the_data_of_figures_is_that_of_the_events(study: Path, page: Page) -> None:
    folder = study.parents[1] / "reports" / "traced"

    def rows(name: str) -> list[dict[str, str]]:
        with (folder / f"figure_{name}.csv").open() as file:
            return list(csv.DictReader(file))

    for row in rows("throughput"):
        shares = defaultdict(list)
        for seed in SEEDS:
            ends = [by_node[-1] for by_node in events(study, row["arm"], seed, "end")]
            times = {part: fmean(e[f"{part}_s"] for e in ends) for part in TIMES}
            for part, seconds in times.items():
                shares[part].append(seconds / sum(times.values()))
        for part, values in shares.items():
            assert float(row[f"share_{part}"]) == pytest.approx(fmean(values))
    trained = [row for row in rows("curves") if row["curve"] == "train"]
    assert len(trained) == 2 * len(SEEDS) * len(ARMS)
    for row in trained:
        at_step = [e["loss_nats"] for by_node in events(study, row["arm"], int(row["seed"]), "train") for e in by_node
                   if e["step"] == int(row["step"])]  # fmt: skip
        assert float(row["loss_nats"]) == pytest.approx(fmean(at_step))
    for row in rows("load"):
        last = [by_node[-1]["expert_tokens"][int(row["layer"])] for by_node in events(study, row["arm"], 0, "load")]
        counts = [sum(column) for column in zip(*last, strict=True)]
        assert float(row["share"]) == pytest.approx(counts[int(row["expert"])] / sum(counts))
