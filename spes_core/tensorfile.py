"""Tensors in one safetensors file, written and read one at a time: never a second copy of them all in memory."""

from __future__ import annotations

import hashlib
import json
import struct
from collections.abc import Iterator, Mapping
from pathlib import Path

import torch
from safetensors import safe_open
from torch import Tensor

_DTYPES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}


def write_tensors(path: Path, tensors: Mapping[str, Tensor]) -> str:
    """Write a safetensors file; the SHA-256 (hex) of its bytes. Tensors may lie anywhere and be of any layout."""
    header, offset = {}, 0
    for name, tensor in tensors.items():
        end = offset + tensor.numel() * tensor.element_size()
        header[name] = {"dtype": _DTYPES[tensor.dtype], "shape": list(tensor.shape), "data_offsets": [offset, end]}
        offset = end
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    hasher = hashlib.sha256()
    with path.open("wb") as file:
        for part in (struct.pack("<Q", len(text)), text):
            hasher.update(part)
            file.write(part)
        for tensor in tensors.values():
            values = tensor.detach().cpu().contiguous().view(-1)
            if values.numel():
                data = values.view(torch.uint8).numpy().data
                hasher.update(data)
                file.write(data)
    return hasher.hexdigest()


def read_tensors(path: Path) -> Iterator[tuple[str, Tensor]]:
    """(name, tensor) of everything in a safetensors file; each is read when it is asked for."""
    with safe_open(path, framework="pt") as file:
        for name in file.offset_keys():
            yield name, file.get_tensor(name)
