"""Merging through the server's flat buffer touches the experts of every layer, and nothing else."""

from __future__ import annotations

import numpy as np

from spes_core.config import OuterConfig
from spes_core.names import parse_expert
from spes_core.sync.global_state import GlobalState
from tests.reference.merge_loop import merge_loop
from tests.small_rounds import initial_values, small_config, small_schema

CONFIG = small_config()
SCHEMA = small_schema(CONFIG)


def test_the_flat_buffer_is_merged_layer_by_layer_as_the_loop_does() -> None:
    state = GlobalState(SCHEMA, OuterConfig(), initial_values(CONFIG))
    before = {spec.name: state.tensor(index).copy() for index, spec in enumerate(SCHEMA)}
    for layer in range(CONFIG.model.num_layers):
        state.merge(layer, 2, 0.25)
    after = {spec.name: state.tensor(index) for index, spec in enumerate(SCHEMA)}
    for layer in range(CONFIG.model.num_layers):
        names = {
            matrix: [f"layers.{layer}.experts.{e}.{matrix}" for e in range(CONFIG.model.num_experts)]
            for matrix in ("gate_up", "down")
        }
        rows = {matrix: [before[name].tolist() for name in names[matrix]] for matrix in names}
        gate_up, down = merge_loop(rows["gate_up"], rows["down"], 2, 0.25)
        np.testing.assert_allclose([after[name] for name in names["gate_up"]], gate_up, rtol=0, atol=1e-6)
        np.testing.assert_allclose([after[name] for name in names["down"]], down, rtol=0, atol=1e-6)
        assert not np.array_equal(after[names["down"][0]], before[names["down"][0]])
    for name in before:
        if parse_expert(name) is None:
            assert after[name].tobytes() == before[name].tobytes()


def test_the_digest_is_that_of_the_values_in_canonical_order() -> None:
    state = GlobalState(SCHEMA, OuterConfig(), initial_values(CONFIG))
    digest = state.digest()
    state.tensor(len(SCHEMA) - 1)[-1] += np.float32(1e-3)
    assert state.digest() != digest
    assert len(digest) == 16


def test_only_what_a_setting_needs_is_held_beside_the_model() -> None:
    state = GlobalState(SCHEMA, OuterConfig(kind="sgd"), initial_values(CONFIG))
    assert state.momentum is None and state.residual is None
    state = GlobalState(SCHEMA, OuterConfig(kind="nesterov"), initial_values(CONFIG), has_residual=True)
    assert state.momentum is not None and state.residual is not None
    assert not state.momentum.any() and not state.residual.any()
