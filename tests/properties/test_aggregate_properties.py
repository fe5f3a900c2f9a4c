"""The mean that the server forms is the token-weighted mean, to the bit whatever the order of arrival."""

from __future__ import annotations

import time
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from spes_core.config import MergeConfig, WireConfig
from spes_core.sync.aggregate import BLOCK_ELEMENTS, add_to_mean, make_scratch
from spes_core.sync.inprocess import LocalClient
from tests.reference.aggregate_float64 import weighted_mean
from tests.small_rounds import FULL, PlainDecoder, make_server, noise, run_rounds, running, small_config

SCRATCH = make_scratch()
contributions = st.lists(
    st.tuples(st.integers(1, 10**12), st.floats(1e-6, 1e6), st.integers(0, 2**32)), min_size=1, max_size=9
)


def mean_of(values: list[np.ndarray], tokens: list[int], cuts: list[int]) -> np.ndarray:
    mean = np.full_like(values[0], 77.0)
    for start, end in zip([0, *cuts], [*cuts, mean.size], strict=True):
        weight = 0
        for one, weight_of_one in zip(values, tokens, strict=True):
            add_to_mean(mean[start:end], one[start:end], weight_of_one, weight, SCRATCH)
            weight += weight_of_one
    return mean


@given(contributions, st.integers(1, 200))
@settings(max_examples=100, deadline=None)
def test_the_mean_equals_the_float64_mean(parts: list[tuple[int, float, int]], size: int) -> None:
    values = [
        (scale * np.random.default_rng(seed).standard_normal(size)).astype(np.float32) for _, scale, seed in parts
    ]
    tokens = [weight for weight, _, _ in parts]
    largest = max(float(np.abs(one).max()) for one in values)
    error = np.abs(mean_of(values, tokens, []) - weighted_mean(values, tokens)).max()
    assert error <= 2 * len(parts) * np.finfo(np.float32).eps * largest


@given(contributions, st.lists(st.integers(1, 299), unique=True, max_size=6).map(sorted))
@settings(max_examples=60, deadline=None)
def test_cutting_into_chunks_changes_no_bit(parts: list[tuple[int, float, int]], cuts: list[int]) -> None:
    values = [np.random.default_rng(seed).standard_normal(300).astype(np.float32) for _, _, seed in parts]
    tokens = [weight for weight, _, _ in parts]
    assert mean_of(values, tokens, cuts).tobytes() == mean_of(values, tokens, []).tobytes()


@given(contributions)
@settings(max_examples=60, deadline=None)
def test_equal_contributions_give_themselves_bitwise(parts: list[tuple[int, float, int]]) -> None:
    one = noise("equal", parts[0]).standard_normal(50).astype(np.float32)
    mean = mean_of([one] * len(parts), [weight for weight, _, _ in parts], [])
    assert mean.tobytes() == one.tobytes()


def test_a_mean_over_several_blocks_is_the_same_as_block_by_block() -> None:
    values = [noise(n).standard_normal(2 * BLOCK_ELEMENTS + 5).astype(np.float32) for n in range(3)]
    whole = mean_of(values, [3, 1, 2], [])
    assert whole.tobytes() == mean_of(values, [3, 1, 2], [BLOCK_ELEMENTS - 1, 2 * BLOCK_ELEMENTS]).tobytes()


@pytest.mark.parametrize("kind", ["sparse", "full"])
def test_arrival_order_changes_no_bit(kind: str) -> None:
    config = small_config(nodes=3, partition=replace(FULL, kind=kind))

    def weights(lateness_s: dict[int, float]) -> list[bytes]:
        server = make_server(config)
        with running(server):
            decoders, _ = run_rounds(
                config, lambda node: LocalClient(server), delay=lambda node, round: time.sleep(lateness_s[node])
            )
        for decoder in decoders[1:]:
            assert all(torch.equal(decoder.weights[name], decoders[0].weights[name]) for name in decoder.weights)
        return [tensor.numpy().tobytes() for tensor in decoders[0].weights.values()]

    expected = weights({0: 0.0, 1: 0.05, 2: 0.1})
    assert weights({0: 0.1, 1: 0.05, 2: 0.0}) == expected
    assert weights({0: 0.05, 1: 0.0, 2: 0.05}) == expected


@pytest.mark.parametrize("kind", ["sparse", "full"])
def test_a_round_gives_the_mean_over_the_trainers_of_each_tensor(kind: str) -> None:
    """Also where an expert has several owners: three nodes, two experts."""
    model = replace(small_config().model, num_experts=2)
    merge = MergeConfig(enabled=False)
    config = small_config(nodes=3, partition=replace(FULL, kind=kind), model=model, merge=merge)
    server = make_server(config)
    with running(server):
        decoders, _ = run_rounds(config, lambda node: LocalClient(server), num_rounds=1)
    trained = [PlainDecoder(config) for _ in range(3)]
    for node, decoder in enumerate(trained):
        decoder.train(config, node, 0)
    for name, got in decoders[0].weights.items():
        trainers = config.make_partition().trainers(name)
        values = [trained[node].weights[name].numpy() for node in trainers]
        expected = weighted_mean(values, [100 + 7 * node for node in trainers])
        np.testing.assert_allclose(got.numpy(), expected, rtol=0, atol=2e-6)


def test_chunk_size_changes_no_bit() -> None:
    digests = set()
    for chunk_bytes in (1024, 1 << 20):
        config = small_config(wire=WireConfig(chunk_bytes=chunk_bytes))
        server = make_server(config)
        with running(server):
            _, reports = run_rounds(config, lambda node, server=server: LocalClient(server))
        digests.add(reports[0][-1].digest)
    assert len(digests) == 1
