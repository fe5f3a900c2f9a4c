"""Following the event files of a running trial: each `poll` reads what has been added since the last one."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from workbench.progress import Progress


class EventTail:
    """Reads growing event files; a last line without its newline is left for later."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._offsets: dict[Path, int] = {}

    def poll(self) -> list[tuple[str, dict[str, Any]]]:
        """New events with the name of the process that wrote them ("node-0", "server"), in file order."""
        events = []
        for path in sorted(self._folder.glob("*.jsonl")):
            events += [(path.stem, event) for event in self._read(path)]
        return events

    def _read(self, path: Path) -> list[dict[str, Any]]:
        offset = self._offsets.get(path, 0)
        if path.stat().st_size <= offset:
            return []
        with path.open("rb") as file:
            file.seek(offset)
            data = file.read()
        whole = data[: data.rfind(b"\n") + 1]
        self._offsets[path] = offset + len(whole)
        return [json.loads(line) for line in whole.splitlines()]


class TrialState:
    """How far a trial is, according to the events seen so far."""

    def __init__(self, trial: str, total_steps: int, resumed_at_step: int = 0) -> None:
        self._trial, self._total_steps, self._resumed_at_step = trial, total_steps, resumed_at_step
        self._rounds = 0
        self._newest: dict[str, dict[str, Any]] = {}

    def update(self, events: list[tuple[str, dict[str, Any]]]) -> None:
        """Take in new events."""
        for process, event in events:
            if event["kind"] == "train":
                self._newest[process] = event
            elif event["kind"] == "round":
                self._rounds = max(self._rounds, event["round"] + 1)

    @property
    def behind(self) -> str | None:
        """The process that has taken the fewest steps; None before the first training event."""
        return min(self._newest, key=lambda process: self._newest[process]["step"], default=None)

    def progress(self, elapsed_s: float) -> Progress:
        """The state ``elapsed_s`` seconds after the trial was started.

        The step is the smallest of the nodes' newest training events; a node that has written none is left out.
        """
        newest = list(self._newest.values())
        losses = [float(event["loss_nats"]) for event in newest]
        rates = [float(event["tokens_per_s"]) for event in newest]
        return Progress(
            trial=self._trial,
            step=min((event["step"] for event in newest), default=0),
            total_steps=self._total_steps,
            loss_nats=sum(losses) / len(losses) if losses else None,
            tokens_per_s=sum(rates) if rates else None,
            round=self._rounds,
            elapsed_s=elapsed_s,
            resumed_at_step=self._resumed_at_step,
        )
