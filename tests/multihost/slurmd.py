"""A real one-node Slurm for tests: munged, slurmctld and slurmd in a folder of their own, on ports of their own.

Debian has all three (`apt-get install slurm-wlm munge`). They need root: jobs run as whoever submits, here root.
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

PROGRAMS = ("munged", "slurmctld", "slurmd", "sbatch", "srun", "squeue", "scancel", "scontrol")
_CONFIG = """\
ClusterName=tests
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={ctld_port}
SlurmdPort={slurmd_port}
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
CredType=cred/munge
AuthInfo=socket={folder}/munge.socket
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/slurmd.log
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
MpiDefault=none
SlurmdParameters=config_overrides
SwitchType=switch/none
AccountingStorageType=accounting_storage/none
JobAcctGatherType=jobacct_gather/none
JobCompType=jobcomp/none
JobRequeue=1
KillWait=5
MinJobAge=300
ReturnToService=2
SchedulerParameters=sched_interval=1,bf_interval=1,batch_sched_delay=0,sched_min_interval=1
NodeName={host} NodeAddr=127.0.0.1 CPUs={cpus} CoresPerSocket={cpus} RealMemory={memory_mb} State=UNKNOWN
PartitionName=main Nodes={host} Default=YES MaxTime=INFINITE State=UP
"""
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
    """A running one-node cluster."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.env = {"SLURM_CONF": str(folder / "slurm.conf")}
        """What a process needs in its environment to speak to this cluster."""

    def command(self, *argv: str) -> str:
        """The output of a Slurm command, which must succeed."""
        done = subprocess.run(argv, env={**os.environ, **self.env}, capture_output=True, text=True, check=False)
        assert done.returncode == 0, f"{argv}: {done.stdout}{done.stderr}"
        return done.stdout

    def jobs(self) -> dict[str, str]:
        """State of every job that Slurm remembers, ended or not, by job id (12 or 12_0)."""
        lines = self.command("squeue", "--noheader", "--array", "--states=all", "--format=%i %T").splitlines()
        return {line.split()[0]: line.split()[1] for line in lines}


@contextmanager
def running_slurm(cpus: int = 4, memory_mb: int = 16_000) -> Iterator[Slurm]:
    """Start a one-node Slurm; cancels its jobs and ends its daemons afterwards."""
    folder = Path(tempfile.mkdtemp(prefix="slurm-"))  # not pytest's: the path of a socket is 107 bytes at most
    processes: list[subprocess.Popen[bytes]] = []
    slurm = Slurm(folder)
    try:
        for name in ("state", "spool"):
            (folder / name).mkdir()
        _start_munge(folder, processes)
        ports = _free_ports(2)
        host = socket.gethostname().split(".")[0]
        config = _CONFIG.format(
            folder=folder, host=host, ctld_port=ports[0], slurmd_port=ports[1], cpus=cpus, memory_mb=memory_mb
        )
        (folder / "slurm.conf").write_text(config, encoding="utf-8")
        conf = str(folder / "slurm.conf")
        processes.append(_start([_program("slurmctld"), "-D", "-i", "-f", conf], folder / "slurmctld.out"))
        processes.append(_start([_program("slurmd"), "-D", "-f", conf, "-N", host], folder / "slurmd.out"))
        _wait_idle(slurm, processes)
        yield slurm
    finally:
        _end(slurm, processes)
        shutil.rmtree(folder, ignore_errors=True)


def _start_munge(folder: Path, processes: list[subprocess.Popen[bytes]]) -> None:
    key = folder / "munge.key"
    key.write_bytes(secrets.token_bytes(128))
    key.chmod(0o400)
    folder.chmod(0o755)  # munge wants its socket's folder open to all, and no one else may write in it
    files = [f"--{name}-file={folder}/munge.{name}" for name in ("key", "pid", "log", "seed")]
    argv = [_program("munged"), "--foreground", "--force", f"--socket={folder}/munge.socket", *files]
    processes.append(_start(argv, folder / "munged.out"))


def _wait_idle(slurm: Slurm, processes: Sequence[subprocess.Popen[bytes]]) -> None:
    deadline_s = time.monotonic() + _START_TIMEOUT_S
    said = ""
    while time.monotonic() < deadline_s and all(process.poll() is None for process in processes):
        argv, env = ("sinfo", "--noheader", "--format=%T"), {**os.environ, **slurm.env}
        said = subprocess.run(argv, env=env, capture_output=True, text=True, check=False).stdout.strip()
        if said == "idle":
            return
        time.sleep(0.1)
    logs = "\n".join(path.read_text(errors="replace")[-2000:] for path in sorted(slurm.folder.glob("*.[lo][ou][gt]")))
    raise AssertionError(f"Slurm does not come up: its node is {said!r}\n{logs}")


def _end(slurm: Slurm, processes: Sequence[subprocess.Popen[bytes]]) -> None:
    """Kill the jobs, then the daemons, the last started first; step daemons are children of none of them."""
    family = [child for process in processes for child in _children(process)]
    for process in [*family, *reversed(processes)]:
        with contextlib.suppress(psutil.Error, ProcessLookupError):
            process.kill()
    for process in processes:
        process.wait(20)
    for process in psutil.process_iter(["environ"]):
        environ = process.info["environ"] or {}
        if environ.get("SLURM_CONF") == slurm.env["SLURM_CONF"] and process.pid != os.getpid():
            with contextlib.suppress(psutil.Error):
                process.kill()


def _children(process: subprocess.Popen[bytes]) -> list[psutil.Process]:
    try:
        return psutil.Process(process.pid).children(recursive=True)
    except psutil.Error:
        return []


def _start(argv: Sequence[str | None], log: Path) -> subprocess.Popen[bytes]:
    with log.open("wb") as output:
        return subprocess.Popen([str(word) for word in argv], stdin=subprocess.DEVNULL, stdout=output, stderr=output)


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
