"""Signs of life come while a node works, whatever happens to some of them, and end with it."""

from __future__ import annotations

import threading
import time

from spes_core.errors import Refused
from spes_core.train.heartbeats import Heartbeats


def test_each_sign_tells_the_present_step_and_a_failed_one_is_not_the_last() -> None:
    told: list[int] = []
    three, steps = threading.Event(), iter(range(10, 10_000))

    def beat(step: int) -> None:
        told.append(step)
        if len(told) == 3:
            three.set()
        raise Refused("the server was started again")

    with Heartbeats(beat, 0.01, lambda: next(steps)):
        assert three.wait(10)
    assert told[:3] == [10, 11, 12]
    time.sleep(0.05)
    count = len(told)
    time.sleep(0.1)
    assert len(told) == count
