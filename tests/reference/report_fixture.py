"""A made-up but plausible study folder: study.json and trials/*/result.json as study.py and results.py write them.

The losses follow smooth curves with seeded noise; bytes and memory follow the formulas of the design. Nothing here
is imported from the workbench, so a test can compare a report with these numbers.
"""

from __future__ import annotations

import json
import math
import random
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

NODES, LAYERS, EXPERTS = 4, 4, 8
STEP_TOKENS, STEPS = 4096, 480
EXPERT_BYTES, SHARED_BYTES = LAYERS * EXPERTS * 3 * 128 * 128 * 4, 5_260_000
UNIGRAM_NATS = 6.214
H_VALUES = (10, 25, 50, 100, 200)
METHODS = {"centralized": "reference", "dilico": "baseline", "spes": "treatment"}

MODEL = {
    "num_layers": LAYERS, "d_model": 128, "num_heads": 4, "num_kv_heads": 4, "head_dim": None,
    "num_experts": EXPERTS, "top_k": 2, "expert_hidden": 128, "vocab_size": 4096,
}  # fmt: skip
OPTIM = {"name": "adamw", "lr": 3e-3, "beta1": 0.9, "beta2": 0.95, "weight_decay": 0.1, "schedule": "cosine"}
DATA = {
    "corpus": "stdlib",
    "sequence_length": 128,
    "global_batch_sequences": 32,
    "tokenizer_vocab_size": 4096,
}


def write_study(
    folder: Path,
    *,
    seeds: Sequence[int] = (0, 1, 2),
    intervals: Sequence[int] = H_VALUES,
    arms: Iterable[str] = tuple(METHODS),
    failed: Iterable[str] = (),
    missing: Iterable[str] = (),
    curve_points: int = 48,
) -> Path:
    """Write a study under ``folder`` and return it. ``failed`` and ``missing`` hold trial-name prefixes, or "all"."""
    folder.mkdir(parents=True, exist_ok=True)
    trials = []
    for arm in arms:
        for interval in [None] if arm == "centralized" else intervals:
            for seed in seeds:
                trials.append(_trial(arm, interval, seed))
    for trial in trials:
        name = trial["name"]
        if _matches(name, missing):
            continue
        path = folder / "trials" / name
        (path / "events").mkdir(parents=True, exist_ok=True)
        for node in range(NODES):
            (path / "events" / f"node-{node}.jsonl").write_text('{"kind": "start", "time_s": 0}\n')
        content = _failed(trial) if _matches(name, failed) else _result(trial, curve_points)
        (path / "result.json").write_text(json.dumps(content, indent=1))
    (folder / "study.json").write_text(json.dumps(_study(arms, trials), indent=1))
    return folder


def _matches(name: str, prefixes: Iterable[str]) -> bool:
    return any(prefix == "all" or name.startswith(prefix) for prefix in prefixes)


def _trial(arm: str, interval: int | None, seed: int) -> dict[str, Any]:
    axes = {} if interval is None else {"sync.interval_steps": interval}
    middle = "" if interval is None else f"interval_steps={interval}-"
    identity = f"{random.Random(f'{arm}{interval}{seed}').getrandbits(64):016x}"
    return {
        "id": identity, "name": f"{arm}-{middle}seed={seed}-{identity[:8]}", "study": "sync_interval", "arm": arm,
        "role": METHODS[arm], "method": arm, "seed": seed, "axes": axes,
    }  # fmt: skip


def _study(arms: Iterable[str], trials: list[dict[str, Any]]) -> dict[str, Any]:
    return {
        "schema": 1,
        "name": "sync_interval",
        "question": "How far can H grow before validation loss leaves the centralized reference?",
        "command": "python -m workbench.study studies/sync_interval.yaml",
        "study_file": "studies/sync_interval.yaml",
        "report": {
            "x": "sync.interval_steps", "log_x": True, "tolerance": 0.02, "formats": ["html", "pdf", "csv", "latex"],
        },
        "arms": [{"name": arm, "method": arm, "role": METHODS[arm]} for arm in arms],
        "trials": [{k: t[k] for k in ("id", "name", "arm", "role", "axes", "seed")} for t in trials],
        "metrics": {"primary": {"name": "eval/loss", "goal": "minimize"}},
        "equal": ["model", "data", "optim", "budget_tokens"],
        "created_at": "2026-11-29T10:00:00+00:00",
        "provenance": _provenance(),
    }  # fmt: skip


def _provenance() -> dict[str, Any]:
    return {
        "commit": "3f2a9c1d5e7b4a60918273645566778899aabbcc", "dirty": True, "diff_sha256": "9b" * 32,
        "python": "3.11.7", "packages": {"torch": "2.13.0", "numpy": "2.4.6", "mlflow": "3.17.1", "grpcio": "1.85.1"},
        "hardware": {"cpu": "AMD EPYC 9B14", "cores": 2, "memory_gib": 7.8, "gpus": []}, "code_digest": "c0de" * 16,
    }  # fmt: skip


def final_loss(arm: str, interval: int | None, seed: int) -> float:
    """The loss that the fixture reports: grows with log H, faster for spes; seeds share a common offset."""
    noise = random.Random(f"loss{arm}{interval}{seed}").gauss(0, 0.006) + random.Random(f"seed{seed}").gauss(0, 0.012)
    if interval is None:
        return 3.412 + noise
    slope = {"dilico": 0.021, "spes": 0.034}.get(arm, 0.03)
    return 3.418 + slope * math.log(interval / 8) ** 1.35 + noise


def uplink_payload_bytes(arm: str, interval: int | None) -> int:
    """Bytes that one node sends over the whole run, without framing."""
    if interval is None:
        return round(STEPS * 2 * 0.75 * (EXPERT_BYTES + SHARED_BYTES))
    rounds = math.ceil(STEPS / interval)
    return rounds * (SHARED_BYTES + (EXPERT_BYTES if arm == "dilico" else EXPERT_BYTES // NODES))


def downlink_payload_bytes(arm: str, interval: int | None) -> int:
    """Bytes that one node receives; every merge also brings back its own experts."""
    if interval is None:
        return uplink_payload_bytes(arm, interval)
    rounds = math.ceil(STEPS / interval)
    if arm == "dilico":
        return rounds * (SHARED_BYTES + EXPERT_BYTES)
    return rounds * (SHARED_BYTES + EXPERT_BYTES * 3 // 4) + _merges(interval) * EXPERT_BYTES // 4


def _merges(interval: int | None) -> int:
    return 0 if interval is None else len({math.ceil(m / interval) * interval for m in range(50, 400, 50)})


def _memory(arm: str) -> dict[str, int]:
    model = EXPERT_BYTES + SHARED_BYTES
    trained = SHARED_BYTES + EXPERT_BYTES // NODES if arm == "spes" else model
    if arm == "centralized":
        model, trained = model // NODES, model // NODES
    return {
        "weights_bytes": model, "gradients_bytes": trained, "moments_bytes": 2 * trained,
        "activations_bytes": 21_300_000, "sync_buffers_bytes": 0 if arm == "centralized" else 2 * trained,
    }  # fmt: skip


def _time_s(arm: str, interval: int | None, seed: int) -> dict[str, float]:
    compute = 31.0 * (0.93 if arm == "spes" else 1.0) + seed * 0.4
    if interval is None:
        compute += 9.8  # the exchange of gradients runs inside the step, where no clock sees it
        parts = dict.fromkeys(("serialise", "transfer", "wait", "merge", "aggregate"), 0.0)
    else:
        rounds, size = math.ceil(STEPS / interval), 1.0 if arm == "dilico" else 0.62
        each = {"serialise": 0.012, "transfer": 0.05, "wait": 0.06, "merge": 0.004, "aggregate": 0.02}
        parts = {key: value * rounds * size for key, value in each.items()}
    return {"compute": compute, **parts, "validate": 3.1, "data": 0.4}


def _curve(arm: str, interval: int | None, seed: int, points: int, uplink: int, wall_s: float) -> dict[str, Any]:
    end, noise = final_loss(arm, interval, seed), random.Random(f"curve{arm}{interval}{seed}")

    def loss_at(share: float) -> float:
        return end + (8.32 - end) * math.exp(-9.5 * share**0.62) * (1 - share)

    def row(share: float, loss: float) -> dict[str, float]:
        step = max(1, round(share * STEPS))
        every = interval or 1
        sent = uplink if step == STEPS else uplink * (step // every) / math.ceil(STEPS / every)
        return {
            "step": step, "tokens": step * STEP_TOKENS, "elapsed_s": wall_s * share,
            "uplink_bytes": sent, "loss_nats": loss,
        }  # fmt: skip

    shares = [(index + 1) / points for index in range(points)]
    train = [row(s, loss_at(s) - 0.06 + noise.gauss(0, 0.025)) for s in shares]
    validation = [row((i + 1) / 10, loss_at((i + 1) / 10)) for i in range(10)]
    for line in validation:
        line["bits_per_byte"] = line["loss_nats"] / math.log(2) / 3.1
    return {"train": train, "validation": validation}


def _metrics(trial: dict[str, Any], curves: dict[str, Any], time_s: dict[str, float], load: Any) -> dict[str, float]:
    arm, interval = trial["arm"], trial["axes"].get("sync.interval_steps")
    loss, memory = curves["validation"][-1]["loss_nats"], _memory(arm)
    up, down = uplink_payload_bytes(arm, interval), downlink_payload_bytes(arm, interval)
    wall = sum(time_s.values())
    busy = wall - time_s["validate"]
    tokens = STEPS * STEP_TOKENS
    framing = 0.0 if interval is None else 0.0021
    return {
        "eval/loss": loss, "eval/perplexity": math.exp(loss), "eval/bits_per_byte": loss / math.log(2) / 3.1,
        "train/loss": curves["train"][-1]["loss_nats"],
        "comm/uplink_gb": up * (1 + framing) / 1e9, "comm/downlink_gb": down * (1 + framing) / 1e9,
        "comm/uplink_predicted_gb": up / 1e9, "comm/downlink_predicted_gb": down / 1e9,
        "comm/framing_fraction": framing, "comm/rounds": 0 if interval is None else math.ceil(STEPS / interval),
        "mem/trained_state_gb": sum(memory[f"{k}_bytes"] for k in ("weights", "gradients", "moments")) / 1e9,
        "mem/rss_peak_gb": (412e6 + 2.1 * sum(memory.values())) / 1e9, "mem/server_rss_peak_gb": 0.231,
        "perf/tokens_per_s": tokens / busy, **({} if interval is None else _separable(tokens, busy, time_s)),
        "perf/wall_time_s": wall, "perf/launch_to_first_step_s": 3.4, "merge/count": _merges(interval),
        "moe/load_imbalance": sum(max(row) * EXPERTS for row in load) / LAYERS,
        **{f"mem/{key}_gb": memory[f"{key}_bytes"] / 1e9 for key in ("weights", "gradients", "moments", "activations")},
    }  # fmt: skip


def _separable(tokens: int, busy_s: float, time_s: dict[str, float]) -> dict[str, float]:
    """What only a run in rounds can tell: its exchange has a time of its own."""
    shares = {f"perf/share_{key}": value / busy_s for key, value in time_s.items() if key != "validate"}
    return {"perf/tokens_per_s_compute": tokens / time_s["compute"], **shares}


def _result(trial: dict[str, Any], curve_points: int) -> dict[str, Any]:
    arm, interval, seed = trial["arm"], trial["axes"].get("sync.interval_steps"), trial["seed"]
    time_s, memory = _time_s(arm, interval, seed), _memory(arm)
    up, down = uplink_payload_bytes(arm, interval), downlink_payload_bytes(arm, interval)
    rounds = 0 if interval is None else math.ceil(STEPS / interval)
    load = _load(arm, interval, seed)
    curves = _curve(arm, interval, seed, curve_points, up, sum(time_s.values()))
    per_round = [
        {
            "round": index + 1, "step": min(STEPS, (index + 1) * (interval or 1)), "merged": False, "round_time_s": 0.2,
            "uplink_payload_bytes": [up // rounds] * NODES,
            "downlink_payload_bytes": [down // rounds + (down % rounds if index == 0 else 0)] * NODES,
            "uplink_framing_bytes": [int(0.0021 * up / rounds)] * NODES,
            "downlink_framing_bytes": [int(0.0021 * down / rounds)] * NODES,
        }
        for index in range(rounds)
    ]  # fmt: skip
    rss = {"rss_peak_bytes": int(412e6 + 2.1 * sum(memory.values())), "cuda_peak_bytes": None}
    return {
        "schema": 1, "trial": trial, "status": "done", "error": None, "started_at": "2026-11-29T10:00:05+00:00",
        "finished_at": "2026-11-29T10:01:00+00:00", "config": _config(trial), "data": _data(),
        "metrics": _metrics(trial, curves, time_s, load), "curves": curves, "rounds": per_round,
        "memory": {
            "measured": [{"node": node, **memory, **rss} for node in range(NODES)],
            "predicted": [
                {"node": node, **memory, "activations_bytes": 20_900_000} for node in range(NODES)
            ],
        },
        "time_s": time_s, "expert_load": load, "server": {"rss_peak_bytes": 231_000_000}, "provenance": _provenance(),
    }  # fmt: skip


def _config(trial: dict[str, Any]) -> dict[str, Any]:
    arm = trial["arm"]
    return {
        "method": arm, "seed": trial["seed"], "nodes": NODES, "budget_tokens": 2_000_000, "model": MODEL, "data": DATA,
        "optim": OPTIM, "partition": {"kind": "sparse" if arm == "spes" else "full"},
        "sync": {
            "exchange": "gradients" if arm == "centralized" else "rounds",
            "interval_steps": trial["axes"].get("sync.interval_steps", 50),
        },
        "merge": {"enabled": arm == "spes", "num_neighbours": 2, "alpha": 0.1, "interval_steps": 50, "until_step": 400},
    }  # fmt: skip


def _data() -> dict[str, Any]:
    return {"digest": "5eed" * 16, "unigram_entropy_nats": UNIGRAM_NATS, "train_tokens": 3_412_880}


def _load(arm: str, interval: int | None, seed: int) -> list[list[float]]:
    noise = random.Random(f"load{arm}{interval}{seed}")
    rows = [[math.exp(noise.gauss(0, 0.22)) for _ in range(EXPERTS)] for _ in range(LAYERS)]
    return [[value / sum(row) for value in row] for row in rows]


def _failed(trial: dict[str, Any]) -> dict[str, Any]:
    return {
        "schema": 1, "trial": trial, "status": "failed",
        "error": {
            "message": "node 2 left: exit code 1, error: loss is not finite at step 37", "process": "node-2",
            "log_tail": ["step 36 loss 9.81", "error: loss is not finite at step 37"],
        },
        "started_at": "2026-11-29T10:00:05+00:00", "finished_at": "2026-11-29T10:00:20+00:00",
        "config": _config(trial), "data": _data(), "metrics": {}, "curves": {"train": [], "validation": []},
        "rounds": [], "memory": {"measured": [], "predicted": []}, "time_s": {}, "expert_load": [], "server": {},
        "provenance": _provenance(),
    }  # fmt: skip
