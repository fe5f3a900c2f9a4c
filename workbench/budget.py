"""What one trial needs of the machine and what all may take together: cores, memory, GPUs. Pure but for `Budget.of`."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from spes_core.config import RunConfig
from spes_core.errors import Problem
from spes_core.model.counting import FEEDBACK_CODECS, FLOAT32_BYTES, memory, parameter_counts, sync_buffers_bytes
from workbench.errors import StudyError
from workbench.machine import available_memory_bytes, usable_cores, visible_gpus
from workbench.settings import Launcher, Resources
from workbench.spec import Study
from workbench.trials import Variant

_PROCESS_BYTES = 150 * 10**6
"""What a process takes beside what `counting` predicts: interpreter and libraries that it does not share."""
_GPU_PROCESS_BYTES = 2 * 10**9
"""The same of a process that computes on a GPU, whose driver keeps its own memory on the host."""
_SERVER_COPIES = 1.5
"""Memory of a server in copies of the model, beside momentum and residuals."""


@dataclass(frozen=True, kw_only=True)
class Need:
    """What one trial takes while it runs."""

    cores: int
    memory_bytes: int
    gpus: int


@dataclass(frozen=True, kw_only=True)
class Slot:
    """What was given to a trial that runs."""

    need: Need
    gpus: tuple[str, ...] | None
    """The GPUs that it may see, and no other trial; None where it sees all."""


@dataclass(kw_only=True)
class Budget:
    """What trials may take together, and what is left of it."""

    cores: int
    memory_bytes: int
    gpus: tuple[str, ...]
    divides_gpus: bool
    """Whether each trial sees its own GPUs only."""
    _taken: list[Slot] = field(default_factory=list)

    @classmethod
    def of(cls, resources: Resources) -> Budget:
        """The budget that the settings state, and for what they leave open, what this machine has now."""
        gpus = visible_gpus()
        stated_bytes = None if resources.memory_gb is None else int(resources.memory_gb * 1e9)
        return cls(
            cores=usable_cores() if resources.cpus is None else resources.cpus,
            memory_bytes=available_memory_bytes() if stated_bytes is None else stated_bytes,
            gpus=gpus if resources.gpus is None else gpus[: resources.gpus],
            divides_gpus=resources.parallel_trials != 1 or (resources.gpus, resources.gpus_per_trial) != (None, None),
        )

    def need(self, config: RunConfig, resources: Resources, launcher: Launcher) -> Need:
        """What a run takes here. Of cores nobody stated a number of, a run of more processes takes all there are."""
        cores = config.world_size * launcher.threads
        gpus = self._gpus(config, resources, launcher)
        if resources.trial_memory_gb is not None:
            memory_bytes = int(resources.trial_memory_gb * 1e9)
        else:
            memory_bytes = host_memory_bytes(config, on_gpu=gpus > 0)
        return Need(
            cores=min(cores, self.cores) if resources.cpus is None else cores, memory_bytes=memory_bytes, gpus=gpus
        )

    def _gpus(self, config: RunConfig, resources: Resources, launcher: Launcher) -> int:
        """As `spes_core.node` decides: "auto" takes a GPU for each process or none, "cuda" lets processes share."""
        if launcher.device == "cpu":
            return 0
        if resources.gpus_per_trial is not None:
            return resources.gpus_per_trial
        if len(self.gpus) >= config.world_size:
            return config.world_size
        return 0 if launcher.device == "auto" else len(self.gpus)

    def take(self, need: Need) -> Slot | None:
        """Set aside what a trial needs; None while it is not there. A trial that is alone always gets it."""
        held = {gpu for slot in self._taken for gpu in slot.gpus or ()}
        free = [gpu for gpu in self.gpus if gpu not in held]
        cores = sum(slot.need.cores for slot in self._taken) + need.cores
        memory_bytes = sum(slot.need.memory_bytes for slot in self._taken) + need.memory_bytes
        fits = cores <= self.cores and memory_bytes <= self.memory_bytes and need.gpus <= len(free)
        if self._taken and not fits:
            return None
        slot = Slot(need=need, gpus=tuple(free[: need.gpus]) if self.divides_gpus else None)
        self._taken.append(slot)
        return slot

    def give_back(self, slot: Slot) -> None:
        """What a trial that has ended had."""
        self._taken = [held for held in self._taken if held is not slot]


def host_memory_bytes(config: RunConfig, *, on_gpu: bool, nodes_here: int | None = None) -> int:
    """Predicted main memory of a run's processes on one machine: of all nodes, or so many; and of the server."""
    experts = config.make_partition().experts_by_node
    if config.sync.exchange == "gradients":
        nodes = [0]
    else:
        # Nodes that train equally many experts need the same: look at one of each kind.
        nodes = list({len(owned): node for node, owned in enumerate(experts)}.values())
    if on_gpu:
        each = max(sync_buffers_bytes(config, node) for node in nodes) + _GPU_PROCESS_BYTES
    else:
        each = max(memory(config, node).total_bytes for node in nodes) + _PROCESS_BYTES
    ranks = config.world_size if nodes_here is None else nodes_here * config.parallel.ranks_per_node
    total = ranks * each
    if config.sync.exchange == "rounds":
        copies = _SERVER_COPIES + (config.outer.kind != "none") + (config.wire.dtype in FEEDBACK_CODECS)
        total += int(copies * FLOAT32_BYTES * parameter_counts(config.model, ()).total)
        total += len(config.servers) * _PROCESS_BYTES
    return total


def require_room(study: Study, variants: Sequence[Variant], budget: Budget) -> None:
    """Each trial must fit when it runs alone. Raises StudyError, which names the one that needs most."""
    resources = study.resources
    needs = [(budget.need(variant.config, resources, study.launcher), variant) for variant in variants]
    mistakes = [study.locate(problem) for problem in _shortages(needs, resources, study.launcher, budget)]
    if mistakes:
        raise StudyError(mistakes)


def _shortages(
    needs: Sequence[tuple[Need, Variant]], resources: Resources, launcher: Launcher, budget: Budget
) -> Iterator[Problem]:
    need, variant = max(needs, key=lambda item: item[0].cores)
    if need.cores > budget.cores:
        message = (
            f"({budget.cores}) must be at least the {need.cores} cores of {variant.label} ({variant.config.world_size}"
            f" processes of launcher.threads {launcher.threads}); raise it, or leave it out: processes then share cores"
        )
        yield Problem("resources.cpus", message)
    need, variant = max(needs, key=lambda item: item[0].memory_bytes)
    if need.memory_bytes > budget.memory_bytes:
        stated = resources.memory_gb is not None
        limit = f"({resources.memory_gb:g})" if stated else f"(null: {budget.memory_bytes / 1e9:.3g} GB are free here)"
        why = "resources.trial_memory_gb" if resources.trial_memory_gb is not None else "the prediction"
        message = (
            f"{limit} must be at least the {need.memory_bytes / 1e9:.3g} GB of {variant.label} ({why}); lower nodes or"
            " the model, or state here what there is"
        )
        yield Problem("resources.memory_gb", message)
    yield from _missing_gpus(needs, resources, launcher, budget)


def _missing_gpus(
    needs: Sequence[tuple[Need, Variant]], resources: Resources, launcher: Launcher, budget: Budget
) -> Iterator[Problem]:
    there = len(visible_gpus())
    if resources.gpus is not None and resources.gpus > there:
        yield Problem("resources.gpus", f"({resources.gpus}) must not exceed the {there} GPUs that are visible here")
        return
    given = resources.gpus_per_trial
    if given is None or launcher.device == "cpu":
        return
    if given > len(budget.gpus):
        yield Problem(
            "resources.gpus_per_trial", f"({given}) must not exceed the {len(budget.gpus)} GPUs of all trials"
        )
        return
    largest = max((variant for _, variant in needs), key=lambda variant: variant.config.world_size)
    if launcher.device == "auto" and 0 < given < (processes := largest.config.world_size):
        message = (
            f"({given}) must be 0 or at least the {processes} processes of {largest.label}: with launcher.device auto"
            " they would all compute on the CPU; set launcher.device to cuda to let them share"
        )
        yield Problem("resources.gpus_per_trial", message)
