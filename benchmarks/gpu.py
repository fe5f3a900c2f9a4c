"""Check of the engine on one CUDA device, in under six minutes; says so and ends where there is none.

    python benchmarks/gpu.py                      # on a GPU
    python benchmarks/gpu.py --device cpu --tiny  # the same code on a CPU, at toy size (no figure means anything)

1. Numerics: bfloat16 layers (grouped products) against the per-token loop twin in float64, loss and gradients.
2. For presets up to what fits: tokens/s, MFU, peak memory against `counting`, full training against 1/4 of the
   experts, with block checkpointing and compiled layers.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median

import torch
from torch import Tensor

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # the loop twin lives beside the tests

from spes_core.config import ComputeConfig, FrozenConfig, LossConfig, ModelConfig, OptimConfig
from spes_core.model import counting
from spes_core.model.decoder import Decoder
from spes_core.model.initialise import initial_tensor
from spes_core.model.losses import CHUNK_TOKENS_CUDA
from spes_core.model.moe import Experts, route
from spes_core.train.step import make_optimizer, train_step
from tests.reference.moe_loop import moe_loop

TINY = ModelConfig(
    num_layers=2, d_model=64, num_heads=2, num_kv_heads=2, num_experts=4, top_k=2, expert_hidden=64, vocab_size=512
)
SMALL = ModelConfig(
    num_layers=8,
    d_model=512,
    num_heads=8,
    num_kv_heads=8,
    num_experts=8,
    top_k=2,
    expert_hidden=1024,
    vocab_size=32_768,
)
ONE_B = ModelConfig(
    num_layers=12,
    d_model=768,
    num_heads=12,
    num_kv_heads=12,
    num_experts=16,
    top_k=2,
    expert_hidden=2048,
    vocab_size=151_665,
)
SEVEN_B = ModelConfig(
    num_layers=16,
    d_model=2048,
    num_heads=16,
    num_kv_heads=16,
    num_experts=32,
    top_k=4,
    expert_hidden=2048,
    vocab_size=151_665,
)
PRESETS = {"small": SMALL, "1b": ONE_B, "7b": SEVEN_B}
LENGTH = 2048
BF16_PEAK_FLOPS = {"H200": 989e12, "H100": 989e12, "A100": 312e12, "L40S": 362e12, "A6000": 155e12, "4090": 165e12}
"""Dense bfloat16 peaks of data sheets; where a device is not listed, a measured GEMM stands in."""
BUDGET_S = 300.0


def check_numerics(device: torch.device) -> list[tuple[str, float]]:
    """Relative error (norm over norm) of an expert layer's output and gradients in bfloat16, against float64."""
    model, trained = replace(TINY, d_model=128, expert_hidden=128), (0, 2)
    compute = ComputeConfig(precision="bfloat16")
    experts = Experts(model, trained, compute=compute, frozen_dtype=torch.bfloat16)
    generator = torch.Generator().manual_seed(0)
    for expert in range(model.num_experts):
        for matrix in ("gate_up", "down"):
            experts.tensor(expert, matrix).copy_(
                torch.randn(experts.tensor(expert, matrix).shape, generator=generator) * 0.1
            )
    experts.to(device)
    x_ND = torch.randn(64, 128, generator=generator).bfloat16().to(device).requires_grad_()
    router_ED = (torch.randn(4, 128, generator=generator)).bfloat16().to(device).requires_grad_()
    output_ND = experts(x_ND, route(x_ND @ router_ED.t(), 2, True))
    output_ND.float().square().sum().backward()
    twin_x, twin_router = (item.detach().double().cpu().requires_grad_() for item in (x_ND, router_ED))
    matrices = {
        matrix: [experts.tensor(expert, matrix).double().cpu().requires_grad_() for expert in range(4)]
        for matrix in ("gate_up", "down")
    }
    expected_ND = moe_loop(twin_x, twin_router, matrices["gate_up"], matrices["down"], 2, True)
    expected_ND.square().sum().backward()
    pairs = [("output", output_ND, expected_ND), ("input gradient", x_ND.grad, twin_x.grad)]
    for row, expert in enumerate(trained):
        for matrix in ("gate_up", "down"):
            gradient = experts.get_parameter(f"trained_{matrix}").grad
            assert gradient is not None
            pairs.append((f"{matrix} gradient of expert {expert}", gradient[row], matrices[matrix][expert].grad))
    return [(name, _relative_error(found, wanted)) for name, found, wanted in pairs]


def _relative_error(found: Tensor | None, wanted: Tensor | None) -> float:
    assert found is not None and wanted is not None
    difference = found.detach().double().cpu() - wanted.detach()
    return float(difference.norm() / wanted.detach().norm())


@dataclass
class Measured:
    tokens_per_s: float
    flops_per_s: float
    peak_bytes: int
    predicted_bytes: int
    loss: float


def predicted_bytes(
    model: ModelConfig, trained: tuple[int, ...], sequences: int, length: int, compute: ComputeConfig
) -> int:
    """Peak of one step: weights and moments, and the larger of what forward and backward hold beside them.

    Forward is largest in the loss: all that is kept, one chunk of logits (fp32, and bfloat16 on the way in or out),
    and the unembedding's copy, gradient and partial product. Backward is largest in the first layer: all gradients,
    what is made again, and the bfloat16 copies of the layer's trained experts and of their gradients.
    """
    counts, tokens = counting.parameter_counts(model, trained), sequences * length
    unembedding = model.vocab_size * model.d_model
    loss = 6 * min(tokens, CHUNK_TOKENS_CUDA) * model.vocab_size + 8 * unembedding
    forward = counting.activation_bytes(model, sequences, length, compute) + loss
    copies = 2 * 2 * len(trained) * counts.per_expert // model.num_layers
    again = counting.recomputed_bytes(model, sequences, length, compute)
    backward = 4 * counts.trained + again + copies + 2 * tokens * model.d_model
    return 12 * counts.trained + 2 * (counts.total - counts.trained) + max(forward, backward)


def measure(
    model: ModelConfig, trained: tuple[int, ...], device: torch.device, sequences: int, length: int, *, compile: bool
) -> Measured:
    """A few steps of one configuration in bfloat16 with frozen experts in bfloat16."""
    compute = ComputeConfig(precision="bfloat16", activation_checkpointing="block", compile=compile)
    with device:  # parameters are made where they stay
        decoder = Decoder(model, trained, compute=compute, frozen=FrozenConfig(dtype="bfloat16"))
    with torch.no_grad():
        for name, tensor in decoder.tensors().items():
            if device.type == "cpu":
                tensor.copy_(initial_tensor(model, name, 0))
            else:
                tensor.fill_(1.0) if tensor.dim() == 1 else tensor.normal_(0, model.init_std)
    optimizer = make_optimizer(decoder, OptimConfig())
    tokens_BT = torch.randint(model.vocab_size, (sequences, length + 1), device=device)
    batch = (tokens_BT[:, :-1].contiguous(), tokens_BT[:, 1:].contiguous())
    seconds, loss = [], torch.zeros(())
    for step in range(6):
        if step == 2 and device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(device)
        began_s = time.perf_counter()
        loss = train_step(decoder, optimizer, [batch], LossConfig(), 1.0, 1e-4).cross_entropy
        _wait(device)
        seconds.append(time.perf_counter() - began_s)
    step_s = median(seconds[2:])
    flops = counting.flops_per_token(model, trained, length).total
    tokens = sequences * length
    peak = torch.cuda.max_memory_allocated(device) if device.type == "cuda" else 0
    return Measured(
        tokens / step_s,
        flops * tokens / step_s,
        peak,
        predicted_bytes(model, trained, sequences, length, compute),
        float(loss),
    )


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def peak_flops(device: torch.device) -> tuple[float, str]:
    """The device's bfloat16 peak, and where the figure is from."""
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu"
    for key, flops in BF16_PEAK_FLOPS.items():
        if key in name:
            return flops, f"data sheet of {key}"
    size = 8192 if device.type == "cuda" else 256
    left = torch.randn(size, size, device=device, dtype=torch.bfloat16)
    best_s = float("inf")
    for _ in range(5):
        began_s = time.perf_counter()
        left @ left
        _wait(device)
        best_s = min(best_s, time.perf_counter() - began_s)
    return 2 * size**3 / best_s, "measured product"


def arms(model: ModelConfig) -> Iterator[tuple[str, tuple[int, ...]]]:
    yield "full", tuple(range(model.num_experts))
    yield "1/4 trained", tuple(range(model.num_experts // 4))


def run(device: torch.device, presets: dict[str, ModelConfig], sequences: int, length: int, *, compile: bool) -> bool:
    """Print both parts; whether the numerics are in order."""
    began_s = time.perf_counter()
    errors = check_numerics(device)
    for name, error in errors:
        print(f"bfloat16 against the float64 loop: {name:32} relative error {error:.1e} (at most 2e-2)")
    peak, source = peak_flops(device)
    print(f"peak {peak / 1e12:.3g} TFLOP/s ({source}); batch {sequences}×{length}")
    print(f"{'preset':8}{'arm':14}{'tokens/s':>10}{'MFU':>7}{'peak GB':>9}{'predicted':>11}{'ratio':>7}{'loss':>8}")
    capacity = torch.cuda.get_device_properties(device).total_memory if device.type == "cuda" else 1 << 62
    for preset, model in presets.items():
        speeds = []
        for arm, trained in arms(model):
            compute = ComputeConfig(precision="bfloat16", activation_checkpointing="block")
            if predicted_bytes(model, trained, sequences, length, compute) > 0.9 * capacity:
                print(f"{preset:8}{arm:14} does not fit")
                continue
            if time.perf_counter() - began_s > BUDGET_S:
                print(f"{preset:8}{arm:14} left out: the time is used up")
                continue
            found = measure(model, trained, device, sequences, length, compile=compile)
            speeds.append(found.tokens_per_s)
            ratio = found.peak_bytes / found.predicted_bytes
            print(
                f"{preset:8}{arm:14}{found.tokens_per_s:10.0f}{found.flops_per_s / peak:7.1%}"
                f"{found.peak_bytes / 1e9:9.2f}{found.predicted_bytes / 1e9:11.2f}{ratio:7.3f}{found.loss:8.3f}"
            )
            if device.type == "cuda":
                torch.cuda.empty_cache()
        if len(speeds) == 2:
            flops = counting.flops_per_token(model, tuple(range(model.num_experts // 4)), length)
            predicted = 1 + flops.skipped_weights / flops.total
            print(
                f"{preset:8}freezing 3/4: {speeds[1] / speeds[0]:.3f}× faster; skipped FLOPs predict {predicted:.3f}×"
            )
    return all(error < 2e-2 for _, error in errors)


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--tiny", action="store_true", help="toy sizes: exercises the script")
    parser.add_argument("--sequences", type=int, default=8)
    parser.add_argument("--eager", action="store_true", help="do not compile the layers")
    arguments = parser.parse_args(argv)
    if arguments.device == "cuda" and not torch.cuda.is_available():
        print("no CUDA device here: nothing measured (--device cpu --tiny exercises the script)")
        return 0
    device = torch.device(arguments.device)
    if arguments.tiny:
        in_order = run(device, {"tiny": TINY}, 2, 64, compile=False)
    else:
        in_order = run(device, PRESETS, arguments.sequences, LENGTH, compile=not arguments.eager)
    return 0 if in_order else 1


if __name__ == "__main__":
    sys.exit(main())
