"""The command and the environment of torchrun, under which all ranks of one group on this host start."""

from __future__ import annotations

import sys
from pathlib import Path


def group_argv(python: str, package: Path, folder: Path, ranks: int, name: str) -> tuple[str, ...]:
    """A single-host torchrun group of the run.json in ``folder``, whose ranks end with it; a node's options may follow.

    It meets in a file, as torch's own TCP store (torchrun --standalone has one too) listens on every interface, and
    unpickles what it is sent. ``package`` is the folder of spes_core. On Linux torchrun forks the ranks, which then
    have torch loaded, as torchrun has. Elsewhere it starts each from scratch in a session of its own, which signals to
    the group do not reach; so ranks are told to end with torchrun. What follows "--" is never taken for an option of
    torchrun's own, as --node would be for --node-rank.
    """
    torchrun = ("-m", "torch.distributed.run", "--nproc-per-node", str(ranks), "--local-addr", "127.0.0.1")
    file = ("--rdzv-endpoint", str(rendezvous(folder, name)), "--rdzv-id", name)
    meeting = ("--rdzv-backend", "c10d", "--rdzv-conf", "store_type=file", *file)
    logs = ("--log-dir", str(folder / "logs"))
    if sys.platform == "linux":
        node = ("--start-method", "fork", "--run-path", "--", str(package / "node.py"))
    else:
        node = ("-m", "--", "spes_core.node")
    return (python, *torchrun, *meeting, *logs, *node, str(folder / "run.json"), "--die-with-parent")


def rendezvous(folder: Path, name: str) -> Path:
    """The file in which a group meets: it must not be there when the group starts."""
    return folder / f"{name}.rendezvous"


def group_environment(interface: str | None = None) -> dict[str, str]:
    """What keeps a group of one host on that host: torchrun opens no store, and ranks talk over the loopback only.

    Between hosts they talk over the ``interface``; NCCL would take any whose name begins like it, but for the "=".
    """
    loopback = "lo0" if sys.platform == "darwin" else "lo"
    return {
        "GLOO_SOCKET_IFNAME": interface or loopback,
        "NCCL_SOCKET_IFNAME": f"={interface}" if interface else loopback,
        "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1",
    }
