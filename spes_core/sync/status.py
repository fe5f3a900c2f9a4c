"""Where a run stands, as plain data: for people and for the status request."""

from __future__ import annotations

import time
from typing import Any

from spes_core.config import RunConfig
from spes_core.sync.ledger import Ledger
from spes_core.sync.members import Members
from spes_core.sync.monitor import Monitor


def status_of(config: RunConfig, ledger: Ledger, members: Members, monitor: Monitor) -> dict[str, Any]:
    """Round, nodes (how long not heard of, how late, bytes), staleness of each expert, last refusal.

    ``staleness_rounds`` of an expert counts the closed rounds since one of its owners last took part.
    """
    now = ledger.open
    return {
        "round": ledger.rounds_closed,
        "rounds": len(ledger.steps),
        "step": ledger.steps[ledger.rounds_closed - 1] if ledger.rounds_closed else 0,
        "steps": config.total_steps,
        "tokens": ledger.tokens,
        "failure": monitor.failure,
        "last_refusal": monitor.last_refusal,
        "nodes": [_node(node, ledger, members) for node in range(config.nodes)],
        "experts": [
            {"expert": expert, "owners": list(owners), "staleness_rounds": _staleness(owners, members)}
            for expert in range(config.model.num_experts)
            for owners in [(now.partition if now else members.base).owners(expert)]
        ],
    }


def _node(node: int, ledger: Ledger, members: Members) -> dict[str, Any]:
    member, now = members.nodes[node], ledger.open
    part = now.contributions.get(node) if now else None
    if not member.session:
        state = "absent"
    elif not members.is_live(node):
        state = "lost"
    elif part is None:
        state = "training"
    else:
        state = "waiting" if part.is_complete else "uploading"
    started_at_s = now.started_at_s if now else None
    is_late = started_at_s is not None and (part is None or not part.is_complete)
    return {
        "node": node,
        "state": state,
        "round": member.round,
        "step": member.step,
        "heard_s_ago": round(time.monotonic() - member.heard_at_s, 3) if member.session else None,
        "late_s": round(time.monotonic() - started_at_s, 3) if is_late and started_at_s is not None else 0.0,
        "rounds_missed": member.absences,
        "received_bytes": part.payload_bytes if part else 0,
    }


def _staleness(owners: tuple[int, ...], members: Members) -> int:
    return min((members.nodes[node].absences for node in owners), default=0)
