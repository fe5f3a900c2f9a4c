"""The default corpus is there on every machine, is library source only, and can be learned from."""

from __future__ import annotations

import sys
import sysconfig
from pathlib import Path

import pytest

from spes_core.config import DataConfig, RunConfig
from spes_core.data import shards, tokenize
from spes_core.data.batches import TokenSource
from spes_core.data.sources import Skipped, find
from spes_core.errors import DataError

CONFIG = DataConfig(tokenizer_vocab_size=1024)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tokenize.prepare(CONFIG, tmp_path_factory.mktemp("cache"))


def test_every_document_is_a_module_of_the_library_and_no_test() -> None:
    root = Path(sysconfig.get_paths()["stdlib"])
    documents = {document.name: document.text for document in find("stdlib").documents(Skipped())}
    assert {"os.py", "json/decoder.py", "unittest/case.py", "collections/__init__.py"} <= set(documents)
    for name, text in documents.items():
        folders = name.split("/")[:-1]
        assert not {"test", "tests", "idle_test", "site-packages", "dist-packages", "__pycache__"} & set(folders)
        assert (root / name).read_bytes() == text.encode()
        top = name.split("/")[0].removesuffix(".py")
        assert top in sys.stdlib_module_names or top.startswith(("_", "turtledemo", "pydoc_data")), name
    assert list(documents) == sorted(documents)


def test_it_is_some_megabytes_and_its_split_feeds_a_default_run(folder: Path) -> None:
    header = shards.verify(folder)
    assert 5e6 < header.train.bytes < 40e6
    assert header.train.documents > 300
    assert header.validation.documents >= 5
    assert header.vocab_size == 1024
    assert 3 < header.unigram_entropy_nats < 6.93  # ln 1024
    shards.require_enough(header, RunConfig(data=CONFIG))


def test_what_is_left_out_is_only_empty_files(folder: Path) -> None:
    assert set(shards.read_header(folder).skipped) <= {
        "without text",
        "with the text of a validation document",
    }


def test_a_default_batch_reads_as_python(folder: Path) -> None:
    from spes_core.data import vocabulary

    source = TokenSource(folder, CONFIG, seed=0)
    tokens, targets = source.train_batch(1, 0, 4)
    assert tokens.shape == targets.shape == (8, 128)
    library = "".join(document.text for document in find("stdlib").documents(Skipped()))
    tokenizer = vocabulary.load(folder)
    inside = [row.tolist() for row in tokens if 0 not in row.tolist()]
    assert inside
    assert all(tokenizer.decode(row).strip("\ufffd") in library for row in inside)


def test_parts_of_the_library_are_its_packages_and_modules_that_match() -> None:
    whole = find("stdlib").files
    assert find("stdlib:json, xml*").files == tuple(n for n in whole if n.split("/")[0] in ("json", "xml", "xmlrpc"))
    assert find("stdlib:*.py").files == tuple(name for name in whole if "/" not in name)
    part = find("stdlib:json")
    assert (part.name, part.is_stdlib) == ("stdlib:json", True)
    assert {document.name for document in part.documents(Skipped())} >= {"json/decoder.py", "json/__init__.py"}
    assert len({find(name).identity() for name in ("stdlib", "stdlib:json", "stdlib:xml")}) == 3


@pytest.mark.parametrize(("corpus", "pattern"), [("stdlib:", ""), ("stdlib:json,jsn", "jsn"), ("stdlib:test", "test")])
def test_a_part_of_the_library_that_is_none_is_refused(corpus: str, pattern: str) -> None:
    with pytest.raises(
        DataError, match=rf'"{corpus}"\): no package or module .* matches "{pattern}"; give their names'
    ):
        find(corpus)
