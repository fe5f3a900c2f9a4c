"""run.json: the one file that every process of a run is started with."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from spes_core.address import address_of
from spes_core.config import RunConfig, to_dict
from spes_core.errors import ConfigError, Problem
from spes_core.rules import check
from spes_core.structure import build


@dataclass(frozen=True, kw_only=True)
class Meeting:
    """Where the ranks of one group meet that several hosts share."""

    address: str
    """host:port: rank 0 listens there, and all others call it."""
    key: str
    """Tells this attempt from earlier ones, of which a rank may still be on its way."""


@dataclass(frozen=True, kw_only=True)
class RunFile:
    """What a process is started with: run.json. Everything beside `config` changes no number."""

    trial: str
    """Readable name of the trial."""
    config: RunConfig
    data_dir: str
    """Folder of the tokenized corpus."""
    server_address: str = "127.0.0.1:0"
    """Where the server listens; port 0 lets it choose, and nodes read its choice in server.address beside run.json."""
    shard_addresses: tuple[str, ...] = ()
    """Where the servers of a run with several (server.shards) listen, the first one too; empty: at server_address and
    the ports after it, or with port 0 each where it chooses."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """Where a node computes; "auto" takes GPUs where each process of the run gets one, "cuda" lets nodes share."""
    threads: int = 1
    """Intra-operation threads of one process."""
    credentials: str | None = None
    """Folder of this run's certificates and join token (spes_core.protocol.credentials); null: no encryption, which is
    for one machine, and a token that the server leaves beside run.json."""
    meeting: Meeting | None = None
    """With exchange of gradients over several hosts; null: all ranks are on one host, and meet in a file."""
    allow_plaintext: bool = False
    """Whether server and nodes may talk unencrypted beyond one machine; the flag --allow-plaintext says so too."""

    def address_of(self, shard: int) -> str:
        """Where a server listens, as it is set."""
        return self.shard_addresses[shard] if self.shard_addresses else address_of(self.server_address, shard)

    def save(self, path: Path) -> None:
        """Write the file (its folder must exist)."""
        path.write_text(json.dumps(to_dict(self), indent=1) + "\n", encoding="utf-8")

    @classmethod
    def load(cls, path: Path) -> RunFile:
        """Read and check a file written by `save`. Raises ConfigError."""
        try:
            data = json.loads(path.read_text(encoding="utf-8"))
        except (OSError, ValueError) as error:
            raise ConfigError([Problem(str(path), f"cannot be read: {error}")]) from error
        run = build(cls, data)
        problems = check(run.config)
        if (found := len(run.shard_addresses)) not in (0, shards := run.config.server.shards):
            problems.append(Problem("shard_addresses", f"({found} of them) must be {shards}, one for each server"))
        if problems:
            raise ConfigError(problems)
        return run
