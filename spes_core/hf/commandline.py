"""How the commands of this package end: 0, or one line on stderr and 1 (an unusable file) or 2 (a wrong setting)."""

from __future__ import annotations

import sys
from collections.abc import Callable

from spes_core.errors import ConfigError, SpesError


def status_of(command: Callable[[], None]) -> int:
    """Run a command; its exit status."""
    try:
        command()
    except SpesError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2 if isinstance(error, ConfigError) else 1
    return 0
