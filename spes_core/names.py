"""Canonical parameter names: how a tensor is called on the wire, on disk and in events.

Shared tensors::

    embedding                            (vocab_size, d_model)
    layers.{l}.attention_norm            (d_model,)
    layers.{l}.attention.q               (num_heads·head_dim, d_model)
    layers.{l}.attention.{k,v}           (num_kv_heads·head_dim, d_model)
    layers.{l}.attention.o               (d_model, num_heads·head_dim)
    layers.{l}.attention.{q_norm,k_norm} (width of the projection,) or (head_dim,) per head; absent without QK-norm
    layers.{l}.moe_norm                  (d_model,)
    layers.{l}.router                    (num_experts, d_model)
    final_norm                           (d_model,)
    unembedding                          (vocab_size, d_model); absent when embeddings are tied

Expert tensors, one pair for each expert e::

    layers.{l}.experts.{e}.gate_up       (2·expert_hidden, d_model), gate rows first
    layers.{l}.experts.{e}.down          (d_model, expert_hidden)
"""

from __future__ import annotations

import re

_EXPERT = re.compile(r"layers\.(\d+)\.experts\.(\d+)\.(gate_up|down)")
_LAYER = re.compile(r"layers\.(\d+)\.")


def expert_tensor(layer: int, expert: int, matrix: str) -> str:
    """Name of one matrix ("gate_up" or "down") of one expert."""
    return f"layers.{layer}.experts.{expert}.{matrix}"


def parse_expert(name: str) -> tuple[int, int, str] | None:
    """(layer, expert, matrix) of an expert tensor; None for a shared tensor."""
    match = _EXPERT.fullmatch(name)
    return (int(match[1]), int(match[2]), match[3]) if match else None


def expert_of(name: str) -> int | None:
    """Index of the expert that the tensor belongs to; None for a shared tensor."""
    parsed = parse_expert(name)
    return parsed[1] if parsed else None


def layer_of(name: str) -> int | None:
    """Index of the layer that the tensor belongs to; None outside the layers."""
    match = _LAYER.match(name)
    return int(match[1]) if match else None
