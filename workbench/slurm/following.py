"""Following a trial that another machine runs, through its event files: also over several runs of its job."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

from workbench.follow import EventTail, TrialState
from workbench.progress import OnProgress
from workbench.stopping import Rule, Verdict


class Following:
    """Reads what is new, shows it, and applies the controller's rules.

    A job that begins again cuts the event files at its checkpoint and then writes trial.json anew: all is read again.
    """

    def __init__(
        self, name: str, total_steps: int, trial_dir: Path, show: OnProgress, rules: Callable[[], list[Rule]]
    ) -> None:
        self._name, self._total_steps, self._trial_dir = name, total_steps, trial_dir
        self._show, self._make_rules = show, rules
        self._run: tuple[int, int] | None = None
        """Inode and time of trial.json, which differ for each run of the job."""
        self.verdict: Verdict | None = None
        """The end of the trial by a rule of the controller."""
        self._begin()

    def poll(self) -> None:
        """Take in what was recorded since the last time, and show it."""
        run = self._newest_run()
        if run is None:
            return
        if run != self._run:
            self._run = run
            self._begin()
        try:
            events = self._tail.poll()
        except (OSError, ValueError):  # the files are being cut: trial.json will be new at the next look
            self._run = None
            return
        self._state.update(events)
        for rule in self._rules:
            if self.verdict is None:
                self.verdict = rule.see(events)
        started_at_s = run[1] / 1e9
        self._show(self._state.progress(max(0.0, time.time() - started_at_s)))

    def _begin(self) -> None:
        self._tail, self._rules = EventTail(self._trial_dir / "events"), self._make_rules()
        self._state = TrialState(self._name, self._total_steps)

    def _newest_run(self) -> tuple[int, int] | None:
        try:
            about = (self._trial_dir / "trial.json").stat()
        except OSError:
            return None
        return about.st_ino, about.st_mtime_ns
