"""From a dense model to a Mixture-of-Experts that starts where it ended (Komatsuzaki et al., arXiv 2212.05055).

``python -m spes_core.hf.upcycle DENSE OUT.safetensors --experts E --top-k K`` copies the feed-forward of a Llama or
Qwen3 checkpoint (a folder in Hugging Face format, or a GGUF file) into every expert, adds noise to a fraction of its
entries, and draws the router. Top-k weights are normalised: without noise the model computes what the dense one did.
"""

from __future__ import annotations

import argparse
import hashlib
import sys
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from math import inf
from pathlib import Path

import torch
from torch import Tensor

from spes_core.checkpoint import DTYPES, TensorForm
from spes_core.config import ModelConfig
from spes_core.errors import ConfigError, DataError, Problem
from spes_core.hf.commandline import status_of
from spes_core.hf.importing import CanonicalModel, save_start
from spes_core.hf.layout import shared_keys
from spes_core.hf.reading import DENSE, HfModel, read_model, upcycled_model
from spes_core.model.counting import tensor_shapes
from spes_core.names import layer_of, parse_expert

_ROUTER = "router"


@dataclass(frozen=True, kw_only=True)
class Upcycling:
    """What is made of the dense feed-forward."""

    experts: int
    """Copies of the feed-forward in each layer."""
    top_k: int
    """Experts that each token is sent to."""
    noise_fraction: float = 0.0
    """Share of the entries of an expert's matrices that get noise."""
    noise_std: float = 0.0
    """Standard deviation of that noise."""
    router_std: float = 0.02
    """Standard deviation of the router's weights."""
    seed: int = 0
    """Seed of noise and router."""

    def problems(self) -> list[Problem]:
        """The rules that these settings break."""
        found = []
        if not 1 <= self.top_k <= self.experts:
            found.append(Problem("--top-k", f"({self.top_k}) must be from 1 to --experts ({self.experts})"))
        if not 0 <= self.noise_fraction <= 1:
            found.append(Problem("--noise-fraction", f"({self.noise_fraction:g}) must be between 0 and 1"))
        for name in ("noise_std", "router_std"):
            if not 0 <= (value := getattr(self, name)) < inf:
                found.append(Problem(f"--{name.replace('_', '-')}", f"({value:g}) must be finite and not negative"))
        if (self.noise_fraction > 0) != (self.noise_std > 0):
            message = (
                f"({self.noise_std:g}) and --noise-fraction ({self.noise_fraction:g}) must both be 0 or both above"
            )
            found.append(Problem("--noise-std", message))
        return found


def main(argv: list[str] | None = None) -> int:
    """The command; its exit status."""
    parser = argparse.ArgumentParser(prog="python -m spes_core.hf.upcycle", description=__doc__.splitlines()[0])
    parser.add_argument("dense", type=Path, help="folder of a Llama or Qwen3 model in Hugging Face format, or a .gguf")
    parser.add_argument("out", type=Path, metavar="OUT.safetensors", help="weights to write")
    parser.add_argument("--experts", type=int, required=True, help="experts in each layer")
    parser.add_argument("--top-k", type=int, required=True, help="experts that each token is sent to")
    parser.add_argument("--noise-fraction", type=float, default=0.0, help="share of entries that get noise")
    parser.add_argument("--noise-std", type=float, default=0.0, help="standard deviation of the noise")
    parser.add_argument("--router-std", type=float, default=0.02, help="standard deviation of the router's weights")
    parser.add_argument("--seed", type=int, default=0, help="seed of noise and router")
    parser.add_argument("--dtype", choices=DTYPES, default="float32", help="of the weights written")
    given = vars(parser.parse_args(argv))
    dense, out, dtype = given.pop("dense"), given.pop("out"), DTYPES[given.pop("dtype")]

    def command() -> None:
        how = Upcycling(**given)
        source = upcycle(dense, how, dtype)
        values = ((name, source.tensor(name)) for name in source.forms)
        made = ", ".join(f"{name} {value:g}" for name, value in asdict(how).items())
        origin = {"origin": f"upcycled from {dense.resolve().name}: {made}"}
        save_start(out, source.model, source.forms, values, origin, dense)

    return status_of(command)


def upcycle(dense: Path, how: Upcycling, dtype: torch.dtype = torch.float32) -> CanonicalModel:
    """The upcycled model, each tensor made when it is asked for: noise depends on seed and name, not on the order.

    Raises ConfigError for settings, DataError for a checkpoint that cannot be followed.
    """
    if problems := how.problems():
        raise ConfigError(problems)
    source = read_model(dense, DENSE)
    model = upcycled_model(source.config, how.experts, how.top_k, dense)
    _check_keys(model, source, dense)
    keys, shapes = dict(shared_keys(model, _ROUTER)), tensor_shapes(model)

    def tensor(name: str) -> Tensor:
        if parse_expert(name) is not None:
            return _noisy(_expert(source, name), name, how)
        if name.endswith(f".{_ROUTER}"):
            return torch.empty(shapes[name]).normal_(0, how.router_std, generator=_generator(how.seed, name))
        return source.tensor(keys[name])

    forms = {name: TensorForm(shape, dtype) for name, shape in shapes.items()}
    return CanonicalModel(model, forms, lambda name: tensor(name).to(dtype))


def _expert(source: HfModel, name: str) -> Tensor:
    """The dense matrices that one expert's matrix is a copy of."""
    layer, matrix = layer_of(name), name.rpartition(".")[2]
    parts = [source.tensor(_feed_forward(layer, part)) for part in matrix.split("_")]
    return torch.cat(parts) if len(parts) > 1 else parts[0]


def _noisy(values: Tensor, name: str, how: Upcycling) -> Tensor:
    if how.noise_fraction == 0:
        return values
    generator = _generator(how.seed, name)
    noise = torch.empty(values.shape).normal_(0, how.noise_std, generator=generator)
    is_kept = torch.rand(values.shape, generator=generator) >= how.noise_fraction
    return noise.masked_fill_(is_kept, 0).add_(values.float())


def _generator(seed: int, name: str) -> torch.Generator:
    digest = hashlib.sha256(f"upcycle:{seed}:{name}".encode()).digest()
    return torch.Generator().manual_seed(int.from_bytes(digest[:8], "little") >> 1)


def _feed_forward(layer: int | None, part: str) -> str:
    return f"model.layers.{layer}.mlp.{part}_proj.weight"


def _dense_shapes(model: ModelConfig) -> Iterator[tuple[str, tuple[int, ...]]]:
    """(Hugging Face key, shape) of every tensor that the dense model must have."""
    shapes = tensor_shapes(model)
    for name, key in shared_keys(model, _ROUTER):
        if not name.endswith(f".{_ROUTER}"):
            yield key, shapes[name]
    for layer in range(model.num_layers):
        for part in ("gate", "up"):
            yield _feed_forward(layer, part), (model.expert_hidden, model.d_model)
        yield _feed_forward(layer, "down"), (model.d_model, model.expert_hidden)


def _check_keys(model: ModelConfig, source: HfModel, dense: Path) -> None:
    expected = dict(_dense_shapes(model))
    extra = source.forms.keys() - expected.keys() - ({"lm_head.weight"} if model.tie_embeddings else set())
    wrong = [f"{key} is unknown" for key in sorted(extra)]
    for key, shape in expected.items():
        if key not in source.forms:
            wrong.append(f"{key} is missing")
        elif source.forms[key].shape != shape:
            wrong.append(f"{key} has shape {list(source.forms[key].shape)}, not {list(shape)}")
    if wrong:
        raise DataError(f"{dense} does not hold the tensors of its configuration: {'; '.join(wrong[:3])}")


if __name__ == "__main__":
    sys.exit(main())
