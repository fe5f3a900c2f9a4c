"""Which processes a run consists of."""

import sys
from pathlib import Path

import pytest

from spes_core.config import DataConfig, ParallelConfig, RunConfig, SyncConfig
from spes_core.runfile import RunFile
from workbench.processes import environment, plan


def run_file(config: RunConfig, threads: int = 1) -> RunFile:
    return RunFile(trial="t", config=config, data_dir="d", threads=threads)


def test_rounds_need_a_server_and_every_node_once() -> None:
    specs = plan(run_file(RunConfig(nodes=3, data=DataConfig(global_batch_sequences=3))), Path("/r/a b/t"))
    assert [spec.name for spec in specs] == ["server", "node-0", "node-1", "node-2"]
    assert specs[0].argv == (sys.executable, "-m", "spes_core.server", "/r/a b/t/run.json")
    assert specs[3].argv == (sys.executable, "-m", "spes_core.node", "/r/a b/t/run.json", "--node", "2")
    assert specs[3].log_name == "node-2.log"


def test_without_exchange_there_is_no_server() -> None:
    specs = plan(run_file(RunConfig(nodes=2, sync=SyncConfig(exchange="none"))), Path("/t"))
    assert [spec.name for spec in specs] == ["node-0", "node-1"]


def test_gradients_are_exchanged_in_one_torchrun_group_of_all_ranks() -> None:
    config = RunConfig(nodes=2, parallel=ParallelConfig(ranks_per_node=4), sync=SyncConfig(exchange="gradients"))
    (spec,) = plan(run_file(config), Path("/t"))
    assert spec.name == "torchrun"
    assert spec.argv[1:5] == ("-m", "torch.distributed.run", "--nproc-per-node", "8")
    assert spec.argv[spec.argv.index("--local-addr") + 1] == "127.0.0.1"
    assert spec.argv[-2:] == ("/t/run.json", "--die-with-parent")


@pytest.mark.parametrize(("platform", "loopback"), [("linux", "lo"), ("darwin", "lo0")])
def test_the_ranks_of_a_group_talk_over_the_loopback(
    monkeypatch: pytest.MonkeyPatch, platform: str, loopback: str
) -> None:
    monkeypatch.setattr(sys, "platform", platform)
    (spec,) = plan(run_file(RunConfig(sync=SyncConfig(exchange="gradients"))), Path("/t"))
    assert spec.env["GLOO_SOCKET_IFNAME"] == spec.env["NCCL_SOCKET_IFNAME"] == loopback


def test_a_group_on_several_hosts_has_a_torchrun_on_each_that_talks_by_the_named_interface() -> None:
    config = RunConfig(nodes=3, parallel=ParallelConfig(ranks_per_node=2), sync=SyncConfig(exchange="gradients"))
    first, second = plan(run_file(config), Path("/t"), spread=(4, 2), interface="wg0")
    assert (first.name, second.name) == ("torchrun-0", "torchrun-4")
    assert (first.argv[4], second.argv[4]) == ("4", "2")
    assert first.argv[-2:] == ("--node", "0")
    assert second.argv[-2:] == ("--node", "2"), "its first node, of which rank 4 is the first"
    assert (second.env["GLOO_SOCKET_IFNAME"], second.env["NCCL_SOCKET_IFNAME"]) == ("wg0", "=wg0")


def test_a_node_of_several_ranks_is_a_torchrun_group_of_its_own() -> None:
    config = RunConfig(nodes=2, parallel=ParallelConfig(ranks_per_node=4))
    server, *nodes = plan(run_file(config), Path("/t"))
    assert server.argv == (sys.executable, "-m", "spes_core.server", "/t/run.json")
    for node, spec in enumerate(nodes):
        assert (spec.name, spec.argv[3:5]) == (f"node-{node}", ("--nproc-per-node", "4"))
        separator = spec.argv.index("--")
        assert spec.argv[separator + 2 :] == ("/t/run.json", "--die-with-parent", "--node", str(node))


def test_a_relative_folder_becomes_absolute_because_processes_may_run_elsewhere() -> None:
    (server, *_) = plan(run_file(RunConfig()), Path("results/t"))
    assert server.argv[-1] == str(Path.cwd() / "results/t/run.json")


def test_threads_are_limited_before_a_numerical_library_is_loaded() -> None:
    env = environment(run_file(RunConfig(), threads=3))
    assert env["OMP_NUM_THREADS"] == env["OPENBLAS_NUM_THREADS"] == env["MKL_NUM_THREADS"] == "3"
    assert (env["OMP_WAIT_POLICY"], env["PYTHONHASHSEED"]) == ("PASSIVE", "0")
