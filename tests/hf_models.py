"""Small models in Hugging Face's terms: what the tests of export, import and upcycling share."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from hypothesis import strategies as st
from torch import Tensor

from spes_core.checkpoint import model_metadata, save_weights
from spes_core.config import ModelConfig
from spes_core.initial import fill
from spes_core.model.counting import tensor_shapes
from spes_core.model.decoder import Decoder

QK_NORM = {"olmoe": "full", "qwen3_moe": "per_head", "mixtral": "none"}


@st.composite
def models(draw: st.DrawFn, kind: str) -> ModelConfig:
    """A random model that exports as ``kind``."""
    heads, kv_heads = draw(st.sampled_from([(1, 1), (2, 1), (4, 2), (4, 4)]))
    head_dim = draw(st.sampled_from([8, 12, 16]))
    experts, top_k = draw(st.sampled_from([(2, 1), (4, 2), (5, 3), (3, 3)]))
    return ModelConfig(
        num_layers=draw(st.integers(1, 2)),
        d_model=heads * head_dim if kind == "olmoe" else draw(st.sampled_from([16, 24])),
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_dim=None if kind == "olmoe" else head_dim,
        num_experts=experts,
        top_k=top_k,
        expert_hidden=draw(st.sampled_from([8, 20])),
        vocab_size=61,
        qk_norm=QK_NORM[kind],  # type: ignore[arg-type]
        normalize_top_k=True if kind == "mixtral" else draw(st.booleans()),
        tie_embeddings=draw(st.booleans()),
        rope_theta=draw(st.sampled_from([5000.0, 1e6])),
        norm_eps=draw(st.sampled_from([1e-5, 1e-6])),
    )


def random_weights(model: ModelConfig, seed: int) -> dict[str, Tensor]:
    """Weights under which a misplaced matrix or norm shows, and routing is decided: near ties may fall either way."""
    generator = torch.Generator().manual_seed(seed)
    tensors = {}
    for name, shape in tensor_shapes(model).items():
        if len(shape) == 1:
            tensors[name] = torch.rand(shape, generator=generator) + 0.5
        else:
            tensors[name] = torch.randn(shape, generator=generator) * (0.5 if name.endswith("router") else 0.1)
    return tensors


def save_random(path: Path, model: ModelConfig, seed: int) -> dict[str, Tensor]:
    """Write `random_weights` as a run would."""
    tensors = random_weights(model, seed)
    save_weights(path, tensors, model_metadata(model))
    return tensors


def our_logits(model: ModelConfig, tensors: dict[str, Tensor], tokens_BT: Tensor) -> Tensor:
    """Logits of the decoder that training uses."""
    decoder = Decoder(model, [0])
    fill(decoder, tensors.__getitem__)
    return decoder.logits(tokens_BT)


def hf_logits(hf: Any, tokens_BT: Tensor) -> Tensor:
    """Logits of a transformers model."""
    with torch.no_grad():
        logits: Tensor = hf(input_ids=tokens_BT).logits
    return logits


def some_tokens(vocab_size: int, seed: int = 0) -> Tensor:
    """Two short sequences."""
    return torch.randint(vocab_size, (2, 11), generator=torch.Generator().manual_seed(seed))


def assert_close(found: Tensor, expected: Tensor, relative: float = 1e-5) -> None:
    """The largest difference is below ``relative`` of the largest value."""
    assert found.shape == expected.shape
    assert float((found - expected).abs().max()) <= relative * float(expected.abs().max())
