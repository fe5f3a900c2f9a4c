"""Ways of computing the same step: checkpointing, staged experts, micro-batches, bfloat16, compilation."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

from spes_core.config import ComputeConfig, DataConfig, FrozenConfig, LossConfig, ModelConfig, OptimConfig, RunConfig
from spes_core.errors import ConfigError
from spes_core.model import counting, experts_staged
from spes_core.model.attention import document_mask
from spes_core.model.decoder import Decoder, DecoderLayer
from spes_core.model.expert_plan import Plan
from spes_core.model.experts import run_experts
from spes_core.model.initialise import initialise
from spes_core.model.moe import Experts, route
from spes_core.rules import check
from spes_core.train.footprint import SavedActivations, weights_bytes
from spes_core.train.step import StepMetrics, make_optimizer, train_step
from tests.reference.moe_loop import router_losses_loop

MODEL = ModelConfig(
    num_layers=2,
    d_model=32,
    num_heads=4,
    num_kv_heads=2,
    num_experts=4,
    top_k=2,
    expert_hidden=24,
    vocab_size=96,
    init_std=0.2,
)
VARIANTS = [MODEL, replace(MODEL, qk_norm="per_head", head_dim=12, normalize_top_k=True)]
SGD = OptimConfig(name="sgd", lr=0.1, weight_decay=0.0)
Batch = tuple[Tensor, Tensor]


def make_decoder(model: ModelConfig = MODEL, trained: tuple[int, ...] = (0, 1, 2, 3), **compute: object) -> Decoder:
    decoder = Decoder(model, trained, compute=ComputeConfig(**compute))  # type: ignore[arg-type]
    initialise(decoder, 0)
    return decoder


def make_batch(sequences: int = 4, seed: int = 1) -> Batch:
    tokens_BT = torch.randint(96, (sequences, 17), generator=torch.Generator().manual_seed(seed))
    return tokens_BT[:, :-1].contiguous(), tokens_BT[:, 1:].contiguous()


def gradients(decoder: Decoder, batch: Batch, loss: LossConfig | None = None) -> dict[str, Tensor]:
    decoder(*batch, loss or LossConfig()).loss.backward()
    return {name: item.grad for name, item in decoder.named_parameters() if item.grad is not None}


def step(decoder: Decoder, batches: list[Batch], loss: LossConfig) -> StepMetrics:
    return train_step(decoder, make_optimizer(decoder, SGD), batches, loss, None, 0.1)


@pytest.mark.parametrize("model", VARIANTS)
@pytest.mark.parametrize("trained", [(0, 1, 2, 3), (1,)])
@pytest.mark.parametrize("kind", ["selective", "block"])
def test_checkpointing_gives_bitwise_equal_gradients(model: ModelConfig, trained: tuple[int, ...], kind: str) -> None:
    plain = gradients(make_decoder(model, trained), make_batch())
    again = gradients(make_decoder(model, trained, activation_checkpointing=kind), make_batch())
    assert plain.keys() == again.keys()
    assert all(torch.equal(plain[name], again[name]) for name in plain)


@pytest.mark.parametrize("model", VARIANTS)
@pytest.mark.parametrize("kind", ["none", "selective", "block"])
def test_what_checkpointing_keeps_is_predicted_to_the_byte(model: ModelConfig, kind: str) -> None:
    decoder = make_decoder(model, (2,), activation_checkpointing=kind)
    saved, batch = SavedActivations(decoder), make_batch()
    with saved.measure(batch):
        output = decoder(*batch, LossConfig())
        kept_bytes = saved.nbytes
        output.loss.backward()
    assert kept_bytes == counting.activation_bytes(model, 4, 16, decoder_compute(kind))
    assert saved.nbytes == kept_bytes  # what the backward pass makes again does not count


def decoder_compute(kind: str) -> ComputeConfig:
    return ComputeConfig(activation_checkpointing=kind)  # type: ignore[arg-type]


def test_each_kind_of_checkpointing_keeps_less_than_the_one_before() -> None:
    kept = [counting.activation_bytes(MODEL, 4, 16, decoder_compute(kind)) for kind in ("none", "selective", "block")]
    assert kept[0] > kept[1] > kept[2]
    made_again = [counting.recomputed_bytes(MODEL, 4, 16, decoder_compute(kind)) for kind in ("none", "block")]
    # Holding the input and making the rest again is, for a one-layer model, all that the layer keeps.
    single = replace(MODEL, num_layers=1)
    assert made_again[0] == 0
    assert made_again[1] + counting.activation_bytes(single, 4, 16, decoder_compute("block")) == (
        counting.activation_bytes(single, 4, 16)
    )


def test_selective_checkpointing_takes_one_product_again() -> None:
    flops = []
    for kind in ("none", "selective"):
        decoder = make_decoder(activation_checkpointing=kind)
        with FlopCounterMode(display=False) as counter:
            decoder(*make_batch(), LossConfig()).loss.backward()
        flops.append(counter.get_total_flops())
    tokens = 4 * 16
    assert flops[1] - flops[0] == 2 * 2 * tokens * 2 * (2 * 24) * 32  # layers · 2 · slots · F · D


@pytest.mark.parametrize("trained", [(), (2,), (1, 3), (0, 1, 2, 3)])
@pytest.mark.parametrize("keep_hidden", [True, False])
def test_staged_experts_equal_experts_one_by_one(trained: tuple[int, ...], keep_hidden: bool) -> None:
    experts = Experts(MODEL, trained).double()
    generator = torch.Generator().manual_seed(0)
    for expert in range(4):
        for matrix in ("gate_up", "down"):
            experts.tensor(expert, matrix).normal_(0, 0.3, generator=generator)
    results = []
    for staged in (False, True):
        x_ND = torch.randn(11, 32, generator=torch.Generator().manual_seed(1), dtype=torch.float64).requires_grad_()
        routing = route(x_ND[:, :4] * torch.tensor([1.0, 1, 1, -9]), 2, True)  # few tokens for the last
        plan = Plan(trained, 4, keep_hidden=keep_hidden, staged=staged)
        banks = [
            getattr(experts, name) for name in ("trained_gate_up", "trained_down", "frozen_gate_up", "frozen_down")
        ]
        slots_S = plan.sort_slots(routing.experts_NK)
        output_ND = run_experts(x_ND, routing.weights_NK, slots_S, routing.expert_tokens_E, banks, plan)
        wanted = [x_ND, *(bank for bank in banks[:2] if bank is not None)]
        results.append((output_ND, *torch.autograd.grad(output_ND.sin().sum(), wanted)))
    for one_by_one, staged_result in zip(*results, strict=True):
        torch.testing.assert_close(staged_result, one_by_one, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("trained", [(1, 3), (0, 1, 2, 3)])
def test_grouped_products_equal_the_loop_and_skip_frozen_weight_gradients(
    monkeypatch: pytest.MonkeyPatch, trained: tuple[int, ...]
) -> None:
    """The grouped kernels of GPUs exist on CPU too: the same code path, taken here in fp32."""
    grouped_mm, num_calls = experts_staged.grouped_mm, 0

    def counted_mm(*args: Tensor, offs: Tensor) -> Tensor:
        nonlocal num_calls
        num_calls += 1
        return grouped_mm(*args, offs=offs)

    monkeypatch.setattr(experts_staged, "grouped_mm", counted_mm)
    results = []
    for grouped in (False, True):
        monkeypatch.setattr(experts_staged, "_can_group", lambda _, grouped=grouped: grouped)
        decoder = make_decoder(trained=trained)
        for layer in decoder.layers:
            assert isinstance(layer, DecoderLayer)
            layer.experts.plan = replace(layer.experts.plan, staged=True)
        results.append(gradients(decoder, make_batch()))
    banks = 1 if len(trained) == 4 else 2
    assert num_calls == 2 * (banks * 4 + 2)  # per layer: 2 products each way for a bank, 2 weight gradients in all
    for name, expected in results[0].items():
        torch.testing.assert_close(results[1][name], expected, rtol=1e-5, atol=1e-6)


def test_micro_batches_with_whole_batch_fractions_equal_one_batch_in_every_loss() -> None:
    loss = LossConfig(z_weight=0.1, balance_weight=0.5, router_z_weight=0.2, balance_fractions="whole_batch")
    tokens_BT, targets_BT = make_batch(sequences=6)
    parts = [(tokens_BT[at : at + 2], targets_BT[at : at + 2]) for at in (0, 2, 4)]
    one, several = make_decoder(), make_decoder()
    whole, summed = step(one, [(tokens_BT, targets_BT)], loss), step(several, parts, loss)
    for name in ("cross_entropy", "z_loss", "balance_loss", "router_z_loss", "grad_norm"):
        torch.testing.assert_close(getattr(summed, name), getattr(whole, name), rtol=1e-5, atol=0)
    assert torch.equal(whole.expert_tokens_LE, summed.expert_tokens_LE)
    for name, tensor in one.tensors().items():
        torch.testing.assert_close(several.tensors()[name], tensor, rtol=1e-5, atol=1e-6, msg=name)


def test_accumulated_fractions_run_over_this_micro_batch_and_those_before_it() -> None:
    model = replace(MODEL, num_layers=1)
    loss = LossConfig(z_weight=0.0, balance_weight=1.0, router_z_weight=0.0)
    batches = [make_batch(2, seed) for seed in (1, 2, 3)]
    found = float(step(make_decoder(model), batches, loss).balance_loss)
    decoder, expected, sent = make_decoder(model), 0.0, torch.zeros(4)
    for tokens_BT, targets_BT in batches:
        alone = decoder(tokens_BT, targets_BT, loss)
        uniform = float(decoder(tokens_BT, targets_BT, loss, alone.expert_tokens_LE * 0).balance_loss)
        assert uniform == pytest.approx(float(alone.balance_loss), rel=1e-6)
        others_LE = sent.long().unsqueeze(0)
        expected += float(decoder(tokens_BT, targets_BT, loss, others_LE).balance_loss) / 3
        sent += alone.expert_tokens_LE[0]
    assert found == pytest.approx(expected, rel=1e-6)


def test_fractions_of_other_micro_batches_enter_the_balance_loss_as_in_the_formula() -> None:
    generator = torch.Generator().manual_seed(3)
    first_NE, second_NE = torch.randn(7, 4, generator=generator), torch.randn(5, 4, generator=generator)
    together, _ = router_losses_loop(torch.cat([first_NE, second_NE]), 2)
    counts = [route(item, 2, False).expert_tokens_E for item in (first_NE, second_NE)]
    losses = [
        float(route(item, 2, False, other).balance_loss)
        for item, other in ((first_NE, counts[1]), (second_NE, counts[0]))
    ]
    assert (7 * losses[0] + 5 * losses[1]) / 12 == pytest.approx(together, rel=1e-6)


def test_frozen_experts_in_bfloat16_take_half_the_memory_and_compute_with_rounded_weights() -> None:
    frozen = FrozenConfig(dtype="bfloat16")
    decoder, twin = Decoder(MODEL, (1,), frozen=frozen), make_decoder(trained=(1,))
    initialise(decoder, 0)
    config = RunConfig(model=MODEL, nodes=4, frozen=frozen)
    assert config.make_partition().experts_by_node[1] == (1,)
    assert weights_bytes(decoder) == counting.memory(config, 1).weights_bytes < weights_bytes(twin)
    for name, tensor in twin.tensors().items():
        tensor.copy_(tensor.bfloat16() if decoder.tensors()[name].dtype == torch.bfloat16 else tensor)
    ours, expected = gradients(decoder, make_batch()), gradients(twin, make_batch())
    assert all(torch.equal(ours[name], expected[name]) for name in expected)


def test_bfloat16_keeps_masters_gradients_and_losses_in_fp32_and_comes_close() -> None:
    exact, rounded = make_decoder(), make_decoder(precision="bfloat16")
    output = rounded(*make_batch(), LossConfig())
    expected = exact(*make_batch(), LossConfig())
    assert output.cross_entropy.dtype == torch.float32
    assert float(output.cross_entropy) == pytest.approx(float(expected.cross_entropy), rel=0.02)
    found, reference = gradients(rounded, make_batch()), gradients(exact, make_batch())
    for name, gradient in found.items():
        assert gradient.dtype == torch.float32
        cosine = torch.nn.functional.cosine_similarity(gradient.flatten(), reference[name].flatten(), dim=0)
        assert float(cosine) > 0.97, name


def test_a_micro_batch_must_divide_the_share_of_a_process() -> None:
    config = RunConfig(nodes=4, data=DataConfig(global_batch_sequences=32, micro_batch_sequences=3))
    (problem,) = check(config)
    assert problem.path == "data.micro_batch_sequences" and "= 8" in str(problem)
    assert RunConfig(nodes=4, data=DataConfig(micro_batch_sequences=2)).micro_batch_sequences == 2


@pytest.mark.slow
def test_compiled_layers_have_no_graph_break_and_equal_eager_ones() -> None:
    """Tolerance 1e-5 relative to each tensor's largest gradient: other order of sums, no other difference."""
    trained = (1,)  # both banks
    torch._dynamo.reset()
    eager, compiled = make_decoder(trained=trained), make_decoder(trained=trained, compile=True)
    for mask in (None, document_mask(torch.zeros(2, 16), 1, torch.float32)):
        explained = torch._dynamo.explain(compiled.layers[0]._compute)(
            torch.randn(2, 16, 32), compiled._rotation_for(16, compiled.embedding), None, mask
        )
        assert explained.graph_break_count == 0
    expected, found = gradients(eager, make_batch()), gradients(compiled, make_batch())
    assert expected.keys() == found.keys()
    for name, gradient in expected.items():
        torch.testing.assert_close(found[name], gradient, rtol=0, atol=1e-5 * float(gradient.abs().max()), msg=name)


def test_a_missing_optimizer_library_names_the_extra() -> None:
    if _has_torchao():
        pytest.skip("torchao is installed")
    with pytest.raises(ConfigError, match="eightbit"):
        make_optimizer(make_decoder(), OptimConfig(name="adamw_8bit"))


def _has_torchao() -> bool:
    import importlib.util

    return importlib.util.find_spec("torchao") is not None
