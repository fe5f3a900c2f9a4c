"""Weights on disk: whatever happens, a file is the former one or the complete new one, and damage is named."""

from __future__ import annotations

import errno
import os
import signal
import subprocess
import sys
import textwrap
import weakref
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor

from spes_core.checkpoint import (
    VALUES_DIGEST,
    TensorForm,
    WeightsFile,
    check_forms,
    load_weights,
    model_metadata,
    save_weights,
    stored_model,
    write_weights,
)
from spes_core.config import ModelConfig
from spes_core.errors import DataError

TENSORS = {"b": torch.arange(12.0).view(3, 4), "a": torch.tensor([1.5, -2.0])}


def saved(tmp_path: Path) -> Path:
    path = tmp_path / "w.safetensors"
    save_weights(path, TENSORS, {"trial": "t"})
    return path


def assert_former_file(path: Path) -> None:
    loaded = load_weights(path)
    assert all(torch.equal(loaded[name], tensor) for name, tensor in TENSORS.items())
    assert [file.name for file in path.parent.iterdir()] == [path.name], "a partial file was left behind"


@settings(max_examples=25, deadline=None, derandomize=True)
@given(
    shapes=st.lists(st.lists(st.integers(1, 5), min_size=1, max_size=3), min_size=1, max_size=6),
    dtypes=st.lists(st.sampled_from([torch.float32, torch.bfloat16, torch.float16]), min_size=6, max_size=6),
    seed=st.integers(0, 99),
)
def test_the_safetensors_library_reads_every_bit_that_was_written(
    tmp_path_factory: pytest.TempPathFactory, shapes: list[list[int]], dtypes: list[torch.dtype], seed: int
) -> None:
    path = tmp_path_factory.mktemp("weights") / "w.safetensors"
    generator = torch.Generator().manual_seed(seed)
    tensors = {
        f"t{i}": torch.randn(shape, generator=generator).to(dtype)
        for i, (shape, dtype) in enumerate(zip(shapes, dtypes, strict=False))
    }
    save_weights(path, tensors, {"ü": 'a "quoted" text'})
    for read in (load_file(path), load_weights(path)):
        assert read.keys() == tensors.keys()
        assert all(read[name].dtype == t.dtype and torch.equal(read[name], t) for name, t in tensors.items())
    with safe_open(path, "pt") as file:
        assert file.metadata()["ü"] == 'a "quoted" text'


def test_files_of_the_safetensors_library_are_read_too(tmp_path: Path) -> None:
    save_file(TENSORS, tmp_path / "w.safetensors")
    loaded = load_weights(tmp_path / "w.safetensors")
    assert all(torch.equal(loaded[name], tensor) for name, tensor in TENSORS.items())


def test_slices_of_one_bank_and_transposed_tensors_are_written_as_they_are_seen(tmp_path: Path) -> None:
    bank = torch.arange(24.0).view(2, 3, 4)
    views = {"first": bank[0], "second": bank[1], "turned": bank[1].t(), "tied": bank[0]}
    save_weights(tmp_path / "w.safetensors", views, {})
    loaded = load_weights(tmp_path / "w.safetensors")
    assert all(torch.equal(loaded[name], view) for name, view in views.items())


def test_tensors_are_taken_one_at_a_time(tmp_path: Path) -> None:
    given: list[weakref.ref[Tensor]] = []

    def values() -> Iterator[tuple[str, Tensor]]:
        for index in range(20):
            alive = sum(reference() is not None for reference in given)
            assert alive <= 1, "tensors that were written are still held"
            tensor = torch.full((50,), float(index))
            given.append(weakref.ref(tensor))
            yield f"t{index}", tensor
            del tensor

    forms = {f"t{index}": TensorForm((50,)) for index in range(20)}
    write_weights(tmp_path / "w.safetensors", forms, values(), {})
    assert float(load_weights(tmp_path / "w.safetensors")["t19"][0]) == 19.0


def test_rows_are_read_without_the_rest(tmp_path: Path) -> None:
    with WeightsFile(saved(tmp_path)) as weights:
        assert torch.equal(weights.rows("b", 1, 3), TENSORS["b"][1:3])
        assert weights.forms["b"] == TensorForm((3, 4), torch.float32)
        assert list(weights.forms) == ["b", "a"]
        assert weights.metadata["trial"] == "t"


def test_any_changed_byte_of_the_values_is_found(tmp_path: Path) -> None:
    path = saved(tmp_path)
    whole = path.read_bytes()
    start = 8 + int.from_bytes(whole[:8], "little")
    for position in range(start, len(whole)):
        path.write_bytes(whole[:position] + bytes([whole[position] ^ 1]) + whole[position + 1 :])
        with pytest.raises(DataError, match=r"w\.safetensors is damaged: its values have digest"):
            load_weights(path)


def test_a_torn_file_is_one_line_wherever_it_is_torn(tmp_path: Path) -> None:
    path = saved(tmp_path)
    whole = path.read_bytes()
    for length in range(len(whole)):
        path.write_bytes(whole[:length])
        with pytest.raises(DataError, match=r"w\.safetensors cannot be read as weights") as caught:
            load_weights(path)
        assert "\n" not in str(caught.value)


@pytest.mark.parametrize("content", [b"", b"PK\x03\x04" * 40, b"\x80\x04pickle" * 20, b'{"a": 1}'])
def test_a_foreign_file_is_one_line(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "w.safetensors"
    path.write_bytes(content)
    with pytest.raises(DataError, match="torn or no safetensors file") as caught:
        load_weights(path)
    assert "\n" not in str(caught.value)


def test_a_missing_file_and_a_folder_are_named(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"absent\.safetensors cannot be read as weights: No such file"):
        load_weights(tmp_path / "absent.safetensors")
    with pytest.raises(DataError, match="cannot be read as weights: Is a directory"):
        load_weights(tmp_path)


def test_a_dtype_that_weights_do_not_have_is_named(tmp_path: Path) -> None:
    save_file({"ids": torch.arange(3)}, tmp_path / "w.safetensors")
    with pytest.raises(DataError, match=r"holds ids as I64, which is no dtype of weights"):
        load_weights(tmp_path / "w.safetensors")


def test_an_error_while_writing_keeps_the_former_file(tmp_path: Path) -> None:
    path = saved(tmp_path)

    def values() -> Iterator[tuple[str, Tensor]]:
        yield "b", torch.zeros(3, 4)
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    forms = {name: TensorForm(tuple(tensor.shape)) for name, tensor in TENSORS.items()}
    with pytest.raises(DataError, match=r"cannot be written \(No space left on device\); the former file is kept"):
        write_weights(path, forms, values(), {})
    assert_former_file(path)


def test_a_full_disk_is_one_line_and_keeps_the_former_file(tmp_path: Path) -> None:
    """The system refuses to let the file grow, as a full disk does."""
    path = saved(tmp_path)
    code = f"""
        import resource, signal, sys, torch
        from pathlib import Path
        from spes_core.checkpoint import save_weights
        from spes_core.errors import DataError
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, 100_000))
        try:
            save_weights(Path({str(path)!r}), {{"big": torch.zeros(100_000)}}, {{}})
        except DataError as error:
            sys.exit(str(error))
    """
    done = subprocess.run([sys.executable, "-c", textwrap.dedent(code)], capture_output=True, text=True, check=False)
    assert done.stderr.strip() == f"{path} cannot be written (File too large); the former file is kept"
    assert_former_file(path)


def test_a_process_killed_while_writing_leaves_the_former_file(tmp_path: Path) -> None:
    path = saved(tmp_path)
    code = f"""
        import os, signal, torch
        from pathlib import Path
        from spes_core.checkpoint import TensorForm, write_weights
        def values():
            yield "a", torch.zeros(1000)
            os.kill(os.getpid(), signal.SIGKILL)
        write_weights(Path({str(path)!r}), {{"a": TensorForm((1000,)), "b": TensorForm((1,))}}, values(), {{}})
    """
    done = subprocess.run([sys.executable, "-c", textwrap.dedent(code)], capture_output=True, check=False)
    assert done.returncode == -signal.SIGKILL
    loaded = load_weights(path)
    assert all(torch.equal(loaded[name], tensor) for name, tensor in TENSORS.items())


def test_a_place_that_takes_no_file_is_one_line(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(DataError, match=r"w\.safetensors cannot be written \(.*\); nothing was written"):
        save_weights(tmp_path / "file" / "w.safetensors", TENSORS, {})
    if os.geteuid() != 0:  # permissions do not hold for root
        (tmp_path / "locked").mkdir(mode=0o500)
        with pytest.raises(DataError, match=r"cannot be written \(Permission denied\)"):
            save_weights(tmp_path / "locked" / "w.safetensors", TENSORS, {})


def test_the_same_weights_give_the_same_file(tmp_path: Path) -> None:
    first = saved(tmp_path).read_bytes()
    assert saved(tmp_path).read_bytes() == first
    assert VALUES_DIGEST.encode() in first


def test_what_does_not_fit_a_model_is_named() -> None:
    found = {"a": TensorForm((2,)), "b": TensorForm((3, 4)), "extra": TensorForm((1,))}
    check_forms(Path("w"), {"a": TensorForm((2,))}, {"a": (2,)})
    with pytest.raises(DataError) as caught:
        check_forms(Path("w"), found, {"a": (2,), "b": (4, 3), "c": (1,)})
    assert str(caught.value) == (
        "w does not hold the weights of this model: b has shape [3, 4], not [4, 3]; c is missing; "
        "extra does not belong to it"
    )


def test_a_file_says_which_model_it_holds(tmp_path: Path) -> None:
    path, model = tmp_path / "w.safetensors", ModelConfig(num_layers=3, qk_norm="per_head", norm_eps=1e-6)
    save_weights(path, TENSORS, model_metadata(model))
    assert stored_model(WeightsFile(path)) == model
    assert stored_model(WeightsFile(saved(tmp_path))) is None
    for text in ("{", '{"num_layer": 3}', "[]"):
        save_weights(path, TENSORS, {"model": text})
        with pytest.raises(DataError, match="describes a model that cannot be read") as caught:
            stored_model(WeightsFile(path))
        assert "\n" not in str(caught.value)
