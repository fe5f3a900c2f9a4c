"""The inventory of hosts, `hosts.yaml`: what there is, which host takes which process of a run, how each is reached."""

from __future__ import annotations

import itertools
import shlex
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import chain, islice, repeat
from pathlib import Path

from spes_core.config import LinkConfig, RunConfig
from spes_core.errors import ConfigError, Problem, SpesError
from spes_core.structure import build
from workbench.errors import StudyError
from workbench.launch.ports import bare, is_host, is_unspecified
from workbench.launch.remote import Placement, Site
from workbench.yamlsource import Source, read_yaml

_DEFAULTS = (
    "-T", "-o", "BatchMode=yes", "-o", "ConnectTimeout=20", "-o", "ServerAliveInterval=15",
    "-o", "ServerAliveCountMax=4", "-o", "LogLevel=ERROR",
)  # fmt: skip
"""How hosts are called: a host that wants a password or a confirmation fails at once instead of waiting for one, no
terminal alters what is sent, and of banners nothing is said."""

TEMPLATE = """\
# Hosts for `launcher: ssh`; check them with: python -m workbench.hosts check hosts.yaml
hosts:
  - name: a                      # what messages call it
    ssh: a                       # destination as the ssh program knows it: a name of ~/.ssh/config, user@host, ...
    address: 192.0.2.10          # name or address by which the other hosts reach it
    work_dir: spes               # folder for everything of ours there; a relative one is below the home folder
    python: venv/bin/python      # interpreter that has the same packages as here
    nodes: 1                     # how many training nodes it takes
    gpus: 0
    server: true                 # has the server; several hosts may say so where server.shards is above 1
  - name: b
    ssh: b
    address: 192.0.2.11
    work_dir: spes
    python: venv/bin/python
    # listen: 0.0.0.0            # where a server there listens, if not at its address
    # ssh_options: [-p, "2222"]
    # link: {uplink_mbps: 100, downlink_mbps: 100, rtt_ms: 20}
"""


class PlacementError(SpesError):
    """The hosts of an inventory cannot take a run."""


@dataclass(frozen=True, kw_only=True)
class Host:
    """A host that takes processes of trials."""

    name: str
    ssh: str
    """Destination as the ssh program knows it."""
    address: str
    """Name or address by which the other hosts reach it."""
    work_dir: str
    """Folder for everything of ours there; a relative one is below the home folder."""
    python: str
    """Interpreter there, with the packages that are installed here."""
    nodes: int = 1
    """How many nodes of a trial it takes."""
    gpus: int = 0
    server: bool = False
    """Whether it may have a server. The first of these hosts (or of all, where none says so) has that of a run; several
    servers (server.shards) take them in turn."""
    listen: str | None = None
    """Address at which a server there listens; null: `address`."""
    ssh_options: tuple[str, ...] = ()
    """Further arguments of the ssh program."""
    link: LinkConfig = field(default_factory=LinkConfig)
    """The link between it and the others, for predictions."""

    def problems(self, at: str) -> Iterator[Problem]:
        """The rules that it breaks by itself; ``at`` is its path in the file."""
        for name in ("name", "ssh", "address", "work_dir", "python"):
            if not getattr(self, name) or not getattr(self, name).isprintable():
                yield Problem(f"{at}.{name}", "must be some printable text")
        if self.ssh.startswith("-"):
            yield Problem(f"{at}.ssh", f"({self.ssh}) must be a destination; options belong in ssh_options")
        for name in ("address", "listen"):
            if (given := getattr(self, name)) and given.isprintable() and not is_host(bare(given)):
                yield Problem(f"{at}.{name}", f"({given}) must be a host name or an IP address, without a port")
        if is_unspecified(self.reached_at):
            yield Problem(f"{at}.address", f"({self.address}) is none that others can call; it belongs in listen")
        for name, path in (("work_dir", self.work_dir), ("python", self.python)):
            if path.startswith("~") and path != "~" and not path.startswith("~/"):
                yield Problem(f"{at}.{name}", f"({path}) must begin with / or ~/, or be relative to the home folder")
        if self.nodes < 0:
            yield Problem(f"{at}.nodes", f"({self.nodes}) must not be negative")
        if self.gpus < 0:
            yield Problem(f"{at}.gpus", f"({self.gpus}) must not be negative")

    @property
    def reached_at(self) -> str:
        """`address` without the brackets of IPv6."""
        return bare(self.address)

    @property
    def listens_at(self) -> str:
        """Where a server there listens, without the brackets of IPv6."""
        return bare(self.listen or self.address)

    @property
    def folder(self) -> str:
        """`work_dir` without the ~ that no shell will expand."""
        return self.work_dir.removeprefix("~/") if self.work_dir != "~" else "."

    @property
    def interpreter(self) -> str:
        """`python` without the ~ that no shell will expand."""
        return self.python.removeprefix("~/")


@dataclass(frozen=True)
class Inventory:
    """All hosts of a file, in its order."""

    hosts: tuple[Host, ...]
    path: str = "hosts.yaml"
    """The file, for messages."""

    @property
    def servers(self) -> tuple[Host, ...]:
        """The hosts that may have a server, that of a run's only one first."""
        return tuple(host for host in self.hosts if host.server) or self.hosts[:1]

    def place(self, config: RunConfig) -> Placement:
        """Which hosts take the processes of a run; always the same for the same run. Raises PlacementError.

        Nodes fill the hosts in the file's order, whatever they exchange; the ranks of one node stay together. Servers
        that share the tensors take the hosts for servers in turn. Where there is no server, the first node's host
        stands for it.
        """
        room = sum(host.nodes for host in self.hosts)
        if room < config.nodes:
            raise PlacementError(
                f"nodes ({config.nodes}) must be at most the {room} that the hosts of {self.path} take together"
                " (nodes of each host); add hosts, or raise theirs"
            )
        names = chain.from_iterable(repeat(host.name, host.nodes) for host in self.hosts)
        nodes, ranks = tuple(islice(names, config.nodes)), config.parallel.ranks_per_node
        taken = Counter(nodes)
        for host in self.hosts:
            if taken[host.name]:
                self._require_gpus(host, taken[host.name] * ranks, config)
        if config.sync.exchange == "gradients":
            return Placement(nodes[:1], tuple(host for host in nodes for _ in range(ranks)), is_group=True)
        hosts = itertools.cycle(self.servers)
        return Placement(tuple(next(hosts).name for _ in config.servers) or nodes[:1], nodes)

    def _require_gpus(self, host: Host, ranks: int, config: RunConfig) -> None:
        """Several ranks for a node are for GPUs; where there are some, each rank must have its own."""
        if config.parallel.ranks_per_node > 1 and 0 < host.gpus < ranks:
            raise PlacementError(
                f"host {host.name} has {host.gpus} GPUs (gpus in {self.path}) for {ranks} ranks"
                f" (parallel.ranks_per_node {config.parallel.ranks_per_node}); lower its nodes or the ranks"
            )


def read_inventory(path: Path) -> Inventory:
    """Read an inventory. Raises StudyError with every mistake, each by file and line."""
    source = read_yaml(path)
    problems: list[Problem] = []
    try:
        read = build(_Keys, source.data)
        problems += _broken_rules(read.hosts)
    except ConfigError as error:
        problems += error.problems
        read = _Keys(hosts=())
    certain = [problem for problem in problems if problem.path not in source.broken]
    mistakes = [*source.mistakes, *(f"{_place(source, problem.path)}: {problem}" for problem in certain)]
    if mistakes:
        raise StudyError(mistakes)
    return Inventory(read.hosts, str(path))


@dataclass(frozen=True, kw_only=True)
class _Keys:
    hosts: tuple[Host, ...]


def _broken_rules(hosts: Sequence[Host]) -> Iterator[Problem]:
    if not hosts:
        yield Problem("hosts", "must list at least one host; python -m workbench.hosts template prints an example")
    seen: dict[str, int] = {}
    folders: dict[tuple[str, str, tuple[str, ...]], str] = {}
    for index, host in enumerate(hosts):
        at = f"hosts[{index}]"
        yield from host.problems(at)
        if host.name in seen:
            yield Problem(f"{at}.name", f"({host.name}) is that of hosts[{seen[host.name]}] too; give it another")
        seen.setdefault(host.name, index)
        other = folders.setdefault((host.ssh, host.folder.rstrip("/"), host.ssh_options), host.name)
        if other != host.name:
            yield Problem(f"{at}.work_dir", f"({host.work_dir}) is the folder of {other} too; give each its own")


def _place(source: Source, path: str) -> str:
    """ "file:line" of a setting, or of the nearest one around it."""
    while path and path not in source.lines:
        path = path.rpartition("[" if path.endswith("]") else ".")[0]
    return f"{source.path}:{source.lines[path]}" if path else source.path


def connector(host: Host, arguments: Sequence[str]) -> tuple[str, ...]:
    """The command that runs ``arguments`` on a host, with its stdin, stdout and stderr.

    Of an option that is given twice ssh takes the first, so those of the inventory come before ours.
    """
    return ("ssh", *host.ssh_options, *_DEFAULTS, host.ssh, "--", shlex.join(arguments))


def agent_site(host: Host, code: str) -> Site:
    """The host as a launcher uses it; ``code`` is the folder of our packages there, whatever its home folder holds."""
    program = ("-m", "workbench.launch.agent", "--work", host.folder)
    command = connector(host, ("env", f"PYTHONPATH={code}", "PYTHONSAFEPATH=1", host.interpreter, *program))
    return Site(name=host.name, connector=command, address=host.reached_at, listen=host.listens_at, gpus=host.gpus)
