"""`launcher.slurm`: what a trial's job asks the cluster for. It decides no number, so it is outside identity."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from spes_core.errors import Problem
from workbench.durations import parse_duration

GRACE_S = 300.0
"""How much longer than resources.timeout a job may take by default: to load the engine and to end in order."""
_OURS = (
    "job-name",
    "output",
    "error",
    "open-mode",
    "array",
    "signal",
    "wait",
    "test-only",
    "parsable",
    "no-requeue",
    "ntasks",
    "ntasks-per-node",
)
"""Options of sbatch that following and resuming rest on."""
_SETTINGS = {
    "partition": "partition",
    "account": "account",
    "qos": "qos",
    "time": "time",
    "nodes": "machines",
    "cpus-per-task": "cpus",
    "mem": "memory_gb",
    "gpus": "gpus",
    "gpus-per-node": "gpus",
    "constraint": "constraint",
    "exclusive": "exclusive",
}
"""Options of sbatch that have a setting of their own."""


@dataclass(frozen=True, kw_only=True)
class Slurm:
    """What the job of one trial asks the cluster for, where launcher.kind is slurm."""

    partition: str | None = None
    """Partition; null for the cluster's default."""
    account: str | None = None
    """Account that is charged; null for the user's default."""
    qos: str | None = None
    """Quality of service; null for the default."""
    time: str | None = None
    """Time limit of the job: a number and s, min (or m), h or d, in whole minutes rounded up. null: resources.timeout
    and 5 minutes. A shorter one divides a trial over several runs of its job, each from the last checkpoint."""
    machines: int = 1
    """Most machines of one trial, over which its nodes are spread; a trial of one process group stays on one."""
    cpus: int | None = None
    """Cores of the job on each machine; null: one for every thread of its nodes there."""
    memory_gb: float | None = None
    """Main memory of the job on each machine, 1e9 bytes; null: resources.trial_memory_gb, or 1.25 times what is
    predicted, and 1 GB."""
    gpus: int | None = None
    """GPUs of the job on each machine; null: resources.gpus_per_trial, else one for each process there where
    launcher.device is cuda, else none."""
    constraint: str | None = None
    """Features that the machine must have, as sbatch takes them; null for none."""
    exclusive: bool = False
    """Whether a job has its machine for itself."""
    setup: tuple[str, ...] = ()
    """Shell lines that run in the job before its first process, such as "module load cuda"."""
    extra: dict[str, Any] = field(default_factory=dict)
    """Further options of sbatch by their long names, such as {nodelist: a1, nice: 100}; true for one without value."""

    def time_s(self, timeout_s: float) -> float:
        """The job's time limit in seconds, a whole number of minutes."""
        asked_s = timeout_s + GRACE_S if self.time is None else parse_duration(self.time)
        return 60.0 * math.ceil(asked_s / 60)

    def continuations(self, timeout_s: float) -> int:
        """How often a job at its time limit goes back into the queue: until resources.timeout is used up."""
        return math.ceil((timeout_s + GRACE_S) / self.time_s(timeout_s)) - 1

    def problems(self) -> Iterator[Problem]:
        """The rules that these settings break."""
        if self.time is not None:
            try:
                if parse_duration(self.time) <= 0:
                    yield Problem("launcher.slurm.time", f"({self.time}) must be above 0")
            except ValueError as error:
                yield Problem("launcher.slurm.time", str(error))
        if self.machines < 1:
            yield Problem("launcher.slurm.machines", f"({self.machines}) must be at least 1")
        if self.cpus is not None and self.cpus < 1:
            yield Problem("launcher.slurm.cpus", f"({self.cpus}) must be at least 1")
        if self.memory_gb is not None and self.memory_gb <= 0:
            yield Problem("launcher.slurm.memory_gb", f"({self.memory_gb:g}) must be above 0")
        if self.gpus is not None and self.gpus < 0:
            yield Problem("launcher.slurm.gpus", f"({self.gpus}) must not be negative")
        for name in ("partition", "account", "qos", "constraint"):
            value = getattr(self, name)
            if value is not None and not re.fullmatch(r"[^\s'\"\\]+", value):
                yield Problem(f"launcher.slurm.{name}", f"({value!r}) must be one word without quotes")
        for index, line in enumerate(self.setup):
            if "\n" in line:
                yield Problem(f"launcher.slurm.setup[{index}]", "must be one line; give each line as an item")
        yield from self._extra_problems()

    def _extra_problems(self) -> Iterator[Problem]:
        for key, value in self.extra.items():
            path, name = f"launcher.slurm.extra.{key}", key.replace("_", "-")
            if not re.fullmatch(r"[a-z][a-z0-9-]+", name):
                yield Problem(path, "is no long option of sbatch; write it without dashes in front, such as nodelist")
            elif name in _OURS:
                yield Problem(path, "must not be set: the workbench sets it to follow and resume the job")
            elif name in _SETTINGS:
                yield Problem(path, f"has a setting of its own: launcher.slurm.{_SETTINGS[name]}")
            elif value is False or not isinstance(value, str | int | float) or "\n" in str(value):
                yield Problem(path, f"({value}) must be text, a number, or true")
