"""The plan of a preset or a study: figures worked out by hand, nothing heavy imported, nothing created."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from spes_core.config import LinkConfig, RunConfig, SyncConfig
from spes_core.link import GOODPUT
from spes_core.model.counting import flops_per_token
from workbench.costs import Machine, cost, with_link
from workbench.plancommand import main

ROOT = Path(__file__).resolve().parents[2]
BASE = RunConfig(nodes=4, link=LinkConfig(uplink_mbps=100, downlink_mbps=100, rtt_ms=10))
MACHINE = Machine(device_tflops=1e-3, price_per_gpu_hour=3.0)


def test_a_preset_is_planned_without_torch_hydra_or_grpc(tmp_path: Path) -> None:
    """Design, section 8: 7.33B parameters, 1.70B active, 2.50B trained on 4 nodes, fp32 uplink 10.0 GB a round."""
    code = "import sys; from workbench.plancommand import main; status = main(sys.argv[1:]); "
    code += "print(sorted({'torch', 'hydra', 'grpc', 'pandas', 'mlflow'} & sys.modules.keys())); sys.exit(status)"
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-c", code, "--model", "7b", "--nodes", "4", "--price", "2"]
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert re.search(r"^7,333,287,936 +1,696,143,360 +2,501,449,728$", done.stdout, re.MULTILINE)
    assert re.search(r"^a round +\d+ +10\.01 ", done.stdout, re.MULTILINE)
    assert "too small  too small   fits" in done.stdout
    assert done.stdout.splitlines()[-1] == "[]"
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("model", ["tiny", "small", "1b", "2b", "7b", "9b"])
@pytest.mark.parametrize("method", ["spes", "centralized"])
def test_every_preset_plans(model: str, method: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--model", model, "--method", method, "--nodes", "16"]) == 0
    assert "GPU-hours" in capsys.readouterr().out


def test_time_is_steps_and_rounds_one_after_another() -> None:
    """By hand: FLOPs over speed for each step; for each round the larger direction and three round trips."""
    owned = BASE.make_partition().experts_by_node[0]
    flops = flops_per_token(BASE.model, owned, BASE.data.sequence_length).total
    step_s = 8 * 128 * flops / 1e9
    steps, rounds = 1_000_000 // (32 * 128), 5
    found = cost(BASE, MACHINE)
    assert found.step_s == pytest.approx(step_s)
    assert found.wall_h * 3600 == pytest.approx(steps * step_s + rounds * found.round_s)
    assert found.utilisation == pytest.approx(steps * step_s / (steps * step_s + rounds * found.round_s))
    assert found.gpu_hours == pytest.approx(4 * found.wall_h)
    assert found.price == pytest.approx(3 * found.gpu_hours)


def test_the_larger_direction_decides_a_round() -> None:
    """Four nodes of eight experts send S + E/4 and receive S + 3E/4, after a merge S + E, on 12.5 MB/s less headers."""
    no_merge = replace(BASE, merge=replace(BASE.merge, enabled=False))
    expert = 3 * 128 * 128 * 4 * 4
    shared = 2 * 4096 * 128 + 128 + 4 * (2 * 128 + 2 * 128 + 4 * 128 * 128 + 8 * 128)
    down_bytes = 4 * shared + 6 * expert
    assert cost(no_merge, MACHINE).round_s == pytest.approx(0.03 + down_bytes / (12.5e6 * GOODPUT))


def test_without_rounds_nothing_is_exchanged() -> None:
    alone = replace(BASE, sync=SyncConfig(exchange="none"))
    assert cost(alone, MACHINE).round_s == 0
    assert cost(alone, MACHINE).utilisation == 1


def test_recomputed_activations_cost_another_forward_pass() -> None:
    block = replace(BASE, compute=replace(BASE.compute, activation_checkpointing="block"))
    flops = flops_per_token(BASE.model, BASE.make_partition().experts_by_node[0], 128)
    assert cost(block, MACHINE).step_s / cost(BASE, MACHINE).step_s == pytest.approx(1 + flops.forward / flops.total)


def test_a_link_of_the_run_itself_stays() -> None:
    assert with_link(BASE, 1.0, 1.0, 0.0) is BASE
    assert with_link(RunConfig(), 5.0, 6.0, 7.0).link == LinkConfig(uplink_mbps=5.0, downlink_mbps=6.0, rtt_ms=7.0)


def test_a_study_lists_its_trials_and_why_they_will_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    assert main([str(ROOT / "studies/quickstart.yaml"), "run.nodes=4", "--price", "1"]) == 0
    out = capsys.readouterr().out
    assert "quickstart: 3 trials" in out
    assert len(re.findall(r"will run: its corpus has not been prepared$", out, re.MULTILINE)) == 3
    assert "363,072" in out
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ([], "name either a study file, or a preset"),
        (["--model", "7c"], "valid names: 1b, 2b, 7b"),
        (["--model", "7b", "sync.interval=3"], 'did you mean "interval_steps"'),
        (["--model", "7b", "study.yaml"], "name either a study file, or a preset"),
        (["--model", "7b", "nodes=4", "merge"], "is not of the form key=value"),
        (["--model", "7b", "model.top_k=64"], "model.top_k"),
        (["nosuch.yaml"], "no such file"),
    ],
)
def test_bad_input_has_status_2(arguments: list[str], says: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(arguments) == 2
    assert says in capsys.readouterr().err
