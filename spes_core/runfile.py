"""run.json: the one file that every process of a run is started with."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

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
        if problems := check(run.config):
            raise ConfigError(problems)
        return run
