"""How Slurm ends a trial's job before its last step, what the trial's result says of it, and how the trial goes on.

Slurm looks at time limits twice a minute, so all jobs of this file run at the same time.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import pytest

from tests.multihost.jobs import Jobs, in_thread, main_process, wait_until
from tests.multihost.slurmd import Slurm
from workbench.slurm.queue import job_states
from workbench.stopping import PruningRule, Rule
from workbench.store import Stored

pytestmark = [pytest.mark.multihost, pytest.mark.xdist_group("slurm")]
_END_S = 240.0
MORE_MEMORY = "raise launcher.slurm.memory_gb"


@pytest.fixture(scope="module")
def ends(user_folder: Path, slurm: Slurm) -> Callable[[str], Any]:
    """What became of each trial, by its name, once that is known."""
    first, second = (f"+launcher.slurm.extra.nodelist={node}" for node in slurm.nodes)
    trials = {
        "stuck": (_stuck, Jobs(user_folder, "stuck", first, "+launcher.slurm.setup=[sleep 600]")),
        "announced": (_announced, Jobs(user_folder, "announced", first, "launcher.slurm.time=5min")),
        "fallen": (_fallen, Jobs(user_folder, "fallen", second, "resources.timeout=5min", "launcher.slurm.time=10min")),
        "pruned": (_pruned, Jobs(user_folder, "pruned", first)),
    }
    if slurm.limits_memory:
        large = ["run.model.d_model=768", "run.model.expert_hidden=4096", "run.model.num_layers=4"]
        trials["large"] = (_ended, Jobs(user_folder, "large", first, "launcher.slurm.memory_gb=0.7", *large))
        trials["tiny"] = (_ended, Jobs(user_folder, "tiny", first, "launcher.slurm.memory_gb=0.03"))
    begun: dict[str, Future[Any]] = {
        name: in_thread(lambda carry_out=carry_out, jobs=jobs: carry_out(slurm, jobs))
        for name, (carry_out, jobs) in trials.items()
    }
    return lambda name: begun[name].result(_END_S)


@pytest.fixture(scope="module")
def weights_here(user_folder: Path) -> bytes:
    """The final weights of the same trial on this machine."""
    here = Jobs(user_folder, "here")
    assert here.run_here()["status"] == "done"
    return here.weights


def message(stored: Stored) -> str:
    return str(stored.result["error"]["message"])


def _ended(slurm: Slurm, jobs: Jobs) -> Stored:
    return jobs.start().result(_END_S)


def _stuck(slurm: Slurm, jobs: Jobs) -> Stored:
    """A job whose setup hangs, as on a file system that does not answer: nobody hears Slurm's notice."""
    end = jobs.start()
    wait_until(lambda: slurm.jobs()[jobs.job] == "RUNNING")
    slurm.command("scontrol", "update", f"JobId={jobs.job}", "EndTime=now")
    return end.result(_END_S)


def test_a_job_that_reaches_its_time_limit_is_a_timeout_that_names_the_setting(ends: Callable[[str], Any]) -> None:
    stored = ends("stuck")
    assert stored.status == "timeout"
    assert message(stored).partition("(")[2] == (
        "TIMEOUT (TimeLimit)): raise launcher.slurm.time; --retry-failed goes on from the newest checkpoint"
    )
    assert "DUE TO TIME LIMIT" in stored.result["error"]["log_tail"][-1]


def _announced(slurm: Slurm, jobs: Jobs) -> tuple[Jobs, str]:
    """Slurm tells the job of its time limit; the job goes back into the queue, and runs again in the end."""
    end = jobs.start()
    wait_until(lambda: jobs.steps >= 4)
    job = jobs.job
    for process in main_process(slurm, job).children(recursive=True):
        process.suspend()  # it must not come to its end before that
    slurm.command("scontrol", "update", f"JobId={job}", "EndTime=now+60")
    wait_until(lambda: slurm.jobs()[job] == "PENDING")
    slurm.command("scontrol", "update", f"JobId={job}", "StartTime=now+2", "TimeLimit=10")
    assert end.result(_END_S).status == "done"
    assert jobs.job == job
    return jobs


def test_a_job_that_is_told_of_its_time_limit_requeues_itself_and_goes_on_bit_for_bit(
    ends: Callable[[str], Any], weights_here: bytes
) -> None:
    jobs = ends("announced")
    assert jobs.result["resumed_at_step"] > 0
    assert jobs.weights == weights_here


def _fallen(slurm: Slurm, jobs: Jobs) -> tuple[Jobs, list[Stored]]:
    """A machine fails under a job that must not be requeued; the next job has used up its time; the last ends well."""
    node, told = slurm.nodes[1], []
    end = jobs.start()
    slurm.command("scontrol", "update", f"JobId={jobs.job}", "Requeue=0")
    wait_until(lambda: jobs.steps >= 4)
    slurm.crash(node)
    told.append(end.result(_END_S))
    slurm.boot(node)
    end = jobs.start()
    at = jobs.steps
    wait_until(lambda: jobs.steps >= at + 4)
    slurm.command("scancel", "--signal=USR2", jobs.job)  # Slurm's notice of the time limit, sent by hand
    told.append(end.result(_END_S))
    told.append(jobs.start().result(_END_S))  # at once, while Slurm still has the last job
    return jobs, told


def test_a_failed_machine_and_used_up_time_are_told_apart_and_cost_no_bit(
    ends: Callable[[str], Any], weights_here: bytes
) -> None:
    jobs, (fallen, spent, done) = ends("fallen")
    assert fallen.status == "failed"
    assert "(NODE_FAIL (NodeDown)): its machine failed; --retry-failed goes on" in message(fallen)
    assert spent.status == "timeout"
    assert message(spent) == (
        "launcher.slurm.time was reached, and with it resources.timeout; raise them or lower budget_tokens"
    )
    assert done.status == "done" and done.result["resumed_at_step"] > 0
    assert jobs.weights == weights_here


def test_memory_that_runs_out_is_oom_and_names_the_setting(ends: Callable[[str], Any], slurm: Slurm) -> None:
    if not slurm.limits_memory:
        pytest.skip("jobs are held to their memory by control groups of version 1, which are not writable here")
    large, tiny = ends("large"), ends("tiny")
    assert large.status == tiny.status == "oom"
    assert "was killed (SIGKILL) by the system" in message(large) and MORE_MEMORY in message(large)
    assert large.result["error"]["process"].startswith("node-")
    # The job itself was killed, in a step: Slurm calls that FAILED, and the job's log says why.
    assert message(tiny).startswith("Slurm ended job ") and MORE_MEMORY in message(tiny)


def _rule(jobs: Jobs) -> list[Rule]:
    return [PruningRule(jobs.trial.config, lambda place, loss: place >= 3)]


def _pruned(slurm: Slurm, jobs: Jobs) -> tuple[Jobs, Stored]:
    return jobs, jobs.start(lambda: _rule(jobs)).result(_END_S)


def test_a_rule_of_the_controller_prunes_a_trial_within_its_job(user_folder: Path, ends: Callable[[str], Any]) -> None:
    jobs, stored = ends("pruned")
    assert stored.status == "pruned"
    here = Jobs(user_folder, "pruned here")
    assert message(stored) == here.run_here(_rule(here))["error"]["message"]
    assert not (jobs.dir / "weights" / "final.safetensors").exists()


def test_what_squeue_has_forgotten_is_asked_of_the_accounting(ends: Callable[[str], Any], slurm: Slurm) -> None:
    if not slurm.keeps_accounts:
        pytest.skip("needs Slurm's accounting (apt-get install slurmdbd mariadb-server-core)")
    stuck, (fallen, told) = ends("stuck"), ends("fallen")
    ended = {message(stuck).split()[3]: "TIMEOUT", message(told[0]).split()[3]: "NODE_FAIL", fallen.job: "COMPLETED"}
    cancelled = slurm.command("sbatch", "--parsable", "--hold", "--output=/dev/null", "--wrap=true").strip()
    slurm.command("scancel", cancelled)
    array = slurm.command("sbatch", "--parsable", "--array=0-1", "--output=/dev/null", "--wrap=true").strip()
    ended |= {cancelled: "CANCELLED", f"{array}_0": "COMPLETED", f"{array}_1": "COMPLETED"}
    asking = ["sacct", "--allocations", "--noheader", "--parsable2", "--format=JobID,State", "--jobs"]
    bases = ",".join({job.partition("_")[0] for job in ended})
    known = [f"{job}|{state}" for job, state in ended.items()]
    wait_until(lambda: all(line in slurm.command(*asking, bases) for line in known))  # it is told a little later
    slurm.forget_jobs()
    assert slurm.jobs() == {}
    told_now = job_states([*ended, "9999"])
    assert {job: state.state for job, state in told_now.items()} == {**ended, "9999": "GONE"}
