"""Speed of reading batches beside the training step that uses them, and memory of training against corpus size.

    python -m benchmarks.loader [--corpus-gb 0.1 5] [--turns 30]

Both sides of a speed row take turns in one process with one thread, for the presets `tiny` (the smallest step that a
study takes, so the hardest one to keep up with) and `small`. Times are CPU seconds, medians over turns. A memory row is
a process of its own that trains `tiny` and reads batches from all over a corpus of that size: written out, not sparse,
so that what is counted is what a real one would take.
"""

from __future__ import annotations

import argparse
import multiprocessing
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median

import numpy as np
import torch

from spes_core.config import DataConfig, DomainConfig, ModelConfig, RunConfig
from spes_core.data import shards
from spes_core.data.batches import TokenSource
from spes_core.initial import fill, initial_weights
from spes_core.model.decoder import Decoder
from spes_core.processlife import rss_peak_bytes
from spes_core.train.allocator import keep_freed_memory
from spes_core.train.step import make_optimizer, train_step

VOCABULARY = 1024
DOMAINS = ("first", "second", "third", "fourth")
NODES = 4
TINY = ModelConfig(
    num_layers=2, d_model=64, num_heads=4, num_kv_heads=4, num_experts=16, expert_hidden=128, vocab_size=1024
)
SMALL = ModelConfig(
    num_layers=4, d_model=256, num_heads=8, num_kv_heads=8, num_experts=8, expert_hidden=256, vocab_size=4096
)
MODELS = {"tiny": (TINY, 128, 16), "small": (SMALL, 128, 16)}
"""Name -> model, sequence length, global batch."""
WAYS: dict[str, dict[str, object]] = {
    "domains by size": {},
    "domains by weight": {"weights": True},
    "a mixture a node": {"per_node": True},
    "size, documents apart": {"document_attention": "separate"},
}
_BLOCK_TOKENS = 1 << 24
_READ_BATCHES = 3000


def main(argv: list[str] | None = None) -> int:
    """Print both tables."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.loader", description=__doc__.splitlines()[0])
    parser.add_argument(
        "--corpus-gb", type=float, nargs="+", default=[0.1, 1.0], help="sizes of train.bin, in 1e9 bytes"
    )
    parser.add_argument("--turns", type=int, default=30, help="batches and steps of a speed row")
    parser.add_argument("--models", nargs="+", choices=MODELS, default=list(MODELS))
    options = parser.parse_args(argv)
    torch.set_num_threads(1)
    keep_freed_memory()
    with tempfile.TemporaryDirectory() as root:
        smallest = write_corpus(Path(root) / "speed", min(options.corpus_gb))
        print("model  data                      loader tokens/s  step tokens/s  loader / step")
        for model in options.models:
            for way in WAYS:
                read_s, step_s, tokens = compare(smallest, model, way, options.turns)
                print(
                    f"{model:5}  {way:24}  {tokens / read_s:15,.0f}  {tokens / step_s:13,.0f}  {read_s / step_s:12.2%}"
                )
        print("\ncorpus GB  peak MB  peak without training MB")
        for size_gb in options.corpus_gb:
            folder = write_corpus(Path(root) / f"{size_gb}", size_gb)
            peaks = [_in_process(folder, steps) for steps in (5, 0)]
            print(f"{size_gb:9g}  {peaks[0] / 1e6:7.0f}  {peaks[1] / 1e6:24.0f}")
            (folder / shards.TRAIN).unlink()
    return 0


def write_corpus(folder: Path, size_gb: float) -> Path:
    """A tokenized folder of random ids with ``size_gb`` of training tokens in four equal domains."""
    folder.mkdir()
    tokens = int(size_gb * 1e9) // 2 // len(DOMAINS) * len(DOMAINS)
    block = np.random.default_rng(0).integers(0, VOCABULARY, _BLOCK_TOKENS, dtype=np.uint16)
    with (folder / shards.TRAIN).open("wb") as file:
        for start in range(0, tokens, len(block)):
            file.write(block[: min(len(block), tokens - start)])
    block[:100_000].tofile(folder / shards.VALIDATION)
    np.ones(VOCABULARY, dtype="<u4").tofile(folder / shards.TOKEN_BYTES)
    (folder / shards.TOKENIZER).write_text("{}")
    train, held_out = (
        shards.SplitCounts(tokens=count, documents=1, bytes=count) for count in (tokens // 4, 100_000 // 4)
    )
    names = (shards.TRAIN, shards.VALIDATION, shards.TOKEN_BYTES, shards.TOKENIZER)
    shards.write_header(
        folder,
        shards.ShardHeader(
            dtype="uint16", vocab_size=VOCABULARY, vocab_size_asked=VOCABULARY, end_of_text_id=0, tokenizer_digest="",
            tokenizer_documents=0, tokenizer_bytes=0, digest="", validation_fraction=0.1, unigram_entropy_nats=0.0,
            corpus="random", corpus_digest="", python_version="", tokenizers_version="",
            train=shards.SplitCounts(tokens=tokens, documents=4, bytes=tokens),
            validation=shards.SplitCounts(tokens=100_000, documents=4, bytes=100_000),
            files={name: shards.FileRecord(bytes=(folder / name).stat().st_size, sha256="") for name in names},
            domains={name: shards.DomainCounts(corpus=name, train=train, validation=held_out) for name in DOMAINS},
        ),
    )  # fmt: skip
    return folder


def run_of(model: str, way: str) -> RunConfig:
    """The settings of a row; whichever way, the corpus has four domains."""
    shape, length, batch = MODELS[model]
    changes = dict(WAYS[way])
    weighted, per_node = changes.pop("weights", False), changes.pop("per_node", False)
    even = dict.fromkeys(DOMAINS, 1.0)
    data = DataConfig(
        domains={name: DomainConfig(corpus=name, weight=1.0 if weighted else None) for name in DOMAINS},
        per_node=(even,) * NODES if per_node else (),
        tokenizer_vocab_size=VOCABULARY,
        sequence_length=length,
        global_batch_sequences=batch,
        **changes,  # type: ignore[arg-type]
    )
    return RunConfig(nodes=NODES, model=shape, data=data)


def compare(folder: Path, model: str, way: str, turns: int) -> tuple[float, float, int]:
    """CPU seconds of reading a node's batch and of a step on it, medians; and the batch's tokens."""
    config = run_of(model, way)
    source, step = TokenSource(folder, config.data, 0), training(folder, config)
    reads, steps = [], []
    for turn in range(turns + 2):
        start = time.process_time()
        batch = source.train_batch(turn + 1, 1, NODES)
        read = time.process_time()
        step(batch)
        if turn >= 2:  # the first ones allocate
            reads.append(read - start)
            steps.append(time.process_time() - read)
    return median(reads), median(steps), batch[0].numel()


def training(folder: Path, config: RunConfig) -> Callable[[tuple[torch.Tensor, torch.Tensor]], object]:
    """A function that takes one optimizer step of a node that trains its share of the experts."""
    decoder = Decoder(config.model, config.make_partition().experts_by_node[1])
    fill(decoder, initial_weights(config))
    decoder.separator_id = TokenSource(folder, config.data, 0).separator_id
    optimizer = make_optimizer(decoder, config.optim)
    return lambda batch: train_step(decoder, optimizer, [batch], config.loss, 1.0, 1e-3)


def peak_bytes(folder: Path, steps: int) -> int:
    """Largest resident set of this process after reading batches all over a corpus, and training on a few."""
    config = run_of("tiny", "a mixture a node")
    source = TokenSource(folder, config.data, 0)
    step = training(folder, config) if steps else None
    for index in range(_READ_BATCHES):
        batch = source.train_batch(index + 1, 1, NODES)
        if step is not None and index < steps:
            step(batch)
    return rss_peak_bytes()


def _in_process(folder: Path, steps: int) -> int:
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        return pool.apply(peak_bytes, (folder, steps))


if __name__ == "__main__":
    sys.exit(main())
