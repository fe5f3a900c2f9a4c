"""A study on a real Slurm: the bits of a local run, whatever happens to its jobs and its controller."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.multihost.jobs import wait_until
from tests.multihost.slurmd import Slurm
from tests.small_corpora import texts

pytestmark = [pytest.mark.multihost, pytest.mark.xdist_group("slurm")]

STUDY = """\
schema: 1
name: small
question: Does a cluster give the same bits?
run:
  nodes: 2
  budget_tokens: 1_536
  model: {num_layers: 1, d_model: 16, num_heads: 2, num_kv_heads: 2, num_experts: 4, expert_hidden: 16, vocab_size: 300}
  data: {corpus: corpus, tokenizer_vocab_size: 300, validation_fraction: 0.2, sequence_length: 32,
         global_batch_sequences: 8}
  sync: {interval_steps: 2}
  validation: {max_sequences: 8}
  checkpoint: {interval_steps: 2}
arms:
  dilico: {method: dilico}
  spes: {method: spes}
resources: {parallel_trials: 2, timeout: 10min}
launcher: {kind: slurm, device: cpu, slurm: {memory_gb: 4}}
report: {formats: [html]}
"""
LONG = ["run.budget_tokens=768_000", "~arms.dilico"]
"""3000 steps of one trial: it runs until something ends it."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("a user folder")
    (folder / "corpus").mkdir()
    for number, text in enumerate(texts(80)):
        (folder / "corpus" / f"{number}.txt").write_text(text, encoding="utf-8")
    (folder / "small.yaml").write_text(STUDY, encoding="utf-8")
    return folder


def start(folder: Path, slurm: Slurm, *arguments: str) -> subprocess.Popen[str]:
    root = str(Path(__file__).resolve().parents[2])
    env = {**os.environ, **slurm.env, "PYTHONPATH": root, "XDG_CACHE_HOME": str(folder / "cache"), "COLUMNS": "200"}
    command = [sys.executable, "-m", "workbench.study", *arguments]
    return subprocess.Popen(command, cwd=folder, env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)


def run(folder: Path, slurm: Slurm, *arguments: str, status: int = 0) -> str:
    process = start(folder, slurm, *arguments)
    said, _ = process.communicate(timeout=200)
    assert process.returncode == status, said
    return said


def weights(results: Path) -> dict[str, bytes]:
    return {
        file.parents[1].name: file.read_bytes() for file in results.glob("small/trials/*/weights/final.safetensors")
    }


def trial(results: Path) -> Path:
    (found,) = results.glob("small/trials/spes-*")
    return found


def steps(results: Path) -> int:
    files = list(results.glob("small/trials/spes-*/events/node-0.jsonl"))
    return sum('"train"' in line for file in files for line in file.read_text().splitlines())


def job_of(results: Path) -> str:
    found = list(results.glob("small/trials/spes-*/slurm.json"))
    return str(json.loads(found[0].read_text())["job"] or "") if found else ""


def test_a_study_of_two_jobs_gives_the_bits_of_a_local_run(folder: Path, slurm: Slurm) -> None:
    said = run(folder, slurm, "small.yaml", "--results", "cluster")
    assert "submitted 2 jobs" in said
    run(folder, slurm, "small.yaml", "launcher.kind=local", "--results", "local")
    assert weights(folder / "cluster") == weights(folder / "local") != {}
    jobs = {str(json.loads(file.read_text())["job"]) for file in (folder / "cluster").glob("small/trials/*/slurm.json")}
    assert len(jobs) == 2 and {slurm.jobs()[job] for job in jobs} == {"COMPLETED"}
    assert "done" in run(folder, slurm, "status", "small", "--results", "cluster")
    assert (folder / "reports/small/index.html").exists()


def test_requeue_and_a_killed_controller_resume_bit_for_bit(folder: Path, slurm: Slurm) -> None:
    # Rounds on a slow link: no machine is so fast that the trial is over before it is put back into the queue.
    slow = ["run.link.rtt_ms=40", "run.link.emulate=true"]
    results, options = folder / "picked", ["small.yaml", "run.budget_tokens=25_600", "~arms.dilico", *slow]
    first = start(folder, slurm, *options, "--results", "picked")
    wait_until(lambda: steps(results) >= 4)
    assert "running" in run(folder, slurm, "status", "small", "--results", "picked")
    job = job_of(results)
    first.send_signal(signal.SIGKILL)
    first.communicate()
    slurm.command("scontrol", "requeue", job)
    wait_until(lambda: slurm.jobs()[job] == "PENDING")
    assert f"job {job} PENDING" in run(folder, slurm, "status", "small", "--results", "picked")
    slurm.command("scontrol", "update", f"JobId={job}", "StartTime=now")
    assert "1 trials have a job already" in run(folder, slurm, *options, "--results", "picked")
    assert json.loads((trial(results) / "result.json").read_text())["resumed_at_step"] > 0
    run(folder, slurm, *options, "launcher.kind=local", "--results", "whole")
    assert weights(results) == weights(folder / "whole") != {}


def test_detached_jobs_are_seen_cancelled_and_leave_nothing(folder: Path, slurm: Slurm) -> None:
    results, options = folder / "left", ["small.yaml", *LONG, "--results", "left"]
    run(folder, slurm, *options, "--detach")
    job = job_of(results)
    wait_until(lambda: steps(results) >= 2)
    run(folder, slurm, *options, "--detach")
    assert job_of(results) == job, "it is not submitted twice"
    assert f"cancelled 1 jobs: {job}" in run(folder, slurm, "cancel", "small", "--results", "left")
    assert slurm.jobs()[job] == "CANCELLED"
    wait_until(lambda: not processes_of(trial(results)), 30)
    assert json.loads((trial(results) / "result.json").read_text())["status"] == "interrupted"


def test_ctrl_c_cancels_and_a_job_killed_from_outside_says_so(folder: Path, slurm: Slurm) -> None:
    results, options = folder / "stopped", ["small.yaml", *LONG, "--results", "stopped"]
    first = start(folder, slurm, *options)
    wait_until(lambda: steps(results) >= 2)
    job = job_of(results)
    first.send_signal(signal.SIGINT)
    assert first.wait(60) == 130
    assert slurm.jobs()[job] == "CANCELLED"
    second = start(folder, slurm, *options)
    wait_until(lambda: job_of(results) not in ("", job) and slurm.jobs()[job_of(results)] == "RUNNING")
    slurm.command("scancel", job_of(results))
    said, _ = second.communicate(timeout=90)
    assert second.returncode == 1
    assert f"Slurm ended job {job_of(results)} (CANCELLED)" in said


def processes_of(trial_dir: Path) -> list[str]:
    found = subprocess.run(["ps", "-eo", "args"], capture_output=True, text=True, check=True).stdout.splitlines()
    return [line for line in found if str(trial_dir) in line]


def test_what_sbatch_refuses_is_one_line_and_leaves_no_job(folder: Path, slurm: Slurm) -> None:
    said = run(folder, slurm, "small.yaml", "launcher.slurm.partition=none", "--results", "refused", status=1)
    assert "invalid partition" in said
    assert not list((folder / "refused").glob("small/trials/*/slurm.json"))
