"""A link's arithmetic, and a pace that keeps to it on a clock of its own."""

from __future__ import annotations

import math

import pytest

from spes_core.config import LinkConfig
from spes_core.link import GOODPUT, loss_limited_bytes_per_s, rate_bytes_per_s, round_s, transfer_s
from spes_core.protocol.link import AHEAD_BYTES, Pace

LINK = LinkConfig(uplink_mbps=8, downlink_mbps=80, rtt_ms=40, emulate=True)
BYTES_PER_S = 1e6 * GOODPUT
"""Of the uplink; ten times as much comes down."""


class Clock:
    """Time that passes only while someone sleeps or works."""

    def __init__(self) -> None:
        self.now_s = 1000.0
        self.slept_s = 0.0

    def __call__(self) -> float:
        return self.now_s

    def sleep(self, seconds: float) -> None:
        self.now_s += seconds
        self.slept_s += seconds


def paced(link: LinkConfig = LINK) -> tuple[Pace, Clock]:
    clock = Clock()
    return Pace(link, clock, clock.sleep), clock


def test_a_transfer_takes_a_round_trip_and_its_bytes_at_the_bandwidth() -> None:
    assert transfer_s(LINK, 3e6, "up") == pytest.approx(0.04 + 3e6 * 8 / (8e6 * GOODPUT))
    assert transfer_s(LINK, 3e6, "down") == pytest.approx(0.04 + 3e6 * 8 / (80e6 * GOODPUT))
    assert transfer_s(LinkConfig(), 1e12, "up") == 0


def test_the_rate_under_loss_is_that_of_mathis_and_others() -> None:
    # The paper's own numbers are in segments: at 100 ms and p = 1 % a window of sqrt(150) segments, 12.25.
    assert loss_limited_bytes_per_s(0.1, 0.01) == pytest.approx(math.sqrt(150) * 1448 / 0.1)
    lossy = LinkConfig(uplink_mbps=8, downlink_mbps=80, rtt_ms=100, loss=0.01)
    assert rate_bytes_per_s(lossy, "down") == pytest.approx(177_343, rel=1e-4)
    assert rate_bytes_per_s(LinkConfig(uplink_mbps=1, rtt_ms=100, loss=0.01), "up") == pytest.approx(125_000 * GOODPUT)
    assert loss_limited_bytes_per_s(0, 0.01) == loss_limited_bytes_per_s(0.1, 0) == math.inf


def test_a_round_takes_its_larger_direction_and_three_round_trips() -> None:
    assert round_s(LINK, 1e6, 1e6) == pytest.approx(0.12 + 1e6 / BYTES_PER_S)
    assert round_s(LINK, 0, 1e8) == pytest.approx(0.12 + 10 * 1e6 / BYTES_PER_S)


@pytest.mark.parametrize("sizes", [[100], [1000] * 50, [400_000, 3, 2_000_000]])
def test_messages_are_handed_on_when_the_line_has_carried_them(sizes: list[int]) -> None:
    pace, clock = paced()
    began_s = clock()
    pace.turn()
    total = 0
    for message in pace.outgoing(bytes(size) for size in sizes):
        total += len(message)
        assert clock() - began_s == pytest.approx(transfer_s(LINK, total, "up"))


def test_both_directions_run_at_once() -> None:
    pace, clock = paced()
    pace.turn()
    began_s = clock()
    pace.sent(100_000)
    pace.received(500_000)
    assert clock() - began_s == pytest.approx(0.1 / GOODPUT)


def test_work_of_the_node_between_messages_is_hidden_behind_the_line() -> None:
    pace, clock = paced()
    pace.turn()
    began_s = clock()
    for _ in range(20):
        clock.now_s += 0.05  # encoding takes half as long as sending
        pace.sent(100_000)
    assert clock() - began_s == pytest.approx(0.05 + 2.0 / GOODPUT, rel=0.03)


def test_an_idle_line_saves_up_no_more_than_the_buffers_hold_and_nothing_before_a_turn() -> None:
    pace, clock = paced()
    pace.turn()
    clock.now_s += 60.0
    pace.sent(AHEAD_BYTES)
    assert clock.slept_s == pytest.approx(0.04)
    clock.now_s += 60.0
    pace.turn()
    pace.sent(AHEAD_BYTES)
    assert clock.slept_s == pytest.approx(0.08 + AHEAD_BYTES / BYTES_PER_S)


def test_a_message_that_had_to_be_waited_for_was_not_on_the_line_before() -> None:
    pace, clock = paced()
    pace.turn()

    def late() -> object:
        yield bytes(1_000_000)
        clock.now_s += 5.0  # the server has nothing to send for so long
        yield bytes(1_000_000)

    began_s = clock()
    assert len(list(pace.incoming(late()))) == 2  # type: ignore[arg-type]
    assert clock() - began_s == pytest.approx(5.0 + 2e6 / (10 * BYTES_PER_S))


def test_several_streams_share_a_direction() -> None:
    pace, clock = paced()
    pace.turn()
    began_s = clock()
    first, second = pace.outgoing([bytes(50_000)] * 4), pace.outgoing([bytes(50_000)] * 4)
    for _ in range(4):
        next(first)
        next(second)
    assert clock() - began_s == pytest.approx(0.4 / GOODPUT)


def test_nothing_waits_unless_emulation_is_asked_for() -> None:
    pace, clock = paced(LinkConfig(uplink_mbps=1, downlink_mbps=1, rtt_ms=500))
    pace.turn()
    pace.sent(10**9)
    pace.received(10**9)
    assert clock.slept_s == 0


def test_a_direction_without_a_limit_is_not_slowed() -> None:
    pace, clock = paced(LinkConfig(uplink_mbps=8, emulate=True))
    pace.turn()
    pace.received(10**9)
    assert clock.slept_s == 0
    pace.sent(1_000_000)
    assert clock.slept_s == pytest.approx(1 / GOODPUT)


def test_a_closed_pace_waits_no_more() -> None:
    pace = Pace(LinkConfig(uplink_mbps=0.001, rtt_ms=1e6, emulate=True))
    pace.close()
    pace.turn()
    pace.sent(10**9)
