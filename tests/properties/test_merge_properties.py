"""Merging equals its definition and has the symmetries that the definition has."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from spes_core.sync.merge import merge_layer, nearest_experts
from tests.reference.merge_loop import merge_loop

alphas = st.floats(0.001, 1.0)


@st.composite
def layers(draw: st.DrawFn) -> tuple[torch.Tensor, torch.Tensor, int]:
    """(gate_up (E, 2P), down (E, P), K) in float64, without ties."""
    num_experts = draw(st.integers(2, 9))
    width = draw(st.integers(1, 40))
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**32)))
    gate_up = torch.randn(num_experts, 2 * width, generator=generator, dtype=torch.float64)
    down = torch.randn(num_experts, width, generator=generator, dtype=torch.float64)
    return gate_up, down, draw(st.integers(1, num_experts - 1))


@given(layers(), alphas)
@settings(max_examples=60, deadline=None)
def test_merge_equals_the_loop(layer: tuple[torch.Tensor, torch.Tensor, int], alpha: float) -> None:
    gate_up, down, k = layer
    expected = merge_loop(gate_up.tolist(), down.tolist(), k, alpha)
    merge_layer(gate_up, down, k, alpha)
    np.testing.assert_allclose(gate_up.numpy(), np.array(expected[0]), rtol=0, atol=1e-12)
    np.testing.assert_allclose(down.numpy(), np.array(expected[1]), rtol=0, atol=1e-12)


@given(layers(), alphas, st.randoms(use_true_random=False))
@settings(max_examples=60, deadline=None)
def test_merge_commutes_with_relabelling(layer, alpha, random) -> None:  # type: ignore[no-untyped-def]
    gate_up, down, k = layer
    width = gate_up.shape[1] // 2
    if width == 1:
        return  # every cosine is then +1 or −1: nothing but ties
    order = torch.tensor(random.sample(range(len(gate_up)), len(gate_up)))
    relabelled = gate_up[order].clone(), down[order].clone()
    merge_layer(gate_up, down, k, alpha)
    merge_layer(*relabelled, k, alpha)
    torch.testing.assert_close(relabelled[0], gate_up[order], rtol=0, atol=1e-12)
    torch.testing.assert_close(relabelled[1], down[order], rtol=0, atol=1e-12)


@given(layers(), alphas)
@settings(max_examples=60, deadline=None)
def test_the_mean_expert_is_kept_when_all_others_are_neighbours(layer, alpha) -> None:  # type: ignore[no-untyped-def]
    gate_up, down, _ = layer
    means = gate_up.mean(dim=0), down.mean(dim=0)
    merge_layer(gate_up, down, len(gate_up) - 1, alpha)
    torch.testing.assert_close(gate_up.mean(dim=0), means[0], rtol=0, atol=1e-12)
    torch.testing.assert_close(down.mean(dim=0), means[1], rtol=0, atol=1e-12)


@given(layers())
@settings(max_examples=30, deadline=None)
def test_alpha_zero_is_bitwise_identity(layer: tuple[torch.Tensor, torch.Tensor, int]) -> None:
    gate_up, down, k = layer
    gate_up[0, 0] = -0.0  # adding 0 would turn it into +0
    before = gate_up.numpy().tobytes(), down.numpy().tobytes()
    merge_layer(gate_up, down, k, 0.0)
    assert (gate_up.numpy().tobytes(), down.numpy().tobytes()) == before


def test_alpha_one_with_one_neighbour_swaps_a_pair() -> None:
    gate_up = torch.tensor([[1.0, 0.0, 5.0, 6.0], [1.0, 0.1, 7.0, 8.0]])
    down = torch.tensor([[1.0, 2.0], [3.0, 4.0]])
    expected = gate_up.flip(0).clone(), down.flip(0).clone()
    merge_layer(gate_up, down, 1, 1.0)
    assert torch.equal(gate_up, expected[0]) and torch.equal(down, expected[1])


def test_only_the_gate_half_decides_who_is_near() -> None:
    gate = torch.tensor([[1.0, 0.0], [0.0, 1.0], [1.0, 0.2]])
    up = torch.tensor([[1.0, 1.0], [1.0, 1.0], [-1.0, -1.0]])  # by up, 0 and 1 would be nearest
    gate_up, down = torch.cat([gate, up], dim=1), torch.tensor([[0.0], [1.0], [2.0]])
    merge_layer(gate_up, down, 1, 1.0)
    assert down.tolist() == [[2.0], [2.0], [0.0]]


def test_ties_go_to_the_lowest_index() -> None:
    assert nearest_experts(torch.ones(5, 3), 2).tolist() == [[1, 2], [0, 2], [0, 1], [0, 1], [0, 1]]
    assert nearest_experts(torch.ones(300, 3), 3)[200:].tolist() == [[0, 1, 2]] * 100


def test_an_expert_of_norm_zero_is_orthogonal_to_all() -> None:
    gate = torch.tensor([[1.0, 0.0], [0.0, 0.0], [-1.0, 0.0], [1.0, 1.0]])
    assert nearest_experts(gate, 3).tolist() == [[3, 1, 2], [0, 2, 3], [1, 3, 0], [0, 1, 2]]


def test_the_scale_of_an_expert_does_not_decide_who_is_near() -> None:
    gate = torch.tensor([[1.0, 0.0], [1e-18, 1e-20], [50.0, 40.0]])
    assert nearest_experts(gate, 1).tolist() == [[1], [0], [1]]


@pytest.mark.parametrize("columns", [1, 3, 1 << 15])
def test_the_block_size_of_the_gram_matrix_does_not_matter(monkeypatch: pytest.MonkeyPatch, columns: int) -> None:
    gate = torch.randn(6, 100, generator=torch.Generator().manual_seed(0))
    expected = nearest_experts(gate, 5).tolist()
    monkeypatch.setattr("spes_core.sync.merge._GRAM_COLUMNS", columns)
    assert nearest_experts(gate, 5).tolist() == expected
