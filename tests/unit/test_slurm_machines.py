"""What a trial asks Slurm for when it spreads over machines, and which of them takes which node."""

from __future__ import annotations

import pytest

from spes_core.config import RunConfig
from workbench.settings import Launcher, Resources
from workbench.slurm.machines import machines_for, nodes_of_largest, place
from workbench.slurm.settings import Slurm
from workbench.slurm.submission import JobNeed
from workbench.spec import read_study
from workbench.trials import expand

STUDY = """\
schema: 1
name: spread
question: Which machine takes what?
run: {nodes: 5, budget_tokens: 5_120, sync: {interval_steps: 2},
      data: {sequence_length: 32, global_batch_sequences: 10}}
arms: {spes: {method: spes}, centralized: {method: centralized}}
"""


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, RunConfig]:
    """A run of five nodes with rounds, and one that exchanges gradients."""
    file = tmp_path_factory.mktemp("spread") / "spread.yaml"
    file.write_text(STUDY, encoding="utf-8")
    return {variant.arm.name: variant.config for variant in expand(read_study(file))}


def test_nodes_are_spread_evenly_in_blocks_with_the_server_first(runs: dict[str, RunConfig]) -> None:
    placed = place(["a", "b"], runs["spes"])
    assert placed.server == "a" and placed.nodes == ("a", "a", "a", "b", "b")
    assert place(["a"], runs["spes"]).hosts == ("a",)
    assert place(list("abcdefg"), runs["spes"]).nodes == tuple("abcde")
    assert [nodes_of_largest(runs["spes"], machines) for machines in (1, 2, 3, 5)] == [5, 3, 2, 1]


def test_no_machine_is_without_a_node_and_one_process_group_stays_on_one(runs: dict[str, RunConfig]) -> None:
    assert [machines_for(runs["spes"], asked) for asked in (1, 2, 8)] == [1, 2, 5]
    assert machines_for(runs["centralized"], 8) == 1


def test_a_job_asks_of_each_machine_what_its_largest_share_needs(runs: dict[str, RunConfig]) -> None:
    resources = Resources(cpus=12)
    one, two = (
        JobNeed.of(runs["spes"], resources, Launcher(device="cuda", threads=2, slurm=Slurm(machines=machines)))
        for machines in (1, 2)
    )
    assert (one.machines, one.cpus, one.gpus) == (1, 10, 5)
    assert (two.machines, two.cpus, two.gpus) == (2, 6, 3)
    assert two.memory_bytes < one.memory_bytes < 2 * two.memory_bytes
    assert (one.most(4, resources), two.most(4, resources)) == (1, 1)


def test_a_budget_counts_all_machines_of_a_job(runs: dict[str, RunConfig]) -> None:
    need = JobNeed(cpus=3, memory_bytes=10**9, gpus=1, machines=2)
    for budget in ({"cpus": 12}, {"memory_gb": 4.0}, {"gpus": 4}):
        assert need.most(8, Resources(parallel_trials="auto", **budget)) == 2  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        (Slurm(machines=0), "launcher.slurm.machines (0) must be at least 1"),
        (Slurm(extra={"nodes": 2}), "launcher.slurm.extra.nodes has a setting of its own: launcher.slurm.machines"),
        (Slurm(extra={"ntasks-per-node": 2}), "launcher.slurm.extra.ntasks-per-node must not be set"),
    ],
)
def test_what_cannot_be_asked_for_is_one_error(settings: Slurm, said: str) -> None:
    (problem,) = settings.problems()
    assert said in str(problem)
