"""The controller's connection to the agent on one host, through whatever command reaches it."""

from __future__ import annotations

import contextlib
import os
import queue
import secrets
import signal
import subprocess
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import IO, Any

from spes_core.filedigest import file_digest
from workbench.launch import wire
from workbench.launch.launcher import LaunchError, signal_group

PING_S = 5.0
SILENCE_S = 60.0
"""An agent that says nothing for so long, not even to a ping, is given up."""
ANSWER_TIMEOUT_S = 60.0
_CLOSE_S = 10.0
_LOOK_S = 0.5
_DIGEST_TIMEOUT_S = 3600.0
_CONSEQUENCES = ("srun: Force Terminated", "srun: Terminating StepId", "srun: Job step aborted")
"""How lines of srun begin that follow from the one before them."""
OnReport = Callable[["HostLink", wire.Message], None]


class HostLink:
    """One running connector command; may be shared by threads. Once it is ``lost`` it stays so."""

    def __init__(
        self,
        name: str,
        connector: Sequence[str],
        on_report: OnReport,
        on_lost: Callable[[HostLink], None],
        *,
        ping_s: float = PING_S,
        silence_s: float = SILENCE_S,
    ) -> None:
        """``connector`` is a command whose stdin and stdout are those of an agent on the host.

        ``on_report`` gets each report of the agent, ``on_lost`` is called once when the connection has ended; both in
        the link's own thread. Raises LaunchError when the command cannot be started.
        """
        self._ping_s, self._silence_s = ping_s, silence_s
        self.name, self._on_report, self._on_lost = name, on_report, on_lost
        self._stderr = tempfile.TemporaryFile()  # noqa: SIM115 (closed by close)
        try:
            self._process = subprocess.Popen(
                connector,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=self._stderr,
                start_new_session=True,  # Ctrl-C is for the controller, which ends its hosts in order
                bufsize=0,
            )
        except OSError as error:
            self._stderr.close()
            raise LaunchError(f"host {name}: {connector[0]} cannot be started: {error}") from error
        self.lost = ""
        """Why the connection has ended; "" while it has not."""
        self._is_closing, self._gave_up = False, ""
        self._changed = threading.Condition()
        self._outgoing: queue.SimpleQueue[bytes | None] = queue.SimpleQueue()
        self._asked, self._waiting, self._answers = 0, set[int](), dict[int, dict[str, Any]]()
        self._closed, self._heard_at_s = threading.Event(), time.monotonic()
        threading.Thread(target=self._write, name=f"to {name}", daemon=True).start()
        self._reader = threading.Thread(target=self._read, name=f"host {name}", daemon=True)
        self._reader.start()
        threading.Thread(target=self._ping, name=f"ping {name}", daemon=True).start()

    def hand_over(self, on_report: OnReport, on_lost: Callable[[HostLink], None]) -> None:
        """From now on these are called; whoever takes over a connection that is ``lost`` is not told any more."""
        self._on_report, self._on_lost = on_report, on_lost

    def ask(
        self,
        do: str,
        body: bytes = b"",
        *,
        timeout_s: float = ANSWER_TIMEOUT_S,
        is_stopped: Callable[[], bool] = lambda: False,
        **fields: Any,
    ) -> dict[str, Any]:
        """The agent's answer to a request, unless the waiting ``is_stopped``. Raises LaunchError, naming the host."""
        number, deadline_s, why = self._send(do, body, fields, is_waited_for=True), time.monotonic() + timeout_s, ""
        with self._changed:
            while not why and not self._changed.wait_for(lambda: number in self._answers or self.lost, _LOOK_S):
                if is_stopped():
                    why = f"stopped before the end of {do!r}"
                elif time.monotonic() > deadline_s:
                    why = f"no answer to {do!r} came within {timeout_s:g} s"
            answer = self._answers.pop(number, None)
            self._waiting.discard(number)
        if answer is None:
            raise LaunchError(f"host {self.name}: {why or self.lost}")
        if "error" in answer:
            raise LaunchError(f"host {self.name}: {answer['error']}")
        return answer

    def tell(self, do: str, **fields: Any) -> None:
        """Make a request of which nobody waits for the answer."""
        self._send(do, b"", fields, is_waited_for=False)

    def put(self, path: str, content: bytes, mode: int = 0o644) -> None:
        """Write a file of the host; readers find it whole or not at all."""
        partial = _partial(path)
        for start in range(0, max(len(content), 1), wire.CHUNK_BYTES):
            body = content[start : start + wire.CHUNK_BYTES]
            self.ask("put", body, path=partial, offset=start, mode=mode)
        self.ask("rename", path=partial, to=path)

    def put_file(self, source: Path, path: str, is_stopped: Callable[[], bool] = lambda: False) -> None:
        """Copy a file to the host, unless it is there with the same bytes. Raises LaunchError if others arrive."""
        digest = file_digest(source)
        if self._digest(path) == digest:
            return
        partial = _partial(path)
        self._send_file(source, partial, is_stopped)
        self.ask("rename", path=partial, to=path)
        if self._digest(path) != digest:
            raise LaunchError(f"host {self.name}: {path} has other bytes there than {source}; look after its disk")

    def _digest(self, path: str) -> str | None:
        """SHA-256 of a file there, which the host remembers; None for none."""
        found: str | None = self.ask("digest", path=path, timeout_s=_DIGEST_TIMEOUT_S)["sha256"]
        return found

    def _send_file(self, source: Path, path: str, is_stopped: Callable[[], bool]) -> None:
        start = 0
        with source.open("rb") as file:
            while (body := file.read(wire.CHUNK_BYTES)) or start == 0:
                self.ask("put", body, path=path, offset=start, is_stopped=is_stopped)
                start += len(body)
                if not body:
                    return

    def put_folder(self, source: Path, path: str, is_stopped: Callable[[], bool] = lambda: False) -> None:
        """Copy the files of a folder to the host, but for those that are there."""
        for file in sorted(source.rglob("*")):
            if file.is_file():
                self.put_file(file, f"{path}/{file.relative_to(source).as_posix()}", is_stopped)

    def close(self) -> None:
        """End the agent, and with it all that it has started."""
        self._is_closing = True
        self._closed.set()
        self._outgoing.put(None)
        try:
            self._process.wait(_CLOSE_S)
        except subprocess.TimeoutExpired:
            self._kill()
            self._process.wait()
        self._reader.join(_CLOSE_S)
        self._stderr.close()

    def _kill(self) -> None:
        """End the connector, and what it has started here."""
        if self._process.poll() is None:
            signal_group(self._process.pid, signal.SIGKILL)

    def _send(self, do: str, body: bytes, fields: dict[str, Any], *, is_waited_for: bool) -> int:
        with self._changed:
            self._asked += 1
            number = self._asked
            if is_waited_for:
                self._waiting.add(number)
        self._outgoing.put(wire.pack({"do": do, "id": number, **fields}, body))
        return number

    def _write(self) -> None:
        """Hand on what is to be sent: nobody else waits for a host that does not read (own thread)."""
        assert self._process.stdin is not None
        with contextlib.suppress(OSError):  # has the connection ended, the reading thread says so
            while (message := self._outgoing.get()) is not None:
                left = memoryview(message)
                while left:
                    left = left[self._process.stdin.write(left) :]
        with contextlib.suppress(OSError):
            self._process.stdin.close()

    def _read(self) -> None:
        """Take in what the agent says until its end (own thread)."""
        why, noise = "", b""
        assert self._process.stdout is not None
        try:
            with os.fdopen(os.dup(self._process.stdout.fileno()), "rb") as stream:
                noise = wire.skip_noise(stream)
                while (message := wire.read(stream)) is not None:
                    self._heard_at_s = time.monotonic()
                    self._take(message)
        except wire.WireError as error:
            why = f"what came is not of an agent: {error}"
        except OSError as error:
            why = f"what it sent cannot be stored here: {error}"
        except Exception as error:
            why = f"what came is not of an agent: {error!r}"
        if why:
            self._kill()
        self._process.wait()
        is_expected = self._is_closing
        if not is_expected:
            ended = f"the connection ended, exit status {self._process.returncode}"
            why = why or self._gave_up or parting_words(self._stderr, noise) or ended
        with self._changed:
            self.lost = why or "the connection was closed"
            self._changed.notify_all()
        self._closed.set()
        self._outgoing.put(None)
        if not is_expected:
            self._on_lost(self)

    def _take(self, message: wire.Message) -> None:
        if message.header.get("event") != "answer":
            self._on_report(self, message)
            return
        with self._changed:
            if (number := message.header["id"]) in self._waiting:
                self._answers[number] = message.header
                self._changed.notify_all()

    def _ping(self) -> None:
        """Keep the agent's lease, and notice an agent that has become silent (own thread)."""
        while not self._closed.wait(self._ping_s):
            self.tell("ping")
            silent_s = time.monotonic() - self._heard_at_s
            if silent_s > self._silence_s:
                self._gave_up = f"it has said nothing for {silent_s:.0f} s"
                self._kill()


def _partial(path: str) -> str:
    """A name for a file that is not whole yet, which no other copy uses."""
    return f"{path}.{secrets.token_hex(4)}.partial"


def parting_words(stderr: IO[bytes], noise: bytes = b"") -> str:
    """What a command that has ended said last: ssh gives its reason on the line before its last one, srun
    before those that only follow from it.

    ``noise`` is what it has written to stdout: there a shell says that an account may not log in. "" for silence.
    """
    stderr.seek(0)
    said = (stderr.read() or noise)[-4096:].decode("utf-8", "replace")
    lines = [line.strip() for line in said.splitlines() if any(letter.isalnum() for letter in line)]
    lines = [line for line in lines if not line.startswith(_CONSEQUENCES)] or lines
    return "; ".join(lines[-1:] if "Traceback (most recent call last)" in said else lines[-2:])
