"""The processes of one trial, from their start to their end, and why they ended: the content of outcome.json."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from spes_core.errors import DataError, SpesError
from spes_core.model.counting import tensor_shapes
from spes_core.runfile import RunFile
from spes_core.sharding import is_server
from spes_core.snapshots import ResumePoint
from spes_core.weightsfile import join_parts
from workbench.failures import (
    Failure,
    Status,
    classify,
    describe,
    fails_with_peers,
    first_failed,
    last_lines,
    log_bytes,
)
from workbench.follow import EventTail, TrialState
from workbench.launch.launcher import Launcher, LaunchError, Running, count_running, stop
from workbench.machine import oom_kills
from workbench.processes import GROUP
from workbench.progress import OnProgress
from workbench.stopping import Rule, StopRequest, Verdict

PROGRESS_INTERVAL_S = 0.5
_POLL_S = 0.25
_SERVER_LINGER_S = 60.0
_MEMORY_INTERVAL_S = 1.0
_GROUP_ENDS_S = 10.0
"""How long the ranks on other hosts may take to notice that one has failed."""


@dataclass(frozen=True, kw_only=True)
class Limits:
    """What the processes of a trial may use."""

    timeout_s: float | None = None
    memory_bytes: int | None = None
    gpus: tuple[str, ...] | None = None
    """None: all that there are."""


class Watch:
    """Starts the processes of one trial, follows what they record, and leaves none."""

    def __init__(
        self,
        run: RunFile,
        trial_dir: Path,
        launcher: Launcher,
        limits: Limits,
        stop_request: StopRequest,
        on_progress: OnProgress | None,
        rules: Sequence[Rule],
        *,
        points: Mapping[str, ResumePoint],
    ) -> None:
        """``points`` says where each participant goes on; empty for a fresh start."""
        self._run, self._trial_dir, self._launcher, self._limits = run, trial_dir, launcher, limits
        self._on_progress, self._stop_request, self._rules = on_progress, stop_request, rules
        self._processes: list[Running] = []
        self._log_starts: dict[Path, int] = {}
        """Where in each log, in bytes, this attempt at the trial begins."""
        self._tail = EventTail(trial_dir / "events")
        self._points = points
        self._resumed_at_step = min((point.step for point in points.values()), default=0)
        self._state = TrialState(run.trial, run.config.total_steps, self._resumed_at_step)
        self._verdict: Verdict | None = None
        self._launched_at_s = time.time()
        self._followed_at_s = self._measured_at_s = 0.0
        self._oom_kills = oom_kills()

    def carry_out(self) -> dict[str, Any]:
        """Start everything, watch until the end, leave no process; returns the content of outcome.json."""
        try:
            self._start()
            status, failure = self._watch()
        except LaunchError as error:
            status, failure = self._unlaunched(error)
        except KeyboardInterrupt:
            status, failure = "interrupted", self._ended("stopped by Ctrl-C")
        finally:
            stop(self._launcher, self._processes)
        try:
            self._launcher.collect(self._trial_dir, is_done=status == "done")
            if status == "done":
                self._join_weights()
        except (LaunchError, DataError) as error:
            if status == "done":
                status, failure = self._unlaunched(error)
        self._follow(at_once=True)
        if self._verdict is not None and status in ("done", "failed"):
            # A rule decides by the events alone: not by how quickly they were read.
            status, failure = self._verdict.status, self._ended(self._verdict.message, self._verdict.process)
        return {
            "status": status,
            "error": asdict(failure) if failure else None,
            "launched_at_s": self._launched_at_s,
            "resumed_at_step": self._resumed_at_step,
            "started_at": _iso(self._launched_at_s),
            "finished_at": _iso(time.time()),
        }

    def _join_weights(self) -> None:
        """Make one file of what several servers have left on several hosts. Raises DataError."""
        config = self._run.config
        servers, names = config.servers, list(tensor_shapes(config.model))
        if len(servers) > 1 and not join_parts(self._trial_dir / "weights", servers, names):
            raise DataError(f"of the final weights not all {len(servers)} parts are in {self._trial_dir / 'weights'}")

    def _start(self) -> None:
        gpus = self._limits.gpus
        own = {} if gpus is None else {"CUDA_VISIBLE_DEVICES": ",".join(gpus)}
        for spec in self._launcher.stage(self._run, self._trial_dir, self._points):
            log = self._trial_dir / "logs" / spec.log_name
            self._log_starts[log] = log_bytes(log)
            self._processes.append(self._launcher.start(replace(spec, env=spec.env | own), log))

    def _unlaunched(self, error: SpesError) -> tuple[Status, Failure]:
        """What became of a trial whose launcher could not do its part, or was stopped in it."""
        if self._stop_request.made:
            return "interrupted", self._ended(self._stop_request.words)
        return "failed", Failure(message=str(error), process=None, log_tail=[])

    def _watch(self) -> tuple[Status, Failure | None]:
        """Wait for the end of all processes, or for a reason to end them."""
        nodes_ended_at_s: float | None = None
        while True:
            if self._stop_request.made:
                return "interrupted", self._ended(self._stop_request.words)
            if (failed := first_failed(self._processes)) is not None:
                return self._explain(failed)
            if not count_running(self._processes):
                return "done", None
            if (overrun := self._overrun()) is not None:
                return overrun
            if not count_running([process for process in self._processes if not is_server(process.name)]):
                nodes_ended_at_s = nodes_ended_at_s or time.time()
                if time.time() - nodes_ended_at_s > _SERVER_LINGER_S:
                    late = next(process.name for process in self._processes if process.returncode is None)
                    message = f"the server did not end within {_SERVER_LINGER_S:g} s after the last node"
                    return "failed", self._ended(message, late)
            self._follow()
            if self._verdict is not None:
                return self._verdict.status, self._ended(self._verdict.message, self._verdict.process)
            self._launcher.wait(self._processes, _POLL_S)

    def _explain(self, failed: Running) -> tuple[Status, Failure]:
        """What became of a trial of which a process failed before all others."""
        failed = self._cause(failed)
        if failed.died_with_launcher:
            # Their last words tell of the consequences, and none of them is to blame: it may be tried again.
            what = (
                f"{failed.lost_with}, and its processes with it"
                if failed.lost_with
                else ("the launcher of its processes died, and they with it")
            )
            message = f"{what}; the same command with --retry-failed goes on, as resources.retries does by itself"
            return "failed", Failure(message=message, process=None, log_tail=[])
        log = self._trial_dir / "logs" / f"{failed.name}.log"
        start, killed_for_memory = self._log_starts[log], failed.killed_for_memory or oom_kills() > self._oom_kills
        status = classify(failed, log, start, killed_for_memory=killed_for_memory)
        return status, describe(failed, log, start, killed_for_memory=killed_for_memory)

    def _cause(self, failed: Running) -> Running:
        """The process that did not fail for another's sake: of a group on several hosts all fail at once."""
        group = [process for process in self._processes if process.name.partition("-")[0] == GROUP]
        if len(group) < 2:
            return failed
        deadline_s = time.monotonic() + _GROUP_ENDS_S
        while count_running(group) and (left_s := deadline_s - time.monotonic()) > 0:
            self._launcher.wait(group, left_s)
        logs = {log.stem: (log, start) for log, start in self._log_starts.items()}
        ended = sorted((process for process in group if process.returncode), key=lambda one: one.ended_order)
        return next((one for one in ended if not fails_with_peers(one, *logs[one.name])), failed)

    def _overrun(self) -> tuple[Status, Failure] | None:
        """The limit that was reached, of time or memory."""
        now_s, limits = time.time(), self._limits
        if limits.timeout_s is not None and now_s - self._launched_at_s > limits.timeout_s:
            self._follow(at_once=True)
            progress = self._state.progress(limits.timeout_s)
            message = (
                f"resources.timeout ({limits.timeout_s:g} s) was reached at step {progress.step} of"
                f" {progress.total_steps}; raise it or lower budget_tokens"
            )
            return "timeout", self._ended(message)
        if limits.memory_bytes is None or now_s - self._measured_at_s < _MEMORY_INTERVAL_S:
            return None
        self._measured_at_s = now_s
        held = self._launcher.resident_bytes(self._processes)
        if held <= limits.memory_bytes:
            return None
        message = (
            f"its processes hold {held / 1e9:.3g} GB together, above resources.trial_memory_gb"
            f" ({limits.memory_bytes / 1e9:g}); raise it, or lower the model or data.micro_batch_sequences"
        )
        return "oom", self._ended(message)

    def _follow(self, *, at_once: bool = False) -> None:
        """Take in what was recorded since the last time, and show it."""
        now_s = time.time()
        if not (at_once or now_s - self._followed_at_s >= PROGRESS_INTERVAL_S):
            return
        self._followed_at_s = now_s
        events = self._tail.poll()
        self._state.update(events)
        for rule in self._rules:
            if self._verdict is None:
                self._verdict = rule.see(events)
        if self._on_progress is not None:
            self._on_progress(self._state.progress(now_s - self._launched_at_s))

    def _ended(self, message: str, process: str | None = None) -> Failure:
        """A trial that was ended, with the last words of the process concerned, or else of the one that is behind."""
        name = process or self._state.behind or next((p.name for p in self._processes), GROUP)
        logs = [self._trial_dir / "logs" / f"{spoken}.log" for spoken in (name, GROUP, f"{GROUP}-0")]
        log = next((log for log in logs if log.exists()), logs[0])
        tail = last_lines(log, self._log_starts.get(log, log_bytes(log)))
        return Failure(message=message, process=process, log_tail=tail)


def unlaunched(error: LaunchError) -> dict[str, Any]:
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


def _iso(time_s: float) -> str:
    return datetime.fromtimestamp(time_s, UTC).isoformat(timespec="milliseconds")
