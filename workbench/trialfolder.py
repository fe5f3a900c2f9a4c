"""The folder of a trial before an attempt: emptied, or cut back to what its processes can go on from."""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from pathlib import Path

from spes_core.events import cut_events
from spes_core.snapshots import ResumePoint

_OF_AN_ATTEMPT = ("result.json", "outcome.json", "*.address", "*.rendezvous", "*.store")
NOT_OF_A_RUN = ("slurm.json", "slurm.stop")
"""Files of a trial's folder that a fresh start leaves: which job it is, and that it is to end (`workbench.slurm`)."""


def empty(folder: Path) -> None:
    """Remove all that runs have left in the folder."""
    for path in folder.iterdir():
        if path.name in NOT_OF_A_RUN:
            continue
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path)
        else:
            path.unlink()


def cut_back(folder: Path, points: Mapping[str, ResumePoint]) -> None:
    """Leave what the participants ``points`` go on from, and nothing that tells of what comes after.

    Events after a checkpoint go, as the processes themselves would have it: whoever follows the files must not see
    them shrink.
    """
    for pattern in _OF_AN_ATTEMPT:
        for path in folder.glob(pattern):
            path.unlink()
    for name, point in points.items():
        cut_events(folder / "events" / f"{name}.jsonl", point.events_bytes)
