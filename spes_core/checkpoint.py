"""Weights on disk: one safetensors file by canonical names, complete or absent, written and read tensor by tensor.

The file is written here rather than by the safetensors library because that wants all tensors in memory at once, and
apart: a model in stacked banks, or gathered from ranks one tensor at a time, would be held twice. The layout is the
library's: the header's length (8 bytes, little endian), a JSON header, then the values, with no gap between them.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from types import TracebackType
from typing import Any, BinaryIO, NamedTuple

import torch
import xxhash
from safetensors import safe_open
from torch import Tensor

from spes_core.config import ModelConfig, digest, to_dict
from spes_core.errors import DataError
from spes_core.runfile import RunFile
from spes_core.structure import build
from spes_core.weightsfile import HEX_DIGITS, VALUES_DIGEST, header_bytes

TensorOf = Callable[[str], Tensor]
"""Gives the tensor with a canonical name; may read it from a disk."""

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
"""Dtypes of weights by their name in settings and on the command line."""

MODEL = "model"
"""Metadata key: the model section of the configuration, as JSON."""

_CODES = {torch.float32: "F32", torch.bfloat16: "BF16", torch.float16: "F16"}


class TensorForm(NamedTuple):
    """What a tensor's place in a file must be."""

    shape: tuple[int, ...]
    dtype: torch.dtype = torch.float32

    @property
    def nbytes(self) -> int:
        """Bytes of its values."""
        return torch.Size(self.shape).numel() * self.dtype.itemsize


def save_weights(path: Path, tensors: Mapping[str, Tensor], metadata: Mapping[str, str]) -> None:
    """`write_weights` of tensors that are all at hand, each in its own dtype."""
    forms = {name: TensorForm(tuple(tensor.shape), tensor.dtype) for name, tensor in tensors.items()}
    write_weights(path, forms, tensors.items(), metadata)


def save_final(run: RunFile, trial_dir: Path, tensors: Mapping[str, Tensor], name: str) -> None:
    """Keep the trained weights of a trial, with what they are and where they come from."""
    config = run.config
    origin = {
        "trial": run.trial,
        "config_digest": digest(config),
        "tokens": str(config.total_steps * config.tokens_per_step),
    }
    save_weights(trial_dir / "weights" / name, tensors, origin | model_metadata(config.model))


def write_weights(
    path: Path, forms: Mapping[str, TensorForm], values: Iterable[tuple[str, Tensor]], metadata: Mapping[str, str]
) -> None:
    """Write tensors as they come from ``values`` (in the order of ``forms``; any device), one in memory at a time.

    They go to a file beside ``path``, which is flushed to the disk and then renamed over it: whatever happens, ``path``
    is the former file or the complete new one. Raises DataError when the disk does not take it.
    """
    partial = path.with_name(f".{path.name}.{os.getpid()}.partial")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with partial.open("wb") as file:
            _write(file, forms, values, metadata)
            file.flush()
            os.fsync(file.fileno())
        partial.replace(path)
        flush_folder(path.parent)
    except OSError as error:
        kept = "the former file is kept" if path.exists() else "nothing was written"
        raise DataError(f"{path} cannot be written ({error.strerror or error}); {kept}") from error
    finally:
        _remove(partial)


def load_weights(path: Path) -> dict[str, Tensor]:
    """All tensors of a file that `write_weights` wrote, checked against its digest of values. Raises DataError."""
    with WeightsFile(path) as weights:
        tensors = {name: weights.tensor(name) for name in weights.forms}
        expected = weights.metadata.get(VALUES_DIGEST)
    hasher = xxhash.xxh3_64()
    for tensor in tensors.values():
        hasher.update(_as_bytes(tensor))
    if expected is not None and hasher.hexdigest() != expected:
        raise DataError(
            f"{path} is damaged: its values have digest {hasher.hexdigest()}, and {expected} was recorded when it was "
            "written; copy it again, or go back to an earlier one"
        )
    return tensors


class WeightsFile:
    """A safetensors file that is read tensor by tensor; a context manager. Raises DataError when it cannot be read."""

    def __init__(self, path: Path) -> None:
        self.path = path
        with _readable(path):
            with path.open("rb"):  # the library's message for a missing file does not name it
                pass
            file: Any = safe_open(path, framework="pt")
            self._file = file
            self.metadata: dict[str, str] = file.metadata() or {}
            self.forms = {name: self._form(name) for name in file.offset_keys()}
            """Shape and dtype of each tensor, in the order of the file."""

    def tensor(self, name: str) -> Tensor:
        """One tensor, whose memory is the file's pages until it is written to. ``name`` must be one of `forms`."""
        with _readable(self.path):
            tensor: Tensor = self._file.get_tensor(name)
            return tensor

    def rows(self, name: str, start: int, end: int) -> Tensor:
        """Rows ``start`` to ``end`` of one tensor, without reading the others."""
        with _readable(self.path):
            tensor: Tensor = self._file.get_slice(name)[start:end]
            return tensor

    def __enter__(self) -> WeightsFile:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._file.__exit__(kind, error, trace)

    def _form(self, name: str) -> TensorForm:
        piece = self._file.get_slice(name)
        by_code = {code: dtype for dtype, code in _CODES.items()}
        if piece.get_dtype() not in by_code:
            raise DataError(
                f"{self.path} holds {name} as {piece.get_dtype()}, which is no dtype of weights; "
                f"valid: {', '.join(_CODES.values())}"
            )
        return TensorForm(tuple(piece.get_shape()), by_code[piece.get_dtype()])


def check_forms(path: Path, found: Mapping[str, TensorForm], expected: Mapping[str, tuple[int, ...]]) -> None:
    """Raises DataError, naming the first few differences, unless a file holds exactly the tensors expected."""
    missing = [f"{name} is missing" for name in expected if name not in found]
    extra = [f"{name} does not belong to it" for name in found if name not in expected]
    misshapen = [
        f"{name} has shape {list(found[name].shape)}, not {list(shape)}"
        for name, shape in expected.items()
        if name in found and found[name].shape != shape
    ]
    if wrong := [*misshapen, *missing, *extra]:
        more = f" and {len(wrong) - 3} more" if len(wrong) > 3 else ""
        raise DataError(f"{path} does not hold the weights of this model: {'; '.join(wrong[:3])}{more}")


def model_metadata(model: ModelConfig) -> dict[str, str]:
    """The metadata that makes a weights file complete without its run."""
    return {MODEL: json.dumps(to_dict(model))}


def stored_model(weights: WeightsFile) -> ModelConfig | None:
    """The model that a file says it holds; None when it does not say. Raises DataError when that is unreadable."""
    if MODEL not in weights.metadata:
        return None
    try:
        return build(ModelConfig, json.loads(weights.metadata[MODEL]))
    except ValueError as error:  # ConfigError is one too
        raise DataError(
            f"{weights.path} describes a model that cannot be read: {' '.join(str(error).split())}"
        ) from error


def flush_folder(folder: Path) -> None:
    """Make a rename in a folder durable."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _write(
    file: BinaryIO, forms: Mapping[str, TensorForm], values: Iterable[tuple[str, Tensor]], metadata: Mapping[str, str]
) -> None:
    header = _header(forms, {**metadata, VALUES_DIGEST: "0" * HEX_DIGITS})
    file.write(header)
    hasher = xxhash.xxh3_64()
    expected = iter(forms.items())
    for name, tensor in values:
        wanted, form = next(expected)
        assert (name, tuple(tensor.shape)) == (wanted, form.shape), f"{name} {tuple(tensor.shape)} came for {wanted}"
        data = _as_bytes(tensor.detach().to("cpu", form.dtype))
        hasher.update(data)
        file.write(data)
    assert next(expected, None) is None, "fewer tensors came than were announced"
    file.seek(0)  # the digest is only known now; it takes the place that was kept for it
    file.write(_header(forms, {**metadata, VALUES_DIGEST: hasher.hexdigest()}))
    assert file.tell() == len(header)


def _header(forms: Mapping[str, TensorForm], metadata: Mapping[str, str]) -> bytes:
    entries = {name: (_CODES[form.dtype], form.shape, form.nbytes) for name, form in forms.items()}
    return header_bytes(entries, metadata)


def _as_bytes(tensor: Tensor) -> memoryview:
    flat = tensor.contiguous().view(-1).view(torch.uint8)
    data: memoryview = flat.numpy().data
    return data


def _remove(partial: Path) -> None:
    # A full or read-only disk has been reported already; what is left over harms no one.
    try:
        partial.unlink(missing_ok=True)
    except OSError:
        return


@contextmanager
def _readable(path: Path) -> Iterator[None]:
    """Turn what goes wrong in reading into one line."""
    try:
        yield
    except DataError:
        raise
    except OSError as error:
        raise DataError(f"{path} cannot be read as weights: {error.strerror or error}") from error
    except Exception as error:
        # The safetensors library raises an exception of its own for a torn or foreign file.
        detail = " ".join(str(error).split())
        raise DataError(f"{path} cannot be read as weights ({detail}): it is torn or no safetensors file") from error
