"""gRPC settings that client and server share: message limit, and pings that notice a dead peer in half a minute."""

from __future__ import annotations

from spes_core.protocol.frames import MAX_FRAME_BYTES

OPTIONS: tuple[tuple[str, int], ...] = (
    ("grpc.max_send_message_length", MAX_FRAME_BYTES),
    ("grpc.max_receive_message_length", MAX_FRAME_BYTES),
    ("grpc.keepalive_time_ms", 20_000),
    ("grpc.keepalive_timeout_ms", 10_000),
    ("grpc.keepalive_permit_without_calls", 1),
    ("grpc.http2.max_pings_without_data", 0),
    ("grpc.http2.min_ping_interval_without_data_ms", 10_000),
    ("grpc.http2.min_recv_ping_interval_without_data_ms", 10_000),
    # Without this a second server on the same port would silently share it with the first.
    ("grpc.so_reuseport", 0),
)
