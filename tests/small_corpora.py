"""Small corpora of awkward text, and plain readers of the token files that they become."""

from __future__ import annotations

import json
import random
from array import array
from pathlib import Path

from spes_core.config import DataConfig

WORDS = [
    "sparse",
    "expert",
    "node",
    "round",
    "naïve",
    "Straße",
    "日本語",
    "<|endoftext|>",
    "  indented",
    "\n\n",
    "x=1;",
]


def texts(count: int, seed: int = 0) -> list[str]:
    rng = random.Random(seed)
    return [" ".join(rng.choices(WORDS, k=rng.randint(5, 80))) + f" {number}" for number in range(count)]


def write_rows(path: Path, rows: list[str]) -> Path:
    path.write_text("".join(json.dumps({"id": f"d{n}", "text": row}) + "\n" for n, row in enumerate(rows)))
    return path


def config_for(path: Path, vocab_size: int = 300, fraction: float = 0.1) -> DataConfig:
    return DataConfig(corpus=str(path), tokenizer_vocab_size=vocab_size, validation_fraction=fraction)


def ids_of(path: Path) -> list[int]:
    ids = array("H")
    ids.frombytes(path.read_bytes())
    return ids.tolist()


def documents_in(path: Path) -> list[list[int]]:
    """The token file cut after each end of text (id 0)."""
    documents: list[list[int]] = [[]]
    for token in ids_of(path):
        if token == 0:
            documents.append([])
        else:
            documents[-1].append(token)
    assert documents.pop() == []
    return documents


def contents(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in sorted(folder.iterdir())}
