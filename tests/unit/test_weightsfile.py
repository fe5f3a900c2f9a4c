"""`spes_core.weightsfile`: one weights file from the parts of several servers, and what must not become one."""

from __future__ import annotations

import os
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch

from spes_core import weightsfile
from spes_core.checkpoint import load_weights, save_weights
from spes_core.errors import DataError
from spes_core.weightsfile import FINAL, join_parts, part_file, recorded_digest, values_digest

SERVERS = ("server-0-of-2", "server-1-of-2")
NAMES = ["one", "two", "three", "four"]
DEALT = (("one", "four"), ("two", "three"))
METADATA = {"trial": "t", "model": '{"ü": 1}'}


def tensors(names: tuple[str, ...] | list[str]) -> dict[str, torch.Tensor]:
    # More than one piece, and one without values.
    sizes = {"one": 3, "two": 300_000, "three": 0, "four": 7}
    return {name: torch.arange(sizes[name], dtype=torch.float32) + ord(name[0]) for name in names}


def save_part(folder: Path, shard: int) -> Path:
    path = folder / part_file(SERVERS[shard])
    save_weights(path, tensors(DEALT[shard]), METADATA)
    return path


@pytest.fixture
def whole(tmp_path: Path) -> bytes:
    save_weights(tmp_path / "whole.safetensors", tensors(NAMES), METADATA)
    return (tmp_path / "whole.safetensors").read_bytes()


def test_parts_become_the_file_that_one_server_would_have_written(tmp_path: Path, whole: bytes) -> None:
    folder = tmp_path / "weights"
    save_part(folder, 0)
    assert not join_parts(folder, SERVERS, NAMES)
    assert [path.name for path in folder.iterdir()] == ["server-0-of-2.part"]
    save_part(folder, 1)
    assert join_parts(folder, SERVERS, NAMES)
    assert {path.name: path.read_bytes() for path in folder.iterdir()} == {FINAL: whole}
    assert join_parts(folder, SERVERS, NAMES)
    for names in DEALT:
        save_weights(tmp_path / "part", tensors(names), METADATA)
        assert values_digest(folder / FINAL, names) == recorded_digest(tmp_path / "part")


def test_servers_that_end_at_the_same_moment_leave_one_whole_file(
    tmp_path: Path, whole: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(weightsfile.os, "getpid", threading.get_ident)  # temporary names, as those of processes
    for turn in range(40):
        folder = tmp_path / str(turn)
        for shard in range(2):
            save_part(folder, shard)
        with ThreadPoolExecutor(4) as pool:
            assert all(pool.map(lambda _: join_parts(folder, SERVERS, NAMES), range(4)))  # noqa: B023
        assert {path.name: path.read_bytes() for path in folder.iterdir()} == {FINAL: whole}


def test_the_part_of_a_server_that_was_started_again_goes_unless_it_says_something_else(
    tmp_path: Path, whole: bytes
) -> None:
    for shard in range(2):
        save_part(tmp_path, shard)
    assert join_parts(tmp_path, SERVERS, NAMES)
    again = save_part(tmp_path, 1)
    assert join_parts(tmp_path, SERVERS, NAMES) and not again.exists()
    save_weights(again, {name: tensor + 1 for name, tensor in tensors(DEALT[1]).items()}, METADATA)
    assert join_parts(tmp_path, SERVERS, NAMES)
    assert again.exists(), "other values are not thrown away"
    assert (tmp_path / FINAL).read_bytes() == whole


@pytest.mark.parametrize("damage", ("torn", "empty", "other tensors", "no header"))
def test_parts_that_do_not_fit_give_one_error_and_stay(tmp_path: Path, damage: str) -> None:
    paths = [save_part(tmp_path, shard) for shard in range(2)]
    if damage == "torn":
        os.truncate(paths[1], paths[1].stat().st_size - 5)
    elif damage == "empty":
        os.truncate(paths[1], 0)
    elif damage == "no header":
        paths[1].write_bytes(b"\xff" * 200)
    else:
        save_weights(paths[1], tensors(["two"]), METADATA)
    with pytest.raises(DataError, match=r"final\.safetensors cannot be made from the parts of 2 servers|no readable"):
        join_parts(tmp_path, SERVERS, NAMES)
    assert sorted(tmp_path.iterdir()) == sorted(paths)


def test_a_weights_file_of_parts_is_one_for_its_readers(tmp_path: Path) -> None:
    for shard in range(2):
        save_part(tmp_path, shard)
    join_parts(tmp_path, SERVERS, NAMES)
    read = load_weights(tmp_path / FINAL)
    assert list(read) == NAMES
    assert all(torch.equal(read[name], tensor) for name, tensor in tensors(NAMES).items())
