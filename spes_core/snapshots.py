"""Checkpoints of a run: which participant stored what at which step, and from which step all of them can go on.

The folder of a trial holds, beside what `node` and `server` write::

    checkpoints/<participant>/<step>.tensors     a safetensors file: weights and optimizer moments
    checkpoints/<participant>/<step>.json        its manifest, written last: without it the checkpoint does not exist

Each participant (the server, every rank) stores its own part, flushed to the disk and renamed into place, and keeps the
newest two or more. Ranks that divide one model go on from the newest step that all of them have; since they are never
more than one checkpoint apart, there is one from the first checkpoint on. Nodes and server go on each from its own: the
server keeps the uploads and results of the rounds that a node may have to repeat. The order of the data, the learning
rate and the merges are pure functions of the step, and no random number is drawn in training, so a run that goes on
gives the bits of a run that never stopped. Needs no third-party package.
"""

from __future__ import annotations

import hashlib
import json
import os
from bisect import bisect_right
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from spes_core.config import RunConfig, digest
from spes_core.errors import DataError
from spes_core.schedules import checkpoint_steps

SCHEMA = 1


@dataclass(frozen=True, kw_only=True)
class Manifest:
    """What is known about one checkpoint of one participant."""

    step: int
    """Optimizer steps taken."""
    round: int
    """Rounds closed; 0 without rounds."""
    config_digest: str
    """Identity of the run: a checkpoint of another configuration is none."""
    data_bytes: int
    """Size of the tensor file."""
    data_sha256: str
    """Digest of the tensor file."""
    events_bytes: int
    """Size of the participant's event file: what follows tells of steps that will be taken again."""
    values: dict[str, Any] = field(default_factory=dict)
    """Numbers that are no tensors."""
    schema: int = SCHEMA


def node_name(config: RunConfig, node: int, rank: int) -> str:
    """The participant that a rank of a node is; rank 0's is also the name of the node's event file."""
    if config.sync.exchange == "gradients":
        return f"node-{rank}"
    return f"node-{node}" if rank == 0 else f"node-{node}-rank-{rank}"


def peers(config: RunConfig, participant: str) -> list[str]:
    """The participants that must go on from the same step as this one, itself included: the ranks of one model."""
    if config.sync.exchange == "gradients":
        return [node_name(config, 0, rank) for rank in range(config.world_size)]
    return next(names for names in _models(config) if participant in names)


def participants(config: RunConfig) -> list[str]:
    """Everyone in the run who stores checkpoints."""
    if config.sync.exchange == "gradients":
        return peers(config, "")
    return [name for names in _models(config) for name in names]


def _models(config: RunConfig) -> list[list[str]]:
    """Who keeps a copy of the global model (or of a part) together: each server alone, and the ranks of each node."""
    ranks = range(config.parallel.ranks_per_node)
    by_node = [[node_name(config, node, rank) for rank in ranks] for node in range(config.nodes)]
    return [*([name] for name in config.servers), *by_node]


@dataclass(frozen=True)
class ResumePoint:
    """Where one participant goes on."""

    step: int
    """Optimizer steps taken; 0: from the start."""
    events_bytes: int
    """Size of its event file then."""


FROM_START = ResumePoint(0, 0)


Stored = dict[int, int]
"""The steps that one participant has stored whole, each with the size of its event file then."""


def resume_points(config: RunConfig, stored: Mapping[str, Stored]) -> dict[str, ResumePoint]:
    """Where each participant of a run goes on, by what each has ``stored``."""
    points = {}
    for name in participants(config):
        step = _newest_common(stored[peer] for peer in peers(config, name))
        points[name] = ResumePoint(step, stored[name][step]) if step else FROM_START
    return points


def all_stored(config: RunConfig, trial_dir: Path) -> dict[str, Stored]:
    """What each participant of a run has stored in a folder."""
    found = {}
    for name in participants(config):
        steps = stored_steps(config, trial_dir, name)
        found[name] = {step: manifest(trial_dir, name, step).events_bytes for step in steps}
    return found


def apart(config: RunConfig, points: Mapping[str, ResumePoint]) -> tuple[str, str] | None:
    """Two participants that cannot go on together from these points, the one that is behind first; None when all can.

    A participant that has what it stored is at most one checkpoint from any other: one that is further behind has lost
    some, with its disk or its host, and the rounds that it would repeat are gone. Below quorum 1.0 a node may be late,
    but a server may not. ``config`` says when checkpoints were stored.
    """
    if not points or config.sync.exchange != "rounds":
        return None
    due = checkpoint_steps(config)
    place = {name: bisect_right(due, point.step) for name, point in points.items()}
    first, last = min(place, key=place.__getitem__), max(place, key=place.__getitem__)
    behind = min(config.servers, key=place.__getitem__) if config.round.quorum < 1.0 else first
    return (behind, last) if place[last] - place[behind] > 1 else None


def resume_step(config: RunConfig, trial_dir: Path, participant: str) -> int:
    """The newest step from which a participant and its peers can go on; 0 for a fresh start."""
    return _newest_common(stored_steps(config, trial_dir, name) for name in peers(config, participant))


def _newest_common(steps: Iterable[Iterable[int]]) -> int:
    return max(set.intersection(*map(set, steps)), default=0)


def stored_steps(config: RunConfig, trial_dir: Path, participant: str) -> set[int]:
    """The steps of this run that a participant has stored whole."""
    folder = folder_of(trial_dir, participant)
    identity = digest(config)
    steps: set[int] = set()
    for path in folder.glob("*.json"):
        known, data = _read(path), path.with_suffix(".tensors")
        if known and known.config_digest == identity and data.exists():
            steps |= {known.step} if data.stat().st_size == known.data_bytes else set()
    return steps


def folder_of(trial_dir: Path, participant: str) -> Path:
    """Where a participant stores its checkpoints."""
    return trial_dir / "checkpoints" / participant


def store(
    config: RunConfig,
    folder: Path,
    write: Callable[[Path], str],
    *,
    step: int,
    round: int,
    events_bytes: int,
    values: dict[str, Any],
) -> None:
    """Store one checkpoint: ``write(path)`` makes the tensor file and returns its SHA-256. Drops the oldest ones."""
    folder.mkdir(parents=True, exist_ok=True)
    data, manifest_path = _paths(folder, step)
    partial = data.with_name(data.name + ".partial")
    sha256 = write(partial)
    _flush(partial)
    # Until the new manifest is there, none must speak of the new data.
    manifest_path.unlink(missing_ok=True)
    partial.replace(data)
    known = Manifest(
        step=step,
        round=round,
        config_digest=digest(config),
        data_bytes=data.stat().st_size,
        data_sha256=sha256,
        events_bytes=events_bytes,
        values=values,
    )
    draft = manifest_path.with_name(manifest_path.name + ".partial")
    draft.write_text(json.dumps(asdict(known)) + "\n", encoding="utf-8")
    _flush(draft)
    draft.replace(manifest_path)
    _flush(folder)
    _drop_oldest(folder, config.checkpoint.keep)


def load(trial_dir: Path, participant: str, step: int) -> tuple[Manifest, Path]:
    """Manifest and tensor file of a stored checkpoint. Raises DataError when the file is not what was stored."""
    data, path = _paths(folder_of(trial_dir, participant), step)
    known = manifest(trial_dir, participant, step)
    with data.open("rb") as file:
        found = hashlib.file_digest(file, "sha256").hexdigest()
    if found != known.data_sha256:
        raise DataError(
            f"{data} is damaged (SHA-256 {found[:16]}, stored as {known.data_sha256[:16]}); remove {path} and start"
            " again: it then continues from an older checkpoint"
        )
    return known, data


def manifest(trial_dir: Path, participant: str, step: int) -> Manifest:
    """What is known about a stored checkpoint, whose tensors are not looked at. Raises DataError."""
    path = _paths(folder_of(trial_dir, participant), step)[1]
    if (known := _read(path)) is None:
        raise DataError(f"{path} cannot be read as the manifest of a checkpoint; remove it and start again")
    return known


def _drop_oldest(folder: Path, keep: int) -> None:
    manifests = sorted(folder.glob("*.json"), key=lambda path: int(path.stem))
    for path in manifests[:-keep]:
        path.unlink()
    kept = {path.stem for path in manifests[-keep:]}
    for data in folder.glob("*.tensors*"):
        if data.name.partition(".")[0] not in kept:
            data.unlink()


def _paths(folder: Path, step: int) -> tuple[Path, Path]:
    return folder / f"{step}.tensors", folder / f"{step}.json"


def _read(path: Path) -> Manifest | None:
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
        return Manifest(**data) if data["schema"] == SCHEMA else None
    except (OSError, ValueError, TypeError, KeyError):
        return None


def _flush(path: Path) -> None:
    """Make a file, or what a folder lists, safe on the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
