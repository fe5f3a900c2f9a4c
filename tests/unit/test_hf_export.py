"""An exported folder is the same model to the Hugging Face classes, and comes back bit by bit."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import transformers
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors import safe_open

from spes_core.checkpoint import TensorForm, load_weights, save_weights
from spes_core.config import DataConfig, ModelConfig, RunConfig
from spes_core.data import vocabulary
from spes_core.data.tokenize import prepare
from spes_core.errors import DataError
from spes_core.hf import export as export_module
from spes_core.hf import importing
from spes_core.hf.export import export, shards_of
from spes_core.hf.importing import read_hf_folder
from spes_core.runfile import RunFile
from spes_core.structure import build
from tests.hf_models import (
    QK_NORM,
    assert_close,
    hf_logits,
    models,
    our_logits,
    random_weights,
    save_random,
    some_tokens,
)

TINY = ModelConfig(
    num_layers=1, d_model=16, num_heads=2, num_kv_heads=1, num_experts=3, expert_hidden=12, vocab_size=300
)


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tokenized folder of a few documents."""
    folder = tmp_path_factory.mktemp("text")
    for index in range(30):
        (folder / f"{index}.txt").write_text(f"document {index} says ünicode and <|endoftext|> and {index * 7}. " * 9)
    data = DataConfig(corpus=str(folder), tokenizer_vocab_size=280, validation_fraction=0.2)
    return prepare(data, tmp_path_factory.mktemp("cache"))


@pytest.mark.parametrize("kind", QK_NORM)
@settings(max_examples=5, deadline=None, derandomize=True)
@given(data=st.data(), sharded=st.booleans(), seed=st.integers(0, 99))
def test_transformers_loads_the_same_model_and_it_comes_back_bitwise(
    kind: str, tmp_path_factory: pytest.TempPathFactory, data: st.DataObject, sharded: bool, seed: int
) -> None:
    model, folder = data.draw(models(kind)), tmp_path_factory.mktemp("export")
    tensors = save_random(folder / "w.safetensors", model, seed)
    export(folder / "w.safetensors", folder / "out", max_shard_bytes=9000 if sharded else 10**9)
    assert (folder / "out" / "model.safetensors.index.json").exists() == sharded
    hf, report = transformers.AutoModelForCausalLM.from_pretrained(
        folder / "out", output_loading_info=True, trust_remote_code=False
    )
    assert hf.config.model_type == kind
    assert not any(report[key] for key in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    tokens_BT = some_tokens(model.vocab_size, seed)
    assert_close(hf_logits(hf, tokens_BT), our_logits(model, tensors, tokens_BT))
    back = read_hf_folder(folder / "out")
    explicit = replace(model, head_dim=model.resolved_head_dim)
    assert replace(back.model, head_dim=back.model.resolved_head_dim) == explicit
    assert list(back.forms) == list(tensors)
    assert all(torch.equal(back.tensor(name), tensor) for name, tensor in tensors.items())


@pytest.mark.parametrize("kind", QK_NORM)
def test_a_folder_that_transformers_saved_is_the_same_model_here(kind: str, tmp_path: Path) -> None:
    model = replace(TINY, qk_norm=QK_NORM[kind], normalize_top_k=True)  # type: ignore[arg-type]
    save_random(tmp_path / "w.safetensors", model, 1)
    export(tmp_path / "w.safetensors", tmp_path / "out")
    hf = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    with torch.no_grad():
        for parameter in hf.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.05)
    hf.save_pretrained(tmp_path / "theirs", max_shard_size="10KB")
    back = read_hf_folder(tmp_path / "theirs")
    tokens_BT = some_tokens(model.vocab_size)
    ours = our_logits(back.model, {name: back.tensor(name) for name in back.forms}, tokens_BT)
    assert_close(ours, hf_logits(hf, tokens_BT))


def test_bfloat16_export_rounds_once_and_comes_back_as_it_was_exported(tmp_path: Path) -> None:
    tensors = save_random(tmp_path / "w.safetensors", TINY, 2)
    export(tmp_path / "w.safetensors", tmp_path / "out", dtype=torch.bfloat16)
    hf = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    assert hf.dtype == torch.bfloat16 and hf.config.dtype == torch.bfloat16
    back = read_hf_folder(tmp_path / "out")
    assert all(torch.equal(back.tensor(name), tensor.bfloat16()) for name, tensor in tensors.items())


def test_the_command_line_goes_there_and_back(tmp_path: Path, corpus: Path, capsys: pytest.CaptureFixture[str]) -> None:
    trial, config = (
        tmp_path / "trial",
        RunConfig(
            model=TINY,
            data=DataConfig(sequence_length=77, tokenizer_vocab_size=300, document_attention="separate"),
        ),
    )
    (trial / "weights").mkdir(parents=True)
    RunFile(trial="t", config=config, data_dir=str(corpus)).save(trial / "run.json")
    save_weights(trial / "weights" / "final.safetensors", random_weights(TINY, 3), {})  # as earlier releases wrote it
    assert export_module.main([str(trial), str(tmp_path / "out"), "--max-shard-gb", "0.00001"]) == 0
    assert importing.main([str(tmp_path / "out"), "--to", str(tmp_path / "back.safetensors")]) == 0
    back, expected = load_weights(tmp_path / "back.safetensors"), random_weights(TINY, 3)
    assert list(back) == list(expected) and all(torch.equal(back[name], expected[name]) for name in expected)
    hf_config = transformers.AutoConfig.from_pretrained(tmp_path / "out")
    assert hf_config.max_position_embeddings == 77
    assert hf_config.eos_token_id == hf_config.bos_token_id == vocabulary.END_OF_TEXT_ID
    generation = transformers.GenerationConfig.from_pretrained(tmp_path / "out")
    assert generation.eos_token_id == vocabulary.END_OF_TEXT_ID
    assert (tmp_path / "back.yaml").exists()
    first, second, *_ = capsys.readouterr().out.splitlines()
    assert first == f"model: {tmp_path / 'out'}"
    assert second.startswith("note: ") and "one document a sequence, which begins with the end of text" in second


@pytest.mark.parametrize("kind", QK_NORM)
def test_the_tokenizer_is_that_of_training(kind: str, tmp_path: Path, corpus: Path) -> None:
    model = replace(TINY, qk_norm=QK_NORM[kind], normalize_top_k=True)  # type: ignore[arg-type]
    save_random(tmp_path / "w.safetensors", model, 1)
    export(tmp_path / "w.safetensors", tmp_path / "out", tokenizer=corpus)
    theirs = transformers.AutoTokenizer.from_pretrained(tmp_path / "out", trust_remote_code=False)
    ours = vocabulary.load(corpus)
    texts = ["document 3 says", " ünicode\n\n\ttabs  ,x .", "a<|endoftext|>b", "<|endoftext|>", "日本 🙂", " lead", ""]
    for text in texts:
        ids = ours.encode(text).ids
        assert theirs(text).input_ids == ids
        assert vocabulary.END_OF_TEXT_ID not in ids
        assert theirs.decode(ids) == text == theirs.decode(ids, skip_special_tokens=True)
    assert theirs.eos_token_id == theirs.bos_token_id == theirs.pad_token_id == vocabulary.END_OF_TEXT_ID
    assert theirs.decode([5, 0], skip_special_tokens=True) == theirs.decode([5])
    padded = theirs(["document", "a b c d"], padding=True, return_tensors="pt")
    hf = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    assert hf.generate(**padded, max_new_tokens=2, do_sample=False).shape == (2, padded.input_ids.shape[1] + 2)


def test_shards_keep_to_the_limit_and_the_index_names_every_tensor(tmp_path: Path) -> None:
    save_random(tmp_path / "w.safetensors", TINY, 1)
    export(tmp_path / "w.safetensors", tmp_path / "out", max_shard_bytes=10_000)
    index = json.loads((tmp_path / "out" / "model.safetensors.index.json").read_text())
    found, total = {}, 0
    for file in sorted((tmp_path / "out").glob("*.safetensors")):
        with safe_open(file, "pt") as shard:
            sizes = {key: shard.get_tensor(key).nbytes for key in shard.keys()}  # noqa: SIM118
        assert sum(sizes.values()) <= 10_000 or len(sizes) == 1
        found |= dict.fromkeys(sizes, file.name)
        total += sum(sizes.values())
    assert found == index["weight_map"]
    assert total == index["metadata"]["total_size"]


def test_a_tensor_above_the_limit_has_a_file_of_its_own() -> None:
    forms = {name: TensorForm((size,)) for name, size in {"a": 1, "b": 9, "c": 1, "d": 1}.items()}
    assert shards_of(forms, 8) == [["a"], ["b"], ["c", "d"]]


def test_what_cannot_be_exported_leaves_nothing(tmp_path: Path, corpus: Path) -> None:
    weights, out = tmp_path / "w.safetensors", tmp_path / "out"
    save_random(weights, TINY, 1)
    out.mkdir()
    (out / "mine").write_text("")
    with pytest.raises(DataError, match="out exists already"):
        export(weights, out)
    (out / "mine").unlink()
    small = replace(TINY, vocab_size=100)
    save_random(weights, small, 1)
    with pytest.raises(DataError, match=r"the tokenizer has 2\d\d ids, more than model.vocab_size \(100\)"):
        export(weights, out, tokenizer=corpus)
    with pytest.raises(DataError, match="is no folder with a tokenizer"):
        export(weights, out, tokenizer=tmp_path / "absent")
    save_weights(weights, random_weights(small, 1), {})
    with pytest.raises(DataError, match="does not say which model it holds"):
        export(weights, out)
    with pytest.raises(DataError, match=r"does not hold the weights of this model: embedding has shape \[100, 16\]"):
        export(weights, out, run=RunFile(trial="t", config=RunConfig(model=TINY), data_dir=""))
    assert sorted(path.name for path in tmp_path.iterdir()) == ["out", "w.safetensors"]
    assert list(out.iterdir()) == []


def test_weights_without_a_run_need_a_tokenizer_or_the_word_none(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    save_random(tmp_path / "w.safetensors", TINY, 1)
    assert export_module.main([str(tmp_path / "w.safetensors"), str(tmp_path / "out")]) == 1
    assert "give --tokenizer PATH, or --tokenizer none" in capsys.readouterr().err
    assert export_module.main([str(tmp_path / "w.safetensors"), str(tmp_path / "out"), "--tokenizer", "none"]) == 0
    assert not (tmp_path / "out" / "tokenizer.json").exists()


@pytest.mark.parametrize("limit", ["0", "-1", "nan", "inf"])
def test_a_limit_that_is_no_size_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str], limit: str) -> None:
    assert export_module.main([str(tmp_path / "w"), str(tmp_path / "o"), "--max-shard-gb", limit]) == 2
    assert f"error: --max-shard-gb ({limit}) must be finite and above 0" in capsys.readouterr().err


def test_the_folder_may_be_the_one_that_one_stands_in(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save_random(tmp_path / "w.safetensors", TINY, 1)
    (tmp_path / "out").mkdir()
    monkeypatch.chdir(tmp_path / "out")
    export(tmp_path / "w.safetensors", Path())
    assert read_hf_folder(tmp_path / "out").model == replace(TINY, init_std=0.02)


def test_a_model_without_a_hugging_face_class_ends_with_status_2(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    save_random(tmp_path / "w.safetensors", replace(TINY, qk_norm="none"), 1)
    assert export_module.main([str(tmp_path / "w.safetensors"), str(tmp_path / "o"), "--tokenizer", "none"]) == 2
    assert "error: model.normalize_top_k (false) must be true" in capsys.readouterr().err


def test_the_settings_beside_imported_weights_are_those_of_a_run(tmp_path: Path) -> None:
    import yaml

    save_random(tmp_path / "w.safetensors", TINY, 1)
    export(tmp_path / "w.safetensors", tmp_path / "out")
    importing.main([str(tmp_path / "out"), "--to", str(tmp_path / "back.safetensors")])
    config = build(RunConfig, yaml.safe_load((tmp_path / "back.yaml").read_text()))
    assert config.model == TINY
    assert config.init.kind == "weights"
    assert config.init.weights == str(tmp_path / "back.safetensors")
