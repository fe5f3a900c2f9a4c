"""Addresses and ports of hosts: a free port, one that answers for a while, a call for the answer; and interfaces."""

from __future__ import annotations

import ipaddress
import re
import socket
import threading
import time
from collections.abc import Sequence

import psutil

_ATTEMPTS = 50
_NAME = re.compile(r"[A-Za-z0-9_](?:[A-Za-z0-9_.-]{0,252})")
_LOOK_S = 0.05


def bare(host: str) -> str:
    """A host's name or address without the brackets in which an IPv6 address may be written."""
    return host[1:-1] if host.startswith("[") and host.endswith("]") else host


def is_host(text: str) -> bool:
    """Whether this can be the name or IP address (bare) of a host: no port, no URL, no zone of a link."""
    try:
        return "%" not in str(ipaddress.ip_address(text))
    except ValueError:
        return _NAME.fullmatch(text) is not None


def is_unspecified(text: str) -> bool:
    """Whether this is 0.0.0.0 or ::, at which a server listens everywhere and nobody calls it."""
    try:
        return ipaddress.ip_address(text).is_unspecified
    except ValueError:
        return False


def host_and_port(host: str, port: int) -> str:
    """ "host:port", with brackets where the host is an IPv6 address."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def free_port(address: str, count: int = 1) -> int:
    """A port at ``address`` from which on ``count`` ports are free. Raises OSError."""
    for _ in range(_ATTEMPTS):
        with _listen(address, 0) as first:
            port = int(first.getsockname()[1])
            if all(_is_free(address, port + more) for more in range(1, count)):
                return port
    raise OSError(f"no {count} consecutive ports of {address} are free")


def _is_free(address: str, port: int) -> bool:
    if port > 65535:
        return False
    try:
        with _listen(address, port):
            return True
    except OSError:
        return False


def _listen(address: str, port: int) -> socket.socket:
    family, _, _, _, where = socket.getaddrinfo(address, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)[0]
    return socket.create_server(where[:2], family=family)


class Answering:
    """From now on sends back, for some seconds or until `close`, what callers send who know the nonce."""

    def __init__(self, address: str, port: int, nonce: str, seconds: float) -> None:
        """Raises OSError where the port cannot be had."""
        self._server, self._nonce = _listen(address, port), nonce.encode()
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
        raise OSError(f"{host_and_port(address, port)} cannot be called: {error.strerror or error}") from error
    if answer != nonce.encode()[::-1]:
        raise OSError(f"at {host_and_port(address, port)} something else answers")


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
    raise OSError(f"no network interface of it has {' or '.join(dict.fromkeys(addresses))}")
