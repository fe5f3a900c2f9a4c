"""result.json from event files whose every number was chosen here, so that the answers are known by hand."""

import json
import math
from pathlib import Path
from typing import Any

import pytest

from spes_core.config import DataConfig, MergeConfig, ModelConfig, RunConfig, SyncConfig
from spes_core.events import EventWriter
from spes_core.runfile import RunFile
from workbench.metrics import METRICS
from workbench.results import build_result

MODEL = ModelConfig(
    num_layers=2,
    d_model=16,
    num_heads=2,
    num_kv_heads=2,
    num_experts=2,
    top_k=1,
    expert_hidden=16,
    vocab_size=300,
)
DATA = DataConfig(tokenizer_vocab_size=300, sequence_length=25, global_batch_sequences=4)
ROUNDS = RunConfig(
    nodes=2, budget_tokens=400, model=MODEL, data=DATA, sync=SyncConfig(interval_steps=2),
    merge=MergeConfig(num_neighbours=1, interval_steps=2, until_step=4),
)  # fmt: skip
"""Two nodes, four steps of 100 tokens, a round every second step."""

TRAIN = {
    "grad_norm": 2.0,
    "learning_rate": 0.5,
    "step_time_s": 0.25,
    "z_loss": 1.0,
    "balance_loss": 1.0,
    "router_z_loss": 3.0,
}
SECONDS = {
    "data_s": 1.0,
    "serialise_s": 1.0,
    "transfer_s": 2.0,
    "wait_s": 0.5,
    "aggregate_s": 0.25,
    "merge_s": 0.25,
}
BYTES = ("uplink_payload_bytes", "uplink_framing_bytes", "downlink_payload_bytes", "downlink_framing_bytes")


class Clock:
    """Stands in for the clock of the event writer."""

    now = 1000.0


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr("spes_core.events.time.time", lambda: clock.now)
    return clock


@pytest.fixture
def trial_dir(tmp_path: Path) -> Path:
    folder = tmp_path / "ein Versuch é"
    (folder / "events").mkdir(parents=True)
    return folder


def describe(folder: Path, config: RunConfig, status: str = "done") -> None:
    """The files of a trial that are not events."""
    RunFile(trial="t", config=config, data_dir="data").save(folder / "run.json")
    trial = {
        "id": "i",
        "name": "t",
        "study": "s",
        "arm": "spes",
        "role": "treatment",
        "method": "spes",
        "seed": 0,
        "axes": {},
    }
    data = {"digest": "d", "dtype": "uint16", "train": {"tokens": 5, "bytes": 9}, "validation": {"tokens": 3}}
    about = {"trial": trial, "provenance": {"commit": "c"}, "data": data}
    (folder / "trial.json").write_text(json.dumps(about))
    outcome = {"status": status, "error": None, "started_at": "A", "finished_at": "B", "launched_at_s": 998.0}
    (folder / "outcome.json").write_text(json.dumps(outcome))


def write_node(folder: Path, clock: Clock, node: int) -> None:
    """Node 0 is a second ahead of node 1; losses differ by 2; node 1 is the larger one."""
    writer = EventWriter(folder / "events" / f"node-{node}.jsonl")
    clock.now = 1000.0 + node
    writer.write("first_step")
    for step in (2, 4):
        clock.now = 1000.0 + 10 * step + node
        writer.write(
            "train",
            step=step,
            tokens=100 * step,
            loss_nats=8.0 - step + 2 * node,
            tokens_per_s=30.0 + node,
            **TRAIN,
        )
        writer.write("load", step=step, expert_tokens=[[step, 10 + node], [3, 1]])
        writer.write(
            "round", round=step // 2 - 1, step=step, tokens=100 * step, merged=step == 2, digest="x",
            uplink_payload_bytes=1000 + 100 * node, uplink_framing_bytes=10,
            downlink_payload_bytes=500, downlink_framing_bytes=20, **SECONDS,
        )  # fmt: skip
        writer.write(
            "validation", step=step, tokens=100 * step, part=node, parts=2, duration_s=1.0,
            loss_sum_nats=60.0 + 30 * node, target_tokens=20 + 10 * node, target_bytes=50,
        )  # fmt: skip
    sizes = {
        "weights": 100,
        "gradients": 50,
        "moments": 80,
        "activations": 30,
        "sync_buffers": 7,
        "rss_peak": 900,
    }
    memory = {f"{part}_bytes": size + node for part, size in sizes.items()}
    writer.write("memory", **memory, cuda_peak_bytes=None)
    writer.write("end", steps=4, tokens=200, wall_time_s=12.0 + node, compute_s=5.0, validate_s=2.0, **SECONDS)


def write_server(folder: Path) -> None:
    writer = EventWriter(folder / "events" / "server.jsonl")
    for index, merged in ((0, True), (1, False)):
        counts = {field: {"1": 100 + index, "0": 7} for field in BYTES}
        writer.write("round", round=index, step=2 + 2 * index, merged=merged, round_time_s=1.5, alpha=0.1, **counts)
    writer.write("refusal", node=1, reason="NaN in embedding")
    writer.write("end", rounds=2, merges=1, rss_peak_bytes=4_000)


@pytest.fixture
def result(trial_dir: Path, clock: Clock) -> dict[str, Any]:
    describe(trial_dir, ROUNDS)
    for node in (0, 1):
        write_node(trial_dir, clock, node)
    write_server(trial_dir)
    return build_result(trial_dir)


def test_training_curve_is_the_mean_over_nodes_against_every_axis(result: dict[str, Any]) -> None:
    first, second = result["curves"]["train"]
    assert first == {
        "step": 2, "tokens": 200, "elapsed_s": 21.0, "uplink_bytes": 1060.0, "loss_nats": 7.0, "tokens_per_s": 61.0,
    } | TRAIN  # fmt: skip
    assert (second["loss_nats"], second["elapsed_s"], second["uplink_bytes"]) == (5.0, 41.0, 2120.0)


def test_validation_loss_is_the_sum_over_the_sum(result: dict[str, Any]) -> None:
    loss_nats = (60 + 90) / (20 + 30)
    bits_per_byte = (60 + 90) / math.log(2) / 100
    point = {"step": 4, "tokens": 400, "elapsed_s": 41.0, "uplink_bytes": 2120.0, "loss_nats": loss_nats}
    assert result["curves"]["validation"][1] == point | {"bits_per_byte": pytest.approx(bits_per_byte, rel=1e-12)}
    metrics = result["metrics"]
    assert metrics["eval/loss"] == loss_nats == 3.0
    assert metrics["eval/perplexity"] == pytest.approx(math.e**3)
    assert metrics["eval/bits_per_byte"] == pytest.approx(bits_per_byte, rel=1e-12)


def test_every_metric_has_the_value_computed_by_hand(result: dict[str, Any]) -> None:
    uplink = (1010 + 1010 + 1110 + 1110) / 2 / 1e9
    # By hand, in float32: embeddings 2·300·16, final norm 16; a layer's norms 4·16, projections 4·16·16, router 16·2.
    shared, expert = 4 * (9_600 + 16 + 2 * (64 + 1_024 + 32)), 4 * 2 * (32 * 16 + 16 * 16)
    assert (shared, expert) == (47_424, 6_144)
    # Each node owns one of two experts. Rounds at steps 2 and 4; only that of step 2 merges, and returns own experts.
    predicted_uplink, predicted_downlink = 2 * (47_424 + 6_144), 2 * (47_424 + 6_144) + 6_144
    expected = {
        "train/loss": 5.0,
        "comm/uplink_gb": uplink,
        "comm/downlink_gb": 2 * 520 / 1e9,
        "comm/uplink_predicted_gb": predicted_uplink / 1e9,
        "comm/downlink_predicted_gb": predicted_downlink / 1e9,
        "comm/framing_fraction": 4 * 30 / (4 * 520 + 4240),
        "comm/rounds": 2,
        "merge/count": 1,
        "mem/weights_gb": 101e-9,
        "mem/gradients_gb": 51e-9,
        "mem/moments_gb": 81e-9,
        "mem/activations_gb": 31e-9,
        "mem/sync_buffers_gb": 8e-9,
        "mem/trained_state_gb": 233e-9,
        "mem/rss_peak_gb": 901e-9,
        "mem/server_rss_peak_gb": 4e-6,
        "perf/tokens_per_s": 400 / 11,
        "perf/tokens_per_s_compute": 80.0,
        "perf/wall_time_s": 13.0,
        "perf/share_compute": 10 / 21,
        "perf/share_data": 2 / 21,
        "perf/share_serialise": 2 / 21,
        "perf/share_transfer": 4 / 21,
        "perf/share_wait": 1 / 21,
        "perf/share_aggregate": 0.5 / 21,
        "perf/share_merge": 0.5 / 21,
        "perf/round_time_s": 2.0,
        "perf/launch_to_first_step_s": 3.0,
        "moe/load_imbalance": (2 * 21 / 29 + 2 * 6 / 8) / 2,
    }
    found = {name: value for name, value in result["metrics"].items() if not name.startswith("eval/")}
    assert found == pytest.approx(expected, rel=1e-12)


def test_every_metric_is_documented_and_every_documented_one_is_written(result: dict[str, Any]) -> None:
    assert METRICS.keys() - result["metrics"].keys() == {
        "mem/cuda_peak_gb",
        "perf/round_time_predicted_s",  # no link is stated
    }
    assert result["metrics"].keys() <= METRICS.keys()


def test_tables_and_summaries(result: dict[str, Any]) -> None:
    assert result["rounds"][1] == {
        "round": 1,
        "step": 4,
        "merged": False,
        "round_time_s": 1.5,
    } | {field: [7, 101] for field in BYTES}
    assert result["memory"]["measured"][1]["weights_bytes"] == 101
    assert [parts["node"] for parts in result["memory"]["predicted"]] == [0, 1]
    assert result["memory"]["predicted"][0]["weights_bytes"] == 47_424 + 2 * 6_144
    assert result["time_s"] == {name.removesuffix("_s"): value for name, value in SECONDS.items()} | {
        "compute": 5.0,
        "validate": 2.0,
    }
    assert result["expert_load"] == [[8 / 29, 21 / 29], [0.75, 0.25]]
    assert result["server"] == {
        "rss_peak_bytes": 4000,
        "refusals": [{"node": 1, "reason": "NaN in embedding"}],
    }
    assert result["data"] == {
        "digest": "d",
        "dtype": "uint16",
        "train_tokens": 5,
        "train_bytes": 9,
        "validation_tokens": 3,
    }
    assert (result["status"], result["started_at"], result["finished_at"]) == ("done", "A", "B")


def test_one_process_group_sends_an_equal_share_of_the_ring_bytes_in_each_step(trial_dir: Path, clock: Clock) -> None:
    config = RunConfig(
        nodes=2, budget_tokens=400, model=MODEL, data=DATA, sync=SyncConfig(exchange="gradients")
    )  # fmt: skip
    describe(trial_dir, config)
    for rank in (0, 1):
        writer = EventWriter(trial_dir / "events" / f"node-{rank}.jsonl")
        writer.write("first_step")
        writer.write("train", step=2, tokens=200, loss_nats=1.0, tokens_per_s=1.0, **TRAIN)
        writer.write("collective", steps=4, bytes_sent=8000, basis="ring formula")
        writer.write("end", steps=4, tokens=200, wall_time_s=12.0, compute_s=5.0, validate_s=2.0, **SECONDS)
    result = build_result(trial_dir)
    assert result["curves"]["train"][0]["uplink_bytes"] == 4000
    assert result["metrics"]["comm/uplink_gb"] == result["metrics"]["comm/downlink_gb"] == 8e-6
    assert result["metrics"]["comm/rounds"] == result["metrics"]["merge/count"] == 0
    speed = {name: value for name, value in result["metrics"].items() if name.startswith("perf/")}
    assert speed.keys() == {"perf/tokens_per_s", "perf/wall_time_s", "perf/launch_to_first_step_s"}, (
        "the exchange of gradients runs inside the step: no clock tells it from computing"
    )


def test_a_trial_without_events_has_no_metrics_and_no_exception(trial_dir: Path) -> None:
    describe(trial_dir, ROUNDS, status="failed")
    result = build_result(trial_dir)
    assert result["metrics"] == {}
    assert result["curves"] == {"train": [], "validation": []}
    assert result["rounds"] == result["expert_load"] == result["memory"]["measured"] == []
    assert result["server"] == {"rss_peak_bytes": None, "refusals": []}


def test_points_that_not_all_nodes_reported_are_left_out(trial_dir: Path, clock: Clock) -> None:
    describe(trial_dir, ROUNDS, status="failed")
    write_node(trial_dir, clock, 0)
    result = build_result(trial_dir)
    assert result["curves"] == {"train": [], "validation": []}
    assert not {"eval/loss", "perf/tokens_per_s", "perf/launch_to_first_step_s"} & result["metrics"].keys()


def test_a_trial_without_an_outcome_was_interrupted(trial_dir: Path) -> None:
    describe(trial_dir, ROUNDS)
    (trial_dir / "outcome.json").unlink()
    result = build_result(trial_dir)
    assert (result["status"], result["error"]["message"]) == ("interrupted", "the controller was killed")


def test_an_early_end_has_no_final_loss(trial_dir: Path, clock: Clock, result: dict[str, Any]) -> None:
    longer = RunConfig(nodes=2, budget_tokens=800, model=MODEL, data=DATA, merge=ROUNDS.merge)
    describe(trial_dir, longer, status="timeout")
    shorter = build_result(trial_dir)
    assert len(shorter["curves"]["validation"]) == 2
    assert "eval/loss" not in shorter["metrics"]


def test_numbers_that_are_not_finite_are_null_in_curves_and_named(trial_dir: Path, clock: Clock) -> None:
    describe(trial_dir, RunConfig(nodes=1, budget_tokens=200, model=MODEL, data=DATA, merge=ROUNDS.merge))
    writer = EventWriter(trial_dir / "events" / "node-0.jsonl")
    writer.write("first_step")
    for step, loss_nats in ((1, math.inf), (2, math.nan)):
        writer.write("train", step=step, tokens=100 * step, loss_nats=loss_nats, tokens_per_s=1.0, **TRAIN)
    writer.write("validation", step=2, tokens=200, part=0, parts=1, loss_sum_nats=1e6, target_tokens=10, target_bytes=9)
    result = build_result(trial_dir)
    assert [point["loss_nats"] for point in result["curves"]["train"]] == [None, None]
    assert result["non_finite"] == ["eval/perplexity", "train/loss"]
    assert result["metrics"]["eval/loss"] == 1e5
    json.dumps(result, allow_nan=False)


def test_a_restarted_node_repeats_steps_and_the_newest_record_counts(trial_dir: Path, clock: Clock) -> None:
    describe(trial_dir, RunConfig(nodes=1, budget_tokens=200, model=MODEL, data=DATA, merge=ROUNDS.merge))
    for attempt, loss_nats in enumerate((5.0, 4.0)):
        writer = EventWriter(trial_dir / "events" / "node-0.jsonl")
        clock.now = 2000.0 + attempt
        writer.write("first_step")
        writer.write("train", step=1, tokens=100, loss_nats=loss_nats, tokens_per_s=1.0, **TRAIN)
        writer.write(
            "round", round=0, step=1, tokens=100, merged=False, uplink_payload_bytes=100, uplink_framing_bytes=0,
            downlink_payload_bytes=1, downlink_framing_bytes=0,
        )  # fmt: skip
        writer.close()
    (point,) = build_result(trial_dir)["curves"]["train"]
    assert (point["loss_nats"], point["uplink_bytes"]) == (4.0, 100)
