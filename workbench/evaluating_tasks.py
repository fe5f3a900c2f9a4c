"""Evaluation tasks by name: what the harness calls them, what a group holds, and where their offline copies lie.

Task files are read as text, so that names, versions and copies are known without loading the harness (or torch).

A task is asked for as NAME, or NAME:SHOTS for another number of examples in the prompt than its own; `SUITE` stands for
the tasks of the SPES paper with their shots.
"""

from __future__ import annotations

import difflib
import hashlib
import importlib.util
import json
import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import yaml

from spes_core.errors import DataError
from spes_core.filedigest import file_digest

SUITE = "spes_suite"
SUITE_TASKS = (
    "sciq",
    "piqa",
    "winogrande",
    "arc_easy",
    "social_iqa",
    "openbookqa",
    "boolq",
    "arc_challenge:25",
    "hellaswag:10",
)
"""The evaluation of arXiv 2602.11543."""

NORMALIZED = ("arc_challenge", "hellaswag", "openbookqa", "piqa")
"""Tasks of which the length-normalised accuracy (acc_norm) is the one that is usually quoted."""

_FILES = {
    "arc_challenge": "arc/arc_challenge.yaml",
    "arc_easy": "arc/arc_easy.yaml",
    "blimp": "blimp/_blimp.yaml",
    "boolq": "super_glue/boolq/default.yaml",
    "cb": "super_glue/cb/default.yaml",
    "commonsense_qa": "commonsense_qa/default.yaml",
    "copa": "super_glue/copa/default.yaml",
    "gsm8k": "gsm8k/gsm8k.yaml",
    "hellaswag": "hellaswag/hellaswag.yaml",
    "mrpc": "glue/mrpc/default.yaml",
    "nq_open": "nq_open/nq_open.yaml",
    "openbookqa": "openbookqa/openbookqa.yaml",
    "piqa": "piqa/piqa.yaml",
    "rte": "glue/rte/default.yaml",
    "sciq": "sciq/sciq.yaml",
    "social_iqa": "siqa/siqa.yaml",
    "sst2": "glue/sst2/default.yaml",
    "winogrande": "winogrande/default.yaml",
}
"""Where the harness keeps the tasks that are asked for most; all others are found by a search that takes seconds."""
_FOLDERS = {"mrpc": "glue_mrpc", "rte": "glue_rte", "sst2": "glue_sst2"}
"""Folder of a task's copy where it has another name."""
_SPLITS = ("training_split", "validation_split", "test_split", "fewshot_split")
_NAMED = re.compile(rb"^[\"']?(?:task|group)[\"']?:[ \t]*[\"']?([\w.+/-]+)[\"']?[ \t]*(?:#.*)?$", re.MULTILINE)
_SPEC = re.compile(r"(?P<name>[\w.+/-]+?)(?::(?P<shots>\d{1,3}))?")
_INSTALL = "lm-eval is not installed: pip install 'spes-workbench[evaluation]'"


@dataclass(frozen=True, kw_only=True)
class Task:
    """One task, or a group of them whose score is the mean of its parts."""

    name: str
    """The harness's name."""
    shots: int
    """Examples in the prompt."""
    is_own_shots: bool
    """Whether that is the task's own number."""
    version: str
    file: Path
    config: dict[str, Any]
    """What the task's file says, with what it includes; functions as text."""
    parts: tuple[Task, ...] = ()

    @property
    def label(self) -> str:
        """Its name in results: with the shots where they are not the task's own."""
        return self.name if self.is_own_shots else f"{self.name}:{self.shots}"

    @property
    def leaves(self) -> tuple[Task, ...]:
        """The tasks that are run for it."""
        return tuple(leaf for part in self.parts for leaf in part.leaves) if self.parts else (self,)

    @property
    def headline(self) -> str:
        """The metric that stands for the task in tables, where it has it."""
        return "acc_norm" if self.name in NORMALIZED else "acc"


@dataclass(frozen=True, kw_only=True)
class Copy:
    """The offline copy of a task's data."""

    files: dict[str, Path]
    """By split."""
    digest: str
    """SHA-256 (hex) over the digests of the files."""

    @property
    def text(self) -> str:
        """File names, for readers of results."""
        return ", ".join(f"{path.parent.name}/{path.name}" for path in self.files.values())


def expand(specs: Iterable[str]) -> list[str]:
    """The suite replaced by its tasks; no task twice."""
    return list(dict.fromkeys(task for spec in specs for task in (SUITE_TASKS if spec == SUITE else (spec,))))


def mistakes(specs: Sequence[str]) -> Iterator[tuple[int, str]]:
    """Index and reason of every name that is no task. Raises DataError when the harness is not installed."""
    for index, spec in enumerate(specs):
        if spec == SUITE:
            continue
        match = _SPEC.fullmatch(spec)
        if match is None:
            yield index, f"({spec}) must be the name of a task, or NAME:SHOTS such as arc_challenge:25"
        elif not _is_known(match["name"]):
            yield index, f"({spec}) is not a task of lm-eval{_nearest(match['name'])}"


def resolve(specs: Iterable[str]) -> list[Task]:
    """The tasks with these names (`mistakes` must have found none)."""
    tasks = []
    for spec in expand(specs):
        match = _SPEC.fullmatch(spec)
        assert match is not None
        tasks.append(_task(match["name"], None if match["shots"] is None else int(match["shots"])))
    return list({task.label: task for task in tasks}.values())


def find_copy(task: Task, data_dir: Path) -> Copy:
    """The copy of a task's data in ``data_dir``: <task>/<split>.jsonl[.gz], of BLiMP blimp/<paradigm>.jsonl[.gz].

    <split>_N is a sample of N rows. Raises DataError when no split that is evaluated is there, or a file is unreadable.
    """
    if task.config.get("dataset_path") == "nyu-mll/blimp":
        folder, names = data_dir / "blimp", {"train": str(task.config["dataset_name"])}
    else:
        folder = data_dir / _FOLDERS.get(task.name, task.name)
        names = {split: split for key in _SPLITS if (split := task.config.get(key))}
    found = {split: path for split, name in names.items() if (path := _split_file(folder, name)) is not None}
    evaluated = [split for key in ("test_split", "validation_split") if (split := task.config.get(key))]
    if not any(split in found for split in evaluated):
        wanted = " or ".join(f"{names[split]}.jsonl.gz" for split in evaluated) or "no file that is known"
        raise DataError(f"data_dir has no copy: {folder} holds no {wanted}; without data_dir the hub is asked")
    digests = {split: file_digest(path) for split, path in sorted(found.items())}
    return Copy(files=found, digest=hashlib.sha256(json.dumps(digests).encode()).hexdigest())


def task_file(task: Task, copy: Copy | None) -> str:
    """The YAML of a task that includes the harness's own and says what is different: shots, and files for the hub.

    Where a copy has no split for the examples in the prompt, they come from the evaluated one, without the item itself.
    """
    content: dict[str, Any] = {"include": str(task.file), "task": task.name}
    if not task.is_own_shots:
        content["num_fewshot"] = task.shots
    if copy is not None:
        files = {split: str(path) for split, path in copy.files.items()}
        content |= {"dataset_path": "json", "dataset_name": None, "dataset_kwargs": {"data_files": files}}
        present = {key: split if (split := task.config.get(key)) in files else None for key in _SPLITS}
        if task.shots and not (present["fewshot_split"] or present["training_split"]):
            evaluated = present["test_split"] or present["validation_split"]
            present |= {"test_split": evaluated, "fewshot_split": evaluated}
        content |= present
    return yaml.safe_dump(content, sort_keys=False)


def evaluated_split(task: Task, copy: Copy | None) -> str | None:
    """The split that is scored."""
    splits = [split for key in ("test_split", "validation_split") if (split := task.config.get(key))]
    return next((split for split in splits if copy is None or split in copy.files), None)


def _split_file(folder: Path, name: str) -> Path | None:
    candidates = [folder / f"{name}.jsonl.gz", folder / f"{name}.jsonl"]
    candidates += sorted(folder.glob(f"{name}_[0-9]*.jsonl.gz"))
    return next((path.absolute() for path in candidates if path.is_file()), None)


def _task(name: str, shots: int | None) -> Task:
    file = _file_of(name)
    config = _read(file)
    own = int(config.get("num_fewshot") or 0)
    members = config.get("task") if "group" in config else None
    parts = tuple(_task(part, shots) for part in members or ())
    return Task(
        name=name,
        shots=parts[0].shots if parts else own if shots is None else shots,
        is_own_shots=all(part.is_own_shots for part in parts) if parts else shots is None or shots == own,
        version=str((config.get("metadata") or {}).get("version", "none")),
        file=file,
        config=config,
        parts=parts,
    )


def _is_known(name: str) -> bool:
    try:
        _task(name, None)
    except (KeyError, TypeError):
        return False  # not there, or a group whose members are more than names
    return True


def _file_of(name: str) -> Path:
    """The file that defines a task. Raises KeyError."""
    if name in _FILES:
        return _root() / _FILES[name]
    paradigm = _root() / "blimp" / f"{name.removeprefix('blimp_')}.yaml"
    if name.startswith("blimp_") and paradigm.exists():
        return paradigm
    return _all_files()[name]


@cache
def _all_files() -> dict[str, Path]:
    """Every task and group of the harness with its file; a search through some ten thousand files."""
    paths = sorted(path for suffix in ("yaml", "yml") for path in _root().rglob(f"*.{suffix}"))
    return {name.decode(): path for path in paths for name in _NAMED.findall(path.read_bytes())}


@cache
def _root() -> Path:
    """The folder of the harness's tasks. Raises DataError."""
    spec = importlib.util.find_spec("lm_eval")
    if spec is None or spec.origin is None:
        raise DataError(_INSTALL)
    return Path(spec.origin).parent / "tasks"


def _nearest(name: str) -> str:
    if name in _all_files():
        return " that can be run by its name alone: it is a group of tags; name its tasks"
    matches = difflib.get_close_matches(name, [*_FILES, SUITE, *_all_files()], n=3, cutoff=0.75)
    if matches:
        return f"; did you mean {' or '.join(dict.fromkeys(matches))}?"
    return f"; known here: {', '.join((SUITE, *_FILES))}, and all that lm-eval lists by itself"


class _Loader(yaml.SafeLoader):
    """Reads task files; functions stay text."""


_Loader.add_constructor("!function", lambda loader, node: str(node.value))


@cache
def _read(file: Path) -> dict[str, Any]:
    """A task file with the files that it includes, the file's own words last."""
    content = yaml.load(file.read_bytes(), Loader=_Loader)
    assert isinstance(content, dict), file
    includes = content.pop("include", [])
    merged: dict[str, Any] = {}
    for include in [includes] if isinstance(includes, str) else includes:
        merged |= _read((file.parent / include).resolve())
    return merged | content
