"""The engine's own processes through the fork server: quick to start, named when they fail, gone when it ends."""

from __future__ import annotations

import ipaddress
import json
import shutil
import signal
import sys
import threading
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import psutil
import pytest

from spes_core import snapshots
from spes_core.config import (
    CheckpointConfig,
    DataConfig,
    LogConfig,
    ModelConfig,
    OptimConfig,
    RunConfig,
    SyncConfig,
    ValidationConfig,
)
from spes_core.data.tokenize import prepare
from spes_core.events import read_events
from spes_core.schedules import checkpoint_steps
from spes_core.snapshots import ResumePoint
from tests.processes.test_launch import wait_until
from workbench.execute import ExecutionSettings, keep_resumable, run_trial
from workbench.execute import prepare as prepare_trial
from workbench.launch.forkserver import ForkLauncher
from workbench.launch.launcher import OnThisHost
from workbench.processes import ProcessSpec
from workbench.progress import Progress
from workbench.stopping import StopRequest
from workbench.terminal import progress_text
from workbench.trials import Trial

pytestmark = [
    pytest.mark.processes,
    pytest.mark.skipif(sys.platform != "linux", reason="needs Linux: the fork server ends its children with prctl"),
]

FIRST_STEP_BAR_S = 30.0
STOP_BAR_S = 20  # for the same reason


@pytest.fixture(scope="module")
def launcher() -> Iterator[ForkLauncher]:
    with ForkLauncher() as launcher:
        launcher.wait_ready()
        yield launcher
        assert launched(launcher) == []


@pytest.fixture(scope="module")
def settings(tmp_path_factory: pytest.TempPathFactory) -> ExecutionSettings:
    folder = tmp_path_factory.mktemp("corpus ü")
    for index in range(40):
        words = (f"document {index} counts {number} and says {number * index % 17}." for number in range(60))
        (folder / f"{index:02}.txt").write_text(" ".join(words), encoding="utf-8")
    data = replace(config().data, corpus=str(folder))
    return ExecutionSettings(data_dir=prepare(data, tmp_path_factory.mktemp("cache é")), device="cpu")


def config(steps: int = 4, **changes: Any) -> RunConfig:
    model = ModelConfig(num_layers=2, d_model=32, num_heads=2, num_kv_heads=2, expert_hidden=32, vocab_size=512)
    data = DataConfig(tokenizer_vocab_size=400, validation_fraction=0.1, sequence_length=32, global_batch_sequences=8)
    budget = {"budget_tokens": steps * 8 * 32, "validation": ValidationConfig(max_sequences=8)}
    return RunConfig(**{"model": model, "data": data, "sync": SyncConfig(interval_steps=2), **budget, **changes})


def trial(config: RunConfig) -> Trial:
    return Trial(id="a" * 16, name="t", study="s", arm="a", role="treatment", axes={}, seed=0, config=config)


def launched(launcher: ForkLauncher) -> list[psutil.Process]:
    return psutil.Process(launcher.pid).children(recursive=True)


def run_in_background(launcher: ForkLauncher, settings: ExecutionSettings, folder: Path, config: RunConfig) -> Any:
    """Start a trial that would go on for long, wait until it trains; returns (thread, its result, its stop request)."""
    result: dict[str, Any] = {}
    request = StopRequest()

    def run() -> None:
        result.update(run_trial(trial(config), folder, settings, launcher, stop_request=request))

    thread = threading.Thread(target=run)
    thread.start()
    first = folder / "events" / "node-0.jsonl"
    wait_until(lambda: any(event["kind"] == "train" for event in read_events(first)), 60)
    return thread, result, request


def test_the_preloaded_engine_is_safe_to_fork_and_computes_in_the_child(
    launcher: ForkLauncher, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert launcher.forks, "a thread was started while the engine was loaded"
    spec = ProcessSpec(name="t", argv=(sys.executable, "-m", "timeit", "-n1", "-r1", "-s", PROBE, "probe()"), env={})
    process = launcher.start(spec, tmp_path / "log")
    wait_until(lambda: process.returncode is not None, 60)
    assert process.returncode == 0, (tmp_path / "log").read_text()
    assert "loaded already, gradient 6.0 with 2 threads" in (tmp_path / "log").read_text()


PROBE = """
def probe():
    import sys
    loaded = 'loaded already' if 'torch' in sys.modules else 'loaded anew'
    import torch
    torch.set_num_threads(2)
    x = torch.full((600, 600), 1.0, requires_grad=True)
    (x @ x).mean().backward()
    y = torch.tensor(3.0, requires_grad=True)
    y.square().backward()
    print(f'{loaded}, gradient {float(y.grad)} with {torch.get_num_threads()} threads')
"""


def test_a_trial_of_four_nodes_takes_its_first_step_soon(
    launcher: ForkLauncher, settings: ExecutionSettings, tmp_path: Path
) -> None:
    result = run_trial(trial(config()), tmp_path / "versuch ä", settings, launcher)
    assert (result["status"], result["error"]) == ("done", None)
    metrics = result["metrics"]
    assert metrics["perf/launch_to_first_step_s"] < FIRST_STEP_BAR_S
    assert (metrics["comm/rounds"], len(result["memory"]["measured"])) == (2, 4)
    payload_gb = metrics["comm/uplink_gb"] - sum(map(sum, column(result, "uplink_framing_bytes"))) / 4 / 1e9
    assert payload_gb == pytest.approx(metrics["comm/uplink_predicted_gb"], rel=1e-9)
    assert launched(launcher) == []


def column(result: dict[str, Any], field: str) -> list[list[int]]:
    return [row[field] for row in result["rounds"]]


def test_a_torchrun_group_is_forked_and_takes_its_first_step_soon(
    launcher: ForkLauncher, settings: ExecutionSettings, tmp_path: Path
) -> None:
    group = config(method="centralized", nodes=2, sync=SyncConfig(exchange="gradients"))
    result = run_trial(trial(group), tmp_path / "versuch ä", settings, launcher)
    assert (result["status"], result["error"]) == ("done", None)
    assert result["metrics"]["perf/launch_to_first_step_s"] < FIRST_STEP_BAR_S
    assert result["metrics"]["comm/uplink_gb"] > 0
    assert launched(launcher) == []


@pytest.mark.parametrize("exchange", ["rounds", "gradients"])
def test_a_killed_participant_fails_its_trial_and_leaves_nothing(
    launcher: ForkLauncher, settings: ExecutionSettings, tmp_path: Path, exchange: str
) -> None:
    endless = config(steps=100_000, nodes=2, sync=SyncConfig(exchange=exchange, interval_steps=2))
    thread, result, _ = run_in_background(launcher, settings, tmp_path, endless)
    start = next(event for event in read_events(tmp_path / "events" / "node-1.jsonl") if event["kind"] == "start")
    psutil.Process(start["pid"]).kill()
    thread.join(STOP_BAR_S)
    assert result["status"] == "failed"
    assert result["error"]["process"] == ("node-1" if exchange == "rounds" else "torchrun")
    assert launched(launcher) == []


@pytest.mark.parametrize("exchange", ["rounds", "gradients"])
def test_a_stop_request_ends_a_training_trial_soon(
    launcher: ForkLauncher, settings: ExecutionSettings, tmp_path: Path, exchange: str
) -> None:
    endless = config(steps=100_000, nodes=2, sync=SyncConfig(exchange=exchange, interval_steps=2))
    thread, result, request = run_in_background(launcher, settings, tmp_path, endless)
    request.signal = signal.SIGINT
    thread.join(STOP_BAR_S)
    assert (result["status"], result["error"]["message"]) == ("interrupted", "stopped by SIGINT")
    assert launched(launcher) == []


@pytest.mark.parametrize("exchange", ["rounds", "gradients"])
def test_nothing_listens_on_a_public_interface(
    launcher: ForkLauncher, settings: ExecutionSettings, tmp_path: Path, exchange: str
) -> None:
    endless = config(steps=100_000, nodes=2, sync=SyncConfig(exchange=exchange, interval_steps=2))
    thread, _, request = run_in_background(launcher, settings, tmp_path, endless)
    try:
        sockets = [socket for process in launched(launcher) for socket in process.net_connections(kind="inet")]
        heard = {socket.laddr.ip for socket in sockets if socket.status == psutil.CONN_LISTEN}
        assert heard
        assert all(ipaddress.ip_address(ip.removeprefix("::ffff:")).is_loopback for ip in heard), heard
    finally:
        request.signal = signal.SIGINT
        thread.join(STOP_BAR_S)


def test_no_rank_or_node_outlives_a_killed_fork_server(settings: ExecutionSettings, tmp_path: Path) -> None:
    endless = [config(100_000, nodes=2, sync=SyncConfig(exchange=kind)) for kind in ("rounds", "gradients")]
    with ForkLauncher() as launcher:
        trials = [run_in_background(launcher, settings, tmp_path / config.sync.exchange, config) for config in endless]
        processes = launched(launcher)
        assert len(processes) == 3 + 3  # server and two nodes, torchrun and two ranks
        psutil.Process(launcher.pid).kill()
        for thread, result, _ in trials:
            thread.join(STOP_BAR_S)
            assert result["status"] == "failed"
    assert psutil.wait_procs(processes, timeout=5)[1] == []


def test_a_port_in_use_fails_the_trial_with_the_server_s_own_words(
    launcher: ForkLauncher, settings: ExecutionSettings, tmp_path: Path
) -> None:
    import socket

    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        address = f"127.0.0.1:{taken.getsockname()[1]}"
        result = run_trial(trial(config()), tmp_path, replace(settings, server_address=address), launcher)
    assert (result["status"], result["error"]["process"]) == ("failed", "server")
    assert address in result["error"]["message"]


def test_an_interrupted_trial_goes_on_from_its_checkpoint_and_says_so(
    launcher: ForkLauncher, settings: ExecutionSettings, tmp_path: Path
) -> None:
    steps = 200
    cautious = config(steps, nodes=2, checkpoint=CheckpointConfig(interval_rounds=5), log=LogConfig(interval_steps=5))
    thread, result, request = run_in_background(launcher, settings, tmp_path, cautious)
    wait_until(lambda: snapshots.resume_step(cautious, tmp_path, "server"))
    request.signal = signal.SIGTERM
    thread.join(STOP_BAR_S)
    assert result["status"] == "interrupted"
    seen: list[Progress] = []
    result = run_trial(trial(cautious), tmp_path, settings, launcher, seen.append)
    assert (result["status"], result["error"]) == ("done", None)
    resumed = result["resumed_at_step"]
    assert resumed and resumed % 10 == 0
    assert all(f"resumed at step {resumed}  step " in progress_text(progress) for progress in seen)
    assert [point["step"] for point in result["curves"]["train"]] == list(range(5, steps + 1, 5))
    assert [row["round"] for row in result["rounds"]] == list(range(steps // 2))
    metrics = result["metrics"]
    assert metrics["comm/rounds"] == steps // 2 and "perf/launch_to_first_step_s" not in metrics
    # Whatever the first processes had uploaded of the round in which they were stopped counts, and counts once.
    sent_bytes = [
        event["uplink_payload_bytes"]
        for node in range(2)
        for event in read_events(tmp_path / "events" / f"node-{node}.jsonl")
        if event["kind"] == "round"
    ]
    assert sum(sent_bytes) / 2 / 1e9 == pytest.approx(metrics["comm/uplink_predicted_gb"], rel=1e-9)
    assert not (tmp_path / "checkpoints").exists(), "what only a crash needs goes when the trial is done"


def test_trials_at_the_same_time_have_the_bits_of_trials_after_each_other(
    launcher: ForkLauncher, settings: ExecutionSettings, tmp_path: Path
) -> None:
    runs = {name: config(method=name, nodes=2, seed=seed) for name, seed in (("spes", 0), ("dilico", 1))}
    for name, run in runs.items():
        assert run_trial(trial(run), tmp_path / "alone" / name, settings, launcher)["status"] == "done"
    threads = [
        threading.Thread(
            target=run_trial, args=(trial(run), tmp_path / "together" / name, settings, launcher, None, StopRequest())
        )
        for name, run in runs.items()
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(120)
    for name in runs:
        weights, losses = [], []
        for way in ("alone", "together"):
            weights.append((tmp_path / way / name / "weights" / "final.safetensors").read_bytes())
            result = json.loads((tmp_path / way / name / "result.json").read_text())
            losses.append([result["curves"]["validation"][-1]["loss_nats"], result["metrics"]["comm/uplink_gb"]])
        assert weights[0] == weights[1]
        assert losses[0] == losses[1]
    assert launched(launcher) == []


def test_a_run_whose_loss_explodes_has_diverged(
    launcher: ForkLauncher, settings: ExecutionSettings, tmp_path: Path
) -> None:
    wild = config(steps=200, nodes=2, optim=OptimConfig(lr=1e20, clip_norm=None), log=LogConfig(interval_steps=1))
    result = run_trial(trial(wild), tmp_path, settings, launcher)
    assert (result["status"], result["metrics"].get("eval/loss")) == ("diverged", None)
    assert "has diverged" in result["error"]["message"]


def test_a_checkpoint_made_by_other_code_is_not_taken_up(settings: ExecutionSettings, tmp_path: Path) -> None:
    run = config(steps=40, nodes=1, sync=SyncConfig(exchange="none"))

    def keep() -> None:
        (tmp_path / "events").mkdir(exist_ok=True)
        prepare_trial(trial(run), tmp_path, settings)

        def write(path: Path) -> str:
            path.write_bytes(b"data")
            return ""

        folder = snapshots.folder_of(tmp_path, "node-0")
        snapshots.store(run, folder, write, step=10, round=0, events_bytes=0, values={})

    keep()
    assert keep_resumable(trial(run), tmp_path, settings, OnThisHost()) == {"node-0": ResumePoint(10, 0)}
    other = replace(settings, provenance={"code_digest": "other"})
    assert keep_resumable(trial(run), tmp_path, other, OnThisHost()) == {}
    assert list(tmp_path.iterdir()) == []


def test_a_trial_of_which_a_participant_has_lost_its_checkpoints_starts_anew_and_says_so(
    settings: ExecutionSettings, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = config(steps=40, nodes=2, checkpoint=CheckpointConfig(interval_rounds=2))
    steps = checkpoint_steps(run)[:2]

    def write(path: Path) -> str:
        path.write_bytes(b"data")
        return ""

    def keep(**stored: list[int]) -> dict[str, ResumePoint]:
        (tmp_path / "events").mkdir(exist_ok=True)
        prepare_trial(trial(run), tmp_path, settings)
        for name, at in stored.items():
            folder = snapshots.folder_of(tmp_path, name.replace("_", "-"))
            for step in at:
                snapshots.store(run, folder, write, step=step, round=0, events_bytes=0, values={})
        return keep_resumable(trial(run), tmp_path, settings, OnThisHost())

    points = keep(server=steps, node_0=steps, node_1=steps[:1])
    assert {name: point.step for name, point in points.items()} == {
        "server": steps[1], "node-0": steps[1], "node-1": steps[0],
    }  # fmt: skip
    shutil.rmtree(snapshots.folder_of(tmp_path, "node-1"))
    assert keep() == {}
    assert (
        f"starts anew: its newest checkpoints are too far apart (node-1 at step 0, server at step {steps[1]})"
        in capsys.readouterr().out
    )
    assert list(tmp_path.iterdir()) == []
