"""The command `python -m spes_core.data.tokenize`: sources in, a folder of memory-mapped token ids out."""

from __future__ import annotations

import argparse
import os
import sys
from dataclasses import replace
from pathlib import Path

from spes_core.config import DataConfig, DomainConfig, ModelConfig, RunConfig
from spes_core.data import shards, tokenize
from spes_core.data.preparation import MADE_HERE, Preparation
from spes_core.data.progress import megabytes, terminal_line
from spes_core.errors import ConfigError, Problem, SpesError
from spes_core.rules import check

_THREADS = "RAYON_NUM_THREADS"
"""How the tokenizers library is told its number of threads: before it is loaded, and by no other way."""


def run(arguments: list[str] | None = None) -> int:
    """Print the folder as the last line; exit code 0 when it is there, 2 for bad input, 130 interrupted, else 1."""
    options = _parser().parse_args(arguments)
    try:
        asked = _asked(options)
        if options.workers is not None:
            os.environ[_THREADS] = str(options.workers)
        folder = tokenize.prepare_at(asked, options.out, options.cache, terminal_line() or (lambda message: None))
        header = shards.verify(folder) if options.verify else shards.read_header(folder)
    except (SpesError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2 if isinstance(error, SpesError) else 1
    except KeyboardInterrupt:
        print("interrupted; the same command continues", file=sys.stderr)
        return 130
    _describe(header)
    print(folder)
    return 0


def _parser() -> argparse.ArgumentParser:
    usual = DataConfig()
    parser = argparse.ArgumentParser(
        prog="python -m spes_core.data.tokenize",
        description="Tokenize corpora once. A call that was killed goes on where it was; the last line is the folder.",
    )
    parser.add_argument(
        "sources",
        nargs="*",
        metavar="SOURCE",
        help='"stdlib", hf:NAME[:CONFIG[:SPLIT]], or a file, folder or pattern of .txt, .jsonl, .jsonl.gz, .jsonl.zst,'
        f" .parquet or code (default: {usual.corpus})",
    )
    parser.add_argument("--corpus", action="append", default=[], metavar="SOURCE", help="the same as SOURCE")
    parser.add_argument(
        "--domain",
        action="append",
        default=[],
        type=_named_source,
        metavar="NAME=SOURCE",
        help="a source of one domain of a mixture; give it once for each, instead of SOURCE",
    )
    parser.add_argument(
        "--tokenizer",
        default=usual.tokenizer,
        metavar="T",
        help="bpe (trained on the corpus), bytes, or a folder with a Hugging Face tokenizer (default: %(default)s)",
    )
    parser.add_argument("--vocab-size", type=int, default=None, help=f"default: {usual.tokenizer_vocab_size}")
    parser.add_argument("--validation-fraction", type=float, default=usual.validation_fraction, metavar="F")
    parser.add_argument("--text-field", default=usual.text_field, metavar="NAME", help="field of a row with its text")
    parser.add_argument("--max-repetition", type=float, default=None, metavar="F", help="see data.max_repetition")
    parser.add_argument("--out", type=Path, default=None, metavar="DIR", help="folder to make (default: in a cache)")
    parser.add_argument("--cache", type=Path, default=None, help="folder of tokenized corpora (default: the user's)")
    parser.add_argument("--workers", type=int, default=None, metavar="N", help="threads that encode (default: all)")
    parser.add_argument("--verify", action="store_true", help="also hash every file of the folder")
    return parser


def _asked(options: argparse.Namespace) -> Preparation:
    """What the options ask for. Raises ConfigError with every rule that they break."""
    sources, problems = [*options.sources, *options.corpus], []
    if sources and options.domain:
        problems.append(Problem("--domain", "must not be given beside other sources; name a domain for each source"))
    if options.workers is not None and options.workers < 1:
        problems.append(Problem("--workers", f"({options.workers}) must be at least 1"))
    vocab_size = options.vocab_size
    if vocab_size is None:  # of a given tokenizer any
        vocab_size = DataConfig.tokenizer_vocab_size if options.tokenizer in MADE_HERE else 1 << 31
    by_name: dict[str, list[str]] = {}
    for name, source in options.domain:
        by_name.setdefault(name, []).append(source)
    config = DataConfig(
        corpus=(sources or [DataConfig.corpus])[0],
        domains={name: DomainConfig(corpus=found[0]) for name, found in by_name.items()},
        tokenizer=options.tokenizer,
        validation_fraction=options.validation_fraction,
        text_field=options.text_field,
        max_repetition=options.max_repetition,
        tokenizer_vocab_size=vocab_size,
    )
    run = RunConfig(data=config, model=ModelConfig(vocab_size=max(1, config.tokenizer_vocab_size)))
    if problems := [*problems, *(problem for problem in check(run) if problem.path.startswith("data."))]:
        raise ConfigError(problems)
    asked = Preparation.of(config)
    given = list(by_name.values()) or [sources or [DataConfig.corpus]]
    domains = [replace(domain, sources=tuple(all)) for domain, all in zip(asked.domains, given, strict=True)]
    return replace(asked, domains=tuple(domains))


def _named_source(text: str) -> tuple[str, str]:
    name, equals, source = text.partition("=")
    if not (name and equals and source):
        raise argparse.ArgumentTypeError(f'"{text}" must be NAME=SOURCE, such as wiki=texts/wiki.jsonl.gz')
    return name, source


def _describe(header: shards.ShardHeader) -> None:
    """Say on standard error what there is, and what was left out."""
    for name, split in (("train", header.train), ("validation", header.validation)):
        print(f"{name}: {split.documents} documents, {megabytes(split.bytes)}, {split.tokens} tokens", file=sys.stderr)
    for name, domain in header.domains.items():
        print(f"  {name}: {domain.train.tokens} + {domain.validation.tokens} tokens", file=sys.stderr)
    if header.tokenizer == "bpe" and header.vocab_size < header.vocab_size_asked:
        print(
            f"note: the text gives a vocabulary of {header.vocab_size}, not the {header.vocab_size_asked} asked for",
            file=sys.stderr,
        )
    if header.repeated_documents:
        print(f"note: {header.repeated_documents} documents have the text of an earlier one", file=sys.stderr)
    for reason, count in header.skipped.items():
        print(f"left out: {count} {reason} ({', '.join(header.skipped_first[reason])})", file=sys.stderr)
