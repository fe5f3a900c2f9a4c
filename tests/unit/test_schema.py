"""The JSON Schema of study files: what ships is valid, what the reader refuses is not, and every key is explained."""

from __future__ import annotations

import copy
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from spes_core.config import RunConfig, check, to_dict
from spes_core.errors import ConfigError, Problem
from spes_core.rules import named_paths
from spes_core.structure import build
from tests.reference.json_schema import violations
from workbench.schema import field_docs, study_schema
from workbench.study import main
from workbench.trees import leaves, nest
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
        ("sweep/zip/merge.alpha", ["1e-1", 0.2]),
        ("sweep/exclude", [{"sync.interval_steps": 5, "merge": {"alpha": 0.1}}]),
        ("search/space/sync.interval_steps", {"low": 5, "high": 100, "log": True}),
        ("search/space/merge", {"alpha": [0.1, 0.2], "num_neighbours": {"low": 1, "high": 4, "step": 1}}),
        ("search/space/optim.clip_norm", {"low": "1e-1", "high": 1}),
        ("search/objective", "eval/loss"),
        ("search/objective", [{"metric": "eval/loss"}, {"metric": "perf/tokens_per_s", "goal": "maximize"}]),
        ("search/constraints", [{"metric": "eval/loss", "tolerance": 0.02}, {"metric": "eval/loss", "at_most": 3}]),
        ("search/constraints", [{"metric": "eval/loss", "at_least": "1e-1", "at_most": None}]),
        ("search/confirm", {"top": 2, "seeds": [7, 8]}),
        ("search/pruner", None),
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
        ("sweep/grid/sync.interval_steps", [5.5]),
        ("sweep/grid/sync.interval_steps", [0]),
        ("sweep/grid/wire.dtype", ["float64"]),
        ("sweep/zip/merge", {"alfa": [0.1]}),
        ("sweep/exclude", [{"sync.interval": 5}]),
        ("sweep/exclude", {"sync.interval_steps": 5}),
        ("resources/timeout", "soon"),
        ("search/n_trials", 0),
        ("search/arm", 3),
        ("search/sampler", "grid"),
        ("search/space", {}),
        ("search/space/sync.interval", [5]),
        ("search/space/method", ["spes"]),
        ("search/space/data.corpus", ["stdlib"]),
        ("search/space/data", {"tokenizer_vocab_size": [300]}),
        ("search/space/sync.interval_steps", []),
        ("search/space/sync.interval_steps", [5, 5]),
        ("search/space/sync.interval_steps", 5),
        ("search/space/sync.interval_steps", {"low": 5}),
        ("search/space/sync.interval_steps", {"low": 5, "high": 10, "lgo": True}),
        ("search/space/wire.dtype", {"low": 1, "high": 2}),
        ("search/space/merge", [{"alpha": 0.1}]),
        ("search/objective", "eval/los"),
        ("search/objective", {"metric": "eval/loss", "gaol": "minimize"}),
        ("search/objective", {"goal": "minimize"}),
        ("search/objective", []),
        ("search/constraints", [{"metric": "eval/loss"}]),
        ("search/constraints", [{"metric": "eval/loss", "tolerance": 0.1, "at_most": 3}]),
        ("search/constraints", [{"metric": "eval/loss", "tolerance": -0.1}]),
        ("search/constraints", [{"metric": "eval/los", "at_most": 3}]),
        ("search/constraints", {"metric": "eval/loss", "at_most": 3}),
        ("search/pruner", "mean"),
        ("search/confirm", {"top": 0}),
        ("search/confirm", {"seeds": [7, 7]}),
        ("search/confirm", {"seds": [7]}),
    ],
)
def test_what_the_reader_refuses_is_not_valid(path: str, value: Any) -> None:
    assert mistakes(changed(path, value))


def test_the_range_of_each_setting_is_the_one_that_the_reader_applies() -> None:
    """Every setting, at values around the ends of the ranges that there are: in an arm, dotted, and on an axis."""
    refused = 0
    for path, default in leaves(to_dict(RunConfig())):
        if isinstance(default, bool) or not isinstance(default, int | float) or path == "seed":
            continue
        for value in (-1, 0, 1) if isinstance(default, int) else (-0.5, 0.0, 0.5, 1.0, 2.5):
            try:
                broken = check(build(RunConfig, nest(path, value)))
            except ConfigError:
                continue
            in_range = not any(problem.path == path for problem in _own(broken))
            found = [mistakes(changed(place, given)) for place, given in _places(path, value)]
            assert len({bool(lines) for lines in found}) == 1, (path, value, found)
            if found[0]:
                assert not in_range, (path, value, found)
                refused += 1
    assert refused > 60


def _own(problems: list[Problem]) -> list[Problem]:
    """The problems of one setting alone."""
    known = {path for path, _ in leaves(to_dict(RunConfig()))}
    return [problem for problem in problems if len(known.intersection(named_paths(problem))) == 1]


def _places(path: str, value: float) -> list[tuple[str, Any]]:
    return [(f"arms/spes/{path}", value), (f"run/{path.replace('.', '/')}", value), (f"sweep/grid/{path}", [value])]


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
