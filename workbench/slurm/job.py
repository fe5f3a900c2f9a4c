"""What runs inside a trial's job: the trial as on any machine, ended by Slurm's signals or by a file in its folder.

A job that is requeued or preempted runs this again, and the trial goes on from its newest checkpoint.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from spes_core.config import from_dict, to_dict
from spes_core.structure import build
from workbench.errors import TrialBusy
from workbench.evaluating import Evaluations
from workbench.execute import ExecutionSettings, describe_trial, run_trial
from workbench.failures import died_silently, killed_for_memory
from workbench.launch.launcher import Launcher, LaunchError
from workbench.launch.local import open_launcher
from workbench.machine import oom_kills
from workbench.provenance import ROOT, collect
from workbench.settings import Divergence, Evaluation
from workbench.slurm.machines import AllocationLauncher, allocated_machines, machines_for
from workbench.slurm.record import MORE_MEMORY, Record, asked_to_stop, last_words, settle, tells_of_memory
from workbench.stopping import DivergenceRule, Events, Rule, StopRequest, Verdict, stop_on_signals
from workbench.trials import Trial

_LOOK_S = 1.0
"""Seconds between two looks at the file that asks for an end."""
_BUSY_PATIENCE_S = 60.0
"""How long a job waits for another process that holds its trial, such as the controller that settles an earlier job."""
_NOTICE_S = 3.0
"""How much later than another process of the job this one may be told of its end."""
_KEPT = ("commit", "dirty", "diff_sha256", "untracked")
"""What only the submitting machine may know: a cluster's machines often have no git."""


def payload(
    trial: Trial, trial_dir: Path, settings: ExecutionSettings, divergence: Divergence, evaluation: Evaluation,
    retries: int,
) -> dict[str, Any]:  # fmt: skip
    """All that a job needs, as plain data."""
    return {
        "trial": {**vars(trial), "config": to_dict(trial.config)},
        "trial_dir": str(trial_dir.absolute()),
        "settings": {**asdict(settings), "data_dir": str(settings.data_dir.absolute())},
        "divergence": asdict(divergence),
        "evaluation": asdict(evaluation),
        "retries": retries,
    }


class TrialJob:
    """Runs one trial from its payload; what submitit pickles, calls, and asks for a checkpoint."""

    def __call__(self, given: dict[str, Any]) -> str:
        """Run the trial to its end; returns its status. The result is in the trial's folder."""
        from submitit.core.utils import UncompletedJobError

        trial = Trial(**{**given["trial"], "config": from_dict(given["trial"]["config"])})
        trial_dir = Path(given["trial_dir"])
        given_settings = ExecutionSettings(
            **{**given["settings"], "data_dir": Path(given["settings"]["data_dir"]), "gpus": None}
        )
        here = collect()
        there = given_settings.provenance
        settings = replace(given_settings, provenance=here | {key: there.get(key) for key in _KEPT if key in there})
        if here["code_digest"] != there.get("code_digest"):
            message = (
                f"the code in {ROOT} ({here['code_digest'][:12]}) is not that which submitted the job"
                f" ({str(there.get('code_digest'))[:12]}); --retry-failed submits it with the present code"
            )
            describe_trial(trial, trial_dir, settings)
            return str(settle(trial_dir, "failed", message, [f"error: {message}"])["status"])
        try:
            return _run(trial, trial_dir, settings, given)
        except LaunchError as error:
            describe_trial(trial, trial_dir, settings)
            return str(settle(trial_dir, "failed", str(error), [f"error: {error}"])["status"])
        except UncompletedJobError:  # submitit says so: the time limit was reached once more than the job may go on
            message = (
                "launcher.slurm.time was reached, and with it resources.timeout; raise them or lower budget_tokens"
            )
            words = last_words(trial_dir, Record.load(trial_dir, trial.id))
            return str(settle(trial_dir, "timeout", message, words)["status"])

    def checkpoint(self, given: dict[str, Any]) -> Any:
        """What the requeued job shall do: the same; the trial's own checkpoints say where it goes on."""
        from submitit.helpers import DelayedSubmission

        return DelayedSubmission(self, given)


def _run(trial: Trial, trial_dir: Path, settings: ExecutionSettings, given: dict[str, Any]) -> str:
    request = FileStopRequest(trial_dir)
    evaluations = Evaluations(
        settings=build(Evaluation, given["evaluation"]),
        device=settings.device,
        threads=settings.threads,
        timeout_s=settings.timeout_s,
    )
    divergence = build(Divergence, given["divergence"])
    with stop_on_signals(request), _open_launcher(trial, trial_dir, settings) as launcher:
        for _ in range(1 + given["retries"]):
            rules: list[Rule] = [DivergenceRule(divergence), StopFileRule(trial_dir)]
            kills = oom_kills()
            result = _run_when_free(trial, trial_dir, settings, launcher, request, rules)
            if died_silently(result):
                _wait_for_stop(request)
                if oom_kills() > kills or tells_of_memory(result["error"]["message"]):
                    result = _short_of_memory(trial_dir, result["error"])
            elif killed_for_memory(result):
                result = _short_of_memory(trial_dir, result["error"])
            if request.made or not died_silently(result):
                break
        if request.made and result["status"] == "failed":  # Slurm's signal reached the processes before this one
            return str(settle(trial_dir, "interrupted", request.words, [])["status"])
        return str(evaluations.complete(trial_dir, result, lambda: request.made)["status"])


def _wait_for_stop(request: StopRequest) -> None:
    """Slurm ends all processes of a job, in any order: those that run the trial may have died of what comes here."""
    deadline_s = time.monotonic() + _NOTICE_S
    while not request.made and time.monotonic() < deadline_s:
        time.sleep(_LOOK_S / 10)


def _short_of_memory(trial_dir: Path, error: Mapping[str, Any]) -> dict[str, Any]:
    """The result of a trial of which the kernel killed a process, naming the setting that gave too little."""
    message = f"{error['message']}; {MORE_MEMORY}"
    return settle(trial_dir, "oom", message, error["log_tail"], process=error["process"])


def _run_when_free(
    trial: Trial, trial_dir: Path, settings: ExecutionSettings, launcher: Launcher, request: StopRequest,
    rules: Sequence[Rule],
) -> dict[str, Any]:  # fmt: skip
    deadline_s = time.monotonic() + _BUSY_PATIENCE_S
    while True:
        try:
            return run_trial(trial, trial_dir, settings, launcher, None, request, rules)
        except TrialBusy:
            if time.monotonic() > deadline_s or request.made:
                raise
            time.sleep(_LOOK_S)


def _open_launcher(trial: Trial, trial_dir: Path, settings: ExecutionSettings) -> Any:
    """A launcher on the machines that the trial spreads over.

    Its processes do not feel the signal by which Slurm announces the end: this one answers it. Raises LaunchError.
    """
    announced = os.environ.get("SUBMITIT_PREEMPT_SIGNAL", "USR2")
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {getattr(signal, f"SIG{announced}")})
    try:
        machines = allocated_machines() if int(os.environ.get("SLURM_JOB_NUM_NODES", "1")) > 1 else []
        if (most := machines_for(trial.config, len(machines))) > 1:
            port = int(settings.server_address.rpartition(":")[2])
            return AllocationLauncher(machines[:most], trial_dir, port=port, ignored_signal=announced)
        return open_launcher()
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


class FileStopRequest(StopRequest):
    """A request that slurm.stop makes, too."""

    def __init__(self, trial_dir: Path) -> None:
        super().__init__()
        self._trial_dir = trial_dir
        self._looked_at_s = 0.0

    @property
    def made(self) -> bool:
        """Whether a stop was asked for."""
        if not super().made and time.monotonic() - self._looked_at_s >= _LOOK_S:
            self._looked_at_s = time.monotonic()
            asked = asked_to_stop(self._trial_dir)
            if asked.get("status") == "interrupted":
                self.reason = str(asked.get("message"))
        return super().made


class StopFileRule:
    """Ends a trial that the controller, which sees its events as well, has found to be behind."""

    def __init__(self, trial_dir: Path) -> None:
        self._trial_dir = trial_dir

    def see(self, events: Events) -> Verdict | None:
        """See `workbench.stopping.Rule`: the file was written for what the events say."""
        asked = asked_to_stop(self._trial_dir)
        return Verdict(status="pruned", message=str(asked.get("message"))) if asked.get("status") == "pruned" else None
