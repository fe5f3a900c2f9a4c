"""Slurm's accounting for tests: a slurmdbd over a database of its own, on ports of their own.

Debian has both (`apt-get install slurmdbd mariadb-server-core`).
"""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
import time
from collections.abc import Callable, Sequence
from pathlib import Path

_SYSTEM_TABLES = Path("/usr/share/mysql/mysql_system_tables.sql")
_TIMEOUT_S = 60.0
_CONFIG = """\
DbdHost={host}
DbdAddr=127.0.0.1
DbdPort={port}
AuthType=auth/munge
AuthInfo=socket={folder}/munge.socket
SlurmUser=root
LogFile={folder}/slurmdbd.log
PidFile={folder}/slurmdbd.pid
StorageType=accounting_storage/mysql
StorageHost=127.0.0.1
StoragePort={database_port}
StorageUser=root
StorageLoc=slurm
"""
IN_SLURM_CONF = """\
AccountingStorageType=accounting_storage/slurmdbd
AccountingStorageHost=127.0.0.1
AccountingStoragePort={port}
AccountingStoragePass={folder}/munge.socket
"""


def is_there() -> bool:
    """Whether all that it needs is installed."""
    return all(_program(name) for name in ("slurmdbd", "mariadbd", "sacctmgr")) and _SYSTEM_TABLES.exists()


def start_database(folder: Path, start: Callable[[Sequence[str], Path], None], ports: Sequence[int]) -> None:
    """Start the database and slurmdbd, which knows of the cluster "tests"; the first of two ports is slurmdbd's.

    slurm.conf and munge's socket are in ``folder`` already; ``start`` starts a daemon with its output in a file.
    """
    data = folder / "database"
    options = ["--no-defaults", f"--datadir={data}", "--user=root"]
    data.mkdir()
    tables = f"create database mysql;\nuse mysql;\n{_SYSTEM_TABLES.read_text(encoding='utf-8')}"
    making = [_program("mariadbd") or "", *options, "--bootstrap", "--skip-grant-tables"]
    subprocess.run(making, input=tables, text=True, check=True, capture_output=True)
    serving = [f"--socket={folder}/database.socket", "--bind-address=127.0.0.1", f"--port={ports[1]}"]
    small = ["--skip-grant-tables", "--innodb-buffer-pool-size=32M", f"--pid-file={folder}/database.pid"]
    start(["mariadbd", *options, *serving, *small], folder / "database.out")
    _await(lambda: _answers(ports[1]))
    config = folder / "slurmdbd.conf"
    host = socket.gethostname().split(".")[0]
    config.write_text(_CONFIG.format(folder=folder, host=host, port=ports[0], database_port=ports[1]), encoding="utf-8")
    config.chmod(0o600)
    env = {**os.environ, "SLURM_CONF": str(folder / "slurm.conf")}
    start(["slurmdbd", "-D"], folder / "slurmdbd.out")
    _await(lambda: _answers(ports[0]))
    adding = ["sacctmgr", "--immediate", "add", "cluster", "tests"]
    _await(lambda: subprocess.run(adding, env=env, capture_output=True, check=False).returncode == 0)


def _answers(port: int) -> bool:
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) == 0


def _await(is_so: Callable[[], bool]) -> None:
    deadline_s = time.monotonic() + _TIMEOUT_S
    while not is_so():
        assert time.monotonic() < deadline_s, "Slurm's accounting does not come up"
        time.sleep(0.1)


def _program(name: str) -> str | None:
    return shutil.which(name, path=f"{os.environ.get('PATH', '')}:/usr/sbin:/sbin")
