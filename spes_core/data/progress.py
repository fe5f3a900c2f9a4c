"""What a preparation says while it works."""

from __future__ import annotations

import sys
from collections.abc import Callable

Progress = Callable[[str], None]
"""Gets a line of text now and then."""


def terminal_line() -> Progress | None:
    """One line that rewrites itself, when standard error is a terminal."""
    if not sys.stderr.isatty():
        return None
    return lambda message: print(f"\r\x1b[K{message}", end="", file=sys.stderr, flush=True)


def megabytes(num_bytes: int) -> str:
    """ "12.1 MB" (1e6 bytes)."""
    return f"{num_bytes / 1e6:.1f} MB"


def bar(done: int, total: int, width: int = 20) -> str:
    """ "[#####---------------] 25 %"."""
    share = min(1.0, done / max(1, total))
    filled = int(share * width)
    return f"[{'#' * filled}{'-' * (width - filled)}] {share:.0%}"
