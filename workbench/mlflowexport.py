"""`python -m workbench.study export-mlflow`: a study's MLflow experiment made anew from result.json files.

MLflow is a window on results, so its store can be lost, moved or left behind, and be built again. The work is done by
`workbench.tracking`, the only user of mlflow, in a process of its own.
"""

from __future__ import annotations

import json
import shlex
import subprocess
import sys
from pathlib import Path

from spes_core.errors import SpesError
from workbench.errors import StudyError
from workbench.launch.launcher import child_environment
from workbench.mirrored import DATABASE
from workbench.summaries import summaries


class NotExported(SpesError):
    """MLflow lacks some of the trials."""


def export_mlflow(study_dir: Path, store: Path | None = None, tracking_uri: str | None = None) -> None:
    """Write every finished trial of a study, and say where.

    Raises StudyError while the study is running or when nothing has finished, NotExported when a trial was not taken.
    """
    statuses = [trial.status for trial in summaries(study_dir)]
    if "running" in statuses:
        raise StudyError([f"{study_dir} is being run, and writes to MLflow itself; wait for its end, or stop it"])
    trials = sorted(study_dir.absolute().glob("trials/*/result.json"))
    if not trials:
        raise StudyError([f"{study_dir} has no finished trial; run the study first"])
    place = tracking_uri or f"{(store or study_dir.parent) / DATABASE}"
    print(f"writing {len(trials)} trials to {place}", flush=True)
    replies, said = _run(study_dir, store, tracking_uri)
    warnings = [reply["message"] for reply in replies if reply["event"] == "warning"]
    written = sum(reply["event"] == "mirrored" for reply in replies)
    if written < len(trials):
        reasons = "; ".join(warnings or said[-1:])
        hint = "" if tracking_uri else "; where results cannot be written to, name another folder with --store DIR"
        raise NotExported(f"{len(trials) - written} of {len(trials)} trials are not in MLflow: {reasons}{hint}")
    print(f"{written} trials are in the experiment {study_dir.absolute().name}")
    if tracking_uri is None:
        folder = (store or study_dir.parent).absolute()
        print(f"look at them: cd {shlex.quote(str(folder))} && mlflow ui --backend-store-uri sqlite:///{DATABASE}")


def _run(study_dir: Path, store: Path | None, tracking_uri: str | None) -> tuple[list[dict[str, str]], list[str]]:
    """What the process that writes has replied, and what it printed."""
    done = subprocess.run(
        command_of(study_dir, store, tracking_uri),
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        errors="replace",
        check=False,
        env=child_environment({"MLFLOW_DISABLE_TELEMETRY": "true"}),
    )
    return [json.loads(line) for line in done.stdout.splitlines()], done.stderr.strip().splitlines()


def command_of(study_dir: Path, store: Path | None, tracking_uri: str | None) -> list[str]:
    """Command line of the process that writes."""
    study_dir = study_dir.absolute()
    command = [sys.executable, "-m", "workbench.tracking", "--die-with-parent"]
    command += ["--results", str(study_dir.parent), "--study", study_dir.name]
    if tracking_uri is not None:
        return [*command, "--tracking-uri", tracking_uri]
    command += ["--store", str(store)] if store is not None else []
    command.append("--rebuild")
    return command
