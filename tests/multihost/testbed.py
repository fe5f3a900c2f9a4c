"""Several hosts on one machine: network namespaces with their own addresses, sshd and shaped links, joined by a bridge.

All of a testbed lies in its namespaces, whose names tell the process that made them: whoever starts the next testbed
removes what dead ones have left. The caller stays outside, at `Testbed.own_address`, as a controller would.
"""

from __future__ import annotations

import contextlib
import fcntl
import functools
import getpass
import ipaddress
import itertools
import json
import os
import re
import shlex
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import psutil

TOOLS = ("ip", "tc", "ssh", "sshd", "ssh-keygen", "setpriv")
SSHD_FOLDER = Path("/run/sshd")
_PREFIX = "spes"
_LOCK = Path("/tmp/spes-testbed.lock")
_PATH = f"{os.environ.get('PATH', '')}:/usr/sbin:/sbin"
_numbers = itertools.count()


class Testbed:
    """``num_hosts`` hosts named host-0, host-1, …, reached by `ssh -F self.ssh_config host-N`; see `testbed`."""

    __test__ = False

    def __init__(self, num_hosts: int, folder: Path) -> None:
        self.folder = folder
        """Where keys, configurations and logs lie, and a folder for each host."""
        self.hosts = [f"host-{number}" for number in range(num_hosts)]
        self.ssh_config = folder / "ssh_config"
        self._name = f"{_PREFIX}-{os.getpid()}-{_start_ticks(os.getpid())}-{next(_numbers)}"
        self._sshd: dict[str, subprocess.Popen[bytes]] = {}

    def address(self, host: str) -> str:
        """The IP address of a host."""
        return str(self._network[10 + self.hosts.index(host)])

    @property
    def own_address(self) -> str:
        """The address by which hosts reach whatever runs outside of them."""
        return str(self._network[1])

    def host_folder(self, host: str) -> Path:
        """A folder for what a host keeps; the file system is the same for all."""
        return self.folder / host

    def namespace(self, host: str) -> str:
        """The network namespace of a host, as `ip netns` names it."""
        return f"{self._name}-{host}"

    def inside(self, host: str, *argv: str) -> list[str]:
        """The command line that runs ``argv`` on a host without ssh."""
        return ["ip", "netns", "exec", self.namespace(host), *argv]

    def ssh(self, host: str, command: str, **options: object) -> subprocess.CompletedProcess[str]:
        """Run a shell command on a host through ssh."""
        argv = ["ssh", "-F", str(self.ssh_config), host, "--", command]
        return subprocess.run(argv, capture_output=True, text=True, check=False, **options)  # type: ignore[call-overload, no-any-return]

    def environment(self) -> dict[str, str]:
        """This process's environment with an `ssh` that knows the hosts, as a user's own configuration would."""
        return {**os.environ, "PATH": f"{self.folder / 'bin'}:{_PATH}"}

    def shape(self, host: str, mbit: float | None) -> None:
        """Limit a host's link to ``mbit`` in 10^6 bits a second, each way; None: not at all."""
        for namespace, device in ((self.namespace(host), "eth0"), (self._name, host)):
            _run("tc", "-n", namespace, "qdisc", "del", "dev", device, "root", check=False)
            if mbit is not None:
                _run("tc", "-n", namespace, "qdisc", "add", "dev", device, "root", *_tbf(mbit))

    def down(self, host: str) -> None:
        """Cut a host off: nothing reaches it any more, and nobody is told."""
        _run("ip", "-n", self._name, "link", "set", host, "down")

    def up(self, host: str) -> None:
        """Connect a host again."""
        _run("ip", "-n", self._name, "link", "set", host, "up")

    def processes(self, host: str) -> list[int]:
        """Ids of a host's processes, without its sshd."""
        sshd = self._sshd.get(host)
        return [pid for pid in _pids(self.namespace(host)) if sshd is None or pid != sshd.pid]

    def crash(self, host: str) -> None:
        """Kill all that runs on a host, sshd too, as if its power were cut; `boot` brings it back."""
        self.down(host)
        _kill(self.namespace(host))
        if host in self._sshd:
            self._sshd.pop(host).wait()

    def is_quiet(self, host: str) -> bool:
        """Whether a host runs its sshd and nothing else."""
        return host in self._sshd and not self.processes(host)

    def boot(self, host: str) -> None:
        """Start a host's sshd and connect it."""
        self.up(host)
        settings = self.host_folder(host) / "sshd_config"
        argv = [
            "setpriv",
            "--pdeathsig",
            "KILL",
            shutil.which("sshd", path=_PATH) or "",
            "-D",
            "-e",
            "-f",
            str(settings),
        ]
        with (self.host_folder(host) / "sshd.log").open("ab") as log:
            self._sshd[host] = subprocess.Popen(
                self.inside(host, *argv), stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True
            )
        self._await_sshd(host)

    def make(self) -> None:
        """Make the network and the hosts, and start them."""
        with _exclusively():
            remove_leftovers()
            self._network = _free_network()
            self._connect()
        _make_key(self.folder / "user_key")
        for host in self.hosts:
            self._write_host(host)
        self._write_client()
        for host in self.hosts:
            self.boot(host)

    def remove(self) -> None:
        """End everything on the hosts, and remove them."""
        for host in self.hosts:
            _remove(self.namespace(host))
        _remove(self._name)
        for sshd in self._sshd.values():
            sshd.wait()

    def _connect(self) -> None:
        """A namespace with the bridge, to which the hosts and the world outside are plugged."""
        _run("ip", "netns", "add", self._name)
        _run("ip", "-n", self._name, "link", "add", "name", "bridge", "type", "bridge")
        _run("ip", "-n", self._name, "link", "set", "bridge", "up")
        outside = f"{_PREFIX}{os.getpid()}x{self._name.rpartition('-')[2]}"
        _run("ip", "link", "add", "name", outside, "type", "veth", "peer", "name", "outside", "netns", self._name)
        _run("ip", "addr", "add", f"{self.own_address}/24", "dev", outside)
        _run("ip", "link", "set", outside, "up")
        self._plug("outside")
        for host in self.hosts:
            namespace = self.namespace(host)
            _run("ip", "netns", "add", namespace)
            _run(
                "ip",
                "-n",
                self._name,
                "link",
                "add",
                "name",
                host,
                "type",
                "veth",
                "peer",
                "name",
                "eth0",
                "netns",
                namespace,
            )
            _run("ip", "-n", namespace, "addr", "add", f"{self.address(host)}/24", "dev", "eth0")
            for device in ("lo", "eth0"):
                _run("ip", "-n", namespace, "link", "set", device, "up")
            self._plug(host)

    def _plug(self, port: str) -> None:
        _run("ip", "-n", self._name, "link", "set", port, "master", "bridge")
        _run("ip", "-n", self._name, "link", "set", port, "up")

    def _write_host(self, host: str) -> None:
        folder = self.host_folder(host)
        folder.mkdir()
        _make_key(folder / "host_key")
        settings = {
            "Port": "22",
            "ListenAddress": self.address(host),
            "HostKey": f'"{folder / "host_key"}"',
            "AuthorizedKeysFile": _expanded(self.folder / "user_key.pub"),
            "PidFile": f'"{folder / "sshd.pid"}"',
            "StrictModes": "no",
            "UsePAM": "no",
            "UseDNS": "no",
            "PasswordAuthentication": "no",
            "PermitRootLogin": "prohibit-password",
            "LogLevel": "VERBOSE",
            "MaxStartups": "100",
        }
        lines = (f"{key} {value}\n" for key, value in settings.items())
        (folder / "sshd_config").write_text("".join(lines), encoding="utf-8")

    def _write_client(self) -> None:
        """A client configuration, the hosts' keys, and an `ssh` program that uses them."""
        known = self.folder / "known_hosts"
        common = {
            "User": getpass.getuser(),
            "IdentityFile": _expanded(self.folder / "user_key"),
            "IdentitiesOnly": "yes",
            "UserKnownHostsFile": _expanded(known),
            "StrictHostKeyChecking": "yes",
            "BatchMode": "yes",
            "ConnectTimeout": "5",
        }
        blocks = [f"Host {host}\n    HostName {self.address(host)}\n" for host in self.hosts]
        blocks.append("Host *\n" + "".join(f"    {key} {value}\n" for key, value in common.items()))
        self.ssh_config.write_text("".join(blocks), encoding="utf-8")
        keys = ((host, (self.host_folder(host) / "host_key.pub").read_text()) for host in self.hosts)
        known.write_text("".join(f"{self.address(host)} {key}" for host, key in keys), encoding="utf-8")
        program = self.folder / "bin" / "ssh"
        program.parent.mkdir()
        real = shlex.quote(shutil.which("ssh", path=_PATH) or "ssh")
        program.write_text(f'#!/bin/sh\nexec {real} -F {shlex.quote(str(self.ssh_config))} "$@"\n', encoding="utf-8")
        program.chmod(0o755)

    def _await_sshd(self, host: str, timeout_s: float = 30) -> None:
        deadline_s = time.monotonic() + timeout_s
        while True:
            with contextlib.suppress(OSError), socket.create_connection((self.address(host), 22), timeout=1):
                return
            log = self.host_folder(host) / "sshd.log"
            if self._sshd[host].poll() is not None or time.monotonic() > deadline_s:
                raise RuntimeError(f"the sshd of {host} does not answer: {log.read_text()}")
            time.sleep(0.02)


@contextlib.contextmanager
def testbed(num_hosts: int, folder: Path) -> Iterator[Testbed]:
    """A testbed whose files lie in ``folder``, while the context lasts. See `reason_not_possible` first."""
    folder.mkdir(parents=True, exist_ok=True)
    made = Testbed(num_hosts, folder)
    try:
        made.make()
        yield made
    finally:
        made.remove()


@functools.cache
def reason_not_possible() -> str:
    """Why this machine cannot have a testbed; empty when it can."""
    if sys.platform != "linux" or os.geteuid() != 0:
        return "hosts as network namespaces need root on Linux"
    if missing := [tool for tool in TOOLS if shutil.which(tool, path=_PATH) is None]:
        return f"hosts as network namespaces need {', '.join(missing)} (packages iproute2, openssh-server, util-linux)"
    name = f"{_PREFIX}-{os.getpid()}-{_start_ticks(os.getpid())}-trial"
    try:
        SSHD_FOLDER.mkdir(mode=0o755, exist_ok=True)
        _run("ip", "netns", "add", name)
        try:
            _run("ip", "-n", name, "link", "add", "name", "bridge", "type", "bridge")
            _run("ip", "-n", name, "link", "add", "name", "a", "type", "veth", "peer", "name", "b")
            _run("tc", "-n", name, "qdisc", "add", "dev", "a", "root", *_tbf(1))
        finally:
            _remove(name)
    except (OSError, RuntimeError) as error:
        return f"no hosts as network namespaces can be made here: {error}"
    return ""


def remove_leftovers() -> None:
    """Remove the testbeds of processes that are no more."""
    for name in _namespaces():
        found = re.fullmatch(rf"{_PREFIX}-(\d+)-(\d+)-.*", name)
        if found and _start_ticks(int(found[1])) != int(found[2]):
            _remove(name)


def _run(*argv: str, check: bool = True) -> str:
    environment = {**os.environ, "PATH": _PATH}
    done = subprocess.run(argv, stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False, env=environment)
    if check and done.returncode:
        raise RuntimeError(f"{shlex.join(argv)}: {done.stderr.strip() or done.stdout.strip()}")
    return done.stdout


def _tbf(mbit: float) -> list[str]:
    return ["tbf", "rate", f"{round(mbit * 1000)}kbit", "burst", "16kb", "latency", "200ms"]


def _namespaces() -> list[str]:
    return [line.split()[0] for line in _run("ip", "netns", "list").splitlines() if line.split()]


def _pids(namespace: str) -> list[int]:
    return [int(word) for word in _run("ip", "netns", "pids", namespace, check=False).split()]


def _kill(namespace: str) -> None:
    """End all processes of a namespace, those too that they start meanwhile; and wait until they have gone."""
    deadline_s = time.monotonic() + 30
    while pids := _pids(namespace):
        for pid in pids:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        if time.monotonic() > deadline_s:
            raise RuntimeError(f"processes {pids} of {namespace} do not end")
        time.sleep(0.01)


def _remove(namespace: str) -> None:
    """With a namespace goes all that is in it; its links first, as the other ends of them would outlive it a while."""
    if namespace in _namespaces():
        _kill(namespace)
        for link in json.loads(_run("ip", "-j", "-n", namespace, "link", "show")):
            _run("ip", "-n", namespace, "link", "del", "dev", link["ifname"], check=False)
        _run("ip", "netns", "del", namespace)


def _start_ticks(pid: int) -> int:
    """When a process began, which tells it from a later one with the same id; 0 when there is none."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8")
    except OSError:
        return 0
    fields: Sequence[str] = text.rpartition(")")[2].split()
    return 0 if fields[0] == "Z" else int(fields[19])


def _free_network() -> ipaddress.IPv4Network:
    """A private /24 that no address or route of this machine has anything to do with."""
    used = [
        ipaddress.ip_network(row["dst"]) for row in json.loads(_run("ip", "-j", "-4", "route")) if _is_net(row["dst"])
    ]
    held = [ipaddress.ip_address(a.address) for rows in psutil.net_if_addrs().values() for a in rows if a.family == 2]
    for second, third in itertools.product(range(77, 250), range(1, 250)):
        network = ipaddress.IPv4Network(f"10.{second}.{third}.0/24")
        if not any(network.overlaps(other) for other in used) and not any(address in network for address in held):
            return network
    raise RuntimeError("no private /24 is free on this machine")


def _is_net(text: str) -> bool:
    try:
        return ipaddress.ip_network(text).prefixlen > 0
    except ValueError:
        return False  # "default"


def _expanded(path: Path) -> str:
    """A path for those settings of ssh and sshd in which % begins a placeholder."""
    return '"{}"'.format(str(path).replace("%", "%%"))


def _make_key(path: Path) -> None:
    _run("ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-C", path.name, "-f", str(path))


@contextlib.contextmanager
def _exclusively() -> Iterator[None]:
    """Test processes of one machine choose their networks one after the other."""
    with _LOCK.open("a") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield
