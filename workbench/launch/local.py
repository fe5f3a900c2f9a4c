"""Launching on this host: through the fork server where that is safe, and process by process elsewhere."""

from __future__ import annotations

import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import Self

from workbench.launch.forkserver import ForkLauncher
from workbench.launch.launcher import (
    LaunchError,
    OnThisHost,
    Running,
    child_environment,
    count_running,
    signal_group,
    stop,
)
from workbench.processes import ProcessSpec


def open_launcher() -> ForkLauncher | SubprocessLauncher:
    """The quickest launcher of this platform: fork is only safe, and children only die with us, on Linux."""
    return ForkLauncher() if sys.platform == "linux" else SubprocessLauncher()


class SubprocessLauncher(OnThisHost):
    """Starts every process from scratch, for platforms where a fork server is not safe; may be shared by threads."""

    def __init__(self) -> None:
        self._started: dict[Running, subprocess.Popen[bytes]] = {}
        self._lock = threading.Lock()

    def wait_ready(self) -> None:
        """There is nothing to wait for."""

    def start(self, spec: ProcessSpec, log: Path) -> Running:
        """Start one process with stdout and stderr appended to ``log``. Raises LaunchError."""
        argv = list(spec.argv)
        if spec.argv[1:2] == ("-m",) and spec.argv[2].startswith("spes_core."):
            argv.append("--die-with-parent")
        try:
            with log.open("ab") as output:
                popen = subprocess.Popen(
                    argv,
                    stdin=subprocess.DEVNULL,
                    stdout=output,
                    stderr=output,
                    env=child_environment(spec.env),
                    start_new_session=True,
                )
        except OSError as error:
            raise LaunchError(f"{spec.name} cannot be started: {error}") from error
        process = Running(spec.name, popen.pid)
        process.pid = popen.pid
        with self._lock:
            self._started[process] = popen
        return process

    def signal(self, process: Running, number: int) -> None:
        """Signal the process group of a process; nothing happens when it has ended."""
        self._poll()
        if process.returncode is None and process.pid is not None:
            signal_group(process.pid, number)

    def wait(self, processes: Sequence[Running], timeout_s: float) -> None:
        """Return after ``timeout_s``, or as soon as one more of the processes has ended."""
        running = count_running(processes)
        deadline = time.monotonic() + timeout_s
        while running:
            self._poll()
            left_s = deadline - time.monotonic()
            if left_s <= 0 or count_running(processes) < running:
                return
            time.sleep(min(0.02, left_s))

    def close(self) -> None:
        """End every process."""
        stop(self, list(self._started))

    def _poll(self) -> None:
        with self._lock:
            for process, popen in self._started.items():
                if process.returncode is None and (returncode := popen.poll()) is not None:
                    process.ended_order = 1 + max(known.ended_order for known in self._started)
                    process.returncode = returncode

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
