"""Server and nodes by hand on hosts of their own, over TLS and slow links: whatever dies, the bits of one process."""

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
ROUNDS = 4


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
        round={"heartbeat_s": 0.5},
        checkpoint={"interval_rounds": 1},
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


class ByHand:
    """A run whose participants were started by hand, each on its host: restarting one is its command again."""

    def __init__(self, hosts: Testbed, folders: dict[str, Path]) -> None:
        self.hosts, self.folders = hosts, folders
        self.processes = {name: start(hosts, name, folder) for name, folder in folders.items()}

    @property
    def nodes(self) -> list[str]:
        return [name for name in self.folders if name != "server"]

    def rounds_of(self, name: str) -> int:
        return kinds(self.folders[name], name).count("round")

    def wait_for_round(self, name: str, rounds: int) -> None:
        """Until a node has that many rounds behind it, or something has ended."""
        wait_until(lambda: self.rounds_of(name) >= rounds or self.has_ended(), 60)

    def has_ended(self) -> bool:
        return any(process.poll() is not None for process in self.processes.values())

    def restart(self, name: str) -> None:
        self.processes[name].wait(10)
        self.processes[name] = start(self.hosts, name, self.folders[name])


def cut_off(run: ByHand, host: str) -> None:
    """No packet comes through for 3 s, in which the others can close no round."""
    run.hosts.down(host)
    time.sleep(2)
    before = [run.rounds_of(name) for name in run.nodes]
    time.sleep(1)
    assert before == [run.rounds_of(name) for name in run.nodes] and max(before) < ROUNDS
    run.hosts.up(host)


def lose_power(run: ByHand, host: str, names: list[str]) -> None:
    """Everything on a host is gone without a word to anybody; then it is booted, and its commands are given again."""
    run.hosts.crash(host)
    run.hosts.boot(host)
    for name in names:
        run.restart(name)


def test_slow_links_a_cut_one_and_a_server_host_without_power_change_no_bit(hosts: Testbed, tmp_path: Path) -> None:
    (tmp_path / "corpus").mkdir()
    config = small(write_corpus(tmp_path / "corpus"))
    data_dir = prepare(config.data, tmp_path / "cache")
    for host in hosts.hosts[1:]:
        hosts.shape(host, 50)
    run = ByHand(hosts, hand_out(hosts, config, data_dir, tmp_path))
    run.wait_for_round("node-2", 1)
    cut_off(run, "host-2")
    run.wait_for_round("node-3", 2)
    lose_power(run, "host-0", ["server", "node-0"])
    found = outputs(run.processes, 120)
    assert all(status == 0 for status, _ in found.values()), found
    assert all(run.rounds_of(name) == ROUNDS for name in run.nodes)
    assert "resume" in kinds(run.folders["server"], "server")
    expected = train_in_rounds(config, tmp_path / "inside", TokenSource(data_dir, config.data, config.seed))
    assert_bitwise_equal(final_weights(run.folders["server"]), expected[0])
    assert not any(hosts.processes(host) for host in hosts.hosts)
