"""A preparation that is killed goes on from what it has finished, and ends with the same bytes."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from spes_core.config import DataConfig, DomainConfig
from spes_core.data import encode, fingerprints, shards, tokenize
from spes_core.data.preparation import Preparation
from spes_core.data.repetition import repetition
from spes_core.data.vocabulary import Vocabulary
from tests.small_corpora import config_for, contents, texts, write_rows

KILLED = """
import os, signal, sys
from pathlib import Path
from spes_core.config import DataConfig, DomainConfig
from spes_core.data import encode, tokenize
encode._BATCH_BYTES, encode._COMMIT_BYTES = 3_000, 10_000
first, second, cache, moment = sys.argv[1:]
told = 0
def tell(message):
    global told
    told += message.startswith("encoded")
    if told == int(moment):
        os.kill(os.getpid(), signal.SIGKILL)
domains = {"first": DomainConfig(corpus=first), "second": DomainConfig(corpus=second)}
tokenize.prepare(DataConfig(domains=domains, tokenizer_vocab_size=300, validation_fraction=0.1), Path(cache), tell)
"""


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> DataConfig:
    root = tmp_path_factory.mktemp("corpus")
    rows = {"first": [*texts(120), *texts(3)], "second": texts(120, 1)}
    paths = {name: write_rows(root / f"{name}.jsonl", texts) for name, texts in rows.items()}
    (root / "second.jsonl").write_text("\n" + (root / "second.jsonl").read_text())
    domains = {name: DomainConfig(corpus=str(path)) for name, path in paths.items()}
    return DataConfig(domains=domains, tokenizer_vocab_size=300, validation_fraction=0.1)


@pytest.fixture
def encoded(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The texts that are encoded from now on; batches are small."""
    monkeypatch.setattr(encode, "_BATCH_BYTES", 3_000)
    monkeypatch.setattr(encode, "_COMMIT_BYTES", 10_000)
    done: list[str] = []
    whole = Vocabulary.encode
    monkeypatch.setattr(Vocabulary, "encode", lambda self, rows: (done.extend(rows), whole(self, rows))[1])
    return done


def kill(config: DataConfig, cache: Path, batches: int) -> None:
    corpora = [domain.corpus for domain in config.domains.values()]
    command = [sys.executable, "-c", KILLED, *corpora, str(cache), str(batches)]
    assert subprocess.run(command, check=False).returncode == -9


def test_what_was_encoded_before_a_kill_is_not_encoded_again(
    config: DataConfig, encoded: list[str], tmp_path: Path
) -> None:
    whole = contents(tokenize.prepare(config, tmp_path / "whole"))
    total = len(encoded)
    header = json.loads(whole["header.json"])
    assert header["repeated_documents"] == 3
    assert header["skipped"]["empty lines"] == 1
    left = [total]
    for batches in (9, 10):  # in the first domain, then in the second
        kill(config, tmp_path / "cache", batches)
        (part,) = (tmp_path / "cache").glob("*.part")
        state = json.loads((part / "unfinished.json").read_text())
        left.append(total - sum(sum(sizes["documents"]) for sizes in state["parts"]))
    assert left[0] > left[1] > left[2] > 0
    encoded.clear()
    told: list[str] = []
    made = tokenize.prepare(config, tmp_path / "cache", told.append)
    assert len(encoded) == left[2]
    assert contents(made) == whole
    assert not any(message.startswith(("reading", "training")) for message in told)
    assert [entry.name for entry in (tmp_path / "cache").iterdir() if entry.is_dir()] == [made.name]


@pytest.mark.parametrize("damage", ["foreign state", "short file", "no state"])
def test_what_cannot_be_gone_on_from_is_begun_again(
    config: DataConfig, encoded: list[str], tmp_path: Path, damage: str
) -> None:
    kill(config, tmp_path, 9)
    (part,) = tmp_path.glob("*.part")
    state = part / "unfinished.json"
    if damage == "foreign state":
        state.write_text(state.read_text().replace('"made_by": "', '"made_by": "another '))
    elif damage == "short file":
        (part / "train.bin").write_bytes(b"")
    else:
        state.unlink()
    header = shards.verify(tokenize.prepare(config, tmp_path))
    assert len(encoded) == header.train.documents + header.validation.documents


@pytest.mark.usefixtures("encoded")
def test_what_was_begun_with_other_text_is_not_gone_on_from(config: DataConfig, tmp_path: Path) -> None:
    kill(config, tmp_path / "cache", 9)
    (begun,) = (tmp_path / "cache").glob("*.part")
    asked = Preparation.of(replace(config, domains=dict(reversed(config.domains.items()))))
    place = tmp_path / "mine"
    begun.rename(place.with_name(f"mine{begun.name[begun.name.index('.') :]}"))  # as a killed --out mine leaves it
    made = tokenize.prepare_at(asked, place, None, lambda message: None)
    clean = tokenize.prepare_at(asked, tmp_path / "clean", None, lambda message: None)
    assert contents(made) == contents(clean)
    assert sorted(entry.name for entry in tmp_path.iterdir() if entry.is_dir()) == ["cache", "clean", "mine"]


def test_repeated_texts_are_counted_whatever_fits_in_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    values = [*range(0, 1 << 64, (1 << 64) // 50), *[7, 7, 7, (1 << 64) - 1, (1 << 64) - 1]]
    path = tmp_path / "seen.bin"
    path.write_bytes(b"".join(value.to_bytes(8, "little") for value in values))
    for at_once in (1 << 20, 10, 1):
        monkeypatch.setattr(fingerprints, "_MOST_AT_ONCE", at_once)
        assert fingerprints.count_repeated(path) == len(values) - len(set(values))


def test_repetition_is_the_share_of_text_in_runs_that_occurred_before() -> None:
    words = [f"w{n:02}" for n in range(40)]
    assert repetition(" ".join(words)) == 0
    assert repetition(" ".join(words[:10] * 2)) == 0.5
    assert repetition(" ".join([*words[:20], *words[:20], *words[20:]])) == pytest.approx(20 / 60)
    assert repetition("again " * 50) == pytest.approx(49 / 50)
    assert repetition("") == repetition("a b c " * 3) == 0  # shorter than a run


def test_documents_that_repeat_themselves_are_left_out_when_asked(tmp_path: Path) -> None:
    loops = ["the same line over and over in this one document\n" * 40] * 5
    path = write_rows(tmp_path / "rows.jsonl", [*texts(60), *loops])
    config = config_for(path)
    keeps = shards.read_header(tokenize.prepare(config, tmp_path / "cache"))
    drops = shards.read_header(tokenize.prepare(replace(config, max_repetition=0.5), tmp_path / "cache"))
    assert keeps.skipped.get("that repeat themselves") is None
    assert drops.skipped["that repeat themselves"] == 5
    assert drops.skipped_first["that repeat themselves"] == tuple(f"rows.jsonl:d{n}" for n in range(60, 65))
    documents = [header.train.documents + header.validation.documents for header in (keeps, drops)]
    assert documents == [65 - keeps.skipped.get("with the text of a validation document", 0), 60]
