"""A finished trial that no one trained: random weights with the files that a real one leaves, and tiny task data."""

from __future__ import annotations

import gzip
import json
import random
from dataclasses import replace
from pathlib import Path
from typing import Any

from spes_core.config import DataConfig, ModelConfig, RunConfig
from spes_core.data.tokenize import prepare
from spes_core.runfile import RunFile
from tests.hf_models import save_random
from workbench.durable import write_json
from workbench.results import build_result

MODEL = ModelConfig(
    num_layers=2, d_model=16, num_heads=2, num_kv_heads=1, num_experts=3, expert_hidden=12, vocab_size=300
)
CONTEXT = 48
DATA = DataConfig(tokenizer_vocab_size=290, validation_fraction=0.2, sequence_length=CONTEXT)
WORDS = [
    "the",
    "a",
    "cat",
    "dog",
    "river",
    "stone",
    "blue",
    "old",
    "sees",
    "eats",
    "under",
    "quickly",
    "never",
    "seven",
]


def sentence(rng: random.Random, low: int = 2, high: int = 7) -> str:
    return " ".join(rng.choices(WORDS, k=rng.randint(low, high)))


def prepare_corpus(folder: Path) -> Path:
    """The tokenized folder of a small corpus of such sentences."""
    rng = random.Random(0)
    (folder / "text").mkdir(parents=True)
    for number in range(40):
        (folder / "text" / f"{number}.txt").write_text(". ".join(sentence(rng) for _ in range(20)))
    return prepare(replace(DATA, corpus=str(folder / "text")), folder / "cache")


def write_trial(folder: Path, data_dir: Path, seeds: tuple[int, ...] = (0,)) -> Path:
    """A done trial; with several seeds the weights of as many nodes that never exchanged."""
    method = "spes" if len(seeds) == 1 else "local"
    config = RunConfig(model=MODEL, data=DATA, method=method, nodes=max(2, len(seeds)))
    (folder / "events").mkdir(parents=True)
    (folder / "weights").mkdir()
    RunFile(trial=folder.name, config=config, data_dir=str(data_dir)).save(folder / "run.json")
    names = ["final"] if len(seeds) == 1 else [f"final-node-{node}" for node in range(len(seeds))]
    for name, seed in zip(names, seeds, strict=True):
        save_random(folder / "weights" / f"{name}.safetensors", MODEL, seed)
    identity = {"id": "i", "name": folder.name, "study": "s", "arm": method, "role": "treatment"}
    identity |= {"method": method, "seed": 0, "axes": {}}
    write_json(folder / "trial.json", {"trial": identity, "provenance": {}, "data": {"digest": "d"}})
    outcome = {"status": "done", "error": None, "started_at": "A", "finished_at": "B", "launched_at_s": 0.0}
    write_json(folder / "outcome.json", outcome)
    write_json(folder / "result.json", build_result(folder))
    return folder


def write_rows(path: Path, rows: list[dict[str, Any]]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    with gzip.open(path, "wt", encoding="utf-8") as file:
        file.writelines(json.dumps(row) + "\n" for row in rows)


def write_tasks(data_dir: Path, items: int = 12) -> Path:
    """Copies of a few tasks: choices of several tokens, sentences, few-shot prompts, and text to generate."""
    rng = random.Random(1)
    arc = [
        {"id": str(n), "question": f"{sentence(rng, 2, 30)} {n}?", "answerKey": "ABC"[n % 3],
         "choices": {"text": [sentence(rng, 1, 4) for _ in "ABC"], "label": list("ABC")}}
        for n in range(items)
    ]  # fmt: skip
    write_rows(data_dir / "arc_easy" / "test.jsonl.gz", arc)
    pairs = [
        {"sentence_good": sentence(rng), "sentence_bad": sentence(rng), "UID": "x", "pairID": str(n)}
        for n in range(items)
    ]
    for paradigm in ("wh_island", "causative"):
        write_rows(data_dir / "blimp" / f"{paradigm}.jsonl.gz", pairs)
    hella = [
        {"ind": n, "activity_label": f"Item {n}", "ctx_a": sentence(rng), "ctx_b": "", "label": n % 2,
         "endings": [f"{sentence(rng)} {n}", sentence(rng)]}
        for n in range(items)
    ]  # fmt: skip
    write_rows(data_dir / "hellaswag" / f"validation_{items}.jsonl.gz", hella)
    return data_dir
