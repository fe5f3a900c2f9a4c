"""Server and nodes as real processes start from one weights file."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from spes_core.checkpoint import load_weights, save_weights
from spes_core.config import InitConfig
from spes_core.data.batches import TokenSource
from spes_core.data.tokenize import prepare
from spes_core.filedigest import file_digest
from spes_core.model.counting import tensor_shapes
from tests.equivalence.participants import assert_bitwise_equal, tiny, train_in_rounds
from tests.processes.runs import outputs, run_all, save_run, start_all, with_corpus, write_corpus

pytestmark = pytest.mark.processes


def test_processes_start_from_the_weights_file(tmp_path: Path) -> None:
    (tmp_path / "corpus").mkdir()
    config, weights = with_corpus(tiny(), write_corpus(tmp_path / "corpus")), tmp_path / "start.safetensors"
    generator = torch.Generator().manual_seed(1)
    shapes = tensor_shapes(config.model)
    save_weights(weights, {name: torch.randn(shape, generator=generator) * 0.1 for name, shape in shapes.items()}, {})
    init = InitConfig(kind="weights", weights=str(weights), digest=file_digest(weights, tmp_path / "digests"))
    config = replace(config, init=init)
    data_dir = prepare(config.data, tmp_path / "cache")
    save_run(config, data_dir, tmp_path)
    run_all(tmp_path)
    expected = train_in_rounds(config, tmp_path / "inside", TokenSource(data_dir, config.data, config.seed))
    assert_bitwise_equal(load_weights(tmp_path / "weights" / "final.safetensors"), expected[0])


def test_a_wrong_file_ends_server_and_node_with_one_line(tmp_path: Path) -> None:
    (tmp_path / "w.safetensors").write_bytes(b"no weights")
    config = replace(tiny(), init=InitConfig(kind="weights", weights=str(tmp_path / "w.safetensors")))
    save_run(config, tmp_path, tmp_path)
    for status, output in outputs(start_all(tmp_path, but="node-1")).values():
        assert status == 2
        assert output.splitlines()[-1].startswith("error: init.weights cannot be used: ")
