"""The decoder computes what the Hugging Face classes compute, through the production converter."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from spes_core.config import LossConfig, ModelConfig
from spes_core.errors import ConfigError, DataError
from spes_core.hf import layout
from spes_core.model.decoder import Decoder
from spes_core.model.initialise import initialise

CROSS_ENTROPY_ONLY = LossConfig(z_weight=0.0, balance_weight=0.0, router_z_weight=0.0)
KINDS = {"olmoe": ("full", None), "qwen3_moe": ("per_head", None), "mixtral": ("none", True)}


def hf_model(model: ModelConfig, decoder: Decoder) -> Any:
    import transformers

    config = layout.hf_config(model)
    config._attn_implementation = "eager"
    classes = {
        "olmoe": "OlmoeForCausalLM",
        "qwen3_moe": "Qwen3MoeForCausalLM",
        "mixtral": "MixtralForCausalLM",
    }
    hf = getattr(transformers, classes[layout.architecture(model)])(config)
    hf.set_experts_implementation("eager")
    missing, unexpected = hf.load_state_dict(layout.to_hf_module_state(model, decoder.tensors()), strict=False)
    assert not unexpected and set(missing) <= ({"lm_head.weight"} if model.tie_embeddings else set())
    hf.tie_weights()
    return hf


def canonical_gradients(decoder: Decoder) -> dict[str, Tensor]:
    """Gradients under canonical names, through a second decoder whose weights are the gradients."""
    copy = Decoder(decoder.config, decoder.trained_experts)
    with torch.no_grad():
        for name, parameter in decoder.named_parameters():
            assert parameter.grad is not None
            copy.get_parameter(name).copy_(parameter.grad)
    return copy.tensors()


def relative_error(found: Tensor, expected: Tensor) -> float:
    return float((found - expected).abs().max() / expected.abs().max().clamp(min=1e-30))


def assert_equals_hf(model: ModelConfig, seed: int, batch: int, length: int) -> None:
    decoder = Decoder(model, range(model.num_experts))
    initialise(decoder, seed)
    generator = torch.Generator().manual_seed(seed)
    for name, tensor in decoder.tensors().items():
        if tensor.dim() == 1:  # norms other than ones, or a misplaced weight would not show
            tensor.uniform_(0.5, 1.5, generator=generator)
        if name.endswith("router"):  # decided routing: near ties may fall either way
            tensor.normal_(0, 0.5, generator=generator)
    tokens_BT = torch.randint(model.vocab_size, (batch, length + 1), generator=generator)
    inputs_BT, targets_BT = tokens_BT[:, :-1], tokens_BT[:, 1:].clone()
    targets_BT[0, 0] = -100
    hf = hf_model(model, decoder)
    hf_logits = hf(input_ids=inputs_BT).logits
    hf_loss = torch.nn.functional.cross_entropy(hf_logits.flatten(0, 1), targets_BT.flatten())
    hf_loss.backward()
    output = decoder(inputs_BT, targets_BT, CROSS_ENTROPY_ONLY)
    output.loss.backward()
    assert relative_error(decoder.logits(inputs_BT), hf_logits.detach()) < 1e-5
    assert abs(float(output.cross_entropy) - hf_loss.item()) < 1e-5 * hf_loss.item()
    hf_gradients = {name: p.grad for name, p in hf.named_parameters() if p.grad is not None}
    expected = layout.from_hf_module_state(model, hf_gradients)
    scale = max(float(value.abs().max()) for value in expected.values())
    for name, found in canonical_gradients(decoder).items():
        # a gradient that cancels to (almost) nothing is only known to the precision of what cancelled
        allowed = 1e-5 * float(expected[name].abs().max()) + 1e-7 * scale
        assert float((found - expected[name]).abs().max()) < allowed, name


@pytest.mark.parametrize("kind", KINDS)
@settings(max_examples=8, deadline=None, derandomize=True)
@given(
    heads=st.sampled_from([(1, 1), (2, 1), (4, 2), (4, 4)]),
    head_dim=st.sampled_from([8, 10, 16]),
    experts=st.sampled_from([(2, 1), (4, 2), (5, 3), (8, 8)]),
    normalize=st.booleans(),
    tied=st.booleans(),
    length=st.integers(2, 24),
    seed=st.integers(0, 1000),
)
def test_logits_loss_and_gradients_equal_hugging_face(
    kind: str,
    heads: tuple[int, int],
    head_dim: int,
    experts: tuple[int, int],
    normalize: bool,
    tied: bool,
    length: int,
    seed: int,
) -> None:
    qk_norm, forced = KINDS[kind]
    model = ModelConfig(
        num_layers=2,
        d_model=heads[0] * head_dim if kind == "olmoe" else 24,
        num_heads=heads[0],
        num_kv_heads=heads[1],
        head_dim=None if kind == "olmoe" else head_dim,
        num_experts=experts[0],
        top_k=experts[1],
        expert_hidden=20,
        vocab_size=61,
        qk_norm=qk_norm,  # type: ignore[arg-type]
        normalize_top_k=normalize if forced is None else forced,
        tie_embeddings=tied,
        rope_theta=5000.0,
        norm_eps=1e-6,
        init_std=0.1,
    )
    assert_equals_hf(model, seed, batch=2, length=length)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("tied", [False, True])
def test_checkpoint_form_and_module_form_come_back_bitwise(kind: str, tied: bool) -> None:
    qk_norm, _ = KINDS[kind]
    model = ModelConfig(
        num_layers=2,
        d_model=16,
        num_heads=2,
        num_kv_heads=1,
        num_experts=3,
        expert_hidden=12,
        vocab_size=40,
        qk_norm=qk_norm,
        normalize_top_k=True,
        tie_embeddings=tied,
    )  # type: ignore[arg-type]
    decoder = Decoder(model, [1])
    initialise(decoder, 3)
    tensors = decoder.tensors()
    for there, back in (
        (layout.to_hf_state, layout.from_hf_state),
        (layout.to_hf_module_state, layout.from_hf_module_state),
    ):
        returned = back(model, there(model, tensors))
        assert list(returned) == list(tensors)
        assert all(torch.equal(returned[name], tensors[name]) for name in tensors)


@pytest.mark.parametrize("kind", KINDS)
def test_transformers_loads_the_checkpoint_form_from_disk(kind: str, tmp_path: Any) -> None:
    import transformers
    from safetensors.torch import save_file

    qk_norm, _ = KINDS[kind]
    model = ModelConfig(
        num_layers=1,
        d_model=16,
        num_heads=2,
        num_kv_heads=1,
        num_experts=3,
        expert_hidden=12,
        vocab_size=40,
        qk_norm=qk_norm,
        normalize_top_k=True,
    )  # type: ignore[arg-type]
    decoder = Decoder(model, [0, 2])
    initialise(decoder, 4)
    state = {key: value.contiguous() for key, value in layout.to_hf_state(model, decoder.tensors()).items()}
    save_file(state, tmp_path / "model.safetensors", metadata={"format": "pt"})
    layout.hf_config(model).save_pretrained(tmp_path)
    hf, report = transformers.AutoModelForCausalLM.from_pretrained(tmp_path, output_loading_info=True)
    assert not report["missing_keys"] and not report["unexpected_keys"]
    tokens_BT = torch.arange(12).view(2, 6)
    with torch.no_grad():
        assert relative_error(hf(input_ids=tokens_BT).logits, decoder.logits(tokens_BT)) < 1e-5


def test_what_hugging_face_cannot_express_is_refused_by_setting() -> None:
    with pytest.raises(ConfigError, match=r"model\.normalize_top_k \(false\) must be true"):
        layout.architecture(ModelConfig(qk_norm="none"))
    with pytest.raises(ConfigError, match=r"model\.head_dim \(64\) must be d_model / num_heads"):
        layout.architecture(ModelConfig(head_dim=64))


def test_a_checkpoint_that_does_not_fit_is_named() -> None:
    model = ModelConfig(
        num_layers=1, d_model=16, num_heads=2, num_kv_heads=2, num_experts=2, expert_hidden=8, vocab_size=40
    )
    decoder = Decoder(model, [])
    initialise(decoder, 0)
    state = layout.to_hf_state(model, decoder.tensors())
    key = "model.layers.0.mlp.experts.1.up_proj.weight"
    with pytest.raises(DataError, match=r"no tensor model\.layers\.0\.mlp\.experts\.1\.up_proj"):
        layout.from_hf_state(model, {name: value for name, value in state.items() if name != key})
    with pytest.raises(DataError, match="tensors that the model lacks: extra"):
        layout.from_hf_state(model, {**state, "extra": torch.zeros(1)})
    with pytest.raises(DataError, match=r"experts\.1\.gate_up must have shape \(16, 16\).*\(17, 16\)"):
        layout.from_hf_state(model, {**state, key: torch.zeros(9, 16)})
