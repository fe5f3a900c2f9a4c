"""Ranks that exchange gradients on two hosts: the bits of one host, and all of them end when one torchrun does."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import psutil
import pytest

from spes_core.config import CheckpointConfig, LogConfig, RunConfig, SyncConfig
from spes_core.data.tokenize import prepare
from spes_core.events import read_events
from tests.equivalence.participants import assert_bitwise_equal
from tests.multihost.testbed import Testbed
from tests.processes.runs import final_weights, write_corpus
from tests.processes.test_launch import wait_until
from tests.processes.test_launch_engine import config, trial
from workbench.execute import ExecutionSettings, run_trial
from workbench.launch.checked import Checked
from workbench.launch.inventory import Host, Inventory
from workbench.launch.local import open_launcher
from workbench.launch.preflight import check
from workbench.launch.reach import try_group
from workbench.launch.remote import RemoteLauncher

pytestmark = [pytest.mark.multihost, pytest.mark.xdist_group("multihost")]

PORT = 5201


def gradients(steps: int) -> RunConfig:
    """Three ranks: of two numbers alone the sum has the same bits in any order."""
    made = config(steps=steps, nodes=3, sync=SyncConfig(exchange="gradients"), log=LogConfig(interval_steps=1))
    data = replace(made.data, global_batch_sequences=6)
    return replace(made, data=data, checkpoint=CheckpointConfig(interval_steps=2), budget_tokens=steps * 6 * 32)


RUN = gradients(14)


@pytest.fixture(scope="module")
def settings(tmp_path_factory: pytest.TempPathFactory) -> ExecutionSettings:
    corpus = write_corpus(tmp_path_factory.mktemp("corpus"))
    data = replace(config().data, corpus=str(corpus))
    return ExecutionSettings(data_dir=prepare(data, tmp_path_factory.mktemp("cache")), device="cpu")


def inventory(hosts: Testbed) -> Inventory:
    """Two ranks on one host and one on the other; the server's host takes none."""
    wanted = {"host-0": 0, "host-1": 2, "host-2": 1}
    options = ("-F", str(hosts.ssh_config))
    return Inventory(tuple(
        Host(name=name, ssh=name, address=hosts.address(name), work_dir=str(hosts.host_folder(name) / "w"),
             python=sys.executable, nodes=nodes, ssh_options=options)
        for name, nodes in wanted.items()
    ))  # fmt: skip


def family(hosts: Testbed, host: str) -> list[psutil.Process]:
    """A torchrun of a host and its ranks: all that its fork server has forked."""
    found = [psutil.Process(pid) for pid in hosts.processes(host)]
    return [one for one in found if "spawner" in " ".join(one.parent().cmdline())]


def listening(hosts: Testbed, host: str) -> set[str]:
    """Addresses at which processes of a host listen."""
    lines = subprocess.run(hosts.inside(host, "ss", "-Htln"), capture_output=True, text=True, check=True).stdout
    return {line.split()[3].rpartition(":")[0] for line in lines.splitlines()}


def test_ranks_on_two_hosts_have_the_bits_of_one_host_and_end_together(
    hosts: Testbed, settings: ExecutionSettings, tmp_path: Path
) -> None:
    with open_launcher() as here:
        assert run_trial(trial(RUN), tmp_path / "here", settings, here)["status"] == "done"
    listed = inventory(hosts)
    found = check(listed, port=PORT, placements=[listed.place(RUN)])
    assert found.problems == []
    assert "host-1 and host-2 exchange gradients at every step, unencrypted" in found.notes[0]
    for told, other in zip(behind_a_firewall(hosts, found.checked[1:]), ("host-2", "host-1"), strict=True):
        assert f"host {other} cannot be reached from it: " in told[0]
        assert told[-1].endswith("; ranks that exchange gradients need all ports")
    with RemoteLauncher(found.sites, listed.place, port=PORT, links=found.links) as launcher:
        assert [launcher.link(link.name) for link in found.links] == found.links, "its agents are those of the check"
        result: dict[str, Any] = {}
        folder = tmp_path / "there"
        thread = threading.Thread(target=lambda: result.update(run_trial(trial(RUN), folder, settings, launcher)))
        thread.start()
        wait_until(lambda: step(folder) >= 4, 180)
        own = {hosts.address(host) for host in ("host-1", "host-2")}
        assert listening(hosts, "host-1") | listening(hosts, "host-2") == own, "nothing listens on every interface"
        before = [*family(hosts, "host-1"), *family(hosts, "host-2")]
        assert len(before) == 2 + 3
        leader = next(one for one in family(hosts, "host-2") if one.children())
        os.kill(leader.pid, signal.SIGKILL)
        thread.join(180)
        assert result["status"] == "failed"
        assert result["error"]["message"].startswith("torchrun-2 was killed (SIGKILL)"), "not whoever fell with it"
        assert not any(one.is_running() for one in before)
        assert run_trial(trial(RUN), folder, settings, launcher)["status"] == "done"
    assert [event["step"] for event in read_events(folder / "events" / "node-2.jsonl") if event["kind"] == "resume"]
    assert_bitwise_equal(final_weights(folder), final_weights(tmp_path / "here"))


def behind_a_firewall(hosts: Testbed, members: Sequence[Checked]) -> list[list[str]]:
    """What is said of two hosts that cannot reach each other."""
    routes = [
        ("-n", hosts.namespace(one), "route", "{}", "unreachable", hosts.address(other))
        for one, other in (("host-1", "host-2"), ("host-2", "host-1"))
    ]
    fresh = [replace(one, problems=[]) for one in members]
    for do in ("add", "del"):
        for words in routes:
            subprocess.run(["ip", *(do if word == "{}" else word for word in words)], check=True)
        if do == "add":
            with ThreadPoolExecutor() as pool:
                try_group(pool, fresh, PORT)
    return [one.problems for one in fresh]


def step(folder: Path) -> int:
    """The last step that the other host's rank has told of."""
    told = [event["step"] for event in read_events(folder / "events" / "node-2.jsonl") if "step" in event]
    return max(told, default=0)
