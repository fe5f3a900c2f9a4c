"""A TCP proxy that loses connections on demand: after so many bytes in one direction, or at once."""

from __future__ import annotations

import contextlib
import socket
import threading
from collections.abc import Iterator


class CutProxy:
    """Forwards connections to ``target`` ("host:port")."""

    def __init__(self, target: str) -> None:
        host, _, port = target.rpartition(":")
        self.target = (host, int(port))
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.address = f"127.0.0.1:{self._listener.getsockname()[1]}"
        self._sockets: set[socket.socket] = set()
        self._lock = threading.Lock()
        self._left: dict[str, list[int]] = {"up": [], "down": []}
        self.cuts = 0
        self.bytes = {"up": 0, "down": 0}
        threading.Thread(target=self._accept, daemon=True).start()

    def cut_after(self, direction: str, *nbytes: int) -> None:
        """Cut a connection once so many more bytes have gone "up" or "down"; then after the next number."""
        with self._lock:
            self._left[direction] = list(nbytes)

    def cut(self) -> None:
        """Cut all connections now."""
        with self._lock:
            sockets, self._sockets = self._sockets, set()
        for one in sockets:
            with contextlib.suppress(OSError):
                one.shutdown(socket.SHUT_RDWR)
            one.close()

    def close(self) -> None:
        self._listener.close()
        self.cut()

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                near, _ = self._listener.accept()
                try:
                    far = socket.create_connection(self.target)
                except OSError:
                    near.close()
                    continue
                with self._lock:
                    self._sockets |= {near, far}
                for ends in ((near, far, "up"), (far, near, "down")):
                    threading.Thread(target=self._forward, args=ends, daemon=True).start()

    def _forward(self, source: socket.socket, sink: socket.socket, direction: str) -> None:
        with contextlib.suppress(OSError):
            while data := source.recv(16384):
                with self._lock:
                    left = self._left[direction]
                    is_cut = bool(left) and left[0] <= len(data)
                    if is_cut:
                        data = data[: left.pop(0)]
                        self.cuts += 1
                    elif left:
                        left[0] -= len(data)
                    self.bytes[direction] += len(data)
                sink.sendall(data)
                if is_cut:
                    self.cut()
                    return
        for end in (source, sink):
            with contextlib.suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)
            end.close()


@contextlib.contextmanager
def cut_proxy(target: str) -> Iterator[CutProxy]:
    proxy = CutProxy(target)
    try:
        yield proxy
    finally:
        proxy.close()
