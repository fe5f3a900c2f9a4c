"""The mirror of finished trials in MLflow: its own process, and the only user of mlflow.

``python -m workbench.tracking --results DIR --study NAME`` makes the store and the study's experiment, mirrors every
finished trial of the study that the store lacks, and then each trial whose folder is named by a line of JSON on
stdin, until stdin ends. What it has to say it says in lines of JSON on stdout: ``{"event": "ready"}``,
``{"event": "mirrored", "trial"}`` and ``{"event": "warning", "message"}``.

result.json is the truth and MLflow a window: a run is written from the files of a finished trial, in batches, and can
be written again. A run carries the digest of its result.json as its last tag, so a run that was cut short is known
and replaced, and no trial has two runs.

MLflow stores artifact locations as absolute addresses: in a results folder that was moved, runs keep their numbers,
but list no artifacts until `python -m workbench.study export-mlflow` has rebuilt the experiment.
"""

from __future__ import annotations

import argparse
import contextlib
import fcntl
import json
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import datetime
from pathlib import Path
from typing import Any, TextIO

from spes_core.processlife import die_with_parent
from workbench.mirrored import DATABASE, digest, note, note_run

ARTIFACTS = "mlartifacts"
MIRRORED_FILES = ("result.json", "run.json")

_STATUS = {"done": "FINISHED", "failed": "FAILED", "interrupted": "KILLED", "timeout": "KILLED", "pruned": "KILLED"}
_PARAM_LENGTH = 500
_TAG_LENGTH = 500
_BATCH_METRICS, _BATCH_PARAMS = 1000, 100
_DIGEST_TAG = "result_digest"
_CURVE_POSITION = ("step", "tokens", "elapsed_s", "uplink_bytes")
_NAMES = {"loss_nats": "loss"}


def main(argv: list[str] | None = None) -> int:
    """Mirror until stdin ends; 1 when the store cannot be used."""
    parser = argparse.ArgumentParser(prog="python -m workbench.tracking", description=__doc__.splitlines()[0])
    parser.add_argument("--results", type=Path, required=True, help="folder of all studies' results")
    parser.add_argument("--study", required=True, help="name of the study, and of its MLflow experiment")
    parser.add_argument("--tracking-uri", help="an MLflow server; default: a SQLite file in the results folder")
    parser.add_argument("--store", type=Path, help="folder of the SQLite file, instead of the results folder")
    parser.add_argument("--rebuild", action="store_true", help="start the study's experiment in the SQLite file anew")
    parser.add_argument("--die-with-parent", action="store_true")
    arguments = parser.parse_args(argv)
    if arguments.die_with_parent:
        die_with_parent()
    replies, sys.stdout = sys.stdout, sys.stderr  # MLflow prints too; stdout belongs to the replies
    results_dir = arguments.results.absolute()
    store_dir = arguments.store.absolute() if arguments.store is not None else results_dir
    try:
        if arguments.tracking_uri is not None:
            store = Store(arguments.study, arguments.tracking_uri)
        else:
            store = _local_store(store_dir, arguments.study, rebuild=arguments.rebuild)
    except Exception as error:
        _reply(replies, event="warning", message=f"MLflow cannot be used: {_first_line(error)}")
        return 1
    _reply(replies, event="ready")
    for trial_dir in _trials(results_dir / arguments.study / "trials"):
        try:
            result_digest, run_id = store.mirror(trial_dir)
            if arguments.tracking_uri is None and store_dir == results_dir:
                note(trial_dir, result_digest)
            if arguments.tracking_uri is not None or store_dir == results_dir:
                with contextlib.suppress(OSError):  # Results that cannot be written to have no links, and are mirrored.
                    note_run(trial_dir, result_digest, store.experiment_id, run_id, arguments.tracking_uri)
            _reply(replies, event="mirrored", trial=trial_dir.name)
        except Exception as error:
            _reply(replies, event="warning", message=f"{trial_dir.name} is not in MLflow: {_first_line(error)}")
    return 0


def _local_store(folder: Path, study: str, *, rebuild: bool = False) -> Store:
    """The SQLite store in a folder, which becomes the working directory.

    A database address is a URL, and in a relative one the letters of the folder's path cannot be misread.
    """
    folder.mkdir(parents=True, exist_ok=True)
    os.chdir(folder)
    lock, location = folder / f".{DATABASE}.lock", (folder / ARTIFACTS).as_uri()
    return Store(study, f"sqlite:///{DATABASE}", artifact_location=location, lock=lock, rebuild=rebuild)


class Store:
    """One study's experiment in an MLflow store.

    ``lock`` is a file that keeps the mirrors of other studies out while this one writes: SQLite has one writer, and a
    fresh store breaks when two processes create it. With ``rebuild`` the experiment is made anew, and the former one
    deleted under another name: whoever wrote something into it by hand can have it back.
    """

    def __init__(
        self,
        study: str,
        tracking_uri: str,
        *,
        artifact_location: str | None = None,
        lock: Path | None = None,
        rebuild: bool = False,
    ) -> None:
        os.environ["MLFLOW_DISABLE_TELEMETRY"] = "true"
        from mlflow.tracking import MlflowClient

        self._lock_path = lock
        if artifact_location is not None:
            # Else MLflow sets the folder's path into SQL as it is, where a quote ends the text; a URL has none.
            os.environ["_MLFLOW_SERVER_ARTIFACT_ROOT"] = artifact_location
        with self._alone():
            self._client = MlflowClient(tracking_uri=tracking_uri)
            if rebuild:
                _put_aside(self._client, study)
            self.experiment_id = _experiment(self._client, study, artifact_location)

    def mirror(self, trial_dir: Path) -> tuple[str, str]:
        """Write the run of one finished trial, unless the store has it; a run of an older result is replaced.

        Returns the digest of the result that the store then has, and the id of its run.
        """
        content = (trial_dir / "result.json").read_bytes()
        result, result_digest = json.loads(content), digest(content)
        with self._alone():
            known = self._client.search_runs(
                [self.experiment_id], filter_string=f"tags.trial_id = '{result['trial']['id']}'"
            )
            if [run.data.tags.get(_DIGEST_TAG) for run in known] == [result_digest]:
                return result_digest, known[0].info.run_id
            for run in known:
                self._client.delete_run(run.info.run_id)
            return result_digest, self._write(trial_dir, result, result_digest)

    def _write(self, trial_dir: Path, result: dict[str, Any], result_digest: str) -> str:
        from mlflow.entities import Metric, Param

        started_ms, finished_ms = _milliseconds(result["started_at"]), _milliseconds(result["finished_at"])
        run = self._client.create_run(
            self.experiment_id,
            start_time=started_ms,
            tags=run_tags(result),
            run_name=result["trial"]["name"],
        )
        run_id: str = run.info.run_id
        params = [Param(name, value) for name, value in run_params(result).items()]
        for batch in _batches(params, _BATCH_PARAMS):
            self._client.log_batch(run_id, params=batch)
        metrics = [Metric(*point) for point in run_metrics(result, started_ms, finished_ms)]
        for batch in _batches(metrics, _BATCH_METRICS):
            self._client.log_batch(run_id, metrics=batch)
        for name in MIRRORED_FILES:
            self._client.log_artifact(run_id, str(trial_dir / name))
        self._client.set_terminated(run_id, status=_STATUS.get(result["status"], "FAILED"), end_time=finished_ms)
        self._client.set_tag(run_id, _DIGEST_TAG, result_digest)
        return run_id

    @contextmanager
    def _alone(self) -> Iterator[None]:
        """Hold the lock, if there is one."""
        if self._lock_path is None:
            yield
            return
        with self._lock_path.open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            yield


def run_tags(result: dict[str, Any]) -> dict[str, str]:
    """What runs are filtered by."""
    trial, provenance = result["trial"], result["provenance"]
    tags: dict[str, Any] = {
        "trial_id": trial["id"],
        "arm": trial["arm"],
        "role": trial["role"],
        "seed": trial["seed"],
        "method": trial["method"],
        "study": trial["study"],
        "status": result["status"],
        "data_digest": result["data"].get("digest"),
        "commit": provenance.get("commit"),
        "dirty": provenance.get("dirty"),
        "code_digest": provenance.get("code_digest"),
        "non_finite": ", ".join(result["non_finite"]) or None,
        "error": result["error"]["message"] if result["error"] else None,
    }
    return {name: str(value)[:_TAG_LENGTH] for name, value in tags.items() if value is not None}


def run_params(result: dict[str, Any]) -> dict[str, str]:
    """The resolved configuration, flat: "model.num_layers" → "4"."""
    flat: dict[str, str] = {}

    def walk(branch: dict[str, Any], path: str) -> None:
        for key, value in branch.items():
            if isinstance(value, dict):
                walk(value, f"{path}{key}.")
            else:
                flat[path + key] = str(value)[:_PARAM_LENGTH]

    walk(result["config"], "")
    return flat


def run_metrics(result: dict[str, Any], started_ms: int, finished_ms: int) -> Iterator[tuple[str, float, int, int]]:
    """Points (name, value, time in ms, step): the curves, and at the last step every metric that no curve has."""
    launch_ms = 1000 * result["metrics"].get("perf/launch_to_first_step_s", 0)
    last_step, drawn = 0, set()
    for group, curve in (("train", result["curves"]["train"]), ("eval", result["curves"]["validation"])):
        for point in curve:
            last_step = max(last_step, point["step"])
            time_ms = int(started_ms + launch_ms + 1000 * point["elapsed_s"])
            values = {_name(key): value for key, value in point.items() if key not in _CURVE_POSITION}
            values |= {"tokens": point["tokens"], "uplink_gb": point["uplink_bytes"] / 1e9}
            for name, value in values.items():
                drawn.add(f"{group}/{name}")
                if value is not None:
                    yield f"{group}/{name}", float(value), time_ms, point["step"]
    for name, value in result["metrics"].items():
        if name not in drawn:
            yield name, float(value), finished_ms, last_step


def _name(key: str) -> str:
    """What a field of a curve is called as a metric: loss_nats/wiki is loss/wiki."""
    field, slash, domain = key.partition("/")
    return f"{_NAMES.get(field, field)}{slash}{domain}"


def _experiment(client: Any, name: str, artifact_location: str | None) -> str:
    """Id of the experiment called ``name``, made or restored where needed."""
    found = client.get_experiment_by_name(name)
    if found is None:
        return str(client.create_experiment(name, artifact_location=artifact_location))
    if found.lifecycle_stage == "deleted":
        client.restore_experiment(found.experiment_id)
    return str(found.experiment_id)


def _put_aside(client: Any, name: str) -> None:
    """Delete the experiment called ``name``, if there is one, and set its name free."""
    found = client.get_experiment_by_name(name)
    if found is None:
        return
    if found.lifecycle_stage == "deleted":
        client.restore_experiment(found.experiment_id)
    now = datetime.now().astimezone().isoformat(timespec="microseconds")
    client.rename_experiment(found.experiment_id, f"{name} (replaced {now})")
    client.delete_experiment(found.experiment_id)


def _trials(folder: Path) -> Iterator[Path]:
    """The trials that have finished before now, then those that stdin names."""
    yield from sorted(path.parent for path in folder.glob("*/result.json"))
    for line in sys.stdin:
        yield Path(json.loads(line))


def _batches(items: list[Any], size: int) -> Iterator[list[Any]]:
    return (items[first : first + size] for first in range(0, len(items), size))


def _milliseconds(iso: str) -> int:
    return int(1000 * datetime.fromisoformat(iso).timestamp())


def _first_line(error: Exception) -> str:
    return (str(error) or type(error).__name__).splitlines()[0]


def _reply(replies: TextIO, **message: str) -> None:
    print(json.dumps(message), file=replies, flush=True)


if __name__ == "__main__":
    sys.exit(main())
