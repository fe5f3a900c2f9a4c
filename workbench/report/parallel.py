"""Calls a few functions at once, each in a forked process: drawing and writing hold the interpreter all the time."""

from __future__ import annotations

import multiprocessing
import os
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from typing import Any

_calls: Sequence[Callable[[], Any]] = ()
"""What the forked processes inherit, as closures cannot be sent to them."""


def in_parallel(calls: Sequence[Callable[[], Any]]) -> list[Any]:
    """The results of all calls, in their order; what a call raises is raised.

    One after the other where there is one core, or where another thread runs (a fork could copy a lock that it holds).
    """
    global _calls
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else 1
    workers = min(cores, len(calls), 8)
    if workers < 2 or threading.active_count() > 1:
        return [call() for call in calls]
    _calls = calls
    try:
        with ProcessPoolExecutor(workers, mp_context=multiprocessing.get_context("fork")) as pool:
            return [future.result() for future in [pool.submit(_call, index) for index in range(len(calls))]]
    finally:
        _calls = ()


def _call(index: int) -> Any:
    return _calls[index]()
