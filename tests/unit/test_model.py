"""The decoder as a whole: names and views, causality, losses, initial weights."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from spes_core.config import LossConfig, ModelConfig
from spes_core.model.attention import rotate, rotation_tables
from spes_core.model.counting import tensor_shapes
from spes_core.model.decoder import Decoder
from spes_core.model.initialise import initial_tensor, initialise
from spes_core.model.norm import rms_norm
from spes_core.names import expert_of

SMALL = ModelConfig(
    num_layers=2,
    d_model=16,
    num_heads=4,
    num_kv_heads=2,
    num_experts=4,
    top_k=2,
    expert_hidden=12,
    vocab_size=50,
    init_std=0.3,
)
VARIANTS = [
    SMALL,
    replace(SMALL, qk_norm="none", normalize_top_k=True, tie_embeddings=True),
    replace(SMALL, qk_norm="per_head", head_dim=6, num_kv_heads=1),
]


def make_decoder(model: ModelConfig, trained: list[int], seed: int = 0) -> Decoder:
    decoder = Decoder(model, trained)
    initialise(decoder, seed)
    return decoder


def make_batch(length: int = 9) -> tuple[Tensor, Tensor]:
    tokens_BT = torch.randint(50, (3, length + 1), generator=torch.Generator().manual_seed(1))
    return tokens_BT[:, :-1], tokens_BT[:, 1:]


@pytest.mark.parametrize("model", VARIANTS)
@pytest.mark.parametrize("trained", [[], [2], [0, 3], [0, 1, 2, 3]])
def test_tensors_have_the_counted_names_shapes_and_order(model: ModelConfig, trained: list[int]) -> None:
    tensors = make_decoder(model, trained).tensors()
    assert [(name, tuple(tensor.shape)) for name, tensor in tensors.items()] == list(tensor_shapes(model).items())


def test_canonical_order_is_that_of_the_wire() -> None:
    names = list(tensor_shapes(replace(SMALL, num_layers=1, num_experts=2)))
    assert names == [
        "embedding",
        *(f"layers.0.{name}" for name in ("attention_norm", "attention.q", "attention.k", "attention.v")),
        *(f"layers.0.{name}" for name in ("attention.o", "attention.q_norm", "attention.k_norm")),
        *(f"layers.0.{name}" for name in ("moe_norm", "router", "experts.0.gate_up", "experts.0.down")),
        *(f"layers.0.{name}" for name in ("experts.1.gate_up", "experts.1.down")),
        "final_norm",
        "unembedding",
    ]


@pytest.mark.parametrize("trained", [[1], [0, 1, 2, 3]])
def test_each_tensor_is_a_view_that_changes_the_model_and_covers_it(trained: list[int]) -> None:
    decoder = make_decoder(SMALL, trained)
    batch = make_batch()
    before = decoder(*batch, LossConfig()).loss
    for name, tensor in decoder.tensors().items():
        assert not tensor.requires_grad
        tensor.copy_(initial_tensor(SMALL, name, 1) * 2)
    after = decoder(*batch, LossConfig()).loss
    twin = make_decoder(SMALL, [3], seed=1)
    for tensor in twin.tensors().values():
        tensor.mul_(2)
    assert before != after and torch.equal(after, twin(*batch, LossConfig()).loss)
    covered = sum(tensor.numel() for tensor in decoder.tensors().values())
    assert covered == sum(parameter.numel() for parameter in decoder.parameters())


def test_who_trains_what_changes_no_output_bit() -> None:
    outputs = [make_decoder(SMALL, trained)(*make_batch(), LossConfig()) for trained in ([], [1], [0, 1, 2, 3])]
    for other in outputs[1:]:
        assert all(torch.equal(a, b) for a, b in zip(outputs[0], other, strict=True))


@pytest.mark.parametrize("model", VARIANTS)
def test_no_position_sees_a_later_token(model: ModelConfig) -> None:
    decoder = make_decoder(model, [0])
    tokens_BT = make_batch()[0].clone()
    before = decoder.logits(tokens_BT)
    tokens_BT[:, 5] = (tokens_BT[:, 5] + 1) % 50
    after = decoder.logits(tokens_BT)
    torch.testing.assert_close(before[:, :5], after[:, :5], rtol=1e-5, atol=1e-6)
    assert (before[:, 5:] - after[:, 5:]).abs().amax(dim=(0, 2)).min() > 1e-4


def test_total_loss_is_the_weighted_sum_of_its_parts() -> None:
    loss = LossConfig(z_weight=0.3, balance_weight=0.2, router_z_weight=0.1)
    output = make_decoder(SMALL, [0])(*make_batch(), loss)
    expected = output.cross_entropy + 0.3 * output.z_loss + 0.2 * output.balance_loss + 0.1 * output.router_z_loss
    torch.testing.assert_close(output.loss.detach(), expected)
    logits_BTV = make_decoder(SMALL, [0]).logits(make_batch()[0])
    cross_entropy = torch.nn.functional.cross_entropy(logits_BTV.flatten(0, 1), make_batch()[1].flatten())
    torch.testing.assert_close(output.cross_entropy, cross_entropy)
    torch.testing.assert_close(output.z_loss, logits_BTV.logsumexp(-1).square().mean())


@pytest.mark.parametrize("model", VARIANTS)
def test_the_gradient_of_every_auxiliary_loss_is_that_of_finite_differences(model: ModelConfig) -> None:
    decoder = make_decoder(model, [0, 1, 2, 3]).double()
    loss = LossConfig(z_weight=0.05, balance_weight=0.5, router_z_weight=0.1)
    batch = make_batch()
    decoder(*batch, loss).loss.backward()
    generator = torch.Generator().manual_seed(5)
    for name, parameter in decoder.named_parameters():
        direction = torch.randn(parameter.shape, generator=generator, dtype=torch.float64)
        direction /= direction.norm()
        values = []
        with torch.no_grad():
            for step in (1e-6, -2e-6):
                parameter += step * direction
                values.append(float(decoder(*batch, loss).loss))
            parameter += 1e-6 * direction
        assert parameter.grad is not None
        slope = float((parameter.grad * direction).sum())
        assert (values[0] - values[1]) / 2e-6 == pytest.approx(slope, rel=1e-5, abs=1e-8), name


def test_expert_tokens_count_every_slot_of_every_layer() -> None:
    output = make_decoder(SMALL, [0])(*make_batch(), LossConfig())
    assert output.expert_tokens_LE.shape == (2, 4) and output.expert_tokens_LE.dtype == torch.int64
    assert output.expert_tokens_LE.sum(1).tolist() == [3 * 9 * 2] * 2


def test_initial_value_depends_on_name_and_seed_only() -> None:
    one, other = (make_decoder(SMALL, trained).tensors() for trained in ([0], [1, 2, 3]))
    assert all(torch.equal(one[name], other[name]) for name in one)
    matrices = [tensor.flatten()[:96] for tensor in one.values() if tensor.dim() > 1]
    assert len({tuple(tensor.tolist()) for tensor in matrices}) == len(matrices)
    assert not torch.equal(one["embedding"], initial_tensor(SMALL, "embedding", 1))
    assert all((tensor == 1).all() for name, tensor in one.items() if "norm" in name)
    experts = torch.cat([tensor.flatten() for name, tensor in one.items() if expert_of(name) is not None])
    assert float(experts.std()) == pytest.approx(0.3, rel=0.03) and abs(float(experts.mean())) < 0.02


def test_initial_values_are_fixed_for_ever() -> None:
    tensor = initial_tensor(ModelConfig(), "layers.1.experts.3.down", 7)
    assert tensor[0, :3].tolist() == pytest.approx([0.0353607, -0.0407219, 0.0166294], abs=1e-6)


def test_rotation_turns_each_pair_by_its_angle_and_backward_turns_back() -> None:
    model = replace(SMALL, d_model=8, num_heads=2, rope_theta=100.0)
    x_BTHC = torch.randn(1, 3, 2, 4, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    tables = rotation_tables(model, 3, x_BTHC)
    found = rotate(x_BTHC.requires_grad_(), tables)
    for position in range(3):
        for pair, frequency in ((0, 1.0), (1, 0.1)):
            vector = torch.complex(x_BTHC[0, position, :, pair], x_BTHC[0, position, :, pair + 2])
            turned = vector * torch.polar(torch.tensor(1.0).double(), torch.tensor(position * frequency).double())
            torch.testing.assert_close(found[0, position, :, pair], turned.real, rtol=1e-6, atol=1e-6)
            torch.testing.assert_close(found[0, position, :, pair + 2], turned.imag, rtol=1e-6, atol=1e-6)
    assert torch.autograd.gradcheck(lambda x: rotate(x, tables), x_BTHC)


def test_rms_norm_passes_a_numerical_check() -> None:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(2, 3, 5, generator=generator, dtype=torch.float64, requires_grad=True)
    weight_D = torch.randn(5, generator=generator, dtype=torch.float64, requires_grad=True)
    torch.testing.assert_close(rms_norm(x, weight_D, 1e-3), torch.nn.functional.rms_norm(x, (5,), weight_D, 1e-3))
    assert torch.autograd.gradcheck(lambda x, w: rms_norm(x, w, 1e-3), (x, weight_D))
