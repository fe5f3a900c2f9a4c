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
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Literal

from spes_core import snapshots
from spes_core.errors import SpesError
from spes_core.events import cut_events
from spes_core.runfile import RunFile
from workbench.durable import read_json, read_mapping, write_json
from workbench.failures import Failure, describe, first_failed
from workbench.follow import EventTail, TrialState
from workbench.launch.launcher import Launcher, LaunchError, Running, count_running, stop
from workbench.processes import SERVER, plan
from workbench.progress import OnProgress
from workbench.results import build_result
from workbench.trials import Trial

Status = Literal["done", "failed", "interrupted", "timeout"]

PROGRESS_INTERVAL_S = 0.5
_POLL_S = 0.25
_SERVER_LINGER_S = 60.0


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
    provenance: dict[str, Any] = field(default_factory=dict)
    """Origin of the code and the machine, stored with each trial."""


class StopRequest:
    """Whether the user asked to stop; set by signal handlers, read by whoever waits."""

    def __init__(self) -> None:
        self.signal: int | None = None

    @property
    def made(self) -> bool:
        """Whether a stop was asked for."""
        return self.signal is not None


class TrialBusy(SpesError):
    """Another controller is running this trial."""


@contextmanager
def stop_on_signals() -> Iterator[StopRequest]:
    """Turn Ctrl-C, SIGTERM and SIGHUP into a request, so that nothing is interrupted half-way.

    In another than the main thread, where Python allows no handlers, the request is never made.
    """
    request = StopRequest()
    numbers = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
    if threading.current_thread() is not threading.main_thread():
        yield request
        return
    before = {number: signal.signal(number, lambda got, _: setattr(request, "signal", got)) for number in numbers}
    try:
        yield request
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def run_trial(
    trial: Trial,
    trial_dir: Path,
    settings: ExecutionSettings,
    launcher: Launcher,
    on_progress: OnProgress | None = None,
    stop_request: StopRequest | None = None,
) -> dict[str, Any]:
    """Run one trial and return what its result.json holds; a trial that is done already is not run again.

    ``on_progress`` is called at most twice a second. When a stop is requested (by default: Ctrl-C, SIGTERM), the
    result has status "interrupted". Raises TrialBusy when another controller runs the same trial.
    """
    if stop_request is None:
        with stop_on_signals() as stop_request:
            return run_trial(trial, trial_dir, settings, launcher, on_progress, stop_request)
    trial_dir.mkdir(parents=True, exist_ok=True)
    with exclusive(trial_dir):
        stored = read_mapping(trial_dir / "result.json")
        if stored.get("status") == "done":
            return stored
        try:
            launcher.wait_ready()
        except LaunchError as error:
            describe_trial(trial, trial_dir, settings)  # what an earlier attempt left stays: this one has nothing
            outcome = _unlaunched(error)
        else:
            step = keep_resumable(trial, trial_dir, settings)
            run = prepare(trial, trial_dir, settings)
            execution = _Execution(run, trial_dir, launcher, on_progress, stop_request, step)
            outcome = execution.carry_out(settings.timeout_s)
        write_json(trial_dir / "outcome.json", outcome)
        if outcome["status"] == "done":
            shutil.rmtree(trial_dir / "checkpoints", ignore_errors=True)
        result = build_result(trial_dir)
        write_json(trial_dir / "result.json", result)
        return result


def keep_resumable(trial: Trial, trial_dir: Path, settings: ExecutionSettings) -> int:
    """Leave in the trial's folder what its processes can go on from, and nothing else; the step, 0 for a fresh start.

    Events after the checkpoint go, as the processes themselves would have it: whoever follows the files must not see
    them shrink. Nodes that never exchange go on each from its own checkpoint; the earliest counts.
    """
    names = snapshots.participants(trial.config)
    steps = dict.fromkeys(names, 0)
    if _is_of(trial, trial_dir, settings):
        steps = {name: snapshots.resume_step(trial.config, trial_dir, name) for name in names}
    if not any(steps.values()):
        _empty(trial_dir)
        return 0
    for pattern in ("result.json", "outcome.json", "server.address", "*.rendezvous", "*.store"):
        for path in trial_dir.glob(pattern):
            path.unlink()
    for name, step in steps.items():
        keep_bytes = snapshots.manifest(trial_dir, name, step).events_bytes if step else 0
        cut_events(trial_dir / "events" / f"{name}.jsonl", keep_bytes)
    return min(steps.values())


def _is_of(trial: Trial, trial_dir: Path, settings: ExecutionSettings) -> bool:
    """Whether the folder holds an earlier run of this trial by the same code on the same data."""
    try:
        about = read_json(trial_dir / "trial.json") or {}
    except ValueError:
        return False
    header = read_json(settings.data_dir / "header.json") or {}
    code = settings.provenance.get("code_digest")
    return (
        about.get("trial", {}).get("id") == trial.id
        and about.get("provenance", {}).get("code_digest") == code
        and about.get("data") == header
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


class _Execution:
    """The processes of one trial, from start to end."""

    def __init__(
        self,
        run: RunFile,
        trial_dir: Path,
        launcher: Launcher,
        on_progress: OnProgress | None,
        stop_request: StopRequest,
        resumed_at_step: int,
    ) -> None:
        self._run, self._trial_dir, self._launcher = run, trial_dir, launcher
        self._on_progress, self._stop_request = on_progress, stop_request
        self._processes: list[Running] = []
        self._tail = EventTail(trial_dir / "events")
        self._resumed_at_step = resumed_at_step
        self._state = TrialState(run.trial, run.config.total_steps, resumed_at_step)
        self._launched_at_s = time.time()
        self._reported_at_s = 0.0

    def carry_out(self, timeout_s: float | None) -> dict[str, Any]:
        """Start everything, watch until the end, leave no process; returns the content of outcome.json."""
        try:
            self._start()
            status, failure = self._watch(timeout_s)
        except LaunchError as error:
            status, failure = "failed", Failure(message=str(error), process=None, log_tail=[])
        except KeyboardInterrupt:
            status, failure = "interrupted", _interruption("Ctrl-C")
        finally:
            stop(self._launcher, self._processes)
        self._report(at_once=True)
        return {
            "status": status,
            "error": asdict(failure) if failure else None,
            "launched_at_s": self._launched_at_s,
            "resumed_at_step": self._resumed_at_step,
            "started_at": _iso(self._launched_at_s),
            "finished_at": _iso(time.time()),
        }

    def _start(self) -> None:
        for spec in plan(self._run, self._trial_dir):
            log = self._trial_dir / "logs" / spec.log_name
            self._processes.append(self._launcher.start(spec, log))

    def _watch(self, timeout_s: float | None) -> tuple[Status, Failure | None]:
        """Wait for the end of all processes, or for a reason to end them."""
        nodes_ended_at_s: float | None = None
        while True:
            if self._stop_request.signal is not None:
                return "interrupted", _interruption(signal.Signals(self._stop_request.signal).name)
            if (failed := first_failed(self._processes)) is not None:
                log = self._trial_dir / "logs" / f"{failed.name}.log"
                return "failed", describe(failed, log)
            if not count_running(self._processes):
                return "done", None
            elapsed_s = time.time() - self._launched_at_s
            if timeout_s is not None and elapsed_s > timeout_s:
                return "timeout", self._overdue(timeout_s)
            if not count_running([process for process in self._processes if process.name != SERVER]):
                nodes_ended_at_s = nodes_ended_at_s or time.time()
                if time.time() - nodes_ended_at_s > _SERVER_LINGER_S:
                    message = f"the server did not end within {_SERVER_LINGER_S:g} s after the last node"
                    return "failed", Failure(message=message, process=SERVER, log_tail=[])
            self._report()
            self._launcher.wait(self._processes, _POLL_S)

    def _report(self, *, at_once: bool = False) -> None:
        now_s = time.time()
        if self._on_progress is None or not (at_once or now_s - self._reported_at_s >= PROGRESS_INTERVAL_S):
            return
        self._reported_at_s = now_s
        self._state.update(self._tail.poll())
        self._on_progress(self._state.progress(now_s - self._launched_at_s))

    def _overdue(self, timeout_s: float) -> Failure:
        self._state.update(self._tail.poll())
        progress = self._state.progress(timeout_s)
        message = (
            f"resources.timeout ({timeout_s:g} s) was reached at step {progress.step} of {progress.total_steps}; "
            "raise it or lower budget_tokens"
        )
        return Failure(message=message, process=None, log_tail=[])


def _unlaunched(error: LaunchError) -> dict[str, Any]:
    """The content of outcome.json of a trial of which no process could be started."""
    now = _iso(time.time())
    failure = Failure(message=str(error), process=None, log_tail=[])
    return {
        "status": "failed",
        "error": asdict(failure),
        "launched_at_s": None,
        "started_at": now,
        "finished_at": now,
    }


def _interruption(by: str) -> Failure:
    return Failure(message=f"stopped by {by}", process=None, log_tail=[])


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


def _empty(folder: Path) -> None:
    for path in folder.iterdir():
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path)
        else:
            path.unlink()


def _iso(time_s: float) -> str:
    return datetime.fromtimestamp(time_s, UTC).isoformat(timespec="milliseconds")
