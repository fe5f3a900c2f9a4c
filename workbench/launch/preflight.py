"""What is wrong with hosts before trials run on them: everything at once, found by asking an agent on each."""

from __future__ import annotations

import contextlib
import platform
import secrets
import shlex
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

from workbench.launch.checked import Checked, each
from workbench.launch.codecopy import Arrived, archive, deliver
from workbench.launch.hostlink import HostLink
from workbench.launch.inventory import Inventory, agent_site, connector
from workbench.launch.launcher import LaunchError
from workbench.launch.reach import try_group, try_server
from workbench.launch.remote import Placement, Site
from workbench.launch.room import Room
from workbench.provenance import PACKAGES, code_digest, package_version

MAX_SKEW_S = 2.0
MIN_FREE_BYTES = 0.2e9
"""What the code and the logs of any study take; more is computed from the study."""
_CLOCK_READINGS = 3
_ANSWER_S = 120.0
_OURS = "spes-workbench"
"""The package that is copied, whatever version is installed there."""


@dataclass(frozen=True)
class Preflight:
    """What was found, and the connections that were made: for a launcher to take over, or to be closed."""

    checked: tuple[Checked, ...]
    groups: tuple[tuple[str, ...], ...] = ()
    """Hosts that share a group which exchanges gradients."""

    @property
    def notes(self) -> list[str]:
        """What is not wrong, and to be known."""
        return [
            f"{' and '.join(group)} exchange gradients at every step, unencrypted and for anyone who reaches their"
            " ports (torch.distributed has neither TLS nor passwords): use a private network"
            for group in self.groups
        ]

    @property
    def problems(self) -> list[str]:
        """One line for each, in the order of the hosts."""
        return [problem for one in self.checked for problem in one.problems]

    @property
    def sites(self) -> list[Site]:
        """The hosts as a launcher uses them, once there is no problem."""
        return [agent_site(one.host, one.arrived.path) for one in self.checked if one.arrived is not None]

    @property
    def links(self) -> list[HostLink]:
        """The connections to agents that have answered."""
        return [one.link for one in self.checked if one.link is not None]

    def close(self) -> None:
        """End the agents."""
        with ThreadPoolExecutor(max_workers=max(1, len(self.links))) as pool:
            list(pool.map(HostLink.close, self.links))


def check(
    inventory: Inventory,
    *,
    port: int = 0,
    placements: Iterable[Placement] = (),
    rooms: Mapping[str, Room] | None = None,
) -> Preflight:
    """Ask every host; our code is copied to those that can run it.

    ``port`` is that of a server, or of the first rank of a group, 0 for any free one; ``placements`` are those of the
    trials that will run, ``rooms`` what they need on the disk of each host.
    """
    placements = tuple(placements)
    groups = tuple(dict.fromkeys(placement.hosts for placement in placements if placement.spread))
    checked = tuple(Checked(host) for host in inventory.hosts)
    content, found = archive(), Preflight(checked, groups)
    with ThreadPoolExecutor(max_workers=len(checked)) as pool:
        try:
            each(pool, checked, lambda one: _ask(one, content))
            there = [one for one in checked if one.link is not None]
            if rooms is not None:
                each(pool, there, lambda one: _find_room(one, rooms.get(one.host.name, Room())))
            _find_shared_folders(there)
            for server in (one for one in there if one.host in inventory.servers):
                for further in range(_most_servers(server.host.name, placements) if port else 1):
                    try_server(pool, server, there, port and port + further)
            by_name = {one.host.name: one for one in there}
            for group in groups:
                if by_name.keys() >= set(group):
                    try_group(pool, [by_name[name] for name in group], port)
        except BaseException:  # also Ctrl-C, when the pool's threads still wait for slow hosts
            for one in checked:
                one.abandon()
            raise
    return found


def _most_servers(host: str, placements: Sequence[Placement]) -> int:
    """How many servers a host has at once, at consecutive ports; one at least."""
    return max([1, *(placement.servers.count(host) for placement in placements)])


def _ask(one: Checked, content: bytes) -> None:
    host = one.host

    def is_wanted(arrived: Arrived) -> bool:
        one.problems += [f"host {host.name}: {problem}" for problem in _other_versions(arrived)]
        return not one.problems

    # deliver asks this only where the code is missing
    one.arrived = deliver(
        host.name, lambda argv: connector(host, argv), host.interpreter, host.folder, is_wanted=is_wanted,
        content=content, by_hand=shlex.join(("ssh", *host.ssh_options, host.ssh)), on_start=one.note_copying,
    )  # fmt: skip
    if not one.problems:
        one.problems += [f"host {host.name}: {problem}" for problem in _other_versions(one.arrived)]
    if one.problems:
        return
    link = HostLink(host.name, agent_site(host, one.arrived.path).connector, lambda *_: None, lambda _: None)
    one.note_link(link)
    one.facts = link.ask("facts", timeout_s=_ANSWER_S)
    one.skew_s, one.round_trip_s = _clock(link)
    for problem in _problems_of(one):
        one.blame(problem)


def _other_versions(arrived: Arrived) -> Iterator[str]:
    """Where the interpreter and its packages are not those of here, on which numbers may depend."""
    here = platform.python_version()
    if arrived.python.split(".")[:2] != here.split(".")[:2]:
        yield f"Python {arrived.python} there, {here} here: both must be of the same minor version"
    both = {name: (arrived.packages.get(name), package_version(name)) for name in PACKAGES if name != _OURS}
    if missing := [f"{name} {own}" for name, (there, own) in both.items() if there is None and own is not None]:
        yield f"its Python has no {', '.join(missing)}: install them there, or name another interpreter as python"
    for name, (there, own) in both.items():
        if there is not None and there != own:
            yield f"{name} {there} there, {own or 'not installed'} here: install the same"


def _clock(link: HostLink) -> tuple[float, float]:
    """(how far a host's clock is ahead, round trip), both in seconds, of the quickest of some answers."""
    readings = []
    for _ in range(_CLOCK_READINGS):
        sent_s, started_s = time.time(), time.monotonic()
        answer = link.ask("ping", timeout_s=_ANSWER_S)
        trip_s = time.monotonic() - started_s
        readings.append((trip_s, answer["time_s"] - (sent_s + trip_s / 2)))
    trip_s, ahead_s = min(readings)
    return ahead_s, trip_s


def _problems_of(one: Checked) -> Iterator[str]:
    facts, host = one.facts, one.host
    if facts["code_digest"] != code_digest():
        yield (
            f"its agent runs the code {facts['code_digest'][:12]} from {facts['package']}, not {code_digest()[:12]}"
            " as here; take other copies of spes_core out of its Python's path"
        )
    if facts["free_bytes"] < MIN_FREE_BYTES:
        free_gb, least_gb = facts["free_bytes"] / 1e9, MIN_FREE_BYTES / 1e9
        yield f"{facts['work']} has {free_gb:.1g} GB free, less than {least_gb:g}; free some"
    if abs(one.skew_s) - one.round_trip_s / 2 > MAX_SKEW_S:
        way = "ahead of" if one.skew_s > 0 else "behind"
        yield f"its clock is {abs(one.skew_s):.1f} s {way} the one here, more than {MAX_SKEW_S:g} s; set both"
    if len(facts["gpus"]) < host.gpus:
        yield f"it shows {len(facts['gpus'])} GPUs, but gpus is {host.gpus}; lower that or mend its driver"


def _find_room(one: Checked, room: Room) -> None:
    """Whether what trials store, and what is copied for them, has room; what lies there of trials is theirs again."""
    assert one.link is not None
    missing = [size for place, size in room.copies.items() if not one.link.ask("has", path=place)["there"]]
    needed, free = room.trials_bytes + sum(missing), one.facts["free_bytes"] + one.facts["trials_bytes"]
    if free < needed:
        one.blame(
            f"{one.facts['work']} has {free / 1e9:.3g} GB for the study, which needs {needed / 1e9:.3g}: checkpoints,"
            f" rounds and weights {room.trials_bytes / 1e9:.3g}, text and first weights {sum(missing) / 1e9:.3g}; free"
            " some, or lower resources.parallel_trials, checkpoint.keep or checkpoint.interval_rounds"
        )


def _find_shared_folders(there: Sequence[Checked]) -> None:
    """Entries whose work folder is one and the same, as through two names or a network's file system."""
    nonce = f"preflight-{secrets.token_hex(8)}"
    with contextlib.suppress(LaunchError):  # a host that is lost now is told of by what comes next
        for index, one in enumerate(there):
            assert one.link is not None
            earlier = [
                other.host.name
                for number, other in enumerate(there[:index])
                if one.link.ask("has", path=f"{nonce}/{number}")["there"]
            ]
            if earlier:
                one.blame(f"its work folder {one.facts['work']} is that of {earlier[0]} too; give each host its own")
            one.link.put(f"{nonce}/{index}", b"")
    for one in there:
        assert one.link is not None
        try:
            one.link.ask("remove", folder=nonce)
        except LaunchError as error:
            one.blame(str(error))
