"""Every format gives the documents that are in it, by the same names and rules, wherever they come from."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.parquet
import pytest

from spes_core.config import DataConfig
from spes_core.data import hub, shards, tokenize
from spes_core.data.documents import Skipped
from spes_core.data.sources import find
from spes_core.errors import DataError
from tests.small_corpora import config_for, contents, texts, write_rows

ROWS = [{"id": f"d{n}", "text": f"text é {n}"} for n in range(600)]


def documents(source: str, text_field: str = "text") -> tuple[dict[str, str], Skipped]:
    skipped = Skipped()
    return {d.name: d.text for d in find(source).documents(skipped, text_field)}, skipped


def lines(rows: list[Any]) -> bytes:
    return "".join(json.dumps(row) + "\n" for row in rows).encode()


def test_zst_rows_equal_plain_rows_also_in_several_frames(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_bytes(lines(ROWS))
    frames = [pyarrow.compress(lines(part), "zstd", asbytes=True) for part in (ROWS[:200], ROWS[200:])]
    (tmp_path / "b.jsonl.zst").write_bytes(b"".join(frames))
    plain, compressed = (documents(str(tmp_path / name))[0] for name in ("a.jsonl", "b.jsonl.zst"))
    assert list(plain.values()) == list(compressed.values()) == [row["text"] for row in ROWS]
    assert next(iter(compressed)) == "b.jsonl.zst:d0"


def test_parquet_rows_are_documents_named_by_their_id_or_row(tmp_path: Path) -> None:
    table = pyarrow.Table.from_pylist([*ROWS, {"id": None, "text": "last"}])
    pyarrow.parquet.write_table(table, tmp_path / "a.parquet", row_group_size=100)
    found, skipped = documents(str(tmp_path / "a.parquet"))
    assert found == {f"a.parquet:{row['id']}": row["text"] for row in ROWS} | {"a.parquet:row 601": "last"}
    assert not skipped.counts


def test_bad_parquet_rows_are_counted_by_reason_and_named(tmp_path: Path) -> None:
    pyarrow.parquet.write_table(pyarrow.table({"text": ["one", None, " ", "two"]}), tmp_path / "a.parquet")
    pyarrow.parquet.write_table(pyarrow.table({"text": [1, 2]}), tmp_path / "b.parquet")
    pyarrow.parquet.write_table(pyarrow.table({"body": ["x"]}), tmp_path / "c.parquet")
    found, skipped = documents(str(tmp_path))
    assert list(found.values()) == ["one", "two"]
    assert skipped.first == {
        'with a field "text" that is not text': ["a.parquet:2", "b.parquet:1", "b.parquet:2"],
        "without text": ["a.parquet:3"],
        'without the field "text"': ["c.parquet:1"],
    }


@pytest.mark.parametrize("name", ["a.parquet", "a.jsonl.zst"])
def test_a_damaged_file_is_an_error_that_names_it(tmp_path: Path, name: str) -> None:
    path = tmp_path / name
    if name.endswith(".zst"):
        path.write_bytes(pyarrow.compress(lines(ROWS), "zstd", asbytes=True))
    else:
        pyarrow.parquet.write_table(pyarrow.Table.from_pylist(ROWS), path)
    content = path.read_bytes()
    for damaged in (content[: len(content) // 2], b"something else", content[:8] + b"\0" * 400 + content[408:]):
        path.write_bytes(damaged)
        with pytest.raises(DataError, match=rf"{name} is damaged .*fetch or compress it again"):
            documents(str(tmp_path))


def test_the_field_of_the_text_can_be_chosen(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_bytes(lines([{"body": "one", "text": "other"}, {"text": "no body"}]))
    pyarrow.parquet.write_table(pyarrow.table({"body": ["two"], "text": ["other"]}), tmp_path / "b.parquet")
    found, skipped = documents(str(tmp_path), "body")
    assert list(found.values()) == ["one", "two"]
    assert skipped.first == {'without the field "body"': ["a.jsonl:2"]}
    with pytest.raises(DataError, match=r'give text files, or JSON lines with a field "content"'):
        tokenize.prepare(DataConfig(corpus=str(tmp_path), text_field="content"), tmp_path / "cache")


def test_several_sources_become_one_folder_where_one_asks_for_it(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RAYON_NUM_THREADS", "1")  # --workers sets it: put back afterwards
    for name in ("a", "b"):
        write_rows(tmp_path / f"{name}.jsonl", texts(60, ord(name)))
    sources = [str(tmp_path / f"{name}.jsonl") for name in ("a", "b")]
    command = ["--validation-fraction", "0.1", "--vocab-size", "300", "--cache", str(tmp_path / "cache")]
    made = {}
    for workers in ("1", "3"):
        out = tmp_path / "out" / workers
        assert tokenize.main([*sources, *command, "--out", str(out), "--workers", workers]) == 0
        assert capsys.readouterr().out == f"{out}\n"
        made[workers] = contents(out)
        assert sum(split.documents for split in (shards.verify(out).train, shards.verify(out).validation)) == 120
    assert made["1"] == made["3"]
    assert not (tmp_path / "cache").exists()
    assert tokenize.main([*sources, *command, "--out", str(tmp_path / "out" / "1")]) == 0
    assert tokenize.main([sources[0], *command, "--out", str(tmp_path / "out" / "1")]) == 2
    assert "out/1 holds something else; name another folder, or remove it" in capsys.readouterr().err
    assert contents(tmp_path / "out" / "1") == made["1"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["a", "--domain", "b=c"], "--domain must not be given beside other sources"),
        (["--workers", "0"], "--workers (0) must be at least 1"),
        (["hf:"], 'data.corpus ("hf:") must be hf:NAME, hf:NAME:CONFIG or hf:NAME:CONFIG:SPLIT'),
        (["--domain", "a b=c"], "data.domains.a b must have a name of at most 80 ASCII letters"),
        (["--max-repetition", "2"], "data.max_repetition (2) must lie between 0 and 1"),
        (["--tokenizer", "/no/such"], 'data.tokenizer ("/no/such") must be bpe, bytes, or a folder'),
    ],
)
def test_a_wrong_command_is_one_line_and_makes_nothing(
    arguments: list[str], message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert tokenize.main([*arguments, "--out", str(tmp_path / "out")]) == 2
    shown = capsys.readouterr().err
    assert shown.startswith(f"error: {message}") and shown.count("\n") == 1
    assert list(tmp_path.iterdir()) == []


# --- Hugging Face datasets ---


@pytest.fixture
def dataset(tmp_path: Path) -> Path:
    (tmp_path / "set").mkdir()
    table = pyarrow.Table.from_pylist([{**row, "other": 1} for row in ROWS[:50]])
    pyarrow.parquet.write_table(table, tmp_path / "set" / "train-00000.parquet")
    return tmp_path / "set"


def test_a_local_dataset_becomes_the_tokens_of_its_rows(dataset: Path, tmp_path: Path) -> None:
    config = DataConfig(corpus=f"hf:{dataset}", tokenizer_vocab_size=300, validation_fraction=0.2)
    folder = tokenize.prepare(config, tmp_path / "cache")
    header = shards.verify(folder)
    assert header.train.documents + header.validation.documents == 50
    assert header.train.bytes + header.validation.bytes == sum(len(row["text"].encode()) for row in ROWS[:50])
    assert not list(folder.glob("fetched*"))
    assert tokenize.find_prepared(config, tmp_path / "cache") == folder


def test_a_split_that_does_not_exist_is_told_at_once(dataset: Path, tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r'data\.corpus \("hf:.*nosuch"\) cannot be fetched \(.*check name, config'):
        tokenize.prepare(DataConfig(corpus=f"hf:{dataset}::nosuch"), tmp_path / "cache")
    assert [entry for entry in (tmp_path / "cache").iterdir() if entry.is_dir()] == []


def fetched(monkeypatch: pytest.MonkeyPatch, path: Path, breaks: list[int]) -> list[float]:
    """Fetch ROWS over a connection that breaks before these rows, once each; the pauses made."""
    left, pauses = list(breaks), []

    def rows(dataset: hub.Dataset, skip: int) -> Iterator[dict[str, str]]:
        for number in range(skip, len(ROWS)):
            if left and left[0] == number:
                left.pop(0)
                raise ConnectionError("reset by peer")
            yield ROWS[number]

    monkeypatch.setattr(hub, "_rows", rows)
    asked = hub.parse("hf:some/set", "data.corpus")
    hub.fetch(asked, path, "text", 'data.corpus ("hf:some/set")', lambda message: None, pauses.append)
    return pauses


def test_a_broken_connection_is_tried_again_from_where_it_broke(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "rows.jsonl.zst"
    assert fetched(monkeypatch, path, [0, 7, 7, 500]) == [1.0, 1.0, 2.0, 1.0]
    assert list(documents(str(path))[0].values()) == [row["text"] for row in ROWS]


def test_a_network_that_is_not_there_ends_in_one_clear_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "rows.jsonl.zst"
    message = (
        r'^data\.corpus \("hf:some/set"\) cannot be fetched after {} attempts \(ConnectionError: reset by peer\);'
        r" check name, config, split and network, or fetch it elsewhere and name its files$"
    )
    for row, attempts in ((0, 2), (9, 5)):
        with pytest.raises(DataError, match=message.format(attempts)):
            fetched(monkeypatch, path, [row] * 6)
    assert not path.exists()


def test_a_dataset_s_documents_do_not_depend_on_where_it_was_fetched(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(hub, "_rows", lambda dataset, skip: iter(ROWS[:50]))
    config = config_for(Path("hf:some/set"))
    made = [contents(tokenize.prepare(config, tmp_path / name)) for name in ("one", "two")]
    assert made[0] == made[1]
