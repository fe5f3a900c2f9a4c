"""Where the files of a run lie below the work folder of a host."""

from __future__ import annotations

import hashlib
import socket
from pathlib import Path

from spes_core.config import InitConfig
from spes_core.filedigest import file_digest


def trial_place(trial_dir: Path) -> str:
    """A name for a trial's folder that no other controller's trial has."""
    key = hashlib.sha256(f"{socket.gethostname()}:{trial_dir.absolute()}".encode()).hexdigest()[:16]
    return f"trials/{key}"


def text_place(data_dir: Path) -> str:
    """The folder of a tokenized corpus, by the bytes in it; those are read once. Raises DataError."""
    return f"data/{_digest_of(data_dir)}"


def weights_place(init: InitConfig) -> str:
    """The file of a run's first weights."""
    return f"weights/{init.digest}/{Path(init.weights or '').name}"


def _digest_of(folder: Path) -> str:
    """SHA-256 (hex, short) over the names and contents of a folder's files."""
    total = hashlib.sha256()
    for path in sorted(folder.rglob("*")):
        if path.is_file():
            total.update(f"{path.relative_to(folder).as_posix()} {file_digest(path)}\n".encode())
    return total.hexdigest()[:32]
