"""Under every codec all holders have the server's bits after each round, and training still works."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from spes_core.sync.parameter_server import ParameterServer
from spes_core.train.exchange import Exchange
from spes_core.train.loop import Training
from tests.equivalence.participants import make_server, tiny, train_together

CODECS = ["float32", "bfloat16", "int8", "int4"]


def train(folder: Path, **changes: Any) -> tuple[ParameterServer, list[Training]]:
    return train_together(tiny(**changes), folder)


def exact_values(training: Training) -> np.ndarray:
    """All tensors as the node's global copy has them, end to end."""
    assert isinstance(training.exchange, Exchange)
    copy = training.exchange._copy
    return np.concatenate([copy.exact(index).copy() for index in range(len(copy.sizes))])


@pytest.mark.parametrize("codec", CODECS)
@pytest.mark.parametrize("method", ["sparse", "full", "outer", "not merged"])
def test_every_node_has_the_bits_of_the_server(codec: str, method: str, tmp_path: Path) -> None:
    changes: dict[str, Any] = {
        "sparse": {"merge": {"alpha": 0.3}},
        "full": {"partition": {"kind": "full"}},
        "outer": {"outer": {"kind": "nesterov"}},
        "not merged": {"merge": {"enabled": False}},
    }[method]
    server, trainings = train(tmp_path, wire={"dtype": codec}, **changes)
    for training in trainings:
        assert exact_values(training).tobytes() == server.state.values.tobytes()
        flat = torch.cat([tensor.flatten() for tensor in training.decoder.tensors().values()])
        assert flat.numpy().tobytes() == server.state.values.tobytes()


@pytest.mark.parametrize("codec", CODECS[1:])
@pytest.mark.parametrize("is_merging", [True, False])
def test_rounded_experts_are_the_rounded_global_ones(codec: str, is_merging: bool, tmp_path: Path) -> None:
    changes = {"frozen": {"dtype": "bfloat16"}, "merge": {"enabled": is_merging}}
    server, trainings = train(tmp_path, wire={"dtype": codec}, **changes)
    for training in trainings:
        assert exact_values(training).tobytes() == server.state.values.tobytes()
        for index, tensor in enumerate(training.decoder.tensors().values()):
            expected = torch.from_numpy(server.state.tensor(index)).to(tensor.dtype)
            assert torch.equal(tensor.flatten(), expected)


def test_exact_rounds_need_no_second_copy_of_rounded_experts_and_still_check_every_bit(tmp_path: Path) -> None:
    server, trainings = train(tmp_path, frozen={"dtype": "bfloat16"})
    for training in trainings:
        assert isinstance(training.exchange, Exchange) and training.exchange._copy.nbytes == 0
        for index, tensor in enumerate(training.decoder.tensors().values()):
            expected = torch.from_numpy(server.state.tensor(index)).to(tensor.dtype)
            assert torch.equal(tensor.flatten(), expected)


def test_lossy_codecs_end_near_the_exact_one(tmp_path: Path) -> None:
    finals = {codec: train(tmp_path / codec, wire={"dtype": codec})[0].state.values for codec in CODECS}
    start = make_server(tiny(), tmp_path / "start").state.values
    moved = float(np.linalg.norm(finals["float32"] - start))
    off = {codec: float(np.linalg.norm(values - finals["float32"])) / moved for codec, values in finals.items()}
    assert 0 == off["float32"] < off["bfloat16"] < off["int8"] < off["int4"] < 0.5
    assert off["bfloat16"] < 0.01 and off["int8"] < 0.05
