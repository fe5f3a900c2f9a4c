"""The tokens of known texts are pinned: a change of their digest gives every trial on them another identity."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from spes_core.config import DataConfig, DomainConfig
from spes_core.data import shards, tokenize
from tests.small_corpora import texts, write_rows

ALONE = "8c5d2dae0a92f684c0e969320646258ae9793d5a47808af7250aa3f889736500"
MIXED = {
    # of the files alone, without where domains end in them
    "bpe": "ba7a35fa1363151eebe5bcbf3921597c8f4c5c34a1614302ddc32f8617c18d81",
    "bytes": "9484847cf2a6eff2a2b38769bbc1f930365fbcfdda7da3a14cd64e7cb37155b8",
}
STDLIB = {
    "83bf50fe3fb9d6ee21ef20a5c208fbc46ea7ec32565d677e70eda4a4e76636b9": (
        "c99a3e2db51abc8191a2f17a4cb8299b4ab8144e870b49dd95d5bec76a28ef27"
    )
}
"""Digest of the default corpus (Python 3.11.7, as built here) -> digest of its tokens as bytes."""


@pytest.fixture(scope="module")
def corpora(tmp_path_factory: pytest.TempPathFactory) -> dict[str, DomainConfig]:
    root = tmp_path_factory.mktemp("corpus")
    paths = {name: write_rows(root / f"{name}.jsonl", texts(60, seed)) for seed, name in enumerate(("b", "a"))}
    return {name: DomainConfig(corpus=str(path)) for name, path in paths.items()}


def test_the_tokens_of_a_corpus_are_those_of_earlier_versions(corpora: dict[str, DomainConfig], tmp_path: Path) -> None:
    config = DataConfig(corpus=corpora["a"].corpus, tokenizer_vocab_size=300, validation_fraction=0.1)
    assert shards.verify(tokenize.prepare(config, tmp_path)).digest == ALONE


@pytest.mark.parametrize("tokenizer", MIXED)
def test_the_tokens_of_a_mixture_are_those_of_earlier_versions(
    tokenizer: str, corpora: dict[str, DomainConfig], tmp_path: Path
) -> None:
    config = DataConfig(domains=corpora, tokenizer=tokenizer, tokenizer_vocab_size=300, validation_fraction=0.1)
    files = shards.verify(tokenize.prepare(config, tmp_path)).files
    assert shards.token_digest(files, {}) == MIXED[tokenizer]


def test_the_default_corpus_gives_one_digest_wherever_it_is_prepared(tmp_path: Path) -> None:
    headers = []
    for place, seed in (("a", "1"), ("b", "2")):
        command = [sys.executable, "-m", "spes_core.data.tokenize", "--tokenizer", "bytes", "--out", tmp_path / place]
        environment = {**os.environ, "PYTHONHASHSEED": seed, "LC_ALL": "C", "PYTHONPATH": os.pathsep.join(sys.path)}
        subprocess.run(command, env=environment, check=True, capture_output=True, cwd=tmp_path)
        headers.append(shards.read_header(tmp_path / place))
    first, second = headers
    assert (first.digest, first.corpus_digest) == (second.digest, second.corpus_digest)
    if first.corpus_digest not in STDLIB:
        pytest.skip(f"no digest is pinned for the library of this interpreter ({first.python_version})")
    assert first.digest == STDLIB[first.corpus_digest]
