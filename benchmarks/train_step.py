"""Speed of a training step, side by side in one process: transformers' OLMoE, this engine, and a node that freezes 3/4.

    python benchmarks/train_step.py [--quick] [--threads 2]

Rows of one shape take turns, one step each, so that a busy machine slows all of them; ratios are medians over
turns. A step is forward, backward, clipping and fused AdamW, on the same tokens and initial weights. Both sides take
cross-entropy and 0.01 × load balancing (transformers pools the layers before the product); this engine takes z-loss
and router z-loss besides. FLOPs are those of `counting.flops_per_token`; the GEMM peak is that of a 1024³ product,
timed between the turns.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from statistics import median
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy
from torch.profiler import ProfilerActivity, profile

from spes_core.config import ComputeConfig, LossConfig, ModelConfig, OptimConfig
from spes_core.hf.layout import hf_config, to_hf_module_state
from spes_core.model import counting
from spes_core.model.decoder import Decoder
from spes_core.model.initialise import initialise
from spes_core.train.allocator import keep_freed_memory
from spes_core.train.step import make_optimizer, train_step

BASE = ModelConfig(
    num_layers=4, d_model=256, num_heads=4, num_kv_heads=4, num_experts=8, top_k=2, expert_hidden=512, vocab_size=8192
)
SHAPES = {
    "base": BASE,
    "4x FLOPs": replace(BASE, d_model=512, num_heads=8, num_kv_heads=8, expert_hidden=1024, vocab_size=16_384),
    "vocabulary 50k": replace(BASE, vocab_size=50_304),
}
SEQUENCES, LENGTH = 8, 256
TOKENS = SEQUENCES * LENGTH
QUARTER = (0, 1)


@dataclass
class Row:
    name: str
    step: Callable[[], object]
    trained: tuple[int, ...]
    first_s: float = 0.0
    wall_s: list[float] = field(default_factory=list)
    cpu_s: list[float] = field(default_factory=list)
    failure: str = ""

    def warm_up(self) -> None:
        began_s = time.perf_counter()
        try:
            self.step()
            self.first_s = time.perf_counter() - began_s
            self.step()
        except Exception as error:  # a variant that cannot run here is a finding of the benchmark
            self.failure = f"{type(error).__name__}: {str(error).splitlines()[0][:90]}"

    def take(self) -> None:
        wall_s, cpu_s = time.perf_counter(), time.process_time()
        self.step()
        self.wall_s.append(time.perf_counter() - wall_s)
        self.cpu_s.append(time.process_time() - cpu_s)


def make_batch(model: ModelConfig) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    tokens_BT = torch.randint(model.vocab_size, (SEQUENCES, LENGTH + 1), generator=generator)
    return tokens_BT[:, :-1].contiguous(), tokens_BT[:, 1:].contiguous()


def engine_row(name: str, model: ModelConfig, trained: tuple[int, ...], *, compile: bool = False) -> Row:
    decoder = Decoder(model, trained, compute=ComputeConfig(compile=compile))
    initialise(decoder, 0)
    optimizer, batch = make_optimizer(decoder, OptimConfig()), make_batch(model)
    return Row(name, lambda: train_step(decoder, optimizer, [batch], LossConfig(), 1.0, 1e-3), trained)


def transformers_row(name: str, model: ModelConfig, experts: str, *, compile: bool = False) -> Row:
    from transformers import OlmoeForCausalLM

    config = hf_config(model)
    module: Any = OlmoeForCausalLM._from_config(config, attn_implementation="sdpa", experts_implementation=experts)
    decoder = Decoder(model, range(model.num_experts))
    initialise(decoder, 0)
    module.load_state_dict(to_hf_module_state(model, decoder.tensors()), strict=False)
    del decoder
    optimizer = torch.optim.AdamW(module.parameters(), lr=1e-3, betas=(0.9, 0.95), weight_decay=0.1, fused=True)
    tokens_BT, targets_BT = make_batch(model)
    run = torch.compile(module) if compile else module

    def step() -> None:
        optimizer.zero_grad(set_to_none=True)
        output = run(input_ids=tokens_BT, output_router_logits=True, use_cache=False)
        loss = cross_entropy(output.logits.flatten(0, 1), targets_BT.flatten()) + 0.01 * output.aux_loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(module.parameters(), 1.0)
        optimizer.step()

    return Row(name, step, tuple(range(model.num_experts)))


def gemm_peak() -> Callable[[], float]:
    left, right = torch.randn(1024, 1024), torch.randn(1024, 1024)
    output = torch.empty(1024, 1024)

    def measure() -> float:
        best_s = min(_timed(lambda: torch.mm(left, right, out=output)) for _ in range(8))
        return 2 * 1024**3 / best_s

    return measure


def _timed(function: Callable[[], object]) -> float:
    began_s = time.perf_counter()
    function()
    return time.perf_counter() - began_s


def peak_bytes(step: Callable[[], object]) -> int:
    """Largest memory that one step holds beyond what it found, by the profiler's record of every allocation."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as recorded:
        step()
    records = [event for event in recorded.profiler.kineto_results.events() if event.name() == "[memory]"]
    held = peak = 0
    for event in sorted(records, key=lambda event: event.start_ns()):
        held += event.nbytes()
        peak = max(peak, held)
    return peak


def measure(label: str, model: ModelConfig, rows: list[Row], turns: int, *, with_memory: bool) -> None:
    for row in rows:
        row.warm_up()
    running, peaks, measure_peak = [row for row in rows if not row.failure], [], gemm_peak()
    for _ in range(turns):
        peaks.append(measure_peak())
        for row in running:
            row.take()
    peak = max(peaks)
    reference = min((row for row in running if row.name.startswith("HF") and "compiled" not in row.name), key=_wall)
    print(
        f"\n{label}: d {model.d_model}, I {model.expert_hidden}, V {model.vocab_size}, batch {SEQUENCES}×{LENGTH};",
        end=" ",
    )
    print(f"GEMM peak {peak / 1e9:.0f} GFLOP/s (median {median(peaks) / 1e9:.0f}); baseline {reference.name}")
    columns = f"{'tokens/s':>9}{'wall s':>8}{'CPU s':>7}{'× wall':>8}{'× CPU':>7}{'of peak':>9}{'first s':>9}"
    print(f"{'row':24}{columns}  peak memory")
    for row in rows:
        if row.failure:
            print(f"{row.name:24} cannot run: {row.failure}")
            continue
        flops = TOKENS * counting.flops_per_token(model, row.trained, LENGTH).total
        memory = f"{peak_bytes(row.step) / 1e6:.0f} MB" if with_memory else ""
        print(
            f"{row.name:24}{TOKENS / _wall(row):9.0f}{_wall(row):8.3f}{median(row.cpu_s):7.3f}"
            f"{_ratio(reference.wall_s, row.wall_s):8.2f}{_ratio(reference.cpu_s, row.cpu_s):7.2f}"
            f"{flops / _wall(row) / peak:9.0%}{row.first_s:9.1f}  {memory}"
        )
    _report_freezing(model, running)


def _report_freezing(model: ModelConfig, rows: list[Row]) -> None:
    """Share of a step that freezing saves, against the share that the skipped products have of the FLOPs."""
    flops = counting.flops_per_token(model, QUARTER, LENGTH)
    predicted = flops.skipped_weights / (flops.total + flops.skipped_weights)
    by_name = {row.name: row for row in rows}
    for suffix in ("", " compiled"):
        full, sparse = by_name.get(f"ours full{suffix}"), by_name.get(f"ours 1/4 trained{suffix}")
        if full is None or sparse is None:
            continue
        wall, cpu = 1 - 1 / _ratio(full.wall_s, sparse.wall_s), 1 - 1 / _ratio(full.cpu_s, sparse.cpu_s)
        print(
            f"freezing 3/4{suffix}: predicted saving {predicted:.1%} of the step, achieved {wall:.1%} wall"
            f" ({wall / predicted:.0%} of it), {cpu:.1%} CPU ({cpu / predicted:.0%})"
        )


def _wall(row: Row) -> float:
    return median(row.wall_s)


def _ratio(slower: list[float], faster: list[float]) -> float:
    return median(a / b for a, b in zip(slower, faster, strict=True))


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--quick", action="store_true", help="the base shape only, nothing compiled, few turns")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--turns", type=int, default=None, help="steps of each row; default 9, 5 for the larger shapes")
    arguments = parser.parse_args(argv)
    torch.set_num_threads(arguments.threads)
    keep_freed_memory()  # as a node does; both sides gain by it
    print(f"torch {torch.__version__}, {arguments.threads} threads, load average {os.getloadavg()[0]:.1f}")
    began_s = time.perf_counter()
    everyone = tuple(range(BASE.num_experts))
    for label, model in SHAPES.items():
        if arguments.quick and label != "base":
            continue
        rows = [transformers_row("HF grouped_mm", model, "grouped_mm")]
        if label == "base":
            rows.append(transformers_row("HF eager", model, "eager"))
        rows += [engine_row("ours full", model, everyone), engine_row("ours 1/4 trained", model, QUARTER)]
        if not arguments.quick:
            rows.append(engine_row("ours full compiled", model, everyone, compile=True))
        if not arguments.quick and label == "base":
            rows.append(engine_row("ours 1/4 trained compiled", model, QUARTER, compile=True))
            rows.append(transformers_row("HF compiled", model, "grouped_mm", compile=True))
        turns = arguments.turns or (3 if arguments.quick else 9 if label == "base" else 5)
        measure(label, model, rows, turns, with_memory=label == "vocabulary 50k")
    print(f"\n{time.perf_counter() - began_s:.0f} s in all")
    return 0


if __name__ == "__main__":
    sys.exit(main())
