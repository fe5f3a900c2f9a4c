"""From a folder in Hugging Face format to weights that a run can start from.

``python -m spes_core.hf.importing FOLDER --to WEIGHTS.safetensors`` reads OLMoE, Qwen3-MoE and Mixtral checkpoints,
tensor by tensor, keeps every bit, and writes beside the weights the settings that a study needs (WEIGHTS.yaml).
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import NamedTuple

import torch
import yaml
from torch import Tensor

from spes_core.checkpoint import TensorForm, TensorOf, check_forms, model_metadata, write_weights
from spes_core.config import InitConfig, ModelConfig, to_dict
from spes_core.errors import DataError
from spes_core.filedigest import file_digest
from spes_core.hf.commandline import status_of
from spes_core.hf.layout import checkpoint_sources
from spes_core.hf.reading import MOE, moe_model, read_model
from spes_core.hf.tokenizer import tokenizer_settings
from spes_core.model.counting import tensor_shapes


class CanonicalModel(NamedTuple):
    """A model under canonical names whose tensors are read one at a time."""

    model: ModelConfig
    forms: dict[str, TensorForm]
    """Shape and dtype of each tensor, in canonical order."""
    tensor: TensorOf


def main(argv: list[str] | None = None) -> int:
    """The command; its exit status."""
    parser = argparse.ArgumentParser(prog="python -m spes_core.hf.importing", description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path, help="folder with config.json and safetensors files")
    parser.add_argument("--to", type=Path, required=True, metavar="WEIGHTS.safetensors", help="file to write")
    arguments = parser.parse_args(argv)

    def command() -> None:
        source = read_hf_folder(arguments.folder)
        origin = {"origin": f"imported from {arguments.folder.resolve().name}"}
        values = ((name, source.tensor(name)) for name in source.forms)
        save_start(arguments.to, source.model, source.forms, values, origin, arguments.folder)

    return status_of(command)


def read_hf_folder(folder: Path) -> CanonicalModel:
    """Open a checkpoint. Raises DataError naming what this engine does not compute, or which tensor does not fit."""
    source = read_model(folder, MOE)
    model = moe_model(source.config, folder)
    sources = checkpoint_sources(model)
    known = {key for keys in sources.values() for key in keys}
    missing, extra = known - source.forms.keys(), source.forms.keys() - known
    if model.tie_embeddings:
        extra -= {"lm_head.weight"}  # some files hold the embedding twice
    if missing or extra:
        what = [
            *(f"it has no {key}" for key in sorted(missing)[:2]),
            *(f"{key} is unknown" for key in sorted(extra)[:2]),
        ]
        raise DataError(f"{folder} does not hold the tensors of its config.json: {'; '.join(what)}")
    forms = {name: _joined([source.forms[key] for key in keys], name, folder) for name, keys in sources.items()}
    check_forms(folder, forms, tensor_shapes(model))

    def tensor(name: str) -> Tensor:
        parts = [source.tensor(key) for key in sources[name]]
        return torch.cat(parts) if len(parts) > 1 else parts[0]

    return CanonicalModel(model, forms, tensor)


def save_start(
    path: Path,
    model: ModelConfig,
    forms: Mapping[str, TensorForm],
    values: Iterable[tuple[str, Tensor]],
    origin: Mapping[str, str],
    foreign: Path | None = None,
) -> None:
    """Write weights that a run can start from, and beside them (.yaml) what a study sets to do so; say so on stdout.

    The settings name the tokenizer of the ``foreign`` model when it has one. Raises DataError.
    """
    write_weights(path, forms, values, {**origin, **model_metadata(model)})
    init = InitConfig(kind="weights", weights=str(path), digest=file_digest(path))
    settings = {"model": to_dict(model), "init": to_dict(init)}
    if foreign is not None and (data := tokenizer_settings(foreign)):
        settings["data"] = data
    text = f"# Settings of a run that starts from {path.name}: put them under `run` in a study.\n"
    text += yaml.safe_dump(settings, sort_keys=False)
    section = path.with_suffix(".yaml")
    try:
        section.write_text(text, encoding="utf-8")
    except OSError as error:
        raise DataError(f"{section} cannot be written: {error.strerror or error}") from error
    print(f"weights: {path}\nsettings: {section}")


def _joined(parts: list[TensorForm], name: str, folder: Path) -> TensorForm:
    """The form of tensors stacked by rows."""
    first = parts[0]
    if any((part.shape[1:], part.dtype) != (first.shape[1:], first.dtype) for part in parts):
        raise DataError(f"{folder} holds the parts of {name} in different widths or dtypes")
    rows = sum(part.shape[0] for part in parts)
    return TensorForm((rows, *first.shape[1:]), first.dtype)


if __name__ == "__main__":
    sys.exit(main())
