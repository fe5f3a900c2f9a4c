"""Configuration: strict reading, rules, identity."""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from spes_core import schedules
from spes_core.config import RunConfig, digest, from_dict, inapplicable, to_dict
from spes_core.errors import ConfigError
from spes_core.runfile import RunFile


def problems_of(data: object) -> dict[str, str]:
    with pytest.raises(ConfigError) as caught:
        from_dict(data)
    return {problem.path: problem.message for problem in caught.value.problems}


def test_a_config_survives_the_round_trip_through_plain_data() -> None:
    config = from_dict({"nodes": 2, "model": {"head_dim": 16}, "optim": {"clip_norm": None}})
    assert from_dict(to_dict(config)) == config


def test_numbers_that_yaml_leaves_as_text_are_numbers() -> None:
    config = from_dict({"optim": {"lr": "1e-4"}, "budget_tokens": 2e6})
    assert config.optim.lr == 1e-4
    assert config.budget_tokens == 2_000_000
    assert isinstance(config.budget_tokens, int)


def test_every_mistake_is_listed_at_once_with_the_nearest_name() -> None:
    problems = problems_of({"node": 4, "merge": {"num_neighbors": 3, "alpha": "much"}, "model": {"qk_norm": "ful"}})
    assert 'did you mean "nodes"' in problems["node"]
    assert 'did you mean "num_neighbours"' in problems["merge.num_neighbors"]
    assert "must be a number" in problems["merge.alpha"]
    assert 'did you mean "full"' in problems["model.qk_norm"]
    assert len(problems) == 4


@pytest.mark.parametrize(
    ("data", "path", "words"),
    [
        ({"merge": {"num_neighbours": 8}}, "merge.num_neighbours", "(8) must be below model.num_experts (8)"),
        ({"sync": {"interval_steps": 0}}, "sync.interval_steps", "(0) must be at least 1"),
        ({"sync": {"interval_steps": 2.5}}, "sync.interval_steps", "(2.5) must be a whole number"),
        ({"model": {"num_experts": 2, "top_k": 3}}, "model.num_experts", "lower top_k or add experts"),
        ({"nodes": 3}, "data.global_batch_sequences", "multiple of nodes"),
        ({"budget_tokens": 100}, "budget_tokens", "at least one step"),
        (
            {"model": {"vocab_size": 300}},
            "data.tokenizer_vocab_size",
            "must not exceed model.vocab_size (300)",
        ),
        ({"model": {"d_model": 132, "num_heads": 8}}, "model.d_model", "multiple of model.num_heads"),
        ({"model": {"num_kv_heads": 3}}, "model.num_kv_heads", "must divide model.num_heads (4)"),
        ({"optim": {"lr": float("nan")}}, "optim.lr", "must be a number"),
        ({"optim": {"lr": True}}, "optim.lr", "must be a number"),
        (
            {"optim": {"name": "adamw_8bit"}, "checkpoint": {"interval_rounds": 1}},
            "optim.name",
            "which no checkpoint can store; set checkpoint.interval_rounds",
        ),
        (
            {"compute": {"compile": True}, "sync": {"exchange": "gradients"}},
            "compute.compile",
            "must be false where several processes divide a model",
        ),
        (
            {"round": {"quorum": 0.5}, "parallel": {"ranks_per_node": 2}},
            "round.reassign_after",
            "(3) must be 0 where parallel.ranks_per_node (2) is above 1",
        ),
        ({"optim": {"beta2": 1.0}}, "optim.beta2", "(1) must be at least 0 and below 1"),
        ({"seed": 1 << 64}, "seed", "must be below 2^63"),
        ({"seed": 10**400}, "seed", "must be a whole number"),
        ({"merge": None}, "merge", "(null) must be a mapping"),
        ([], "", "must be a mapping"),
    ],
)
def test_a_broken_rule_names_setting_value_and_rule(data: object, path: str, words: str) -> None:
    assert words in problems_of(data)[path]


def test_no_neighbour_rule_applies_where_nothing_is_merged() -> None:
    assert from_dict({"merge": {"enabled": False, "num_neighbours": 8}}).merge.num_neighbours == 8


@pytest.mark.parametrize(
    "change",
    [{"log": {"interval_steps": 3}}, {"round": {"timeout_s": 5}}, {"wire": {"chunk_bytes": 4096}}],
)
def test_identity_ignores_what_changes_no_number(change: dict[str, Any]) -> None:
    assert digest(from_dict(change)) == digest(RunConfig())


@pytest.mark.parametrize("change", [{"seed": 1}, {"sync": {"interval_steps": 51}}, {"model": {"d_model": 64}}])
def test_identity_changes_with_what_changes_numbers(change: dict[str, Any]) -> None:
    assert digest(from_dict(change)) != digest(RunConfig())


def test_identity_is_the_same_in_another_process_with_other_hash_seeds() -> None:
    code = "from spes_core.config import RunConfig, digest; print(digest(RunConfig()))"
    environment = {**os.environ, "PYTHONHASHSEED": "7"}
    printed = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True)
    assert printed.stdout.strip() == digest(RunConfig())


@pytest.mark.parametrize("exchange", ["rounds", "gradients", "none"])
@pytest.mark.parametrize("path", ["partition.kind", "merge.enabled", "sync.interval_steps", "outer.kind", "nodes"])
def test_runs_of_one_identity_do_the_same(exchange: str, path: str) -> None:
    other = {
        "partition.kind": "full",
        "merge.enabled": False,
        "sync.interval_steps": 7,
        "outer.kind": "sgd",
        "nodes": 2,
    }
    section, _, name = path.rpartition(".")
    change = {section: {name: other[path]}} if section else {name: other[path]}
    one = from_dict({"sync": {"exchange": exchange}})
    two = from_dict({"sync": {"exchange": exchange, **change.pop("sync", {})}, **change})  # type: ignore[dict-item]
    if digest(one) == digest(two):
        assert one.make_partition() == two.make_partition()
        assert schedules.round_steps(one) == schedules.round_steps(two)
        assert schedules.merge_steps(one) == schedules.merge_steps(two)


def test_a_run_without_exchange_still_depends_on_who_trains_what() -> None:
    alone: dict[str, object] = {"sync": {"exchange": "none"}}
    assert digest(from_dict({**alone, "partition": {"kind": "full"}})) != digest(from_dict(alone))


def test_two_names_of_one_method_are_one_run() -> None:
    assert digest(from_dict({"method": "dilico"})) == digest(from_dict({"method": "spes"}))


def test_round_settings_are_outside_the_identity_of_a_run_without_rounds() -> None:
    central = from_dict({"method": "centralized", "sync": {"exchange": "gradients"}})
    other = replace(central, sync=replace(central.sync, interval_steps=7), merge=replace(central.merge, alpha=0.5))
    assert digest(central) == digest(other)
    assert "sync.interval_steps" in inapplicable(central)


def test_a_run_file_survives_the_disk(tmp_path: Path) -> None:
    path = tmp_path / "run.json"
    run = RunFile(trial="t", config=from_dict({"nodes": 2}), data_dir="somewhere/ü b", threads=2)
    run.save(path)
    assert RunFile.load(path) == run


@pytest.mark.parametrize("content", ["", "{", '{"trial": 1}', "[]"])
def test_a_broken_run_file_is_one_clear_error(tmp_path: Path, content: str) -> None:
    path = tmp_path / "run.json"
    path.write_text(content)
    with pytest.raises(ConfigError):
        RunFile.load(path)
