"""A participant by hand: from an invitation to a folder of one's own, from which a node runs like any other."""

from __future__ import annotations

import os
import re
from dataclasses import replace
from pathlib import Path
from typing import Literal

from spes_core.config import RunConfig, digest
from spes_core.data import shards, tokenize
from spes_core.data.progress import terminal_line
from spes_core.errors import ConfigError, DataError, Problem
from spes_core.invitation import Invitation, others_paths
from spes_core.protocol import credentials
from spes_core.runfile import RunFile

_RUN, _CREDENTIALS = "run.json", "credentials"


def settle(path: Path, *, data: Path | None, init: Path | None, folder: Path | None) -> tuple[Path, int]:
    """The run.json that an invitation leads to, and the node; run again it finds the same, and so goes on.

    ``data`` is a folder of tokenized text (None: prepared here, in the cache), ``init`` the file of the first weights,
    ``folder`` takes all that is written (None: ./spes-<trial>-node-<n>). Raises ConfigError; nothing is made then.
    """
    invitation = Invitation.load(path)
    folder = (folder or Path(f"spes-{_word(invitation.trial)}-node-{invitation.node}")).absolute()
    _require_own(folder, invitation)
    config = _with_init(invitation.config, init)
    run = RunFile(
        trial=invitation.trial,
        config=config,
        data_dir=str(_corpus(invitation, data)),
        server_address=invitation.address,
        device=_device(invitation),
        threads=invitation.threads,
        credentials=str(folder / _CREDENTIALS),
    )
    try:
        _write(folder, invitation, run)
    except OSError as error:
        raise ConfigError([Problem("--folder", f'("{folder}") cannot be written: {error}')]) from error
    return folder / _RUN, invitation.node


def _write(folder: Path, invitation: Invitation, run: RunFile) -> None:
    """The files of a node, each appearing whole; run.json last."""
    keys = folder / _CREDENTIALS
    keys.mkdir(mode=0o700, parents=True, exist_ok=True)
    name = f"node-{invitation.node}"
    contents = {
        credentials.TOKEN_FILE: f"{invitation.token}\n",
        "ca.pem": invitation.ca,
        f"{name}.pem": invitation.certificate,
        f"{name}.key": invitation.key,
    }
    for file, text in contents.items():
        if not (keys / file).exists() or (keys / file).read_bytes() != text.encode():
            temporary = keys / f"{file}.{os.getpid()}.tmp"
            temporary.unlink(missing_ok=True)
            credentials.write_private(temporary, text.encode())
            temporary.replace(keys / file)
    temporary = folder / f"{_RUN}.{os.getpid()}.tmp"
    run.save(temporary)
    temporary.replace(folder / _RUN)


def _require_own(folder: Path, invitation: Invitation) -> None:
    """Raises ConfigError when the folder holds something else than this node of this run."""
    message = ""
    try:
        if (folder / _RUN).exists():
            former = RunFile.load(folder / _RUN).config
            is_same_run = (folder / _CREDENTIALS / "ca.pem").read_bytes() == invitation.ca.encode()
            is_node = (folder / _CREDENTIALS / f"node-{invitation.node}.key").exists()
            if not (is_same_run and is_node and digest(former) == digest(invitation.config)):
                message = "holds another run, another node, or what an earlier invitation began"
        elif folder.exists() and any(
            item.name != _CREDENTIALS and not item.name.endswith(".tmp") for item in folder.iterdir()
        ):
            message = "holds something else"
    except (OSError, ConfigError) as error:
        message = f"cannot be gone on from: {error}"
    if message:
        raise ConfigError([Problem("--folder", f'("{folder}") {message}; name another with --folder, or remove it')])


def _with_init(config: RunConfig, init: Path | None) -> RunConfig:
    """The configuration with this machine's path of the first weights; what is in the file is checked by its digest."""
    if config.init.kind != "weights":
        if init is not None:
            raise ConfigError([Problem("--init", "must be left out: this run draws its first weights")])
        return config
    if init is None:
        message = f"must name the file of the run's first weights, with SHA-256 {config.init.digest}"
        raise ConfigError([Problem("--init", f"{message}; copy it from where the server's operator has it")])
    return replace(config, init=replace(config.init, weights=str(init.absolute())))


def _corpus(invitation: Invitation, data: Path | None) -> Path:
    """The folder of the text that everyone reads. Raises ConfigError when what is here is another."""
    wanted = f"{invitation.data_text[:200]}, digest {invitation.data_digest[:16]}…"
    copy = (
        f"copy the tokenized folder of this run ({wanted}) from the server's operator and name it with --data"
        " CORPUS_FOLDER"
    )
    if data is None and (paths := others_paths(invitation.config)):
        message = f"must be given: {', '.join(paths)} cannot be prepared from the invitation alone; {copy}"
        raise ConfigError([Problem("--data", message)])
    try:
        folder = tokenize.prepare(invitation.config.data, progress=terminal_line()) if data is None else data.absolute()
        header = shards.verify(folder)
    except DataError as error:
        raise ConfigError([Problem("--data", f"cannot be used: {error}; {copy}")]) from error
    if header.digest != invitation.data_digest:
        why = f' (Python {header.python_version} has another "stdlib" than the server\'s)' if data is None else ""
        raise ConfigError([Problem("--data", f"({folder}) has the digest {header.digest[:16]}…{why}; {copy}")])
    return folder


def _device(invitation: Invitation) -> Literal["auto", "cpu", "cuda"]:
    """ "auto" of a whole run asks for a GPU for every node; this machine has one node."""
    if invitation.device != "auto":
        return invitation.device
    import torch

    return "cuda" if torch.cuda.device_count() >= invitation.config.group_size else "cpu"


def _word(trial: str) -> str:
    """A file name that resembles the trial's name."""
    return re.sub(r"[^A-Za-z0-9_.-]+", "-", trial).strip("-.")[:80] or "run"
