"""What trials need, what they may take together, and what this machine is seen to have."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from spes_core.config import DataConfig, ModelConfig, RunConfig, SyncConfig, WireConfig
from spes_core.model.counting import memory
from workbench import budget as budgets
from workbench.budget import Budget, Need, host_memory_bytes
from workbench.machine import available_memory_bytes, oom_kills, usable_cores, visible_gpus
from workbench.settings import Launcher, Resources

GB = 10**9


def config(**changes: Any) -> RunConfig:
    model = ModelConfig(num_layers=2, d_model=64, num_heads=2, num_kv_heads=2, expert_hidden=64, vocab_size=4096)
    data = DataConfig(tokenizer_vocab_size=4096, sequence_length=32, global_batch_sequences=8)
    return RunConfig(**{"nodes": 4, "model": model, "data": data, "budget_tokens": 4096, **changes})


def machine(cores: int = 8, gpus: int = 0, *, divides_gpus: bool = True) -> Budget:
    names = tuple(map(str, range(gpus)))
    return Budget(cores=cores, memory_bytes=4 * GB, gpus=names, divides_gpus=divides_gpus)


def need(cores: int = 1, memory_bytes: int = 0, gpus: int = 0) -> Need:
    return Need(cores=cores, memory_bytes=memory_bytes, gpus=gpus)


# --- Needs ---


def test_a_run_needs_a_core_for_each_thread_of_its_processes_and_no_more_than_there_are() -> None:
    launcher = Launcher(device="cpu", threads=2)
    assert machine(16).need(config(), Resources(), launcher).cores == 8
    assert machine(2).need(config(), Resources(), launcher).cores == 2
    assert machine(2).need(config(), Resources(cpus=2), launcher).cores == 8, "a stated number is kept"


@pytest.mark.parametrize(
    ("device", "gpus", "per_trial", "expected"),
    [("auto", 8, None, 4), ("auto", 3, None, 0), ("cuda", 3, None, 3), ("cuda", 8, 2, 2), ("cpu", 8, 2, 0)],
)
def test_gpus_of_a_run_of_four_processes(device: Any, gpus: int, per_trial: int | None, expected: int) -> None:
    resources, launcher = Resources(gpus_per_trial=per_trial), Launcher(device=device)
    assert machine(gpus=gpus).need(config(), resources, launcher).gpus == expected


def test_memory_of_a_run_is_that_of_its_nodes_and_the_server() -> None:
    plain = host_memory_bytes(config(), on_gpu=False)
    nodes = sum(memory(config(), node).total_bytes for node in range(4))
    assert nodes < plain < nodes + 5 * 200 * 10**6
    assert host_memory_bytes(config(wire=WireConfig(dtype="int8")), on_gpu=False) > plain
    group = config(method="centralized", nodes=2, sync=SyncConfig(exchange="gradients"))
    assert host_memory_bytes(group, on_gpu=False) >= sum(memory(group, rank).total_bytes for rank in range(2))
    assert machine().need(config(), Resources(trial_memory_gb=3), Launcher(device="cpu")).memory_bytes == 3 * GB


# --- Taking ---


@given(st.lists(st.tuples(st.integers(1, 5), st.integers(0, 3), st.integers(0, 2), st.booleans()), max_size=20))
def test_what_runs_together_never_exceeds_the_budget_and_shares_no_gpu(
    steps: list[tuple[int, int, int, bool]],
) -> None:
    whole, held = machine(cores=6, gpus=3), []
    for cores, gigabytes, gpus, ends in steps:
        if ends and held:
            whole.give_back(held.pop(0))
        slot = whole.take(need(cores, gigabytes * GB, gpus))
        held += [slot] if slot is not None else []
        names = [name for slot in held for name in slot.gpus or ()]
        assert len(names) == len(set(names)) == sum(slot.need.gpus for slot in held)
        assert sum(slot.need.cores for slot in held) <= 6
        assert sum(slot.need.memory_bytes for slot in held) <= 4 * GB
        assert held, "a trial that is alone always runs"


def test_room_that_was_given_back_is_taken_again() -> None:
    whole = machine(cores=2)
    first = whole.take(need(2))
    assert first is not None
    assert whole.take(need(1)) is None
    whole.give_back(first)
    assert whole.take(need(1)) is not None


def test_one_trial_at_a_time_sees_all_gpus() -> None:
    slot = machine(gpus=2, divides_gpus=False).take(need(gpus=2))
    assert slot is not None and slot.gpus is None


def test_settings_come_before_what_the_machine_has(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(budgets, "visible_gpus", lambda: ("5", "7"))
    stated = Budget.of(Resources(cpus=3, memory_gb=1.5, gpus=1))
    assert (stated.cores, stated.memory_bytes, stated.gpus) == (3, int(1.5 * GB), ("5",))
    monkeypatch.setattr(budgets, "usable_cores", lambda: 11)
    monkeypatch.setattr(budgets, "available_memory_bytes", lambda: 12)
    found = Budget.of(Resources())
    assert (found.cores, found.memory_bytes, found.gpus, found.divides_gpus) == (11, 12, ("5", "7"), False)
    assert Budget.of(Resources(parallel_trials="auto")).divides_gpus


# --- This machine ---


def write(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)


def test_limits_of_control_groups_count_in_both_versions(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("os.sched_getaffinity", lambda _: range(64), raising=False)
    new, old = tmp_path / "new", tmp_path / "old"
    write(new / "proc/self/cgroup", "0::/outer/inner\n")
    write(new / "sys/fs/cgroup/outer/cpu.max", "250000 100000\n")
    write(new / "sys/fs/cgroup/outer/inner/cpu.max", "max 100000\n")
    write(new / "sys/fs/cgroup/outer/memory.max", "5000\n")
    write(new / "sys/fs/cgroup/outer/memory.current", "3000\n")
    write(new / "sys/fs/cgroup/outer/memory.stat", "anon 1\ninactive_file 700\n")
    write(new / "sys/fs/cgroup/outer/inner/memory.events", "oom 4\noom_kill 3\n")
    write(old / "proc/self/cgroup", "4:cpu,cpuacct:/job\n3:memory:/job\n0::/\n")
    write(old / "sys/fs/cgroup/cpu/job/cpu.cfs_quota_us", "-1\n")
    write(old / "sys/fs/cgroup/cpu/job/cpu.cfs_period_us", "100000\n")
    write(old / "sys/fs/cgroup/memory/job/memory.limit_in_bytes", "9000\n")
    write(old / "sys/fs/cgroup/memory/job/memory.usage_in_bytes", "8000\n")
    write(old / "sys/fs/cgroup/memory/memory.oom_control", "oom_kill_disable 0\noom_kill 2\n")
    assert [(usable_cores(root), available_memory_bytes(root), oom_kills(root)) for root in (new, old)] == [
        (3, 2700, 3),
        (64, 1000, 2),
    ]


def test_without_control_groups_the_whole_system_counts(tmp_path: Path) -> None:
    write(tmp_path / "proc/vmstat", "nr_free_pages 1\noom_kill 6\n")
    assert oom_kills(tmp_path) == 6
    assert available_memory_bytes(tmp_path) > 0
    assert usable_cores(tmp_path) >= 1


def test_gpus_are_those_that_the_environment_names_or_all_devices(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    for name in ("nvidia0", "nvidia1", "nvidiactl", "nvidia-uvm"):
        write(tmp_path / "dev" / name, "")
    assert visible_gpus(tmp_path) == ("0", "1")
    for named, expected in (("3, GPU-ab", ("3", "GPU-ab")), ("", ()), ("-1", ())):
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", named)
        assert visible_gpus(tmp_path) == expected
