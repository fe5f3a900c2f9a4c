"""Where the server of a run listens: given in the run file, or chosen by the server and left in a file beside it."""

from __future__ import annotations

import os
import time
from pathlib import Path

from spes_core.errors import Unreachable


def address_file(server: str = "server") -> str:
    """Name of the file beside run.json in which the process ``server`` leaves where it listens."""
    return f"{server}.address"


def address_of(server_address: str, shard: int) -> str:
    """Where a further server listens that shares the run's tensors on the first one's host: at the next port."""
    host, _, port = server_address.rpartition(":")
    return server_address if port == "0" or not port.isdecimal() else f"{host}:{int(port) + shard}"


def read_address(server_address: str, folder: Path, timeout_s: float = 60.0, server: str = "server") -> str:
    """Where a server of the run in ``folder`` listens; with port 0 the server's own choice, once it has written it.

    An address that a killed server has left is told by its process id. Raises Unreachable when no server has written
    one within ``timeout_s``.
    """
    if not server_address.endswith(":0"):
        return server_address
    path, deadline_s = folder / address_file(server), time.monotonic() + timeout_s
    while (address := _living(path)) is None:
        if time.monotonic() > deadline_s:
            raise Unreachable(f"no server has written {path} within {timeout_s:g} s; see the server's log")
        time.sleep(0.02)
    return address


def _living(path: Path) -> str | None:
    """The address in a server's file, if that server is running on this machine."""
    try:
        address, pid = path.read_text(encoding="utf-8").split()
        os.kill(int(pid), 0)
    except (FileNotFoundError, ValueError, ProcessLookupError):
        return None
    except PermissionError:
        return address  # it runs, as another user
    return address


def is_host_and_port(address: str) -> bool:
    """Whether an address is host:port with a port that exists (0: any free one)."""
    host, _, port = address.rpartition(":")
    return bool(host) and port.isdecimal() and int(port) <= 65535
