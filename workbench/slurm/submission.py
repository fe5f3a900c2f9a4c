"""Submitting trials: those that need the same as one array, which runs no more of them at once than the budget says."""

from __future__ import annotations

import fcntl
import importlib.util
import math
import os
import re
import secrets
import shlex
import shutil
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from spes_core.config import RunConfig
from spes_core.errors import Problem
from workbench.budget import host_memory_bytes
from workbench.durable import read_mapping
from workbench.errors import StudyError
from workbench.launch.launcher import LaunchError
from workbench.provenance import ROOT
from workbench.settings import Launcher, Resources
from workbench.slurm.job import TrialJob
from workbench.slurm.machines import machines_for, nodes_of_largest
from workbench.slurm.queue import JobState, job_states
from workbench.slurm.record import RECORD, STOP, Record, now
from workbench.spec import Study
from workbench.store import UNFINISHED, StudyFolder
from workbench.trials import Trial

_MEMORY_MARGIN = 1.25
_END_S, _POLL_S = 30.0, 0.5
"""How long a job may take to end after its trial, whose result it has written."""
_OWN_MEMORY_BYTES = 10**9
"""Of what runs in a job beside the trial's processes: the fork server, which has torch loaded, and whoever watches."""


def require_slurm(study: Study, results: Path) -> None:
    """What submitting needs must be here. Raises StudyError with all that is missing."""
    problems = []
    if importlib.util.find_spec("submitit") is None:
        problems.append("(slurm) needs the package submitit: pip install 'spes-workbench[remote]'")
    if missing := [name for name in ("sbatch", "squeue", "scancel", "srun") if shutil.which(name) is None]:
        where = "run this on a machine that submits to the cluster (Debian's package: slurm-client), or set local"
        problems.append(f"(slurm) needs {', '.join(missing)} on the PATH: {where}")
    mistakes = [study.locate(Problem("launcher.kind", problem)) for problem in problems]
    if re.search(r"""[%'"\\\n]""", str(results.absolute())):
        mistakes.append(f"--results: {results.absolute()} holds a %, quote or backslash, which sbatch reads otherwise")
    if mistakes:
        raise StudyError(mistakes)


@dataclass(frozen=True, kw_only=True)
class JobNeed:
    """What the job of one trial asks for."""

    cpus: int
    memory_bytes: int
    gpus: int
    machines: int = 1
    """The other numbers are those of each."""

    @classmethod
    def of(cls, config: RunConfig, resources: Resources, launcher: Launcher) -> JobNeed:
        """What is stated, and for what is left open, what the trial is predicted to take."""
        asked, gpus = launcher.slurm, launcher.slurm.gpus
        machines = machines_for(config, asked.machines)
        nodes = nodes_of_largest(config, machines)
        ranks = config.world_size if machines == 1 else nodes * config.parallel.ranks_per_node
        if gpus is None:
            gpus = resources.gpus_per_trial
        if gpus is None or launcher.device == "cpu":
            gpus = ranks if launcher.device == "cuda" else 0
        stated_gb = resources.trial_memory_gb if asked.memory_gb is None else asked.memory_gb
        if stated_gb is None:
            predicted = host_memory_bytes(config, on_gpu=gpus > 0, nodes_here=None if machines == 1 else nodes)
            memory_bytes = int(_MEMORY_MARGIN * predicted) + _OWN_MEMORY_BYTES
        else:
            memory_bytes = int(stated_gb * 1e9)
        cpus = ranks * launcher.threads if asked.cpus is None else asked.cpus
        return cls(cpus=cpus, memory_bytes=memory_bytes, gpus=gpus, machines=machines)

    def most(self, trials: int, resources: Resources) -> int:
        """How many of so many jobs may run together under the study's budget."""
        most = trials if resources.parallel_trials == "auto" else min(trials, resources.parallel_trials)
        if resources.cpus is not None:
            most = min(most, resources.cpus // (self.machines * self.cpus))
        if resources.memory_gb is not None:
            most = min(most, int(resources.memory_gb * 1e9 // (self.machines * self.memory_bytes)))
        if resources.gpus is not None and self.gpus:
            most = min(most, resources.gpus // (self.machines * self.gpus))
        return max(1, most)


class Submitter:
    """Submits what is not with Slurm already."""

    def __init__(self, study: Study, folder: StudyFolder, payload: Callable[[Trial], dict[str, Any]]) -> None:
        self._study, self._folder, self._payload = study, folder, payload
        self._slurm_dir = folder.path.absolute() / "slurm"

    def submit(self, trials: Sequence[Trial]) -> list[str]:
        """Submit those of the trials that no job has, or had and told of; the ids of the new jobs, in order.

        Raises LaunchError when Slurm refuses or does not answer: then none of them is noted as submitted.
        """
        with self._lock():
            records = self._records(trials)
            states = self._states(trials, records)
            active = [job for job, state in states.items() if not state.ended]
            fresh = [trial for trial in trials if self._is_due(trial, records.get(trial.id), states)]
            return [job for group in self._groups(fresh) for job in self._submit_group(group, active)]

    def _states(self, trials: Sequence[Trial], records: dict[str, Record]) -> dict[str, JobState]:
        """What Slurm says of the trials' jobs, once those have ended whose trials have: they are about to."""
        jobs = [record.job for record in records.values() if record.job is not None]
        ended = [trial.id for trial in trials if self._has_result(trial) and trial.id in records]
        deadline_s = time.monotonic() + _END_S
        while True:
            states = job_states(jobs)
            left = [job for id in ended if (job := records[id].job) is not None and not states[job].ended]
            if not left or time.monotonic() > deadline_s:
                return states
            time.sleep(_POLL_S)

    def _has_result(self, trial: Trial) -> bool:
        return self._folder.stored(trial).status not in UNFINISHED

    def _records(self, trials: Sequence[Trial]) -> dict[str, Record]:
        """The newest job of each trial that has one, by trial id, with the job's id where it was submitted at all."""
        found = {}
        for trial in trials:
            trial_dir = self._folder.trial_dir(trial)
            if (record := Record.load(trial_dir, trial.id)) is not None:
                resolved = record.resolved()
                if resolved != record:
                    resolved.save(trial_dir)
                found[trial.id] = resolved
        return found

    def _is_due(self, trial: Trial, record: Record | None, states: dict[str, JobState]) -> bool:
        if record is None or record.job is None:
            return True
        state = states[record.job]
        # How a job was killed is the trial's result, unless it has one and is asked for again.
        goes_on = state.state in ("COMPLETED", "CANCELLED", "PREEMPTED", "GONE")
        return state.ended and (goes_on or self._has_result(trial))

    def _groups(self, trials: Sequence[Trial]) -> list[Sequence[Trial]]:
        """Trials that are submitted together: all, where they share a budget, else those that need the same."""
        resources, launcher = self._study.resources, self._study.launcher
        by_need: dict[JobNeed, list[Trial]] = {}
        for trial in trials:
            by_need.setdefault(JobNeed.of(trial.config, resources, launcher), []).append(trial)
        shared = _largest(list(by_need)).most(len(trials), resources) < len(trials) if by_need else False
        return [trials] if shared else list(by_need.values())

    def _submit_group(self, trials: Sequence[Trial], active: Sequence[str]) -> list[str]:
        name = f"{self._study.name}-{secrets.token_hex(4)}"
        places = [None] if len(trials) == 1 else list(range(len(trials)))
        records = [
            Record(trial=trial.id, submission=name, index=index, log_dir=str(self._slurm_dir), submitted_at=now())
            for trial, index in zip(trials, places, strict=True)
        ]
        folders = [self._folder.trial_dir(trial) for trial in trials]
        for trial_dir, record in zip(folders, records, strict=True):
            trial_dir.mkdir(parents=True, exist_ok=True)
            record.save(trial_dir)
            for file in (trial_dir / "result.json", trial_dir / STOP):
                file.unlink(missing_ok=True)
        try:
            jobs = self._sbatch(name, trials, active)
        except LaunchError:
            for trial_dir in folders:
                (trial_dir / RECORD).unlink()
            raise
        for trial_dir, record, job in zip(folders, records, jobs, strict=True):
            replace(record, job=job).save(trial_dir)
        return jobs

    def _sbatch(self, name: str, trials: Sequence[Trial], active: Sequence[str]) -> list[str]:
        """Submit through submitit; returns the jobs' ids."""
        from submitit import AutoExecutor
        from submitit.core.utils import FailedJobError, FailedSubmissionError

        settings, timeout_s = self._study.launcher.slurm, self._study.resources.timeout_s
        executor = AutoExecutor(
            str(self._slurm_dir), cluster="slurm", slurm_max_num_timeout=settings.continuations(timeout_s)
        )
        payloads = [self._payload(trial) for trial in trials]
        try:
            executor.update_parameters(**self._parameters(name, trials, active))
            if len(trials) == 1:
                return [str(executor.submit(TrialJob(), payloads[0]).job_id)]
            return [str(job.job_id) for job in executor.map_array(TrialJob(), payloads)]
        except (FailedJobError, FailedSubmissionError, OSError) as error:
            lines = [line.strip() for line in str(error).splitlines() if "error:" in line]
            said = lines[-1] if lines else str(error).splitlines()[-1]
            raise LaunchError(f"{said} (sbatch takes no job with launcher.slurm as it is; correct it)") from error

    def _parameters(self, name: str, trials: Sequence[Trial], active: Sequence[str]) -> dict[str, Any]:
        """What the jobs ask for, in submitit's words."""
        resources, launcher = self._study.resources, self._study.launcher
        settings = launcher.slurm
        need = _largest([JobNeed.of(trial.config, resources, launcher) for trial in trials])
        room = need.most(len(trials) + len(active), resources) - len(active)
        extra = {key.replace("_", "-"): value for key, value in settings.extra.items()}
        if room < 1:  # what runs already takes all the room there is
            extra.setdefault("dependency", "afterany:" + ":".join(active))
        return {
            "name": name,
            "timeout_min": math.ceil(settings.time_s(resources.timeout_s) / 60),
            "nodes": need.machines,
            "tasks_per_node": 1,
            "cpus_per_task": need.cpus,
            "mem_gb": need.memory_bytes / 2**30,
            "gpus_per_node": need.gpus or None,
            "slurm_partition": settings.partition,
            "slurm_account": settings.account,
            "slurm_qos": settings.qos,
            "slurm_constraint": settings.constraint,
            "slurm_exclusive": settings.exclusive or None,
            "slurm_array_parallelism": max(1, need.most(len(trials), resources) if room < 1 else room),
            # One task, which reaches the other machines; srun takes no number of cores over from sbatch.
            "slurm_srun_args": ["--nodes=1", "--ntasks=1", "--relative=0", f"--cpus-per-task={need.cpus}"],
            "slurm_setup": [*_same_code(), *settings.setup],
            "slurm_additional_parameters": {**extra, "requeue": True},
        }

    @contextmanager
    def _lock(self) -> Iterator[None]:
        """One controller at a time looks for jobs and submits."""
        self._slurm_dir.mkdir(parents=True, exist_ok=True)
        lock = os.open(self._slurm_dir / "lock", os.O_RDWR | os.O_CREAT, 0o644)
        try:
            fcntl.flock(lock, fcntl.LOCK_EX)
            yield
        finally:
            os.close(lock)


def records_of(study_dir: Path) -> dict[str, tuple[Path, Record]]:
    """The jobs of all trials that study.json names: by trial id, with the trial's folder."""
    found = {}
    for entry in read_mapping(study_dir / "study.json").get("trials") or ():
        trial_dir = study_dir / "trials" / entry["name"]
        if (record := Record.load(trial_dir, entry["id"])) is not None:
            found[entry["id"]] = (trial_dir, record)
    return found


def _largest(needs: Sequence[JobNeed]) -> JobNeed:
    return JobNeed(
        cpus=max(need.cpus for need in needs),
        memory_bytes=max(need.memory_bytes for need in needs),
        gpus=max(need.gpus for need in needs),
        machines=max(need.machines for need in needs),
    )


def _same_code() -> list[str]:
    """Shell lines that let a job import the code that submits it, whatever of the environment sbatch passes on."""
    paths = [str(ROOT), *filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep))]
    absolute = dict.fromkeys(str(Path(path).absolute()) for path in paths)
    return [f"export PYTHONPATH={shlex.quote(os.pathsep.join(absolute))}"]
