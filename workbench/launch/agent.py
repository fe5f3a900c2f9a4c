"""The agent on a host: `python -m workbench.launch.agent --work DIR`, reached through ssh or srun, on pipes.

It starts the processes of trials there (through the fork server, as on the controller's own machine), keeps their
folders under DIR, and sends back what they write. After its greeting, requests and reports are messages of
`workbench.launch.wire`:

    request    {"do": NAME, "id": N, ...}               each is answered once, "ping" out of turn with the clock here
    answer     {"event": "answer", "id": N, ...}        with "error" where it failed
    reports    {"event": "exited", "process", "returncode", "died_with_launcher", "killed_for_memory"}
               {"event": "memory", "held"} with [process, bytes] of each, after "measure"
               {"event": "file", "folder", "path", "offset"} with the bytes that are new there

It ends, and with it all that it has started, when its stdin ends or when nothing came for ``--lease`` seconds: so no
process outlives the controller, its host, or the link to it. Only paths under DIR are read or written.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import platform
import queue
import shutil
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path, PurePosixPath
from typing import Any, BinaryIO, NoReturn

from spes_core import snapshots
from spes_core.config import from_dict
from spes_core.errors import SpesError
from spes_core.filedigest import file_digest
from spes_core.snapshots import ResumePoint
from workbench.launch import wire
from workbench.launch.forkserver import ForkLauncher
from workbench.launch.launcher import Running
from workbench.launch.ports import Answering, call, free_port, interface_of
from workbench.machine import available_memory_bytes, oom_kills, resident_bytes
from workbench.processes import ProcessSpec
from workbench.provenance import PACKAGES, code_digest, hardware, package_version
from workbench.trialfolder import cut_back, empty

_FOLLOW_S = 0.25
_FOLLOWED = ("events", "logs")
"""Folders of a trial whose files are sent while they grow."""
_AT_THE_END = (*_FOLLOWED, "weights")
"""Those that are sent whole when the processes have ended."""
Reply = dict[str, Any]


class Agent:
    """Answers requests in the order in which they come; two threads report."""

    def __init__(self, work: Path, incoming: BinaryIO, outgoing: BinaryIO) -> None:
        self._work, self._incoming, self._outgoing = work, incoming, outgoing
        self._sending, self._following = threading.Lock(), threading.Lock()
        self._launcher = ForkLauncher()
        self._processes: dict[int, Running] = {}
        self._kills: dict[int, int] = {}
        """How many processes the kernel had killed for memory when each of ours began."""
        self._sent: dict[str, dict[str, int]] = {}
        """By trial folder: how many bytes of each file the controller has."""
        self._answering: list[Answering] = []
        self._unnamed: set[Path] = set()
        """Files that are being put, and are not whole yet."""
        self._heard_at_s = time.monotonic()
        self._requests: queue.SimpleQueue[wire.Message] = queue.SimpleQueue()

    def serve(self, lease_s: float) -> NoReturn:
        """Answer until the controller goes, however it goes; leaves no process."""
        self._outgoing.write(wire.GREETING)
        self._outgoing.flush()
        for target in (self._receive, self._report):
            threading.Thread(target=target, daemon=True).start()
        threading.Thread(target=self._watch_lease, args=(lease_s,), daemon=True).start()
        while True:
            self._send(self._answer(self._requests.get()))

    def _receive(self) -> None:
        """Take in requests, also while one is being carried out, until the controller goes (own thread)."""
        try:
            while (message := wire.read(self._incoming)) is not None:
                self._heard_at_s = time.monotonic()
                if message.header.get("do") == "ping":  # at once, whatever is being carried out
                    self._send({"event": "answer", "id": message.header.get("id"), "time_s": time.time()})
                else:
                    self._requests.put(message)
        except wire.WireError as error:
            print(f"error: the controller is not understood: {error}", file=sys.stderr, flush=True)
        self._end()

    def _answer(self, message: wire.Message) -> Reply:
        header = message.header
        reply: Reply = {"event": "answer", "id": header.get("id")}
        request: Callable[..., Reply | None] | None = getattr(self, f"do_{header.get('do')}", None)
        if request is None:
            return {**reply, "error": f"it knows no request {header.get('do')!r}"}
        fields = {name: value for name, value in header.items() if name not in ("do", "id", "bytes")}
        try:
            return {**reply, **((request(**fields, body=message.body) if message.body else request(**fields)) or {})}
        except (SpesError, OSError, ValueError, TypeError) as error:
            return {**reply, "error": str(error) or type(error).__name__}

    # Requests

    def do_facts(self) -> Reply:
        """What a preflight compares, and where things are; sizes in bytes."""
        self._work.mkdir(parents=True, exist_ok=True)
        return {
            "work": str(self._work),
            "python": sys.executable,
            "python_version": platform.python_version(),
            "packages": {name: package_version(name) for name in PACKAGES},
            "code_digest": code_digest(),
            "package": str(Path(snapshots.__file__).parent),
            "free_bytes": shutil.disk_usage(self._work).free,
            "trials_bytes": sum(path.stat().st_size for path in (self._work / "trials").rglob("*") if path.is_file()),
            "free_memory_bytes": available_memory_bytes(),
            "host": socket.gethostname(),
            **hardware(),
        }

    def do_ready(self) -> None:
        """Return when processes start without delay."""
        self._launcher.wait_ready()

    def do_has(self, path: str) -> Reply:
        """Whether a file or folder is there."""
        return {"there": self._inside(path).exists()}

    def do_digest(self, path: str) -> Reply:
        """SHA-256 of a file, read once for as long as the file stays as it is; None for none."""
        target = self._inside(path)
        return {"sha256": file_digest(target, self._work / "digests") if target.is_file() else None}

    def do_put(self, path: str, offset: int = 0, mode: int = 0o644, body: bytes = b"") -> None:
        """Write bytes of a file at a place in it; at 0 the file is new. What gets no other name goes with the agent."""
        target = self._inside(path)
        target.parent.mkdir(parents=True, exist_ok=True)
        if offset == 0:
            target.unlink(missing_ok=True)
            self._unnamed.add(target)
        file = os.open(target, os.O_WRONLY | os.O_CREAT, mode)
        try:
            if os.pwrite(file, body, offset) < len(body):
                raise OSError(f"{target} does not take all its bytes; free some space")
        finally:
            os.close(file)

    def do_rename(self, path: str, to: str) -> None:
        """Give a file that is complete its name."""
        self._inside(path).replace(self._inside(to))
        self._unnamed.discard(self._inside(path))

    def do_stored(self, folder: str, config: dict[str, Any]) -> Reply:
        """The steps that each participant of a run has stored on this host, with the sizes of its event file then."""
        found = snapshots.all_stored(from_dict(config), self._inside(folder))
        return {"stored": {name: list(steps.items()) for name, steps in found.items()}}

    def do_trial(self, folder: str, points: dict[str, list[int]]) -> None:
        """Prepare a trial's folder: cut back to where participants go on, or emptied where none does."""
        path = self._inside(folder)
        path.mkdir(parents=True, exist_ok=True)
        if any(step for step, _ in points.values()):
            cut_back(path, {name: ResumePoint(*point) for name, point in points.items()})
        else:
            empty(path)
        for name in ("events", "logs"):
            (path / name).mkdir(exist_ok=True)

    def do_follow(self, folder: str, have: dict[str, int]) -> None:
        """Send what is new in a trial's folder from now on, beyond what the controller has."""
        self._inside(folder)
        with self._following:
            self._sent[folder] = dict(have)

    def do_flush(self, folder: str) -> None:
        """Send all that the folder has for others, and follow it no longer."""
        with self._following:
            if folder in self._sent:
                self._send_news(folder, _AT_THE_END)
                del self._sent[folder]

    def do_remove(self, folder: str) -> None:
        """Remove a trial's folder."""
        shutil.rmtree(self._inside(folder), ignore_errors=True)

    def do_start(self, process: int, name: str, argv: list[str], env: dict[str, str], log: str) -> Reply:
        """Start a process."""
        self._kills[process] = oom_kills()
        running = self._launcher.start(ProcessSpec(name=name, argv=tuple(argv), env=env), self._inside(log))
        self._processes[process] = running
        return {"pid": running.pid}

    def do_signal(self, process: int, signal: int) -> None:
        """Signal a process's group."""
        if (running := self._processes.get(process)) is not None:
            self._launcher.signal(running, signal)

    def do_measure(self, processes: list[int]) -> None:
        """Report the memory that each of some processes holds, with what it started, if it still runs."""
        running = {number: self._processes.get(number) for number in processes}
        pids = {number: process.pid for number, process in running.items() if process and process.pid is not None}
        self._send({"event": "memory", "held": [[number, resident_bytes([pid])] for number, pid in pids.items()]})

    def do_interface(self, addresses: list[str]) -> Reply:
        """The network interface that has the first possible of some names or addresses, and its address."""
        name, address = interface_of(addresses)
        return {"interface": name, "address": address}

    def do_free_port(self, address: str, count: int = 1) -> Reply:
        """A port of this host that nothing listens on, nor on the following ones."""
        return {"port": free_port(address, count)}

    def do_listen(self, address: str, port: int, nonce: str, seconds: float) -> None:
        """Answer calls at a port for some seconds, for a preflight."""
        self._answering.append(Answering(address, port, nonce, seconds))

    def do_hush(self) -> None:
        """Answer calls no longer."""
        while self._answering:
            self._answering.pop().close()

    def do_call(self, address: str, port: int, nonce: str, seconds: float) -> None:
        """Call a port that another agent answers at."""
        call(address, port, nonce, seconds)

    # Reports

    def _report(self) -> None:
        """Tell which processes have ended and what files have grown (own thread)."""
        try:
            self._report_for_ever()
        except Exception as error:
            print(f"error: the agent cannot report: {error!r}", file=sys.stderr, flush=True)
            self._end()

    def _report_for_ever(self) -> NoReturn:
        while True:
            running = [process for process in list(self._processes.values()) if process.returncode is None]
            self._launcher.wait(running, _FOLLOW_S) if running else time.sleep(_FOLLOW_S)
            # Looked at before the files: what a process has said comes before the news of its end.
            ended = [(n, process) for n, process in list(self._processes.items()) if process.returncode is not None]
            with self._following:
                for folder in self._sent:
                    self._send_news(folder, _FOLLOWED)
            for number, process in ended:
                del self._processes[number]
                self._send({
                    "event": "exited",
                    "process": number,
                    "returncode": process.returncode,
                    "died_with_launcher": process.died_with_launcher,
                    "killed_for_memory": oom_kills() > self._kills.pop(number),
                })  # fmt: skip

    def _send_news(self, folder: str, parts: tuple[str, ...]) -> None:
        sent = self._sent[folder]
        for path in _files(self._inside(folder), parts):
            name = path.relative_to(self._inside(folder)).as_posix()
            try:
                size, known = path.stat().st_size, sent.get(name)
            except FileNotFoundError:
                continue
            start = 0 if known is None or size < known else known
            if known is not None and size == known:
                continue
            with path.open("rb") as file:
                file.seek(start)
                while start == 0 or start < size:
                    body = file.read(min(wire.CHUNK_BYTES, size - start))
                    self._send({"event": "file", "folder": folder, "path": name, "offset": start}, body)
                    start += len(body)
                    if not body:
                        break
            sent[name] = start

    def _send(self, header: dict[str, Any], body: bytes = b"") -> None:
        with self._sending:
            try:
                self._outgoing.write(wire.pack(header, body))
                self._outgoing.flush()
            except OSError:
                self._end()

    def _watch_lease(self, lease_s: float) -> None:
        """End when the controller has not been heard of for too long (own thread)."""
        while (left_s := self._heard_at_s + lease_s - time.monotonic()) > 0:
            time.sleep(left_s)
        self._end()

    def _end(self) -> NoReturn:
        """End at once, whatever the other threads do."""
        self._launcher.close()
        for path in self._unnamed:
            with contextlib.suppress(OSError):
                path.unlink()
        os._exit(0)

    def _inside(self, path: str) -> Path:
        """A path below the work folder. Raises ValueError for any other."""
        pure = PurePosixPath(path)
        if pure.is_absolute() or ".." in pure.parts or not pure.parts:
            raise ValueError(f"{path!r} is not below the work folder {self._work}")
        return self._work / pure


def _files(folder: Path, parts: tuple[str, ...]) -> Iterator[Path]:
    for part in parts:
        for path in sorted((folder / part).rglob("*")):
            if path.is_file() and not path.is_symlink() and not path.name.endswith((".tmp", ".partial")):
                yield path


def main() -> NoReturn:
    """Serve until the controller goes."""
    parser = argparse.ArgumentParser(prog="python -m workbench.launch.agent", description=__doc__.splitlines()[0])
    parser.add_argument("--work", type=Path, required=True, help="folder under which everything is kept")
    parser.add_argument("--lease", type=float, default=60.0, help="seconds without a word from the controller")
    parser.add_argument("--ignore", metavar="SIGNAL", help="signal that neither it nor its processes feel, as USR2")
    options = parser.parse_args()
    if options.ignore:  # before there is a thread or a child: all of them inherit it
        signal.pthread_sigmask(signal.SIG_BLOCK, {signal.Signals[f"SIG{options.ignore}"]})
    # What else prints must not come between the messages.
    outgoing = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)
    Agent(options.work.expanduser().absolute(), sys.stdin.buffer, outgoing).serve(options.lease)


if __name__ == "__main__":
    main()
