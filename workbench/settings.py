"""The sections of a study file that are outside a trial's identity: resources, divergence, report, launcher, ..."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from spes_core.errors import DataError, Problem
from workbench.durations import parse_duration
from workbench.evaluating_tasks import mistakes
from workbench.slurm.settings import Slurm


@dataclass(frozen=True, kw_only=True)
class Resources:
    """What the trials of a study may use."""

    parallel_trials: int | Literal["auto"] = 1
    """Most trials that run at the same time, as the budget has room for them; auto: as many as fit."""
    cpus: int | None = None
    """Cores that trials may take together, each one for every thread of its nodes; null: those of this machine, and a
    trial of more processes than cores takes all."""
    memory_gb: float | None = None
    """Main memory that trials may take together, 1e9 bytes, as predicted; null: what is free at the start."""
    gpus: int | None = None
    """GPUs that trials may take together; null: those that are visible."""
    gpus_per_trial: int | None = None
    """GPUs of one trial, which its processes share; null: one for each process, or none where there are too few."""
    trial_memory_gb: float | None = None
    """Main memory, 1e9 bytes, at which a trial is stopped as out of memory; null: no limit but the machine's."""
    timeout: str = "2h"
    """Longest duration of one trial: a number and s, min (or m), h or d."""
    retries: int = 0
    """How often a trial is started again after one of its processes was killed from outside."""

    @property
    def timeout_s(self) -> float:
        """`timeout` in seconds."""
        return parse_duration(self.timeout)

    def problems(self) -> Iterator[Problem]:
        """The rules that these settings break."""
        if self.parallel_trials != "auto" and self.parallel_trials < 1:
            yield Problem("resources.parallel_trials", f"({self.parallel_trials}) must be at least 1, or auto")
        if self.cpus is not None and self.cpus < 1:
            yield Problem("resources.cpus", f"({self.cpus}) must be at least 1")
        for name in ("memory_gb", "trial_memory_gb"):
            if (memory_gb := getattr(self, name)) is not None and memory_gb <= 0:
                yield Problem(f"resources.{name}", f"({memory_gb:g}) must be above 0")
        for name in ("gpus", "gpus_per_trial"):
            if (gpus := getattr(self, name)) is not None and gpus < 0:
                yield Problem(f"resources.{name}", f"({gpus}) must not be negative")
        if self.retries < 0:
            yield Problem("resources.retries", f"({self.retries}) must not be negative")
        try:
            if self.timeout_s <= 0:
                yield Problem("resources.timeout", f"({self.timeout}) must be above 0")
        except ValueError as error:
            yield Problem("resources.timeout", str(error))


@dataclass(frozen=True, kw_only=True)
class Evaluation:
    """What lm-eval scores the final weights of a trial on. It changes no trial, and is outside a trial's identity."""

    tasks: tuple[str, ...] = ()
    """Tasks by lm-eval's names, NAME:SHOTS for other shots than the task's own; "spes_suite" is the paper's nine,
    "blimp" the mean over 67 paradigms. Empty for none."""
    data_dir: str | None = None
    """Folder of offline copies, <task>/<split>.jsonl.gz; null takes data from the hub."""
    limit: int | None = None
    """Only the first items of each task; null for all."""
    batch_size: int = 16
    """Texts in one forward pass; it changes scores by rounding only."""
    dtype: Literal["float32", "bfloat16"] = "float32"
    """Type of weights and products. Probabilities are float32 always."""

    @property
    def folder(self) -> Path | None:
        """`data_dir` as a path."""
        return None if self.data_dir is None else Path(self.data_dir)

    def folder_problems(self) -> Iterator[Problem]:
        """That the folder of offline copies is not there: known only where tasks are to be scored."""
        if self.folder is not None and not self.folder.is_dir():
            yield Problem("evaluation.data_dir", f"({self.data_dir}) is no folder; leave it out to use the hub")

    def problems(self, *, asked: bool = False) -> Iterator[Problem]:
        """The rules that these settings break; with ``asked`` one is that there must be tasks."""
        if asked and not self.tasks:
            yield Problem("evaluation.tasks", "must name at least one task, such as arc_easy, spes_suite or blimp")
        if self.batch_size < 1:
            yield Problem("evaluation.batch_size", f"({self.batch_size}) must be at least 1")
        if self.limit is not None and self.limit < 2:
            yield Problem("evaluation.limit", f"({self.limit}) must be at least 2: one item has no standard error")
        try:
            for index, reason in mistakes(self.tasks):
                yield Problem(f"evaluation.tasks[{index}]", reason)
        except DataError as error:
            yield Problem("evaluation.tasks", f"cannot be run: {error}")


@dataclass(frozen=True, kw_only=True)
class Divergence:
    """When a trial is given up as diverged: for every arm the same. A loss that is not finite always ends it."""

    factor: float | None = None
    """How many times the lowest training loss so far counts as too high; null: only a loss that is not finite."""
    points: int = 3
    """Logged points in a row, of one node, that must be too high."""

    def problems(self) -> Iterator[Problem]:
        """The rules that these settings break."""
        if self.factor is not None and self.factor <= 1:
            yield Problem("divergence.factor", f"({self.factor:g}) must be above 1")
        if self.points < 1:
            yield Problem("divergence.points", f"({self.points}) must be at least 1")


@dataclass(frozen=True, kw_only=True)
class PrimaryMetric:
    """The number that answers the question."""

    name: str = "eval/loss"
    """Its name in result.json."""
    goal: Literal["minimize", "maximize"] = "minimize"
    """Which direction is better."""


@dataclass(frozen=True, kw_only=True)
class Metrics:
    """What is read from the results."""

    primary: PrimaryMetric = field(default_factory=PrimaryMetric)


@dataclass(frozen=True, kw_only=True)
class ReportSettings:
    """How the report shows the results."""

    x: str | None = None
    """Path of the setting on the horizontal axis; null for one bar an arm."""
    log_x: bool = False
    """Whether that axis is logarithmic."""
    tolerance: float = 0.02
    """Relative distance from the reference within which the primary metric counts as equal."""
    hero: Literal["loss", "bytes"] = "loss"
    """What the first figure sets the primary metric against: x, or the bytes that a node sends; and so whether the
    verdict names the point closest to the reference or, of those within the tolerance, the one that sends least."""
    formats: tuple[Literal["html", "pdf", "csv", "latex"], ...] = ("html", "pdf", "csv", "latex")
    """What is written."""

    def problems(self) -> Iterator[Problem]:
        """The rules that these settings break."""
        if self.tolerance < 0:
            yield Problem("report.tolerance", f"({self.tolerance:g}) must not be negative")
        if "html" not in self.formats:
            yield Problem("report.formats", f"({', '.join(self.formats)}) must contain html: the report itself")


@dataclass(frozen=True, kw_only=True)
class Launcher:
    """Where processes are started. It decides no number, so it is outside a trial's identity."""

    kind: Literal["local", "ssh", "slurm"] = "local"
    """"local": all on this machine; "ssh": on the hosts of `inventory`; "slurm": each trial is a job of a cluster."""
    inventory: str = "hosts.yaml"
    """File of the hosts for kind ssh, as seen from the study file."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """Where a node computes; "auto" takes a GPU when there is one."""
    threads: int = 1
    """Intra-operation threads of one process."""
    port: int = 0
    """Where the server listens; 0 takes a free port."""
    slurm: Slurm = field(default_factory=Slurm)

    def problems(self) -> Iterator[Problem]:
        """The rules that these settings break."""
        if self.threads < 1:
            yield Problem("launcher.threads", f"({self.threads}) must be at least 1")
        if not 0 <= self.port <= 65535:
            yield Problem("launcher.port", f"({self.port}) must be between 0 and 65535")
        yield from self.slurm.problems()


@dataclass(frozen=True, kw_only=True)
class Hardware:
    """The machine for which a plan predicts; it changes nothing that runs."""

    memory_gb: float | None = None
    """Device memory of one node, 1e9 bytes."""
    link_gbit_per_s: float | None = None
    """Speed of one node's uplink."""

    def problems(self) -> Iterator[Problem]:
        """The rules that these settings break."""
        for name, value in vars(self).items():
            if value is not None and value <= 0:
                yield Problem(f"hardware.{name}", f"({value:g}) must be above 0")
