"""The JSON Schema of study files: what ships is valid, what the reader refuses is not, and every key is explained."""

from __future__ import annotations

import copy
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from spes_core.config import RunConfig, to_dict
from tests.reference.json_schema import violations
from workbench.schema import field_docs, study_schema
from workbench.study import main
from workbench.trees import leaves
from workbench.yamlsource import read_yaml

SCHEMA = study_schema()
STUDIES = sorted((Path(__file__).resolve().parents[2] / "studies").glob("*.yaml"))
MINIMAL = {"schema": 1, "name": "s", "question": "Why?", "arms": {"spes": {"method": "spes"}}}


def mistakes(study: dict[str, Any]) -> list[str]:
    return list(violations(study, SCHEMA, SCHEMA))


def changed(path: str, value: Any) -> dict[str, Any]:
    """The smallest study with one more key; parts of the path are separated by slashes."""
    study = copy.deepcopy(MINIMAL)
    branch: Any = study
    *parents, leaf = path.split("/")
    for key in parents:
        branch = branch.setdefault(key, {})
    branch[leaf] = value
    return study


@pytest.mark.parametrize("path", STUDIES, ids=lambda path: path.stem)
def test_a_study_that_ships_is_valid(path: Path) -> None:
    assert mistakes(read_yaml(path).data) == []


def test_the_smallest_study_is_valid() -> None:
    assert mistakes(MINIMAL) == []


@pytest.mark.parametrize(
    ("path", "value"),
    [
        ("run/optim/lr", "1e-4"),
        ("run/optim.lr", 0.1),
        ("run.optim.lr", 0.1),
        ("run/budget_tokens", "640_000"),
        ("run/model/head_dim", None),
        ("run/optim/clip_norm", None),
        ("arms/spes/aggregate.quarantine_factor", 3.0),
        ("arms/spes/sweep/grid/aggregate.rule", None),
        ("sweep/grid/sync.interval_steps", [5, 10]),
        ("sweep/grid/sync", {"interval_steps": [5, 10]}),
        ("sweep/grid/partition", [{"kind": "full"}]),
        ("resources/timeout", 90),
        ("report/x", "merge.alpha"),
        ("defaults", ["model/tiny", {"data": "default"}, "_self_"]),
    ],
)
def test_what_the_reader_takes_is_valid(path: str, value: Any) -> None:
    assert mistakes(changed(path, value)) == []


@pytest.mark.parametrize(
    ("path", "value"),
    [
        ("schema", 2),
        ("nmae", "s"),
        ("name", "a/b"),
        ("arms", {}),
        ("arms/a b", {"method": "spes"}),
        ("arms/spes/method", "spec"),
        ("arms/spes/role", "refrence"),
        ("arms/spes/seed", 1),
        ("run/seed", 1),
        ("run/nodes", 2.5),
        ("run/nodes", None),
        ("run/nodes", True),
        ("run/optim/lr", "fast"),
        ("run/optim.lrr", 0.1),
        ("run/merge/enabled", "yes"),
        ("run/wire/dtype", "float64"),
        ("sweep/grid/sync.interval", [5]),
        ("sweep/grid/sync.interval_steps", 5),
        ("sweep/grid/method", ["spes"]),
        ("seeds", []),
        ("seeds", [1, 1]),
        ("metrics/primary/name", "eval/los"),
        ("report/formats", ["html", "docx"]),
        ("report/x", "interval_steps"),
        ("equal", ["modle"]),
        ("defaults", ["model/tinny"]),
        ("defaults", ["method/spes"]),
    ],
)
def test_what_the_reader_refuses_is_not_valid(path: str, value: Any) -> None:
    assert mistakes(changed(path, value))


def test_a_missing_key_is_named() -> None:
    assert mistakes({key: value for key, value in MINIMAL.items() if key != "question"}) == [": lacks question"]


def properties(schema: dict[str, Any], path: str = "") -> Iterator[tuple[str, dict[str, Any]]]:
    for key, value in schema.get("properties", {}).items():
        yield f"{path}.{key}", value


def test_every_key_has_a_description() -> None:
    found = [*properties(SCHEMA), *(item for name, part in SCHEMA["$defs"].items() for item in properties(part, name))]
    assert len(found) > 100
    assert [path for path, schema in found if not schema.get("description")] == []


def test_every_setting_of_a_run_has_the_default_and_the_docstring_of_its_field() -> None:
    definitions = SCHEMA["$defs"]
    for path, default in leaves(to_dict(RunConfig())):
        if path == "seed":
            continue
        kind = definitions["RunConfig"]
        for key in path.split("."):
            schema = kind["properties"][key]
            kind = definitions.get(schema.get("$ref", "").rpartition("/")[2], {})
        assert schema["default"] == default, path
    assert definitions["SyncConfig"]["properties"]["interval_steps"]["description"] == (
        "H: optimizer steps between two rounds."
    )


def test_a_docstring_of_several_lines_becomes_one() -> None:
    assert "\n" not in field_docs(type(RunConfig().optim))["name"]
    assert field_docs(type(RunConfig().optim))["name"].endswith("and AdamW for embeddings, router and norms; SGD.")


def test_the_command_prints_it(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["schema"]) == 0
    assert json.loads(capsys.readouterr().out) == SCHEMA
