"""The controller's side of the fork server (`workbench.launch.spawner`): processes that start in milliseconds."""

from __future__ import annotations

import contextlib
import json
import signal
import socket
import subprocess
import sys
import tempfile
import threading
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from workbench.failures import last_words
from workbench.launch.launcher import LaunchError, OnThisHost, Running, child_environment, count_running
from workbench.processes import ProcessSpec

PRELOADED = (
    "numpy",
    "torch",
    "torch._dynamo",
    "torch.distributed.fsdp",
    "torch.distributed.run",
    "grpc",
    "spes_core.server",
    "spes_core.node",
)
"""What a fork server loads before its first child: the engine, and what torch would load at the first step."""

_READY_TIMEOUT_S = 120.0
_CLOSE_TIMEOUT_S = 10.0
_SERVER_ENVIRONMENT = {
    "OMP_NUM_THREADS": "1",
    "OPENBLAS_NUM_THREADS": "1",
    "MKL_NUM_THREADS": "1",
    "OMP_WAIT_POLICY": "PASSIVE",
    "PYTHONHASHSEED": "0",
    "TOKENIZERS_PARALLELISM": "false",
    "PYTORCH_NVML_BASED_CUDA_CHECK": "1",
}
"""What only counts when a process begins, so that forked children cannot set it. One thread, and looking for a GPU
without opening it, or fork is not safe."""


class ForkLauncher(OnThisHost):
    """Client of the fork server (`workbench.launch.spawner`); may be shared by threads.

    The server starts loading at once in the background. Should it be killed, its children die with it and the next
    `start` begins a new one.
    """

    def __init__(self, preloaded: Sequence[str] = PRELOADED) -> None:
        self._lock = threading.Lock()
        self._preloaded = preloaded
        self._server = _ForkServer(preloaded)

    def wait_ready(self) -> None:
        """Return when the engine is loaded. Raises LaunchError when the fork server cannot start."""
        self._living_server().wait_ready()

    def start(self, spec: ProcessSpec, log: Path) -> Running:
        """Start one process with stdout and stderr appended to ``log``. Raises LaunchError."""
        return self._living_server().start(spec, log)

    def signal(self, process: Running, number: int) -> None:
        """Signal the process group of a process; nothing happens when it has ended."""
        self._server.signal(process, number)

    def wait(self, processes: Sequence[Running], timeout_s: float) -> None:
        """Return after ``timeout_s``, or as soon as one more of the processes has ended."""
        self._server.wait(processes, timeout_s)

    def close(self) -> None:
        """End the fork server and every process that it started."""
        self._server.close()

    @property
    def forks(self) -> bool:
        """Whether the fork server is ready and safe to fork; if not, it executes every command."""
        return self._server.forks

    @property
    def pid(self) -> int:
        """Process id of the fork server."""
        return self._server.pid

    def _living_server(self) -> _ForkServer:
        with self._lock:
            if self._server.dead:
                self._server = _ForkServer(self._preloaded)
            return self._server

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


class _ForkServer:
    """One fork server process and the connection to it."""

    def __init__(self, preloaded: Sequence[str]) -> None:
        self._control, theirs = socket.socketpair()
        self._stderr = tempfile.TemporaryFile()  # noqa: SIM115 (closed by close)
        with theirs:
            self._process = subprocess.Popen(
                (sys.executable, "-m", "workbench.launch.spawner", *preloaded),
                stdin=theirs.fileno(),
                stdout=self._stderr,
                stderr=self._stderr,
                env=child_environment(_SERVER_ENVIRONMENT),
                start_new_session=True,
            )
        self.pid: int = self._process.pid
        self.dead = False
        self._is_ending = self._ready = False
        self.forks = False
        self._changed = threading.Condition()
        self._sending = threading.Lock()
        self._started: dict[int, Running] = {}
        self._refusals: dict[int, str] = {}
        self._ended = 0
        self._follower = threading.Thread(target=self._follow, name="fork-server", daemon=True)
        self._follower.start()

    def wait_ready(self) -> None:
        with self._changed:
            if not self._changed.wait_for(lambda: self._ready or self.dead, _READY_TIMEOUT_S):
                raise LaunchError(f"the fork server is not ready after {_READY_TIMEOUT_S:g} s")
        if not self._ready:
            raise LaunchError(f"the fork server ended while it was loading: {last_words(self._stderr)}")

    def start(self, spec: ProcessSpec, log: Path) -> Running:
        with self._changed:
            process = Running(spec.name, len(self._started))
            self._started[process.id] = process
        env = child_environment(spec.env)
        self._send(do="start", id=process.id, argv=list(spec.argv), env=env, log=str(log.absolute()))
        with self._changed:
            self._changed.wait_for(lambda: process.pid is not None or process.id in self._refusals or self.dead)
        if process.pid is None:
            reason = self._refusals.get(process.id) or f"the fork server ended: {last_words(self._stderr)}"
            raise LaunchError(f"{spec.name} cannot be started: {reason}")
        return process

    def signal(self, process: Running, number: int) -> None:
        if process.returncode is None:
            self._send(do="signal", id=process.id, signal=int(number))

    def wait(self, processes: Sequence[Running], timeout_s: float) -> None:
        with self._changed:
            running = count_running(processes)
            if running:
                self._changed.wait_for(lambda: count_running(processes) < running, timeout_s)

    def close(self) -> None:
        with contextlib.suppress(OSError):  # not connected any more: it is dead already
            self._control.shutdown(socket.SHUT_RDWR)
        if not self._ready:  # it has no children, and would go on loading first
            self._process.kill()
        try:
            self._process.wait(_CLOSE_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._follower.join()
        self._control.close()
        self._stderr.close()

    def _send(self, **message: Any) -> None:
        line = json.dumps(message).encode() + b"\n"
        with self._sending, contextlib.suppress(OSError):  # has it died, the following thread says so
            self._control.sendall(line)

    def _follow(self) -> None:
        """Take in what the server reports until its end (own thread)."""
        with contextlib.suppress(OSError), self._control.makefile("rb") as lines:
            for line in lines:
                with self._changed:
                    self._take(json.loads(line))
                    self._changed.notify_all()
        with self._changed:
            self.dead = self._is_ending = True
            for process in self._started.values():
                if process.returncode is None:
                    self._end(process, -signal.SIGKILL)
            self._changed.notify_all()

    def _take(self, message: dict[str, Any]) -> None:
        match message["event"]:
            case "ready":
                self._ready, self.forks = True, message["forks"]
            case "started":
                self._started[message["id"]].pid = message["pid"]
            case "refused":
                self._refusals[message["id"]] = message["reason"]
            case "ending":
                self._is_ending = True
            case "exited":
                self._end(self._started[message["id"]], message["returncode"])

    def _end(self, process: Running, returncode: int) -> None:
        self._ended += 1
        process.ended_order = self._ended
        process.died_with_launcher = self._is_ending
        process.returncode = returncode
