"""Whether the files of a finished trial agree with each other: result.json follows from run.json and the events.

Nothing is run and nothing is written. Whoever changes one file without all the others is found out here; a folder in
which everything was invented to fit together is found out by training again (`workbench.verify`).
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from spes_core.config import RunConfig
from spes_core.errors import DataError, SpesError
from spes_core.model.counting import tensors_by_shard
from spes_core.runfile import RunFile
from spes_core.sharding import joined_digest
from spes_core.weightsfile import FINAL, recorded_digest, values_digest
from workbench.durable import read_json, read_mapping
from workbench.evaluating_scores import FILE as EVALUATION
from workbench.evaluating_scores import weights_digests, weights_files
from workbench.provenance import code_digest
from workbench.recording import Recording
from workbench.results import build_result
from workbench.trials import identity
from workbench.verdict import Check, equal

MANIFEST = "manifest.json"
"""Of an exported study: the SHA-256 of every file (`workbench.export`)."""
_SHOWN = 6
"""Differing values that are named one by one."""


def check_files(trial_dir: Path) -> list[Check]:
    """Every comparison between the files of a trial that has a run.json, a trial.json and a result.json."""
    stored = read_json(trial_dir / "result.json")
    is_own_code = _code_of(stored) == code_digest()
    checks = list(_manifest_checks(trial_dir))
    broken = list(_broken_events(trial_dir / "events"))
    if broken:
        return [*checks, *broken]
    try:
        recomputed = json.loads(json.dumps(build_result(trial_dir)))
        recording = Recording(trial_dir / "events")
        checks += _result_checks(stored, recomputed, is_own_code)
        checks += _digest_checks(trial_dir, recording)
        checks += _score_checks(trial_dir)
        if is_own_code:
            checks.append(_identity_check(trial_dir))
    except (SpesError, ValueError, LookupError, TypeError, AttributeError, ArithmeticError) as error:
        reason = f"{type(error).__name__}: {error}"
        rule = "run.json, trial.json, outcome.json and events/ give a result"
        return [*checks, Check(name="files", stored="-", found=reason, rule=rule, passed=False)]
    return checks


def differing(stored: Any, found: Any, path: str = "") -> Iterator[tuple[str, Any, Any]]:
    """Path and both values of everything that differs between two JSON trees."""
    if isinstance(stored, dict) and isinstance(found, dict):
        for key in dict.fromkeys((*stored, *found)):
            yield from differing(stored.get(key), found.get(key), f"{path}.{key}" if path else key)
    elif isinstance(stored, list) and isinstance(found, list) and len(stored) == len(found):
        for index, (one, other) in enumerate(zip(stored, found, strict=True)):
            yield from differing(one, other, f"{path}[{index}]")
    elif stored != found or type(stored) is not type(found):
        yield path, stored, found


def _code_of(result: Mapping[str, Any]) -> Any:
    provenance = result.get("provenance")
    return provenance.get("code_digest") if isinstance(provenance, dict) else None


def _result_checks(stored: Any, recomputed: dict[str, Any], is_own_code: bool) -> Iterator[Check]:
    """One line when result.json is what the files give, else one for each of the first values that differ.

    Other code than the trial's own may know settings and figures that the trial's did not: those are passed over.
    """
    found = list(differing(stored, recomputed))
    if not is_own_code:
        found = [(path, old, new) for path, old, new in found if old is not None]
    rule = "result.json is what the other files give"
    if not found:
        yield Check(name="result.json", stored="as recomputed", found="as stored", rule=rule, passed=True)
    for path, old, new in found[:_SHOWN]:
        yield equal(f"result.json: {path}", old, new, rule)
    if len(found) > _SHOWN:
        more = f"{len(found) - _SHOWN} values more differ"
        yield Check(name="result.json", stored="-", found=more, rule=rule, passed=False)


def _identity_check(trial_dir: Path) -> Check:
    """The trial's id is the digest of its settings and data."""
    about = read_json(trial_dir / "trial.json")
    config = RunFile.load(trial_dir / "run.json").config
    found = identity(config, str(about["data"].get("digest")))
    return equal("trial id", about["trial"]["id"], found, "the digest of settings and data")


def _digest_checks(trial_dir: Path, recording: Recording) -> Iterator[Check]:
    """Server and nodes name the same weights after every round, and the final weights are those of the last."""
    config = RunFile.load(trial_dir / "run.json").config
    server = {event["round"]: event.get("digest") for event in recording.server_rounds()}
    for node in recording.nodes:
        own = {event["round"]: event.get("digest") for event in recording.rounds_of_node(node)}
        apart = [index for index in own if index in server and own[index] != server[index]]
        found = f"other weights after round {apart[0]}" if apart else f"the same after {len(own)} rounds"
        if own:
            rule = "node and server record the same weights"
            name = f"weights of node {node}"
            yield Check(name=name, stored=f"{len(server)} rounds", found=found, rule=rule, passed=not apart)
    for path in sorted((trial_dir / "weights").glob("*.safetensors")):
        yield from _weights_checks(path, server[max(server)] if server else None, config)


def _weights_checks(path: Path, last_digest: str | None, config: RunConfig) -> Iterator[Check]:
    name = f"weights/{path.name}"
    try:
        recorded, found = recorded_digest(path), values_digest(path)
    except DataError as error:
        yield Check(name=name, stored="-", found=str(error), rule="a whole weights file", passed=False)
        return
    yield equal(name, recorded, found, "values have the digest in the header")
    if last_digest is not None and path.name == FINAL:
        if len(config.servers) > 1:
            found = joined_digest([values_digest(path, names) for names in tensors_by_shard(config)])
        yield equal(name, last_digest, found, "the weights after the last round")


def _score_checks(trial_dir: Path) -> Iterator[Check]:
    """The scores are those of the final weights, where both are there."""
    scored, files = read_mapping(trial_dir / EVALUATION).get("weights"), weights_files(trial_dir)
    if scored and files:
        yield equal(EVALUATION, scored, weights_digests(files), "scores of the final weights")


def _broken_events(folder: Path) -> Iterator[Check]:
    """Lines of event files that are no events."""
    for path in sorted(folder.glob("*.jsonl")):
        for number, line in enumerate(path.read_bytes().splitlines(), start=1):
            try:
                is_event = isinstance(json.loads(line).get("kind"), str)
            except (ValueError, AttributeError):
                is_event = False
            if not is_event:
                shown = line[:40].decode("utf-8", "backslashreplace")
                rule, name = "one JSON event a line", f"events/{path.name}:{number}"
                yield Check(name=name, stored=shown, found="no event", rule=rule, passed=False)
                break


def _manifest_checks(trial_dir: Path) -> Iterator[Check]:
    """In an exported study: the trial's files are those that were packed."""
    study_dir = trial_dir.parent.parent
    manifest = study_dir / MANIFEST
    if not manifest.exists():
        return
    try:
        packed = dict(read_json(manifest)["files"])
    except (ValueError, LookupError, TypeError) as error:
        yield Check(name=MANIFEST, stored="-", found=f"unreadable: {error}", rule="lists every file", passed=False)
        return
    prefix = f"trials/{trial_dir.name}/"
    changed = []
    for name, digest in packed.items():
        path = study_dir / name
        if name.startswith(prefix) and (not path.is_file() or file_sha256(path) != digest):
            changed.append(name.removeprefix(prefix))
    found = f"changed or missing: {', '.join(changed)}" if changed else "all as packed"
    rule = "files have the packed digests"
    yield Check(name=MANIFEST, stored=f"{len(packed)} files", found=found, rule=rule, passed=not changed)


def file_sha256(path: Path) -> str:
    """SHA-256 (hex) of a file's bytes."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
