"""The inner optimizers by name. Only trained parameters enter; matrices and banks are decayed, vectors (norms) are not.

Shape suffixes: X experts of a bank, M matrices of one parameter, A rows, B columns.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import sqrt
from typing import Any

import torch
from torch import Tensor
from torch.optim import SGD, AdamW, Optimizer

from spes_core.config import OptimConfig
from spes_core.errors import ConfigError, Problem
from spes_core.model.counting import uses_muon
from spes_core.model.decoder import Decoder


def make_optimizer(decoder: Decoder, optim: OptimConfig) -> Optimizer:
    """The optimizer that the configuration names. Raises ConfigError when the library behind it is not installed."""
    trained = {name: parameter for name, parameter in decoder.named_parameters() if parameter.requires_grad}
    if optim.name == "muon":
        gate_ups = [parameter for name, parameter in trained.items() if name.endswith("gate_up")]
        matrices = [item for name, item in trained.items() if uses_muon(name) and not name.endswith("gate_up")]
        others = [parameter for name, parameter in trained.items() if not uses_muon(name)]
        muon = Muon([{"params": matrices, "stacked": 1}, {"params": gate_ups, "stacked": 2}], optim)
        return Together([muon, _adamw(_groups(others, optim), optim)])
    groups = _groups(list(trained.values()), optim)
    if optim.name == "sgd":
        return SGD(groups, lr=optim.lr)
    if optim.name == "adamw_8bit":
        return _adamw_8bit(groups, optim)
    return _adamw(groups, optim)


def set_learning_rate(optimizer: Optimizer, learning_rate: float) -> None:
    """Give every group this learning rate, in place where the optimizer keeps it in a tensor."""
    for group in optimizer.param_groups:
        if isinstance(group["lr"], Tensor):
            group["lr"].fill_(learning_rate)
        else:
            group["lr"] = learning_rate


def _groups(parameters: Sequence[Tensor], optim: OptimConfig) -> list[dict[str, Any]]:
    return [
        {"params": [item for item in parameters if item.dim() > 1], "weight_decay": optim.weight_decay},
        {"params": [item for item in parameters if item.dim() == 1], "weight_decay": 0.0},
    ]


def _adamw(groups: list[dict[str, Any]], optim: OptimConfig) -> Optimizer:
    betas = (optim.beta1, optim.beta2)
    return AdamW(groups, lr=optim.lr, betas=betas, eps=optim.eps, fused=True)


def _adamw_8bit(groups: list[dict[str, Any]], optim: OptimConfig) -> Optimizer:
    """Moments in 8 bits with a scale per 256 values (Dettmers et al., arXiv 2110.02861), by torchao."""
    try:
        from torchao.optim import AdamW8bit
    except ImportError as error:
        message = (
            '("adamw_8bit") needs the package torchao; install the extra: pip install "spes-workbench[eightbit]",'
            ' or use optim.name "adamw"'
        )
        raise ConfigError([Problem("optim.name", message)]) from error
    betas = (optim.beta1, optim.beta2)
    optimizer: Optimizer = AdamW8bit(groups, lr=optim.lr, betas=betas, eps=optim.eps)
    return optimizer


class Muon(Optimizer):
    """Momentum whose update is orthogonalised, matrix by matrix (Jordan et al., kellerjordan.github.io/posts/muon).

    A bank (X, 2·I, D) holds 2·X matrices (gate and up of each expert), a bank (X, D, I) holds X. The update is scaled
    by 0.2·√max(rows, columns), which gives it the size of an AdamW update (Liu et al., arXiv 2502.16982), so both share
    one learning rate. torch.optim.Muon is the same for a single matrix, in bfloat16, and takes nothing else.
    """

    def __init__(self, groups: list[dict[str, Any]], optim: OptimConfig) -> None:
        """``groups`` as for any optimizer; "stacked" is the number of matrices one above the other in each."""
        defaults = {"lr": optim.lr, "weight_decay": optim.weight_decay, "momentum": MUON_MOMENTUM, "stacked": 1}
        super().__init__(groups, defaults)

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        """Take one step: decoupled decay, then the orthogonalised Nesterov momentum."""
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is None:
                    continue
                state, gradient = self.state[parameter], parameter.grad
                if "momentum_buffer" not in state:
                    state["momentum_buffer"] = torch.zeros_like(gradient)
                momentum: Tensor = state["momentum_buffer"]
                momentum.lerp_(gradient, 1 - group["momentum"])
                columns, rows = parameter.shape[-1], parameter.shape[-2] // group["stacked"]
                update_MAB = gradient.lerp(momentum, group["momentum"]).view(-1, rows, columns)
                scale = 0.2 * sqrt(max(update_MAB.shape[1:]))
                parameter.mul_(1 - group["lr"] * group["weight_decay"])
                update = orthogonalise(update_MAB).to(parameter.dtype).reshape(parameter.shape)
                parameter.add_(update, alpha=-group["lr"] * scale)


MUON_MOMENTUM = 0.95
_NEWTON_SCHULZ = (3.4445, -4.7750, 2.0315)
_NEWTON_SCHULZ_STEPS = 5


def orthogonalise(matrices_MAB: Tensor) -> Tensor:
    """Five quintic Newton–Schulz iterations towards U·Vᵀ of each matrix's singular value decomposition.

    In bfloat16 on a GPU, as Muon is published; in the dtype given elsewhere.
    """
    a, b, c = _NEWTON_SCHULZ
    turned = matrices_MAB.shape[1] > matrices_MAB.shape[2]
    x_MAB = matrices_MAB.transpose(1, 2) if turned else matrices_MAB
    x_MAB = x_MAB.bfloat16() if x_MAB.is_cuda else x_MAB
    x_MAB = x_MAB / x_MAB.flatten(1).norm(dim=1).clamp(min=1e-7)[:, None, None]
    for _ in range(_NEWTON_SCHULZ_STEPS):
        gram_MAA = x_MAB @ x_MAB.transpose(1, 2)
        step_MAA = torch.baddbmm(gram_MAA, gram_MAA, gram_MAA, beta=b, alpha=c)
        x_MAB = torch.baddbmm(x_MAB, step_MAA, x_MAB, beta=a)
    return x_MAB.transpose(1, 2) if turned else x_MAB


class Together(Optimizer):
    """Several optimizers as one: their groups in order, their states in one, so that it is saved like any other."""

    def __init__(self, parts: Sequence[Optimizer]) -> None:
        self._parts = list(parts)
        super().__init__([group for part in parts for group in part.param_groups], {})
        self._share()

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        """One step of each part."""
        for part in self._parts:
            part.step()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load, and give the parts the loaded groups and state."""
        super().load_state_dict(state_dict)
        self._share()

    def _share(self) -> None:
        first = 0
        for part in self._parts:
            part.state = self.state
            part.param_groups = self.param_groups[first : first + len(part.param_groups)]
            first += len(part.param_groups)
