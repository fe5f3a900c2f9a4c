"""A trial on several machines of one Slurm allocation: an agent on each, reached by srun where ssh hosts are by ssh.

All machines share the file system on which the trial's folder lies, so its processes use that folder itself: nothing is
copied to them, and nothing comes back through the agents, which start processes and tell how they end.
"""

from __future__ import annotations

import os
import re
import secrets
import shutil
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from spes_core import snapshots
from spes_core.config import RunConfig
from spes_core.runfile import RunFile
from spes_core.snapshots import ResumePoint
from workbench.launch.hostlink import HostLink
from workbench.launch.launcher import LaunchError
from workbench.launch.remote import Placement, RemoteLauncher, Site
from workbench.processes import ProcessSpec, plan
from workbench.provenance import code_digest

_ASK_TIMEOUT_S = 60.0
_CALL_S = 10.0
_KEPT_OF_SLURM = ("SLURM_CONF",)
"""What a step inside a step may know of the outer one: its other variables are options of srun to the inner."""


def allocated_machines() -> list[str]:
    """Names of the machines of this process's allocation, its own first. Raises LaunchError."""
    names = _scontrol("show", "hostnames", os.environ.get("SLURM_JOB_NODELIST", "")).split()
    own = os.environ.get("SLURMD_NODENAME", "")
    return [own, *(name for name in names if name != own)] if own in names else names


def addresses(machines: Sequence[str]) -> dict[str, str]:
    """The address of each machine as Slurm itself reaches it. Raises LaunchError."""
    said = _scontrol("show", "node", "--oneliner", ",".join(machines))
    found = dict.fromkeys(machines, "")
    for line in said.splitlines():
        name, address = re.search(r"\bNodeName=(\S+)", line), re.search(r"\bNodeAddr=(\S+)", line)
        if name and address:
            found[name[1]] = address[1]
    return {name: address or name for name, address in found.items()}


def place(machines: Sequence[str], config: RunConfig) -> Placement:
    """Nodes spread evenly over the machines, in blocks; the server on the first, or several in turn."""
    used = list(machines)[: max(1, config.nodes)]
    servers = tuple(used[shard % len(used)] for shard in range(len(config.servers))) or tuple(used[:1])
    return Placement(servers, tuple(used[node * len(used) // config.nodes] for node in range(config.nodes)))


def nodes_of_largest(config: RunConfig, machines: int) -> int:
    """Most nodes of a run that one of so many machines takes."""
    names = [str(number) for number in range(machines)]
    nodes = place(names, config).nodes
    return max(nodes.count(name) for name in names)


def machines_for(config: RunConfig, asked: int) -> int:
    """Over how many machines a run spreads: one process group stays on one, and none is left without a node."""
    is_one_group = config.sync.exchange == "gradients" or (config.sync.exchange == "none" and config.nodes == 1)
    return 1 if is_one_group else min(asked, config.nodes)


class AllocationLauncher(RemoteLauncher):
    """Client of the agents on the machines of an allocation; see `Launcher`. It serves one trial."""

    def __init__(
        self, machines: Sequence[str], trial_dir: Path, *, port: int = 0, ignored_signal: str = "USR2"
    ) -> None:
        """``machines``: this one first; ``port``: the server's, 0 for a free one. Raises LaunchError.

        ``ignored_signal`` is that by which Slurm announces the end of the job: whoever waits for the trial answers it.
        """
        work = trial_dir.absolute()
        agent = (sys.executable, "-m", "workbench.launch.agent", "--work", str(work), "--ignore", ignored_signal)
        reached = addresses(machines)
        sites = [
            Site(name=name, connector=agent if index == 0 else _step(name, agent), address=reached[name])
            for index, name in enumerate(machines)
        ]
        super().__init__(sites, partial(place, machines), port=port)
        self._runs: dict[Path, RunFile] = {}

    def resume_points(self, config: RunConfig, trial_dir: Path) -> dict[str, ResumePoint]:
        """See `Launcher`: checkpoints lie in the trial's folder, whichever machine wrote them."""
        return snapshots.resume_points(config, snapshots.all_stored(config, trial_dir))

    def stage(self, run: RunFile, trial_dir: Path, points: Mapping[str, ResumePoint]) -> Sequence[ProcessSpec]:
        """See `Launcher`: run.json tells where the server is, and where the trial's keys are."""
        placement = self._place(run.config)
        links = {machine: self.link(machine) for machine in placement.hosts}
        for machine, link in links.items():
            self._sites[machine] = replace(self._sites[machine], gpus=check_machine(link, trial_dir))
        if run.config.sync.exchange == "rounds" and not self._port:
            for machine in dict.fromkeys(placement.servers):
                try_address(links, machine, self._sites[machine].address)
        address, *further = self._server_addresses(placement)[1]
        device = self._device(run, placement)
        keys = self._put_credentials(run, trial_dir, placement)
        all_of_several = (address, *further) if further else ()
        theirs = replace(run, server_address=address, shard_addresses=all_of_several, device=device, credentials=keys)
        self._runs[trial_dir] = run
        theirs.save(trial_dir / "run.json")
        self._remember(".", trial_dir, links)
        return [replace(spec, host=placement.host_of(spec.name)) for spec in plan(theirs, trial_dir)]

    def collect(self, trial_dir: Path, *, is_done: bool) -> None:
        """See `Launcher`: all is here; what was true for this attempt alone goes."""
        shutil.rmtree(trial_dir / "credentials", ignore_errors=True)
        if (run := self._runs.pop(trial_dir, None)) is not None:
            run.save(trial_dir / "run.json")

    def _put_credentials(self, run: RunFile, trial_dir: Path, placement: Placement) -> str | None:
        """Certificates and a join token of this attempt, for the user's eyes alone; the folder of them."""
        folder = trial_dir / "credentials"
        shutil.rmtree(folder, ignore_errors=True)
        if not (made := self._credentials(run, placement)):
            return None
        folder.mkdir(mode=0o700)
        for name, content in made.items():
            with os.fdopen(os.open(folder / name, os.O_WRONLY | os.O_CREAT, 0o600), "wb") as file:
                file.write(content)
        return str(folder.absolute())


def check_machine(link: HostLink, trial_dir: Path) -> int:
    """How many GPUs a machine has for the job. Raises LaunchError when it cannot run the trial as this one does."""
    if not link.ask("has", path="trial.json", timeout_s=_ASK_TIMEOUT_S)["there"]:
        raise LaunchError(
            f"machine {link.name} does not see {trial_dir}: --results must be on a file system that all machines share"
        )
    facts = link.ask("facts", timeout_s=_ASK_TIMEOUT_S)
    if facts["code_digest"] != code_digest():
        raise LaunchError(
            f"machine {link.name} has other code in {facts['package']} ({facts['code_digest'][:12]}) than this one"
            f" ({code_digest()[:12]}); the checkout must be on a file system that all machines share"
        )
    return len(facts["gpus"])


def try_address(links: Mapping[str, HostLink], server: str, address: str) -> None:
    """Raises LaunchError unless every machine reaches the one that has a server at its address."""
    asked = server
    try:
        port, nonce = links[server].ask("free_port", address=address)["port"], secrets.token_hex(16)
        meeting: dict[str, Any] = {"address": address, "port": port, "nonce": nonce, "seconds": _CALL_S}
        links[server].ask("listen", **meeting)
        for asked in links:
            links[asked].ask("call", timeout_s=_ASK_TIMEOUT_S, **meeting)
        links[server].ask("hush")
    except LaunchError as error:
        raise LaunchError(
            f"machine {asked} does not reach {server}, which has the server, at {address} (NodeAddr in slurm.conf,"
            f" which must be an address that machines reach each other by): {error}"
        ) from error


def _step(machine: str, command: Sequence[str]) -> tuple[str, ...]:
    """The command that runs another as a step on one machine of the allocation, beside the step that this is."""
    theirs = (name for name in os.environ if name.startswith(("SLURM_", "SRUN_")) and name not in _KEPT_OF_SLURM)
    unset = [word for name in theirs for word in ("-u", name)]
    job, cpus = os.environ.get("SLURM_JOB_ID", ""), os.environ.get("SLURM_CPUS_PER_TASK", "1")
    options = [f"--jobid={job}", "--overlap", "--nodes=1", "--ntasks=1", f"--cpus-per-task={cpus}", "--mpi=none"]
    return ("env", *unset, "srun", *options, f"--nodelist={machine}", *command)


def _scontrol(*words: str) -> str:
    try:
        done = subprocess.run(
            ["scontrol", *words], capture_output=True, text=True, check=False, timeout=_ASK_TIMEOUT_S,
            stdin=subprocess.DEVNULL,
        )  # fmt: skip
    except (OSError, subprocess.TimeoutExpired) as error:
        raise LaunchError(f"scontrol cannot be asked for the machines of this job: {error}") from error
    if done.returncode != 0:
        raise LaunchError(f"scontrol cannot tell the machines of this job: {done.stderr.strip() or 'it said nothing'}")
    return done.stdout
