"""What is wrong with hosts before trials run on them: everything at once, found by asking an agent on each."""

from __future__ import annotations

import contextlib
import platform
import secrets
import shlex
import signal
import subprocess
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

from workbench.launch.codecopy import Arrived, archive, deliver
from workbench.launch.hostlink import HostLink
from workbench.launch.inventory import Host, Inventory, agent_site, connector
from workbench.launch.launcher import LaunchError, signal_group
from workbench.launch.ports import host_and_port
from workbench.launch.remote import Site
from workbench.provenance import PACKAGES, code_digest, package_version

MAX_SKEW_S = 2.0
MIN_FREE_BYTES = 2e9
_CALL_S = 5.0
_LISTEN_S = 60.0
_CLOCK_READINGS = 3
_ANSWER_S = 120.0
_OURS = "spes-workbench"
"""The package that is copied, whatever version is installed there."""


@dataclass
class Checked:
    """What is known of one host."""

    host: Host
    arrived: Arrived | None = None
    facts: dict[str, Any] = field(default_factory=dict)
    skew_s: float = 0.0
    """How far its clock is ahead of this one."""
    round_trip_s: float = 0.0
    problems: list[str] = field(default_factory=list)
    link: HostLink | None = None
    copying: subprocess.Popen[bytes] | None = None
    """The command that copies the code there."""

    def abandon(self) -> None:
        """Make whatever waits for this host wait no longer."""
        if self.copying is not None and self.copying.poll() is None:
            signal_group(self.copying.pid, signal.SIGKILL)
        if self.link is not None:
            self.link.close()

    def note_copying(self, process: subprocess.Popen[bytes]) -> None:
        """The copying of the code has begun."""
        self.copying = process

    def blame(self, problem: str) -> None:
        """Note a problem of this host, by its name, once."""
        named = f"host {self.host.name}: "
        line = problem if problem.startswith(named) else named + problem
        if line not in self.problems:
            self.problems.append(line)


@dataclass(frozen=True)
class Preflight:
    """What was found."""

    checked: tuple[Checked, ...]

    @property
    def problems(self) -> list[str]:
        """One line for each, in the order of the hosts."""
        return [problem for one in self.checked for problem in one.problems]

    @property
    def sites(self) -> list[Site]:
        """The hosts as a launcher uses them, once there is no problem."""
        return [agent_site(one.host, one.arrived.path) for one in self.checked if one.arrived is not None]


def check(inventory: Inventory, *, port: int = 0) -> Preflight:
    """Ask every host; our code is copied to those that can run it. ``port`` is the server's, 0 for any free one."""
    checked = tuple(Checked(host) for host in inventory.hosts)
    content = archive()
    with ThreadPoolExecutor(max_workers=len(checked)) as pool:
        try:
            _each(pool, checked, lambda one: _ask(one, content))
            there = [one for one in checked if one.link is not None]
            _find_shared_folders(there)
            server = next((one for one in there if one.host == inventory.server), None)
            if server is not None:
                _try_port(pool, server, there, port)
        finally:
            for one in checked:  # also after Ctrl-C, when the pool's threads still wait for slow hosts
                one.abandon()
    return Preflight(checked)


def _each(pool: ThreadPoolExecutor, checked: Sequence[Checked], work: Callable[[Checked], None]) -> None:
    """Do something for every host at the same time; what cannot be done is a problem of that host."""

    def one_by_one(one: Checked) -> None:
        try:
            work(one)
        except LaunchError as error:
            one.blame(str(error))

    list(pool.map(one_by_one, checked))


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
    one.link = HostLink(host.name, agent_site(host, one.arrived.path).connector, lambda *_: None, lambda _: None)
    one.facts = one.link.ask("facts", timeout_s=_ANSWER_S)
    one.skew_s, one.round_trip_s = _clock(one.link)
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


def _try_port(pool: ThreadPoolExecutor, server: Checked, there: Sequence[Checked], port: int) -> None:
    """Whether every host reaches a server that listens where ours will."""
    assert server.link is not None
    host, nonce = server.host, secrets.token_hex(16)
    listen = host.listens_at
    try:
        port = port or int(server.link.ask("free_port", address=listen)["port"])
        server.link.ask("listen", address=listen, port=port, nonce=nonce, seconds=_LISTEN_S)
    except LaunchError as error:
        where = host_and_port(listen, port) if port else listen
        why = str(error).partition(": ")[2]
        server.blame(why if server.link.lost else f"it cannot listen at {where}: {why}; mend address or listen")
        return

    def call(one: Checked) -> None:
        assert one.link is not None
        try:
            one.link.ask("call", address=host.reached_at, port=port, nonce=nonce, seconds=_CALL_S)
        except LaunchError as error:
            why = str(error).partition(": ")[2]
            unreached = f"the server's host {host.name} cannot be reached from it: {why}; open the port"
            one.blame(why if one.link.lost else unreached)

    _each(pool, there, call)
