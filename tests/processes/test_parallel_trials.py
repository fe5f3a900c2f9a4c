"""Several trials at once, with stand-ins for their processes: whatever ends the controller, nothing is left or lost."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import textwrap
from pathlib import Path

import psutil
import pytest

from tests.processes.test_launch import wait_until
from workbench.summaries import summaries

pytestmark = [
    pytest.mark.processes,
    pytest.mark.skipif(sys.platform != "linux", reason="needs Linux: the fork server ends its children with prctl"),
]

NAMES = ("a", "b", "c")
STUDY = {
    "name": "s",
    "arms": [],
    "trials": [{"id": name, "name": name, "arm": name, "role": "treatment", "axes": {}, "seed": 0} for name in NAMES],
}
CONTROLLER = """
    import sys
    from pathlib import Path
    from tests.unit.test_execute import CONFIG, ExecutionSettings, ForkLauncher, StandIns, Trial, run_trial
    from workbench.budget import Budget, Need
    from workbench.errors import TrialBusy
    from workbench.stopping import stop_on_signals
    from workbench.store import Stored
    from workbench.together import Crew

    folder, action, most = Path(sys.argv[1]), sys.argv[2], int(sys.argv[3])
    common = {"study": "s", "role": "treatment", "axes": {}, "seed": 0, "config": CONFIG}
    trials = [Trial(id=name, name=name, arm=name, **common) for name in "abc"]
    settings = ExecutionSettings(data_dir=folder / "data")

    def run(trial, slot):
        nodes = {"node-0": (action,), "node-1": (action,)}
        stand_ins = StandIns(launcher, {"server": ("exit", "0")} | nodes)
        try:
            result = run_trial(trial, folder / "trials" / trial.name, settings, stand_ins, None, request)
        except TrialBusy:
            return Stored(status="busy", result={})
        return Stored(status=result["status"], result=result)

    with stop_on_signals() as request, ForkLauncher(("json",)) as launcher:
        budget = Budget(cores=9, memory_bytes=9, gpus=(), divides_gpus=True)
        crew = Crew(run, lambda trial: Need(cores=1, memory_bytes=0, gpus=0), budget, most, request)
        for trial, stored in crew.carry_out(trials, lambda trial: None):
            print(trial.name, stored.status, flush=True)
"""


def controller(folder: Path, action: str, most: int = 3) -> subprocess.Popen[str]:
    script = textwrap.dedent(CONTROLLER)
    command = [sys.executable, "-c", script, str(folder), action, str(most)]
    return subprocess.Popen(command, stdout=subprocess.PIPE, text=True)


def nodes_of(started: subprocess.Popen[str], number: int) -> list[psutil.Process]:
    """All processes under a controller, once as many nodes as that sleep."""
    found: list[psutil.Process] = []

    def all_sleep() -> bool:
        found[:] = psutil.Process(started.pid).children(recursive=True)
        return len(found) == 1 + number

    wait_until(all_sleep, 60)
    return found


def statuses(folder: Path) -> dict[str, str]:
    (folder / "study.json").write_text(json.dumps(STUDY))
    return {summary.name: summary.status for summary in summaries(folder)}


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_whatever_ends_the_controller_of_three_trials_leaves_no_process_and_none_running(
    tmp_path: Path, number: int
) -> None:
    first = controller(tmp_path, "sleep")
    processes = nodes_of(first, 6)
    assert set(statuses(tmp_path).values()) == {"running"}
    first.send_signal(number)
    said, _ = first.communicate(timeout=60)
    assert psutil.wait_procs(processes, timeout=20)[1] == []
    assert statuses(tmp_path) == dict.fromkeys(NAMES, "interrupted")
    assert len(said.splitlines()) == (3 if number == signal.SIGTERM else 0)
    again = controller(tmp_path, "train")
    said, _ = again.communicate(timeout=60)
    assert sorted(said.splitlines()) == ["a done", "b done", "c done"]


def test_two_controllers_of_the_same_trials_run_each_once(tmp_path: Path) -> None:
    both = [controller(tmp_path, "train", most) for most in (3, 1)]
    said = [process.communicate(timeout=60)[0].splitlines() for process in both]
    assert statuses(tmp_path) == dict.fromkeys(NAMES, "done")
    for name in NAMES:
        assert any(f"{name} done" in lines for lines in said)
        events = (tmp_path / "trials" / name / "events" / "node-0.jsonl").read_text()
        assert events.count("first_step") == 1
