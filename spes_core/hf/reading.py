"""Reading what others wrote: a model's configuration and tensors from a folder in Hugging Face format, or a GGUF file.

Nothing is executed that the folder brings: no remote code, no pickle. What this engine does not compute the same way is
refused by the name of its key.
"""

from __future__ import annotations

import importlib.util
import json
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

from spes_core.checkpoint import TensorForm, TensorOf, WeightsFile
from spes_core.config import DataConfig, ModelConfig, RunConfig, to_dict
from spes_core.errors import ConfigError, DataError
from spes_core.rules import check
from spes_core.structure import build

MOE = ("olmoe", "qwen3_moe", "mixtral")
DENSE = ("llama", "qwen3")

_QK_NORM: dict[str, Literal["full", "per_head", "none"]] = {
    "olmoe": "full",
    "qwen3_moe": "per_head",
    "mixtral": "none",
    "llama": "none",
    "qwen3": "per_head",
}

CONFIG, SINGLE, INDEX = "config.json", "model.safetensors", "model.safetensors.index.json"

_DERIVED = "rotary_emb.inv_freq"
"""Ending of keys that old checkpoints hold though they follow from the configuration."""


class HfModel(NamedTuple):
    """A model in Hugging Face's terms whose tensors are read one at a time."""

    config: Any
    """The transformers configuration."""
    forms: dict[str, TensorForm]
    """Shape and dtype of each tensor by Hugging Face key."""
    tensor: TensorOf
    """Gives one tensor by its key."""


def read_model(path: Path, kinds: tuple[str, ...]) -> HfModel:
    """Open a folder in Hugging Face format, or a GGUF file, that holds a model of one of ``kinds`` (model_type).

    Raises DataError naming every key of the configuration that this engine cannot follow.
    """
    if path.is_file():
        model = _read_gguf(path)
        _check(model.config, path, kinds)
        return model
    config = _read_config(path, kinds)
    _check(config, path / CONFIG, kinds)
    files = [WeightsFile(path / name) for name in _weight_files(path)]
    homes = {key: file for file in files for key in file.forms if not key.endswith(_DERIVED)}
    return HfModel(config, {key: file.forms[key] for key, file in homes.items()}, lambda key: homes[key].tensor(key))


def moe_model(config: Any, where: Path) -> ModelConfig:
    """Our description of a Mixture-of-Experts configuration. Raises DataError when it breaks one of our rules."""
    kind = config.model_type
    experts = {"num_experts": config.num_local_experts if kind == "mixtral" else config.num_experts}
    model = ModelConfig(
        **_common(config),
        **experts,
        top_k=config.num_experts_per_tok,
        expert_hidden=config.moe_intermediate_size if kind == "qwen3_moe" else config.intermediate_size,
        qk_norm=_QK_NORM[kind],
        normalize_top_k=True if kind == "mixtral" else config.norm_topk_prob,
    )
    return checked(model, where)


def upcycled_model(config: Any, num_experts: int, top_k: int, where: Path) -> ModelConfig:
    """A dense configuration whose feed-forward became ``num_experts`` experts. Raises DataError as `moe_model`."""
    model = ModelConfig(
        **_common(config),
        num_experts=num_experts,
        top_k=top_k,
        expert_hidden=config.intermediate_size,
        qk_norm=_QK_NORM[config.model_type],
        normalize_top_k=True,
    )
    return checked(model, where)


def checked(model: ModelConfig, where: Path) -> ModelConfig:
    """The model itself. Raises DataError when it breaks a rule for models."""
    try:
        read = build(ModelConfig, to_dict(model), "model")  # numbers may be of any type in foreign files
        config = RunConfig(model=read, data=DataConfig(tokenizer_vocab_size=257))
        problems = [problem for problem in check(config) if problem.path.startswith("model.")]
    except ConfigError as error:
        problems = list(error.problems)
    if problems:
        raise DataError(f"{where} describes a model that cannot be trained here: {'; '.join(map(str, problems))}")
    return read


def _common(config: Any) -> dict[str, Any]:
    heads, head_dim = config.num_attention_heads, getattr(config, "head_dim", None)
    plain = head_dim is None or head_dim * heads == config.hidden_size
    return {
        "num_layers": config.num_hidden_layers,
        "d_model": config.hidden_size,
        "num_heads": heads,
        "num_kv_heads": config.num_key_value_heads,
        "head_dim": None if plain else head_dim,
        "vocab_size": config.vocab_size,
        "tie_embeddings": config.tie_word_embeddings,
        "rope_theta": config.rope_parameters["rope_theta"],
        "norm_eps": config.rms_norm_eps,
        "init_std": config.initializer_range,
    }


# Key -> (whether its value can be followed, what it must be). Keys that a configuration lacks are not looked at.
_RULES: dict[str, tuple[Callable[[Any], bool], str]] = {
    "hidden_act": (lambda v: v in ("silu", "swish"), "silu: experts are SwiGLU"),
    "attention_bias": (lambda v: not v, "false: projections have no bias"),
    "mlp_bias": (lambda v: not v, "false: projections have no bias"),
    "attention_dropout": (lambda v: not v, "0: there is no dropout"),
    "clip_qkv": (lambda v: v is None, "null: queries, keys and values are not clipped"),
    "sliding_window": (lambda v: v is None, "null: attention looks at the whole sequence"),
    "layer_types": (
        lambda v: v is None or set(v) == {"full_attention"},
        "full_attention in all layers: attention looks at the whole sequence",
    ),
    "mlp_only_layers": (lambda v: not v, "empty: every layer has experts"),
    "decoder_sparse_step": (lambda v: v == 1, "1: every layer has experts"),
    "n_shared_experts": (lambda v: not v, "0: there are no shared experts"),
    "num_shared_experts": (lambda v: not v, "0: there are no shared experts"),
    "shared_expert_intermediate_size": (lambda v: not v, "0: there are no shared experts"),
    "router_jitter_noise": (lambda v: not v, "0: the router has no noise"),
    "pretraining_tp": (lambda v: v in (None, 1), "1: products are not split"),
    "quantization_config": (lambda v: v is None, "absent: dequantise the weights first"),
    "rope_parameters.rope_type": (lambda v: v == "default", "default: rotary angles are not rescaled"),
    "rope_parameters.partial_rotary_factor": (lambda v: v in (None, 1, 1.0), "1: all of a head is rotated"),
}


def _check(config: Any, where: Path, kinds: tuple[str, ...]) -> None:
    if config.model_type not in kinds:
        raise _wrong_kind(where, config.model_type, kinds)
    wrong = [
        f"{key} ({_shown(value)}) must be {rule}"
        for key, (can_follow, rule) in _RULES.items()
        for value in _values(config, key)
        if not can_follow(value)
    ]
    if wrong:
        raise DataError(f"{where} cannot be followed: {'; '.join(wrong)}")


def _values(config: Any, path: str) -> Iterator[Any]:
    """The value at a dotted path, if the configuration has the key."""
    key, _, inner = path.partition(".")
    if hasattr(config, key):
        value = getattr(config, key)
        if not inner:
            yield value
        elif isinstance(value, Mapping) and inner in value:
            yield value[inner]


def _shown(value: Any) -> str:
    text = json.dumps(value, default=str)
    return text if len(text) <= 60 else text[:57] + "..."


def _wrong_kind(where: Path, kind: object, kinds: tuple[str, ...]) -> DataError:
    return DataError(f"{where}: model_type ({kind}) must be one of {', '.join(kinds)}")


def _read_config(folder: Path, kinds: tuple[str, ...]) -> Any:
    import transformers

    path = folder / CONFIG
    try:
        plain = json.loads(path.read_text(encoding="utf-8"))
        kind = plain["model_type"]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise DataError(f"{folder} is not a model in Hugging Face format ({CONFIG}: {_line(error)})") from error
    if kind not in kinds:
        raise _wrong_kind(path, kind, kinds)
    try:
        return transformers.AutoConfig.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
    except Exception as error:
        # transformers raises many types here; all mean that the file is not what it says.
        raise DataError(f"{path} cannot be read: {_line(error)}") from error


def _weight_files(folder: Path) -> list[str]:
    if (folder / INDEX).exists():
        try:
            names = set(json.loads((folder / INDEX).read_text(encoding="utf-8"))["weight_map"].values())
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            raise DataError(f"{folder / INDEX} cannot be read: {_line(error)}") from error
        if outside := [name for name in names if not isinstance(name, str) or Path(name).name != name]:
            raise DataError(f"{folder / INDEX} names a file outside its folder: {outside[0]}")
        return sorted(names)
    if (folder / SINGLE).exists():
        return [SINGLE]
    pickled = sorted(file.name for file in folder.glob("*.bin"))
    advice = f"; {pickled[0]} is a pickle, which is never read: convert it to safetensors" if pickled else ""
    raise DataError(f"{folder} has neither {SINGLE} nor {INDEX}{advice}")


def _read_gguf(path: Path) -> HfModel:
    """All tensors of a GGUF file in fp32, dequantised by transformers: the whole model is held in memory."""
    import transformers

    if path.suffix != ".gguf":
        raise DataError(f"{path} is neither a folder in Hugging Face format nor a GGUF file (.gguf)")
    if importlib.util.find_spec("gguf") is None:
        raise DataError(f"{path} cannot be read without the package gguf: pip install 'spes-workbench[gguf]'")
    try:
        model = transformers.AutoModelForCausalLM.from_pretrained(
            path.parent, gguf_file=path.name, dtype=torch.float32, local_files_only=True
        )
    except Exception as error:
        # gguf and transformers raise many types for a torn or unknown file.
        raise DataError(f"{path} cannot be read as GGUF: {_line(error)}") from error
    del model.config.quantization_config  # says GGUF; what was read is dequantised
    state: dict[str, Tensor] = model.state_dict()
    forms = {key: TensorForm(tuple(tensor.shape), tensor.dtype) for key, tensor in state.items()}
    return HfModel(model.config, forms, lambda key: state[key])


def _line(error: Exception) -> str:
    return " ".join(f"{type(error).__name__}: {error}".split())[:300]
