"""How long a node goes on trying to reach its server."""

from __future__ import annotations

import threading

import pytest

from spes_core.errors import Unreachable
from spes_core.protocol.retrying import Patience


def test_pauses_double_and_hold_no_chance(monkeypatch: pytest.MonkeyPatch) -> None:
    now_s, pauses = [0.0], []

    class Stop(threading.Event):
        def wait(self, timeout: float | None = None) -> bool:
            assert timeout is not None
            pauses.append(round(timeout, 3))
            now_s[0] += timeout
            return False

    monkeypatch.setattr("spes_core.protocol.retrying.time.monotonic", lambda: now_s[0])
    patience = Patience(20.0)
    with pytest.raises(Unreachable, match=r"after trying for 20\.0 s \(no route\)"):
        while True:
            patience.pause("here:1", "no route", Stop())
    assert pauses == [0.1, 0.2, 0.4, 0.8, 1.6, 3.2, 5.0, 5.0, 3.7]
    patience.progress()
    patience.pause("here:1", "no route", Stop())
    assert pauses[-1] == 0.1
