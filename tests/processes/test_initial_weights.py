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
from tests.processes.test_methods import corpus, save_run, start, with_corpus  # noqa: F401

pytestmark = pytest.mark.processes


def test_processes_start_from_the_weights_file(corpus: Path, tmp_path: Path) -> None:  # noqa: F811
    config, weights = with_corpus(tiny(), corpus), tmp_path / "start.safetensors"
    generator = torch.Generator().manual_seed(1)
    shapes = tensor_shapes(config.model)
    save_weights(weights, {name: torch.randn(shape, generator=generator) * 0.1 for name, shape in shapes.items()}, {})
    init = InitConfig(kind="weights", weights=str(weights), digest=file_digest(weights, tmp_path / "digests"))
    config = replace(config, init=init)
    data_dir = prepare(config.data, tmp_path / "cache")
    save_run(config, data_dir, tmp_path)
    server = start("spes_core.server", tmp_path / "run.json")
    nodes = [start("spes_core.node", tmp_path / "run.json", "--node", str(node)) for node in range(config.nodes)]
    for process in (*nodes, server):
        output, _ = process.communicate(timeout=120)
        assert process.returncode == 0, output
    expected = train_in_rounds(config, tmp_path / "inside", TokenSource(data_dir, config.data, config.seed))
    assert_bitwise_equal(load_weights(tmp_path / "weights" / "final.safetensors"), expected[0])


def test_a_wrong_file_ends_server_and_node_with_one_line(tmp_path: Path) -> None:
    (tmp_path / "w.safetensors").write_bytes(b"no weights")
    config = replace(tiny(), init=InitConfig(kind="weights", weights=str(tmp_path / "w.safetensors")))
    save_run(config, tmp_path, tmp_path)
    for arguments in (["spes_core.server"], ["spes_core.node"]):
        process = start(*arguments, tmp_path / "run.json")
        output, _ = process.communicate(timeout=60)
        assert process.returncode == 2
        assert output.splitlines()[-1].startswith("error: init.weights cannot be used: ")
