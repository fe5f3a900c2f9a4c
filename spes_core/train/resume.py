"""What one training process stores to go on after a crash, and takes up again: weights, moments, counters.

Each rank stores the part that it holds. Tensor names are ``weights|<parameter>``, ``buffers|<buffer>``,
``optimizer|<parameter>|<key>``, ``log|<metric>`` (what the next training event will be the mean of) and
``exchange|<kind>|<tensor>`` (what the exchange keeps beside the weights).
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from spes_core import snapshots
from spes_core.config import RunConfig
from spes_core.errors import DataError
from spes_core.schedules import checkpoint_steps
from spes_core.tensorfile import read_tensors, write_tensors
from spes_core.train.parallel import divided_like, local_part


class Checkpoints:
    """The checkpoints of one training process in a trial's folder."""

    def __init__(
        self,
        config: RunConfig,
        trial_dir: Path,
        participant: str,
        agree: Callable[[Collection[int]], int] | None = None,
    ) -> None:
        """Decides at once from which step to go on: ``step``, 0 for a fresh start.

        ``agree`` finds the newest of the steps that all ranks have stored, where some have another folder than this.
        """
        self._config, self._trial_dir, self._participant = config, trial_dir, participant
        self._due = frozenset(checkpoint_steps(config))
        if agree is None:
            self.step = snapshots.resume_step(config, trial_dir, participant)
        else:
            self.step = agree(snapshots.stored_steps(config, trial_dir, participant))
        self.round, self.events_bytes = 0, 0
        """Rounds closed, and size of the event file, when it was stored."""
        self.experts: tuple[int, ...] | None = None
        """The experts that were trained then; None for a fresh start."""
        if self.step:
            self._manifest, self._data = snapshots.load(trial_dir, participant, self.step)
            self.round, self.events_bytes = self._manifest.round, self._manifest.events_bytes
            self.experts = tuple(self._manifest.values["experts"])

    def is_due(self, step: int) -> bool:
        """Whether a checkpoint is stored after ``step``."""
        return step in self._due

    @torch.no_grad()
    def restore(self, module: nn.Module, optimizer: torch.optim.Optimizer) -> tuple[dict[str, Tensor], dict[str, Any]]:
        """Set weights and moments in place; returns the other tensors that were stored, and the numbers."""
        targets = {f"weights|{name}": local_part(item) for name, item in module.named_parameters()}
        targets |= {f"buffers|{name}": local_part(item) for name, item in module.named_buffers()}
        parameters = dict(module.named_parameters())
        devices, others = self._manifest.values["optimizer_devices"], {}
        missing = set(targets)
        for name, tensor in read_tensors(self._data):
            kind, _, rest = name.partition("|")
            if kind in ("weights", "buffers") and name in targets and targets[name].shape == tensor.shape:
                targets[name].copy_(tensor)
                missing.discard(name)
            elif kind == "optimizer" and (parameter := parameters.get(rest.partition("|")[0])) is not None:
                state = optimizer.state[parameter]
                device = parameter.device if devices[name] != "cpu" else torch.device("cpu")
                state[rest.partition("|")[2]] = _placed(tensor.to(device, copy=True), parameter)
            elif kind in ("log", "exchange"):
                others[name] = tensor.clone()
            else:
                raise DataError(f"{self._data} holds {name}, which this model has not; start the run anew")
        if missing:
            raise DataError(f"{self._data} lacks {', '.join(sorted(missing))}; start the run anew")
        for name, value in self._manifest.values["optimizer_values"]:
            parameter_name, _, key = name.partition("|")
            optimizer.state[parameters[parameter_name]][key] = value
        return others, self._manifest.values

    def save(
        self,
        module: nn.Module,
        optimizer: torch.optim.Optimizer,
        others: dict[str, Tensor],
        values: dict[str, Any],
        *,
        step: int,
        round: int,
        events_bytes: int,
    ) -> None:
        """Store a checkpoint; ``others`` and ``values`` come back from `restore`."""
        tensors = {f"weights|{name}": local_part(item.detach()) for name, item in module.named_parameters()}
        tensors |= {f"buffers|{name}": local_part(item) for name, item in module.named_buffers()}
        states = list(_states(module, optimizer))
        moments = {f"optimizer|{name}": local_part(value) for name, value in states if isinstance(value, Tensor)}
        snapshots.store(
            self._config,
            snapshots.folder_of(self._trial_dir, self._participant),
            lambda path: write_tensors(path, {**tensors, **moments, **others}),
            step=step,
            round=round,
            events_bytes=events_bytes,
            values={
                **values,
                "optimizer_devices": {name: tensor.device.type for name, tensor in moments.items()},
                "optimizer_values": [(name, value) for name, value in states if not isinstance(value, Tensor)],
            },
        )


def _states(module: nn.Module, optimizer: torch.optim.Optimizer) -> Iterator[tuple[str, Any]]:
    """("parameter|key", value) of everything that the optimizer keeps for a parameter."""
    for name, parameter in module.named_parameters():
        for key, value in optimizer.state.get(parameter, {}).items():
            yield f"{name}|{key}", value


def _placed(local: Tensor, parameter: Tensor) -> Tensor:
    """A moment is divided like its parameter; a counter is whole on every rank."""
    is_moment = local.dim() > 0 and local.shape == local_part(parameter).shape
    return divided_like(local, parameter) if is_moment else local
