"""A trial that spreads over two machines of one allocation: the bits of one machine, whatever happens to the job."""

from __future__ import annotations

import json
import os
import queue
import signal
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.multihost.jobs import Jobs, wait_until
from tests.multihost.slurmd import Slurm
from workbench.launch.hostlink import HostLink
from workbench.launch.launcher import LaunchError
from workbench.slurm.machines import check_machine, try_address

pytestmark = [pytest.mark.multihost, pytest.mark.xdist_group("slurm")]


def names_of(folder: Path) -> set[str]:
    return {str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file()} - {"slurm.json"}


def test_two_machines_give_the_bits_and_the_files_of_one_though_one_of_them_fails(
    user_folder: Path, slurm: Slurm
) -> None:
    spread = Jobs(user_folder, "spread", "launcher.slurm.machines=2")
    end = spread.start()
    wait_until(lambda: spread.steps >= 4)
    on = {node: {process.pid for process in slurm.processes_on(node)} for node in slurm.nodes}
    run = json.loads((spread.dir / "run.json").read_text())
    assert run["server_address"].startswith("127.0.0.2:")
    keys = Path(run["credentials"])
    assert (keys / "node-1.key").stat().st_mode & 0o077 == 0
    assert all(on.values())
    job = spread.job
    for process in slurm.processes_on(slurm.nodes[1]):
        if "slurm" not in process.name() and process.name() != "srun":
            process.send_signal(signal.SIGUSR2)  # by which Slurm tells all processes of a job of its time limit
    at = spread.steps
    wait_until(lambda: spread.steps >= at + 4)
    assert {process.pid for process in slurm.processes_on(slurm.nodes[1])} >= on[slurm.nodes[1]]
    slurm.crash(slurm.nodes[1])
    wait_until(lambda: slurm.jobs()[job] == "PENDING")
    slurm.boot(slurm.nodes[1])
    wait_until(lambda: not any(slurm.processes_on(node) for node in slurm.nodes))
    slurm.command("scontrol", "update", f"JobId={job}", "StartTime=now+2")
    here = Jobs(user_folder, "here")
    here.run_here()
    stored = end.result(240)
    assert stored.status == "done", stored.result["error"]
    assert stored.result["resumed_at_step"] > 0
    assert spread.weights == here.weights
    assert names_of(spread.dir) == names_of(here.dir) - {"join.token"}
    assert not keys.exists()


@pytest.fixture
def agent(tmp_path: Path) -> Iterator[HostLink]:
    """An agent that sees another file system than this process, as far as it can tell."""
    command = [sys.executable, "-m", "workbench.launch.agent", "--work", str(tmp_path / "there")]
    link = HostLink("n7", command, lambda *_: None, lambda _: None)
    yield link
    link.close()


def test_a_machine_without_the_shared_folder_or_the_address_is_named_and_nothing_is_made(
    agent: HostLink, tmp_path: Path
) -> None:
    with pytest.raises(LaunchError, match=r"machine n7 does not see .*here: --results must be on a file system"):
        check_machine(agent, tmp_path / "here")
    assert list(tmp_path.iterdir()) == []
    with pytest.raises(LaunchError, match=r"machine n7 does not reach n7, .* at 192\.0\.2\.7 \(NodeAddr in slurm.conf"):
        try_address({"n7": agent}, "n7", "192.0.2.7")
    try_address({"n7": agent}, "n7", "127.0.0.1")


def test_what_the_kernel_kills_for_memory_on_another_machine_is_known_here(tmp_path: Path, slurm: Slurm) -> None:
    if not slurm.limits_memory:
        pytest.skip("needs a control group (version 1) for memory")
    group = Path(f"/sys/fs/cgroup/memory/spes-test-{os.getpid()}")
    group.mkdir()
    try:
        (group / "memory.limit_in_bytes").write_text("700M")
        command = f"echo $$ > {group}/cgroup.procs; exec {sys.executable} -m workbench.launch.agent --work {tmp_path}"
        said: queue.Queue[dict[str, Any]] = queue.Queue()
        link = HostLink("n7", ["sh", "-c", command], lambda _, message: said.put(message.header), lambda _: None)
        greedy = [sys.executable, "-c", "bytearray(10**9)"]
        for number, argv in enumerate((greedy, [sys.executable, "-c", "raise SystemExit(3)"])):
            link.ask("start", process=number, name="node-0", argv=argv, env={}, log="log", timeout_s=120)
            ended = said.get(timeout=120)
            assert (ended["returncode"], ended["killed_for_memory"]) == ((-9, True), (3, False))[number]
        link.close()
        wait_until(lambda: not (group / "cgroup.procs").read_text())
    finally:
        group.rmdir()
