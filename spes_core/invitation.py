"""Invitations: one private file holds all that a participant without an account on our machines needs for one node.

``python -m spes_core.server RUN.json --credentials DIR`` writes them (`invite`), ``python -m spes_core.node
node-3.invite`` takes one up (`participant`). Whoever has one can take part as that node: it is a secret. It comes from
elsewhere, so it is read strictly: what it says chooses no file and no command on the participant's machine.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

from spes_core.config import RunConfig, to_dict
from spes_core.data import shards
from spes_core.data.preparation import MADE_HERE
from spes_core.errors import ConfigError, DataError, Problem
from spes_core.protocol import credentials
from spes_core.protocol.credentials import Credentials
from spes_core.rules import check
from spes_core.runfile import RunFile
from spes_core.structure import build

SUFFIX = ".invite"
_OTHERS_MODE = 0o077
VERSION = 1
_KEY, _DIGEST = "spes_invitation", "sha256"
_MOST_BYTES = 1 << 20
_ADDRESS = re.compile(r"([A-Za-z0-9_]([A-Za-z0-9_.-]{0,252})|\[[0-9A-Fa-f:.]{2,45}\]):([0-9]{1,5})")
"""host:port, where gRPC would also take the schemes of other transports."""


@dataclass(frozen=True, kw_only=True)
class Invitation:
    """All that one participant needs."""

    trial: str
    """Name of the run, for people."""
    node: int
    """Which node the participant is."""
    address: str
    """host:port by which participants call the server."""
    config: RunConfig
    """The run; its paths are those of the server's machine and are never followed here."""
    device: Literal["auto", "cpu", "cuda"]
    """As RunFile.device."""
    threads: int
    """As RunFile.threads: with another number the last bits may differ."""
    data_digest: str
    """`ShardHeader.digest` of the tokenized corpus that everyone reads."""
    data_text: str
    """What that corpus is, in words."""
    ca: str
    """PEM, as are the next two."""
    certificate: str
    key: str
    token: str

    def __repr__(self) -> str:
        return f"Invitation({self.trial!r}, node={self.node})"

    @property
    def credentials(self) -> Credentials:
        """What this node shows and trusts."""
        return Credentials(
            token=self.token, ca=self.ca.encode(), certificate=self.certificate.encode(), key=self.key.encode()
        )

    def save(self, path: Path) -> None:
        """Write the file, which only this user can read, in place of a former one."""
        content = to_dict(self)
        content = {_KEY: VERSION, _DIGEST: _digest(content), **content}
        temporary = path.with_name(f"{path.name}.{os.getpid()}.tmp")
        temporary.unlink(missing_ok=True)
        credentials.write_private(temporary, (json.dumps(content, indent=1) + "\n").encode())
        temporary.replace(path)

    @classmethod
    def load(cls, path: Path) -> Invitation:
        """Read and check a file written by `save`. Raises ConfigError for one that is damaged, foreign, of another
        version, expired, or that asks for what no invitation may.
        """
        content = _content(path)
        try:
            found = build(cls, content)
        except ConfigError as error:
            raise _wrong(path, f"is no invitation that this version can read: {_one_line(error)}") from error
        if problems := [*check(found.config), *_problems(found)]:
            raise _wrong(path, f"invites to what cannot be run: {_one_line(ConfigError(problems))}")
        credentials.check_certificate(path, f"node-{found.node}", found.credentials)
        return found


def is_invitation(path: Path) -> bool:
    """Whether a file is an invitation by its name, or by how it begins: what sends files may rename them."""
    if path.suffix == SUFFIX:
        return True
    try:
        with path.open("rb") as file:
            return f'"{_KEY}"'.encode() in file.read(64)
    except OSError:
        return False


def exposed(path: Path) -> str:
    """What to say of an invitation that others on this machine may read; "" where none can."""
    if not path.stat().st_mode & _OTHERS_MODE:
        return ""
    return f"others on this machine can read {path}, with which anyone takes part as this node: chmod 600 it"


def invite(run: RunFile, folder: Path, public: str | None) -> tuple[RunFile, list[str]]:
    """Make the credentials in ``folder``, unless they are there, and an invitation for each node beside them.

    Returns the run as the server serves it, and the lines to print. ``public`` is the server's address as participants
    see it (None: where it listens). Raises ConfigError before anything is made.
    """
    address = _public_address(run.server_address, public)
    host = address.rpartition(":")[0].strip("[]")
    header = _header(run)
    names = [f"node-{node}" for node in range(run.config.nodes)]
    if not folder.exists():
        part = folder.with_name(f"{folder.name}.part")
        shutil.rmtree(part, ignore_errors=True)
        credentials.make(part, run.config.nodes, ["localhost", "127.0.0.1", "::1", host])
        part.rename(folder)
    elif unnamed := credentials.missing_name(credentials.load(folder, "server"), host):
        raise ConfigError([Problem("--public", f'("{host}") {unnamed}; give --credentials a new folder')])
    shown = {name: credentials.load(folder, name) for name in names}
    for node, name in enumerate(names):
        mine = shown[name]
        assert mine.ca is not None and mine.certificate is not None and mine.key is not None
        Invitation(
            trial=run.trial,
            node=node,
            address=address,
            config=run.config,
            device=run.device,
            threads=run.threads,
            data_digest=header.digest,
            data_text=f"{header.corpus}: {header.train.tokens} + {header.validation.tokens} tokens",
            ca=mine.ca.decode(),
            certificate=mine.certificate.decode(),
            key=mine.key.decode(),
            token=mine.token,
        ).save(folder / f"{name}{SUFFIX}")
    return replace(run, credentials=str(folder.absolute())), list(_lines(run.config, folder, address))


def others_paths(config: RunConfig) -> list[str]:
    """The settings that name corpora or a tokenizer which a participant cannot have from this configuration alone."""
    corpora = {f"data.domains.{name}.corpus": domain.corpus for name, domain in config.data.domains.items()}
    found = [path for path, corpus in (corpora or {"data.corpus": config.data.corpus}).items() if corpus != "stdlib"]
    return found if config.data.tokenizer in MADE_HERE else [*found, "data.tokenizer"]


def _lines(config: RunConfig, folder: Path, address: str) -> Iterator[str]:
    yield f"{config.nodes} invitations in {folder}, to {address}. Each is a secret: whoever has it can take part as"
    yield "that node. Send each to one participant, privately. In a folder of their own they run one line:"
    data = " --data CORPUS_FOLDER" if others_paths(config) else ""
    weights = " --init WEIGHTS_FILE" if config.init.kind == "weights" else ""
    for node in range(config.nodes):
        yield f"  python -m spes_core.node node-{node}{SUFFIX}{data}{weights}"


def _public_address(listen: str, public: str | None) -> str:
    """Where participants call. Raises ConfigError when that cannot be."""
    setting, address = ("--listen", listen) if public is None else ("--public", public)
    if not _is_address(address):
        rule = "must be HOST:PORT with a port above 0, by which participants call this machine"
        raise ConfigError([Problem(setting, f'("{address}") {rule}; a server that is started again needs the same')])
    if address.startswith(("0.0.0.0:", "[::]:")):
        rule = "is no address that can be called; name this machine as participants see it with --public HOST:PORT"
        raise ConfigError([Problem(setting, f'("{address}") {rule}')])
    if not _is_address(listen):
        raise ConfigError([Problem("--listen", f'("{listen}") must be HOST:PORT with a port above 0')])
    return address


def _is_address(text: str) -> bool:
    match = _ADDRESS.fullmatch(text)
    return match is not None and 0 < int(match[3]) <= 65535


def _header(run: RunFile) -> shards.ShardHeader:
    try:
        header = shards.read_header(Path(run.data_dir))
    except DataError as error:
        raise ConfigError([Problem("data_dir", f"must be the corpus that everyone reads: {error}")]) from error
    shards.require_enough(header, run.config)
    return header


def _content(path: Path) -> dict[str, Any]:
    """What an invitation says, whole and of this version. Raises ConfigError."""
    try:
        with path.open("rb") as file:
            data = file.read(_MOST_BYTES + 1)
    except OSError as error:
        raise _wrong(path, f"cannot be read: {error.strerror or error}") from error
    if len(data) > _MOST_BYTES:
        raise _wrong(path, f"is larger than the {_MOST_BYTES} bytes of the largest invitation")
    try:
        content = json.loads(data)
        json.dumps(content, ensure_ascii=False).encode()  # half characters cannot be written anywhere
    except (ValueError, RecursionError) as error:
        raise _wrong(path, f"is damaged, or no invitation: {str(error)[:200]}") from error
    if not isinstance(content, dict) or _KEY not in content:
        raise _wrong(path, "is no invitation; give the node-<n>.invite that the server's operator has sent")
    if (version := content.pop(_KEY)) != VERSION:
        advice = "install the release of the server's operator"
        raise _wrong(path, f"is of version {str(version)[:20]}, and this release reads {VERSION}; {advice}")
    if content.pop(_DIGEST, None) != _digest(content):
        raise _wrong(path, "is damaged: its content does not have its SHA-256; have it sent again")
    return content


def _problems(found: Invitation) -> Iterator[Problem]:
    """The rules for what a stranger may ask."""
    if not _is_address(found.address):
        yield Problem("address", f'("{found.address[:100]}") must be HOST:PORT')
    if not 0 <= found.node < found.config.nodes:
        yield Problem("node", f"({found.node}) must be from 0 to nodes − 1 ({found.config.nodes - 1})")
    if found.config.sync.exchange != "rounds":
        yield Problem("config.sync.exchange", f'("{found.config.sync.exchange}") must be "rounds"')
    if not 1 <= found.threads <= 1024:
        yield Problem("threads", f"({found.threads}) must be from 1 to 1024")
    if not re.fullmatch("[0-9a-f]{64}", found.token):
        yield Problem("token", "must be 64 hex digits")


def _digest(content: Mapping[str, Any]) -> str:
    return hashlib.sha256(json.dumps(content, sort_keys=True, separators=(",", ":")).encode()).hexdigest()


def _one_line(error: ConfigError) -> str:
    text = "; ".join(map(str, error.problems[:5]))
    return text if len(text) <= 1000 else f"{text[:1000]}…"


def _wrong(path: Path, message: str) -> ConfigError:
    return ConfigError([Problem("", f"the invitation {path} {message}")])
