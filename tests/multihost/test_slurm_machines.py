"""A trial that spreads over two machines of one allocation: the bits of one machine, whatever happens to the job."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.multihost.jobs import Jobs, wait_until
from tests.multihost.slurmd import Slurm

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
    slurm.command("scancel", "--signal=USR2", f"{job}.1")  # Slurm's notice of the time limit, to the second machine
    at = spread.steps
    wait_until(lambda: spread.steps >= at + 4)
    assert {process.pid for process in slurm.processes_on(slurm.nodes[1])} == on[slurm.nodes[1]]
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
