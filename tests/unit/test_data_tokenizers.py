"""Bytes and given tokenizers: the right ids, the right end of text, and bytes of text that add up."""

from __future__ import annotations

import json
import shutil
from array import array
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import transformers
from tokenizers import Tokenizer, models, pre_tokenizers

from spes_core.config import DataConfig, ModelConfig
from spes_core.data import given, shards, tokenize, vocabulary
from spes_core.data.batches import TokenSource
from spes_core.errors import DataError
from spes_core.hf.export import export
from tests import tokenizers_made
from tests.hf_models import save_random
from tests.small_corpora import contents, documents_in, ids_of, texts, write_rows
from workbench.errors import StudyError
from workbench.evaluating_model import corpus_tokens
from workbench.spec import read_study
from workbench.study import find_corpora
from workbench.trials import expand

WITH_END = "text that spells </s> and <|end|> and <|endoftext|>"


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_rows(tmp_path_factory.mktemp("corpus") / "rows.jsonl", [*texts(120), WITH_END, "  12    spaces"])


@pytest.fixture(scope="module")
def tokenizers(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("tokenizers")
    byte_level, sentencepiece = tokenizers_made.byte_level(texts(50)), tokenizers_made.sentencepiece(texts(50))
    return {
        "byte_level": tokenizers_made.save(byte_level, root / "byte_level", eos_token="<|end|>"),
        "sentencepiece": tokenizers_made.save(sentencepiece, root / "sentencepiece", eos_token="</s>", bos_token="<s>"),
        "unigram": tokenizers_made.save(tokenizers_made.unigram(texts(50)), root / "unigram", eos_token="</s>"),
    }


def config_with(corpus: Path, tokenizer: Path | str, vocab_size: int = 400) -> DataConfig:
    return DataConfig(
        corpus=str(corpus), tokenizer=str(tokenizer), tokenizer_vocab_size=vocab_size, validation_fraction=0.2
    )


def lengths_of(folder: Path) -> list[int]:
    lengths = array("I")
    lengths.frombytes((folder / "token_bytes.bin").read_bytes())
    return lengths.tolist()


def documents_of(folder: Path, end: int) -> list[list[int]]:
    documents: list[list[int]] = []
    for name in ("train.bin", "validation.bin"):
        ids = np.array(ids_of(folder / name))
        documents += [part[:-1].tolist() for part in np.split(ids, np.flatnonzero(ids == end) + 1)[:-1]]
    return documents


def test_bytes_are_the_bytes_and_the_tokenizer_file_says_the_same(corpus: Path, tmp_path: Path) -> None:
    folder = tokenize.prepare(config_with(corpus, "bytes"), tmp_path)
    header = shards.verify(folder)
    assert (header.tokenizer, header.vocab_size, header.end_of_text_id, header.dtype) == ("bytes", 257, 0, "uint16")
    assert header.tokenizer_documents == 0
    ids = [part for name in ("train.bin", "validation.bin") for part in documents_in(folder / name)]
    assert sorted(bytes(token - 1 for token in part).decode() for part in ids) == sorted(
        [*texts(120), WITH_END, "  12    spaces"]
    )
    library = vocabulary.load(folder)
    for text in (*texts(5), WITH_END, "", "\x00\x7f\u00ad"):
        (expected,) = vocabulary.of_bytes().encode([text])
        assert library.encode(text, add_special_tokens=False).ids == expected.tolist()
        assert library.decode(expected.tolist(), skip_special_tokens=False) == text
    assert lengths_of(folder) == [0] + [1] * 256
    TokenSource(folder, replace(config_with(corpus, "bytes"), sequence_length=32), 0).train_batch(1, 0, 1)


@pytest.mark.parametrize("kind", ["byte_level", "sentencepiece"])
def test_a_given_tokenizer_gives_its_own_ids_and_bytes_that_add_up(
    kind: str, corpus: Path, tokenizers: dict[str, Path], tmp_path: Path
) -> None:
    folder = tokenize.prepare(config_with(corpus, tokenizers[kind]), tmp_path)
    header, end = shards.verify(folder), {"byte_level": "<|end|>", "sentencepiece": "</s>"}[kind]
    theirs = transformers.AutoTokenizer.from_pretrained(tokenizers[kind])
    assert header.tokenizer == str(tokenizers[kind])
    assert header.end_of_text_id == theirs.convert_tokens_to_ids(end)
    rows = [*texts(120), WITH_END, "  12    spaces"]
    found = documents_of(folder, header.end_of_text_id)
    assert len(found) == len(rows) == header.train.documents + header.validation.documents
    ordinary = {tuple(theirs(text, add_special_tokens=False).input_ids) for text in rows if text != WITH_END}
    assert ordinary <= set(map(tuple, found))
    lengths, split = lengths_of(folder), header.train
    assert lengths[header.end_of_text_id] == 0
    prefixes = split.documents if kind == "sentencepiece" else 0  # the space that it sets before each document
    assert sum(lengths[token] for token in ids_of(folder / "train.bin")) == split.bytes + prefixes
    scored = corpus_tokens(folder)
    assert (scored.end, scored.end_text) == (header.end_of_text_id, end), "evaluation ends texts as training does"
    raw = Tokenizer.from_file(str(folder / "tokenizer.json"))
    raw.no_truncation()
    assert {raw.decode(ids, skip_special_tokens=False) for ids in found} == set(rows)


def test_text_that_a_tokenizer_would_take_for_an_end_is_left_out_and_counted(
    corpus: Path, tokenizers: dict[str, Path], tmp_path: Path
) -> None:
    folder = tokenize.prepare(config_with(corpus, tokenizers["unigram"]), tmp_path)
    header = shards.read_header(folder)
    assert header.skipped == {"with the tokenizer's end of text in the text": 1}
    assert (
        len(documents_of(folder, header.end_of_text_id)) == 121 == header.train.documents + header.validation.documents
    )


def test_the_end_of_text_is_found_where_it_may_stand(tokenizers: dict[str, Path], tmp_path: Path) -> None:
    folder = tmp_path / "given"
    shutil.copytree(tokenizers["sentencepiece"], folder)
    end = given.read(str(folder)).end_of_text_id
    (folder / "tokenizer_config.json").write_text(json.dumps({"eos_token": {"content": "<s>"}}))
    assert given.read(str(folder)).end_of_text_id == end - 1
    (folder / "tokenizer_config.json").unlink()
    assert given.read(str(folder)).end_of_text_id == end  # by its usual name
    assert given.read(str(folder / "tokenizer.json")).end_of_text_id == end
    shutil.copytree(tokenizers["byte_level"], tmp_path / "nameless")
    (tmp_path / "nameless" / "tokenizer_config.json").write_text("{}")
    with pytest.raises(
        DataError, match=r'^data\.tokenizer \(".*nameless"\) names no end of text .*<\|end\|>.*eos_token'
    ):
        given.read(str(tmp_path / "nameless"))


def test_a_tokenized_folder_gives_its_vocabulary_to_another_corpus(corpus: Path, tmp_path: Path) -> None:
    first = tokenize.prepare(config_with(corpus, "bpe", 300), tmp_path / "cache")
    again = tokenize.prepare(config_with(corpus, first), tmp_path / "cache")
    assert again != first
    for name in ("train.bin", "validation.bin", "token_bytes.bin"):
        assert contents(again)[name] == contents(first)[name]


def test_tokenizers_that_cannot_be_used_are_one_clear_error(
    corpus: Path, tokenizers: dict[str, Path], tmp_path: Path
) -> None:
    (tmp_path / "empty").mkdir()
    (tmp_path / "broken").mkdir()
    (tmp_path / "broken" / "tokenizer.json").write_text("{}")
    for name, content in (("none", "{}"), ("far", '{"a": 4000000000}')):
        (tmp_path / name).mkdir()
        model = f'{{"version": "1.0", "model": {{"type": "BPE", "vocab": {content}, "merges": []}}}}'
        (tmp_path / name / "tokenizer.json").write_text(model)
        (tmp_path / name / "tokenizer_config.json").write_text("[]")
    words = Tokenizer(models.WordPiece({"[UNK]": 0, "a": 1, "[EOS]": 2}, unk_token="[UNK]"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizers_made.save(words, tmp_path / "words", eos_token="[EOS]")
    for tokenizer, message in (
        (tmp_path / "empty", "holds no tokenizer; give a folder with tokenizer.json"),
        (tmp_path / "broken", "cannot be read"),
        (tmp_path / "words", "does not say which bytes its tokens stand for"),
        (tmp_path / "none", r"has 0 ids; give a tokenizer with 1 to"),
        (tmp_path / "far", r"has 4000000001 ids; give"),
        (tmp_path / "absent", "must be bpe, bytes, or a folder with a Hugging Face tokenizer"),
    ):
        with pytest.raises(DataError, match=message):
            tokenize.prepare(config_with(corpus, tokenizer), tmp_path / "cache")
    size = given.read(str(tokenizers["byte_level"])).size
    with pytest.raises(DataError, match=rf"tokenizer_vocab_size \({size - 1}\) must be at least the {size} ids of"):
        tokenize.prepare(config_with(corpus, tokenizers["byte_level"], size - 1), tmp_path / "cache")
    cache = tmp_path / "cache"
    assert not cache.exists() or [entry for entry in cache.iterdir() if entry.is_dir()] == []


def test_a_study_tells_where_it_names_a_tokenizer_that_cannot_be_used(tmp_path: Path) -> None:
    path = tmp_path / "given.yaml"
    path.write_text(
        "schema: 1\nname: given\nquestion: Why?\ndefaults: [model/tiny, data/default, launcher/local]\n"
        "run:\n  data:\n    tokenizer: /no/such\narms: {spes: {method: spes}}\n"
    )
    study = read_study(path)
    with pytest.raises(StudyError, match=r'yaml:7: run\.data\.tokenizer cannot be used: data\.tokenizer \("/no/such"'):
        find_corpora(study, expand(study))


def test_a_changed_tokenizer_makes_another_folder(corpus: Path, tokenizers: dict[str, Path], tmp_path: Path) -> None:
    folder = tmp_path / "given"
    shutil.copytree(tokenizers["byte_level"], folder)
    config = config_with(corpus, folder)
    first = tokenize.prepare(config, tmp_path / "cache")
    assert tokenize.find_prepared(config, tmp_path / "cache") == first
    tokenizers_made.save(tokenizers_made.byte_level(texts(50, 5)), folder, eos_token="<|end|>")
    assert tokenize.find_prepared(config, tmp_path / "cache") is None


@pytest.mark.parametrize("kind", ["byte_level", "sentencepiece", "bytes"])
def test_an_exported_model_has_the_tokenizer_that_its_corpus_has(
    kind: str, corpus: Path, tokenizers: dict[str, Path], tmp_path: Path
) -> None:
    folder = tokenize.prepare(config_with(corpus, tokenizers.get(kind, kind)), tmp_path / "cache")  # type: ignore[arg-type]
    model = ModelConfig(num_layers=1, d_model=16, num_heads=2, num_experts=2, top_k=1, expert_hidden=8, vocab_size=400)
    save_random(tmp_path / "w.safetensors", model, 1)
    export(tmp_path / "w.safetensors", tmp_path / "out", tokenizer=folder)
    exported = transformers.AutoTokenizer.from_pretrained(tmp_path / "out")
    header = shards.read_header(folder)
    assert exported.eos_token_id == header.end_of_text_id
    found = set(map(tuple, documents_of(folder, header.end_of_text_id)))
    ordinary = texts(120)
    assert {tuple(exported(text, add_special_tokens=False).input_ids) for text in ordinary} <= found
    config = transformers.AutoConfig.from_pretrained(tmp_path / "out")
    assert config.eos_token_id == header.end_of_text_id
