"""Which processes one run consists of: a pure function from a run file to process specifications."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import spes_core
from spes_core.runfile import RunFile
from spes_core.torchrun import group_argv, group_environment

GROUP = "torchrun"
"""Name of the process that starts the ranks of a process group; where several hosts share it, with the first rank."""


@dataclass(frozen=True, kw_only=True)
class ProcessSpec:
    """One process to start on this host: what a launcher needs and nothing else."""

    name: str
    """Unique in the trial: "server" or "server-0-of-2", ...; "node-0", ... (a process, or a torchrun); "torchrun",
    "torchrun-4", ..."""
    argv: tuple[str, ...]
    """Command line; the first word is a Python interpreter."""
    env: dict[str, str]
    """Environment variables that are set on top of the launcher's own."""
    host: str | None = None
    """The host that it is started on, by its name in the inventory; None: this one."""

    @property
    def log_name(self) -> str:
        """Name of the file in the trial's logs/ that takes stdout and stderr."""
        return f"{self.name}.log"


def plan(
    run: RunFile,
    trial_dir: Path,
    python: str = sys.executable,
    package: Path = Path(spes_core.__file__).parent,
    *,
    spread: Sequence[int] = (),
    interface: str | None = None,
) -> list[ProcessSpec]:
    """The processes of a run whose run.json lies in ``trial_dir``, in the order in which they are started.

    Rounds need one server (or server.shards) and N nodes; gradients need one group of nodes × parallel.ranks_per_node
    ranks and no server; without any exchange there are N nodes. A node of several ranks is a torchrun group of its own.
    All paths are those of the host where the processes run: ``package`` is the folder of spes_core there. Where several
    hosts share the group of gradients, ``spread`` has the number of ranks of each, in order, and each has a torchrun of
    its own; ``interface`` is that of this host by which the others reach it.
    """
    run_file = str(trial_dir.absolute() / "run.json")
    exchange, env = run.config.sync.exchange, environment(run)
    if exchange == "gradients":
        return _groups(run, trial_dir.absolute(), python, package, spread, interface)
    ranks = run.config.parallel.ranks_per_node
    nodes = []
    for node in range(run.config.nodes):
        name = f"node-{node}"
        argv: tuple[str, ...] = (python, "-m", "spes_core.node", run_file)
        if ranks > 1:
            argv = group_argv(python, package, trial_dir.absolute(), ranks, name)
        node_env = env | group_environment() if ranks > 1 else env
        nodes.append(ProcessSpec(name=name, argv=(*argv, "--node", str(node)), env=node_env))
    servers = []
    for shard, name in enumerate(run.config.servers):
        which = ("--shard", str(shard)) if shard else ()
        servers.append(ProcessSpec(name=name, argv=(python, "-m", "spes_core.server", run_file, *which), env=env))
    return [*servers, *nodes]


def _groups(
    run: RunFile, trial_dir: Path, python: str, package: Path, spread: Sequence[int], interface: str | None
) -> list[ProcessSpec]:
    """The torchruns of the ranks that exchange gradients: one, or one of each host."""
    env, specs, first_rank = environment(run) | group_environment(interface), list[ProcessSpec](), 0
    for ranks in spread or (run.config.world_size,):
        name = f"{GROUP}-{first_rank}" if spread else GROUP
        argv = group_argv(python, package, trial_dir, ranks, name)
        if spread:
            argv = (*argv, "--node", str(first_rank // run.config.parallel.ranks_per_node))
        specs.append(ProcessSpec(name=name, argv=argv, env=env))
        first_rank += ranks
    return specs


def environment(run: RunFile) -> dict[str, str]:
    """Variables that must be in place before a numerical library is loaded.

    Threads that spin while they wait make processes that share cores more than ten times slower, hence PASSIVE.
    """
    threads = str(run.threads)
    return {
        "OMP_NUM_THREADS": threads,
        "OPENBLAS_NUM_THREADS": threads,
        "MKL_NUM_THREADS": threads,
        "OMP_WAIT_POLICY": "PASSIVE",
        "PYTHONHASHSEED": "0",
        "PYTHONUNBUFFERED": "1",
        "PYTHONIOENCODING": "utf-8:backslashreplace",
        "TOKENIZERS_PARALLELISM": "false",
    }
