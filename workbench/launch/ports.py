"""Ports for a preflight: a free one, one that answers for a while, a call that wants the answer; and interfaces."""

from __future__ import annotations

import ipaddress
import socket
import threading
import time
from collections.abc import Sequence

import psutil

_ATTEMPTS = 50
_LOOK_S = 0.05


def free_port(address: str, count: int = 1) -> int:
    """A port at ``address`` from which on ``count`` ports are free. Raises OSError."""
    for _ in range(_ATTEMPTS):
        with socket.create_server((address, 0)) as first:
            port = int(first.getsockname()[1])
            if all(_is_free(address, port + more) for more in range(1, count)):
                return port
    raise OSError(f"no {count} consecutive ports of {address} are free")


def _is_free(address: str, port: int) -> bool:
    if port > 65535:
        return False
    try:
        with socket.create_server((address, port)):
            return True
    except OSError:
        return False


class Answering:
    """From now on sends back, for some seconds or until `close`, what callers send who know the nonce."""

    def __init__(self, address: str, port: int, nonce: str, seconds: float) -> None:
        """Raises OSError where the port cannot be had."""
        self._server, self._nonce = socket.create_server((address, port)), nonce.encode()
        self._deadline_s = time.monotonic() + seconds
        self._thread = threading.Thread(target=self._answer, daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Return when the port is free again."""
        self._deadline_s = 0.0
        self._thread.join()

    def _answer(self) -> None:
        with self._server:
            self._server.settimeout(_LOOK_S)
            while time.monotonic() < self._deadline_s:
                try:
                    caller, _ = self._server.accept()
                    with caller:
                        caller.settimeout(5.0)
                        if caller.recv(len(self._nonce)) == self._nonce:
                            caller.sendall(self._nonce[::-1])
                except OSError:
                    continue


def call(address: str, port: int, nonce: str, seconds: float) -> None:
    """Raises OSError unless the agent that knows the nonce answers at the port within some seconds."""
    try:
        with socket.create_connection((address, port), timeout=seconds) as line:
            line.settimeout(seconds)
            line.sendall(nonce.encode())
            answer = line.recv(len(nonce))
    except OSError as error:
        raise OSError(f"{address}:{port} cannot be called: {error.strerror or error}") from error
    if answer != nonce.encode()[::-1]:
        raise OSError(f"at {address}:{port} something else answers")


def interface_of(addresses: Sequence[str]) -> tuple[str, str]:
    """(name, address) of the interface of this host that has one of ``addresses``, the first that can be had.

    A host's own name may stand for its loopback, by which nobody else reaches it: then another address counts, unless
    the loopback was asked for by its number. Raises OSError.
    """
    here = {row.address: name for name, rows in psutil.net_if_addrs().items() for row in rows}
    for address in addresses:
        try:
            meant = [str(info[4][0]) for info in socket.getaddrinfo(address, None, type=socket.SOCK_STREAM)]
        except OSError:
            continue
        for one in meant:
            if one in here and (one == address or not ipaddress.ip_address(one).is_loopback):
                return here[one], one
    raise OSError(f"no network interface of it has {' or '.join(addresses)}")
