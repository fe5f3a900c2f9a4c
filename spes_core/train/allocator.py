"""Keep freed memory in the process: a training step frees and takes the same buffers thousands of times.

glibc gives blocks of 32 MiB and more back to the system when they are freed, and takes every page of the next one
anew: 42,000 page faults, one twentieth of the CPU time, in a step at a vocabulary of 50,304.
"""

from __future__ import annotations

import ctypes
import ctypes.util

_TRIM_THRESHOLD, _MMAP_THRESHOLD, _ARENA_MAX = -1, -3, -8
"""Names of settings for mallopt(3)."""


def keep_freed_memory() -> bool:
    """Tell the C library, for the rest of this process; False where it has no such setting. No result changes."""
    return _set({_MMAP_THRESHOLD: 1 << 30, _TRIM_THRESHOLD: 2**31 - 1})


def return_freed_memory() -> bool:
    """The opposite, for a server, whose many threads free what others took: nothing is kept for each of them."""
    return _set({_ARENA_MAX: 2, _MMAP_THRESHOLD: 8 << 20, _TRIM_THRESHOLD: 16 << 20})


def _set(values: dict[int, int]) -> bool:
    mallopt = getattr(ctypes.CDLL(ctypes.util.find_library("c")), "mallopt", None)
    return mallopt is not None and all(mallopt(name, value) == 1 for name, value in values.items())
