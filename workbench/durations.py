"""Durations as a study file writes them."""

from __future__ import annotations

import re


def parse_duration(text: str) -> float:
    """Seconds of "90s", "30min", "2h", "1d" or a plain number of seconds. Raises ValueError."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*(s|m|min|h|d)?", text.strip())
    if not match:
        raise ValueError(f"({text}) must be a duration such as 90s, 30min or 2h")
    return float(match[1]) * {None: 1, "s": 1, "m": 60, "min": 60, "h": 3600, "d": 86400}[match[2]]
