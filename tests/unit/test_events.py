"""Events: whole lines only, non-finite numbers kept, a killed writer repaired."""

from __future__ import annotations

import math
from pathlib import Path

import pytest

from spes_core.errors import ConfigError
from spes_core.events import EventWriter, as_float, read_events


def test_events_come_back_in_order_with_kind_and_time(tmp_path: Path) -> None:
    path = tmp_path / "new folder" / "node-0.jsonl"
    writer = EventWriter(path)
    writer.write("train", step=1, loss_nats=2.5)
    writer.write("train", step=2, loss_nats=2.25)
    events = list(read_events(path))
    assert [(event["kind"], event["step"], event["loss_nats"]) for event in events] == [
        ("train", 1, 2.5),
        ("train", 2, 2.25),
    ]
    assert events[0]["time_s"] <= events[1]["time_s"]


def test_non_finite_numbers_survive(tmp_path: Path) -> None:
    path = tmp_path / "e.jsonl"
    EventWriter(path).write("train", loss_nats=math.nan, parts=[math.inf, -math.inf, 1.0])
    (event,) = read_events(path)
    assert math.isnan(as_float(event["loss_nats"]))
    assert [as_float(part) for part in event["parts"]] == [math.inf, -math.inf, 1.0]


def test_a_torn_last_line_is_not_read_and_the_next_writer_cuts_it_off(tmp_path: Path) -> None:
    path = tmp_path / "e.jsonl"
    EventWriter(path).write("start")
    with path.open("a") as file:
        file.write('{"kind": "tra')
    assert [event["kind"] for event in read_events(path)] == ["start"]
    EventWriter(path).write("end")
    assert [event["kind"] for event in read_events(path)] == ["start", "end"]


def test_a_missing_file_has_no_events(tmp_path: Path) -> None:
    assert list(read_events(tmp_path / "none.jsonl")) == []


def test_two_processes_cannot_write_one_file_and_the_second_one_changes_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("spes_core.events._LOCK_WAIT_S", 0.1)
    path = tmp_path / "e.jsonl"
    first = EventWriter(path)
    first.write("start")
    with pytest.raises(ConfigError, match=r"e\.jsonl is being written by another process"):
        EventWriter(path, keep_bytes=0)
    first.write("end")
    first.close()
    assert [event["kind"] for event in read_events(path)] == ["start", "end"]
    EventWriter(path, keep_bytes=0).close()
    assert list(read_events(path)) == []
