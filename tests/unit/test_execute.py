"""Executing a trial with stand-ins for its processes: folder, progress, first failure, interruption, timeout."""

import json
import os
import signal
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import psutil
import pytest

from spes_core.config import DataConfig, ModelConfig, RunConfig, SyncConfig, to_dict
from spes_core.runfile import RunFile
from workbench import execute, watch
from workbench.errors import TrialBusy
from workbench.execute import ExecutionSettings, run_trial
from workbench.failures import died_silently
from workbench.launch.forkserver import ForkLauncher
from workbench.launch.launcher import Launcher, LaunchError, Running
from workbench.processes import ProcessSpec
from workbench.progress import Progress
from workbench.results import build_result
from workbench.settings import Divergence
from workbench.stopping import DivergenceRule, StopRequest
from workbench.trials import Trial

pytestmark = [
    pytest.mark.processes,
    pytest.mark.skipif(sys.platform != "linux", reason="needs Linux: the fork server ends its children with prctl"),
]

STUB = str(Path(__file__).parents[1] / "processes" / "stub.py")
CONFIG = RunConfig(
    nodes=2,
    budget_tokens=2 * 32 * 16,
    model=ModelConfig(num_layers=1, d_model=16, num_heads=2, num_kv_heads=2, expert_hidden=16, vocab_size=300),
    data=DataConfig(tokenizer_vocab_size=300, sequence_length=16),
)
TRIAL = Trial(
    id="0123456789abcdef",
    name="spes-seed=0-01234567",
    study="a study",
    arm="spes",
    role="treatment",
    axes={"sync.interval_steps": 50},
    seed=0,
    config=CONFIG,
)
TRAINS = {"server": ("exit", "0"), "node-0": ("train",), "node-1": ("train",)}


class StandIns:
    """A launcher that starts a stand-in, told by ``actions`` what to do, for every process of a plan."""

    def __init__(self, launcher: Launcher, actions: dict[str, tuple[str, ...]]) -> None:
        self.launcher, self.actions, self.started = launcher, actions, []
        self.wait_ready, self.signal = launcher.wait_ready, launcher.signal
        self.wait, self.close, self.resident_bytes = launcher.wait, launcher.close, launcher.resident_bytes
        self.resume_points, self.stage, self.collect = launcher.resume_points, launcher.stage, launcher.collect

    def start(self, spec: ProcessSpec, log: Path) -> Running:
        action = self.actions[spec.name]
        if action[0] in ("train", "explode"):
            action = (action[0], spec.name, spec.argv[3], *action[1:])
        argv = (sys.executable, STUB, *action)
        process = self.launcher.start(ProcessSpec(name=spec.name, argv=argv, env=spec.env), log)
        self.started.append(process)
        return process


@pytest.fixture(scope="module")
def launcher() -> Iterator[ForkLauncher]:
    with ForkLauncher(("json",)) as launcher:
        yield launcher


@pytest.fixture
def settings(tmp_path: Path) -> ExecutionSettings:
    data_dir = tmp_path / "corpus ü"
    data_dir.mkdir()
    header = {"digest": "d1", "unigram_entropy_nats": 5.5, "train": {"tokens": 7}, "skipped": {"empty": 1}}
    (data_dir / "header.json").write_text(json.dumps(header))
    return ExecutionSettings(data_dir=data_dir, provenance={"commit": "c0ffee"})


@pytest.fixture
def trial_dir(tmp_path: Path) -> Path:
    return tmp_path / "results é" / "a study" / "trials" / TRIAL.name


def run(
    launcher: Launcher,
    actions: dict[str, tuple[str, ...]],
    trial_dir: Path,
    settings: ExecutionSettings,
    **options: Any,
) -> dict[str, Any]:
    stand_ins = StandIns(launcher, actions)
    result = run_trial(TRIAL, trial_dir, settings, stand_ins, **options)
    assert all(process.returncode is not None for process in stand_ins.started), "no process is left"
    assert json.loads((trial_dir / "result.json").read_text(encoding="utf-8")) == result
    assert build_result(trial_dir) == result, "result.json can be recomputed from the other files"
    return result


def test_a_trial_that_ends_well_is_done(launcher: Launcher, trial_dir: Path, settings: ExecutionSettings) -> None:
    result = run(launcher, TRAINS, trial_dir, settings)
    assert (result["status"], result["error"]) == ("done", None)
    assert result["trial"] == {
        "id": "0123456789abcdef",
        "name": "spes-seed=0-01234567",
        "study": "a study",
        "arm": "spes",
        "role": "treatment",
        "method": "spes",
        "seed": 0,
        "axes": {"sync.interval_steps": 50},
    }
    assert result["config"] == to_dict(CONFIG)
    assert result["data"] == {
        "digest": "d1",
        "unigram_entropy_nats": 5.5,
        "train_tokens": 7,
        "skipped": {"empty": 1},
    }
    assert result["provenance"] == {"commit": "c0ffee"}
    assert result["metrics"]["train/loss"] == 2.0
    assert result["started_at"] < result["finished_at"]
    saved = RunFile.load(trial_dir / "run.json")
    assert (saved.config, saved.data_dir, saved.trial) == (CONFIG, str(settings.data_dir), TRIAL.name)


def test_progress_follows_the_event_files_at_most_twice_a_second(
    launcher: Launcher, trial_dir: Path, settings: ExecutionSettings
) -> None:
    seen: list[tuple[float, Progress]] = []
    actions = TRAINS | {"server": ("fail-later",)}
    run(
        launcher,
        actions,
        trial_dir,
        settings,
        on_progress=lambda progress: seen.append((time.monotonic(), progress)),
    )
    gaps = [later - earlier for (earlier, _), (later, _) in pairwise(seen[:-1])]
    assert all(gap >= 0.49 for gap in gaps)
    last = seen[-1][1]
    assert (last.trial, last.step, last.total_steps, last.loss_nats) == (TRIAL.name, 2, 2, 2.0)
    assert last.tokens_per_s == 20.0


@pytest.mark.parametrize(
    ("action", "message"),
    [
        (("complain",), "the corpus is empty"),
        (("exit", "7"), "node-1 ended with exit status 7"),
        (("raise",), "node-1 ended with exit status 1: RuntimeError: broken"),
        (("segfault",), "node-1 was ended by signal 11 (Segmentation fault)"),
    ],
)
def test_the_first_process_to_fail_is_named_with_its_own_words(
    launcher: Launcher, trial_dir: Path, settings: ExecutionSettings, action: tuple[str, ...], message: str
) -> None:
    actions = {"server": ("fail-later",), "node-0": ("sleep",), "node-1": action}
    started = time.monotonic()
    result = run(launcher, actions, trial_dir, settings)
    assert time.monotonic() - started < 10
    assert (result["status"], result["error"]["process"]) == ("failed", "node-1")
    assert result["error"]["message"] == message
    assert "eval/loss" not in result["metrics"]


def test_the_error_carries_the_last_log_lines(launcher: Launcher, trial_dir: Path, settings: ExecutionSettings) -> None:
    result = run(launcher, TRAINS | {"node-0": ("complain",)}, trial_dir, settings)
    assert result["error"]["log_tail"] == ["something", "error: the corpus is empty"]


def test_a_process_that_cannot_be_started_fails_the_trial(
    launcher: Launcher, trial_dir: Path, settings: ExecutionSettings
) -> None:
    class NoLogs(StandIns):
        def start(self, spec: ProcessSpec, log: Path) -> Running:
            return super().start(spec, log.parent / "absent" / "log" if spec.name == "node-0" else log)

    stand_ins = NoLogs(launcher, TRAINS | {"server": ("sleep",)})
    result = run_trial(TRIAL, trial_dir, settings, stand_ins)
    assert result["status"] == "failed"
    assert "node-0 cannot be started" in result["error"]["message"]
    assert [process.returncode for process in stand_ins.started] == [-signal.SIGTERM]


def test_a_launcher_that_never_gets_ready_fails_the_trial_and_empties_nothing(
    launcher: Launcher, trial_dir: Path, settings: ExecutionSettings
) -> None:
    def never() -> None:
        raise LaunchError("the fork server is not ready after 120 s")

    assert run(launcher, TRAINS | {"node-0": ("complain",)}, trial_dir, settings)["status"] == "failed"
    before = {path: path.read_bytes() for folder in ("logs", "events") for path in (trial_dir / folder).iterdir()}
    stand_ins = StandIns(launcher, TRAINS)
    stand_ins.wait_ready = never
    for folder in (trial_dir, trial_dir.with_name("another")):
        result = run_trial(TRIAL, folder, settings, stand_ins)
        assert (result["status"], result["error"]["message"]) == ("failed", "the fork server is not ready after 120 s")
        assert json.loads((folder / "result.json").read_text()) == result == build_result(folder)
    assert before == {path: path.read_bytes() for path in before}
    assert stand_ins.started == []


def test_a_timeout_says_how_far_the_trial_came(
    launcher: Launcher, trial_dir: Path, settings: ExecutionSettings
) -> None:
    settings = ExecutionSettings(data_dir=settings.data_dir, timeout_s=0.8)
    result = run(launcher, TRAINS | {"server": ("sleep",), "node-0": ("sleep",)}, trial_dir, settings)
    assert result["status"] == "timeout"
    assert result["error"]["message"].startswith("resources.timeout (0.8 s) was reached at step 2 of 2")


def test_a_stop_request_interrupts_within_ten_seconds_even_what_ignores_sigterm(
    launcher: Launcher, trial_dir: Path, settings: ExecutionSettings
) -> None:
    request = StopRequest()
    threading.Timer(0.5, lambda: setattr(request, "signal", signal.SIGTERM)).start()
    actions = {"server": ("sleep",), "node-0": ("ignore-sigterm",), "node-1": ("sleep",)}
    started = time.monotonic()
    result = run(launcher, actions, trial_dir, settings, stop_request=request)
    assert time.monotonic() - started < 10
    assert (result["status"], result["error"]["message"]) == ("interrupted", "stopped by SIGTERM")


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_to_the_controller_leaves_a_result_and_no_process(
    tmp_path: Path, settings: ExecutionSettings, trial_dir: Path, number: int
) -> None:
    script = textwrap.dedent("""
        import sys
        from pathlib import Path
        from tests.unit.test_execute import *
        sleeping = StandIns(ForkLauncher(("json",)), dict.fromkeys(("server", "node-0", "node-1"), ("sleep",)))
        settings = ExecutionSettings(data_dir=Path(sys.argv[1]))
        print(run_trial(TRIAL, Path(sys.argv[2]), settings, sleeping)["status"])
        print(signal.getsignal(signal.SIGINT) is signal.default_int_handler)
    """)
    command = [sys.executable, "-c", script, str(settings.data_dir), str(trial_dir)]
    controller = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    deadline = time.monotonic() + 20
    while len(children := psutil.Process(controller.pid).children(recursive=True)) < 4:
        assert time.monotonic() < deadline
        time.sleep(0.05)
    controller.send_signal(number)
    output, _ = controller.communicate(timeout=10)
    assert (output.split(), controller.returncode) == (["interrupted", "True"], 0)
    assert json.loads((trial_dir / "result.json").read_text())["status"] == "interrupted"
    psutil.wait_procs(children, timeout=5)
    assert not any(child.is_running() for child in children)


def test_what_a_killed_controller_left_is_cleared_and_the_trial_runs_again(
    launcher: Launcher, trial_dir: Path, settings: ExecutionSettings
) -> None:
    (trial_dir / "events").mkdir(parents=True)
    (trial_dir / "events" / "node-0.jsonl").write_text('{"kind": "train", "step": 1')
    (trial_dir / "run.json").write_text("{torn")
    result = run(launcher, TRAINS, trial_dir, settings)
    assert result["status"] == "done"
    assert len(result["curves"]["train"]) == 2


@pytest.mark.parametrize("content", ['{"a":', "{}", "[]", "null", '"done"'])
def test_a_result_torn_by_hand_is_no_result_and_the_trial_runs(
    launcher: Launcher, trial_dir: Path, settings: ExecutionSettings, content: str
) -> None:
    trial_dir.mkdir(parents=True, exist_ok=True)
    (trial_dir / "result.json").write_text(content)
    result = run(launcher, TRAINS, trial_dir, settings)
    assert result["status"] == "done"


def test_a_done_trial_is_not_run_again_and_a_failed_one_is(
    launcher: Launcher, trial_dir: Path, settings: ExecutionSettings
) -> None:
    assert run(launcher, TRAINS | {"node-0": ("exit", "1")}, trial_dir, settings)["status"] == "failed"
    done = run(launcher, TRAINS, trial_dir, settings)
    assert done["status"] == "done"
    assert run(launcher, dict.fromkeys(TRAINS, ("exit", "1")), trial_dir, settings) == done


def test_two_controllers_cannot_run_one_trial(launcher: Launcher, trial_dir: Path, settings: ExecutionSettings) -> None:
    request = StopRequest()
    sleeping = StandIns(launcher, dict.fromkeys(TRAINS, ("sleep",)))
    thread = threading.Thread(target=run_trial, args=(TRIAL, trial_dir, settings, sleeping, None, request))
    thread.start()
    while len(sleeping.started) < 3:
        time.sleep(0.02)
    with pytest.raises(TrialBusy, match="is being run by another process"):
        run_trial(TRIAL, trial_dir, settings, sleeping)
    request.signal = signal.SIGINT
    thread.join()
    assert json.loads((trial_dir / "result.json").read_text())["status"] == "interrupted"


def test_an_exception_in_the_progress_callback_leaves_no_process(
    launcher: Launcher, trial_dir: Path, settings: ExecutionSettings
) -> None:
    def fail(progress: Progress) -> None:
        raise RuntimeError("display broke")

    sleeping = StandIns(launcher, dict.fromkeys(TRAINS, ("sleep",)))
    with pytest.raises(RuntimeError, match="display broke"):
        run_trial(TRIAL, trial_dir, settings, sleeping, fail)
    assert all(process.returncode is not None for process in sleeping.started)
    assert not (trial_dir / "result.json").exists()


def test_gradients_are_one_torchrun_group_with_the_error_of_its_rank(
    launcher: Launcher, trial_dir: Path, settings: ExecutionSettings
) -> None:
    config = RunConfig(
        nodes=2, budget_tokens=CONFIG.budget_tokens, model=CONFIG.model, data=CONFIG.data,
        sync=SyncConfig(exchange="gradients"),
    )  # fmt: skip
    trial = Trial(**{**vars(TRIAL), "config": config})
    stand_ins = StandIns(launcher, {"torchrun": ("complain",)})
    result = run_trial(trial, trial_dir, settings, stand_ins)
    assert (result["error"]["process"], result["error"]["message"]) == ("torchrun", "the corpus is empty")
    assert len(stand_ins.started) == 1 and os.getpgid(0) != stand_ins.started[0].pid


@pytest.mark.parametrize("lingers_s", ["300", "0"])
def test_a_rule_ends_a_trial_and_decides_the_same_when_the_trial_was_quicker(
    launcher: Launcher, trial_dir: Path, settings: ExecutionSettings, lingers_s: str
) -> None:
    rule = DivergenceRule(Divergence(factor=2.0, points=2))
    actions = {"server": ("exit", "0"), "node-0": ("train",), "node-1": ("explode", lingers_s)}
    result = run(launcher, actions, trial_dir, settings, rules=[rule])
    assert (result["status"], result["error"]["process"]) == ("diverged", "node-1")
    assert (
        "9 at step 3, 2 points in a row above divergence.factor (2) times its lowest (1)" in result["error"]["message"]
    )
    assert result["error"]["log_tail"] == ["about to explode"]


def test_a_trial_above_its_memory_limit_is_stopped_as_out_of_memory(
    launcher: Launcher, trial_dir: Path, settings: ExecutionSettings
) -> None:
    settings = ExecutionSettings(data_dir=settings.data_dir, memory_limit_bytes=300_000_000)
    actions = {"server": ("sleep",), "node-0": ("sleep",), "node-1": ("hoard", "400000000")}
    result = run(launcher, actions, trial_dir, settings)
    assert result["status"] == "oom"
    assert "GB together, above resources.trial_memory_gb (0.3); raise it" in result["error"]["message"]


def test_a_process_killed_while_the_kernel_counts_a_kill_for_memory_is_out_of_memory(
    launcher: Launcher, trial_dir: Path, settings: ExecutionSettings, monkeypatch: pytest.MonkeyPatch
) -> None:
    counts = iter((4, 5))
    actions = {"server": ("sleep",), "node-0": ("kill",), "node-1": ("sleep",)}
    assert run(launcher, actions, trial_dir, settings)["status"] == "failed"
    monkeypatch.setattr(watch, "oom_kills", lambda: next(counts))
    result = run(launcher, actions, trial_dir, settings)
    assert (result["status"], result["error"]["process"]) == ("oom", "node-0")


def test_what_an_earlier_attempt_said_in_the_same_log_explains_no_later_one(
    launcher: Launcher, trial_dir: Path, settings: ExecutionSettings, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(execute, "keep_resumable", lambda *_: {})  # as a resume: the logs stay
    (trial_dir / "logs").mkdir(parents=True)
    earlier = "error: the corpus is empty\ntorch.OutOfMemoryError: CUDA out of memory\n"
    for name in TRAINS:
        (trial_dir / "logs" / f"{name}.log").write_text(earlier)
    actions: dict[str, tuple[str, ...]] = {"server": ("sleep",), "node-0": ("sleep",), "node-1": ("kill",)}
    result = run(launcher, actions, trial_dir, settings)
    assert (result["status"], result["error"]["process"], result["error"]["log_tail"]) == ("failed", "node-1", [])
    assert died_silently(result)
    assert "corpus" not in result["error"]["message"] and "CUDA" not in result["error"]["message"]
    stopped = StopRequest()
    stopped.reason = "enough"
    assert run(launcher, actions, trial_dir, settings, stop_request=stopped)["error"]["log_tail"] == []
    assert (trial_dir / "logs" / "node-1.log").read_text() == earlier


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
def test_a_launcher_that_dies_is_named_and_none_of_the_processes_that_die_with_it(
    trial_dir: Path, settings: ExecutionSettings, number: int
) -> None:
    actions: dict[str, tuple[str, ...]] = dict.fromkeys(TRAINS, ("ignore-sigterm",))
    logs = [trial_dir / "logs" / f"{name}.log" for name in TRAINS]
    with ForkLauncher(("json",)) as mortal:

        def kill(progress: Progress) -> None:
            if all(log.exists() and "ready" in log.read_text() for log in logs):
                os.kill(mortal.pid, number)

        result = run(mortal, actions, trial_dir, settings, on_progress=kill)
    assert (result["status"], result["error"]["process"], result["error"]["log_tail"]) == ("failed", None, [])
    assert "the launcher of its processes died" in result["error"]["message"]
    assert died_silently(result)


def test_processes_see_the_gpus_that_were_given_to_their_trial(
    launcher: Launcher, trial_dir: Path, settings: ExecutionSettings
) -> None:
    seen: list[str | None] = []

    class Noting(StandIns):
        def start(self, spec: ProcessSpec, log: Path) -> Running:
            seen.append(spec.env.get("CUDA_VISIBLE_DEVICES"))
            return super().start(spec, log)

    for gpus in (None, (), ("2", "GPU-ab")):
        (trial_dir / "result.json").unlink(missing_ok=True)
        settings = ExecutionSettings(data_dir=settings.data_dir, gpus=gpus)
        run_trial(TRIAL, trial_dir, settings, Noting(launcher, TRAINS))
    assert seen == [None] * 3 + [""] * 3 + ["2,GPU-ab"] * 3
