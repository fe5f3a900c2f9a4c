"""A corpus is read in an order that no machine changes, and whatever cannot be used is counted and named."""

from __future__ import annotations

import gzip
import json
import os
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from spes_core.data.sources import Skipped, find, is_held_out
from spes_core.errors import DataError


def read(path: Path) -> tuple[dict[str, str], Skipped]:
    """Name -> text of the corpus at ``path``, in order, and what was left out."""
    skipped = Skipped()
    documents = list(find(str(path)).documents(skipped))
    assert len({document.name for document in documents}) == len(documents)
    return {document.name: document.text for document in documents}, skipped


def test_rows_are_documents_named_by_their_id_or_line(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_text('{"text": "one"}\n{"id": "b", "text": "two\\nlines"}\r\n{"id": 7, "text": "three"}')
    documents, skipped = read(path)
    assert documents == {"rows.jsonl:line 1": "one", "rows.jsonl:b": "two\nlines", "rows.jsonl:7": "three"}
    assert not skipped.counts


def test_compressed_rows_equal_plain_rows(tmp_path: Path) -> None:
    rows = "".join(json.dumps({"id": str(n), "text": f"text é {n}"}) + "\n" for n in range(20)).encode()
    (tmp_path / "a.jsonl").write_bytes(rows)
    (tmp_path / "b.jsonl.gz").write_bytes(gzip.compress(rows))
    plain, compressed = read(tmp_path / "a.jsonl")[0], read(tmp_path / "b.jsonl.gz")[0]
    assert list(plain.values()) == list(compressed.values()) == [f"text é {n}" for n in range(20)]


BAD_ROWS = {
    b"": "empty lines",
    b"  \t": "empty lines",
    b'{"text": "torn': "not valid JSON",
    b"[" * 100_000: "not valid JSON",
    b'["text"]': "not a JSON object",
    b'{"body": "x"}': 'without the field "text"',
    b'{"text": null}': 'with a field "text" that is not text',
    b'{"text": " \\n "}': "without text",
    b'{"text": "\xff"}': "not UTF-8",
    b'{"text": "\\ud800"}': "with half a surrogate pair",
}


@pytest.mark.parametrize(("row", "reason"), BAD_ROWS.items(), ids=range(len(BAD_ROWS)))
def test_a_bad_row_is_counted_by_reason_and_named_by_file_and_line(tmp_path: Path, row: bytes, reason: str) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_bytes(b'{"text": "before"}\n' + row + b'\n{"text": "after"}\n')
    documents, skipped = read(path)
    assert list(documents.values()) == ["before", "after"]
    assert skipped.counts == {reason: 1}
    assert skipped.first == {reason: ["rows.jsonl:2"]}


@given(lines=st.lists(st.binary(max_size=40).map(lambda line: line.replace(b"\n", b"")), max_size=30))
@settings(max_examples=200, deadline=None, derandomize=True)
def test_no_line_disappears_uncounted(lines: list[bytes], tmp_path_factory: pytest.TempPathFactory) -> None:
    path = tmp_path_factory.mktemp("rows") / "rows.jsonl"
    path.write_bytes(b"".join(line + b"\n" for line in [*lines, b'{"text": "good"}']))
    documents, skipped = read(path)
    assert len(documents) + sum(skipped.counts.values()) == len(lines) + 1


def test_only_the_first_few_places_are_named_but_all_are_counted(tmp_path: Path) -> None:
    (tmp_path / "rows.jsonl").write_text("\n" * 1000 + '{"text": "x"}\n')
    skipped = read(tmp_path / "rows.jsonl")[1]
    assert skipped.counts == {"empty lines": 1000}
    assert skipped.first["empty lines"] == [f"rows.jsonl:{line}" for line in range(1, 6)]


def test_a_folder_is_read_in_path_order_one_document_a_text_file(tmp_path: Path) -> None:
    for name in (
        "b/two.md",
        "a.txt",
        "b.py",
        "Z.txt",
        "é.txt",
        "node_modules/x.js",
        ".git/x.txt",
        "b/.hidden.txt",
    ):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(f"text of {name}", encoding="utf-8")
    (tmp_path / "b" / "rows.jsonl").write_text('{"text": "row"}\n')
    documents = read(tmp_path)[0]
    assert list(documents) == ["Z.txt", "a.txt", "b.py", "b/rows.jsonl:line 1", "b/two.md", "é.txt"]
    assert documents["b/two.md"] == "text of b/two.md"


def test_files_of_a_folder_that_cannot_be_used_are_counted_and_named(tmp_path: Path) -> None:
    (tmp_path / "good.txt").write_text("text")
    (tmp_path / "latin.txt").write_bytes("é".encode("latin-1"))
    (tmp_path / "binary.py").write_bytes(b"a\0b")
    (tmp_path / "picture.png").write_bytes(b"PNG")
    (tmp_path / "blank.txt").write_text(" \n")
    (tmp_path / "broken.txt").symlink_to(tmp_path / "nowhere")
    os.mkfifo(tmp_path / "pipe.txt")  # opening it would wait for ever
    documents, skipped = read(tmp_path)
    assert list(documents) == ["good.txt"]
    assert skipped.first == {
        "with binary content": ["binary.py"],
        "without text": ["blank.txt"],
        "not a readable file": ["broken.txt", "pipe.txt"],
        "not UTF-8": ["latin.txt"],
        "of a file type that is not read": ["picture.png"],
    }


def test_a_text_file_alone_is_cut_at_blank_lines_and_nothing_is_lost(tmp_path: Path) -> None:
    paragraphs = [f"Paragraph {n}. " + "word " * (n % 50) + "\n\n" for n in range(600)]
    text = "".join(paragraphs)
    (tmp_path / "book.txt").write_text(text)
    (tmp_path / "book.txt.gz").write_bytes(gzip.compress(text.encode()))
    pieces = list(read(tmp_path / "book.txt")[0].values())
    assert "".join(pieces) == text
    assert all(8_000 <= len(piece) < 8_500 and piece.endswith("\n\n") for piece in pieces[:-1])
    assert list(read(tmp_path / "book.txt.gz")[0].values()) == pieces


def test_text_without_blank_lines_is_cut_at_lines(tmp_path: Path) -> None:
    text = "".join(f"line {n}\n" for n in range(20_000))
    (tmp_path / "log.txt").write_text(text)
    pieces = list(read(tmp_path / "log.txt")[0].values())
    assert "".join(pieces) == text
    assert all(piece.endswith("\n") and len(piece) < 33_000 for piece in pieces)


def test_one_undecodable_byte_costs_one_piece_of_a_text_file(tmp_path: Path) -> None:
    good = b"word " * 2000 + b"\n\n"
    (tmp_path / "book.txt").write_bytes(good + b"\xff" + good + good)
    documents, skipped = read(tmp_path / "book.txt")
    assert [text.encode() for text in documents.values()] == [good, good]
    assert skipped.first == {"not UTF-8": ["book.txt:3"]}


def test_a_byte_order_mark_is_not_text(tmp_path: Path) -> None:
    (tmp_path / "rows.jsonl").write_bytes(b'\xef\xbb\xbf{"text": "row"}\n')
    (tmp_path / "a.txt").write_bytes(b"\xef\xbb\xbffile")
    assert list(read(tmp_path)[0].values()) == ["file", "row"]
    assert list(read(tmp_path / "a.txt")[0].values()) == ["file"]


def test_a_damaged_compressed_file_is_an_error_that_names_it(tmp_path: Path) -> None:
    content = gzip.compress(b'{"text": "row"}\n' * 1000)
    path = tmp_path / "rows.jsonl.gz"
    for damaged in (content[:-20], b"no gzip at all", content[:30] + b"\0\0\0\0" + content[34:]):
        path.write_bytes(damaged)
        with pytest.raises(DataError, match=r"rows\.jsonl\.gz is damaged .*fetch or compress it again"):
            read(tmp_path)


@pytest.mark.parametrize(
    ("corpus", "message"),
    [
        ("no/such/place", r'data\.corpus \("no/such/place"\) does not exist; give stdlib, or'),
        ("stdlb", r'data\.corpus \("stdlb"\) does not exist; did you mean "stdlib"\?'),
        ("empty", r'data\.corpus \("empty"\) is an empty folder; give'),
        ("picture.png", r'data\.corpus \("picture\.png"\) is of a type that is not read; give'),
    ],
)
def test_a_corpus_that_cannot_be_read_names_value_rule_and_next_move(
    corpus: str, message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "empty").mkdir()
    (tmp_path / "picture.png").write_bytes(b"PNG")
    monkeypatch.chdir(tmp_path)
    with pytest.raises(DataError, match=message):
        find(corpus)


def test_identity_follows_content_names_and_place(tmp_path: Path) -> None:
    for folder in ("a", "b"):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "x.txt").write_text("one")
        os.utime(tmp_path / folder / "x.txt", ns=(0, 0))
    first = find(str(tmp_path / "a")).identity()
    assert first == find(str(tmp_path / "a") + "/").identity()
    assert first != find(str(tmp_path / "b")).identity()
    assert first != find(str(tmp_path / "a" / "x.txt")).identity()
    os.utime(tmp_path / "a" / "x.txt", ns=(0, 1))
    second = find(str(tmp_path / "a")).identity()
    (tmp_path / "a" / "y.txt").write_text("")
    assert len({first, second, find(str(tmp_path / "a")).identity()}) == 3


def test_the_held_out_share_is_the_fraction_and_grows_with_it() -> None:
    names = [f"document {number}" for number in range(20_000)]
    small = {name for name in names if is_held_out(name, 0.02)}
    large = {name for name in names if is_held_out(name, 0.1)}
    assert small < large
    assert abs(len(small) / len(names) - 0.02) < 0.004  # four standard deviations
    assert abs(len(large) / len(names) - 0.1) < 0.0085
