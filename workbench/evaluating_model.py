"""A language model as an evaluation sees it: tokens in, hidden states and logits out, and its tokenizer.

Made from a trial's weights (our own decoder) or from a folder in Hugging Face format; both compute the same function.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor

from spes_core.checkpoint import WeightsFile, check_forms
from spes_core.config import ComputeConfig, FrozenConfig
from spes_core.data import shards, vocabulary
from spes_core.errors import DataError
from spes_core.hf.export import export
from spes_core.initial import fill
from spes_core.model.counting import tensor_shapes
from spes_core.model.decoder import Decoder
from spes_core.runfile import RunFile

Precision = Literal["float32", "bfloat16"]


@dataclass(frozen=True, kw_only=True)
class Tokens:
    """A tokenizer: text to ids and back."""

    encode: Callable[[str, bool | None], list[int]]
    """Ids of a text; the flag asks for the tokenizer's own special tokens around it (None: its default)."""
    decode: Callable[[list[int]], str]
    end: int
    """Id of the end of a text; it also stands before one."""
    end_text: str
    """What it decodes to."""


@dataclass(frozen=True, kw_only=True)
class LanguageModel:
    """A causal model of ``context`` positions on ``device``.

    ``hidden``: ids (B, T) → states (B, T, D), where a position sees none behind it; ``unembed``: states (N, D) → logits
    (N, V).
    """

    hidden: Callable[[Tensor], Tensor]
    unembed: Callable[[Tensor], Tensor]
    tokens: Tokens
    context: int
    device: torch.device


def trial_model(trial_dir: Path, weights: Path, device: str, dtype: Precision) -> LanguageModel:
    """Our decoder with a trial's weights. Its context is the length that it was trained on. Raises DataError."""
    run = RunFile.load(trial_dir / "run.json")
    model = run.config.model
    # All experts lie in the frozen bank, which is stored in the type that they are used in.
    decoder = Decoder(model, (), compute=ComputeConfig(precision=dtype), frozen=FrozenConfig(dtype=dtype))
    with WeightsFile(weights) as source:
        check_forms(weights, source.forms, tensor_shapes(model))
        fill(decoder, source.tensor)
    decoder.to(place := _device(device)).eval()
    return LanguageModel(
        hidden=decoder.hidden,
        unembed=decoder.unembed,
        tokens=corpus_tokens(Path(run.data_dir)),
        context=run.config.data.sequence_length,
        device=place,
    )


def corpus_tokens(data_dir: Path) -> Tokens:
    """The tokenizer of a tokenized corpus: the only place where evaluation meets it. Raises DataError."""
    try:
        end = shards.read_header(data_dir).end_of_text_id
        tokenizer = vocabulary.load(data_dir)
    except Exception as error:  # the tokenizers library raises Exception itself
        raise DataError(
            f"the trial's tokenizer cannot be read from {data_dir} ({error}); run its study again, which prepares it"
        ) from error
    return Tokens(
        encode=lambda text, _: list(tokenizer.encode(text, add_special_tokens=False).ids),
        decode=lambda ids: str(tokenizer.decode(ids, skip_special_tokens=True)),
        end=end,
        end_text=str(tokenizer.id_to_token(end)),
    )


def exported_model(trial_dir: Path, weights: Path, folder: Path, device: str, dtype: Precision) -> LanguageModel:
    """A trial's weights exported to ``folder``, and read from there by the transformers library."""
    run = RunFile.load(trial_dir / "run.json")
    export(weights, folder, run=run, tokenizer=Path(run.data_dir))
    return hf_model(folder, device, dtype)


def hf_model(folder: Path, device: str, dtype: Precision) -> LanguageModel:
    """A causal model in Hugging Face format, by the transformers library, without remote code. Raises DataError."""
    import transformers

    place = _device(device)
    try:
        local: Any = {"local_files_only": True, "trust_remote_code": False}
        model: Any = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=getattr(torch, dtype), **local)
        tokenizer: Any = transformers.AutoTokenizer.from_pretrained(folder, **local)
    except Exception as error:
        # transformers raises many types for files that it cannot read.
        raise DataError(f"{folder} holds no model that can be read: {' '.join(str(error).split())[:300]}") from error
    model.to(place).eval()
    end = tokenizer.eos_token_id if tokenizer.bos_token_id is None else tokenizer.bos_token_id
    if end is None:
        raise DataError(f"the tokenizer in {folder} has no token for the beginning or the end of a text")

    def hidden(tokens_BT: Tensor) -> Tensor:
        with torch.no_grad():
            logits_BTV: Tensor = model(input_ids=tokens_BT, use_cache=False).logits
            return logits_BTV

    def encode(text: str, special: bool | None) -> list[int]:
        return list(tokenizer.encode(text) if special is None else tokenizer.encode(text, add_special_tokens=special))

    return LanguageModel(
        hidden=hidden,  # its logits: which states the class takes them from is its own affair
        unembed=lambda logits: logits,
        tokens=Tokens(
            encode=encode,
            decode=lambda ids: str(tokenizer.decode(ids, skip_special_tokens=True)),
            end=end,
            end_text=str(tokenizer.decode([end])),
        ),
        context=int(model.config.max_position_embeddings),
        device=place,
    )


def _device(name: str) -> torch.device:
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    if name == "cuda" and not torch.cuda.is_available():
        raise DataError("--device (cuda) is not there; use cpu or auto")
    return torch.device(name)
