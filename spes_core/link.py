"""How long bytes take over a node's link: arithmetic for predictions and for the emulation of links."""

from __future__ import annotations

import math
from typing import Literal

from spes_core.config import LinkConfig

Direction = Literal["up", "down"]

SEGMENT_BYTES = 1448
"""Payload of a TCP segment: 1500 bytes of an Ethernet frame, less 20 for IP and 32 for TCP with timestamps."""
_HEADER_BYTES = 20 + 32 + 14
GOODPUT = SEGMENT_BYTES / (SEGMENT_BYTES + _HEADER_BYTES)
"""Share of a link's bandwidth that is left for payload."""


def transfer_s(link: LinkConfig, num_bytes: float, direction: Direction) -> float:
    """Seconds from a request to the last byte of a transfer: one round trip, and the bytes at the effective rate.

    The slow start of a fresh connection is not in it, some round trips more.
    """
    return link.rtt_ms / 1e3 + num_bytes / rate_bytes_per_s(link, direction)


def round_s(link: LinkConfig, uplink_bytes: float, downlink_bytes: float) -> float:
    """Seconds that a round needs for its bytes alone, when the result is received while the rest is still being sent.

    The larger direction, and three round trips: the upload is agreed on, confirmed, and the download asked for.
    """
    sending_s, receiving_s = transfer_s(link, uplink_bytes, "up"), transfer_s(link, downlink_bytes, "down")
    return max(sending_s, receiving_s) + 2 * link.rtt_ms / 1e3


def rate_bytes_per_s(link: LinkConfig, direction: Direction) -> float:
    """Payload bytes a second: what the bandwidth leaves after headers, or what TCP reaches at this loss, if less."""
    mbps = link.uplink_mbps if direction == "up" else link.downlink_mbps
    bandwidth = math.inf if mbps is None else mbps * 1e6 / 8 * GOODPUT
    return min(bandwidth, loss_limited_bytes_per_s(link.rtt_ms / 1e3, link.loss))


def loss_limited_bytes_per_s(rtt_s: float, loss: float) -> float:
    """The rate of one TCP connection that loses packets at random: (MSS / RTT) · sqrt(3/2) / sqrt(p).

    Mathis, Semke, Mahdavi, Ott: The macroscopic behavior of the TCP congestion avoidance algorithm, ACM SIGCOMM
    Computer Communication Review 27(3), 1997, for a receiver that acknowledges every packet. It holds for small p (to
    about 0.02: no timeouts) and loss-based congestion control; without loss or round-trip time it sets no limit.
    """
    if loss == 0 or rtt_s == 0:
        return math.inf
    return SEGMENT_BYTES / rtt_s * math.sqrt(3 / 2) / math.sqrt(loss)
