"""One node's part in rounds of several servers: an exchange with each, of its tensors, all at the same time.

Servers know nothing of each other. Since every round needs every node, none gets further than one round ahead.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import fields, replace
from functools import partial
from typing import Any, Self, TypeVar

import torch
from torch import Tensor

from spes_core.config import RunConfig
from spes_core.errors import ProtocolError
from spes_core.model.counting import tensors_by_shard
from spes_core.model.decoder import Decoder
from spes_core.sharding import joined_digest
from spes_core.sync.client import Client
from spes_core.sync.codec import Values
from spes_core.train.exchange import Entry, Exchange, RoundReport
from spes_core.train.weights import LocalWeights

T = TypeVar("T")

_ABORT_S = 0.1
"""How often the others are ended once one exchange has failed."""
_SUMS = tuple(field.name for field in fields(RoundReport) if field.name.endswith("_bytes"))


class ShardedExchange:
    """`Exchange` with several servers; see `train.surroundings.RoundExchange`. A context manager."""

    def __init__(
        self,
        clients: Sequence[Client],
        tensors: Mapping[str, Tensor],
        node: int,
        config: RunConfig,
        *,
        exact: Callable[[str], Values] | None = None,
        experts: tuple[int, ...] | None = None,
    ) -> None:
        """``tensors`` are the node's own, all of them; ``clients`` in the order of the servers. See `Exchange`."""
        self._node = node
        self._parts = []
        for client, names in zip(clients, tensors_by_shard(config), strict=True):
            weights = LocalWeights({name: tensors[name] for name in names})
            part = Exchange(client, weights, config.make_partition(), node, config, exact=exact, experts=experts)
            self._parts.append(part)
        self._heartbeats = ThreadPoolExecutor(len(self._parts), thread_name_prefix="heartbeat")
        self._beating: dict[int, Future[None]] = {}

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._heartbeats.shutdown(wait=False, cancel_futures=True)

    @property
    def safe_round(self) -> int:
        """See `Exchange`."""
        return self._parts[0].safe_round

    @safe_round.setter
    def safe_round(self, round: int) -> None:
        for part in self._parts:
            part.safe_round = round

    @property
    def buffer_bytes(self) -> int:
        """See `Exchange`."""
        return sum(part.buffer_bytes for part in self._parts)

    def join(self, round: int = 0) -> Entry:
        """See `Exchange.join`."""
        return self._entry([part.join(round) for part in self._parts])

    def rejoin(self) -> Entry:
        """See `Exchange.rejoin`."""
        return self._entry([part.rejoin() for part in self._parts])

    def heartbeat(self, step: int) -> None:
        """Tell each server that this node lives, none later because another is away; what goes wrong is not told."""
        for index, part in enumerate(self._parts):
            if (former := self._beating.get(index)) is None or former.done():
                self._beating[index] = self._heartbeats.submit(part.heartbeat, step)

    def run_round(self, round: int, step: int, tokens: int) -> RoundReport:
        """See `Exchange.run_round`. When one server's part fails all end, and what failed first is raised."""
        for part in self._parts:
            part.begin_round(round)
        return _joined(self._together([partial(part.carry_round, round, step, tokens) for part in self._parts]))

    def redivide(self, decoder: Decoder, optimizer: torch.optim.Optimizer, experts: tuple[int, ...]) -> Any:
        """Servers that each decide for themselves deal no experts anew."""
        raise ProtocolError(f"a server dealt experts {list(experts)} to node {self._node}; of several servers none may")

    def state(self) -> dict[str, Tensor]:
        """See `Exchange.state`."""
        return {name: tensor for part in self._parts for name, tensor in part.state().items()}

    def restore(self, state: Mapping[str, Tensor]) -> None:
        """See `Exchange.restore`."""
        for part in self._parts:
            part.restore(state)

    def _entry(self, entries: Sequence[Entry]) -> Entry:
        rounds = [entry.round for entry in entries]
        if len(set(rounds)) > 1:
            raise ProtocolError(
                f"the servers stand at different rounds ({', '.join(map(str, rounds))}) and wait for node {self._node},"
                " which has no checkpoint from before; remove the checkpoints and the rounds of this run and start all"
                " its processes anew"
            )
        return replace(entries[0], is_snapshot=any(entry.is_snapshot for entry in entries))

    def _together(self, tasks: Sequence[Callable[[], T]]) -> list[tuple[int, T]]:
        """Every task in a thread of its own: (index, result) in the order in which they ended."""
        outcomes: queue.SimpleQueue[tuple[int, T | BaseException]] = queue.SimpleQueue()

        def run(index: int) -> None:
            try:
                outcomes.put((index, tasks[index]()))
            except BaseException as error:
                outcomes.put((index, error))

        threads = [threading.Thread(target=run, args=(i,), name=f"shard-{i}", daemon=True) for i in range(len(tasks))]
        for thread in threads:
            thread.start()
        ended: list[tuple[int, T]] = []
        try:
            while len(ended) < len(tasks):
                index, outcome = outcomes.get()
                if isinstance(outcome, BaseException):
                    raise outcome
                ended.append((index, outcome))
        except BaseException:
            self._abort(threads)
            raise
        return ended

    def _abort(self, threads: Sequence[threading.Thread]) -> None:
        """End what is still under way: a transfer may only be about to begin, so it is said until it has ended."""
        while alive := [part for part, thread in zip(self._parts, threads, strict=True) if thread.is_alive()]:
            for part in alive:
                part.abort()
            threads[self._parts.index(alive[0])].join(_ABORT_S)


def _joined(ended: Sequence[tuple[int, RoundReport]]) -> RoundReport:
    """One report of a round: bytes of all servers, and the times of the one that ended last, for which the node waited.

    What they all say alike is taken from it too.
    """
    reports = [report for _, report in sorted(ended, key=lambda item: item[0])]
    slowest = ended[-1][1]
    sums = {name: sum(getattr(report, name) for report in reports) for name in _SUMS}
    return replace(slowest, digest=joined_digest([report.digest for report in reports]), **sums)
