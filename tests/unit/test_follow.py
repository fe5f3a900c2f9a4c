"""Following growing event files."""

from pathlib import Path

from spes_core.events import EventWriter
from workbench.follow import EventTail, TrialState


def test_every_event_is_seen_once_and_a_torn_line_when_it_is_whole(tmp_path: Path) -> None:
    tail = EventTail(tmp_path)
    assert tail.poll() == []
    writer = EventWriter(tmp_path / "node-0.jsonl")
    writer.write("train", step=1)
    assert [(process, event["step"]) for process, event in tail.poll()] == [("node-0", 1)]
    with (tmp_path / "node-1.jsonl").open("a") as file:
        file.write('{"kind": "train", "st')
        file.flush()
        assert tail.poll() == []
        file.write('ep": 7}\n{"kind"')
        file.flush()
        assert tail.poll() == [("node-1", {"kind": "train", "step": 7})]
    assert tail.poll() == []


def test_progress_is_the_step_of_the_slowest_node_and_the_rate_of_all() -> None:
    state = TrialState("t", total_steps=10)
    assert state.progress(0.5).step == 0 and state.progress(0.5).loss_nats is None
    state.update(
        [
            ("node-0", {"kind": "train", "step": 4, "loss_nats": 2.0, "tokens_per_s": 10.0}),
            ("node-1", {"kind": "train", "step": 2, "loss_nats": 4.0, "tokens_per_s": 30.0}),
            ("server", {"kind": "round", "round": 0}),
        ]
    )
    progress = state.progress(2.0)
    assert (progress.step, progress.loss_nats, progress.tokens_per_s, progress.round) == (2, 3.0, 40.0, 1)
    assert progress.remaining_s == 8.0
