"""One two-way table between canonical tensors and Hugging Face checkpoints of OLMoE, Qwen3-MoE and Mixtral.

A Hugging Face model has two forms: the *checkpoint* (per-expert keys, gate and up apart; what files on disk hold) and
the *module* (experts of a layer stacked, gate rows above up rows; what `load_state_dict` takes in memory). All
conversions are copies of rows, so going there and back is bitwise; they fit gradients as well as weights.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

from spes_core.config import ModelConfig
from spes_core.errors import ConfigError, DataError, Problem
from spes_core.model.counting import tensor_shapes
from spes_core.names import expert_tensor, parse_expert

Architecture = Literal["olmoe", "qwen3_moe", "mixtral"]

_TOP = {
    "embedding": "model.embed_tokens.weight",
    "final_norm": "model.norm.weight",
    "unembedding": "lm_head.weight",
}
_LAYER = {
    "attention_norm": "input_layernorm.weight",
    "attention.q": "self_attn.q_proj.weight",
    "attention.k": "self_attn.k_proj.weight",
    "attention.v": "self_attn.v_proj.weight",
    "attention.o": "self_attn.o_proj.weight",
    "attention.q_norm": "self_attn.q_norm.weight",
    "attention.k_norm": "self_attn.k_norm.weight",
    "moe_norm": "post_attention_layernorm.weight",
}


@dataclass(frozen=True, kw_only=True)
class _MoeKeys:
    """Keys below ``model.layers.{l}.`` that differ between architectures."""

    router: str
    gate: str
    up: str
    down: str


_QWEN_KEYS = _MoeKeys(
    router="mlp.gate.weight",
    gate="mlp.experts.{}.gate_proj.weight",
    up="mlp.experts.{}.up_proj.weight",
    down="mlp.experts.{}.down_proj.weight",
)
_CHECKPOINT_KEYS: dict[Architecture, _MoeKeys] = {
    "olmoe": _QWEN_KEYS,
    "qwen3_moe": _QWEN_KEYS,
    "mixtral": _MoeKeys(
        router="block_sparse_moe.gate.weight",
        gate="block_sparse_moe.experts.{}.w1.weight",
        up="block_sparse_moe.experts.{}.w3.weight",
        down="block_sparse_moe.experts.{}.w2.weight",
    ),
}
_MODULE_ROUTER = "mlp.gate.weight"
_MODULE_STACKS = {"gate_up": "mlp.experts.gate_up_proj", "down": "mlp.experts.down_proj"}


def architecture(model: ModelConfig) -> Architecture:
    """The Hugging Face class that computes the same function. Raises ConfigError when there is none."""
    if model.qk_norm == "per_head":
        return "qwen3_moe"
    if model.qk_norm == "none":
        if not model.normalize_top_k:
            message = (
                '(false) must be true where model.qk_norm is "none", as in Mixtral, the one class without QK-norm; '
                "set it to true or use QK-norm"
            )
            raise ConfigError([Problem("model.normalize_top_k", message)])
        return "mixtral"
    if model.num_heads * model.resolved_head_dim != model.d_model:
        message = (
            f'({model.head_dim}) must be d_model / num_heads where model.qk_norm is "full", as in OLMoE; '
            "use model.qk_norm: per_head"
        )
        raise ConfigError([Problem("model.head_dim", message)])
    return "olmoe"


def hf_config(model: ModelConfig, max_position_embeddings: int = 4096) -> Any:
    """The transformers configuration object of the same model."""
    import transformers

    arguments: dict[str, Any] = {
        "vocab_size": model.vocab_size,
        "hidden_size": model.d_model,
        "num_hidden_layers": model.num_layers,
        "num_attention_heads": model.num_heads,
        "num_key_value_heads": model.num_kv_heads,
        "num_experts_per_tok": model.top_k,
        "rms_norm_eps": model.norm_eps,
        "rope_parameters": {"rope_type": "default", "rope_theta": model.rope_theta},
        "tie_word_embeddings": model.tie_embeddings,
        "initializer_range": model.init_std,
        "max_position_embeddings": max_position_embeddings,
        "bos_token_id": None,
        "eos_token_id": None,
        "pad_token_id": None,
    }
    kind = architecture(model)
    if kind == "olmoe":
        arguments |= {"intermediate_size": model.expert_hidden, "num_experts": model.num_experts}
        return transformers.OlmoeConfig(norm_topk_prob=model.normalize_top_k, **arguments)
    arguments["head_dim"] = model.resolved_head_dim
    if kind == "mixtral":
        arguments |= {"intermediate_size": model.expert_hidden, "num_local_experts": model.num_experts}
        return transformers.MixtralConfig(sliding_window=None, **arguments)
    arguments |= {"moe_intermediate_size": model.expert_hidden, "num_experts": model.num_experts}
    arguments |= {"decoder_sparse_step": 1, "mlp_only_layers": [], "use_sliding_window": False}
    return transformers.Qwen3MoeConfig(norm_topk_prob=model.normalize_top_k, **arguments)


class Rows(NamedTuple):
    """A run of rows of a canonical tensor; ``end`` None means to the last."""

    name: str
    start: int = 0
    end: int | None = None


def checkpoint_rows(model: ModelConfig) -> dict[str, Rows]:
    """Every key of the checkpoint form and the canonical rows that it holds, layer by layer in canonical order."""
    keys = _CHECKPOINT_KEYS[architecture(model)]
    shared, hidden = dict(shared_keys(model, keys.router)), model.expert_hidden
    rows: dict[str, Rows] = {}
    for name in tensor_shapes(model):
        if (parsed := parse_expert(name)) is None:
            rows[shared[name]] = Rows(name)
            continue
        layer, expert, matrix = parsed
        prefix = f"model.layers.{layer}."
        if matrix == "gate_up":
            rows[prefix + keys.gate.format(expert)] = Rows(name, 0, hidden)
            rows[prefix + keys.up.format(expert)] = Rows(name, hidden, 2 * hidden)
        else:
            rows[prefix + keys.down.format(expert)] = Rows(name)
    return rows


def checkpoint_sources(model: ModelConfig) -> dict[str, tuple[str, ...]]:
    """The inverse: every canonical name, in canonical order, and the keys whose rows make it up, top to bottom."""
    sources: dict[str, tuple[str, ...]] = {}
    for key, rows in checkpoint_rows(model).items():
        sources[rows.name] = (*sources.get(rows.name, ()), key)
    return sources


def to_hf_state(model: ModelConfig, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Canonical tensors to checkpoint form. Values are views of the given ones."""
    return {key: tensors[rows.name][rows.start : rows.end] for key, rows in checkpoint_rows(model).items()}


def from_hf_state(model: ModelConfig, state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Checkpoint form to canonical tensors, in canonical order.

    Raises DataError on a missing, extra or misshapen tensor.
    """
    reader = _Reader(state)
    found = {}
    for name, keys in checkpoint_sources(model).items():
        parts = [reader.take(key) for key in keys]
        found[name] = torch.cat(parts) if len(parts) > 1 else parts[0]
    return reader.finish(model, found)


def to_hf_module_state(model: ModelConfig, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Canonical tensors to module form, ready for ``load_state_dict`` of the in-memory class (tied keys left out)."""
    architecture(model)
    state = {hf_key: tensors[name] for name, hf_key in shared_keys(model, _MODULE_ROUTER)}
    for layer in range(model.num_layers):
        for matrix, stack in _MODULE_STACKS.items():
            names = [expert_tensor(layer, expert, matrix) for expert in range(model.num_experts)]
            state[f"model.layers.{layer}.{stack}"] = torch.stack([tensors[name] for name in names])
    return state


def from_hf_module_state(model: ModelConfig, state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Module form (weights, or gradients under the same keys) to canonical tensors.

    Raises DataError as `from_hf_state` does.
    """
    architecture(model)
    reader = _Reader(state)
    found = {name: reader.take(hf_key) for name, hf_key in shared_keys(model, _MODULE_ROUTER)}
    for layer in range(model.num_layers):
        for matrix, stack in _MODULE_STACKS.items():
            rows = reader.take(f"model.layers.{layer}.{stack}").unbind(0)
            found |= {expert_tensor(layer, expert, matrix): row for expert, row in enumerate(rows)}
    return reader.finish(model, found)


class _Reader:
    """Takes tensors out of a state and tells what was missing, left over or of the wrong shape."""

    def __init__(self, state: Mapping[str, Tensor]) -> None:
        self._state, self._left = state, set(state)

    def take(self, key: str) -> Tensor:
        if key not in self._state:
            raise DataError(f"the checkpoint has no tensor {key}; check that it has the architecture of the model")
        self._left.discard(key)
        return self._state[key]

    def finish(self, model: ModelConfig, found: Mapping[str, Tensor]) -> dict[str, Tensor]:
        if model.tie_embeddings:
            self._left.discard(_TOP["unembedding"])
        if self._left:
            raise DataError(f"the checkpoint has tensors that the model lacks: {', '.join(sorted(self._left)[:5])}")
        shapes = tensor_shapes(model)
        for name, shape in shapes.items():
            if name not in found or tuple(found[name].shape) != shape:
                got = tuple(found[name].shape) if name in found else "nothing"
                raise DataError(f"{name} must have shape {shape} in this model; the checkpoint has {got}")
        return {name: found[name] for name in shapes}


def shared_keys(model: ModelConfig, router: str) -> Iterator[tuple[str, str]]:
    """(canonical name, Hugging Face key) of every shared tensor."""
    for name in tensor_shapes(model):
        if parse_expert(name) is None:
            if name in _TOP:
                yield name, _TOP[name]
            else:
                _, layer, inner = name.split(".", 2)
                yield name, f"model.layers.{layer}.{router if inner == 'router' else _LAYER[inner]}"
