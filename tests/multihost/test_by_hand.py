"""Server and nodes on hosts of their own, over TLS and slow links, one of which is cut: the bits of one process."""

from __future__ import annotations

import shutil
import sys
import time
from pathlib import Path

import pytest

from spes_core.config import RunConfig
from spes_core.data.batches import TokenSource
from spes_core.data.tokenize import prepare
from spes_core.events import read_events
from spes_core.protocol import credentials
from spes_core.runfile import RunFile
from tests.equivalence.participants import assert_bitwise_equal, tiny, train_in_rounds
from tests.multihost.testbed import Testbed
from tests.processes.runs import Started, final_weights, outputs, with_corpus, write_corpus
from tests.processes.test_launch import wait_until
from workbench.processes import ProcessSpec, environment

pytestmark = [pytest.mark.multihost, pytest.mark.xdist_group("multihost")]

PORT = 5200
ROUNDS = 3


def small(corpus: Path) -> RunConfig:
    """About 1.5 MB up and 2.5 MB down for each node and round; delay and loss are the transport's own emulation."""
    config = tiny(
        nodes=4,
        budget_tokens=2 * ROUNDS * 8 * 16,
        model={"d_model": 64, "num_experts": 16, "expert_hidden": 128},
        sync={"interval_steps": 2},
        merge={"interval_steps": 4, "until_step": 100, "alpha": 0.3},
        link={"rtt_ms": 10, "loss": 0.001, "emulate": True},
        wire={"chunk_bytes": 1 << 16},
    )
    return with_corpus(config, corpus)


def hand_out(hosts: Testbed, config: RunConfig, data_dir: Path, folder: Path) -> dict[str, Path]:
    """Give each participant a folder with run.json and its own credentials alone; host-0 has the server and node 0."""
    address = hosts.address("host-0")
    credentials.make(folder / "all credentials", config.nodes, [address])
    folders = {}
    for name in ("server", *(f"node-{node}" for node in range(config.nodes))):
        folders[name] = folder / name
        own = folders[name] / "credentials"
        own.mkdir(parents=True)
        for file in ("ca.pem", credentials.TOKEN_FILE, f"{name}.pem", f"{name}.key"):
            shutil.copy(folder / "all credentials" / file, own)
        run = RunFile(
            trial="by hand",
            config=config,
            data_dir=str(data_dir),
            server_address=f"{address}:{PORT}",
            credentials=str(own),
            device="cpu",
        )
        run.save(folders[name] / "run.json")
    return folders


def start(hosts: Testbed, name: str, folder: Path) -> Started:
    number = 0 if name == "server" else int(name.removeprefix("node-"))
    module = ("spes_core.server",) if name == "server" else ("spes_core.node", "--node", str(number))
    argv = (module[0], str(folder / "run.json"), *module[1:])
    namespace = hosts.namespace(hosts.hosts[number])
    spec = ProcessSpec(
        name=name,
        argv=(sys.executable, "-m", "tests.multihost.on_host", namespace, *argv),
        env=environment(RunFile.load(folder / "run.json")),
    )
    return Started(spec, folder / "log")


def kinds(folder: Path, name: str) -> list[str]:
    path = folder / "events" / f"{name}.jsonl"
    return [event["kind"] for event in read_events(path)] if path.exists() else []


def test_four_nodes_on_slow_links_one_of_them_cut_for_seconds_end_with_the_bits_of_one_process(
    hosts: Testbed, tmp_path: Path
) -> None:
    (tmp_path / "corpus").mkdir()
    config = small(write_corpus(tmp_path / "corpus"))
    data_dir = prepare(config.data, tmp_path / "cache")
    folders = hand_out(hosts, config, data_dir, tmp_path)
    for host in hosts.hosts[1:]:
        hosts.shape(host, 50)
    processes = {name: start(hosts, name, folder) for name, folder in folders.items()}

    def rounds_of(name: str) -> int:
        return kinds(folders[name], name).count("round")

    wait_until(lambda: rounds_of("node-2") >= 1 or any(p.poll() is not None for p in processes.values()), 60)
    hosts.down("host-2")
    time.sleep(2)
    before = [rounds_of(name) for name in folders]
    time.sleep(1)
    assert before == [rounds_of(name) for name in folders] and max(before) < ROUNDS, "all wait for node 2"
    hosts.up("host-2")
    found = outputs(processes, 90)
    assert all(status == 0 for status, _ in found.values()), found
    assert all(rounds_of(name) == ROUNDS for name in folders if name != "server")
    expected = train_in_rounds(config, tmp_path / "inside", TokenSource(data_dir, config.data, config.seed))
    assert_bitwise_equal(final_weights(folders["server"]), expected[0])
    assert not any(hosts.processes(host) for host in hosts.hosts)
