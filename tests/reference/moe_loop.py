"""Slow twins of the Mixture-of-Experts layer and of the losses: one token at a time, plain autograd, no sorting."""

from __future__ import annotations

import torch
from torch import Tensor


def moe_loop(
    x_ND: Tensor, router_ED: Tensor, gate_up: list[Tensor], down: list[Tensor], top_k: int, normalize: bool
) -> Tensor:
    """The layer's output for each token: Σ over its top_k experts of probability · down(silu(gate)·up)."""
    outputs = []
    for x_D in x_ND:
        probabilities = (router_ED @ x_D).softmax(0).tolist()
        chosen = sorted(range(len(probabilities)), key=lambda expert: -probabilities[expert])[:top_k]
        weights = (router_ED @ x_D).softmax(0)[chosen]
        if normalize:
            weights = weights / weights.sum()
        output = torch.zeros_like(x_D)
        for weight, expert in zip(weights, chosen, strict=True):
            gate, up = (gate_up[expert] @ x_D).chunk(2)
            output = output + weight * (down[expert] @ (gate * torch.sigmoid(gate) * up))
        outputs.append(output)
    return torch.stack(outputs)


def router_losses_loop(logits_NE: Tensor, top_k: int) -> tuple[float, float]:
    """(balance loss, router z-loss) from their formulas: E · Σ_e f_e·p_e / top_k, and the mean of logsumexp²."""
    num_tokens, num_experts = logits_NE.shape
    sent, probability, z_squares = [0.0] * num_experts, [0.0] * num_experts, 0.0
    for logits_E in logits_NE.double():
        values = [float(value) for value in logits_E.exp()]
        total = sum(values)
        z_squares += float(torch.tensor(total).double().log()) ** 2
        for expert in sorted(range(num_experts), key=lambda index: -values[index])[:top_k]:
            sent[expert] += 1 / num_tokens
        for expert in range(num_experts):
            probability[expert] += values[expert] / total / num_tokens
    balance = num_experts * sum(f * p for f, p in zip(sent, probability, strict=True)) / top_k
    return balance, z_squares / num_tokens
