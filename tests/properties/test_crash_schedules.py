"""Whatever dies in whatever order: a run at quorum 1.0 ends with the bits of a run in which nothing died."""

from __future__ import annotations

import time
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from spes_core.config import OuterConfig, RunConfig, WireConfig
from spes_core.sync.parameter_server import ParameterServer
from tests.round_node import Node, nodes_of, whole_run
from tests.small_rounds import make_server, running, small_config

ROUNDS = 2
EVENTS = st.one_of(
    st.tuples(st.just("server dies"), st.just(0)),
    st.tuples(st.just("node dies"), st.integers(0, 1)),
    st.tuples(st.just("upload breaks off"), st.integers(0, 1)),
    st.tuples(st.just("upload"), st.integers(0, 1)),
)


def configuration(dtype: Any, kind: Any) -> RunConfig:
    return small_config(wire=WireConfig(dtype=dtype), outer=OuterConfig(kind=kind))


class Run:
    """A server on one folder, and two nodes that begin at round 0 again whenever they die."""

    def __init__(self, config: RunConfig, folder: Path) -> None:
        self.config, self.folder = config, folder
        self.at = [0, 0]

    def apply(self, server: ParameterServer, nodes: list[Node], event: str, node: int) -> None:
        it, round = nodes[node], self.at[node]
        if event == "node dies":
            nodes[node], self.at[node] = Node(server, node, self.config), 0
        elif round < ROUNDS and event == "upload breaks off":
            it.train(round)
            upload = server.begin_upload(it.manifest(round))
            if not upload.ready.is_complete:
                it.send(upload, 2 + 3 * node, 64)
            upload.close()
        elif round < ROUNDS and event == "upload":
            it.upload(round)

    def advance(self, server: ParameterServer, nodes: list[Node]) -> None:
        """Let every node adopt the results that it can have by now."""
        for node, it in enumerate(nodes):
            while self.at[node] < ROUNDS and server.rounds_closed > self.at[node]:
                it.upload(self.at[node])
                it.download(self.at[node])
                self.at[node] += 1

    def play(self, events: list[tuple[str, int]]) -> bytes:
        events = [*events, *[("upload", 0), ("upload", 1)] * ROUNDS]
        while True:
            # With checkpoints due, though none is taken here, results stay for nodes that begin again.
            server = make_server(self.config, folder=self.folder, checkpoint_steps=(2,))
            with running(server):
                nodes, self.at = nodes_of(server, self.config), [0, 0]
                self.advance(server, nodes)
                while events:
                    event, node = events.pop(0)
                    if event == "server dies":
                        break
                    self.apply(server, nodes, event, node)
                    self._settle(server)
                    self.advance(server, nodes)
                else:
                    assert self.at == [ROUNDS, ROUNDS]
                    return server.state.values.tobytes()

    def _settle(self, server: ParameterServer) -> None:
        """Wait until a round whose uploads are whole is closed."""
        status = server.status()
        if all(node["state"] == "waiting" for node in status["nodes"]):
            for _ in range(2000):
                if server.rounds_closed > status["round"]:
                    return
                time.sleep(0.002)
            raise AssertionError("a round with all uploads does not close")


@settings(max_examples=25, deadline=None)
@given(
    events=st.lists(EVENTS, max_size=9),
    dtype=st.sampled_from(("float32", "bfloat16", "int8", "int4")),
    kind=st.sampled_from(("none", "nesterov")),
)
def test_any_schedule_of_deaths_and_broken_uploads_changes_no_bit(
    events: list[tuple[str, int]], dtype: str, kind: str
) -> None:
    config = configuration(dtype, kind)
    with TemporaryDirectory() as folder:
        assert Run(config, Path(folder)).play(events) == whole_run(config)
