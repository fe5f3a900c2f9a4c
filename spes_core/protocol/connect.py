"""From the files of a run to a node's connection: where its server listens, and what the node shows it."""

from __future__ import annotations

from pathlib import Path

from spes_core.address import read_address
from spes_core.protocol import credentials
from spes_core.protocol.client import SyncClient
from spes_core.runfile import RunFile


def connect(run: RunFile, folder: Path, node: int) -> SyncClient:
    """The client of a node of the run in ``folder``, once a server listens; it also finds one that is started later,
    elsewhere. Raises ConfigError or Unreachable.
    """
    shown = credentials.of_node(run.credentials, folder, node)
    read_address(run.server_address, folder)

    def find() -> str:
        return read_address(run.server_address, folder, timeout_s=0.0)

    return SyncClient(find, run.config, node, shown, allow_plaintext=run.allow_plaintext)
