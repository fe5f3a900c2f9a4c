"""The life of this process: its end with its parent, so that a killed launcher leaves no orphan; its largest memory."""

from __future__ import annotations

import contextlib
import ctypes
import multiprocessing
import os
import resource
import signal
import sys
import threading
import time
from pathlib import Path
from typing import NoReturn

_PR_SET_PDEATHSIG = 1
_POLL_INTERVAL_S = 0.5


def die_with_parent(parent: int | None = None) -> None:
    """From now on this process is killed when its parent ends, however the parent ends.

    On Linux the kernel does it (prctl PR_SET_PDEATHSIG, which fires when the parent's *thread* that started this
    process ends); everywhere a thread also watches the parent's process id, in case the first way does not apply.
    ``parent`` is its process id where the caller knows it, so that a parent that is already gone is noticed too.
    """
    parent = os.getppid() if parent is None else parent
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    threading.Thread(target=_watch, args=(parent,), name="watch-parent", daemon=True).start()


def _watch(parent: int) -> None:
    """End this process once it has been handed to another parent."""
    while os.getppid() == parent:
        time.sleep(_POLL_INTERVAL_S)
    os.kill(os.getpid(), signal.SIGKILL)


def end(status: int) -> NoReturn:
    """End this process with an exit status, without the interpreter's finalisation.

    Threads of gRPC and torch may still be in C++ code when all work is done. Python ends a daemon thread that comes
    back from there during finalisation by unwinding its stack, and C++ then aborts the process ("terminate called
    without an active exception"): a finished node would be reported as one that died. A rank that torchrun has forked
    ends by SystemExit instead: torchrun waits for it to return, and multiprocessing ends it in the same way.
    """
    if multiprocessing.parent_process() is not None:
        sys.exit(status)
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError):
            stream.flush()
    os._exit(status)


def rss_peak_bytes() -> int:
    """Largest resident set of this process so far."""
    status = Path("/proc/self/status")
    if status.exists():
        for line in status.read_text().splitlines():
            if line.startswith("VmHWM:"):
                return int(line.split()[1]) * 1024
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024
