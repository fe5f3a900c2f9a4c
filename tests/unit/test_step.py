"""One optimizer step: what moves, what does not, accumulation, clipping, decay."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from spes_core.config import LossConfig, ModelConfig, OptimConfig
from spes_core.model.decoder import Decoder
from spes_core.model.initialise import initialise
from spes_core.names import expert_of
from spes_core.train.step import make_optimizer, train_step

MODEL = ModelConfig(
    num_layers=2,
    d_model=16,
    num_heads=2,
    num_kv_heads=1,
    num_experts=4,
    top_k=2,
    expert_hidden=12,
    vocab_size=50,
)
LOSS = LossConfig()
Batch = tuple[Tensor, Tensor]


def make_decoder(trained: list[int], seed: int = 0) -> Decoder:
    decoder = Decoder(replace(MODEL, init_std=0.2), trained)
    initialise(decoder, seed)
    return decoder


def make_batch(seed: int, sequences: int = 4) -> Batch:
    tokens_BT = torch.randint(50, (sequences, 9), generator=torch.Generator().manual_seed(seed))
    return tokens_BT[:, :-1], tokens_BT[:, 1:].clone()


def train(
    decoder: Decoder, optim: OptimConfig, batches: list[list[Batch]], clip_norm: float | None = None
) -> torch.optim.Optimizer:
    optimizer = make_optimizer(decoder, optim)
    for batch in batches:
        train_step(decoder, optimizer, batch, LOSS, clip_norm, optim.lr)
    return optimizer


def copies(decoder: Decoder) -> dict[str, Tensor]:
    return {name: tensor.clone() for name, tensor in decoder.tensors().items()}


def test_frozen_experts_do_not_move_a_bit_and_have_no_gradient_or_moments() -> None:
    decoder = make_decoder([1, 2])
    before = copies(decoder)
    optimizer = train(decoder, OptimConfig(), [[make_batch(seed)] for seed in range(4)])
    for name, after in decoder.tensors().items():
        assert torch.equal(before[name], after) == (expert_of(name) in (0, 3)), name
    frozen = [parameter for name, parameter in decoder.named_parameters() if "frozen" in name]
    assert len(frozen) == 4 and all(parameter.grad is None for parameter in frozen)
    assert all(parameter not in optimizer.state for parameter in frozen)
    assert sum(len(group["params"]) for group in optimizer.param_groups) == len(optimizer.state)


def test_one_step_of_a_sparse_node_equals_the_full_model_on_all_that_it_trains() -> None:
    sgd = OptimConfig(name="sgd", lr=0.5, weight_decay=0.0)
    full, sparse = make_decoder([0, 1, 2, 3]), make_decoder([3])
    train(full, sgd, [[make_batch(5)]])
    train(sparse, sgd, [[make_batch(5)]])
    whole = full.tensors()
    for name, tensor in sparse.tensors().items():
        if expert_of(name) in (None, 3):
            assert torch.equal(tensor, whole[name]), name


def test_micro_batches_add_up_to_the_batch_by_targets() -> None:
    sgd = OptimConfig(name="sgd", lr=1.0, weight_decay=0.0)
    no_auxiliary = LossConfig(balance_weight=0.0, router_z_weight=0.0, z_weight=0.1)
    tokens_BT, targets_BT = make_batch(7, sequences=6)
    targets_BT[0], targets_BT[4, :3] = -100, -100  # micro-batches with different numbers of targets
    parts = [
        (tokens_BT[:2], targets_BT[:2]),
        (tokens_BT[2:3], targets_BT[2:3]),
        (tokens_BT[3:], targets_BT[3:]),
    ]
    results = []
    for batches in ([(tokens_BT, targets_BT)], parts):
        decoder = make_decoder([0, 1, 2, 3])
        metrics = train_step(decoder, make_optimizer(decoder, sgd), batches, no_auxiliary, None, 1.0)
        results.append((metrics, decoder.tensors()))
    (whole, whole_tensors), (summed, summed_tensors) = results
    torch.testing.assert_close(whole.cross_entropy, summed.cross_entropy, rtol=1e-6, atol=0)
    torch.testing.assert_close(whole.z_loss, summed.z_loss, rtol=1e-6, atol=0)
    torch.testing.assert_close(whole.grad_norm, summed.grad_norm, rtol=1e-5, atol=0)
    assert torch.equal(whole.expert_tokens_LE, summed.expert_tokens_LE)
    for name, tensor in whole_tensors.items():
        torch.testing.assert_close(tensor, summed_tensors[name], rtol=1e-5, atol=1e-6, msg=name)


def test_clipping_scales_shared_and_expert_gradients_to_the_norm_together() -> None:
    decoder = make_decoder([0, 2])
    before = copies(decoder)
    sgd = OptimConfig(name="sgd", weight_decay=0.0)
    metrics = train_step(decoder, make_optimizer(decoder, sgd), [make_batch(1)], LOSS, 0.01, 1.0)
    assert float(metrics.grad_norm) > 0.01
    moved = torch.cat([(tensor - before[name]).flatten() for name, tensor in decoder.tensors().items()])
    assert float(moved.double().norm()) == pytest.approx(0.01, rel=1e-3)


def test_the_reported_norm_is_that_before_clipping() -> None:
    norms = []
    for clip_norm in (None, 1e-3, 1e3):
        decoder = make_decoder([0, 1])
        metrics = train_step(decoder, make_optimizer(decoder, OptimConfig()), [make_batch(1)], LOSS, clip_norm, 0.1)
        norms.append(float(metrics.grad_norm))
    assert norms[0] == pytest.approx(norms[1], rel=1e-6) == pytest.approx(norms[2], rel=1e-6)


def test_gradients_within_the_norm_are_left_as_they_are_to_the_bit() -> None:
    runs = []
    for clip_norm in (None, 1e3):
        decoder = make_decoder([0, 1])
        train(decoder, OptimConfig(), [[make_batch(seed)] for seed in range(2)], clip_norm)
        runs.append(decoder.tensors())
    assert all(torch.equal(runs[0][name], runs[1][name]) for name in runs[0])


def test_a_gradient_that_is_not_a_number_leaves_no_gradient_that_is_one() -> None:
    decoder = make_decoder([0, 1])
    with torch.no_grad():
        decoder.get_parameter("final_norm")[0] = float("nan")
    train_step(decoder, make_optimizer(decoder, OptimConfig()), [make_batch(0)], LOSS, 1.0, 1e-3)
    gradients = [item.grad for item in decoder.parameters() if item.grad is not None]
    assert gradients and all(bool(gradient.isnan().all()) for gradient in gradients)


def test_matrices_and_banks_decay_and_norms_do_not() -> None:
    decoder = make_decoder([0, 1])
    optimizer = make_optimizer(decoder, OptimConfig(weight_decay=0.3))
    decayed = {id(item): group["weight_decay"] for group in optimizer.param_groups for item in group["params"]}
    for name, parameter in decoder.named_parameters():
        expected = None if "frozen" in name else 0.0 if "norm" in name else 0.3
        assert decayed.get(id(parameter)) == expected, name


def test_the_learning_rate_of_the_step_is_the_one_given() -> None:
    decoder = make_decoder([0, 1, 2, 3])
    before = copies(decoder)
    train_step(decoder, make_optimizer(decoder, OptimConfig()), [make_batch(1)], LOSS, None, 0.0)
    assert all(torch.equal(before[name], tensor) for name, tensor in decoder.tensors().items())


def test_the_same_seed_gives_the_same_bits_twice() -> None:
    runs = []
    for _ in range(2):
        decoder = make_decoder([0, 1])
        train(decoder, OptimConfig(), [[make_batch(seed)] for seed in range(3)], clip_norm=1.0)
        runs.append(decoder.tensors())
    assert all(torch.equal(runs[0][name], runs[1][name]) for name in runs[0])


def test_a_small_model_learns_a_repeated_batch() -> None:
    decoder, optim = make_decoder([0, 1, 2, 3]), OptimConfig(lr=1e-2)
    optimizer = make_optimizer(decoder, optim)
    curve = [float(train_step(decoder, optimizer, [make_batch(0)], LOSS, 1.0, 1e-2).cross_entropy) for _ in range(60)]
    assert curve[-1] < 0.2 * curve[0]
