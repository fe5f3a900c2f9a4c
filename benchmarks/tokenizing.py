"""Speed and memory of tokenizing, side by side with the tokenizers library's own batch encoding.

    python -m benchmarks.tokenizing [--turns 3] [--speed-mb 12] [--memory-mb 20 200] [--trained]

Speed: the whole of `python -m spes_core.data.tokenize` with a tokenizer that is given (it reads JSON lines twice,
divides, checks for leaks and repeats, encodes, writes, hashes) against `Tokenizer.encode_batch` alone on texts that
are already in memory, a megabyte at a time, as the command does. Both use all cores and take turns in one process,
each with a tokenizer freshly loaded; the ratio is the median over turns. Memory: the peak resident bytes (VmHWM) of a
process that tokenizes a small and a large corpus, which must not differ; --trained trains the tokenizer there too.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from statistics import median

from tokenizers import Tokenizer

from spes_core.config import DataConfig
from spes_core.data import tokenize, vocabulary
from spes_core.data.documents import Skipped
from spes_core.data.sources import find

BAR = 0.8
BATCH_BYTES = 1_000_000
_CHILD = """
import sys
from spes_core.data.tokenize import main
status = main(sys.argv[1:])
print(next(line.split()[1] for line in open("/proc/self/status") if line.startswith("VmHWM")))
sys.exit(status)
"""


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--turns", type=int, default=3)
    parser.add_argument("--speed-mb", type=float, default=12)
    parser.add_argument("--memory-mb", type=float, nargs="*", default=[20, 200])
    parser.add_argument("--vocab-size", type=int, default=4096)
    parser.add_argument("--trained", action="store_true", help="train the tokenizer in the memory measurement")
    options = parser.parse_args(arguments)
    print(f"load average {os.getloadavg()[0]:.1f} on {os.cpu_count()} cores")
    with tempfile.TemporaryDirectory() as scratch:
        root = Path(scratch)
        texts = list(library_texts(options.speed_mb * 1e6))
        given = root / "given"
        given.mkdir()
        vocabulary.train(texts[:200], options.vocab_size).save(str(given / "tokenizer.json"))
        show_speed(root, texts, given, options.turns)
        if options.memory_mb:
            show_memory(root, "bpe" if options.trained else str(given), options.memory_mb)
    return 0


def show_speed(root: Path, texts: list[str], given: Path, turns: int) -> None:
    corpus, size_mb = root / "corpus.jsonl", sum(len(text.encode()) for text in texts) / 1e6
    corpus.write_text("".join(json.dumps({"id": n, "text": text}) + "\n" for n, text in enumerate(texts)))
    config = DataConfig(corpus=str(corpus), tokenizer=str(given), tokenizer_vocab_size=1 << 20, validation_fraction=0.1)
    ours, library = [], []
    for turn in range(turns):
        ours.append(timed(lambda turn=turn: tokenize.prepare(config, root / f"cache{turn}")))
        library.append(timed(lambda: encode_alone(given, texts)))
    ratio = median(theirs[0] / mine[0] for mine, theirs in zip(ours, library, strict=True))
    print(f"{size_mb:.1f} MB, {turns} turns, median")
    for label, times, words in (
        ("encode_batch alone", library, ""),
        ("the whole preparation", ours, f", {ratio:.2f} of it (bar {BAR})"),
    ):
        speed, cpu_s = size_mb / median(wall for wall, _ in times), median(cpu for _, cpu in times)
        print(f"{label:22} {speed:6.2f} MB/s, {cpu_s:.1f} CPU-s{words}")


def timed(work: Callable[[], object]) -> tuple[float, float]:
    """Seconds by the clock, and of all threads of this process."""
    wall, cpu = time.perf_counter(), time.process_time()
    work()
    return time.perf_counter() - wall, time.process_time() - cpu


def encode_alone(given: Path, texts: list[str]) -> None:
    tokenizer = Tokenizer.from_file(str(given / "tokenizer.json"))
    batch, size = [], 0
    for text in texts:
        batch.append(text)
        size += len(text)
        if size >= BATCH_BYTES:
            tokenizer.encode_batch(batch, add_special_tokens=False)
            batch, size = [], 0
    tokenizer.encode_batch(batch, add_special_tokens=False)


def show_memory(root: Path, tokenizer: str, sizes_mb: list[float]) -> None:
    for size_mb in sizes_mb:
        corpus = root / f"{size_mb:g}mb.jsonl"
        write_generated(corpus, size_mb * 1e6)
        place = [str(corpus), "--out", str(root / corpus.stem)]
        command = [sys.executable, "-c", _CHILD, *place, "--tokenizer", tokenizer]
        start = time.perf_counter()
        done = subprocess.run(
            [*command, "--out", str(root / f"{size_mb:g}")], check=True, capture_output=True, text=True
        )
        peak_mb = int(done.stdout.splitlines()[-1]) * 1024 / 1e6
        print(f"peak memory of {size_mb:g} MB: {peak_mb:.0f} MB, {time.perf_counter() - start:.0f} s")
        corpus.unlink()


def library_texts(num_bytes: float) -> Iterator[str]:
    """The standard library's modules, again and again."""
    while True:
        for document in find("stdlib").documents(Skipped()):
            yield document.text
            num_bytes -= len(document.text.encode())
            if num_bytes <= 0:
                return


def write_generated(path: Path, num_bytes: float) -> None:
    """JSON lines of about 2 kB whose words follow Zipf's law."""
    rng = random.Random(0)
    words = ["".join(rng.choices("etaoinshrdlucmf", k=rng.randint(2, 9))) for _ in range(20_000)]
    weights = [1 / rank for rank in range(1, len(words) + 1)]
    with path.open("w") as file:
        while file.tell() < num_bytes:
            drawn = rng.choices(words, weights, k=40_000)
            for start in range(0, len(drawn), 400):
                file.write(json.dumps({"text": " ".join(drawn[start : start + 400])}) + "\n")


if __name__ == "__main__":
    sys.exit(main())
