"""A corpus is tokenized once, whoever is killed, torn or comes at the same time; and the command that does it."""

from __future__ import annotations

import json
import os
import pty
import re
import shutil
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from spes_core.data import shards, tokenize
from spes_core.errors import DataError
from tests.small_corpora import config_for, contents, texts, write_rows


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_rows(tmp_path_factory.mktemp("corpus") / "rows.jsonl", texts(200))


@pytest.fixture(scope="module")
def folder(corpus: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tokenize.prepare(config_for(corpus), tmp_path_factory.mktemp("cache"))


def test_a_second_call_finds_the_folder_and_reads_nothing(corpus: Path, tmp_path: Path) -> None:
    first_messages: list[str] = []
    first = tokenize.prepare(config_for(corpus), tmp_path, first_messages.append)
    times = {path: path.stat().st_mtime_ns for path in first.iterdir()}
    second_messages: list[str] = []
    assert tokenize.prepare(config_for(corpus), tmp_path, second_messages.append) == first
    assert tokenize.find_prepared(config_for(corpus), tmp_path) == first
    assert tokenize.find_prepared(config_for(corpus, 301), tmp_path) is None
    assert first_messages and not second_messages
    assert {path: path.stat().st_mtime_ns for path in first.iterdir()} == times


def test_each_setting_that_decides_the_tokens_has_its_own_folder(corpus: Path, tmp_path: Path) -> None:
    other = write_rows(tmp_path / "rows.jsonl", texts(100))
    configs = [
        config_for(corpus),
        config_for(corpus, 310),
        config_for(corpus, fraction=0.2),
        config_for(other),
    ]
    assert len({tokenize.prepare(config, tmp_path / "cache") for config in configs}) == 4


def test_a_changed_corpus_is_tokenized_again(tmp_path: Path) -> None:
    path = write_rows(tmp_path / "rows.jsonl", texts(100))
    first = shards.read_header(tokenize.prepare(config_for(path), tmp_path / "cache"))
    write_rows(path, texts(100, seed=1))
    second = shards.read_header(tokenize.prepare(config_for(path), tmp_path / "cache"))
    assert first.digest != second.digest
    assert first.corpus_digest != second.corpus_digest


def test_a_corpus_that_changes_while_it_is_read_is_refused_and_nothing_is_kept(tmp_path: Path) -> None:
    path = write_rows(tmp_path / "rows.jsonl", texts(100))
    with pytest.raises(DataError, match=r"changed while it was being read; prepare it again"):
        tokenize.prepare(config_for(path), tmp_path / "cache", lambda message: write_rows(path, texts(101)) and None)
    assert [entry for entry in (tmp_path / "cache").iterdir() if entry.is_dir()] == []


@pytest.mark.parametrize("name", ["train.bin", "validation.bin", "token_bytes.bin", "tokenizer.json", "header.json"])
def test_a_torn_folder_is_named_when_read_and_made_again_when_prepared(
    folder: Path, corpus: Path, name: str, tmp_path: Path
) -> None:
    torn = tmp_path / folder.name
    shutil.copytree(folder, torn)
    content = (torn / name).read_bytes()
    for damaged in (content[:-2], content + b"x", None):
        if damaged is None:
            (torn / name).unlink()
        else:
            (torn / name).write_bytes(damaged)
        with pytest.raises(DataError, match=rf"{name}.*prepare the corpus again"):
            shards.read_header(torn)
        assert tokenize.prepare(config_for(corpus), tmp_path) == torn
        assert contents(torn) == contents(folder)


def test_two_at_once_share_one_preparation(corpus: Path, tmp_path: Path) -> None:
    first_is_inside, second_waits = threading.Event(), threading.Event()
    heard: dict[str, list[str]] = {"first": [], "second": []}
    folders: dict[str, Path] = {}

    def listen(who: str, message: str) -> None:
        heard[who].append(message)
        if who == "first":
            first_is_inside.set()
            assert second_waits.wait(30)
        elif "waiting" in message:
            second_waits.set()

    def run(who: str) -> None:
        folders[who] = tokenize.prepare(config_for(corpus), tmp_path, lambda message: listen(who, message))

    first = threading.Thread(target=run, args=("first",))
    first.start()
    assert first_is_inside.wait(30)
    second = threading.Thread(target=run, args=("second",))
    second.start()
    first.join(60)
    second.join(60)
    assert folders["first"] == folders["second"]
    assert heard["second"] == ["waiting for another process that tokenizes the same corpus"]
    shards.verify(folders["first"])


KILLED = """
import os, signal, sys
from pathlib import Path
from spes_core.config import DataConfig
from spes_core.data import tokenize
corpus, cache, moment = sys.argv[1:]
def die(*_): os.kill(os.getpid(), signal.SIGKILL)
if moment == "publish":
    tokenize._publish = die
config = DataConfig(corpus=corpus, tokenizer_vocab_size=300, validation_fraction=0.1)
tokenize.prepare(config, Path(cache), lambda message: die() if message.startswith(moment) else None)
"""


@pytest.mark.parametrize("moment", ["reading", "training", "encoded", "publish"])
def test_kill_9_leaves_nothing_that_is_mistaken_for_complete(
    corpus: Path, folder: Path, tmp_path: Path, moment: str
) -> None:
    done = subprocess.run([sys.executable, "-c", KILLED, str(corpus), str(tmp_path), moment], check=False)
    assert done.returncode == -9
    left = [entry for entry in tmp_path.iterdir() if entry.is_dir()]
    assert [entry.suffix for entry in left] == [".part"]
    made = tokenize.prepare(config_for(corpus), tmp_path)
    assert contents(made) == contents(folder)
    assert [entry for entry in tmp_path.iterdir() if entry.is_dir()] == [made]


def test_a_cache_that_cannot_be_made_names_the_option(corpus: Path, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(DataError, match=r"the folder .*file/cache/\w+ cannot be written .*--cache"):
        tokenize.prepare(config_for(corpus), tmp_path / "file" / "cache")


def test_a_command_that_cannot_be_carried_out_is_one_line_and_leaves_nothing(
    corpus: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for arguments, message in (
        (["--out", f"{tmp_path}/b\udcffd"], "must be a name of printable characters in UTF-8"),
        (["--out", f"{tmp_path}/{'a' * 300}"], r"cannot be read \(.*File name too long"),
        (["--vocab-size", "99999999999"], "must be at most 1048576 with tokenizer bpe"),
    ):
        assert tokenize.main([str(corpus), "--cache", str(tmp_path / "cache"), *arguments]) == 2
        (line,) = capsys.readouterr().err.splitlines()
        assert re.fullmatch(f"error: .*{message}.*", line), line
    assert list(tmp_path.iterdir()) == []


def test_the_command_prints_the_folder_last_and_reports_what_was_left_out(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = write_rows(tmp_path / "rows.jsonl", texts(100))
    path.write_text("\n" + path.read_text())
    arguments = [
        "--corpus",
        str(path),
        "--vocab-size",
        "300",
        "--validation-fraction",
        "0.1",
        "--cache",
        str(tmp_path / "cache"),
    ]
    assert tokenize.main([*arguments, "--verify"]) == 0
    shown = capsys.readouterr()
    header = shards.read_header(Path(shown.out.splitlines()[-1]))
    assert header.skipped == {"empty lines": 1}
    assert header.skipped_first == {"empty lines": ("rows.jsonl:1",)}
    assert "left out: 1 empty lines (rows.jsonl:1)" in shown.err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--corpus", "stdlb"], 'error: data.corpus ("stdlb") does not exist; did you mean "stdlib"?'),
        (["--vocab-size", "256"], "error: data.tokenizer_vocab_size (256) must be at least 257"),
        (["--validation-fraction", "1"], "error: data.validation_fraction (1) must lie between 0 and 1"),
    ],
)
def test_bad_input_exits_2_with_one_clear_line_and_creates_nothing(
    arguments: list[str], message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert tokenize.main([*arguments, "--cache", str(tmp_path / "cache")]) == 2
    shown = capsys.readouterr()
    assert shown.out == ""
    assert shown.err.startswith(message) and shown.err.count("\n") == 1
    assert not (tmp_path / "cache").exists()


def test_verify_names_a_file_whose_bytes_have_changed(folder: Path, tmp_path: Path) -> None:
    shutil.copytree(folder, tmp_path / "copy")
    content = bytearray((tmp_path / "copy" / "train.bin").read_bytes())
    content[1000] ^= 1
    (tmp_path / "copy" / "train.bin").write_bytes(content)
    shards.read_header(tmp_path / "copy")  # the cheap check looks at sizes only
    with pytest.raises(DataError, match=r"train\.bin does not have the SHA-256"):
        shards.verify(tmp_path / "copy")


def test_a_folder_of_another_version_or_kind_is_refused(folder: Path, tmp_path: Path) -> None:
    with pytest.raises(DataError, match="is not a folder of tokenized text"):
        shards.read_header(tmp_path)
    header = json.loads((folder / "header.json").read_text())
    for change, message in (
        ({"schema": 99}, "has schema 99, but"),
        ({"dtype": "float32"}, "not a valid header: dtype"),
    ):
        (tmp_path / "header.json").write_text(json.dumps({**header, **change}))
        with pytest.raises(DataError, match=message):
            shards.read_header(tmp_path)


def test_progress_is_shown_on_a_terminal_only(corpus: Path, tmp_path: Path) -> None:
    command = [
        sys.executable,
        "-m",
        "spes_core.data.tokenize",
        "--corpus",
        str(corpus),
        "--vocab-size",
        "300",
    ]
    master, terminal = pty.openpty()
    done = subprocess.run(
        [*command, "--cache", str(tmp_path / "a")], stdout=subprocess.PIPE, stderr=terminal, check=True
    )
    os.close(terminal)
    assert b"\r\x1b[Ktraining a vocabulary of 300" in os.read(master, 100_000)
    os.close(master)
    quiet = subprocess.run([*command, "--cache", str(tmp_path / "b")], capture_output=True, check=True)
    assert b"\r" not in quiet.stderr + done.stdout
