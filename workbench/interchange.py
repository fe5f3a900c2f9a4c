"""A study for those who live elsewhere: a SkyPilot task (`export_sky`) or a compose file (`export_compose`).

Beside the file a folder holds what its commands need, ready to be copied to machines: the tokenized text, and of each
trial run.json and the certificates and invitations of `spes_core.invitation`, which are secrets. The server is known
as `spes-server` everywhere, so certificates can be made before any machine exists.
"""

from __future__ import annotations

import os
import shlex
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import yaml

from spes_core.invitation import SUFFIX, invite
from spes_core.runfile import RunFile
from workbench.corpora import PreparedCorpus
from workbench.errors import StudyError
from workbench.plan import predict
from workbench.processes import environment
from workbench.spec import Study
from workbench.trials import Corpus, Trial, Variant, identify

HOST = "spes-server"
"""Name of the server on every machine of a run."""
_PORT = 5200
_ACCELERATORS = ((24, "L4"), (48, "L40S"), (80, "A100-80GB"), (141, "H200"))
"""Device memory (1e9 bytes) and the accelerator, as SkyPilot names it, that has so much."""
_DOCKERFILE = """\
FROM python:3.12-slim
COPY . /src
RUN pip install --no-cache-dir -c /src/constraints.txt /src
"""

_RANK = "@@"
"""Stands for the machine's number until words are quoted; no name of a trial holds it."""

Tree = dict[str, Any]


@dataclass(frozen=True, kw_only=True)
class Exported:
    """What an export has written."""

    file: Path
    folder: Path
    """What the file's commands need; it holds secrets."""
    trials: tuple[str, ...]
    left_out: tuple[str, ...]
    """Trials that need no server, or were not asked for."""


def export_sky(
    study: Study, variants: Sequence[Variant], corpora: Mapping[Corpus, PreparedCorpus], out: Path
) -> Exported:
    """Write one multi-node task that runs the study's trials one after another. Raises StudyError."""
    trials = _trials(study, variants, corpora)
    served = [trial for trial in trials if trial.config.sync.exchange == "rounds"]
    if not served:
        raise StudyError(["no trial exchanges in rounds: run the study with python -m workbench.study on one machine"])
    tree = _sky_task(study, served, corpora, out)
    return _write(study, out, tree, served, corpora, [trial.name for trial in trials if trial not in served])


def export_compose(
    study: Study, variants: Sequence[Variant], corpora: Mapping[Corpus, PreparedCorpus], out: Path, name: str | None
) -> Exported:
    """Write the services of one trial (None: the first that has rounds). Raises StudyError."""
    trials = _trials(study, variants, corpora)
    served = [trial for trial in trials if trial.config.sync.exchange == "rounds"]
    chosen = served[:1] if name is None else [trial for trial in served if trial.name == name]
    if not chosen:
        names = ", ".join(trial.name for trial in served) or "none"
        raise StudyError([f"--trial ({name}) must be a trial that exchanges in rounds; there are: {names}"])
    tree = _compose(study, chosen[0], corpora, out)
    others = [trial.name for trial in trials if trial != chosen[0]]
    return _write(study, out, tree, chosen, corpora, others)


def _trials(study: Study, variants: Sequence[Variant], corpora: Mapping[Corpus, PreparedCorpus]) -> list[Trial]:
    trials = identify(study, variants, lambda corpus: corpora[corpus].header.digest)
    if wrong := next((trial for trial in trials if len(trial.config.servers) > 1), None):
        shown = f"({wrong.config.server.shards}, in {wrong.name})"
        raise StudyError([f"server.shards {shown} must be 1: what is exported has one server; it changes no bit"])
    return trials


def _folder_of(out: Path) -> Path:
    return out.with_name(f"{out.name.removesuffix('.yaml').removesuffix('.yml')}.files")


def _run_of(study: Study, trial: Trial, data_dir: str) -> RunFile:
    port = study.launcher.port or _PORT
    return RunFile(
        trial=trial.name,
        config=trial.config,
        data_dir=data_dir,
        server_address=f"0.0.0.0:{port}",
        device=study.launcher.device,
        threads=study.launcher.threads,
    )


def _write(
    study: Study,
    out: Path,
    tree: Tree,
    trials: Sequence[Trial],
    corpora: Mapping[Corpus, PreparedCorpus],
    left_out: Sequence[str],
) -> Exported:
    """The folder first, then the file that names it. Neither replaces anything."""
    folder = _folder_of(out)
    if there := next((path for path in (out, folder) if path.exists()), None):
        raise StudyError([f"--out: {there} exists already; name another file, or remove it"])
    part = folder.with_name(f"{folder.name}.part")
    try:
        shutil.rmtree(part, ignore_errors=True)
        part.mkdir(mode=0o700)
        for trial in trials:
            _write_trial(study, trial, corpora[Corpus.of(trial.config.data)], part)
        part.rename(folder)
        question = " ".join(study.question.split())
        head = f"# {study.name}: {question}\n# {folder.name} beside this file holds secrets: keep it private.\n"
        out.write_text(head + yaml.dump(tree, Dumper=_Dumper, sort_keys=False, width=10_000), encoding="utf-8")
    except OSError as error:
        raise StudyError([f"--out: {out} cannot be written: {error}; name another file"]) from error
    finally:
        shutil.rmtree(part, ignore_errors=True)
    return Exported(file=out, folder=folder, trials=tuple(trial.name for trial in trials), left_out=tuple(left_out))


class _Dumper(yaml.SafeDumper):
    """Scripts line by line, and nothing by reference."""

    def ignore_aliases(self, data: object) -> bool:
        return True


_Dumper.add_representer(
    str,
    lambda dumper, text: dumper.represent_scalar("tag:yaml.org,2002:str", text, style="|" if "\n" in text else None),
)


def _write_trial(study: Study, trial: Trial, corpus: PreparedCorpus, folder: Path) -> None:
    place = folder / _data_of(trial, corpus)
    if not place.exists():
        shutil.copytree(corpus.folder, place)
    keys = folder / trial.name / "keys"
    for node in range(trial.config.nodes):
        (keys.parent / f"node-{node}").mkdir(parents=True)
    run = _run_of(study, trial, str(corpus.folder))
    invite(run, keys, f"{HOST}:{run.server_address.rpartition(':')[2]}")
    config = run.config
    if config.init.kind == "weights":
        shutil.copyfile(config.init.weights or "", folder / _weights_of(trial))
        config = replace(config, init=replace(config.init, weights=_weights_of(trial)))
    # Relative to the folder, in which every command is run.
    data_dir, shown = _data_of(trial, corpus), f"{trial.name}/keys"
    replace(run, config=config, data_dir=data_dir, credentials=shown).save(folder / trial.name / "run.json")


def _data_of(trial: Trial, corpus: PreparedCorpus) -> str:
    return f"data/{corpus.header.digest[:16]}"


def _weights_of(trial: Trial) -> str:
    return f"first-weights-{(trial.config.init.digest or '')[:16]}.safetensors"


def _server_argv(trial: Trial) -> list[str]:
    return ["python", "-m", "spes_core.server", f"{trial.name}/run.json"]


def _node_argv(trial: Trial, corpus: PreparedCorpus, node: int | str) -> list[str]:
    """What starts a node, in the folder that `_write` makes."""
    weights = ["--init", _weights_of(trial)] if trial.config.init.kind == "weights" else []
    invitation = f"{trial.name}/keys/node-{node}{SUFFIX}"
    folder = ["--folder", f"{trial.name}/node-{node}"]
    return ["python", "-m", "spes_core.node", invitation, "--data", _data_of(trial, corpus), *weights, *folder]


def _sky_task(study: Study, trials: Sequence[Trial], corpora: Mapping[Corpus, PreparedCorpus], out: Path) -> Tree:
    """A task whose machines all run the same script: the first has the server and a node, the others a node each."""
    rank, folder = "$SKYPILOT_NODE_RANK", _folder_of(out).name
    script = [
        "set -e",
        f"cd ~/{shlex.quote(folder)}",
        "# Certificates name the server so, whatever address it has got.",
        'head=$(echo "$SKYPILOT_NODE_IPS" | head -n 1)',
        f"grep -q ' {HOST}$' /etc/hosts || echo \"$head {HOST}\" | sudo tee -a /etc/hosts > /dev/null",
    ]
    for trial in trials:
        words = map(shlex.quote, _node_argv(trial, corpora[Corpus.of(trial.config.data)], _RANK))
        # Also within a word that is quoted: the quotes are closed around it.
        node = " ".join(word.replace(_RANK, f"'\"{rank}\"'" if "'" in word else rank) for word in words)
        script += [
            f"# {trial.name}",
            f'if [ "{rank}" = 0 ]; then {shlex.join(_server_argv(trial))} & server=$!; fi',
            f'if [ "{rank}" -lt {trial.config.nodes} ]; then {node}; fi',
            f'if [ "{rank}" = 0 ]; then wait $server; fi',
        ]
    return {
        "name": "".join(letter if letter.isalnum() else "-" for letter in study.name.lower()).strip("-"),
        "num_nodes": max(trial.config.nodes for trial in trials),
        "resources": _resources(study, trials),
        "workdir": ".",
        "file_mounts": {f"~/{folder}": _from_here(out.with_name(folder))},
        "envs": _environment(study, trials[0]),
        "setup": "pip install -c constraints.txt .\n",
        "run": "\n".join(script) + "\n",
    }


def _from_here(path: Path) -> str:
    """A path as SkyPilot takes it: seen from the folder in which it is called, as its workdir is."""
    relative = os.path.relpath(path)
    return relative if relative.startswith("..") else f"./{relative}"


def _resources(study: Study, trials: Sequence[Trial]) -> Tree:
    """What one machine needs: GPUs where the study plans for their memory, else cores and memory."""
    ranks = max(trial.config.parallel.ranks_per_node for trial in trials)
    predicted_gb = max(predict(trial.config).memory_gb for trial in trials)
    wanted_gb, disk = study.hardware.memory_gb, {"disk_size": 256}
    if wanted_gb is not None and study.launcher.device != "cpu":
        name = next((name for memory_gb, name in _ACCELERATORS if memory_gb >= wanted_gb), "B200")
        return {"accelerators": f"{name}:{ranks}", **disk}
    cores = max(2, ranks * study.launcher.threads + 1)
    # torch takes 1 GB before it does anything; the first machine holds the server's copy of the model too.
    return {"cpus": f"{cores}+", "memory": f"{max(4, round(2 * ranks * predicted_gb + 4))}+", **disk}


def _compose(study: Study, trial: Trial, corpora: Mapping[Corpus, PreparedCorpus], out: Path) -> Tree:
    """A server and its nodes, each of which sees its own secrets alone."""
    corpus, folder, at = corpora[Corpus.of(trial.config.data)], f"./{_folder_of(out).name}", "/spes"
    shown = ["python", "-m", "spes_core.server", "status", f"{HOST}:{study.launcher.port or _PORT}"]
    usual: Tree = {
        "image": "spes-workbench",
        "environment": _environment(study, trial),
        "working_dir": at,
        "networks": ["spes"],
        "restart": "on-failure:3",
    }
    weights = [_weights_of(trial)] if trial.config.init.kind == "weights" else []
    fixed = [_mount(f"{folder}/{name}", f"{at}/{name}", fixed=True) for name in [_data_of(trial, corpus), *weights]]
    context = os.path.relpath(Path.cwd(), out.absolute().parent)
    services: Tree = {
        HOST: {
            "build": {"context": context, "dockerfile_inline": _DOCKERFILE},
            **usual,
            "command": _server_argv(trial),
            "volumes": [*fixed, _mount(f"{folder}/{trial.name}", f"{at}/{trial.name}")],
            "healthcheck": {
                "test": ["CMD", *shown, "--credentials", f"{trial.name}/keys"],
                "interval": "15s",
                "timeout": "30s",
                "start_period": "60s",
                "retries": 5,
            },
        }
    }
    for node in range(trial.config.nodes):
        own, invitation = f"{trial.name}/node-{node}", f"{trial.name}/keys/node-{node}{SUFFIX}"
        own_mounts = [_mount(f"{folder}/{invitation}", f"{at}/{invitation}", fixed=True)]
        services[f"node-{node}"] = {
            **usual,
            **(_gpus(trial, node) if study.launcher.device == "cuda" else {}),
            "command": _node_argv(trial, corpus, node),
            "volumes": [*fixed, *own_mounts, _mount(f"{folder}/{own}", f"{at}/{own}")],
            "depends_on": {HOST: {"condition": "service_healthy"}},
        }
    return {"services": services, "networks": {"spes": {}}}


def _gpus(trial: Trial, node: int) -> Tree:
    """The GPUs of a node where the study asks for some."""
    ranks = trial.config.parallel.ranks_per_node
    ids = [str(node * ranks + rank) for rank in range(ranks)]
    device = {"driver": "nvidia", "device_ids": ids, "capabilities": ["gpu"]}
    return {"deploy": {"resources": {"reservations": {"devices": [device]}}}}


def _mount(source: str, target: str, *, fixed: bool = False) -> Tree:
    """A folder or file of this machine; in the long form, since names of trials may hold any character but a slash."""
    mount: Tree = {"type": "bind", "source": source, "target": target}
    return mount | ({"read_only": True} if fixed else {})


def _environment(study: Study, trial: Trial) -> dict[str, str]:
    return environment(_run_of(study, trial, ""))
