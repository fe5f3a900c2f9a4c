"""evaluation.json of a trial: the scores of its final weights, what they are scores of, and what could not be had.

``tasks`` holds an entry for each task that was asked for and for each part of a group, by its label; ``shown`` names
those that were asked for, in order. An entry is kept as long as its key stays: weights, task version, shots, limit,
data, dtype. Everything here is arithmetic on these entries.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from spes_core.errors import DataError
from spes_core.weightsfile import recorded_digest
from workbench.durable import read_mapping, write_json
from workbench.evaluating_tasks import Copy, Task, find_copy
from workbench.settings import Evaluation

FILE = "evaluation.json"
HF_FILE = "evaluation-hf.json"
"""Scores of the exported model: for comparison only, they enter no result."""
PREFIX = "lm_eval/"
"""Begins the name of every score among the metrics of a result: lm_eval/<task>/<metric>."""
Entry = dict[str, Any]
_LONGEST_REASON = 400
_OF_DONE = {
    *("metrics", "chance", "n", "requests", "truncated"),
    *("limit", "source", "dtype", "context", "lm_eval", "split"),
}


def weights_files(trial_dir: Path) -> list[Path]:
    """The final weights of a trial: one file, or where nothing was exchanged one of each node."""
    single = trial_dir / "weights" / "final.safetensors"
    files = list((trial_dir / "weights").glob("final-node-*.safetensors"))
    return [single] if single.exists() else sorted(files, key=lambda path: int(path.stem.rpartition("-")[2]))


def weights_digests(files: Sequence[Path]) -> dict[str, str]:
    """Digest of the values in each weights file, by its name. Raises DataError."""
    if not files:
        raise DataError("the trial has no final weights to evaluate")
    return {path.name: recorded_digest(path) or "unknown" for path in files}


class ScoreBook:
    """The evaluation.json of one set of weights, read once, and written as scores come in.

    What is stored of other weights (the trial was run anew) is forgotten.
    """

    def __init__(self, folder: Path, file: str, weights: Mapping[str, str]) -> None:
        self._folder, self._file, self._weights = folder, file, dict(weights)
        stored = read_scores(folder / file)
        is_same = stored.get("weights") == self._weights
        self.entries: dict[str, Entry] = stored["tasks"] if is_same else {}
        self._shown: list[str] = stored["shown"] if is_same else []

    def lacking(self, tasks: Iterable[Task], settings: Evaluation, *, again: bool) -> list[Task]:
        """The leaves of ``tasks`` without an entry under their present key, each once.

        With ``again`` those that are missing count as without, too.
        """
        wanted = {leaf.label: leaf for task in tasks for leaf in task.leaves}
        return [leaf for leaf in wanted.values() if not self._is_settled(leaf, settings, again)]

    def _is_settled(self, leaf: Task, settings: Evaluation, again: bool) -> bool:
        entry = self.entries.get(leaf.label)
        if entry is None or (again and entry["status"] != "done"):
            return False
        return bool(entry["key"] == self._key(leaf, settings))

    def _key(self, leaf: Task, settings: Evaluation) -> str:
        """Digest of all that decides a task's scores."""
        data = _data_of(leaf, settings.folder)
        about = [leaf.label, leaf.version, data, settings.limit, settings.dtype, self._weights]
        return hashlib.sha256(json.dumps(about, sort_keys=True).encode()).hexdigest()[:16]

    def add(self, leaf: Task, settings: Evaluation, entry: Entry) -> None:
        """Take in what a leaf gave: an entry of status "done", or of status "missing" with a reason."""
        about = {"name": leaf.name, "shots": leaf.shots, "version": leaf.version, "headline": leaf.headline}
        if entry["status"] != "done":
            entry = {"status": "missing", "reason": " ".join(str(entry["reason"]).split())[:_LONGEST_REASON]}
        self.entries[leaf.label] = {**entry, **about, "key": self._key(leaf, settings)}

    def show(self, tasks: Iterable[Task], *, only_known: bool = False) -> None:
        """Note ``tasks`` as asked for, beside earlier ones; with ``only_known`` those that have entries."""
        for task in tasks:
            if all(leaf.label in self.entries for leaf in task.leaves):
                if task.parts:
                    self.entries[task.label] = group_entry(task, self.entries)
                if task.label not in self._shown:
                    self._shown.append(task.label)
            else:
                assert only_known, task.label

    def store(self, *, into_result: bool) -> None:
        """Write the file where it has changed, and with ``into_result`` the scores into the trial's result.json."""
        content = {"schema": 1, "weights": self._weights, "shown": self._shown, "tasks": self.entries}
        if content != read_mapping(self._folder / self._file):
            write_json(self._folder / self._file, content)
        if not into_result:
            return
        result = read_mapping(self._folder / "result.json")
        scored = with_scores(result, content)
        if result and list(scored.items()) != list(result.items()):
            write_json(self._folder / "result.json", scored)


def read_scores(path: Path) -> dict[str, Any]:
    """A stored evaluation.json; {} when there is none. What only a hand could have torn counts as not scored."""
    stored = read_mapping(path)
    tasks, shown, weights = (stored.get(key) for key in ("tasks", "shown", "weights"))
    if not (isinstance(tasks, dict) and isinstance(shown, list) and isinstance(weights, dict)):
        return {}
    whole = {label: entry for label, entry in tasks.items() if _is_whole(entry)}
    return stored | {"tasks": whole, "shown": [label for label in shown if isinstance(label, str)]}


def _is_whole(entry: object) -> bool:
    """Whether a stored entry has what is read of it, and only numbers that JSON knows."""
    if not isinstance(entry, dict) or not {"name", "shots", "version", "headline", "status"} <= entry.keys():
        return False
    if entry["status"] != "done":
        return isinstance(entry.get("reason"), str) and ("key" in entry or "parts" in entry)
    metrics = entry.get("metrics")
    return (
        entry.keys() >= _OF_DONE
        and ("key" in entry or "parts" in entry)
        and isinstance(metrics, dict)
        and all(isinstance(entry[count], int) for count in ("n", "requests", "truncated"))
        and _is_number_or_none(entry["chance"])
        and all(
            isinstance(metric, dict)
            and metric.keys() >= {"value", "stderr", "higher_is_better"}
            and metric["value"] is not None
            and all(_is_number_or_none(metric[key]) for key in ("value", "stderr"))
            for metric in metrics.values()
        )
    )


def _is_number_or_none(value: object) -> bool:
    return value is None or (isinstance(value, int | float) and math.isfinite(value))


def copy_of(task: Task, data_dir: Path | None) -> Copy | None:
    """The offline copy of a leaf's data where copies are used. Raises DataError when it has none."""
    return None if data_dir is None else find_copy(task, data_dir)


def _data_of(leaf: Task, data_dir: Path | None) -> str:
    """What stands for a task's data in its key."""
    try:
        copy = copy_of(leaf, data_dir)
    except DataError:
        return "none"
    return "hub" if copy is None else copy.digest


def over_nodes(entries: Sequence[Entry]) -> Entry:
    """One entry for the weights of several nodes that were never exchanged: the mean of their scores.

    The nodes answer the same items, so their errors do not average out: the standard error is the mean of theirs, an
    upper bound of that of the mean. A task that is missing of one node is missing.
    """
    first = next((entry for entry in entries if entry["status"] != "done"), entries[0])
    if len(entries) == 1 or first["status"] != "done":
        return first
    metrics = {}
    for name, metric in first["metrics"].items():
        values = [entry["metrics"][name] for entry in entries]
        errors = [value["stderr"] for value in values]
        metrics[name] = metric | {
            "value": math.fsum(value["value"] for value in values) / len(values),
            "stderr": None if None in errors else math.fsum(errors) / len(errors),
        }
    return first | {"metrics": metrics, "nodes": [entry["metrics"] for entry in entries]}


def group_entry(group: Task, entries: Mapping[str, Entry]) -> Entry:
    """The score of a group: the mean over its parts, weighted by items where the group says so.

    Parts hold different items, so the error of the mean is √Σ(wᵢ·sᵢ)². Missing parts make the group missing.
    """
    parts = [entries[leaf.label] for leaf in group.leaves]
    gone = [part for part in parts if part["status"] != "done"]
    about: Entry = {"name": group.name, "shots": group.shots, "version": group.version, "headline": group.headline}
    about |= {"parts": [leaf.label for leaf in group.leaves]}
    if gone:
        reason = f"{len(gone)} of {len(parts)} parts are missing; {gone[0]['name']}: {gone[0]['reason']}"
        return {"status": "missing", "reason": reason[:_LONGEST_REASON], **about}
    by_size = [bool(rule.get("weight_by_size", True)) for rule in group.config.get("aggregate_metric_list") or []]
    sizes = [part["n"] if any(by_size) else 1 for part in parts]
    weights = [size / sum(sizes) for size in sizes]
    metrics = {}
    for name in parts[0]["metrics"]:
        if any(name not in part["metrics"] for part in parts):
            continue
        scores = [part["metrics"][name] for part in parts]
        errors = [score["stderr"] for score in scores]
        metrics[name] = {
            "value": math.fsum(w * score["value"] for w, score in zip(weights, scores, strict=True)),
            "stderr": None if None in errors else math.hypot(*(w * e for w, e in zip(weights, errors, strict=True))),
            "higher_is_better": scores[0]["higher_is_better"],
        }
    chances = [part["chance"] for part in parts]
    known = None not in chances
    chance = math.fsum(w * c for w, c in zip(weights, chances, strict=True)) if known else None
    shared = {key: parts[0][key] for key in ("limit", "source", "dtype", "context", "lm_eval", "split")}
    counts = {key: sum(part[key] for part in parts) for key in ("n", "requests", "truncated")}
    return {"status": "done", **about, "metrics": metrics, "chance": chance, **counts, **shared}


def with_scores(result: dict[str, Any], evaluation: Mapping[str, Any]) -> dict[str, Any]:
    """A result with the scores in an evaluation.json ({}: the result as it is).

    Metrics get lm_eval/<task>/<metric> and its standard error, ``evaluation`` the entries that were asked for.
    """
    bare = {key: value for key, value in result.items() if key != "evaluation"}
    metrics = {name: value for name, value in result["metrics"].items() if not name.startswith(PREFIX)}
    tasks = evaluation.get("tasks") or {}
    shown = {label: tasks[label] for label in evaluation.get("shown") or () if label in tasks}
    for label, entry in shown.items():
        for name, metric in (entry.get("metrics") or {}).items():
            for suffix, value in (("", metric["value"]), ("_stderr", metric["stderr"])):
                if value is not None:
                    metrics[f"{PREFIX}{label}/{name}{suffix}"] = value
    scored = {key: metrics if key == "metrics" else value for key, value in bare.items()}
    return scored | {"evaluation": {"weights": evaluation["weights"], "tasks": shown}} if shown else scored
