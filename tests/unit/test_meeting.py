"""Where ranks of several hosts meet: at one address, told apart by the attempt, or a line that says why not."""

from __future__ import annotations

import socket

import psutil
import pytest

from spes_core.errors import Unreachable
from spes_core.runfile import Meeting
from spes_core.train.parallel import _meet_at


def free_port(host: str) -> int:
    with socket.create_server((host, 0), family=socket.AF_INET6 if ":" in host else socket.AF_INET) as probe:
        return int(probe.getsockname()[1])


@pytest.mark.parametrize("host", ["127.0.0.1", "::1"])
def test_ranks_meet_at_the_named_address_alone_and_only_those_of_their_attempt(host: str) -> None:
    try:
        port = free_port(host)
    except OSError:
        pytest.skip(f"this machine has no {host}")
    shown = f"[{host}]" if ":" in host else host
    meeting = Meeting(address=f"{shown}:{port}", key="now")
    first = _meet_at(meeting, 0)
    other, earlier = _meet_at(meeting, 1), _meet_at(Meeting(address=meeting.address, key="before"), 1)
    earlier.set("who", "a rank of an earlier attempt")
    other.set("who", "rank 1")
    assert first.get("who") == b"rank 1"
    assert not earlier.check(["something else"])
    lines = [line.laddr for line in psutil.Process().net_connections() if line.status == "LISTEN"]
    assert [line.ip for line in lines if line.port == port] == [host]


def test_a_meeting_that_cannot_be_says_who_and_where() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        address = f"127.0.0.1:{taken.getsockname()[1]}"
        with pytest.raises(Unreachable, match=f"rank 0 cannot listen at {address}, where the ranks of the group meet"):
            _meet_at(Meeting(address=address, key="k"), 0)
