"""Experts and router against a per-token loop; what is frozen stays out of the backward pass."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

from spes_core.config import ModelConfig
from spes_core.model.moe import Experts, Routing, route
from tests.reference.moe_loop import moe_loop, router_losses_loop

TOKENS, WIDTH, HIDDEN = 13, 6, 5


def make_experts(num_experts: int, trained: list[int], seed: int = 0) -> Experts:
    model = ModelConfig(d_model=WIDTH, num_experts=num_experts, expert_hidden=HIDDEN, top_k=1)
    experts = Experts(model, trained).double()
    generator = torch.Generator().manual_seed(seed)
    for expert in range(num_experts):
        for matrix in ("gate_up", "down"):
            experts.tensor(expert, matrix).normal_(generator=generator)
    return experts


def make_input(num_experts: int, seed: int = 1) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    x_ND = torch.randn(TOKENS, WIDTH, generator=generator, dtype=torch.float64, requires_grad=True)
    router_ED = torch.randn(num_experts, WIDTH, generator=generator, dtype=torch.float64, requires_grad=True)
    return x_ND, router_ED


def run_layer(experts: Experts, x_ND: Tensor, router_ED: Tensor, top_k: int, normalize: bool) -> tuple[Tensor, Routing]:
    routing = route(x_ND @ router_ED.t(), top_k, normalize)
    return experts(x_ND, routing), routing


def twin_matrices(experts: Experts) -> dict[str, list[Tensor]]:
    """Every expert's matrices as separate leaves that require gradients."""
    return {
        matrix: [experts.tensor(expert, matrix).clone().requires_grad_() for expert in range(len(experts.locations))]
        for matrix in ("gate_up", "down")
    }


@pytest.mark.parametrize("normalize", [False, True])
@pytest.mark.parametrize(
    ("num_experts", "top_k", "trained"),
    [
        (4, 2, [0, 1, 2, 3]),
        (4, 2, [1, 2]),
        (5, 3, [4]),
        (5, 5, [0, 2]),
        (3, 1, []),
        (1, 1, [0]),
        (40, 2, [3, 30]),
    ],
)
def test_output_and_gradients_equal_a_per_token_loop(
    num_experts: int, top_k: int, trained: list[int], normalize: bool
) -> None:
    experts = make_experts(num_experts, trained)
    x_ND, router_ED = make_input(num_experts)
    output_ND, _ = run_layer(experts, x_ND, router_ED, top_k, normalize)
    probe_ND = torch.randn(output_ND.shape, dtype=torch.float64, generator=torch.Generator().manual_seed(2))
    (output_ND * probe_ND).sum().backward()

    twin_x, twin_router = (item.detach().clone().requires_grad_() for item in (x_ND, router_ED))
    matrices = twin_matrices(experts)
    expected_ND = moe_loop(twin_x, twin_router, matrices["gate_up"], matrices["down"], top_k, normalize)
    (expected_ND * probe_ND).sum().backward()

    torch.testing.assert_close(output_ND, expected_ND, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(x_ND.grad, twin_x.grad, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(router_ED.grad, twin_router.grad, rtol=1e-12, atol=1e-12)
    for row, expert in enumerate(trained):
        for matrix in ("gate_up", "down"):
            found = experts.get_parameter(f"trained_{matrix}").grad
            expected = matrices[matrix][expert].grad
            assert found is not None
            expected = torch.zeros_like(found[row]) if expected is None else expected  # an expert without tokens
            torch.testing.assert_close(found[row], expected, rtol=1e-12, atol=1e-12)


def test_all_tokens_on_one_expert_and_zero_gradients_for_the_others() -> None:
    experts = make_experts(4, [0, 1, 2, 3])
    x_ND, router_ED = make_input(4)
    with torch.no_grad():
        x_ND[:, 0] = 5
        router_ED.zero_()
        router_ED[2, 0] = 9
    output_ND, routing = run_layer(experts, x_ND, router_ED, 1, False)
    output_ND.sum().backward()
    assert routing.expert_tokens_E.tolist() == [0, 0, TOKENS, 0]
    matrices = twin_matrices(experts)
    expected_ND = moe_loop(x_ND, router_ED, matrices["gate_up"], matrices["down"], 1, False)
    torch.testing.assert_close(output_ND, expected_ND, rtol=1e-12, atol=1e-12)
    for matrix in ("gate_up", "down"):
        gradient = experts.get_parameter(f"trained_{matrix}").grad
        assert gradient is not None
        assert [bool(row.any()) for row in gradient] == [False, False, True, False]


def test_frozen_experts_have_no_gradient_and_leave_all_other_gradients_bitwise_alone() -> None:
    gradients = {}
    for name, trained in (("full", [0, 1, 2, 3]), ("sparse", [1, 3])):
        experts = make_experts(4, trained)
        x_ND, router_ED = make_input(4)
        output_ND, routing = run_layer(experts, x_ND, router_ED, 3, True)
        (output_ND.square().sum() + routing.balance_loss + routing.router_z_loss).backward()
        gradients[name] = (x_ND.grad, router_ED.grad, experts)
    full, sparse = gradients["full"], gradients["sparse"]
    assert torch.equal(full[0], sparse[0]) and torch.equal(full[1], sparse[1])
    for matrix in ("gate_up", "down"):
        frozen = sparse[2].get_parameter(f"frozen_{matrix}")
        assert frozen.grad is None and not frozen.requires_grad
        whole = full[2].get_parameter(f"trained_{matrix}").grad
        assert torch.equal(sparse[2].get_parameter(f"trained_{matrix}").grad, whole[[1, 3]])


def test_frozen_experts_cost_no_weight_gradient_product() -> None:
    flops = {}
    for trained in ([0, 1, 2, 3], [2]):
        experts = make_experts(4, trained)
        x_ND, router_ED = make_input(4)
        output_ND, routing = run_layer(experts, x_ND, router_ED, 2, False)
        with FlopCounterMode(display=False) as counter:
            output_ND.sum().backward()
        flops[len(trained)] = counter.get_total_flops()
    frozen_slots = 2 * TOKENS - int(routing.expert_tokens_E[2])
    assert frozen_slots > TOKENS
    assert flops[4] - flops[1] == 2 * frozen_slots * 3 * WIDTH * HIDDEN


@pytest.mark.parametrize("normalize", [False, True])
def test_router_gradient_passes_a_numerical_check(normalize: bool) -> None:
    logits_NE = torch.randn(5, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(7)) * 2

    def differentiable(logits: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        routing = route(logits, 2, normalize)
        return routing.weights_NK, routing.balance_loss, routing.router_z_loss

    assert torch.autograd.gradcheck(differentiable, logits_NE.requires_grad_())


@pytest.mark.parametrize("top_k", [1, 2, 4])
def test_router_losses_equal_their_formulas(top_k: int) -> None:
    logits_NE = torch.randn(11, 4, generator=torch.Generator().manual_seed(3)) * 2
    routing = route(logits_NE, top_k, False)
    balance, z = router_losses_loop(logits_NE, top_k)
    assert float(routing.balance_loss) == pytest.approx(balance, rel=1e-6)
    assert float(routing.router_z_loss) == pytest.approx(z, rel=1e-6)


def test_uniform_routing_has_balance_loss_one_and_collapse_has_more() -> None:
    cycle_NE = torch.eye(4).roll(0) * 1e-4  # token n prefers expert n, all probabilities nearly 1/4
    assert float(route(cycle_NE, 1, False).balance_loss) == pytest.approx(1, abs=1e-4)
    collapsed_NE = torch.tensor([[20.0, 0, 0, 0]]).expand(4, 4)
    assert float(route(collapsed_NE, 1, False).balance_loss) == pytest.approx(4, rel=1e-6)


def test_router_computes_in_fp32_when_its_logits_are_bf16() -> None:
    logits_NE = torch.randn(9, 4, generator=torch.Generator().manual_seed(3)).bfloat16()
    routing = route(logits_NE, 2, False)
    assert routing.weights_NK.dtype == torch.float32
    expected = logits_NE.float().softmax(-1).topk(2).values
    torch.testing.assert_close(routing.weights_NK, expected, rtol=1e-6, atol=0)
