"""What this engine computes otherwise is refused by the name of its key, and nothing of a folder is executed."""

from __future__ import annotations

import json
import pickle
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from spes_core.config import ModelConfig
from spes_core.errors import DataError
from spes_core.hf import importing
from spes_core.hf.export import export
from spes_core.hf.importing import read_hf_folder
from tests.hf_models import QK_NORM, save_random

MODEL = ModelConfig(num_layers=1, d_model=16, num_heads=2, num_kv_heads=1, num_experts=3, expert_hidden=12,
                    vocab_size=40, normalize_top_k=True)  # fmt: skip


def exported(tmp_path: Path, kind: str = "olmoe", **changes: Any) -> Path:
    """A sound folder of one architecture whose config.json has ``changes``."""
    save_random(tmp_path / "w.safetensors", replace(MODEL, qk_norm=QK_NORM[kind]), 1)  # type: ignore[arg-type]
    export(tmp_path / "w.safetensors", tmp_path / "out")
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    (tmp_path / "out" / "config.json").write_text(json.dumps({**config, **changes}))
    return tmp_path / "out"


def refusal(folder: Path) -> str:
    with pytest.raises(DataError) as caught:
        read_hf_folder(folder)
    assert "\n" not in str(caught.value)
    return str(caught.value).replace(str(folder), "OUT")


@pytest.mark.parametrize(
    ("kind", "changes", "named"),
    [
        ("olmoe", {"attention_bias": True}, "attention_bias (true) must be false"),
        ("olmoe", {"clip_qkv": 8.0}, "clip_qkv (8.0) must be null"),
        ("olmoe", {"hidden_act": "gelu"}, 'hidden_act ("gelu") must be silu'),
        ("olmoe", {"n_shared_experts": 1}, "n_shared_experts (1) must be 0"),
        ("olmoe", {"quantization_config": {"quant_method": "awq"}}, "quantization_config"),
        ("mixtral", {"sliding_window": 64}, "sliding_window (64) must be null"),
        ("mixtral", {"router_jitter_noise": 0.1}, "router_jitter_noise (0.1) must be 0"),
        ("qwen3_moe", {"use_sliding_window": True, "sliding_window": 8}, "sliding_window (8) must be null"),
        ("qwen3_moe", {"mlp_only_layers": [0]}, "mlp_only_layers ([0]) must be empty"),
        ("qwen3_moe", {"decoder_sparse_step": 2}, "decoder_sparse_step (2) must be 1"),
        ("qwen3_moe", {"attention_dropout": 0.1}, "attention_dropout (0.1) must be 0"),
        (
            "qwen3_moe",
            {"rope_parameters": {"rope_type": "linear", "factor": 2.0, "rope_theta": 1e4}},
            'rope_parameters.rope_type ("linear") must be default',
        ),
        (
            "olmoe",
            {"rope_parameters": None, "rope_theta": 1e4, "rope_scaling": {"type": "dynamic", "factor": 2.0}},
            'rope_parameters.rope_type ("dynamic") must be default',
        ),
    ],
)
def test_a_key_that_cannot_be_followed_is_named(tmp_path: Path, kind: str, changes: dict[str, Any], named: str) -> None:
    assert named in refusal(exported(tmp_path, kind, **changes))


def test_every_key_that_cannot_be_followed_is_named_at_once(tmp_path: Path) -> None:
    message = refusal(exported(tmp_path, attention_bias=True, clip_qkv=1.0))
    assert message.startswith("OUT/config.json cannot be followed: attention_bias") and "clip_qkv" in message


@pytest.mark.parametrize("kind", ["qwen2_moe", "deepseek_v3", "unheard_of"])
def test_an_architecture_that_is_not_ours_is_named(tmp_path: Path, kind: str) -> None:
    folder = exported(tmp_path, model_type=kind)
    assert refusal(folder) == f"OUT/config.json: model_type ({kind}) must be one of olmoe, qwen3_moe, mixtral"


def test_the_theta_of_an_older_configuration_is_understood(tmp_path: Path) -> None:
    folder = exported(tmp_path)
    config = json.loads((folder / "config.json").read_text())
    del config["rope_parameters"]
    (folder / "config.json").write_text(json.dumps({**config, "rope_theta": 123456.0}))
    assert read_hf_folder(folder).model.rope_theta == 123456.0


def test_a_configuration_that_our_rules_forbid_is_named(tmp_path: Path) -> None:
    folder = exported(tmp_path, num_experts_per_tok=4)
    assert "model.num_experts (3) must be at least model.top_k (4)" in refusal(folder)


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"rms_norm_eps": float("nan")}, "model.norm_eps (nan)"),
        ({"initializer_range": float("inf")}, "model.init_std (inf)"),
        ({"rope_parameters": {"rope_type": "default", "rope_theta": "x"}}, "model.rope_theta ('x')"),
        ({"num_local_experts": "x"}, "model.num_experts ('x')"),
    ],
)
def test_a_value_of_another_kind_is_named(tmp_path: Path, changes: dict[str, Any], named: str) -> None:
    assert named in refusal(exported(tmp_path, "qwen3_moe", **changes))


def test_tensors_that_do_not_fit_the_configuration_are_named(tmp_path: Path) -> None:
    folder = exported(tmp_path)
    state = load_file(folder / "model.safetensors")
    key = "model.layers.0.mlp.experts.1.up_proj.weight"

    def with_state(changed: dict[str, torch.Tensor]) -> str:
        save_file(changed, folder / "model.safetensors", metadata={"format": "pt"})
        return refusal(folder)

    assert f"it has no {key}" in with_state({name: value for name, value in state.items() if name != key})
    assert "extra.bias is unknown" in with_state({**state, "extra.bias": torch.zeros(1)})
    assert "layers.0.experts.1.gate_up has shape [21, 16], not [24, 16]" in with_state(
        {**state, key: torch.zeros(9, 16)}
    )
    assert "in different widths or dtypes" in with_state({**state, key: state[key].bfloat16()})


def test_what_old_checkpoints_hold_twice_is_passed_over(tmp_path: Path) -> None:
    folder = exported(tmp_path)
    state = load_file(folder / "model.safetensors")
    expected = read_hf_folder(folder)
    state["model.layers.0.self_attn.rotary_emb.inv_freq"] = torch.ones(4)
    save_file(state, folder / "model.safetensors", metadata={"format": "pt"})
    assert read_hf_folder(folder).forms == expected.forms


def test_a_pickle_is_never_read(tmp_path: Path) -> None:
    folder = exported(tmp_path)
    (folder / "model.safetensors").unlink()
    (folder / "pytorch_model.bin").write_bytes(pickle.dumps({"a": 1}))
    assert "pytorch_model.bin is a pickle, which is never read" in refusal(folder)


def test_an_index_cannot_lead_out_of_its_folder(tmp_path: Path) -> None:
    folder = exported(tmp_path)
    index = {"weight_map": {"model.norm.weight": "../w.safetensors"}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    assert "names a file outside its folder: ../w.safetensors" in refusal(folder)


@pytest.mark.parametrize("content", [None, "{", "[]", "{}"])
def test_a_folder_without_a_model_is_one_line(tmp_path: Path, content: str | None) -> None:
    folder = exported(tmp_path)
    (folder / "config.json").unlink()
    if content is not None:
        (folder / "config.json").write_text(content)
    assert refusal(folder).startswith("OUT is not a model in Hugging Face format (config.json: ")


def test_the_command_ends_with_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert importing.main([str(tmp_path), "--to", str(tmp_path / "w.safetensors")]) == 1
    assert capsys.readouterr().err.count("\n") == 1
