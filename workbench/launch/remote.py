"""Launching on other hosts: an agent on each, reached by a command; a trial's files come back as they are written.

What the processes of a trial need is put under the agent's work folder::

    data/<digest>/        token files, copied once
    weights/<digest>      the first weights of runs that start from a file
    trials/<key>/         run.json, credentials/ of this attempt, and what the processes write

The trial's folder here looks as if its processes had run here, but for checkpoints: those stay where they are used.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import signal
import socket
import tempfile
import threading
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path, PurePosixPath
from types import TracebackType
from typing import Any, Literal, Self

from spes_core.config import RunConfig, to_dict
from spes_core.protocol import credentials
from spes_core.runfile import RunFile
from spes_core.snapshots import ResumePoint
from workbench.launch import wire
from workbench.launch.hostlink import HostLink
from workbench.launch.launcher import LaunchError, Running, count_running
from workbench.processes import SERVER, ProcessSpec, plan

_READY_TIMEOUT_S = 180.0
_FLUSH_TIMEOUT_S = 3600.0
_MIRRORED = ("events", "logs", "weights")


@dataclass(frozen=True, kw_only=True)
class Site:
    """A host as processes are started on it."""

    name: str
    connector: tuple[str, ...]
    """Command whose stdin and stdout are those of an agent there."""
    address: str
    """Name or address by which the other hosts reach it."""
    listen: str | None = None
    """Address that a server there listens at; None: ``address``."""
    gpus: int = 0


@dataclass(frozen=True)
class Placement:
    """Which host takes which process of a run, by name."""

    server: str
    """The host of the server, or of the one group where gradients are exchanged."""
    nodes: tuple[str, ...]
    """The host of each node."""

    @property
    def hosts(self) -> tuple[str, ...]:
        """All hosts, that of the server first."""
        return tuple(dict.fromkeys((self.server, *self.nodes)))

    def host_of(self, process: str) -> str:
        """The host of a process or participant, by its name."""
        kind, _, number = process.partition("-")
        return self.nodes[int(number.partition("-")[0])] if kind == "node" else self.server


@dataclass
class _Staged:
    """A trial that is on hosts."""

    folder: str
    """Below each agent's work folder."""
    trial_dir: Path
    links: dict[str, HostLink]
    """The connections with which it was put there: one that is made later follows nothing."""


class RemoteLauncher:
    """Client of the agents on several hosts; may be shared by threads.

    When the connection to a host ends, its processes have died with it; `wait_ready` makes it anew.
    """

    def __init__(self, sites: Sequence[Site], place: Callable[[RunConfig], Placement], *, port: int = 0) -> None:
        """``place`` says where the processes of a run go; ``port`` is the server's, 0 for a free one of its host."""
        self._sites = {site.name: site for site in sites}
        self._place, self._port = place, port
        self._links: dict[str, HostLink] = {}
        self._opening, self._changed = threading.RLock(), threading.Condition()
        self._running: dict[int, Running] = {}
        self._links_of: dict[int, HostLink] = {}
        self._ended = 0
        self._staged: dict[Path, _Staged] = {}
        self._digests: dict[Path, str] = {}
        """By folder of token files; they do not change while a study runs."""

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
            for number, process in self._running.items():
                if process.returncode is None:
                    self._end(number, -signal.SIGKILL, "the launcher was closed")
            self._changed.notify_all()

    # Trials

    def resume_points(self, config: RunConfig, trial_dir: Path) -> dict[str, ResumePoint]:
        """See `Launcher`: what each participant's host has for it."""
        placement, folder = self._place(config), _remote_folder(trial_dir)
        whole = to_dict(config)
        answers = {host: self.link(host).ask("resume_points", folder=folder, config=whole) for host in placement.hosts}
        told = {host: answer["points"] for host, answer in answers.items()}
        names = next(iter(told.values()))
        return {name: ResumePoint(*told[placement.host_of(name)][name]) for name in names}

    def stage(self, run: RunFile, trial_dir: Path, points: Mapping[str, ResumePoint]) -> Sequence[ProcessSpec]:
        """See `Launcher`."""
        placement = self._place(run.config)
        links = {host: self.link(host) for host in placement.hosts}
        folder = _remote_folder(trial_dir)
        by_name: dict[str, ProcessSpec] = {}
        made = self._credentials(run, placement)
        address = self._server_address(placement)
        device = self._device(run, placement)
        self._remember(folder, trial_dir, links)
        for host, link in links.items():
            facts = link.ask("facts")
            own = {name: point for name, point in points.items() if placement.host_of(name) == host}
            link.ask("trial", folder=folder, points={n: [p.step, p.events_bytes] for n, p in own.items()})
            work = PurePosixPath(facts["work"])
            theirs = self._run_file(run, link, work / folder, device)
            listening = address[0] if host == placement.server else address[1]
            theirs = replace(theirs, server_address=listening)
            self._put_run(link, folder, theirs, made, _participants(run.config, placement, host))
            link.ask("follow", folder=folder, have=_sizes(trial_dir))
            here, package = Path(str(work / folder)), Path(facts["package"])
            for spec in plan(theirs, here, facts["python"], package):
                if placement.host_of(spec.name) == host:
                    by_name[spec.name] = replace(spec, host=host)
        return [by_name[spec.name] for spec in plan(run, trial_dir)]

    def collect(self, trial_dir: Path, *, is_done: bool) -> None:
        """See `Launcher`."""
        with self._changed:
            staged = self._staged.get(trial_dir)
        if staged is None:
            return
        wrong = []
        for link in staged.links.values():
            try:
                link.ask("flush", folder=staged.folder, timeout_s=_FLUSH_TIMEOUT_S)
                if is_done:
                    link.ask("remove", folder=staged.folder)
            except LaunchError as error:
                wrong.append(str(error))
        with self._changed:
            del self._staged[trial_dir]
        if wrong:
            raise LaunchError("what its processes wrote did not come back: " + "; ".join(wrong))

    def _remember(self, folder: str, trial_dir: Path, links: dict[str, HostLink]) -> None:
        """That a trial is in a folder of hosts, below each agent's work folder."""
        with self._changed:
            self._staged[trial_dir] = _Staged(folder, trial_dir, links)

    # Processes

    def start(self, spec: ProcessSpec, log: Path) -> Running:
        """Start one process on its host; ``log`` is where its output arrives here. Raises LaunchError."""
        assert spec.host is not None
        with self._changed:
            number = len(self._running)
            process = self._running[number] = Running(spec.name, number)
            staged = self._staged[log.parent.parent]
            link = self._links_of[number] = staged.links[spec.host]
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
                if process.returncode is None:
                    self._end(number, -signal.SIGKILL, "")
            raise LaunchError(f"{spec.name} cannot be started: {error}") from error
        return process

    def signal(self, process: Running, number: int) -> None:
        """Signal the process group of a process; nothing happens when it has ended."""
        link = self._links_of[process.id]
        if process.returncode is None:
            with contextlib.suppress(LaunchError):  # a lost host's processes have died with it
                link.ask("signal", process=process.id, signal=int(number))

    def wait(self, processes: Sequence[Running], timeout_s: float) -> None:
        """Return after ``timeout_s``, or as soon as one more of the processes has ended."""
        with self._changed:
            running = count_running(processes)
            if running:
                self._changed.wait_for(lambda: count_running(processes) < running, timeout_s)

    # What agents report

    def _take(self, link: HostLink, message: wire.Message) -> None:
        header = message.header
        if header["event"] == "file":
            self._store(header, message.body)
        elif header["event"] == "exited":
            with self._changed:
                gone = f"the fork server on host {link.name} died" if header["died_with_launcher"] else ""
                self._running[header["process"]].killed_for_memory = bool(header.get("killed_for_memory"))
                self._end(header["process"], header["returncode"], gone)
                self._changed.notify_all()

    def _lose(self, link: HostLink) -> None:
        with self._changed:
            for number, process in self._running.items():
                if process.returncode is None and self._links_of.get(number) is link:
                    self._end(number, -signal.SIGKILL, f"host {link.name} was lost ({link.lost})")
            self._changed.notify_all()

    def _end(self, number: int, returncode: int, lost_with: str) -> None:
        process = self._running[number]
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

    def _server_address(self, placement: Placement) -> tuple[str, str]:
        """Where the server listens, and where the nodes call it."""
        site = self._sites[placement.server]
        listen = site.listen or site.address
        port = self._port or self.link(site.name).ask("free_port", address=listen)["port"]
        return f"{listen}:{port}", f"{site.address}:{port}"

    def _credentials(self, run: RunFile, placement: Placement) -> dict[str, bytes]:
        """New certificates and a join token of this attempt; nothing of them is kept here."""
        if run.config.sync.exchange != "rounds":
            return {}
        address = self._sites[placement.server].address
        with tempfile.TemporaryDirectory(prefix="spes-credentials-") as folder:
            hosts = ["localhost", "127.0.0.1", address]
            return {path.name: path.read_bytes() for path in credentials.make(Path(folder), run.config.nodes, hosts)}

    def _device(self, run: RunFile, placement: Placement) -> Literal["auto", "cpu", "cuda"]:
        """ "auto" is GPUs where every host has one for each of its ranks: all nodes decide alike."""
        if run.device != "auto":
            return run.device
        taken = Counter(placement.nodes)
        enough = all(self._sites[host].gpus >= n * run.config.parallel.ranks_per_node for host, n in taken.items())
        return "cuda" if enough else "cpu"

    def _run_file(self, run: RunFile, link: HostLink, folder: PurePosixPath, device: Any) -> RunFile:
        """run.json as one host needs it; its token files and first weights are put there."""
        work = folder.parent.parent
        data, config = Path(run.data_dir), run.config
        where = f"data/{self._digest_of(data)}"
        link.put_folder(data, where)
        if config.init.kind == "weights":
            weights = Path(config.init.weights or "")
            there = f"weights/{config.init.digest}/{weights.name}"
            link.put_file(weights, there)
            config = replace(config, init=replace(config.init, weights=str(work / there)))
        secret = str(folder / "credentials") if config.sync.exchange == "rounds" else None
        return replace(run, config=config, data_dir=str(work / where), device=device, credentials=secret)

    def _digest_of(self, folder: Path) -> str:
        if folder not in self._digests:
            self._digests[folder] = _digest_of(folder)
        return self._digests[folder]

    @staticmethod
    def _put_run(link: HostLink, folder: str, run: RunFile, made: Mapping[str, bytes], names: Sequence[str]) -> None:
        """run.json, and of the credentials what the processes of this host show and trust."""
        link.put(f"{folder}/run.json", json.dumps(to_dict(run), indent=1).encode() + b"\n")
        common = ("ca.pem", credentials.TOKEN_FILE)
        for name, content in made.items():
            if name in common or name.rpartition(".")[0] in names:
                link.put(f"{folder}/credentials/{name}", content, mode=0o600)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def _participants(config: RunConfig, placement: Placement, host: str) -> list[str]:
    names = [SERVER, *(f"node-{node}" for node in range(config.nodes))]
    return [name for name in names if placement.host_of(name) == host]


def _remote_folder(trial_dir: Path) -> str:
    """A name for a trial's folder on hosts that no other controller's trial has."""
    key = hashlib.sha256(f"{socket.gethostname()}:{trial_dir.absolute()}".encode()).hexdigest()[:16]
    return f"trials/{key}"


def _sizes(trial_dir: Path) -> dict[str, int]:
    """How many bytes there are here of each file that comes from hosts."""
    files = [path for part in _MIRRORED for path in (trial_dir / part).rglob("*") if path.is_file()]
    return {path.relative_to(trial_dir).as_posix(): path.stat().st_size for path in files}


def _digest_of(folder: Path) -> str:
    """SHA-256 (hex, short) over the names and contents of a folder's files."""
    total = hashlib.sha256()
    for path in sorted(folder.rglob("*")):
        if path.is_file():
            with path.open("rb") as file:
                content = hashlib.file_digest(file, "sha256").hexdigest()
            total.update(f"{path.relative_to(folder).as_posix()} {content}\n".encode())
    return total.hexdigest()[:32]
