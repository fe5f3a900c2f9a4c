"""A real Slurm for tests: munged, slurmctld and a slurmd for each node, in a folder and on ports of their own.

Debian has all three (`apt-get install slurm-wlm munge`). They need root: jobs run as whoever submits, here root. Its
nodes are this machine under several names, each with an address of its own on the loopback network.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import psutil

from tests.multihost import slurmdbd

PROGRAMS = ("munged", "slurmctld", "slurmd", "sbatch", "srun", "squeue", "scancel", "scontrol")
_CONFIG = """\
ClusterName=tests
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={ctld_port}
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
CredType=cred/munge
AuthInfo=socket={folder}/munge.socket
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool/%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd-%n.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/slurmd-%n.log
SelectType=select/cons_tres
SelectTypeParameters=CR_Core_Memory
ProctrackType=proctrack/linuxproc
TaskPlugin={task_plugin}
MpiDefault=none
SlurmdParameters=config_overrides
SwitchType=switch/none
JobAcctGatherType=jobacct_gather/none
JobCompType=jobcomp/none
JobRequeue=1
KillWait=5
MinJobAge=300
ReturnToService=2
SchedulerParameters=sched_interval=1,bf_interval=1,batch_sched_delay=0,sched_min_interval=1
PartitionName=main Nodes={names} Default=YES MaxTime=INFINITE State=UP
"""
_NODE = """\
NodeName={name} NodeHostname={host} NodeAddr={address} Port={port} CPUs={cpus} CoresPerSocket={cpus} \
RealMemory={memory_mb} State=UNKNOWN
"""
_MEMORY_GROUPS = Path("/sys/fs/cgroup/memory")
_START_TIMEOUT_S = 60.0


def lacking() -> str | None:
    """Why there can be no Slurm here, in one line; None when there can."""
    missing = [name for name in PROGRAMS if _program(name) is None]
    if missing:
        return f"needs Slurm and MUNGE (apt-get install slurm-wlm munge): {', '.join(missing)} not found"
    if os.geteuid() != 0:
        return "needs root: slurmd starts jobs as the user who submits them"
    return None


class Slurm:
    """A running cluster."""

    def __init__(self, folder: Path, nodes: Sequence[str]) -> None:
        self.folder, self.nodes = folder, nodes
        self.env = {"SLURM_CONF": str(folder / "slurm.conf")}
        """What a process needs in its environment to speak to this cluster."""
        self.limits_memory = os.access(_MEMORY_GROUPS / "memory.limit_in_bytes", os.W_OK)
        """Whether jobs are held to the memory that they asked for, which needs control groups (version 1)."""
        self.keeps_accounts = slurmdbd.is_there()
        """Whether there is an accounting database, which sacct asks."""
        self.processes: list[subprocess.Popen[bytes]] = []
        self._daemons: dict[str, subprocess.Popen[bytes]] = {}

    def command(self, *argv: str) -> str:
        """The output of a Slurm command, which must succeed."""
        done = subprocess.run(argv, env={**os.environ, **self.env}, capture_output=True, text=True, check=False)
        assert done.returncode == 0, f"{argv}: {done.stdout}{done.stderr}"
        return done.stdout

    def jobs(self) -> dict[str, str]:
        """State of every job that Slurm remembers, ended or not, by job id (12 or 12_0)."""
        lines = self.command("squeue", "--noheader", "--array", "--states=all", "--format=%i %T").splitlines()
        return {line.split()[0]: line.split()[1] for line in lines}

    def start_controller(self) -> None:
        """Start slurmctld, which knows of no job."""
        argv = [_program("slurmctld"), "-D", "-c", "-i", "-f", self.env["SLURM_CONF"]]
        self._controller = _start(argv, self.folder / "ctld.out")
        self.processes.append(self._controller)

    def forget_jobs(self) -> None:
        """Restart slurmctld without its memory, as when it has removed the records of jobs that ended long ago."""
        self._controller.terminate()
        self._controller.wait(_START_TIMEOUT_S)
        self.processes.remove(self._controller)
        self.start_controller()
        self.wait_idle()

    def boot(self, node: str) -> None:
        """Start the daemon of a node."""
        argv = [_program("slurmd"), "-D", "-f", self.env["SLURM_CONF"], "-N", node]
        self._daemons[node] = _start(argv, self.folder / f"{node}.out")
        self.processes.append(self._daemons[node])

    def crash(self, node: str) -> None:
        """Kill all that runs on a node, its daemon too, as if its power were cut; Slurm notices as it does later."""
        daemon = self._daemons.pop(node)
        daemon.kill()
        daemon.wait()
        self.processes.remove(daemon)
        while found := self.processes_on(node):
            for process in found:
                with contextlib.suppress(psutil.Error):
                    process.kill()
            time.sleep(0.05)
        self.command("scontrol", "update", f"NodeName={node}", "State=DOWN", "Reason=crashed")

    def processes_on(self, node: str) -> list[psutil.Process]:
        """What runs on a node, and the step daemons above it; without the node's own daemon."""
        found = set()
        for process in psutil.process_iter():
            if _has(process, "SLURMD_NODENAME", node) and _has(process, "SLURM_CONF", self.env["SLURM_CONF"]):
                found.add(process)
                with contextlib.suppress(psutil.Error):
                    found |= {above for above in process.parents() if above.name().startswith("slurmstepd")}
        return [process for process in found if process.is_running() and process.status() != psutil.STATUS_ZOMBIE]

    def wait_idle(self) -> None:
        """Return when all nodes are there, and none has a job."""
        deadline_s, said = time.monotonic() + _START_TIMEOUT_S, ""
        while time.monotonic() < deadline_s and all(process.poll() is None for process in self.processes):
            argv, env = ("sinfo", "--noheader", "--format=%T"), {**os.environ, **self.env}
            said = subprocess.run(argv, env=env, capture_output=True, text=True, check=False).stdout.strip()
            if said == "idle":
                return
            time.sleep(0.1)
        logs = "\n".join(log.read_text(errors="replace")[-2000:] for log in sorted(self.folder.glob("*.[lo][ou][gt]")))
        raise AssertionError(f"Slurm does not come up: its nodes are {said!r}\n{logs}")


@contextmanager
def running_slurm(cpus: int = 8, memory_mb: int = 16_000, *, nodes: int = 2) -> Iterator[Slurm]:
    """Start a Slurm whose nodes have so much each; cancels its jobs and ends its daemons afterwards."""
    folder = Path(tempfile.mkdtemp(prefix="slurm-"))  # not pytest's: the path of a socket is 107 bytes at most
    # Control groups are named after nodes: those of another cluster on this machine must have other names.
    slurm = Slurm(folder, [f"c{os.getpid()}n{number}" for number in range(1, nodes + 1)])
    try:
        _start_munge(folder, slurm.processes)
        _write_config(slurm, cpus, memory_mb)
        _start_accounting(slurm)
        slurm.start_controller()
        for name in slurm.nodes:
            slurm.boot(name)
        slurm.wait_idle()
        yield slurm
    finally:
        _end(slurm)
        _remove_groups(slurm.nodes)
        shutil.rmtree(folder, ignore_errors=True)


def _write_config(slurm: Slurm, cpus: int, memory_mb: int) -> None:
    folder, host = slurm.folder, socket.gethostname().split(".")[0]
    ports = _free_ports(1 + len(slurm.nodes))
    limits = slurm.limits_memory
    config = _CONFIG.format(
        folder=folder, host=host, ctld_port=ports[0], names=",".join(slurm.nodes),
        task_plugin="task/cgroup" if limits else "task/none",
    )  # fmt: skip
    for number, (name, port) in enumerate(zip(slurm.nodes, ports[1:], strict=True)):
        (folder / "spool" / name).mkdir(parents=True)
        config += _NODE.format(
            name=name, host=host, address=f"127.0.0.{2 + number}", port=port, cpus=cpus, memory_mb=memory_mb
        )
    (folder / "state").mkdir()
    (folder / "slurm.conf").write_text(config, encoding="utf-8")
    if limits:
        groups = "CgroupPlugin=cgroup/v1\nConstrainRAMSpace=yes\n"
        (folder / "cgroup.conf").write_text(groups, encoding="utf-8")


def _start_accounting(slurm: Slurm) -> None:
    folder, config = slurm.folder, slurm.folder / "slurm.conf"
    if not slurm.keeps_accounts:
        config.write_text(f"{config.read_text()}AccountingStorageType=accounting_storage/none\n", encoding="utf-8")
        return
    ports = _free_ports(2)
    config.write_text(
        config.read_text() + slurmdbd.IN_SLURM_CONF.format(folder=folder, port=ports[0]), encoding="utf-8"
    )

    def start(argv: Sequence[str], log: Path) -> None:
        slurm.processes.append(_start([_program(argv[0]), *argv[1:]], log, slurm.env))

    slurmdbd.start_database(folder, start, ports)


def _start_munge(folder: Path, processes: list[subprocess.Popen[bytes]]) -> None:
    key = folder / "munge.key"
    key.write_bytes(secrets.token_bytes(128))
    key.chmod(0o400)
    folder.chmod(0o755)  # munge wants its socket's folder open to all, and no one else may write in it
    files = [f"--{name}-file={folder}/munge.{name}" for name in ("key", "pid", "log", "seed")]
    argv = [_program("munged"), "--foreground", "--force", f"--socket={folder}/munge.socket", *files]
    processes.append(_start(argv, folder / "munged.out"))


def _end(slurm: Slurm) -> None:
    """Kill the jobs, then the daemons, the last started first; step daemons are children of none of them."""
    processes = slurm.processes
    family = [child for process in processes for child in _children(process)]
    for process in [*family, *reversed(processes)]:
        with contextlib.suppress(psutil.Error, ProcessLookupError):
            process.kill()
    for process in processes:
        process.wait(20)
    for process in psutil.process_iter():
        if _has(process, "SLURM_CONF", slurm.env["SLURM_CONF"]) and process.pid != os.getpid():
            with contextlib.suppress(psutil.Error):
                process.kill()


def _remove_groups(nodes: Sequence[str]) -> None:
    """Remove the control groups that a cluster's nodes have left; the kernel may still be taking leave of processes."""
    deadline_s = time.monotonic() + 5
    for node in nodes:
        root = _MEMORY_GROUPS / f"slurm_{node}"
        while root.exists() and time.monotonic() < deadline_s:
            for group in sorted((path for path in [root, *root.rglob("*")] if path.is_dir()), reverse=True):
                with contextlib.suppress(OSError):
                    group.rmdir()
            time.sleep(0.02)


def _has(process: psutil.Process, name: str, value: str) -> bool:
    """Whether a process has a variable in its environment, also where its title has overwritten others, as stepd's."""
    try:
        return f"{name}={value}".encode() in Path(f"/proc/{process.pid}/environ").read_bytes().split(b"\0")
    except OSError:
        return False


def _children(process: subprocess.Popen[bytes]) -> list[psutil.Process]:
    try:
        return psutil.Process(process.pid).children(recursive=True)
    except psutil.Error:
        return []


def _start(argv: Sequence[str | None], log: Path, env: dict[str, str] | None = None) -> subprocess.Popen[bytes]:
    with log.open("wb") as output:
        return subprocess.Popen(
            [str(word) for word in argv], stdin=subprocess.DEVNULL, stdout=output, stderr=output,
            env={**os.environ, **(env or {})},
        )  # fmt: skip


def _free_ports(count: int) -> list[int]:
    sockets = [socket.socket() for _ in range(count)]
    for one in sockets:
        one.bind(("127.0.0.1", 0))
    ports = [one.getsockname()[1] for one in sockets]
    for one in sockets:
        one.close()
    return ports


def _program(name: str) -> str | None:
    """Daemons lie where an ordinary user's PATH does not look."""
    return shutil.which(name, path=f"{os.environ.get('PATH', '')}:/usr/sbin:/sbin")


if __name__ == "__main__":
    if (reason := lacking()) is not None:
        sys.exit(reason)
    with running_slurm() as cluster:
        print(f"export SLURM_CONF={cluster.env['SLURM_CONF']}", flush=True)
        with contextlib.suppress(KeyboardInterrupt):
            time.sleep(86400)
