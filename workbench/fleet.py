"""Rounds of many nodes, simulated: unequal links and speeds, failures, and one server, shards of it, or a tree.

A round: every node computes H steps at its own speed, sends what it trains, and receives what it lacks: the experts of
a layer once everyone has sent those of that layer, while later ones are still on their way up. A server's link serves
transfers in the order in which they begin, and is never idle while one waits. Shards have the tensors that
`sharding.deal` gives them, each sends back its own groups, and the slowest counts. In a tree each server has fan_out
children and passes on the shared tensors once for its whole subtree, and every expert of it; transfers are pipelined,
so the slowest level counts, and each level adds a round trip.

Not simulated: encoding, aggregation, merges, slow starts of connections, correlation of failures. Numbers are drawn
from a seed; spreads are the standard deviation of the logarithm around the stated value.
"""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import dataclass, replace
from itertools import groupby

import numpy as np
from numpy.typing import NDArray

from spes_core.config import LinkConfig, RunConfig
from spes_core.link import Direction, rate_bytes_per_s
from spes_core.model.counting import tensor_shapes
from spes_core.names import expert_of, layer_of
from spes_core.partition import make_partition
from spes_core.sharding import deal
from spes_core.wireformat import FORMATS
from workbench.costs import step_s

Array = NDArray[np.float64]
LARGEST_FLEET = 65_536
"""Up to where `server_limited_from` looks."""


@dataclass(frozen=True, kw_only=True)
class Fleet:
    """The nodes and servers of a run; their ordinary link is that of the run."""

    nodes: int
    device_tflops: float = 40.0
    """10^12 operations a second that an ordinary node reaches in training."""
    server_mbps: float | None = None
    """Link of each server, each direction, in 10^6 bits a second; None: no limit."""
    shards: int = 1
    """Servers that share the tensors (server.shards)."""
    fan_out: int | None = None
    """Children of each server of a tree; None: all nodes talk to the shards themselves."""
    speed_spread: float = 0.0
    link_spread: float = 0.0
    failures_per_node_hour: float = 0.0
    repair_s: float = 600.0
    """From a failure until the node computes again."""
    rounds: int = 20
    """Rounds that are simulated."""
    seed: int = 0


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """Means over the simulated rounds."""

    nodes: int
    round_s: float
    compute_s: float
    """Computing of an ordinary (median) node."""
    waiting_s: float
    """From then until the last node that is waited for has computed: slow and failed ones."""
    links_s: float
    """Transfer on the nodes' own links."""
    server_s: float
    """What the servers' links add."""
    utilisation: float
    """Share of all nodes' time that goes into steps that count."""
    present: float
    """Share of the nodes that take part in a round."""
    tokens_per_s: float

    @property
    def limit(self) -> str:
        """What takes most of a round."""
        parts = {
            "computing": self.compute_s,
            "slow or failed nodes": self.waiting_s,
            "node links": self.links_s,
            "server link": self.server_s,
        }
        return max(parts, key=lambda name: parts[name])


@dataclass(frozen=True, kw_only=True)
class Payloads:
    """Bytes of a round by node, without merge, as `counting.round_bytes` has them one by one."""

    up: Array
    down: Array
    shared: float
    """Bytes of all shared tensors."""
    experts: float
    """Bytes of all experts."""


def payloads(config: RunConfig, nodes: int) -> Payloads:
    """What each of ``nodes`` sends and receives in a round."""
    encoded, model = FORMATS[config.wire.dtype].encoded_bytes, config.model
    sizes = {name: encoded(math.prod(shape)) for name, shape in tensor_shapes(model).items()}
    shared = float(sum(size for name, size in sizes.items() if expert_of(name) is None))
    expert = float(sum(size for name, size in sizes.items() if expert_of(name) == 0))
    experts_by_node = make_partition(config.partition.kind, model.num_experts, nodes).experts_by_node
    owned = np.array([len(experts) for experts in experts_by_node], dtype=float)
    shares = Counter(experts_by_node)  # many nodes train the same experts where nodes are more than experts
    owners = Counter(dict.fromkeys(range(model.num_experts), 0))
    for experts, count in shares.items():
        owners.update(dict.fromkeys(experts, count))
    sole = {experts: sum(owners[expert] == 1 for expert in experts) for experts in shares}
    alone = np.array([sole[experts] for experts in experts_by_node], dtype=float)
    if config.outer.kind != "none":
        down = np.full(nodes, shared + model.num_experts * expert)
    else:
        down = (shared if nodes > 1 else 0.0) + (model.num_experts - alone) * expert
    return Payloads(up=shared + owned * expert, down=down, shared=shared, experts=model.num_experts * expert)


def simulate(config: RunConfig, fleet: Fleet) -> Outcome:
    """Simulate rounds of ``config`` on a fleet; each node takes the share of the batch that config gives one node."""
    random = np.random.default_rng(fleet.seed)
    sizes = payloads(config, fleet.nodes)
    experts = make_partition(config.partition.kind, config.model.num_experts, fleet.nodes).experts_by_node
    a_step_s = {owned: step_s(config, owned, fleet.device_tflops) for owned in set(experts)}
    steps = config.sync.interval_steps * np.array([a_step_s[owned] for owned in experts])
    computing = steps / np.exp(fleet.speed_spread * random.standard_normal(fleet.nodes))
    link_factor = np.exp(fleet.link_spread * random.standard_normal(fleet.nodes))
    up_s, down_s = (seconds / link_factor for seconds in _own_s(config.link, sizes))
    network = _Network(config, fleet, sizes, up_s, down_s)
    failures = _Failures(fleet, random, computing, config.round.quorum, config.round.lost_after_s)
    rows, now_s = [], 0.0
    for _ in range(fleet.rounds):
        start_s, present, ready_s, gone_s = failures.round(now_s)
        last_s = max(float(ready_s[present].max()), gone_s)
        links_s, all_s = network.transfer(present, ready_s, last_s)
        median_s = float(np.median(computing[present]))
        round_s = start_s - now_s + last_s + all_s
        waiting_s = start_s - now_s + last_s - median_s
        useful = float(computing[present].sum()) / (fleet.nodes * round_s)
        rows.append((round_s, median_s, waiting_s, links_s, all_s - links_s, useful, present.mean()))
        now_s += round_s
    round_s, compute_s, waiting_s, links_s, server_s, useful, present_share = np.mean(rows, axis=0).tolist()
    tokens = config.sync.interval_steps * config.tokens_per_step / config.nodes * fleet.nodes
    return Outcome(
        nodes=fleet.nodes,
        round_s=round_s,
        compute_s=compute_s,
        waiting_s=waiting_s,
        links_s=links_s,
        server_s=server_s,
        utilisation=useful,
        present=present_share,
        tokens_per_s=tokens * present_share / round_s,
    )


def server_limited_from(config: RunConfig, fleet: Fleet) -> int | None:
    """The smallest number of nodes at which the servers' links are slower than those of equal nodes; None: never.

    Looked for up to `LARGEST_FLEET` nodes.
    """

    def is_limited(nodes: int) -> bool:
        sizes = payloads(config, nodes)
        network = _Network(config, replace(fleet, nodes=nodes), sizes, *_own_s(config.link, sizes))
        links_s, all_s = network.transfer(np.ones(nodes, dtype=bool), np.zeros(nodes), 0.0)
        return all_s > links_s * (1 + 1e-9)

    if fleet.server_mbps is None or not is_limited(LARGEST_FLEET):
        return None
    low, high = 0, LARGEST_FLEET
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if is_limited(middle) else (middle, high)
    return high


def _own_s(link: LinkConfig, sizes: Payloads) -> tuple[Array, Array]:
    """Seconds of each node's upload and download on an ordinary link, without round trips."""
    directions: tuple[Direction, Direction] = ("up", "down")
    up, down = (rate_bytes_per_s(link, direction) for direction in directions)
    return sizes.up / up, sizes.down / down


class _Network:
    """Links of nodes and servers."""

    def __init__(self, config: RunConfig, fleet: Fleet, sizes: Payloads, up_s: Array, down_s: Array) -> None:
        self._sizes, self._up_s, self._down_s, self._fleet = sizes, up_s, down_s, fleet
        self._shards = _shards(config, fleet)
        server = LinkConfig(uplink_mbps=fleet.server_mbps, downlink_mbps=fleet.server_mbps)
        self._rate = rate_bytes_per_s(server, "up")
        self._rtt_s = config.link.rtt_ms / 1e3

    def transfer(self, present: NDArray[np.bool_], ready_s: Array, last_s: float) -> tuple[float, float]:
        """Seconds from ``last_s``, when nobody else is waited for, to the end of the last download: with own links
        alone, and with the servers' too.

        A group of tensors is sent back while later ones are still uploaded, but not before everyone has sent it. A node
        divides its link among the shards so that all its transfers to them end together. Three round trips: the upload
        is agreed on, confirmed, and the download asked for (`spes_core.link.round_s`).
        """
        ready = ready_s[present]
        up, down = self._sizes.up[present], self._sizes.down[present]
        up_s, down_s = self._up_s[present], self._down_s[present]
        trips_s = 3 * self._rtt_s * self._levels(len(ready))
        own_s = whole_s = 0.0
        for groups in self._shards:
            passed_up = np.cumsum(_split(up, self._sizes, groups), axis=0)
            left_down = np.cumsum(_split(down, self._sizes, groups)[::-1], axis=0)[::-1]
            for passed, left in zip(passed_up, left_down, strict=True):
                own_up_s = float((ready + up_s * _share(passed, passed_up[-1])).max())
                own_down_s = float((down_s * _share(left, left_down[0])).max())
                server_up_s, server_down_s = self._of_servers(ready, passed, left)
                own_s = max(own_s, own_up_s + own_down_s)
                whole_s = max(whole_s, max(own_up_s, server_up_s) + max(own_down_s, server_down_s))
        return own_s - last_s + trips_s, whole_s - last_s + trips_s

    def _of_servers(self, ready: Array, up: Array, down: Array) -> tuple[float, float]:
        """When the servers have taken so much of each upload, and the seconds that such downloads take them."""
        if math.isinf(self._rate):
            return 0.0, 0.0
        if self._fleet.fan_out is None:
            return queue_end(ready, up / self._rate), float(down.sum()) / self._rate
        # A part of the transfers of every level: the same of the shared tensors as of the experts.
        fan, count = self._fleet.fan_out, len(ready)
        all_up, all_down = float(self._sizes.up.max()), float(self._sizes.down.max())
        up_bytes, down_bytes, subtree = 0.0, 0.0, 1
        for level in range(self._levels(count)):
            children = min(fan, math.ceil(count / subtree))
            of_child = all_up if level == 0 else self._of_subtree(subtree, float(self._sizes.up.mean()))
            to_child = all_down if level == 0 else self._sizes.shared + self._sizes.experts
            up_bytes, down_bytes = max(up_bytes, children * of_child), max(down_bytes, children * to_child)
            subtree *= fan
        passed, left = float(up.max()) / all_up, float(down.max()) / all_down if all_down else 0.0
        return float(ready.max()) + passed * up_bytes / self._rate, left * down_bytes / self._rate

    def _of_subtree(self, nodes: int, up_bytes: float) -> float:
        """What a server passes on for the nodes below it: the shared tensors once, and all their experts."""
        own = up_bytes - self._sizes.shared
        return self._sizes.shared + min(self._sizes.experts, nodes * own)

    def _levels(self, nodes: int) -> int:
        if self._fleet.fan_out is None:
            return 1
        levels, reach = 1, self._fleet.fan_out
        while reach < nodes:
            levels, reach = levels + 1, reach * self._fleet.fan_out
        return levels


@dataclass(frozen=True)
class _Groups:
    """What a shard sends back as a whole, in the order of the wire: a layer's experts, or shared tensors in between."""

    shared: Array
    """Share of all the model's shared bytes that each group has."""
    experts: Array
    """Share of all the model's expert bytes."""


def _shards(config: RunConfig, fleet: Fleet) -> list[_Groups]:
    """What each server sends back, by the shares of the whole model."""
    encoded = FORMATS[config.wire.dtype].encoded_bytes
    shapes, all_changed = tensor_shapes(config.model), config.outer.kind != "none"
    sizes = {name: float(encoded(math.prod(shape))) for name, shape in shapes.items()}
    shared = sum(size for name, size in sizes.items() if expert_of(name) is None)
    experts = sum(sizes.values()) - shared
    partition = make_partition(config.partition.kind, config.model.num_experts, fleet.nodes)
    found = []
    for names in deal(shapes, fleet.shards, partition, all_changed=all_changed):
        rows = []
        for layer, group in groupby(names, lambda name: layer_of(name) if expert_of(name) is not None else None):
            size = sum(sizes[name] for name in group)
            rows.append((size / shared, 0.0) if layer is None else (0.0, size / experts))
        if rows:
            found.append(_Groups(*np.array(rows).T))
    return found


def _split(size: Array, sizes: Payloads, groups: _Groups) -> Array:
    """(group, node): the bytes of each group in what each node sends or receives."""
    shared = np.minimum(size, sizes.shared)
    return groups.shared[:, None] * shared + groups.experts[:, None] * (size - shared)


def _share(part: Array, whole: Array) -> Array:
    """What a part is of the whole; nothing of nothing."""
    return np.divide(part, whole, out=np.zeros_like(part), where=whole > 0)


def queue_end(ready: Array, service_s: Array) -> float:
    """When a link that serves in the order of readiness, never idle while something waits, has served all."""
    order = np.argsort(ready, kind="stable")
    served = np.cumsum(service_s[order])
    return float((ready[order] + served[-1] - (served - service_s[order])).max())


class _Failures:
    """Which nodes take part in a round, and when they have computed."""

    def __init__(
        self, fleet: Fleet, random: np.random.Generator, computing: Array, quorum: float, lost_after_s: float
    ) -> None:
        self._fleet, self._random, self._computing = fleet, random, computing
        self._needed, self._lost_after_s = math.ceil(quorum * fleet.nodes), lost_after_s
        self._waits_for_all = quorum == 1.0
        self._back_at_s = np.zeros(fleet.nodes)

    def round(self, now_s: float) -> tuple[float, NDArray[np.bool_], Array, float]:
        """(start, who takes part, when each has computed, when the last lost one was given up), the last two counted
        from the start.

        With a quorum of 1 everyone is waited for: a failed node repeats its steps after the repair. Below, it is given
        up after round.lost_after_s, and comes back with the first round after its repair.
        """
        chance = -np.expm1(-self._fleet.failures_per_node_hour * self._computing / 3600)
        if self._waits_for_all:
            # Failures before the first success, of which each costs a part of the steps and the repair.
            times = np.minimum(self._random.geometric(1 - np.minimum(chance, 0.999)) - 1, 1000)
            lost_s = times * (self._computing * self._random.random(self._fleet.nodes) + self._fleet.repair_s)
            everyone = np.ones(self._fleet.nodes, dtype=bool)
            return now_s, everyone, self._computing + lost_s, 0.0
        start_s = max(now_s, float(np.partition(self._back_at_s, self._needed - 1)[self._needed - 1]))
        there = self._back_at_s <= start_s
        fails = there & (self._random.random(self._fleet.nodes) < chance)
        at_s = self._computing * self._random.random(self._fleet.nodes)
        if (there & ~fails).sum() < self._needed:
            fails[:] = False  # too few are left: those that failed are waited for
        self._back_at_s[fails] = start_s + at_s[fails] + self._fleet.repair_s
        gone_s = float((at_s[fails] + self._lost_after_s).max()) if fails.any() else 0.0
        return start_s, there & ~fails, self._computing, gone_s
