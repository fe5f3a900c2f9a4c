"""Tokenized corpora on disk, made once: `prepare`, or `python -m spes_core.data.tokenize`.

A folder appears under its final name by one rename when it is complete, so a process that is killed leaves nothing
that could be mistaken for one.
"""

from __future__ import annotations

import argparse
import fcntl
import os
import shutil
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from spes_core.config import DataConfig, DomainConfig, ModelConfig, RunConfig
from spes_core.data import shards
from spes_core.data.preparation import Preparation
from spes_core.data.progress import Progress, megabytes, terminal_line
from spes_core.errors import ConfigError, DataError, SpesError
from spes_core.rules import check


def prepare(config: DataConfig, cache: Path | None = None, progress: Progress | None = None) -> Path:
    """The folder of ``config``'s corpus or domains in token ids, made in ``cache`` unless a sound one is there.

    Depends on corpus or domains (not on weights), tokenizer, tokenizer_vocab_size and validation_fraction. Several
    processes may call this at once: one works, the others wait for it. ``progress`` gets a line of text now and then.
    Raises DataError when the corpus cannot be used.
    """
    from spes_core.data.encode import write_folder  # numpy: not needed to find what is there

    tell = progress or (lambda message: None)
    asked = Preparation.of(config)
    found = asked.find()
    key = found.key()
    folder = _folder(key, cache)
    if _is_sound(folder):
        return folder
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise DataError(f"the cache {folder.parent} cannot be created ({error}); name another with --cache") from error
    with _locked(folder.with_name(f"{folder.name}.lock"), tell):
        if _is_sound(folder):
            return folder
        part = folder.with_name(f"{folder.name}.part")
        shutil.rmtree(part, ignore_errors=True)  # what a killed process left: nobody else holds the lock
        part.mkdir()
        try:
            write_folder(part, found, tell)
            if asked.find() != found or found.key() != key:
                raise DataError(f'the corpus ("{asked.name}") changed while it was being read; prepare it again')
            _publish(part, folder)
        finally:
            shutil.rmtree(part, ignore_errors=True)
    return folder


def find_prepared(config: DataConfig, cache: Path | None = None) -> Path | None:
    """The folder that `prepare` would return without any work; None when there is none. Raises DataError as it does."""
    folder = _folder(Preparation.of(config).find().key(), cache)
    return folder if _is_sound(folder) else None


def default_cache() -> Path:
    """$XDG_CACHE_HOME/spes-workbench, or ~/.cache/spes-workbench."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "spes-workbench"


def main(arguments: list[str] | None = None) -> int:
    """Print the folder as the last line; exit code 0 when it is there, 2 for bad input, 130 interrupted, else 1."""
    defaults = DataConfig()
    parser = argparse.ArgumentParser(prog="python -m spes_core.data.tokenize", description="Tokenize a corpus, once.")
    parser.add_argument(
        "--corpus", default=defaults.corpus, help='"stdlib", or a file or folder (default: %(default)s)'
    )
    parser.add_argument(
        "--domain",
        action="append",
        default=[],
        type=_named_source,
        metavar="NAME=SOURCE",
        help="one domain of a mixture; give it once for each, instead of --corpus",
    )
    parser.add_argument("--tokenizer", default=defaults.tokenizer, help="default: %(default)s")
    parser.add_argument("--vocab-size", type=int, default=defaults.tokenizer_vocab_size, help="default: %(default)s")
    parser.add_argument(
        "--validation-fraction", type=float, default=defaults.validation_fraction, help="default: %(default)s"
    )
    parser.add_argument(
        "--cache", type=Path, default=None, help="folder of tokenized corpora (default: the user's cache)"
    )
    parser.add_argument("--verify", action="store_true", help="also hash every file of the folder")
    options = parser.parse_args(arguments)
    config = DataConfig(
        corpus=options.corpus,
        domains={name: DomainConfig(corpus=source) for name, source in options.domain},
        tokenizer=options.tokenizer,
        tokenizer_vocab_size=options.vocab_size,
        validation_fraction=options.validation_fraction,
    )
    try:
        _require_valid(config)
        folder = prepare(config, options.cache, terminal_line())
        header = shards.verify(folder) if options.verify else shards.read_header(folder)
    except (SpesError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2 if isinstance(error, SpesError) else 1
    except KeyboardInterrupt:
        return 130
    _describe(header)
    print(folder)
    return 0


def _folder(key: str, cache: Path | None) -> Path:
    return (cache or default_cache()).absolute() / key


def _is_sound(folder: Path) -> bool:
    try:
        shards.read_header(folder)
    except DataError:
        return False
    return True


@contextmanager
def _locked(path: Path, tell: Progress) -> Iterator[None]:
    """Hold the lock file; the system releases it however the process ends. The file stays: removing it would race."""
    with path.open("w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            tell("waiting for another process that tokenizes the same corpus")
            fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _publish(part: Path, folder: Path) -> None:
    """Give a complete folder its final name, after its bytes are on the disk."""
    for path in [*part.iterdir(), part]:
        descriptor = os.open(path, os.O_RDONLY)
        os.fsync(descriptor)
        os.close(descriptor)
    if folder.exists():  # torn, or of another format: `prepare` found it unsound
        shutil.rmtree(folder)
    part.rename(folder)


def _named_source(text: str) -> tuple[str, str]:
    name, equals, source = text.partition("=")
    if not (name and equals and source):
        raise argparse.ArgumentTypeError(f'"{text}" must be NAME=SOURCE, such as wiki=texts/wiki.jsonl.gz')
    return name, source


def _require_valid(config: DataConfig) -> None:
    """Raises ConfigError for settings of the data that no run could have."""
    run = RunConfig(data=config, model=ModelConfig(vocab_size=max(1, config.tokenizer_vocab_size)))
    if problems := [problem for problem in check(run) if problem.path.startswith("data.")]:
        raise ConfigError(problems)


def _describe(header: shards.ShardHeader) -> None:
    """Say on standard error what there is, and what was left out."""
    for name, split in (("train", header.train), ("validation", header.validation)):
        print(
            f"{name}: {split.documents} documents, {megabytes(split.bytes)}, {split.tokens} tokens",
            file=sys.stderr,
        )
    if header.vocab_size < header.vocab_size_asked:
        print(
            f"note: the text gives a vocabulary of {header.vocab_size}, not the {header.vocab_size_asked} asked for",
            file=sys.stderr,
        )
    for reason, count in header.skipped.items():
        print(f"left out: {count} {reason} ({', '.join(header.skipped_first[reason])})", file=sys.stderr)


if __name__ == "__main__":
    sys.exit(main())
