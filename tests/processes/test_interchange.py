"""Exports for SkyPilot and compose: their files say what those tools read, and their commands run."""

from __future__ import annotations

import os
import re
import shlex
import shutil
import stat
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml

from spes_core.config import DataConfig
from spes_core.data.tokenize import prepare
from spes_core.invitation import Invitation
from spes_core.protocol import status
from spes_core.runfile import RunFile
from tests.processes.runs import Started, outputs, write_corpus
from tests.processes.test_by_hand import free_port, until
from workbench import commands
from workbench.processes import ProcessSpec

pytestmark = pytest.mark.processes

STUDY = """
schema: 1
name: small
question: Does it travel?
run:
  nodes: 2
  budget_tokens: 512
  model: {num_layers: 1, d_model: 16, num_heads: 2, num_kv_heads: 2, num_experts: 4, expert_hidden: 8, vocab_size: 300}
  data: {corpus: CORPUS, tokenizer_vocab_size: 300, sequence_length: 16, global_batch_sequences: 8}
  sync: {interval_steps: 2}
  merge: {num_neighbours: 1}
  validation: {max_sequences: 8}
arms:
  centralized: {method: centralized, role: reference}
  spes: {method: spes}
seeds: [0, 1]
launcher: {device: cpu}
"""


@pytest.fixture
def study(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A small study whose corpus is in the cache."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.chdir(tmp_path)
    corpus = tmp_path / "corpus"
    corpus.mkdir()
    write_corpus(corpus)
    prepare(DataConfig(corpus=str(corpus), tokenizer_vocab_size=300))
    (tmp_path / "small.yaml").write_text(STUDY.replace("CORPUS", str(corpus)))
    return tmp_path / "small.yaml"


def read(path: Path) -> dict[str, Any]:
    tree: dict[str, Any] = yaml.safe_load(path.read_text())
    return tree


def test_a_compose_file_s_commands_train_its_trial(study: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert commands.main(["export-compose", str(study)]) == 0
    told, here = capsys.readouterr().out, study.parent
    assert "holds secrets" in told and "left out: centralized-seed=0" in told
    tree = read(here / "small.compose.yaml")
    assert set(tree) == {"services", "networks"}
    services = tree["services"]
    assert list(services) == ["spes-server", "node-0", "node-1"]
    known = {"build", "image", "environment", "working_dir", "networks", "restart", "command", "volumes"}
    assert all(set(service) <= known | {"healthcheck", "depends_on"} for service in services.values())
    assert services["node-1"]["depends_on"] == {"spes-server": {"condition": "service_healthy"}}
    secrets = [mount["source"] for mount in services["node-1"]["volumes"] if "keys" in mount["source"]]
    assert [Path(path).name for path in secrets] == ["node-1.invite"]
    sources = [mount["source"] for service in services.values() for mount in service["volumes"]]
    assert all((here / source).exists() for source in sources)

    folder, address = here / "small.compose.files", f"127.0.0.1:{free_port()}"
    trial = move_here(folder, address)
    processes = {}
    for name, service in services.items():
        argv = [word if word.startswith("-") else mounted(word, service, here) for word in service["command"]]
        spec = ProcessSpec(name=name, argv=(sys.executable, *argv[1:]), env=service["environment"])
        processes[name] = Started(spec, here / f"{name}.log")
        if name == "spes-server":
            until((trial / "server.address").exists, processes[name])
            check = services[name]["healthcheck"]["test"]
            assert check[:6] == ["CMD", "python", "-m", "spes_core.server", "status", "spes-server:5200"]
            assert status.main([address, check[6], mounted(check[7], service, here)]) == 0
    found = outputs(processes)
    assert all(code == 0 for code, _ in found.values()), found
    assert (trial / "weights" / "final.safetensors").exists()


def mounted(word: str, service: dict[str, Any], here: Path) -> str:
    """A path in a container, where it lies on this machine; any other word as it is."""
    inside = f"{service['working_dir']}/{word}"
    for mount in service["volumes"]:
        if inside == mount["target"] or inside.startswith(f"{mount['target']}/"):
            return str(here / mount["source"]) + inside[len(mount["target"]) :]
    return word


def move_here(folder: Path, address: str) -> Path:
    """Give the run an address and folders of this machine in place of those in its containers; its trial's folder."""
    (path,) = folder.glob("*/run.json")
    run = RunFile.load(path)
    assert run.server_address == "0.0.0.0:5200" and (folder / run.data_dir / "header.json").exists()
    replace(run, server_address=address, credentials=str(folder / str(run.credentials))).save(path)
    for file in folder.glob("*/keys/*.invite"):
        assert Invitation.load(file).address == "spes-server:5200"
        replace(Invitation.load(file), address=address).save(file)
    return path.parent


def test_a_sky_task_gives_each_machine_its_commands(study: Path, capsys: pytest.CaptureFixture[str]) -> None:
    here = study.parent
    assert commands.main(["export-sky", str(study), "hardware.memory_gb=48", "launcher.device=auto"]) == 0
    assert "left out: centralized-seed=0" in capsys.readouterr().out
    tree = read(here / "small.sky.yaml")
    assert list(tree) == ["name", "num_nodes", "resources", "workdir", "file_mounts", "envs", "setup", "run"]
    assert tree["num_nodes"] == 2 and tree["resources"]["accelerators"] == "L40S:1"
    ((there, source),) = tree["file_mounts"].items()
    assert there == "~/small.sky.files" and (here / source).is_dir()
    assert stat.S_IMODE((here / source).stat().st_mode) == 0o700
    told = {rank: ran_by(tree["run"], rank, here) for rank in range(3)}
    names = sorted(path.parent.name for path in (here / source).glob("*/run.json"))
    (data,) = (here / source / "data").iterdir()
    for rank in range(2):
        nodes = [line for line in told[rank] if line.startswith("-m spes_core.node")]
        assert nodes == [
            f"-m spes_core.node {name}/keys/node-{rank}.invite --data data/{data.name} --folder {name}/node-{rank}"
            for name in names
        ]
    servers = [f"-m spes_core.server {name}/run.json" for name in names]
    assert sorted(set(told[0]) - set(told[1])) == sorted([*servers, *(line for line in told[0] if "node-0" in line)])
    assert told[2] == []


def test_folders_names_and_questions_of_any_kind_are_quoted(study: Path, capsys: pytest.CaptureFixture[str]) -> None:
    study.write_text(study.read_text().replace("question: ", 'question: "So?\\nservices: {evil: {}}" # '))
    out = study.parent / "o d" / "it's $HOME.yaml"
    out.parent.mkdir()
    for command in ("export-sky", "export-compose"):
        out.unlink(missing_ok=True)
        assert commands.main([command, str(study), "--out", "o d/it's $HOME.yaml"]) == 0
        tree = read(out)
        assert shlex.quote("o d/it's $HOME.yaml") in capsys.readouterr().out.splitlines()[-1]
        assert "evil" not in tree.get("services", {})
        if command == "export-sky":
            ((_, source),) = tree["file_mounts"].items()
            assert (study.parent / source).is_dir(), "seen from where sky is called"
            assert any("spes_core.server" in line for line in ran_by(tree["run"], 0, out.parent))
        shutil.rmtree(out.with_name("it's $HOME.files"))


def ran_by(script: str, rank: int, home: Path) -> list[str]:
    """The arguments of each python that the script starts on one machine."""
    tools = home / f"tools-{rank}"
    tools.mkdir()
    for name, body in {"python": f'echo "$*" >> {shlex.quote(str(tools / "told"))}', "sudo": "cat"}.items():
        (tools / name).write_text(f"#!/bin/sh\n{body}\n")
        (tools / name).chmod(0o755)
    environment = {"HOME": str(home), "PATH": f"{tools}:{os.environ['PATH']}", "SKYPILOT_NODE_RANK": str(rank)}
    environment["SKYPILOT_NODE_IPS"] = "192.0.2.1\n192.0.2.2"
    done = subprocess.run(["bash", "-c", script], env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return (tools / "told").read_text().splitlines() if (tools / "told").exists() else []


def test_an_export_replaces_nothing_and_names_what_cannot_be_exported(
    study: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (study.parent / "small.sky.files").mkdir()
    before = sorted(study.parent.iterdir())
    assert commands.main(["export-sky", str(study)]) == 2
    assert "small.sky.files exists already; name another file" in capsys.readouterr().err
    assert commands.main(["export-compose", str(study), "--trial", "nobody"]) == 2
    assert (
        "--trial (nobody) must be a trial that exchanges in rounds; there are: spes-seed=0-" in capsys.readouterr().err
    )
    assert commands.main(["export-sky", str(study), "--out", "other.yaml", "~arms.spes"]) == 2
    assert "no trial exchanges in rounds" in capsys.readouterr().err
    study.write_text(study.read_text().replace("num_layers: 1", "num_layers: 2"))
    assert commands.main(["export-compose", str(study), "run.server.shards=2"]) == 2
    assert re.search(r"server\.shards \(2, in spes-seed=0-\w+\) must be 1: what is exp", capsys.readouterr().err)
    assert commands.main(["export-sky", str(study), "--out", "/proc/none/x.yaml"]) == 2
    assert "--out: /proc/none/x.yaml cannot be written" in capsys.readouterr().err
    assert sorted(study.parent.iterdir()) == before
