"""A run starts from drawn weights or from a file; all processes agree, and its identity holds the file's content."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor

from spes_core.checkpoint import save_weights
from spes_core.config import InitConfig, RunConfig, digest, from_dict, inapplicable
from spes_core.errors import ConfigError, DataError
from spes_core.filedigest import file_digest
from spes_core.initial import initial_weights
from spes_core.model.counting import tensor_shapes
from spes_core.model.initialise import initial_tensor
from spes_core.node import build_decoder
from tests.equivalence.participants import CPU, assert_bitwise_equal, tiny, train_alone, train_in_rounds


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


def values(config: RunConfig, seed: int = 5) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return {name: torch.randn(s, generator=generator) * 0.1 for name, s in tensor_shapes(config.model).items()}


def starting_from(config: RunConfig, path: Path) -> RunConfig:
    return replace(config, init=InitConfig(kind="weights", weights=str(path), digest=file_digest(path)))


def refusal(config: RunConfig) -> str:
    with pytest.raises(ConfigError) as caught:
        initial_weights(config)
    (problem,) = caught.value.problems
    return str(problem)


@pytest.mark.parametrize("partition", ["sparse", "full"])
def test_every_node_starts_from_the_file_whatever_it_trains(partition: str, tmp_path: Path) -> None:
    config, path = tiny(partition={"kind": partition}), tmp_path / "w.safetensors"
    save_weights(path, values(config), {})
    for node in range(config.nodes):
        experts = config.make_partition().experts_by_node[node]
        assert_bitwise_equal(build_decoder(starting_from(config, path), experts, CPU).tensors(), values(config))


def test_weights_stored_in_bfloat16_start_as_the_same_numbers(tmp_path: Path) -> None:
    config, path = tiny(), tmp_path / "w.safetensors"
    stored = {name: tensor.bfloat16() for name, tensor in values(config).items()}
    save_weights(path, stored, {})
    initial = initial_weights(starting_from(config, path))
    assert all(initial(name).dtype == torch.float32 and torch.equal(initial(name), stored[name]) for name in stored)


def test_a_run_that_starts_from_the_drawn_weights_in_a_file_is_the_run_that_draws_them(tmp_path: Path) -> None:
    config, path = tiny(), tmp_path / "w.safetensors"
    drawn = {name: initial_tensor(config.model, name, config.seed) for name in tensor_shapes(config.model)}
    save_weights(path, drawn, {})
    expected = train_in_rounds(config, tmp_path)
    found = train_in_rounds(starting_from(config, path), tmp_path)
    for node in range(config.nodes):
        assert_bitwise_equal(found[node], expected[node])


def test_one_full_node_in_rounds_is_plain_training_from_the_file(tmp_path: Path) -> None:
    config = tiny(nodes=1, partition={"kind": "full"}, merge={"enabled": False})
    path = tmp_path / "w.safetensors"
    save_weights(path, values(config), {})
    config = starting_from(config, path)
    assert_bitwise_equal(train_in_rounds(config, tmp_path)[0], train_alone(config, tmp_path))


def test_a_file_that_does_not_fit_is_one_clear_error(tmp_path: Path) -> None:
    config, path = tiny(), tmp_path / "w.safetensors"
    other = values(config)
    other["layers.0.experts.1.down"] = torch.zeros(2, 2)
    del other["final_norm"]
    save_weights(path, other, {})
    assert refusal(starting_from(config, path)) == (
        f"init.weights cannot be used: {path} does not hold the weights of this model: layers.0.experts.1.down has "
        "shape [2, 2], not [32, 16]; final_norm is missing"
    )
    config = replace(config, init=InitConfig(kind="weights", weights=str(tmp_path / "absent")))
    assert refusal(config).endswith("absent cannot be read: No such file or directory")


def test_another_file_than_the_run_was_planned_with_is_refused(tmp_path: Path) -> None:
    config, path = tiny(), tmp_path / "w.safetensors"
    save_weights(path, values(config), {})
    planned = starting_from(config, path)
    save_weights(path, values(config, seed=6), {})
    assert refusal(planned).startswith(f"init.digest ({planned.init.digest}) must be the SHA-256 of {path}, which is ")
    unplanned = replace(planned, init=replace(planned.init, digest=None))
    assert file_digest(path) in refusal(unplanned)


def test_identity_holds_what_the_file_holds_and_not_where_it_lies() -> None:
    one = InitConfig(kind="weights", weights="a", digest="1" * 64)
    config = RunConfig(init=one)
    assert digest(config) == digest(replace(config, init=replace(one, weights="b")))
    assert digest(config) != digest(replace(config, init=replace(one, digest="2" * 64)))
    assert digest(config) != digest(RunConfig())
    assert digest(RunConfig(init=replace(one, kind="random"))) == digest(RunConfig())


def test_weights_from_a_file_make_the_spread_of_drawn_ones_inapplicable() -> None:
    assert "model.init_std" in inapplicable(RunConfig(init=InitConfig(kind="weights", weights="a")))
    assert {"init.weights", "init.digest"} <= set(inapplicable(RunConfig()))


@pytest.mark.parametrize(
    ("init", "message"),
    [
        ({"kind": "weights"}, "init.weights (null) must be the path of a weights file"),
        ({"kind": "weights", "weights": "w", "digest": "abc"}, "init.digest (abc) must be a SHA-256"),
        ({"kind": "zeros"}, "init.kind ('zeros') must be one of random, weights"),
        ({"path": "w"}, "init.path is not a setting"),
    ],
)
def test_a_wrong_setting_of_the_start_is_named(init: dict[str, str], message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        from_dict({"init": init})
    assert str(caught.value).startswith(message)


def test_a_file_is_hashed_once_for_each_of_its_states(tmp_path: Path) -> None:
    path, cache = tmp_path / "w", tmp_path / "digests"
    path.write_bytes(b"one")
    first = file_digest(path, cache)
    (record,) = cache.iterdir()
    record.write_text(record.read_text().replace(first, "f" * 64))
    assert file_digest(path, cache) == "f" * 64, "the record was not used"
    os.utime(path, ns=(1, 1))
    assert file_digest(path, cache) == first
    path.write_bytes(b"other")
    assert file_digest(path, cache) not in (first, "f" * 64)
    record.write_text("torn{")
    assert file_digest(path, cache) == file_digest(path, tmp_path / "elsewhere")


def test_a_digest_needs_a_file_but_no_cache(tmp_path: Path) -> None:
    (tmp_path / "w").write_bytes(b"one")
    (tmp_path / "no folder").write_text("")
    assert file_digest(tmp_path / "w", tmp_path / "no folder") == file_digest(tmp_path / "w", tmp_path / "cache2")
    with pytest.raises(DataError, match="cannot be read: No such file"):
        file_digest(tmp_path / "absent")
