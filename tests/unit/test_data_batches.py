"""Batches are the right windows of the right tokens, for any number of parts, step by step and after a restart."""

from __future__ import annotations

import random
from array import array
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from spes_core.config import DataConfig
from spes_core.data import shards
from spes_core.data.batches import TokenSource
from spes_core.data.order import sample_index
from spes_core.errors import DataError
from spes_core.model.losses import IGNORED_TARGET

VOCAB = 600
LENGTH = 7
NUM_TRAIN = 40
CONFIG = DataConfig(tokenizer_vocab_size=VOCAB, sequence_length=LENGTH, global_batch_sequences=12)


def write_shards(
    folder: Path,
    train: list[int],
    validation: list[int],
    dtype: str = "uint16",
    domains: dict[str, shards.DomainCounts] | None = None,
) -> Path:
    """A folder of tokenized text made by hand; token id t stands for t % 5 bytes."""
    folder.mkdir()
    code = "H" if dtype == "uint16" else "I"
    contents = {
        "train.bin": array(code, train).tobytes(),
        "validation.bin": array(code, validation).tobytes(),
        "token_bytes.bin": array("I", [token % 5 for token in range(VOCAB)]).tobytes(),
        "tokenizer.json": b"{}",
    }
    for name, content in contents.items():
        (folder / name).write_bytes(content)
    header = shards.ShardHeader(
        dtype="uint16" if dtype == "uint16" else "uint32",
        vocab_size=VOCAB,
        vocab_size_asked=VOCAB,
        end_of_text_id=0,
        tokenizer_digest="",
        tokenizer_documents=1,
        tokenizer_bytes=1,
        digest="",
        train=shards.SplitCounts(tokens=len(train), documents=1, bytes=1),
        validation=shards.SplitCounts(tokens=len(validation), documents=1, bytes=1),
        validation_fraction=0.1,
        unigram_entropy_nats=1.0,
        corpus="made by hand",
        corpus_digest="",
        python_version="",
        tokenizers_version="",
        files={name: shards.FileRecord(bytes=len(content), sha256="") for name, content in contents.items()},
        domains=domains or {},
    )
    shards.write_header(folder, header)
    return folder


def windows(ids: list[int]) -> list[list[int]]:
    """All windows of LENGTH + 1 tokens at stride LENGTH, by a plain loop."""
    found, start = [], 0
    while start + LENGTH + 1 <= len(ids):
        found.append(ids[start : start + LENGTH + 1])
        start += LENGTH
    return found


@pytest.fixture(scope="module")
def ids() -> tuple[list[int], list[int]]:
    rng = random.Random(3)
    return [rng.randrange(VOCAB) for _ in range(NUM_TRAIN * LENGTH + 4)], [rng.randrange(VOCAB) for _ in range(160)]


@pytest.fixture(scope="module", params=["uint16", "uint32"])
def folder(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory, ids: tuple[list[int], list[int]]
) -> Path:
    return write_shards(tmp_path_factory.mktemp("shards") / "folder", *ids, dtype=request.param)


def rows(tokens: torch.Tensor, targets: torch.Tensor) -> list[list[int]]:
    """The windows that a batch came from."""
    assert tokens.dtype == targets.dtype == torch.int64
    assert torch.equal(tokens[:, 1:], targets[:, :-1])
    return [[*row, last] for row, last in zip(tokens.tolist(), targets[:, -1].tolist(), strict=True)]


def test_a_batch_is_the_windows_at_its_places_of_the_order(folder: Path, ids: tuple[list[int], list[int]]) -> None:
    expected = windows(ids[0])
    assert len(expected) == NUM_TRAIN
    source = TokenSource(folder, CONFIG, seed=9)
    for step in (1, 2, 40):
        places = range((step - 1) * 12, step * 12)
        assert rows(*source.train_batch(step, 0, 1)) == [
            expected[sample_index(9, place, NUM_TRAIN)] for place in places
        ]


@pytest.mark.parametrize("parts", [1, 2, 3, 4, 12])
def test_parts_divide_the_same_global_batch(folder: Path, parts: int) -> None:
    source = TokenSource(folder, CONFIG, seed=1)
    for step in range(1, 9):
        alone = source.train_batch(step, 0, 1)
        shared = [source.train_batch(step, part, parts) for part in range(parts)]
        assert torch.equal(torch.cat([tokens for tokens, _ in shared]), alone[0])
        assert torch.equal(torch.cat([targets for _, targets in shared]), alone[1])


def test_an_epoch_over_four_nodes_reads_each_window_once(folder: Path, ids: tuple[list[int], list[int]]) -> None:
    config = replace(CONFIG, global_batch_sequences=8)
    nodes = [TokenSource(folder, config, seed=2) for _ in range(4)]
    read = [row for step in range(1, 6) for n in range(4) for row in rows(*nodes[n].train_batch(step, n, 4))]
    assert sorted(read) == sorted(windows(ids[0]))


def test_a_restarted_node_reads_on_as_if_nothing_had_happened(folder: Path) -> None:
    steady = TokenSource(folder, CONFIG, seed=5)
    through = [steady.train_batch(step, 1, 3) for step in range(1, 11)]
    restarted = TokenSource(folder, CONFIG, seed=5)
    for step in (7, 10, 8):
        assert torch.equal(restarted.train_batch(step, 1, 3)[0], through[step - 1][0])


def test_a_batch_is_the_caller_s_own_memory(folder: Path) -> None:
    source = TokenSource(folder, CONFIG, seed=5)
    tokens, targets = source.train_batch(1, 0, 1)
    kept = tokens.clone()
    targets.fill_(0)
    tokens.add_(1)
    assert torch.equal(source.train_batch(1, 0, 1)[0], kept)


@pytest.mark.parametrize("parts", [1, 2, 3, 4, 7])
@pytest.mark.parametrize("batch_sequences", [1, 3, 4, 100])
@pytest.mark.parametrize("max_sequences", [1, 10, 11, 1000])
def test_parts_cover_the_same_validation_set_in_step(
    folder: Path, ids: tuple[list[int], list[int]], parts: int, batch_sequences: int, max_sequences: int
) -> None:
    source = TokenSource(folder, CONFIG, seed=0)
    dealt = [source.validation_batches(part, parts, batch_sequences, max_sequences) for part in range(parts)]
    shapes = [[tuple(batch.tokens.shape) for batch in batches] for batches in dealt]
    assert all(shape == shapes[0] for shape in shapes)
    assert all(rows_ <= batch_sequences and length == LENGTH for rows_, length in shapes[0])

    real, target_bytes = [], 0
    for batch in (batch for batches in dealt for batch in batches):
        filled = (batch.targets == IGNORED_TARGET).all(dim=1)
        assert not (batch.targets[~filled] == IGNORED_TARGET).any()
        real += rows(batch.tokens[~filled], batch.targets[~filled])
        target_bytes += batch.target_bytes
    everything = windows(ids[1])
    count = min(max_sequences, len(everything))
    expected = [everything[index * len(everything) // count] for index in range(count)]
    assert sorted(real) == sorted(expected)
    assert target_bytes == sum(token % 5 for window in expected for token in window[1:])


def test_a_limited_validation_set_spans_the_whole_split(folder: Path, ids: tuple[list[int], list[int]]) -> None:
    source = TokenSource(folder, CONFIG, seed=0)
    everything = windows(ids[1])
    chosen = [everything.index(row) for batch in source.validation_batches(0, 1, 1, 4) for row in rows(*batch[:2])]
    assert chosen == [0, 5, 11, 16]
    assert len(everything) == 22


def test_a_split_shorter_than_one_sequence_is_refused_by_name(tmp_path: Path) -> None:
    folder = write_shards(tmp_path / "short", [1] * LENGTH, [1] * 20)
    with pytest.raises(DataError, match=r"holds 7 training tokens, too few for .*data\.sequence_length \(7\); shorten"):
        TokenSource(folder, CONFIG, seed=0)


def test_without_held_out_sequences_there_are_no_validation_batches(tmp_path: Path) -> None:
    for name, validation in (("none", []), ("short", [1] * LENGTH)):
        source = TokenSource(write_shards(tmp_path / name, [1] * 20, validation), CONFIG, seed=0)
        assert source.validation_batches(0, 2, 4, 10) == []


def test_a_folder_with_more_token_ids_than_asked_for_is_refused(folder: Path) -> None:
    with pytest.raises(DataError, match=r"600 token ids, more than data\.tokenizer_vocab_size \(599\)"):
        TokenSource(folder, replace(CONFIG, tokenizer_vocab_size=VOCAB - 1), seed=0)
