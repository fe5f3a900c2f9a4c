"""What a preflight knows of one host, and asking all of them at the same time."""

from __future__ import annotations

import signal
import subprocess
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

from workbench.launch.codecopy import Arrived
from workbench.launch.hostlink import HostLink
from workbench.launch.inventory import Host
from workbench.launch.launcher import LaunchError, signal_group


@dataclass
class Checked:
    """What is known of one host."""

    host: Host
    arrived: Arrived | None = None
    facts: dict[str, Any] = field(default_factory=dict)
    skew_s: float = 0.0
    """How far its clock is ahead of this one."""
    round_trip_s: float = 0.0
    problems: list[str] = field(default_factory=list)
    link: HostLink | None = None
    copying: subprocess.Popen[bytes] | None = None
    """The command that copies the code there."""
    is_abandoned: bool = False

    def note_copying(self, process: subprocess.Popen[bytes]) -> None:
        """The copying of the code has begun."""
        self.copying = process
        if self.is_abandoned:
            self.abandon()

    def note_link(self, link: HostLink) -> None:
        """The host's agent is called."""
        self.link = link
        if self.is_abandoned:
            self.abandon()

    def abandon(self) -> None:
        """Make whatever waits for this host, in any thread, wait no longer."""
        self.is_abandoned = True
        if self.copying is not None and self.copying.poll() is None:
            signal_group(self.copying.pid, signal.SIGKILL)
        if self.link is not None:
            self.link.close()

    def blame(self, problem: str) -> None:
        """Note a problem of this host, by its name, once."""
        named = f"host {self.host.name}: "
        line = problem if problem.startswith(named) else named + problem
        if line not in self.problems:
            self.problems.append(line)


def each(pool: ThreadPoolExecutor, checked: Sequence[Checked], work: Callable[[Checked], None]) -> None:
    """Do something for every host at the same time; what cannot be done is a problem of that host."""

    def one_by_one(one: Checked) -> None:
        try:
            work(one)
        except LaunchError as error:
            one.blame(str(error))

    list(pool.map(one_by_one, checked))
