"""Nodes that are slow, late or lost below quorum 1.0: what they send, drop, skip, take over and hold afterwards."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from spes_core.config import RunConfig
from spes_core.events import read_events
from spes_core.node import build_decoder
from spes_core.sync.client import PayloadOf, UploadReport
from spes_core.sync.inprocess import LocalClient
from spes_core.sync.parameter_server import ParameterServer
from spes_core.train.loop import Training
from tests.equivalence.participants import CPU, RandomTokens, make_server, node_training, run_together, tiny
from tests.equivalence.test_codecs import exact_values


class Watched(RandomTokens):
    """Tells which steps' data are read, and calls ``before(step)`` first."""

    def __init__(self, config: RunConfig, before: Callable[[int], object] = lambda step: None) -> None:
        super().__init__(config)
        self.steps: list[int] = []
        self._before = before

    def train_batch(self, step: int, part: int, parts: int) -> tuple[Tensor, Tensor]:
        self.steps.append(step)
        self._before(step)
        return super().train_batch(step, part, parts)


class Recording(LocalClient):
    """Keeps what it uploads: by round, the tokens and the encoded embedding."""

    def __init__(self, server: ParameterServer) -> None:
        super().__init__(server)
        self.sent: dict[int, tuple[int, bytes]] = {}

    def upload(self, *, payload_of: PayloadOf, round: int, tokens: int, **others: Any) -> UploadReport:
        self.sent[round] = (tokens, bytes(payload_of(0)))
        return super().upload(payload_of=payload_of, round=round, tokens=tokens, **others)


def start(
    config: RunConfig, folder: Path, before: list[Callable[[int], object]]
) -> tuple[ParameterServer, list[Training], list[Watched], list[Recording]]:
    server, sources = make_server(config, folder / "rounds"), [Watched(config, call) for call in before]
    clients = [Recording(server) for _ in before]
    trainings = []
    for node, (source, client) in enumerate(zip(sources, clients, strict=True)):
        decoder = build_decoder(config, config.make_partition().experts_by_node[node], CPU)
        trainings.append(node_training(config, node, decoder, client, folder, source))
    return server, trainings, sources, clients


def events(folder: Path, node: int, kind: str) -> list[dict[str, Any]]:
    return [event for event in read_events(folder / f"node-{node}.jsonl") if event["kind"] == kind]


def state_of(training: Training) -> dict[str, Tensor]:
    assert training.exchange is not None
    return training.exchange.state()


def waiting(event: threading.Event) -> None:
    assert event.wait(30)


def test_a_slow_node_sends_what_it_has_and_counts_by_its_tokens(tmp_path: Path) -> None:
    config = tiny(round={"quorum": 0.5, "local_time_s": 0.3, "timeout_s": 30}, merge={"enabled": False})
    slow: Callable[[int], object] = lambda step: time.sleep(0.16)  # noqa: E731
    server, trainings, sources, clients = start(config, tmp_path, [lambda step: None, slow])
    values: list[np.ndarray] = []
    # What the first round made of it, seen when the fast node reads on.
    sources[0]._before = lambda step: values.append(server.state.tensor(0).copy()) if step == 6 else None
    run_together(server, [training.run for training in trainings])
    taken = [[step for step in source.steps if step <= 5] for source in sources]
    assert taken[1] in ([1], [1, 2]) and sources[1].steps[len(taken[1])] == 6, "steps that are not taken are skipped"
    share = config.tokens_per_step // 2
    (fast_tokens, fast), (slow_tokens, slowly) = clients[0].sent[0], clients[1].sent[0]
    assert [fast_tokens, slow_tokens] == [share * len(steps) for steps in taken]
    sent = [np.frombuffer(payload, np.float32).astype(np.float64) for payload in (fast, slowly)]
    expected = (fast_tokens * sent[0] + slow_tokens * sent[1]) / (fast_tokens + slow_tokens)
    np.testing.assert_allclose(values[0], expected, rtol=1e-6, atol=1e-8)
    rounds = events(tmp_path, 1, "round")
    assert [event["local_tokens"] for event in rounds] == [clients[1].sent[round][0] for round in range(3)]
    assert [event["step"] for event in rounds] == [5, 10, 12]
    (end,) = events(tmp_path, 1, "end")
    assert end["steps"] == len(sources[1].steps) and end["tokens"] == share * end["steps"]
    assert [event["step"] for event in events(tmp_path, 1, "train")] == [10, 12], "the curve keeps its steps"
    for training in trainings:
        assert exact_values(training).tobytes() == server.state.values.tobytes()


@pytest.mark.parametrize("codec", ["float32", "int8"])
def test_a_late_node_drops_its_round_and_goes_on_from_a_snapshot(codec: str, tmp_path: Path) -> None:
    config = tiny(round={"quorum": 0.5, "timeout_s": 1.2}, wire={"dtype": codec})
    closed, caught_up = threading.Event(), threading.Event()

    def first(step: int) -> None:
        if step == 6:
            closed.set()
            waiting(caught_up)

    def late(step: int) -> None:
        if step == 4:
            waiting(closed)
        if step == 6:
            assert not any(values.any() for name, values in state_of(trainings[1]).items() if "residual" in name)
            caught_up.set()

    server, trainings, sources, _ = start(config, tmp_path, [first, late])
    run_together(server, [training.run for training in trainings])
    (skipped,) = events(tmp_path, 1, "skipped")
    assert (skipped["rounds"], skipped["steps"], skipped["steps_dropped"], skipped["step"]) == ([0], 0, 5, 5)
    assert "round 0 is over without node 1" in skipped["reason"]
    assert [event["nodes_present"] for event in events(tmp_path, 0, "round")] == [[0], [0, 1], [0, 1]]
    assert sources[1].steps == list(range(1, 13))
    states = trainings[1].optimizer.state.values()
    assert {int(state["step"]) for state in states} == {12}, "moments live on"
    for training in trainings:
        assert exact_values(training).tobytes() == server.state.values.tobytes()


@pytest.mark.parametrize(("codec", "frozen"), [("int8", "float32"), ("int8", "bfloat16"), ("float32", "bfloat16")])
def test_experts_of_a_lost_node_are_trained_by_others_until_it_is_back(codec: str, frozen: str, tmp_path: Path) -> None:
    config = tiny(
        budget_tokens=20 * 8 * 16,
        round={"quorum": 0.5, "timeout_s": 1.2, "reassign_after": 1},
        wire={"dtype": codec},
        frozen={"dtype": frozen},
    )
    alone, is_back = threading.Event(), threading.Event()

    def first(step: int) -> None:
        if step == 6:
            # What it takes over it has exactly, also where it had only kept it rounded.
            for index, tensor in enumerate(trainings[0].decoder.tensors().values()):
                assert tensor.flatten().numpy().tobytes() == server.state.tensor(index).tobytes()
            alone.set()
            waiting(is_back)

    server, trainings, _, clients = start(config, tmp_path, [first, lambda step: is_back.set()])

    def come_later() -> None:
        waiting(alone)
        trainings[1].run()

    run_together(server, [trainings[0].run, come_later])
    taken, given = events(tmp_path, 0, "partition")
    assert (taken["step"], taken["experts"], taken["taken"], taken["given"]) == (5, [0, 1, 2, 3], [2, 3], [])
    assert (given["step"], given["experts"], given["taken"], given["given"]) == (10, [0, 1], [], [2, 3])
    without, back = events(tmp_path, 1, "partition")
    assert (without["experts"], back["experts"], back["step"]) == ([], [2, 3], 10)
    (skipped,) = events(tmp_path, 1, "skipped")
    assert (skipped["rounds"], skipped["steps"]) == ([0], 5)
    assert sorted(clients[0].sent) == [0, 1, 2, 3] and sorted(clients[1].sent) == [1, 2, 3]
    for training in trainings:
        assert exact_values(training).tobytes() == server.state.values.tobytes()
        for index, tensor in enumerate(training.decoder.tensors().values()):
            expected = torch.from_numpy(server.state.tensor(index)).to(tensor.dtype)
            assert torch.equal(tensor.flatten(), expected)
