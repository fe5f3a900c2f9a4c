"""Ports for a preflight: a free one, one that answers for a while, and a call that wants the answer."""

from __future__ import annotations

import socket
import threading
import time

_ATTEMPTS = 50


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


def answer_calls(address: str, port: int, nonce: str, seconds: float) -> None:
    """From now on send back, for some seconds, what callers send who know the nonce. Raises OSError."""
    server = socket.create_server((address, port))
    threading.Thread(target=_answer, args=(server, nonce.encode(), time.monotonic() + seconds), daemon=True).start()


def _answer(server: socket.socket, nonce: bytes, deadline_s: float) -> None:
    with server:
        while (left_s := deadline_s - time.monotonic()) > 0:
            server.settimeout(left_s)
            try:
                caller, _ = server.accept()
                with caller:
                    caller.settimeout(5.0)
                    if caller.recv(len(nonce)) == nonce:
                        caller.sendall(nonce[::-1])
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
