"""The tokenized corpora that a study reads: found in the cache, or prepared in a process of their own."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from spes_core.config import DataConfig, DomainConfig
from spes_core.errors import ConfigError, DataError, Problem
from workbench.errors import StudyError
from workbench.trials import Corpus, Variant

if TYPE_CHECKING:
    from spes_core.data.shards import ShardHeader
    from workbench.spec import Study


_TOKENIZE = """
import runpy
from spes_core.processlife import die_with_parent
die_with_parent()
runpy.run_module("spes_core.data.tokenize", run_name="__main__", alter_sys=True)
"""
"""``python -m spes_core.data.tokenize`` that does not outlive the study which waits for it."""


@dataclass(frozen=True, kw_only=True)
class PreparedCorpus:
    """A folder of token ids and what its header says."""

    folder: Path
    header: ShardHeader


def find_corpus(corpus: Corpus) -> PreparedCorpus | None:
    """The corpus in the cache; None when it has not been prepared. Raises DataError when it cannot be read."""
    from spes_core.data import shards, tokenize

    folder = tokenize.find_prepared(_data_config(corpus))
    return None if folder is None else PreparedCorpus(folder=folder, header=shards.read_header(folder))


def prepare_corpus(corpus: Corpus) -> PreparedCorpus:
    """The corpus, prepared when it is not in the cache. Raises DataError with one line when it cannot be used."""
    from spes_core.data import shards
    from workbench.launch.launcher import child_environment

    if found := find_corpus(corpus):
        return found
    command = [sys.executable, "-c", _TOKENIZE]
    command += [f"--domain={name}={source}" for name, source in corpus.domains]
    command += [] if corpus.domains else [f"--corpus={corpus.path}"]
    command += [f"--tokenizer={corpus.tokenizer}", f"--text-field={corpus.text_field}"]
    command += [] if corpus.max_repetition is None else ["--max-repetition", repr(corpus.max_repetition)]
    command += ["--vocab-size", str(corpus.tokenizer_vocab_size)]
    command += ["--validation-fraction", str(corpus.validation_fraction)]
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=child_environment({}))
    if done.returncode != 0:
        raise DataError(_last_error(done.stderr) or f"tokenizing ended with exit status {done.returncode}")
    folder = Path(done.stdout.strip().splitlines()[-1])
    return PreparedCorpus(folder=folder, header=shards.read_header(folder))


def require_enough(study: Study, variants: Sequence[Variant], corpora: dict[Corpus, PreparedCorpus]) -> None:
    """Check that every run has enough text. Raises StudyError."""
    from spes_core.data import shards

    mistakes = []
    for variant in variants:
        try:
            shards.require_enough(corpora[Corpus.of(variant.config.data)].header, variant.config)
        except ConfigError as error:
            mistakes += [study.locate_run(variant.arm, variant.axes, problem) for problem in error.problems]
    if mistakes:
        raise StudyError(mistakes)


def corpus_mistake(study: Study, variants: Sequence[Variant], corpus: Corpus, error: DataError) -> StudyError:
    """The error of a corpus that cannot be used, at the place of the setting that the error begins with."""
    reader = next(variant for variant in variants if Corpus.of(variant.config.data) == corpus)
    named = re.match(r"data(\.[A-Za-z0-9_-]+)+", str(error))
    path = named.group() if named else "data.domains" if corpus.domains else "data.corpus"
    return StudyError([study.locate_run(reader.arm, reader.axes, Problem(path, f"cannot be used: {error}"))])


def _data_config(corpus: Corpus) -> DataConfig:
    return DataConfig(
        corpus=DataConfig.corpus if corpus.domains else corpus.path,
        domains={name: DomainConfig(corpus=source) for name, source in corpus.domains},
        tokenizer=corpus.tokenizer,
        text_field=corpus.text_field,
        max_repetition=corpus.max_repetition,
        tokenizer_vocab_size=corpus.tokenizer_vocab_size,
        validation_fraction=corpus.validation_fraction,
    )


def _last_error(stderr: str) -> str:
    lines = [line.removeprefix("error: ") for line in stderr.splitlines() if line.startswith("error: ")]
    return lines[-1] if lines else (stderr.strip().splitlines() or [""])[-1]
