"""From the files of a run to a node's connections: where its servers listen, and what the node shows them."""

from __future__ import annotations

from functools import partial
from pathlib import Path

from spes_core.address import read_address
from spes_core.protocol import credentials
from spes_core.protocol.client import SyncClient
from spes_core.protocol.link import Pace
from spes_core.runfile import RunFile


def connect(run: RunFile, folder: Path, node: int) -> list[SyncClient]:
    """The clients of a node of the run in ``folder``, one for each server, once all of them listen; they also find one
    that is started later, elsewhere. Raises ConfigError or Unreachable.
    """
    shown, pace = credentials.of_node(run.credentials, folder, node), Pace(run.config.link)
    clients = []
    for shard, name in enumerate(run.config.servers):
        find = partial(read_address, run.address_of(shard), folder, server=name)
        find()
        at_once = partial(find, timeout_s=0.0)
        client = SyncClient(at_once, run.config, node, shown, allow_plaintext=run.allow_plaintext, pace=pace)
        clients.append(client)
    return clients
