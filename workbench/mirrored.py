"""Which results MLflow has: a note beside the trials, so that a study with nothing to mirror need not start MLflow."""

from __future__ import annotations

import hashlib
from pathlib import Path

from workbench.durable import read_json, write_json

DATABASE = "mlflow.db"
"""Name of the SQLite store in the results folder."""
_NOTE = "mirrored.json"


def note(trial_dir: Path, result_digest: str) -> None:
    """Remember that the store of the results folder has this result of the trial in ``trial_dir``."""
    study_dir = trial_dir.parents[1]
    write_json(study_dir / _NOTE, {**_noted(study_dir), trial_dir.name: result_digest})


def unmirrored(study_dir: Path) -> list[Path]:
    """The trials of results/<study> whose result the store does not have; all of them when there is no store."""
    noted = _noted(study_dir) if (study_dir.parent / DATABASE).exists() else {}
    results = sorted(study_dir.glob("trials/*/result.json"))
    return [path.parent for path in results if noted.get(path.parent.name) != digest(path.read_bytes())]


def digest(result: bytes) -> str:
    """SHA-256 (hex) of the content of a result.json."""
    return hashlib.sha256(result).hexdigest()


def _noted(study_dir: Path) -> dict[str, str]:
    try:
        return read_json(study_dir / _NOTE) or {}
    except ValueError:  # torn by hand: everything is mirrored again, which changes nothing
        return {}
