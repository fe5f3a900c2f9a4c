"""A study over four hosts by ssh: the bits and the files of the same study on one machine, whatever dies meanwhile."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.equivalence.participants import assert_bitwise_equal
from tests.multihost.testbed import Testbed
from tests.processes.runs import final_weights, write_corpus
from tests.processes.test_launch import wait_until

pytestmark = [pytest.mark.multihost, pytest.mark.xdist_group("multihost")]

ROOT = Path(__file__).resolve().parents[2]
SERVERS = ("host-0", "host-2")
STUDY = """\
schema: 1
name: far
question: Does distance change a bit?
run:
  nodes: 4
  budget_tokens: 2_048
  model: {num_layers: 2, d_model: 64, num_heads: 4, num_kv_heads: 2, num_experts: 16, expert_hidden: 128,
          vocab_size: 300}
  data: {corpus: corpus, tokenizer_vocab_size: 300, sequence_length: 16, global_batch_sequences: 8}
  sync: {interval_steps: 2}
  merge: {num_neighbours: 2, alpha: 0.3, interval_steps: 4, until_step: 100}
  round: {heartbeat_s: 0.5}
  checkpoint: {interval_rounds: 1}
  validation: {max_sequences: 8}
arms: {spes: {method: spes}}
report: {formats: [html]}
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory, four_hosts: Testbed) -> Path:
    """A user's folder with the study, its hosts, and what it gives on this machine alone."""
    folder = tmp_path_factory.mktemp("a user's folder")
    (folder / "corpus").mkdir()
    write_corpus(folder / "corpus")
    (folder / "far.yaml").write_text(STUDY, encoding="utf-8")
    lines = ["hosts:"]
    for host in four_hosts.hosts:
        work_dir = four_hosts.host_folder(host) / "work"
        lines += [f"  - name: {host}", f"    ssh: {host}", f"    address: {four_hosts.address(host)}",
                  f"    work_dir: {json.dumps(str(work_dir))}", f"    python: {sys.executable}",
                  f"    server: {'true' if host in SERVERS else 'false'}",
                  "    ssh_options: [-o, ServerAliveInterval=1, -o, ServerAliveCountMax=8]"]  # fmt: skip
    (folder / "hosts.yaml").write_text("\n".join(lines) + "\n", encoding="utf-8")
    process = start(folder, four_hosts, "local")
    assert process.wait(120) == 0, (folder / "local.log").read_text()
    return folder


def start(folder: Path, hosts: Testbed, where: str, *words: str) -> subprocess.Popen[bytes]:
    """The study's command, with results in a folder of their own and what it says in a log beside it."""
    argv = [sys.executable, "-m", "workbench.study", "far.yaml", "--results", where, "--reports", f"{where}-reports"]
    environment = {**hosts.environment(), "PYTHONPATH": str(ROOT), "XDG_CACHE_HOME": str(folder / "cache")}
    with (folder / f"{where}.log").open("ab") as log:
        return subprocess.Popen([*argv, *words], cwd=folder, env=environment, stdout=log, stderr=log)


def over_ssh(folder: Path, hosts: Testbed, where: str, *words: str) -> subprocess.Popen[bytes]:
    return start(folder, hosts, where, "launcher=ssh", "launcher.inventory=hosts.yaml", *words)


def trial_dir(folder: Path, where: str) -> Path:
    (found,) = (folder / where / "far" / "trials").glob("spes-*")
    return found


def rounds(folder: Path, where: str, node: int) -> int:
    files = list((folder / where / "far" / "trials").glob(f"spes-*/events/node-{node}.jsonl"))
    return files[0].read_text(encoding="utf-8").count('"kind": "round"') if files else 0


def files_of(trial: Path) -> set[str]:
    return {str(path.relative_to(trial)) for path in trial.rglob("*") if path.is_file()}


def no_process_on_any(hosts: Testbed) -> bool:
    return not any(hosts.processes(host) for host in hosts.hosts)


def test_a_study_over_ssh_gives_the_bits_and_the_files_of_the_local_one(hosts: Testbed, folder: Path) -> None:
    for host in hosts.hosts:
        hosts.shape(host, 100)
    process = over_ssh(folder, hosts, "far")
    assert process.wait(180) == 0, (folder / "far.log").read_text()
    here, there = trial_dir(folder, "local"), trial_dir(folder, "far")
    assert here.name == there.name
    assert_bitwise_equal(final_weights(there), final_weights(here))
    of_loopback = {"join.token", "server.address"}  # what a server leaves for nodes in the same folder
    assert files_of(there) == files_of(here) - of_loopback
    results = [json.loads((trial / "result.json").read_text(encoding="utf-8")) for trial in (here, there)]
    assert results[0].keys() == results[1].keys() and results[1]["status"] == "done"
    wait_until(lambda: no_process_on_any(hosts), 30)
    assert over_ssh(folder, hosts, "far").wait(120) == 0
    assert (folder / "far.log").read_text().count("checking 4 hosts") == 1, "where all is done no host is asked"


def test_a_killed_controller_and_a_host_that_vanishes_leave_no_process_and_cost_no_bit(
    hosts: Testbed, folder: Path
) -> None:
    """Two servers share the tensors, and the host that vanishes has one of them."""
    for host in hosts.hosts:
        hosts.shape(host, 20)
    two = "run.server.shards=2"
    process = over_ssh(folder, hosts, "lost", two)
    wait_until(lambda: rounds(folder, "lost", 2) >= 1 or process.poll() is not None, 120)
    os.kill(process.pid, signal.SIGKILL)
    process.wait()
    wait_until(lambda: no_process_on_any(hosts), 90)
    process = over_ssh(folder, hosts, "lost", two)
    wait_until(lambda: rounds(folder, "lost", 2) >= 3 or process.poll() is not None, 120)
    hosts.crash("host-2")
    assert process.wait(120) == 1
    said = (folder / "lost.log").read_text(encoding="utf-8")
    assert "host-2" in said
    wait_until(lambda: no_process_on_any(hosts), 90)
    hosts.boot("host-2")
    process = over_ssh(folder, hosts, "lost", two, "--retry-failed")
    assert process.wait(180) == 0, said
    assert_bitwise_equal(final_weights(trial_dir(folder, "lost")), final_weights(trial_dir(folder, "local")))
