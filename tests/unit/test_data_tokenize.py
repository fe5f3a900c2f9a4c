"""Tokenizing loses nothing, leaks nothing, counts right, and refuses what it cannot use."""

from __future__ import annotations

import gzip
import json
import math
import shutil
import subprocess
import sys
from array import array
from collections import Counter
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer

from spes_core.config import DataConfig, RunConfig
from spes_core.data import encode, shards, survey, tokenize, vocabulary
from spes_core.data.batches import TokenSource
from spes_core.data.preparation import Preparation
from spes_core.data.sources import is_held_out
from spes_core.errors import ConfigError, DataError
from tests.small_corpora import config_for, contents, documents_in, ids_of, texts, write_rows


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_rows(tmp_path_factory.mktemp("corpus") / "rows.jsonl", texts(200))


@pytest.fixture(scope="module")
def folder(corpus: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tokenize.prepare(config_for(corpus), tmp_path_factory.mktemp("cache"))


@pytest.fixture(scope="module")
def tokenizer(folder: Path) -> Tokenizer:
    return vocabulary.load(folder)


def test_the_files_decode_to_the_documents_of_each_split_in_order(folder: Path) -> None:
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    for name, held_out in (("train.bin", False), ("validation.bin", True)):
        expected = [text for n, text in enumerate(texts(200)) if is_held_out(f"rows.jsonl:d{n}", 0.1) == held_out]
        decoded = [tokenizer.decode(ids, skip_special_tokens=False) for ids in documents_in(folder / name)]
        assert decoded == expected
        assert len(expected) >= 10


def test_the_header_counts_tokens_documents_bytes_and_entropy(folder: Path) -> None:
    header = shards.verify(folder)
    for name, split in (("train.bin", header.train), ("validation.bin", header.validation)):
        held_out = name == "validation.bin"
        expected = [text for n, text in enumerate(texts(200)) if is_held_out(f"rows.jsonl:d{n}", 0.1) == held_out]
        assert split.documents == len(expected)
        assert split.bytes == sum(len(text.encode()) for text in expected)
        assert split.tokens == len(ids_of(folder / name))
    counts = Counter(ids_of(folder / "train.bin"))
    entropy = -sum(c / header.train.tokens * math.log(c / header.train.tokens) for c in counts.values())
    assert header.unigram_entropy_nats == pytest.approx(entropy, rel=1e-12)
    assert (header.vocab_size, header.dtype, header.end_of_text_id) == (300, "uint16", 0)


def test_token_bytes_add_up_to_the_bytes_of_the_text(folder: Path) -> None:
    header = shards.read_header(folder)
    lengths = array("I")
    lengths.frombytes((folder / "token_bytes.bin").read_bytes())
    assert lengths[0] == 0
    assert lengths[1:257].tolist() == [1] * 256
    for name, split in (("train.bin", header.train), ("validation.bin", header.validation)):
        assert sum(lengths[token] for token in ids_of(folder / name)) == split.bytes


def test_the_tokenizer_never_sees_held_out_text(tmp_path: Path) -> None:
    rows = [
        f"qqqq{'zz' * 30} " * 5 if is_held_out(f"rows.jsonl:d{n}", 0.2) else text for n, text in enumerate(texts(60))
    ]
    folder = tokenize.prepare(config_for(write_rows(tmp_path / "rows.jsonl", rows), fraction=0.2), tmp_path / "cache")
    tokens = set(json.loads((folder / "tokenizer.json").read_text())["model"]["vocab"])
    assert not any("zz" in token or "qq" in token for token in tokens)
    assert any("expert" in token for token in tokens)


def test_text_that_is_held_out_is_not_trained_on_under_another_name(tmp_path: Path) -> None:
    rows = texts(60)
    held_out = [n for n in range(60) if is_held_out(f"rows.jsonl:d{n}", 0.2)]
    rows += [rows[n] for n in held_out]
    names = [f"rows.jsonl:d{n}" for n in range(len(rows))]
    copies = [name for name in names[60:] if not is_held_out(name, 0.2)]
    assert len(copies) >= 3
    folder = tokenize.prepare(config_for(write_rows(tmp_path / "rows.jsonl", rows), fraction=0.2), tmp_path / "cache")
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    train, validation = (
        {tokenizer.decode(ids, skip_special_tokens=False) for ids in documents_in(folder / name)}
        for name in ("train.bin", "validation.bin")
    )
    assert not train & validation
    assert shards.read_header(folder).skipped == {"with the text of a validation document": len(copies)}


@given(text=st.text(max_size=60) | st.text(alphabet=" \n\t<|endoftext>aé", max_size=60))
@settings(max_examples=300, deadline=None, derandomize=True)
def test_any_text_survives_the_tokenizer(tokenizer: Tokenizer, text: str) -> None:
    ids = tokenizer.encode(text, add_special_tokens=False).ids
    assert tokenizer.decode(ids, skip_special_tokens=False) == text
    assert 0 not in ids


def test_the_same_corpus_gives_the_same_bytes_with_any_number_of_threads(corpus: Path, tmp_path: Path) -> None:
    made = []
    for threads in ("1", "5"):
        command = [
            sys.executable,
            "-m",
            "spes_core.data.tokenize",
            "--corpus",
            str(corpus),
            "--vocab-size",
            "300",
        ]
        command += ["--workers", threads]
        command += ["--validation-fraction", "0.1", "--cache", str(tmp_path / threads)]
        done = subprocess.run(command, capture_output=True, text=True, check=True)
        made.append(contents(Path(done.stdout.splitlines()[-1])))
    assert made[0] == made[1]


def test_a_large_corpus_trains_the_tokenizer_on_a_bounded_sample(
    corpus: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(survey, "SAMPLE_BYTES", 5_000)
    header = shards.read_header(tokenize.prepare(config_for(corpus), tmp_path))
    assert 5_000 <= header.tokenizer_bytes < 5_000 + max(len(text.encode()) for text in texts(200))
    assert header.tokenizer_documents < header.train.documents

    def sample(path: Path) -> list[str]:
        return survey.survey(Preparation.of(config_for(path)).find()).sample

    again = sample(corpus)
    reversed_rows = write_rows(tmp_path / "rows.jsonl", texts(200))
    lines = reversed_rows.read_text().splitlines(keepends=True)
    reversed_rows.write_text("".join(reversed(lines)))
    assert (
        survey.survey(Preparation.of(config_for(reversed_rows)).find()).sample == again
    )  # chosen by name, not by place


def test_small_batches_give_the_same_bytes_as_large_ones(
    corpus: Path, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(encode, "_BATCH_BYTES", 1)
    assert contents(tokenize.prepare(config_for(corpus), tmp_path)) == contents(folder)


def test_a_text_too_small_for_the_vocabulary_gives_a_smaller_one_and_says_so(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = write_rows(tmp_path / "rows.jsonl", [f"aa {n}" for n in range(40)])
    arguments = [
        "--corpus",
        str(path),
        "--vocab-size",
        "4096",
        "--validation-fraction",
        "0.2",
        "--cache",
        str(tmp_path),
    ]
    assert tokenize.main(arguments) == 0
    header = shards.read_header(Path(capsys.readouterr().out.strip()))
    assert 257 < header.vocab_size < 4096 == header.vocab_size_asked
    assert tokenize.main(arguments) == 0
    assert f"a vocabulary of {header.vocab_size}, not the 4096 asked for" in capsys.readouterr().err


def test_token_ids_take_two_bytes_up_to_65536_and_four_above(
    corpus: Path, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert [vocabulary.dtype_of(size) for size in (257, 65_536, 65_537)] == ["uint16", "uint16", "uint32"]
    monkeypatch.setattr(vocabulary, "dtype_of", lambda vocab_size: "uint32")
    wide = tokenize.prepare(config_for(corpus), tmp_path)
    assert shards.verify(wide).unigram_entropy_nats == shards.read_header(folder).unigram_entropy_nats
    for name in ("train.bin", "validation.bin"):
        ids = array("I")
        ids.frombytes((wide / name).read_bytes())
        assert ids.tolist() == ids_of(folder / name)
    narrow_batch, wide_batch = (TokenSource(f, config_for(corpus), 0).train_batch(3, 1, 2)[0] for f in (folder, wide))
    assert torch.equal(narrow_batch, wide_batch)


def test_a_corpus_without_a_usable_document_says_what_was_left_out_and_what_to_do(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_text('\n{"body": "x"}\n{"body": "y"}\n')
    with pytest.raises(DataError) as caught:
        tokenize.prepare(config_for(path), tmp_path / "cache")
    assert str(caught.value) == (
        f'data.corpus ("{path}") has no usable document; left out: 1 empty lines (rows.jsonl:1);'
        ' 2 without the field "text" (rows.jsonl:2, rows.jsonl:3); give text files, or JSON lines with a field "text"'
    )
    assert [entry for entry in (tmp_path / "cache").iterdir() if entry.is_dir()] == []


@pytest.mark.parametrize(
    ("fraction", "message"),
    [(1e-9, "no validation document.*raise"), (0.999999999, "no training document.*lower")],
)
def test_an_empty_split_is_refused_with_the_way_out(tmp_path: Path, fraction: float, message: str) -> None:
    path = write_rows(tmp_path / "rows.jsonl", texts(20))
    with pytest.raises(DataError, match=message):
        tokenize.prepare(config_for(path, fraction=fraction), tmp_path / "cache")


def test_one_text_repeated_cannot_be_split(tmp_path: Path) -> None:
    path = write_rows(tmp_path / "rows.jsonl", ["the same text"] * 50)
    with pytest.raises(DataError, match=r"no training document.*text that is held out is not trained on"):
        tokenize.prepare(config_for(path), tmp_path / "cache")


def test_a_run_needs_enough_sequences_for_a_step_and_for_every_node(folder: Path) -> None:
    header = shards.read_header(folder)
    train, held_out = header.train.tokens, header.validation.tokens

    def problems(nodes: int, batch: int, length: int) -> list[str]:
        data = DataConfig(sequence_length=length, global_batch_sequences=batch)
        try:
            shards.require_enough(header, RunConfig(nodes=nodes, data=data))
        except ConfigError as error:
            return [problem.path for problem in error.problems]
        return []

    assert problems(4, 32, 16) == []
    assert problems(1, (train - 1) // 16, 16) == []
    assert problems(1, (train - 1) // 16 + 1, 16) == ["data.global_batch_sequences"]
    assert problems((held_out - 1) // 16, (held_out - 1) // 16, 16) == []
    assert problems((held_out - 1) // 16 + 1, (held_out - 1) // 16 + 1, 16) == ["nodes"]
    assert problems(train, train, 16) == ["nodes", "nodes"]


def test_too_many_nodes_are_told_the_numbers_and_the_next_move(folder: Path) -> None:
    header = shards.read_header(folder)
    sequences = (header.validation.tokens - 1) // 128
    run = RunConfig(nodes=sequences + 1, data=DataConfig(global_batch_sequences=sequences + 1))
    with pytest.raises(
        ConfigError, match=rf"nodes \({sequences + 1}\) needs .* more than the {sequences} .*use fewer nodes"
    ):
        shards.require_enough(header, run)


def test_real_rows_of_the_shared_text_come_through_whole(shared_data: Path, tmp_path: Path) -> None:
    source, cache = tmp_path / "text", tmp_path / "cache"
    source.mkdir()
    rows: list[str] = []
    for name in ("factbook.val.jsonl.gz", "tinystories.val.jsonl.gz"):
        shutil.copy(shared_data / "text" / name, source / name)
        with gzip.open(source / name, "rt", encoding="utf-8") as file:
            rows += [json.loads(line)["text"] for line in file]
    folder = tokenize.prepare(config_for(source, vocab_size=1024), cache)
    header = shards.verify(folder)
    assert header.train.documents + header.validation.documents == len(rows) == 992
    assert header.train.bytes + header.validation.bytes == sum(len(row.encode()) for row in rows)
    assert header.vocab_size == 1024
    assert not header.skipped
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    decoded = [
        tokenizer.decode(ids, skip_special_tokens=False)
        for name in ("train.bin", "validation.bin")
        for ids in documents_in(folder / name)
    ]
    assert sorted(decoded) == sorted(rows)
