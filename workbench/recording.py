"""What the processes of one trial recorded, read back from its event files."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from spes_core.events import read_events
from spes_core.sharding import joined_digest

Event = dict[str, Any]


class Recording:
    """The events of one trial, by process.

    A process that was restarted repeats steps and rounds: what it recorded last counts.
    """

    def __init__(self, folder: Path) -> None:
        files = sorted(folder.glob("node-*.jsonl"), key=lambda path: int(path.stem.removeprefix("node-")))
        self.nodes = {int(path.stem.removeprefix("node-")): list(read_events(path)) for path in files}
        servers = sorted(folder.glob("server*.jsonl"), key=_shard_of)
        self.servers = [list(read_events(path)) for path in servers]
        """By server: several share the tensors of a run where server.shards is above 1."""

    def last_by_node(self, kind: str) -> dict[int, Event]:
        """The newest event of one kind of each node that has one."""
        found = {node: last(events, kind) for node, events in self.nodes.items()}
        return {node: event for node, event in found.items() if event is not None}

    def by_step(self, kind: str) -> dict[int, list[Event]]:
        """Events of one kind by step, ascending; in a step's list, one event of each node, in node order."""
        steps: dict[int, list[Event]] = {}
        for events in self.nodes.values():
            for step, event in newest(events, kind, "step").items():
                steps.setdefault(step, []).append(event)
        return dict(sorted(steps.items()))

    def rounds_of_node(self, node: int) -> list[Event]:
        """The rounds of one node, ascending."""
        return list(newest(self.nodes[node], "round", "round").values())

    def server_rounds(self) -> list[Event]:
        """The rounds that the server (or all of several) completed, ascending."""
        by_server = [newest(events, "round", "round") for events in self.servers]
        complete = set.intersection(*map(set, by_server)) if by_server else set()
        return [_joined_round([rounds[index] for rounds in by_server]) for index in sorted(complete)]


def _shard_of(path: Path) -> int:
    return int(path.stem.split("-")[1]) if "-" in path.stem else 0


def _joined_round(events: list[Event]) -> Event:
    """What several servers tell of one round: bytes together, times of the slowest, one digest."""
    if len(events) == 1:
        return events[0]
    sums = {
        field: {node: sum(event[field][node] for event in events) for node in events[0][field]}
        for field in events[0]
        if field.endswith("_bytes")
    }
    slowest = {field: max(event[field] for event in events) for field in events[0] if field.endswith("_s")}
    digest = joined_digest([str(event.get("digest")) for event in events])
    return {**events[0], **sums, **slowest, "digest": digest}


def of_kind(events: list[Event], kind: str) -> Iterator[Event]:
    """The events of one kind, oldest first."""
    return (event for event in events if event["kind"] == kind)


def last(events: list[Event], kind: str) -> Event | None:
    """The newest event of one kind."""
    return next(of_kind(events[::-1], kind), None)


def newest(events: list[Event], kind: str, key: str) -> dict[int, Event]:
    """The newest event of one kind for each value of the field ``key``, ascending."""
    found = {event[key]: event for event in of_kind(events, kind)}
    return dict(sorted(found.items()))


def total(events: list[Event], field: str) -> float:
    """Sum of a field."""
    return sum(float(event[field]) for event in events)


def mean_of(events: list[Event], field: str) -> float:
    """Mean of a field over a non-empty list."""
    return total(events, field) / len(events)


def largest(values: Iterable[float | None]) -> float | None:
    """The largest number, where there is any."""
    return max((value for value in values if value is not None), default=None)
