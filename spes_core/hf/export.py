"""From trained weights to a folder that the Hugging Face classes load without remote code.

``python -m spes_core.hf.export WEIGHTS OUT`` takes a trial's folder or a weights file and writes OLMoE, Qwen3-MoE or
Mixtral, whichever computes the same function, with its tokenizer. Tensors pass one at a time; `importing` goes back.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import sys
from collections.abc import Mapping, Sequence
from math import inf
from pathlib import Path
from typing import Any

import torch

from spes_core.checkpoint import DTYPES, TensorForm, WeightsFile, check_forms, stored_model, write_weights
from spes_core.config import ModelConfig
from spes_core.errors import ConfigError, DataError, Problem
from spes_core.hf.commandline import status_of
from spes_core.hf.layout import Rows, checkpoint_rows, hf_config
from spes_core.hf.reading import INDEX, SINGLE
from spes_core.hf.tokenizer import read_tokenizer
from spes_core.model.counting import tensor_shapes
from spes_core.runfile import RunFile

_CLASSES = {"olmoe": "OlmoeForCausalLM", "qwen3_moe": "Qwen3MoeForCausalLM", "mixtral": "MixtralForCausalLM"}

_APART = (
    "note: this model was trained with data.document_attention separate, which no Hugging Face configuration can say;"
    " give it one document a sequence, which begins with the end of text (bos_token), as it was trained"
)


def main(argv: list[str] | None = None) -> int:
    """The command; its exit status."""
    parser = argparse.ArgumentParser(prog="python -m spes_core.hf.export", description=__doc__.splitlines()[0])
    parser.add_argument("weights", type=Path, help="a trial's folder, or a weights file (.safetensors)")
    parser.add_argument("out", type=Path, help="folder to write; must be absent or empty")
    parser.add_argument("--dtype", choices=DTYPES, default="float32", help="of the exported weights")
    parser.add_argument("--max-shard-gb", type=float, default=5.0, help="largest weights file, in 1e9 bytes")
    parser.add_argument(
        "--tokenizer",
        help='folder of a tokenized corpus or in Hugging Face format, a GGUF file, or "none"; default: the corpus that '
        "the trial's run.json names",
    )
    arguments = parser.parse_args(argv)

    def command() -> None:
        if not 0 < arguments.max_shard_gb < inf:
            raise ConfigError([Problem("--max-shard-gb", f"({arguments.max_shard_gb:g}) must be finite and above 0")])
        path, run = find_weights(arguments.weights)
        export(
            path,
            arguments.out,
            run=run,
            tokenizer=_tokenizer_path(arguments.tokenizer, run),
            dtype=DTYPES[arguments.dtype],
            max_shard_bytes=int(arguments.max_shard_gb * 1e9),
        )
        print(f"model: {arguments.out}")
        if run is not None and run.config.data.document_attention == "separate":
            print(_APART)

    return status_of(command)


def export(
    weights: Path,
    out: Path,
    *,
    run: RunFile | None = None,
    tokenizer: Path | None = None,
    dtype: torch.dtype = torch.float32,
    max_shard_bytes: int = 5 * 10**9,
) -> None:
    """Write the model in ``weights`` to the folder ``out``, which appears complete or not at all.

    The model's shape is the file's own metadata, or else ``run``'s. ``tokenizer`` goes to `read_tokenizer`; None writes
    none. Raises DataError, and ConfigError when no Hugging Face class computes this model.
    """
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise DataError(f"{out} exists already; name a new folder, or empty it")
    with WeightsFile(weights) as source:
        model = stored_model(source) or (run.config.model if run else None)
        if model is None:
            raise DataError(f"{weights} does not say which model it holds, and no run.json of its trial is there")
        check_forms(weights, source.forms, tensor_shapes(model))
        out = out.absolute()  # "." has no name to put beside
        draft = out.with_name(f".{out.name}.{os.getpid()}.partial")
        try:
            draft.mkdir(parents=True)
            _write_config(draft, model, run, dtype, None if tokenizer is None else read_tokenizer(tokenizer))
            _write_shards(draft, model, source, dtype, max_shard_bytes)
            draft.replace(out)
        except OSError as error:
            raise DataError(f"{out} cannot be written: {error.strerror or error}") from error
        finally:
            shutil.rmtree(draft, ignore_errors=True)


def find_weights(path: Path) -> tuple[Path, RunFile | None]:
    """The weights file that a trial's folder or a file's path means, and the trial's run.json when it lies beside."""
    weights = path / "weights" / "final.safetensors" if path.is_dir() else path
    runs = [weights.parent.parent / "run.json", weights.parent / "run.json"]
    return weights, next((RunFile.load(file) for file in runs if file.is_file()), None)


def shards_of(forms: Mapping[str, TensorForm], max_shard_bytes: int) -> list[list[str]]:
    """Keys in order, cut where a file would exceed the limit; a tensor larger than that has a file of its own."""
    shards: list[list[str]] = []
    filled = 0
    for key, form in forms.items():
        if not shards or filled + form.nbytes > max_shard_bytes:
            shards.append([])
            filled = 0
        shards[-1].append(key)
        filled += form.nbytes
    return shards


def _tokenizer_path(asked: str | None, run: RunFile | None) -> Path | None:
    if asked == "none":
        return None
    if asked is not None:
        return Path(asked)
    if run is None:
        raise DataError("no run.json names the corpus of these weights; give --tokenizer PATH, or --tokenizer none")
    return Path(run.data_dir)


def _write_config(folder: Path, model: ModelConfig, run: RunFile | None, dtype: torch.dtype, tokenizer: Any) -> None:
    import transformers

    # Positions beyond those trained on are a guess of the reader's, not a property of the model.
    config = hf_config(model, run.config.data.sequence_length) if run else hf_config(model)
    config.architectures, config.dtype = [_CLASSES[config.model_type]], dtype
    if tokenizer is not None:
        if len(tokenizer) > model.vocab_size:
            raise DataError(
                f"the tokenizer has {len(tokenizer)} ids, more than model.vocab_size ({model.vocab_size}); it is not "
                "the one that this model was trained with"
            )
        for token in ("bos", "eos", "pad"):
            setattr(config, f"{token}_token_id", getattr(tokenizer, f"{token}_token_id"))
        tokenizer.model_max_length = config.max_position_embeddings
        tokenizer.save_pretrained(folder)
    config.save_pretrained(folder)
    transformers.GenerationConfig.from_model_config(config).save_pretrained(folder)


def _write_shards(
    folder: Path, model: ModelConfig, source: WeightsFile, dtype: torch.dtype, max_shard_bytes: int
) -> None:
    rows, shapes = checkpoint_rows(model), tensor_shapes(model)
    forms = {key: TensorForm(_shape(piece, shapes[piece.name]), dtype) for key, piece in rows.items()}
    shards = shards_of(forms, max_shard_bytes)
    names = [SINGLE] if len(shards) == 1 else _shard_names(len(shards))
    for name, keys in zip(names, shards, strict=True):
        values = ((key, _rows(source, rows[key])) for key in keys)
        write_weights(folder / name, {key: forms[key] for key in keys}, values, {"format": "pt"})
    if len(shards) > 1:
        home = {key: name for name, keys in zip(names, shards, strict=True) for key in keys}
        index = {"metadata": {"total_size": sum(form.nbytes for form in forms.values())}, "weight_map": home}
        (folder / INDEX).write_text(json.dumps(index, indent=1) + "\n", encoding="utf-8")


def _shard_names(count: int) -> Sequence[str]:
    return [f"model-{number:05}-of-{count:05}.safetensors" for number in range(1, count + 1)]


def _shape(piece: Rows, shape: tuple[int, ...]) -> tuple[int, ...]:
    return shape if piece.end is None else (piece.end - piece.start, *shape[1:])


def _rows(source: WeightsFile, piece: Rows) -> torch.Tensor:
    return source.tensor(piece.name) if piece.end is None else source.rows(piece.name, piece.start, piece.end)


if __name__ == "__main__":
    sys.exit(main())
