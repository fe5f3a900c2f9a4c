"""Which participants can go on together, by the steps of their newest checkpoints."""

from __future__ import annotations

import pytest

from spes_core.snapshots import ResumePoint, apart
from tests.equivalence.participants import tiny

CONFIG = tiny(nodes=2, budget_tokens=2 * 12 * 8 * 16, sync={"interval_steps": 2}, checkpoint={"interval_rounds": 2})
"""Checkpoints after steps 4, 8, 12, …"""
LATE_IS_ALLOWED = tiny(
    nodes=2,
    budget_tokens=2 * 12 * 8 * 16,
    sync={"interval_steps": 2},
    checkpoint={"interval_rounds": 2},
    round={"quorum": 0.5},
)


@pytest.mark.parametrize(
    ("server", "nodes", "expected"),
    [
        (0, (0, 0), None),
        (4, (0, 4), None),
        (0, (4, 4), None),
        (8, (4, 8), None),
        (8, (8, 12), None),
        (8, (0, 8), ("node-0", "server")),
        (0, (8, 8), ("server", "node-0")),
        (8, (12, 0), ("node-1", "node-0")),
    ],
)
def test_participants_are_one_checkpoint_apart_or_one_has_lost_some(
    server: int, nodes: tuple[int, int], expected: tuple[str, str] | None
) -> None:
    steps = {"server": server, "node-0": nodes[0], "node-1": nodes[1]}
    assert apart(CONFIG, {name: ResumePoint(step, 0) for name, step in steps.items()}) == expected


def test_below_quorum_one_a_node_may_be_late_and_the_server_may_not() -> None:
    def of(server: int, node: int) -> tuple[str, str] | None:
        points = {"server": ResumePoint(server, 0), "node-0": ResumePoint(node, 0), "node-1": ResumePoint(8, 0)}
        return apart(LATE_IS_ALLOWED, points)

    assert of(8, 0) is None
    assert of(0, 4) == ("server", "node-1")


def test_who_never_meets_is_never_apart() -> None:
    assert apart(CONFIG, {}) is None
    alone = tiny(nodes=2, sync={"exchange": "none", "interval_steps": 2}, checkpoint={"interval_steps": 2})
    assert apart(alone, {"node-0": ResumePoint(0, 0), "node-1": ResumePoint(8, 0)}) is None
