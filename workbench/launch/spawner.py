"""The fork server: one single-threaded process that has torch and the engine loaded and forks a child per request.

Importing torch costs seconds of processor time in every process; a forked child has it at once. The controller
(`workbench.launch.forkserver`) starts one spawner per study as ``python -m workbench.launch.spawner MODULE...``, with
the modules to load and a socket as its stdin, and both sides write JSON lines:

    to the spawner      {"do": "start", "id", "argv", "env", "log"}, {"do": "signal", "id", "signal"}
    from the spawner    {"event": "ready", "forks"}, {"event": "started", "id", "pid"},
                        {"event": "refused", "id", "reason"}, {"event": "exited", "id", "returncode"},
                        {"event": "ending"}: what exits from now on is killed by the spawner's own end

A child is the leader of its own session and process group. The end of the control connection means that the
controller is dead, however it died: the spawner then kills every group and ends. Children ask the kernel to be killed
when the spawner dies, and the spawner adopts (as subreaper) what its children leave behind, and kills it.

Nothing here may start a thread, compute with torch or open a gRPC channel: their state does not survive a fork.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import importlib
import json
import os
import runpy
import selectors
import signal
import socket
import sys
import time
import traceback
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NoReturn

import psutil

from spes_core.processlife import die_with_parent
from workbench.launch.launcher import signal_group

_KILL_DEADLINE_S = 5.0
_SET_CHILD_SUBREAPER = 36


def main() -> None:
    """Serve until the controller goes; in a forked child, run the module that was asked for."""
    control = _take_control_socket()
    _adopt_orphans()
    preload(sys.argv[1:])
    child = Spawner(control).serve()
    if child is not None:
        run_module(child.argv)


def preload(modules: Sequence[str]) -> None:
    """Import the modules that can be imported: a child that needs another one fails with a traceback of its own."""
    for name in modules:
        with contextlib.suppress(Exception):
            importlib.import_module(name)
    gc.collect()
    gc.freeze()


def runs_in_fork(argv: Sequence[str]) -> bool:
    """Whether the command is ``python -m MODULE`` of this interpreter; any other is executed."""
    return len(argv) >= 3 and argv[0] == sys.executable and argv[1] == "-m"


def run_module(argv: Sequence[str]) -> NoReturn:
    """Run ``python -m MODULE ...`` in this process, as its main module, and end.

    Nothing is torn down at the end but the output streams: freeing what was loaded before the fork would first copy
    it, and take longer than a short training run.
    """
    sys.argv = [argv[2], *argv[3:]]
    sys.modules.pop(argv[2], None)
    status = 1
    try:
        runpy.run_module(argv[2], run_name="__main__", alter_sys=True)
        status = 0
    except SystemExit as end:
        status = end.code if isinstance(end.code, int) else int(end.code is not None)
        if isinstance(end.code, str):
            print(end.code, file=sys.stderr)
    except BaseException:
        traceback.print_exc()
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
    os._exit(status & 0xFF)


@dataclass(frozen=True, kw_only=True)
class Start:
    """A request for one process."""

    id: int
    argv: list[str]
    env: dict[str, str]
    """Its whole environment."""
    log: str
    """File that takes stdout and stderr, appended to."""


class Spawner:
    """Owns the children and the control connection."""

    def __init__(self, control: socket.socket) -> None:
        self._control = control
        self._pending = b""
        self._pids: dict[int, int] = {}
        self._may_fork = psutil.Process().num_threads() == 1
        self._wake_read, self._wake_write = socket.socketpair()
        self._wake_write.setblocking(False)
        self._send(event="ready", forks=self._may_fork)

    def serve(self) -> Start | None:
        """Answer requests until the controller goes. Returns None then, and in a forked child what it shall run."""
        signal.signal(signal.SIGTERM, _exit)
        signal.signal(signal.SIGCHLD, _wake)
        signal.set_wakeup_fd(self._wake_write.fileno())
        selector = selectors.DefaultSelector()
        selector.register(self._control, selectors.EVENT_READ)
        selector.register(self._wake_read, selectors.EVENT_READ)
        owner = os.getpid()
        try:
            while True:
                for key, _ in selector.select():
                    if key.fileobj is self._wake_read:
                        self._wake_read.recv(4096)
                        self._reap()
                        continue
                    requests = self._receive()
                    if requests is None:
                        return None
                    for request in requests:
                        if (child := self._answer(request)) is not None:
                            selector.close()
                            return child
        finally:
            if os.getpid() == owner:
                self._send(event="ending")
                self._kill_all()

    def _receive(self) -> list[dict[str, Any]] | None:
        """Whole requests that have arrived; None when the controller has gone."""
        try:
            data = self._control.recv(1 << 16)
        except ConnectionError:
            data = b""
        if not data:
            return None
        *lines, self._pending = (self._pending + data).split(b"\n")
        return [json.loads(line) for line in lines]

    def _send(self, **message: Any) -> None:
        with contextlib.suppress(ConnectionError):  # has the controller gone, the next receive ends everything
            self._control.sendall(json.dumps(message).encode() + b"\n")

    def _answer(self, request: dict[str, Any]) -> Start | None:
        """Carry out one request. Returns only in a forked child what it shall run."""
        if request["do"] == "signal":
            if (pid := self._pids.get(request["id"])) is not None:
                signal_group(pid, request["signal"])
            return None
        start = Start(**{name: request[name] for name in ("id", "argv", "env", "log")})
        spawner = os.getpid()
        try:
            log, pid = _fork_with_log(start.log, spawner)
        except OSError as error:
            self._send(event="refused", id=start.id, reason=str(error))
            return None
        if pid == 0:
            self._become_child(start, log, spawner)
            return start
        os.close(log)
        self._pids[start.id] = pid
        self._send(event="started", id=start.id, pid=pid)
        return None

    def _become_child(self, start: Start, log: int, spawner: int) -> None:
        """Turn the fork into an ordinary process of its own session; executes commands that are not forked."""
        try:
            os.setsid()
            die_with_parent()
            if os.getppid() != spawner:
                os._exit(1)
            self._forget_spawner()
            _redirect(log)
            os.environ.clear()
            os.environ.update(start.env)
            if not (self._may_fork and runs_in_fork(start.argv)):
                os.execvpe(start.argv[0], start.argv, start.env)
            for stream in (sys.stdout, sys.stderr):
                stream.reconfigure(  # type: ignore[union-attr]
                    encoding="utf-8", errors="backslashreplace", line_buffering=True
                )
        except BaseException as error:
            os.write(2, f"error: {start.argv[0]} cannot be started: {error}\n".encode())
            os._exit(127)

    def _forget_spawner(self) -> None:
        signal.set_wakeup_fd(-1)
        for number in (signal.SIGTERM, signal.SIGCHLD):
            signal.signal(number, signal.SIG_DFL)
        signal.signal(signal.SIGINT, signal.default_int_handler)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, (signal.SIGTERM, signal.SIGCHLD))  # others stay as they were
        for connection in (self._control, self._wake_read, self._wake_write):
            connection.close()

    def _reap(self) -> None:
        """Collect the children that have ended, oldest death first as far as the kernel tells."""
        started = {pid: id for id, pid in self._pids.items()}
        ended = False
        while (info := _next_ended()) is not None:
            pid = info.si_pid
            if pid in started:
                ended = True
                signal_group(pid, signal.SIGKILL)  # before the pid is free: what it left in its group goes with it
                del self._pids[started[pid]]
            _, status = os.waitpid(pid, 0)
            if pid in started:
                returncode = os.waitstatus_to_exitcode(status)
                self._send(event="exited", id=started[pid], returncode=returncode)
        if ended:
            self._kill_adopted()

    def _kill_adopted(self) -> None:
        """Kill the processes that were left to the spawner by children that ended."""
        for process in psutil.Process().children():
            if process.pid not in self._pids.values():
                signal_group(process.pid, signal.SIGKILL)

    def _kill_all(self) -> None:
        deadline = time.monotonic() + _KILL_DEADLINE_S
        while time.monotonic() < deadline:
            for pid in self._pids.values():
                signal_group(pid, signal.SIGKILL)
            self._reap()
            self._kill_adopted()
            if not psutil.Process().children():
                return
            time.sleep(0.02)


def _next_ended() -> Any:
    """A child that has ended and is not yet collected, or None."""
    try:
        return os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)
    except ChildProcessError:
        return None


def _fork_with_log(path: str, spawner: int) -> tuple[int, int]:
    """Fork with a log file open for appending: (its descriptor, pid or 0 in the child). Raises OSError.

    In the child signals stay blocked until it has handlers of its own.
    """
    log = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o666)
    signal.pthread_sigmask(signal.SIG_BLOCK, (signal.SIGTERM, signal.SIGCHLD))
    try:
        pid = os.fork()
    except OSError:
        os.close(log)
        raise
    finally:
        if os.getpid() == spawner:
            signal.pthread_sigmask(signal.SIG_UNBLOCK, (signal.SIGTERM, signal.SIGCHLD))
    return log, pid


def _redirect(log: int) -> None:
    null = os.open(os.devnull, os.O_RDONLY)
    for source, target in ((null, 0), (log, 1), (log, 2)):
        os.dup2(source, target)
    os.close(null)
    os.close(log)


def _take_control_socket() -> socket.socket:
    """The socket that came as stdin; stdin becomes /dev/null."""
    control = socket.socket(fileno=os.dup(0))
    null = os.open(os.devnull, os.O_RDONLY)
    os.dup2(null, 0)
    os.close(null)
    return control


def _adopt_orphans() -> None:
    ctypes.CDLL(None, use_errno=True).prctl(_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


def _exit(number: int, frame: object) -> None:
    raise SystemExit(128 + number)


def _wake(number: int, frame: object) -> None:
    """Nothing to do: the signal's byte in the wake-up socket ends the select."""


if __name__ == "__main__":
    main()
