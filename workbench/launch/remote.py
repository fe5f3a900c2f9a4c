"""Launching on other hosts: an agent on each, reached by a command; a trial's files come back as they are written.

What the processes of a trial need is put under the agent's work folder::

    data/<digest>/        token files, copied once, and again where their bytes are others
    digests/              what the host remembers of their digests
    weights/<digest>      the first weights of runs that start from a file
    trials/<key>/         run.json, credentials/ of this attempt, and what the processes write

The trial's folder here looks as if its processes had run here, but for checkpoints: those stay where they are used.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import math
import secrets
import signal
import tempfile
import threading
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path, PurePosixPath
from types import TracebackType
from typing import Any, Literal, Self

from spes_core import snapshots
from spes_core.config import RunConfig, to_dict
from spes_core.protocol import credentials
from spes_core.runfile import Meeting, RunFile
from spes_core.snapshots import ResumePoint
from workbench.launch import wire
from workbench.launch.hostlink import HostLink
from workbench.launch.launcher import LaunchError, Running, count_running
from workbench.launch.ports import host_and_port
from workbench.launch.staging import text_place, trial_place, weights_place
from workbench.processes import ProcessSpec, plan

_READY_TIMEOUT_S = 180.0
_FAREWELL_S = 60.0
_GROWING = ("events", "logs")
_MIRRORED = (*_GROWING, "weights")


@dataclass(frozen=True, kw_only=True)
class Site:
    """A host as processes are started on it."""

    name: str
    connector: tuple[str, ...]
    """Command whose stdin and stdout are those of an agent there."""
    address: str
    """Name or IP address by which the other hosts reach it, an IPv6 address without brackets; so is `listen`."""
    listen: str | None = None
    """Address that a server there listens at; None: ``address``."""
    gpus: int = 0

    @property
    def listen_at(self) -> str:
        """Where a server there listens."""
        return self.listen or self.address

    @property
    def addresses(self) -> list[str]:
        """By what ranks on other hosts may reach it, what they would rather first."""
        return [self.address, self.listen] if self.listen else [self.address]


@dataclass(frozen=True)
class Placement:
    """Which host takes which process of a run, by name."""

    servers: tuple[str, ...]
    """The host of each server; of node 0 where there is none."""
    nodes: tuple[str, ...]
    """The host of each node, or of each rank of a group."""
    is_group: bool = False
    """Whether all are ranks of one group, which exchange gradients."""

    @property
    def hosts(self) -> tuple[str, ...]:
        """All hosts, that of the first server before the others."""
        return tuple(dict.fromkeys((*self.servers, *self.nodes)))

    def host_of(self, process: str) -> str:
        """The host of a process or participant, by its name."""
        kind, *numbers = process.split("-")
        hosts = self.servers if kind == "server" else self.nodes
        return hosts[int(numbers[0]) if numbers else 0]

    @property
    def spread(self) -> tuple[int, ...]:
        """How many ranks each host has of a group that several share, in order; empty for all else."""
        return tuple(Counter(self.nodes).values()) if self.is_group and len(self.hosts) > 1 else ()


@dataclass
class _Staged:
    """A trial that is on hosts."""

    folder: str
    """Below each agent's work folder."""
    trial_dir: Path
    links: dict[str, HostLink]
    """The connections with which it was put there: one that is made later follows nothing."""


@dataclass(frozen=True)
class _Attempt:
    """What the hosts of one attempt at a trial have in common."""

    run: RunFile
    placement: Placement
    credentials: dict[str, bytes]
    """New certificates and a join token; nothing of them is kept here."""
    listen: tuple[str, ...]
    """Where each server listens, or the first rank of a group that several hosts share."""
    call: tuple[str, ...]
    """Where the others call each."""
    device: Literal["auto", "cpu", "cuda"]
    key: str

    def addresses(self, host: str) -> list[str]:
        """Where each server is, as one host has it."""
        each = zip(self.placement.servers, self.listen, self.call, strict=True)
        return [listen if there == host else call for there, listen, call in each]


class RemoteLauncher:
    """Client of the agents on several hosts; may be shared by threads.

    When the connection to a host ends, its processes have died with it; `wait_ready` makes it anew.
    """

    def __init__(
        self,
        sites: Sequence[Site],
        place: Callable[[RunConfig], Placement],
        *,
        port: int = 0,
        links: Iterable[HostLink] = (),
    ) -> None:
        """``place`` says where the processes of a run go; ``port`` is the server's, 0 for a free one of its host.

        ``links`` are connections to some of the sites, made already and from now on of this launcher.
        """
        self.is_stopped: Callable[[], bool] = lambda: False
        """Whether trials are to stop: copying to hosts, and from them, then ends with a LaunchError."""
        self._sites = {site.name: site for site in sites}
        self._place, self._port = place, port
        self._links = {link.name: link for link in links}
        self._opening, self._changed = threading.RLock(), threading.Condition()
        self._running: dict[int, tuple[Running, HostLink]] = {}
        """Those that have not ended, by the number under which their agent knows them."""
        self._held: dict[int, int] = {}
        """Bytes that each of them holds."""
        self._started = self._ended = 0
        self._staged: dict[Path, _Staged] = {}
        self._texts: dict[Path, str] = {}
        """Places of folders of token files, which do not change while a study runs."""
        for link in self._links.values():
            link.hand_over(self._take, self._lose)

    # Connections

    def wait_ready(self) -> None:
        """Return when an agent answers on every host. Raises LaunchError, which names the hosts that do not answer."""
        wrong, links = [], []
        with self._opening:
            for name in self._sites:
                try:
                    links.append(self.link(name))
                except LaunchError as error:
                    wrong.append(str(error))
            for link in links:
                try:
                    link.ask("ready", timeout_s=_READY_TIMEOUT_S)
                except LaunchError as error:
                    wrong.append(str(error))
        if wrong:
            raise LaunchError("; ".join(wrong))

    def link(self, name: str) -> HostLink:
        """The connection to a host, made anew where it was lost. Raises LaunchError."""
        with self._opening:
            link = self._links.get(name)
            if link is None or link.lost:
                if link is not None:
                    link.close()
                link = self._links[name] = HostLink(name, self._sites[name].connector, self._take, self._lose)
            return link

    def close(self) -> None:
        """End every agent and all that it has started."""
        threads = [threading.Thread(target=link.close) for link in self._links.values()]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        with self._changed:
            for number in list(self._running):
                self._end(number, -signal.SIGKILL, "the launcher was closed")
            self._changed.notify_all()

    # Trials

    def resume_points(self, config: RunConfig, trial_dir: Path) -> dict[str, ResumePoint]:
        """See `Launcher`: what each participant's host has for it."""
        placement, folder = self._place(config), trial_place(trial_dir)
        whole = to_dict(config)
        answers = {host: self.link(host).ask("stored", folder=folder, config=whole) for host in placement.hosts}
        told = {host: answer["stored"] for host, answer in answers.items()}
        stored = {name: dict(told[placement.host_of(name)][name]) for name in snapshots.participants(config)}
        return snapshots.resume_points(config, stored)

    def stage(self, run: RunFile, trial_dir: Path, points: Mapping[str, ResumePoint]) -> Sequence[ProcessSpec]:
        """See `Launcher`."""
        placement = self._place(run.config)
        links = {host: self.link(host) for host in placement.hosts}
        attempt = self._attempt(run, placement)
        by_name: dict[str, ProcessSpec] = {}
        staged = self._remember(trial_place(trial_dir), trial_dir, links)
        for host, link in links.items():
            facts = link.ask("facts")
            own = {name: point for name, point in points.items() if placement.host_of(name) == host}
            link.ask("trial", folder=staged.folder, points={n: [p.step, p.events_bytes] for n, p in own.items()})
            work = PurePosixPath(facts["work"])
            theirs = self._run_file(attempt, link, work / staged.folder)
            self._put_run(link, staged.folder, theirs, attempt)
            self._forget(trial_dir, own)
            link.ask("follow", folder=staged.folder, have=_sizes(trial_dir))
            folder, package = Path(str(work / staged.folder)), Path(facts["package"])
            interface = self._interface(placement, link)
            there = plan(theirs, folder, facts["python"], package, spread=placement.spread, interface=interface)
            by_name |= {spec.name: replace(spec, host=host) for spec in there if placement.host_of(spec.name) == host}
        return [by_name[spec.name] for spec in plan(run, trial_dir, spread=placement.spread)]

    @staticmethod
    def _forget(trial_dir: Path, points: Mapping[str, ResumePoint]) -> None:
        """Drop the logs of processes whose host has an empty folder: a new log would be taken for the rest of one."""
        if not any(point.step for point in points.values()):
            for name in points:
                (trial_dir / "logs" / f"{name}.log").unlink(missing_ok=True)

    def collect(self, trial_dir: Path, *, is_done: bool) -> None:
        """See `Launcher`."""
        with self._changed:
            staged = self._staged.get(trial_dir)
        if staged is None:
            return
        wrong = []
        # Weights may take hours, until somebody stops that; a trial that was stopped before has little to tell.
        limit: dict[str, Any] = (
            {"timeout_s": _FAREWELL_S} if self.is_stopped() else {"timeout_s": math.inf, "is_stopped": self.is_stopped}
        )
        for link in staged.links.values():
            try:
                link.ask("flush", folder=staged.folder, **limit)
            except LaunchError as error:
                wrong.append(str(error))
        with self._changed:
            del self._staged[trial_dir]
        if is_done and not wrong:  # else the next attempt needs what all of them have
            for link in staged.links.values():
                with contextlib.suppress(LaunchError):  # what stays there is only in the way
                    link.ask("remove", folder=staged.folder)
        if wrong:
            raise LaunchError("what its processes wrote did not come back: " + "; ".join(wrong))

    def _remember(self, folder: str, trial_dir: Path, links: dict[str, HostLink]) -> _Staged:
        """That a trial is in a folder of hosts, below each agent's work folder."""
        staged = _Staged(folder, trial_dir, links)
        with self._changed:
            self._staged[trial_dir] = staged
        return staged

    # Processes

    def start(self, spec: ProcessSpec, log: Path) -> Running:
        """Start one process on its host; ``log`` is where its output arrives here. Raises LaunchError."""
        assert spec.host is not None
        with self._changed:
            staged, number = self._staged[log.parent.parent], self._started
            process, link = Running(spec.name, number), staged.links[spec.host]
            self._running[number] = process, link
            self._started += 1
        try:
            link.ask(
                "start",
                process=number,
                name=spec.name,
                argv=list(spec.argv),
                env=spec.env,
                log=f"{staged.folder}/logs/{log.name}",
                timeout_s=_READY_TIMEOUT_S,
            )
        except LaunchError as error:
            with self._changed:
                self._end(number, -signal.SIGKILL, "")
            raise LaunchError(f"{spec.name} cannot be started: {error}") from error
        return process

    def signal(self, process: Running, number: int) -> None:
        """Signal the process group of a process; nothing happens when it has ended."""
        with self._changed:
            _, link = self._running.get(process.id, (process, None))
        if link is not None:
            with contextlib.suppress(LaunchError):  # a lost host's processes have died with it
                link.ask("signal", process=process.id, signal=int(number))

    def wait(self, processes: Sequence[Running], timeout_s: float) -> None:
        """Return after ``timeout_s``, or as soon as one more of the processes has ended."""
        with self._changed:
            running = count_running(processes)
            if running:
                self._changed.wait_for(lambda: count_running(processes) < running, timeout_s)

    def resident_bytes(self, processes: Sequence[Running]) -> int:
        """See `Launcher`: as agents said last; they are asked anew, and nobody waits for the slowest of them."""
        by_link: dict[HostLink, list[int]] = {}
        with self._changed:
            for process in processes:
                if process.id in self._running:
                    by_link.setdefault(self._running[process.id][1], []).append(process.id)
            held = sum(self._held.get(process.id, 0) for process in processes)
        for link, numbers in by_link.items():
            link.tell("measure", processes=numbers)
        return held

    # What agents report

    def _take(self, link: HostLink, message: wire.Message) -> None:
        header = message.header
        if header["event"] == "file":
            self._store(header, message.body)
        elif header["event"] == "memory":
            with self._changed:
                self._held |= {number: size for number, size in header["held"] if number in self._running}
        elif header["event"] == "exited":
            with self._changed:
                gone = f"the fork server on host {link.name} died" if header["died_with_launcher"] else ""
                if header["process"] in self._running:
                    process, _ = self._running[header["process"]]
                    process.killed_for_memory = bool(header.get("killed_for_memory"))
                self._end(header["process"], header["returncode"], gone)
                self._changed.notify_all()

    def _lose(self, link: HostLink) -> None:
        with self._changed:
            for number, (_, own) in list(self._running.items()):
                if own is link:
                    self._end(number, -signal.SIGKILL, f"host {link.name} was lost ({link.lost})")
            self._changed.notify_all()

    def _end(self, number: int, returncode: int, lost_with: str) -> None:
        if number not in self._running and 0 <= number < self._started:
            return  # it was given up before its agent knew of its end
        process, _ = self._running.pop(number)
        self._held.pop(number, None)
        self._ended += 1
        process.ended_order, process.returncode = self._ended, returncode
        process.lost_with, process.died_with_launcher = lost_with, bool(lost_with)

    def _store(self, header: dict[str, Any], body: bytes) -> None:
        """Write bytes of a file of a trial where the file would be had it been written here."""
        path = PurePosixPath(header["path"])
        with self._changed:
            trial_dir = next((one.trial_dir for one in self._staged.values() if one.folder == header["folder"]), None)
        if trial_dir is None or path.is_absolute() or ".." in path.parts or path.parts[0] not in _MIRRORED:
            return
        target = trial_dir / path
        target.parent.mkdir(parents=True, exist_ok=True)
        with target.open("r+b" if target.exists() else "wb") as file:
            if header["offset"] == 0:
                file.truncate(0)
            file.seek(header["offset"])
            file.write(body)

    # What hosts are given

    def _server_addresses(self, placement: Placement) -> tuple[tuple[str, ...], tuple[str, ...]]:
        """`_Attempt.listen` and `_Attempt.call`; servers of one host have consecutive ports."""
        ports = {}
        for host, count in Counter(placement.servers).items():
            where = self._sites[host].listen_at
            first = self._port or self.link(host).ask("free_port", address=where, count=count)["port"]
            ports[host] = itertools.count(first)
        found = [(self._sites[host], next(ports[host])) for host in placement.servers]
        listen = tuple(host_and_port(site.listen_at, port) for site, port in found)
        return listen, tuple(host_and_port(site.address, port) for site, port in found)

    def _attempt(self, run: RunFile, placement: Placement) -> _Attempt:
        listen, call = self._server_addresses(placement)
        made, device = self._credentials(run, placement), self._device(run, placement)
        return _Attempt(run, placement, made, listen, call, device, secrets.token_hex(8))

    def _interface(self, placement: Placement, link: HostLink) -> str | None:
        """By which network interface of a host others reach its ranks of a group that they share."""
        if not placement.spread:
            return None
        return str(link.ask("interface", addresses=self._sites[link.name].addresses)["interface"])

    def _credentials(self, run: RunFile, placement: Placement) -> dict[str, bytes]:
        """New certificates and a join token of an attempt."""
        if run.config.sync.exchange != "rounds":
            return {}
        addresses = dict.fromkeys(self._sites[host].address for host in placement.servers)
        with tempfile.TemporaryDirectory(prefix="spes-credentials-") as folder:
            hosts = list(dict.fromkeys(["localhost", "127.0.0.1", *addresses]))
            return {path.name: path.read_bytes() for path in credentials.make(Path(folder), run.config.nodes, hosts)}

    def _device(self, run: RunFile, placement: Placement) -> Literal["auto", "cpu", "cuda"]:
        """ "auto" is GPUs where every host has one for each of its ranks: all nodes decide alike."""
        if run.device != "auto":
            return run.device
        taken = Counter(placement.nodes)
        each = 1 if placement.is_group else run.config.parallel.ranks_per_node
        enough = all(self._sites[host].gpus >= n * each for host, n in taken.items())
        return "cuda" if enough else "cpu"

    def _run_file(self, attempt: _Attempt, link: HostLink, folder: PurePosixPath) -> RunFile:
        """run.json as one host needs it; its token files and first weights are put there."""
        run, placement, work = attempt.run, attempt.placement, folder.parent.parent
        data, config = Path(run.data_dir), run.config
        where = self._text_place(data)
        link.put_folder(data, where, self.is_stopped)
        if config.init.kind == "weights":
            there = weights_place(config.init)
            link.put_file(Path(config.init.weights or ""), there, self.is_stopped)
            config = replace(config, init=replace(config.init, weights=str(work / there)))
        secret = str(folder / "credentials") if config.sync.exchange == "rounds" else None
        address, *further = attempt.addresses(link.name)
        return replace(
            run,
            config=config,
            data_dir=str(work / where),
            server_address=address,
            shard_addresses=(address, *further) if further else (),
            device=attempt.device,
            credentials=secret,
            meeting=Meeting(address=address, key=attempt.key) if placement.spread else None,
        )

    def _text_place(self, folder: Path) -> str:
        if folder not in self._texts:
            self._texts[folder] = text_place(folder)
        return self._texts[folder]

    @staticmethod
    def _put_run(link: HostLink, folder: str, run: RunFile, attempt: _Attempt) -> None:
        """run.json, and of the credentials what the processes of this host show and trust."""
        link.put(f"{folder}/run.json", json.dumps(to_dict(run), indent=1).encode() + b"\n")
        names = _certified(run.config, attempt.placement, link.name)
        common = ("ca.pem", credentials.TOKEN_FILE)
        for name, content in attempt.credentials.items():
            if name in common or name.rpartition(".")[0] in names:
                link.put(f"{folder}/credentials/{name}", content, mode=0o600)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def _certified(config: RunConfig, placement: Placement, host: str) -> list[str]:
    """Whose certificates a host needs; all servers show the same."""
    nodes = [f"node-{node}" for node in range(config.nodes) if placement.host_of(f"node-{node}") == host]
    return ["server", *nodes] if host in placement.servers else nodes


def _sizes(trial_dir: Path) -> dict[str, int]:
    """How many bytes there are here of each file that grows on hosts."""
    files = [path for part in _GROWING for path in (trial_dir / part).rglob("*") if path.is_file()]
    return {path.relative_to(trial_dir).as_posix(): path.stat().st_size for path in files}
