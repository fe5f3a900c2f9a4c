"""Writing files that are either absent or whole, whatever happens to the process or the machine."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any


def write_json(path: Path, data: Any) -> None:
    """Write ``data`` as JSON under a temporary name, flush it to the disk and rename it to ``path``.

    Raises ValueError when a number is not finite: JSON has none.
    """
    text = json.dumps(data, indent=1, ensure_ascii=False, allow_nan=False) + "\n"
    draft = path.with_name(f".{path.name}.{os.getpid()}")
    with draft.open("w", encoding="utf-8", errors="backslashreplace") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    draft.replace(path)
    folder = os.open(path.parent, os.O_RDONLY)
    try:
        os.fsync(folder)
    finally:
        os.close(folder)


def read_mapping(path: Path) -> dict[str, Any]:
    """A stored mapping; empty when there is none, or what is there is no such thing: only a hand could have torn it."""
    try:
        content = read_json(path)
    except (ValueError, OSError):
        return {}
    return content if isinstance(content, dict) else {}


def read_json(path: Path) -> Any:
    """The content of a JSON file; None when it does not exist."""
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return None
