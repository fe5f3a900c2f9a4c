"""The inner optimizers: Muon against PyTorch's own and against a singular value decomposition, memory as counted."""

from __future__ import annotations

import importlib.util
from copy import deepcopy

import pytest
import torch

from spes_core.config import LossConfig, ModelConfig, OptimConfig, ParallelConfig, RunConfig, SyncConfig
from spes_core.model import counting
from spes_core.model.decoder import Decoder
from spes_core.model.initialise import initialise
from spes_core.rules import check
from spes_core.train.footprint import moments_bytes
from spes_core.train.optimizers import Muon, make_optimizer, orthogonalise
from spes_core.train.step import train_step

MODEL = ModelConfig(
    num_layers=2, d_model=64, num_heads=2, num_kv_heads=2, num_experts=4, top_k=2, expert_hidden=48, vocab_size=96
)


def make_decoder(trained: tuple[int, ...] = (0, 2)) -> Decoder:
    decoder = Decoder(MODEL, trained)
    initialise(decoder, 0)
    return decoder


def steps(decoder: Decoder, optimizer: torch.optim.Optimizer, count: int, first: int = 0) -> list[float]:
    losses = []
    for seed in range(first, first + count):
        tokens_BT = torch.randint(96, (4, 9), generator=torch.Generator().manual_seed(seed % 2))
        batch = (tokens_BT[:, :-1].contiguous(), tokens_BT[:, 1:].contiguous())
        losses.append(float(train_step(decoder, optimizer, [batch], LossConfig(), 1.0, 0.02).cross_entropy))
    return losses


def test_orthogonalise_brings_every_singular_value_near_one_matrix_by_matrix() -> None:
    generator = torch.Generator().manual_seed(0)
    for shape in ((3, 8, 20), (3, 20, 8)):
        matrices_MAB = torch.randn(shape, generator=generator)
        found_MAB = orthogonalise(matrices_MAB)
        values = torch.linalg.svdvals(found_MAB)
        assert float(values.min()) > 0.6 and float(values.max()) < 1.3
        left, _, right = torch.linalg.svd(matrices_MAB, full_matrices=False)
        cosine = torch.nn.functional.cosine_similarity(found_MAB.flatten(1), (left @ right).flatten(1))
        assert float(cosine.min()) > 0.97
        torch.testing.assert_close(found_MAB[1], orthogonalise(matrices_MAB[1:2])[0])


def test_a_single_matrix_moves_as_under_the_muon_of_pytorch() -> None:
    optim = OptimConfig(name="muon", lr=0.1, weight_decay=0.2)
    generator = torch.Generator().manual_seed(1)
    start, gradients = torch.randn(12, 30, generator=generator), torch.randn(3, 12, 30, generator=generator)
    ours, theirs = (start.clone().requires_grad_() for _ in range(2))
    mine = Muon([{"params": [ours]}], optim)
    reference = torch.optim.Muon([theirs], lr=0.1, weight_decay=0.2, adjust_lr_fn="match_rms_adamw")
    for gradient in gradients:
        ours.grad, theirs.grad = gradient.clone(), gradient.clone()
        mine.step()
        reference.step()
    torch.testing.assert_close(ours, theirs, rtol=0.02, atol=0.02)  # theirs iterates in bfloat16


def test_gate_and_up_of_each_expert_are_matrices_of_their_own() -> None:
    decoder = make_decoder()
    optimizer = make_optimizer(decoder, OptimConfig(name="muon", weight_decay=0.0))
    before = {name: tensor.clone() for name, tensor in decoder.tensors().items()}
    steps(decoder, optimizer, 1)
    moved = decoder.tensors()["layers.1.experts.2.gate_up"] - before["layers.1.experts.2.gate_up"]
    for matrix in moved.chunk(2):
        values = torch.linalg.svdvals(matrix) / (0.02 * 0.2 * 8)  # lr · 0.2 · √64
        values = values[values > 1e-3]  # the rank is at most the number of tokens
        assert len(values) > 8 and float(values.min()) > 0.5 and float(values.max()) < 1.3
    assert torch.equal(decoder.tensors()["layers.1.experts.1.down"], before["layers.1.experts.1.down"])


@pytest.mark.parametrize("name", ["adamw", "muon", "sgd"])
def test_moments_are_predicted_to_the_byte(name: str) -> None:
    optim = OptimConfig(name=name)  # type: ignore[arg-type]
    decoder = make_decoder((0,))
    optimizer = make_optimizer(decoder, optim)
    steps(decoder, optimizer, 1)
    assert moments_bytes(optimizer) == counting.memory(RunConfig(model=MODEL, nodes=4, optim=optim), 0).moments_bytes


def test_muon_learns_and_resumes_to_the_same_bits() -> None:
    optim = OptimConfig(name="muon")
    decoder = make_decoder()
    optimizer = make_optimizer(decoder, optim)
    losses = steps(decoder, optimizer, 10)
    assert losses[-1] < 0.7 * losses[0]
    weights, state = {n: t.clone() for n, t in decoder.tensors().items()}, deepcopy(optimizer.state_dict())
    twin = make_decoder()
    for name, tensor in twin.tensors().items():
        tensor.copy_(weights[name])
    resumed = make_optimizer(twin, optim)
    resumed.load_state_dict(state)
    assert steps(twin, resumed, 2, first=10) == steps(decoder, optimizer, 2, first=10)
    assert all(torch.equal(tensor, twin.tensors()[name]) for name, tensor in decoder.tensors().items())


@pytest.mark.slow
@pytest.mark.skipif(importlib.util.find_spec("torchao") is None, reason="needs the extra eightbit")
def test_8_bit_adamw_learns_with_a_quarter_of_the_moments() -> None:
    optim = OptimConfig(name="adamw_8bit")
    decoder = make_decoder((0,))
    optimizer = make_optimizer(decoder, optim)
    losses = steps(decoder, optimizer, 10)
    assert losses[-1] < 0.8 * losses[0]
    assert moments_bytes(optimizer) == counting.memory(RunConfig(model=MODEL, nodes=4, optim=optim), 0).moments_bytes


def test_8_bit_moments_are_a_byte_a_scale_and_a_table() -> None:
    found = counting.moments_bytes(OptimConfig(name="adamw_8bit"), {"embedding": (512, 16), "final_norm": (16,)})
    assert found == 2 * (8192 + 4 * (8192 // 256 + 256)) + 2 * 4 * 16


@pytest.mark.parametrize("name", ["muon", "adamw_8bit"])
def test_optimizers_of_whole_parameters_are_refused_where_they_are_sharded(name: str) -> None:
    optim = OptimConfig(name=name)  # type: ignore[arg-type]
    sharded = RunConfig(optim=optim, sync=SyncConfig(exchange="gradients"))
    assert [problem.path for problem in check(sharded)] == ["optim.name"]
    assert "optim.name" in [
        problem.path for problem in check(RunConfig(optim=optim, parallel=ParallelConfig(ranks_per_node=2)))
    ]
    assert check(RunConfig(optim=optim)) == []
