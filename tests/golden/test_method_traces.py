"""Each method as a table of numbers: a scalar model, four steps that anyone can do on paper, a round after each.

The model has one shared value s and two experts a and b; node 0 owns a, node 1 owns b. In round r node n moves what it
trains by (n + 1)/8 + r/16 for s and by twice that for experts. Node 0 has 1 token in a round, node 1 has 3. Every
number below is a multiple of 1/128 or follows from the stated rule by one float32 operation after another.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from spes_core.config import MergeConfig, ModelConfig, OuterConfig, PartitionConfig, RunConfig, SyncConfig
from spes_core.names import expert_of
from spes_core.sync.inprocess import LocalClient
from spes_core.sync.messages import make_hello, schema_of
from spes_core.sync.parameter_server import ParameterServer
from tests.small_rounds import running

SPES = RunConfig(
    nodes=2,
    budget_tokens=4 * 32 * 128,
    model=ModelConfig(num_experts=2, top_k=1),
    sync=SyncConfig(interval_steps=1),
    merge=MergeConfig(enabled=False, num_neighbours=1),
)
MERGED = replace(SPES, merge=MergeConfig(num_neighbours=1, alpha=0.5, interval_steps=2, until_step=4))
DILICO = replace(SPES, partition=PartitionConfig(kind="full"))
DILOCO = replace(DILICO, outer=OuterConfig(kind="nesterov", lr=0.5, momentum=0.5))

# Shared value s, expert a (of node 0), expert b (of node 1) after each of four rounds; all begin at s 1, a 2, b 3.
TRACES: dict[str, tuple[RunConfig, list[tuple[float, float, float]]]] = {
    # s: mean of 1 + 1/8 and 1 + 2/8 with weights 1 and 3; a: + 2/8; b: + 4/8; then each + 1/16 (experts + 1/8) more.
    "spes": (
        SPES,
        [(1.21875, 2.25, 3.5), (1.5, 2.625, 4.125), (1.84375, 3.125, 4.875), (2.25, 3.75, 5.75)],
    ),
    # The second round ends at step 2, where α(t) = 0.5 · (1 − 2/4) = 1/4: a gains (4.125 − 2.625)/4, b loses as much.
    "spes with a merge": (
        MERGED,
        [(1.21875, 2.25, 3.5), (1.5, 3.0, 3.75), (1.84375, 3.5, 4.5), (2.25, 4.125, 5.375)],
    ),
    # Everyone trains everything: experts move by 2 · (1 · 1/8 + 3 · 2/8)/4 = 7/16, then by 1/8 more each round.
    "dilico": (
        DILICO,
        [(1.21875, 2.4375, 3.4375), (1.5, 3.0, 4.0), (1.84375, 3.6875, 4.6875), (2.25, 4.5, 5.5)],
    ),
    # With d the mean move: v ← v/2 − d, w ← w − (v/2 − d)/2. First round of s: v = −7/32, w = 1 + (7/64 + 7/32)/2.
    "diloco": (
        DILOCO,
        [
            (1.1640625, 2.328125, 3.328125),
            (1.40234375, 2.8046875, 3.8046875),
            (1.708984375, 3.41796875, 4.41796875),
            (2.0810546875, 4.162109375, 5.162109375),
        ],
    ),
}


def trace(config: RunConfig, folder: Any) -> list[tuple[float, float, float]]:
    """The three values after each round."""
    names = {"s": "final_norm", "a": "layers.0.experts.0.down", "b": "layers.0.experts.1.down"}
    gates = {f"layers.0.experts.{expert}.gate_up": (2,) for expert in (0, 1)}
    shapes: dict[str, tuple[int, ...]] = {}
    for expert, name in enumerate(("a", "b")):
        shapes |= {f"layers.0.experts.{expert}.gate_up": gates[f"layers.0.experts.{expert}.gate_up"], names[name]: (1,)}
    shapes[names["s"]] = (1,)
    schema = schema_of(shapes)
    first = {names["s"]: 1.0, names["a"]: 2.0, names["b"]: 3.0}
    start = {name: np.full(shape, first.get(name, 1.0), dtype=np.float32) for name, shape in shapes.items()}
    server = ParameterServer(config, schema, lambda name: start[name], lambda kind, **fields: None, folder)
    rows = []
    with running(server):
        clients = [LocalClient(server) for _ in range(2)]
        for node, client in enumerate(clients):
            client.join(make_hello(config, schema, node))
        for round in range(4):
            old = [server.state.tensor(index).copy() for index in range(len(schema))]
            for node, client in enumerate(clients):
                move = (node + 1) / 8 + round / 16

                def payload(index: int, move: float = move, old: list[np.ndarray] = old) -> memoryview:
                    name = schema[index].name
                    scale = 0 if name in gates else 1 if expert_of(name) is None else 2
                    return (old[index] + np.float32(scale * move)).data.cast("B")

                tensors = server.trained_by(node)
                client.upload(round=round, step=round + 1, tokens=(1, 3)[node], tensors=tensors, payload_of=payload)
            for client in clients:
                client.download(round=round, sink=_Nowhere())
            values = {spec.name: float(server.state.tensor(index)[0]) for index, spec in enumerate(schema)}
            rows.append((values[names["s"]], values[names["a"]], values[names["b"]]))
    return rows


class _Nowhere:
    def begin(self, manifest: object) -> None: ...
    def write(self, tensor: int, offset: int, payload: memoryview) -> None: ...


@pytest.mark.parametrize("method", TRACES)
def test_the_trace_of_a_scalar_model_is_the_one_on_paper(method: str, tmp_path: Any) -> None:
    config, expected = TRACES[method]
    assert trace(config, tmp_path) == expected
