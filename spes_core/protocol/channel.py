"""Connections: the gRPC settings that client and server share, encryption, and where an open port is allowed."""

from __future__ import annotations

import ipaddress
import threading
from collections.abc import Callable
from typing import Any

import grpc

from spes_core.errors import ConfigError, Problem, Unreachable
from spes_core.protocol.credentials import Credentials
from spes_core.protocol.frames import MAX_FRAME_BYTES
from spes_core.protocol.servicer import SERVICE

_IDENTITY_ONLY = 1
"""Bit set of the compression algorithms that are allowed: none. A few bytes could else become gigabytes."""

OPTIONS: tuple[tuple[str, int], ...] = (
    ("grpc.max_send_message_length", MAX_FRAME_BYTES),
    ("grpc.max_receive_message_length", MAX_FRAME_BYTES),
    ("grpc.max_concurrent_streams", 64),
    ("grpc.max_metadata_size", 16 << 10),
    ("grpc.compression_enabled_algorithms_bitset", _IDENTITY_ONLY),
    # A window that grows with the link lets every stream buffer megabytes; one chunk on its way is enough.
    ("grpc.http2.bdp_probe", 0),
    ("grpc.http2.lookahead_bytes", 256 << 10),
    # Pings notice a dead peer in half a minute.
    ("grpc.keepalive_time_ms", 20_000),
    ("grpc.keepalive_timeout_ms", 10_000),
    ("grpc.keepalive_permit_without_calls", 1),
    ("grpc.http2.max_pings_without_data", 0),
    ("grpc.http2.min_ping_interval_without_data_ms", 10_000),
    ("grpc.http2.min_recv_ping_interval_without_data_ms", 10_000),
    # A server that was started again is found soon; the pauses between attempts are the client's.
    ("grpc.initial_reconnect_backoff_ms", 100),
    ("grpc.min_reconnect_backoff_ms", 1_000),
    ("grpc.max_reconnect_backoff_ms", 1_000),
    # Without this a second server on the same port would silently share it with the first.
    ("grpc.so_reuseport", 0),
)


class NoServerError(Unreachable):
    """No server says where it listens at present."""


class Line:
    """The channel to the server, made anew when the server listens elsewhere, and the methods on it."""

    def __init__(self, address: str | Callable[[], str], credentials: Credentials, allow_plaintext: bool) -> None:
        self._address = address
        self._credentials, self._allow_plaintext = credentials, allow_plaintext
        self._lock = threading.Lock()
        self._channel: Any = None
        self._is_closed = False
        self.address = address if isinstance(address, str) else "an address not yet known"

    def connected(self) -> Line:
        """This line, with its methods. Raises NoServerError; ConfigError where it would need encryption."""
        try:
            address = self._address if isinstance(self._address, str) else self._address()
        except Unreachable as error:
            raise NoServerError(str(error)) from error
        with self._lock:
            if self._is_closed:
                raise NoServerError("the connection was closed")
            if self._channel is None or address != self.address:
                if self._channel is not None:
                    self._channel.close()
                self._channel, self.address = open_channel(address, self._credentials, self._allow_plaintext), address
                # No serialisers: every message is bytes as it is.
                self.join = _call(self._channel.unary_unary(f"/{SERVICE}/Join", None, None))
                self.heartbeat = _call(self._channel.unary_unary(f"/{SERVICE}/Heartbeat", None, None))
                self.status = _call(self._channel.unary_unary(f"/{SERVICE}/Status", None, None))
                self.upload = _call(self._channel.stream_stream(f"/{SERVICE}/Upload", None, None))
                self.download = _call(self._channel.stream_stream(f"/{SERVICE}/Download", None, None))
        return self

    def close(self) -> None:
        """Close the channel for good; requests in progress are cancelled."""
        with self._lock:
            self._is_closed = True
            if self._channel is not None:
                self._channel.close()
                self._channel = None


def _call(method: Callable[..., Any]) -> Callable[..., Any]:
    """A method whose channel another thread may close: because the server listens elsewhere now, or the node ends."""

    def call(*arguments: Any, **options: Any) -> Any:
        try:
            return method(*arguments, **options)
        except ValueError as error:
            raise NoServerError(f"the connection was closed ({error})") from error

    return call


def open_channel(address: str, credentials: Credentials, allow_plaintext: bool = False) -> grpc.Channel:
    """A channel to a server, encrypted where there are certificates; raises ConfigError where there should be."""
    if credentials.is_encrypted:
        secure = grpc.ssl_channel_credentials(credentials.ca, credentials.key, credentials.certificate)
        return grpc.secure_channel(address, secure, options=OPTIONS)
    require_private("server_address", address, allow_plaintext)
    return grpc.insecure_channel(address, options=OPTIONS)


def bind(server: grpc.Server, address: str, credentials: Credentials, allow_plaintext: bool = False) -> int:
    """Make a server listen on "host:port" (0: any free port); the port. Raises ConfigError when it cannot."""
    try:
        if credentials.is_encrypted:
            assert credentials.key is not None and credentials.certificate is not None
            pair = [(credentials.key, credentials.certificate)]
            port = server.add_secure_port(address, grpc.ssl_server_credentials(pair, credentials.ca, True))
        else:
            require_private("server_address", address, allow_plaintext)
            port = server.add_insecure_port(address)
        reason = "no port was given"
    except RuntimeError as error:
        port, reason = 0, str(error)
    if port == 0:
        advice = "is the port in use? Choose another, or 0 for any free one"
        raise ConfigError([Problem("server_address", f'("{address}") cannot be listened on; {advice} ({reason})')])
    return int(port)


def require_private(path: str, address: str, allow_plaintext: bool) -> None:
    """Raises ConfigError when what goes to ``address`` without encryption could be read or changed on its way."""
    if allow_plaintext or is_loopback(address.rpartition(":")[0]):
        return
    message = (
        f'("{address}") leaves this machine, and the run has no certificates: whoever is on the way could read and'
        " change everything; make some with `python -m spes_core.server credentials DIR` and name the folder as"
        " `credentials` in run.json, or say --allow-plaintext to server and nodes on a network that you trust"
    )
    raise ConfigError([Problem(path, message)])


def is_loopback(host: str) -> bool:
    """Whether a host name or IP address means this machine itself."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return False
