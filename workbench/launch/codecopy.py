"""The exact code of this controller on another host, before any of it is there: sent as an archive, verified there."""

from __future__ import annotations

import base64
import contextlib
import gzip
import hashlib
import io
import json
import signal
import subprocess
import tarfile
import tempfile
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import IO, Any

from workbench.launch.hostlink import parting_words
from workbench.launch.launcher import LaunchError, signal_group
from workbench.provenance import PACKAGES, ROOT, code_digest

_PACKAGES = ("spes_core", "workbench")
_MARK = "spes-bootstrap "

BOOTSTRAP = r"""
import hashlib, io, json, os, shutil, sys, tarfile
from pathlib import Path
def say(**fields):
    sys.stdout.write("spes-bootstrap " + json.dumps(fields) + "\n")
    sys.stdout.flush()
def digest(root):
    total = hashlib.sha256()
    for package in ("spes_core", "workbench"):
        for path in sorted((root / package).rglob("*.py")):
            content = hashlib.sha256(path.read_bytes()).hexdigest()
            total.update((path.relative_to(root).as_posix() + " " + content + "\n").encode())
    return total.hexdigest()
def version(name):
    from importlib import metadata
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None
def unpack(content, into):
    with tarfile.open(fileobj=io.BytesIO(content), mode="r:gz") as archive:
        for member in archive:
            parts = member.name.split("/")
            if not member.isfile() or ".." in parts or "" in parts:
                raise ValueError("the archive holds " + repr(member.name))
            target = into.joinpath(*parts)
            target.parent.mkdir(parents=True, exist_ok=True)
            target.write_bytes(archive.extractfile(member).read())
def receive(asked, folder):
    content = sys.stdin.buffer.read(asked["bytes"])
    if hashlib.sha256(content).hexdigest() != asked["sha256"]:
        raise ValueError("of the code's %d bytes %d came, or others" % (asked["bytes"], len(content)))
    partial = folder.with_name("%s.%d.partial" % (folder.name, os.getpid()))
    shutil.rmtree(str(partial), ignore_errors=True)
    try:
        unpack(content, partial)
        if digest(partial) != asked["digest"]:
            raise ValueError("the code that was unpacked is not the code that was sent")
        if folder.exists() and digest(folder) != asked["digest"]:
            damaged = folder.with_name(partial.name + ".damaged")
            folder.replace(damaged)
            shutil.rmtree(str(damaged), ignore_errors=True)
        try:
            partial.replace(folder)
        except OSError:
            if digest(folder) != asked["digest"]:
                raise
    finally:
        shutil.rmtree(str(partial), ignore_errors=True)
def main():
    asked = json.loads(sys.stdin.buffer.readline())
    try:
        code = Path(os.path.abspath(os.path.expanduser(asked["work"]))) / "code"
        code.mkdir(parents=True, exist_ok=True)
        if not os.access(str(code), os.W_OK | os.X_OK):
            raise OSError("%s cannot be written to" % code)
        folder = code / asked["digest"]
        there = folder.exists() and digest(folder) == asked["digest"]
        say(there=there, path=str(folder), python="%d.%d.%d" % sys.version_info[:3],
            packages={name: version(name) for name in asked["packages"]})
        if not there and sys.stdin.buffer.read(1) == b"+":
            receive(asked, folder)
            say(done=True)
    except Exception as error:
        say(error="%s: %s" % (type(error).__name__, error))
main()
"""
"""What the interpreter of a host runs before it has our code; for any Python 3.8 or newer, with no package."""
_ONE_LINE = f"import base64; exec(base64.b64decode('{base64.b64encode(BOOTSTRAP.encode()).decode()}'))"
"""The same for every shell: csh takes no quoted line break."""
_END_S = 5.0
_SSH_FAILED, _NOT_RUN = 255, (126, 127)
"""Exit statuses of the ssh program for itself, and of a shell for a command that it cannot run."""


@dataclass(frozen=True, kw_only=True)
class Arrived:
    """What a host says before it runs any of our code, and where that is."""

    path: str
    """Absolute folder of the packages there."""
    was_there: bool
    python: str
    """Version of its interpreter."""
    packages: dict[str, str | None]
    """Versions of its packages; None for one that is not installed."""


def archive() -> bytes:
    """The Python files and the data of both packages as a compressed tar; the same bytes for the same files."""
    packed = io.BytesIO()
    with tarfile.open(fileobj=packed, mode="w", format=tarfile.PAX_FORMAT) as tar:
        for package in _PACKAGES:
            for path in sorted((ROOT / package).rglob("*")):
                if path.is_file() and "__pycache__" not in path.parts:
                    content = path.read_bytes()
                    entry = tarfile.TarInfo(path.relative_to(ROOT).as_posix())
                    entry.size, entry.mode = len(content), 0o644
                    tar.addfile(entry, io.BytesIO(content))
    return gzip.compress(packed.getvalue(), 6, mtime=0)


def deliver(
    host: str,
    connector: Callable[[Sequence[str]], Sequence[str]],
    python: str,
    work: str,
    *,
    is_wanted: Callable[[Arrived], bool] = lambda _: True,
    content: bytes | None = None,
    by_hand: str = "",
    on_start: Callable[[subprocess.Popen[bytes]], None] = lambda _: None,
    timeout_s: float = 300.0,
) -> Arrived:
    """Put our code below ``work`` on a host, unless it is there and right.

    ``connector`` makes of a command one that runs it there. Without ``is_wanted`` of what the host said, nothing is
    sent. ``content``: the `archive`, to make it once for many hosts. ``by_hand``: what a user can try where ssh fails.
    ``on_start`` gets the running command: whoever kills it makes this end. Raises LaunchError, with ssh's last words.
    """
    content = archive() if content is None else content
    asked = {
        "work": work,
        "digest": code_digest(),
        "packages": PACKAGES,
        "bytes": len(content),
        "sha256": hashlib.sha256(content).hexdigest(),
    }
    with tempfile.TemporaryFile() as stderr, _running(host, connector((python, "-c", _ONE_LINE)), stderr) as process:
        timer = threading.Timer(timeout_s, signal_group, (process.pid, signal.SIGKILL))
        timer.start()
        on_start(process)
        try:
            return _converse(process, asked, content, is_wanted)
        except _Ended as end:
            why = f"no answer came within {timeout_s:g} s" if timer.finished.is_set() else _why(process, stderr, end)
            raise LaunchError(f"host {host}: {why}{_advice(process.returncode, by_hand, python)}") from end
        except ValueError as error:
            raise LaunchError(f"host {host}: {error}") from error
        except KeyError as error:
            raise LaunchError(f"host {host}: its answer lacks {error}") from error
        finally:
            timer.cancel()


@contextlib.contextmanager
def _running(host: str, command: Sequence[str], stderr: IO[bytes]) -> Iterator[subprocess.Popen[bytes]]:
    """A command with pipes, in a session of its own; at the end it is ended."""
    try:
        process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=stderr, start_new_session=True
        )
    except OSError as error:
        raise LaunchError(f"host {host}: {command[0]} cannot be started: {error}") from error
    try:
        yield process
    finally:
        if process.poll() is None:
            signal_group(process.pid, signal.SIGKILL)
        process.wait()
        for pipe in (process.stdin, process.stdout):
            assert pipe is not None
            with contextlib.suppress(BrokenPipeError):
                pipe.close()


class _Ended(Exception):
    """The command has ended, or will say nothing more; ``noise`` is what it wrote that was not the bootstrap's."""

    def __init__(self, noise: bytes) -> None:
        super().__init__()
        self.noise = noise


def _why(process: subprocess.Popen[bytes], stderr: IO[bytes], end: _Ended) -> str:
    """Why the command ended, in its own words where it has some."""
    with contextlib.suppress(subprocess.TimeoutExpired):
        process.wait(_END_S)
    return parting_words(stderr, end.noise) or f"its connection ended, exit status {process.returncode}"


def _advice(status: int | None, by_hand: str, python: str) -> str:
    """What to do about a command that has failed before any Python was there."""
    if status == _SSH_FAILED and by_hand:
        return f"; try by hand: {by_hand}"
    if status in _NOT_RUN:
        return f"; python ({python}) must be an interpreter there"
    return ""


def _converse(
    process: subprocess.Popen[bytes], asked: dict[str, Any], content: bytes, is_wanted: Callable[[Arrived], bool]
) -> Arrived:
    _say(process, json.dumps(asked).encode() + b"\n")
    said = _listen(process)
    arrived = Arrived(path=said["path"], was_there=said["there"], python=said["python"], packages=said["packages"])
    if not arrived.was_there and is_wanted(arrived):
        _say(process, b"+" + content)
        _listen(process)
    return arrived


def _say(process: subprocess.Popen[bytes], words: bytes) -> None:
    assert process.stdin is not None
    with contextlib.suppress(OSError):  # has the command ended, what it said last tells why
        process.stdin.write(words)
        process.stdin.flush()


def _listen(process: subprocess.Popen[bytes]) -> dict[str, Any]:
    """What the bootstrap says next, past what a login shell may print. Raises _Ended; ValueError with its reason."""
    assert process.stdout is not None
    noise = b""
    for line in process.stdout:
        before, mark, words = line.partition(_MARK.encode())
        if mark:
            said: dict[str, Any] = json.loads(words)
            if "error" in said:
                raise ValueError(said["error"])
            return said
        noise = (noise + before)[-4096:]
    raise _Ended(noise)
