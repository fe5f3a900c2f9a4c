"""What a launcher is: the interface between `execute` and the places where processes run.

A launcher stages a run where its processes will find it, starts each `ProcessSpec` and gives a `Running`; waits until
one of several ends; signals their groups; and brings back what they have written. No process outlives `close`, nor the
death of the process that holds the launcher, however it dies.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Protocol

from spes_core import snapshots
from spes_core.config import RunConfig
from spes_core.errors import SpesError
from spes_core.runfile import RunFile
from spes_core.snapshots import ResumePoint
from workbench.machine import resident_bytes
from workbench.processes import ProcessSpec, plan

STOP_GRACE_S = 5.0
"""How long a process may take to end after SIGTERM before it gets SIGKILL."""
_KILL_GRACE_S = 3.0


class LaunchError(SpesError):
    """A process could not be started."""


class Running:
    """One started process; ``returncode`` is None until it has ended, and -N when signal N ended it."""

    def __init__(self, name: str, id: int) -> None:
        self.name = name
        self.id = id
        self.pid: int | None = None
        self.returncode: int | None = None
        self.ended_order = 0
        """1 for the first process of its launcher that ended, and so on; 0 while it runs."""
        self.died_with_launcher = False
        """Whether it was ended by the death of its launcher, for no reason of its own."""
        self.killed_for_memory = False
        """Whether the kernel of another host has killed something for memory since its start there."""
        self.lost_with = ""
        """What became of the host or the connection with which it was lost, in words; "" where that is not known."""


class Launcher(Protocol):
    """What `execute` needs of a place where processes run."""

    def wait_ready(self) -> None:
        """Return when a process can be started without delay. Raises LaunchError."""

    def resume_points(self, config: RunConfig, trial_dir: Path) -> dict[str, ResumePoint]:
        """Where each participant of a run goes on, by what its processes have stored. Raises LaunchError."""

    def stage(self, run: RunFile, trial_dir: Path, points: Mapping[str, ResumePoint]) -> Sequence[ProcessSpec]:
        """Make everything ready for the processes of a run; these, in the order in which they must be started.

        Without ``points`` what an earlier attempt has left elsewhere than in ``trial_dir`` is removed. Raises
        LaunchError.
        """

    def start(self, spec: ProcessSpec, log: Path) -> Running:
        """Start one process with stdout and stderr appended to ``log``. Raises LaunchError."""

    def signal(self, process: Running, number: int) -> None:
        """Signal the process group of a process; nothing happens when it has ended."""

    def wait(self, processes: Sequence[Running], timeout_s: float) -> None:
        """Return after ``timeout_s``, or as soon as one more of the processes has ended."""

    def resident_bytes(self, processes: Sequence[Running]) -> int:
        """Memory that those of the processes that run hold together, with what they started; known after a while."""

    def collect(self, trial_dir: Path, *, is_done: bool) -> None:
        """Return when ``trial_dir`` has all that the processes of a run have written for others, once they have ended.

        When the run ``is_done``, what is left of it elsewhere is removed. Raises LaunchError.
        """

    def close(self) -> None:
        """End every process."""


class OnThisHost:
    """The part of a launcher that says where files are, where the processes use the trial's folder itself."""

    def resume_points(self, config: RunConfig, trial_dir: Path) -> dict[str, ResumePoint]:
        """See `Launcher`."""
        return snapshots.resume_points(config, snapshots.all_stored(config, trial_dir))

    def stage(self, run: RunFile, trial_dir: Path, points: Mapping[str, ResumePoint]) -> Sequence[ProcessSpec]:
        """See `Launcher`."""
        return plan(run, trial_dir)

    def resident_bytes(self, processes: Sequence[Running]) -> int:
        """See `Launcher`."""
        return resident_bytes([p.pid for p in processes if p.returncode is None and p.pid is not None])

    def collect(self, trial_dir: Path, *, is_done: bool) -> None:
        """See `Launcher`."""


def count_running(processes: Sequence[Running]) -> int:
    """How many of the processes have not ended."""
    return sum(process.returncode is None for process in processes)


def stop(launcher: Launcher, processes: Sequence[Running], grace_s: float = STOP_GRACE_S) -> None:
    """End the processes: SIGTERM to their groups, SIGKILL after ``grace_s``; returns when they have ended."""
    for number, patience_s in ((signal.SIGTERM, grace_s), (signal.SIGKILL, _KILL_GRACE_S)):
        for process in processes:
            if process.returncode is None:
                launcher.signal(process, number)
        deadline = time.monotonic() + patience_s
        while count_running(processes) and (left_s := deadline - time.monotonic()) > 0:
            launcher.wait(processes, left_s)


def signal_group(pid: int, number: int) -> None:
    """Signal the group that ``pid`` leads, or the process alone when it leads none (yet); nothing when it has gone."""
    for send in (os.killpg, os.kill):
        try:
            send(pid, number)
        except (ProcessLookupError, PermissionError):
            continue
        return


def child_environment(extra: dict[str, str]) -> dict[str, str]:
    """This process's environment with ``extra`` on top; children may write bytecode, or every start compiles anew."""
    env = {**os.environ, **extra}
    env.pop("PYTHONDONTWRITEBYTECODE", None)
    return env
