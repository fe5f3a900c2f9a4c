"""One trial from start to result.json: make its folder, start its processes, follow them, end them, measure.

The folder of a trial (results/<study>/trials/<name>/)::

    trial.json     who the trial is, where it comes from, what data it reads     written before the start
    run.json       what its processes are started with                           written before the start
    logs/          stdout and stderr of each process
    events/        what each process recorded
    outcome.json   status, error, times                                          written when the processes have ended
    checkpoints/   what the processes need to go on after a crash                removed when the trial is done
    result.json    everything that was measured                                  written last

A folder whose result.json is missing (its controller was killed) or not "done" is run again: from its newest checkpoint
if the same code on the same data has left one, else from the start, in an empty folder. Nothing is touched before the
launcher can start processes.
"""

from __future__ import annotations

import fcntl
import os
import shutil
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from spes_core import snapshots
from spes_core.config import RunConfig
from spes_core.errors import ConfigError
from spes_core.runfile import RunFile
from spes_core.snapshots import ResumePoint
from workbench.durable import read_json, read_mapping, write_json
from workbench.errors import TrialBusy
from workbench.launch.launcher import Launcher, LaunchError
from workbench.progress import OnProgress
from workbench.results import build_result
from workbench.stopping import Rule, StopRequest, stop_on_signals
from workbench.trialfolder import cut_back, empty
from workbench.trials import Trial
from workbench.watch import Limits, Watch, unlaunched


@dataclass(frozen=True, kw_only=True)
class ExecutionSettings:
    """What decides how trials are carried out, and no number of theirs."""

    data_dir: Path
    """Folder of the tokenized corpus."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """Where nodes compute."""
    threads: int = 1
    """Intra-operation threads of one process."""
    server_address: str = "127.0.0.1:0"
    """Where the server listens; port 0 lets it choose."""
    timeout_s: float | None = None
    """Longest time that one trial may take; None for no limit."""
    memory_limit_bytes: int | None = None
    """Most memory that the processes of one trial may hold together; None for no limit."""
    gpus: tuple[str, ...] | None = None
    """The GPUs that the trial may see, as CUDA_VISIBLE_DEVICES names them; None for all."""
    provenance: dict[str, Any] = field(default_factory=dict)
    """Origin of the code and the machine, stored with each trial."""


def run_trial(
    trial: Trial,
    trial_dir: Path,
    settings: ExecutionSettings,
    launcher: Launcher,
    on_progress: OnProgress | None = None,
    stop_request: StopRequest | None = None,
    rules: Sequence[Rule] = (),
) -> dict[str, Any]:
    """Run one trial and return what its result.json holds; a trial that is done already is not run again.

    ``on_progress`` is called at most twice a second. When a stop is requested (by default: Ctrl-C, SIGTERM), the
    result has status "interrupted"; ``rules`` see all events and may end the trial with a status of their own. Several
    trials may run at the same time, in threads. Raises TrialBusy when another controller runs the same trial.
    """
    if stop_request is None:
        with stop_on_signals() as stop_request:
            return run_trial(trial, trial_dir, settings, launcher, on_progress, stop_request, rules)
    trial_dir.mkdir(parents=True, exist_ok=True)
    with exclusive(trial_dir):
        stored = read_mapping(trial_dir / "result.json")
        if stored.get("status") == "done":
            return stored
        try:
            launcher.wait_ready()
        except LaunchError as error:
            describe_trial(trial, trial_dir, settings)  # what an earlier attempt left stays: this one has nothing
            outcome = unlaunched(error)
        else:
            outcome = _attempt(trial, trial_dir, settings, launcher, on_progress, stop_request, rules)
        write_json(trial_dir / "outcome.json", outcome)
        if outcome["status"] == "done":
            shutil.rmtree(trial_dir / "checkpoints", ignore_errors=True)
        result = build_result(trial_dir)
        write_json(trial_dir / "result.json", result)
        return result


def _attempt(
    trial: Trial,
    trial_dir: Path,
    settings: ExecutionSettings,
    launcher: Launcher,
    on_progress: OnProgress | None,
    stop_request: StopRequest,
    rules: Sequence[Rule],
) -> dict[str, Any]:
    """Run the trial, from where it can go on; what outcome.json holds."""
    try:
        points = keep_resumable(trial, trial_dir, settings, launcher)
    except LaunchError as error:
        describe_trial(trial, trial_dir, settings)
        return unlaunched(error)
    run = prepare(trial, trial_dir, settings)
    limits = Limits(timeout_s=settings.timeout_s, memory_bytes=settings.memory_limit_bytes, gpus=settings.gpus)
    watch = Watch(run, trial_dir, launcher, limits, stop_request, on_progress, rules, points=points)
    return watch.carry_out()


def keep_resumable(
    trial: Trial, trial_dir: Path, settings: ExecutionSettings, launcher: Launcher
) -> dict[str, ResumePoint]:
    """Leave in the trial's folder what its processes can go on from, and nothing else; where, empty for a fresh start.

    Nodes that never exchange go on each from its own checkpoint; the earliest counts. Where one has lost what the
    others would need of it, the trial starts anew: its bits are those of a run that never stopped, or none.
    """
    points = launcher.resume_points(trial.config, trial_dir) if _is_of(trial, trial_dir, settings) else {}
    if lost := snapshots.apart(_former_config(trial, trial_dir), points):
        behind, ahead = (f"{name} at step {points[name].step}" for name in lost)
        why = f"its newest checkpoints are too far apart ({behind}, {ahead})"
        print(f"{trial.name}: starts anew: {why}; was a host replaced, or a folder removed?", flush=True)
        points = {}
    if not any(point.step for point in points.values()):
        empty(trial_dir)
        return {}
    cut_back(trial_dir, points)
    return points


def _former_config(trial: Trial, trial_dir: Path) -> RunConfig:
    """The trial as its last attempt had it: checkpoints may be due at other steps now."""
    try:
        return RunFile.load(trial_dir / "run.json").config
    except ConfigError:
        return trial.config


def _is_of(trial: Trial, trial_dir: Path, settings: ExecutionSettings) -> bool:
    """Whether the folder holds an earlier run of this trial by the same code on the same data, with as many servers:
    each has stored its own part of the weights.
    """
    try:
        about = read_json(trial_dir / "trial.json") or {}
        servers = RunFile.load(trial_dir / "run.json").config.server
    except ValueError:  # ConfigError is one too
        return False
    header = read_json(settings.data_dir / "header.json") or {}
    code = settings.provenance.get("code_digest")
    return (
        about.get("trial", {}).get("id") == trial.id
        and about.get("provenance", {}).get("code_digest") == code
        and about.get("data") == header
        and servers == trial.config.server
    )


def prepare(trial: Trial, trial_dir: Path, settings: ExecutionSettings) -> RunFile:
    """Make the trial's folders and fill in trial.json and run.json; returns what run.json says."""
    for folder in ("events", "logs"):
        (trial_dir / folder).mkdir(exist_ok=True)
    return describe_trial(trial, trial_dir, settings)


def describe_trial(trial: Trial, trial_dir: Path, settings: ExecutionSettings) -> RunFile:
    """Write trial.json and run.json; returns what run.json says."""
    run = RunFile(
        trial=trial.name,
        config=trial.config,
        data_dir=str(settings.data_dir.absolute()),
        server_address=settings.server_address,
        device=settings.device,
        threads=settings.threads,
    )
    run.save(trial_dir / "run.json")
    identity = {
        "id": trial.id,
        "name": trial.name,
        "study": trial.study,
        "arm": trial.arm,
        "role": trial.role,
        "method": trial.config.method,
        "seed": trial.seed,
        "axes": trial.axes,
    }
    header = read_json(settings.data_dir / "header.json") or {}
    write_json(trial_dir / "trial.json", {"trial": identity, "provenance": settings.provenance, "data": header})
    return run


@contextmanager
def exclusive(trial_dir: Path) -> Iterator[None]:
    """Hold the trial's folder; the system lets go when this process dies."""
    folder = os.open(trial_dir, os.O_RDONLY)
    try:
        fcntl.flock(folder, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as error:
        os.close(folder)
        raise TrialBusy(f"{trial_dir} is being run by another process; wait for it to end") from error
    try:
        yield
    finally:
        os.close(folder)
