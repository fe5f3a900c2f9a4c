"""Parameters of a decoder from its published description, matrix by matrix; shares nothing with `counting`."""

from __future__ import annotations

from spes_core.config import ModelConfig


def count_parameters(m: ModelConfig, experts: int) -> int:
    """Parameters with ``experts`` experts in each layer; the router keeps a row for every expert."""
    head = m.head_dim or m.d_model // m.num_heads
    q_o = 2 * m.d_model * m.num_heads * head
    k_v = 2 * m.d_model * m.num_kv_heads * head
    if m.qk_norm == "full":
        qk_norms = m.num_heads * head + m.num_kv_heads * head
    else:
        qk_norms = 2 * head if m.qk_norm == "per_head" else 0
    gate_up_down = 3 * m.d_model * m.expert_hidden
    layer = q_o + k_v + qk_norms + 2 * m.d_model + m.num_experts * m.d_model + experts * gate_up_down
    embeddings = (1 if m.tie_embeddings else 2) * m.vocab_size * m.d_model
    return embeddings + m.num_layers * layer + m.d_model
