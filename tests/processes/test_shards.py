"""Several servers as real processes: the files of one server's run, also where one of them is killed in the middle."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from spes_core.config import RunConfig, ServerConfig
from spes_core.data.tokenize import prepare
from spes_core.events import read_events
from spes_core.protocol import credentials
from spes_core.runfile import RunFile
from tests.equivalence.participants import tiny
from tests.processes.runs import Started, outputs, run_all, save_run, start_all, with_corpus, write_corpus
from workbench.processes import plan
from workbench.recording import Recording

pytestmark = pytest.mark.processes

STEPS = 60
FINAL = Path("weights") / "final.safetensors"


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> tuple[RunConfig, Path, bytes]:
    """A run of one server, its tokens, and the weights that it ends with."""
    folder = tmp_path_factory.mktemp("one server")
    (folder / "corpus").mkdir()
    config = with_corpus(
        tiny(
            budget_tokens=STEPS * 8 * 16,
            merge={"alpha": 0.3, "until_step": STEPS},
            checkpoint={"interval_rounds": 3},
            log={"interval_steps": 1},
        ),
        write_corpus(folder / "corpus"),
    )
    data_dir = prepare(config.data, folder / "cache")
    save_run(config, data_dir, folder / "run")
    run_all(folder / "run")
    return config, data_dir, (folder / "run" / FINAL).read_bytes()


def two_servers(config: RunConfig) -> RunConfig:
    return replace(config, server=ServerConfig(shards=2))


def wait_for(condition: Callable[[], Any], what: str) -> None:
    deadline_s = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < deadline_s, f"waited in vain for {what}"
        time.sleep(0.01)


def test_two_servers_leave_the_very_file_of_one(made: tuple[RunConfig, Path, bytes], tmp_path: Path) -> None:
    config, data_dir, expected = made
    folder = tmp_path / "two sérvers"
    folder.mkdir()
    credentials.make(folder / "keys", config.nodes, ["localhost", "127.0.0.1"])
    run = RunFile(trial="spes", config=two_servers(config), data_dir=str(data_dir), device="cpu")
    replace(run, credentials=str(folder / "keys")).save(folder / "run.json")
    run_all(folder)
    assert (folder / FINAL).read_bytes() == expected
    assert [path.name for path in (folder / "weights").iterdir()] == [FINAL.name]
    recording = Recording(folder / "events")
    rounds = recording.server_rounds()
    assert [event["round"] for event in rounds] == list(range(STEPS // 5))
    for node in range(config.nodes):
        own = recording.rounds_of_node(node)
        assert [event["digest"] for event in own] == [event["digest"] for event in rounds]
        for field in ("uplink_payload_bytes", "downlink_payload_bytes", "uplink_framing_bytes"):
            assert [event[field] for event in own] == [event[field][str(node)] for event in rounds]


def test_a_server_that_is_killed_comes_back_alone_and_changes_no_bit(
    made: tuple[RunConfig, Path, bytes], tmp_path: Path
) -> None:
    config, data_dir, expected = made
    save_run(two_servers(config), data_dir, tmp_path)
    processes = start_all(tmp_path)
    events = {name: tmp_path / "events" / f"{name}.jsonl" for name in ("server-0-of-2", "server-1-of-2")}
    for name, after in (("server-1-of-2", 3), ("server-0-of-2", 7)):
        wait_for(
            lambda name=name, after=after: [e for e in read_events(events[name]) if e.get("round") == after],
            f"round {after} of {name}",
        )
        processes[name].kill()
        processes[name].wait(20)
        (spec,) = [spec for spec in plan(RunFile.load(tmp_path / "run.json"), tmp_path) if spec.name == name]
        processes[name] = Started(spec, tmp_path / f"{name}.log")
    found = outputs(processes, 120)
    assert all(status == 0 for status, _ in found.values()), found
    assert (tmp_path / FINAL).read_bytes() == expected
    for name in events:
        assert [event for event in read_events(events[name]) if event["kind"] == "resume"], "it was killed too early"


def test_a_shard_that_there_is_not_and_invitations_are_refused(
    made: tuple[RunConfig, Path, bytes], tmp_path: Path
) -> None:
    config, data_dir, _ = made
    save_run(two_servers(config), data_dir, tmp_path)
    (spec, *_) = plan(RunFile.load(tmp_path / "run.json"), tmp_path, sys.executable)
    started = {
        name: Started(replace(spec, name=name, argv=(*spec.argv, *options)), tmp_path / f"{name}.log")
        for name, options in {"shard": ("--shard", "2"), "keys": ("--credentials", str(tmp_path / "keys"))}.items()
    }
    found = outputs(started)
    assert found["shard"] == (2, "error: --shard (2) must be from 0 to server.shards - 1 (1)\n")
    assert found["keys"][0] == 2
    assert "server.shards (2) must be 1 with --credentials" in found["keys"][1]
    assert not (tmp_path / "keys").exists()
