"""The controller's side of trials that are Slurm jobs: submit, follow their files, stop them, and say how they ended.

A job's files are the truth: a trial has ended when its result.json says so. Slurm is asked for what no file tells: that
a job waits, or was killed. A controller that dies leaves its jobs; the next one finds them by slurm.json.
"""

from __future__ import annotations

import signal
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from workbench.durable import read_mapping
from workbench.errors import TrialBusy
from workbench.execute import ExecutionSettings, describe_trial
from workbench.failures import Status, died_silently, killed_for_memory
from workbench.launch.launcher import LaunchError
from workbench.progress import OnProgress
from workbench.slurm.following import Following
from workbench.slurm.job import payload
from workbench.slurm.queue import JobState, Queue, QueueSilent, cancel_jobs
from workbench.slurm.record import MORE_MEMORY, Record, ask_to_stop, last_words, ran_out_of_memory, settle
from workbench.slurm.submission import Submitter
from workbench.spec import Study
from workbench.stopping import Rule, StopRequest
from workbench.store import Stored, StudyFolder
from workbench.together import STUDY_ENDED
from workbench.trials import Trial

_POLL_S = 0.5
_CONFIRM_S = 2.0
"""Between two looks at a job that ended without a result: it may be requeued, or its files may be on their way."""
_FILES_S = 10.0
"""How long the result of a job that ended well may take to be seen here."""
_CANCEL_S = 120.0
"""How long cancelled jobs may take to end."""
_STATUS: dict[str, Status] = {
    "TIMEOUT": "timeout",
    "DEADLINE": "timeout",
    "OUT_OF_MEMORY": "oom",
    "CANCELLED": "interrupted",
    "PREEMPTED": "interrupted",
    "GONE": "interrupted",
}
_ADVICE = {
    "TIMEOUT": "raise launcher.slurm.time; --retry-failed goes on from the newest checkpoint",
    "DEADLINE": "launcher.slurm.extra.deadline came first; --retry-failed goes on from the newest checkpoint",
    "OUT_OF_MEMORY": MORE_MEMORY,
    "CANCELLED": "it was cancelled; the same command continues the trial",
    "PREEMPTED": "it was preempted and not requeued; the same command continues the trial",
    "GONE": "Slurm does not remember it, and it left no result; the same command continues the trial",
    "NODE_FAIL": "its machine failed; --retry-failed goes on, as resources.retries does by itself",
    "BOOT_FAIL": "its machine did not start; --retry-failed goes on, as resources.retries does by itself",
}


class SlurmTrials:
    """Carries trials of a study out as jobs; `run` may be called by several threads."""

    def __init__(
        self,
        study: Study,
        folder: StudyFolder,
        settings: Callable[[Trial], ExecutionSettings],
    ) -> None:
        self._study, self._folder, self._settings = study, folder, settings
        self._queue = Queue()
        self._submitter = Submitter(study, folder, self._payload)

    def submit(self, trials: Sequence[Trial]) -> None:
        """Submit those that no job has yet. Raises LaunchError."""
        jobs = self._submitter.submit(trials)
        running = len(trials) - len(jobs)
        if running:
            print(f"{running} trials have a job already, which is waited for", flush=True)
        if jobs:
            named = jobs[0] if len(jobs) == 1 else f"{jobs[0]} to {jobs[-1]}"
            print(f"submitted {len(jobs)} jobs to Slurm: {named}", flush=True)

    def run(self, trial: Trial, show: OnProgress, rules: Callable[[], list[Rule]], stop: StopRequest) -> Stored:
        """Follow the job of a trial to its end, and submit it again when it died without a word, as often as allowed.

        ``rules``: those that need the controller, made anew for each run of the job; the job applies all others.
        """
        try:
            for attempt in range(1 + self._study.resources.retries):
                if attempt:
                    self._submitter.submit([trial])
                result = self._await(trial, show, rules, stop)
                if stop.made or not result or not died_silently(result):
                    break
        except TrialBusy as error:
            return Stored(status="busy", result={"error": {"message": str(error)}})
        return Stored(status=str(result.get("status", "interrupted")), result=result)

    def _payload(self, trial: Trial) -> dict[str, Any]:
        study = self._study
        return payload(
            trial, self._folder.trial_dir(trial), self._settings(trial), study.divergence, study.evaluation,
            study.resources.retries,
        )  # fmt: skip

    def _await(
        self, trial: Trial, show: OnProgress, rules: Callable[[], list[Rule]], stop: StopRequest
    ) -> dict[str, Any]:
        """The result of the trial's job; empty when it was stopped before it began, or left to itself."""
        trial_dir = self._folder.trial_dir(trial)
        record = Record.load(trial_dir, trial.id)
        if record is None or record.job is None:
            raise LaunchError(f"{trial_dir / 'slurm.json'} has gone; run the same command again")
        following = Following(trial.name, trial.config.total_steps, trial_dir, show, rules)
        while True:
            if stop.made:
                return self._stop(trial, record, stop)
            following.poll()
            if following.verdict is not None and not read_mapping(trial_dir / "slurm.stop"):
                ask_to_stop(trial_dir, "pruned", following.verdict.message)
            result = self._folder.stored(trial).result
            if result.get("status", "interrupted") != "interrupted" and not self._has_more_to_say(result):
                return self._judged(trial_dir, result, following)
            state = self._queue.state(record.job)
            if state is not None and state.ended and (state := self._confirmed(trial, record.job, stop)) is not None:
                return self._judged(trial_dir, self._ended(trial, record, state), following)
            time.sleep(_POLL_S)

    def _has_more_to_say(self, result: dict[str, Any]) -> bool:
        """Whether a job whose trial has a result may bring another: it scores, tries again, or explains."""
        is_unexplained = killed_for_memory(result) and MORE_MEMORY not in result["error"]["message"]
        return bool(self._study.evaluation.tasks) or died_silently(result) or is_unexplained

    def _judged(self, trial_dir: Path, result: dict[str, Any], following: Following) -> dict[str, Any]:
        """The result; pruned where the events of the whole run say so, however late they were read."""
        following.poll()
        if following.verdict is None or result.get("status") not in ("done", "failed"):
            return result
        return settle(trial_dir, "pruned", following.verdict.message, [])

    def _confirmed(self, trial: Trial, job: str, stop: StopRequest) -> JobState | None:
        """The state in which a job has ended; None when it goes on after all, or the user wants no more waiting."""
        deadline_s = time.monotonic() + _FILES_S
        state: JobState | None = None
        while not stop.made:
            wait_until_s = time.monotonic() + _CONFIRM_S
            while time.monotonic() < wait_until_s and not stop.made:
                if self._folder.stored(trial).result:
                    break
                time.sleep(_POLL_S / 2)
            state = self._queue.state(job, at_once=True)
            is_late = time.monotonic() > deadline_s
            if state is None or not state.ended:
                return None
            if self._folder.stored(trial).result or state.state != "COMPLETED" or is_late:
                return state
        return None

    def _ended(self, trial: Trial, record: Record, state: JobState) -> dict[str, Any]:
        """The result of a trial whose job has ended: its own, or what Slurm says of the job."""
        trial_dir = self._folder.trial_dir(trial)
        result = self._folder.stored(trial).result
        if result and (result["status"] != "interrupted" or state.state == "COMPLETED"):
            return result
        kind = state.state
        if kind not in _ADVICE and ran_out_of_memory(record):
            kind = "OUT_OF_MEMORY"
        status = _STATUS.get(kind, "failed")
        if not (trial_dir / "run.json").exists():
            if status == "interrupted":
                return {}  # it never began
            describe_trial(trial, trial_dir, self._settings(trial))
        advice = _ADVICE.get(kind, "it ended without a result; its log says more")
        message = f"Slurm ended job {record.job} ({state.words}): {advice}"
        return settle(trial_dir, status, message, last_words(trial_dir, record))

    def _stop(self, trial: Trial, record: Record, stop: StopRequest) -> dict[str, Any]:
        """Cancel the job and wait for its end; a lost terminal, or a controller in trouble, leaves it."""
        if stop.signal == signal.SIGHUP or (stop.signal is None and stop.reason == STUDY_ENDED):
            return {}
        assert record.job is not None
        deadline_s = time.monotonic() + _CANCEL_S
        try:
            cancel_jobs([record.job])
            while time.monotonic() < deadline_s:
                state = self._queue.state(record.job, at_once=True)
                if state is not None and state.ended:
                    break
                time.sleep(_POLL_S)
        except QueueSilent:
            return {}
        trial_dir, result = self._folder.trial_dir(trial), self._folder.stored(trial).result
        if result.get("status", "interrupted") != "interrupted":
            return result
        if not (trial_dir / "run.json").exists():
            return {}
        return settle(trial_dir, "interrupted", stop.words, last_words(trial_dir, record))
