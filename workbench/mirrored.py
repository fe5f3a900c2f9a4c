"""Which results MLflow has, and as which run: notes beside the results, so that nobody need start MLflow to know."""

from __future__ import annotations

import hashlib
import re
from pathlib import Path
from urllib.parse import urlsplit, urlunsplit

from workbench.durable import read_json, read_mapping, write_json

DATABASE = "mlflow.db"
"""Name of the SQLite store in the results folder."""
LOCAL_UI = "http://127.0.0.1:5000"
"""Where `mlflow ui` answers unless it is told otherwise."""
_NOTE = "mirrored.json"
_RUN_NOTE = "mlflow.json"


def note(trial_dir: Path, result_digest: str) -> None:
    """Remember that the store of the results folder has this result of the trial in ``trial_dir``."""
    study_dir = trial_dir.parents[1]
    write_json(study_dir / _NOTE, {**_noted(study_dir), trial_dir.name: result_digest})


def note_run(trial_dir: Path, result_digest: str, experiment: str, run: str, server: str | None) -> None:
    """Remember in the trial's folder which run its result is: of a tracking server, or (None) of the local store."""
    content = {"result_digest": result_digest, "experiment_id": experiment, "run_id": run, "server": _public(server)}
    if read_mapping(trial_dir / _RUN_NOTE) != content:
        write_json(trial_dir / _RUN_NOTE, content)


def run_of(trial_dir: Path, result_digest: str) -> tuple[str, str] | None:
    """The id of the trial's run and the address of its page; None where this result has no run that is known.

    The page of a run in the local store is that of `mlflow ui`. An address that no browser opens is empty.
    """
    found = read_mapping(trial_dir / _RUN_NOTE)
    experiment, run = str(found.get("experiment_id")), str(found.get("run_id"))
    if found.get("result_digest") != result_digest or not all(re.fullmatch(r"[\w-]+", i) for i in (experiment, run)):
        return None
    server = LOCAL_UI if found.get("server") is None else str(found["server"])
    if urlsplit(server).scheme not in ("http", "https"):
        return run, ""
    return run, f"{server.rstrip('/')}/#/experiments/{experiment}/runs/{run}"


def _public(server: str | None) -> str | None:
    """The address without a name and password."""
    if server is None:
        return None
    parts = urlsplit(server)
    return urlunsplit(parts._replace(netloc=parts.netloc.rpartition("@")[2]))


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
