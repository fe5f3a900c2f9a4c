"""Corpora: what `data.corpus` names, as a stream of documents in an order that no machine changes.

"stdlib" is the running interpreter's standard library, one document a module; "stdlib:json,xml*" is the part of it in
top-level packages, or modules ("stdlib:*.py"), that match one of the patterns. Any other corpus is a file, a folder, a
pattern such as "texts/wiki-*.jsonl.gz", or a Hugging Face dataset ("hf:NAME[:CONFIG[:SPLIT]]", see `hub`):

- rows: ``.jsonl``, ``.jsonl.gz``, ``.jsonl.zst``, ``.parquet``: the text in one field, optionally a name in "id";
- text or code (``.txt``, ``.txt.gz``, ``.md``, ``.py``, ...): one document a file; a file that is given alone is cut
  at blank lines into documents of about `PIECE_BYTES` bytes, because one document cannot be split into train and
  validation.

What cannot be used is counted by reason and named; hidden files and caches in a folder are not part of a corpus.
"""

from __future__ import annotations

import difflib
import fnmatch
import hashlib
import os
import platform
import sysconfig
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from stat import S_ISREG

from spes_core.data import hub
from spes_core.data.documents import ROW_SUFFIXES, TEXT_SUFFIXES, Document, Reading, Skipped
from spes_core.data.progress import Progress
from spes_core.errors import DataError

STDLIB = "stdlib"
_FORMATS = (
    "a .txt, .jsonl, .jsonl.gz, .jsonl.zst or .parquet file, a folder of them or of code, or hf:NAME[:CONFIG[:SPLIT]]"
)
_SKIPPED_FOLDERS = {"__pycache__", "node_modules", "site-packages", "dist-packages"}
_TEST_FOLDERS = {"test", "tests", "idle_test"}


@dataclass(frozen=True)
class Corpus:
    """A corpus that exists: where it is, and the files that it consists of, in order."""

    name: str
    """As it was given."""
    root: Path
    """Folder that file names are relative to."""
    files: tuple[str, ...]
    """POSIX paths relative to root, in code-point order."""
    alone: bool
    """Whether the corpus is one file."""
    setting: str = "data.corpus"
    """Path of the setting that names it."""
    dataset: hub.Dataset | None = None
    """A Hugging Face dataset that has not been fetched; ``files`` are those of a local one."""

    @property
    def is_stdlib(self) -> bool:
        """Whether it is the standard library, or a part of it."""
        return _is_stdlib(self.name)

    def identity(self) -> str:
        """SHA-256 (hex) by which a cached copy is found again, without reading any text.

        The standard library: interpreter version, file names, sizes. Elsewhere: absolute path, names, sizes and
        modification times, as `make` and `git` do. A dataset of the hub: its name.
        """
        digest = hashlib.sha256()
        place = platform.python_version() if self.is_stdlib else str(self.root.resolve())
        if self.dataset is not None:
            place = f"{self.dataset.identity} {place if self.files else ''}"
        digest.update(f"{self.is_stdlib} {self.alone} {place}\n".encode("utf-8", "surrogateescape"))
        for name in self.files:
            status = _status(self.root / name)
            time_ns = 0 if status is None or self.is_stdlib else status.st_mtime_ns
            size = -1 if status is None else status.st_size
            digest.update(f"{name} {size} {time_ns}\n".encode("utf-8", "surrogateescape"))
        return digest.hexdigest()

    def documents(self, skipped: Skipped, text_field: str = "text") -> Iterator[Document]:
        """Every usable document, in order; what is not usable goes to ``skipped``.

        Raises DataError for a damaged compressed file: how much is lost is unknown.
        """
        for name in self.files:
            status = _status(self.root / name)
            if status is None or not S_ISREG(status.st_mode):
                skipped.add("not a readable file", name)
                continue
            try:
                yield from Reading(self.root / name, name, text_field, skipped).documents(cut_text=self.alone)
            except OSError as error:
                if self.alone:
                    raise DataError(f'{self.setting} ("{self.name}") cannot be read: {error}') from error
                skipped.add("not a readable file", name)

    def fetched(self, folder: Path, prefix: str, text_field: str, tell: Progress) -> Corpus:
        """This corpus on this machine: a Hugging Face dataset is copied once into a file in ``folder``.

        Raises DataError when it cannot be had.
        """
        if self.dataset is None:
            return self
        file = folder / f"{prefix}{hashlib.sha256(self.name.encode()).hexdigest()[:8]}.jsonl.zst"
        if not file.exists():
            hub.fetch(self.dataset, file, text_field, f'{self.setting} ("{self.name}")', tell)
        return replace(self, root=folder, files=(file.name,), alone=True, dataset=None)


def find(corpus: str, setting: str = "data.corpus") -> Corpus:
    """The corpus that ``setting`` names. Raises DataError when there is none or it has no file."""
    if _is_stdlib(corpus):
        return _find_stdlib(corpus, setting)
    if corpus.startswith(hub.PREFIX):
        return _find_dataset(corpus, setting)
    path, shown = Path(corpus).expanduser(), f'{setting} ("{corpus}")'
    if not path.exists() and (set(corpus) & set("*?[")):
        return _find_matching(corpus, setting)
    if not path.exists():
        hint = '; did you mean "stdlib"?' if difflib.get_close_matches(corpus, [STDLIB]) else ""
        raise DataError(f"{shown} does not exist{hint or f'; give {STDLIB}, or {_FORMATS}'}")
    if not os.access(path, os.R_OK):
        raise DataError(f"{shown} cannot be read; change its permissions or give another corpus")
    if path.is_dir():
        files = tuple(sorted(_walk(path, _SKIPPED_FOLDERS)))
        if not files:
            raise DataError(f"{shown} is an empty folder; give {STDLIB}, or {_FORMATS}")
        return Corpus(corpus, path, files, alone=False, setting=setting)
    if not path.name.lower().endswith(ROW_SUFFIXES + TEXT_SUFFIXES) or not path.is_file():
        raise DataError(f"{shown} is of a type that is not read; give {STDLIB}, or {_FORMATS}")
    return Corpus(corpus, path.parent, (path.name,), alone=True, setting=setting)


def _is_stdlib(corpus: str) -> bool:
    return corpus == STDLIB or corpus.startswith(f"{STDLIB}:")


def _find_stdlib(corpus: str, setting: str) -> Corpus:
    root = Path(sysconfig.get_paths()["stdlib"])
    files = tuple(sorted(name for name in _walk(root, _SKIPPED_FOLDERS | _TEST_FOLDERS) if _is_library_module(name)))
    if not files:
        raise DataError(
            f'{setting} ("{corpus}"): this interpreter has no standard library sources in {root}; give {_FORMATS}'
        )
    _, colon, patterns = corpus.partition(":")
    return Corpus(corpus, root, _part(files, patterns, corpus, setting) if colon else files, False, setting)


def _part(files: Sequence[str], patterns: str, corpus: str, setting: str) -> tuple[str, ...]:
    """The files whose first name, a package or module, matches one of the patterns. Raises DataError."""
    names, chosen = {name.split("/")[0] for name in files}, set[str]()
    for pattern in patterns.split(","):
        if not (found := fnmatch.filter(names, pattern.strip())):
            raise DataError(
                f'{setting} ("{corpus}"): no package or module of the standard library matches "{pattern.strip()}";'
                f' give their names or patterns, such as "{STDLIB}:json,xml*" or "{STDLIB}:*.py"'
            )
        chosen.update(found)
    return tuple(name for name in files if name.split("/")[0] in chosen)


def _find_dataset(corpus: str, setting: str) -> Corpus:
    dataset = hub.parse(corpus, setting)
    root = Path(dataset.name).expanduser()
    files = tuple(sorted(_walk(root, set()))) if root.is_dir() else ()
    return Corpus(corpus, root, files, alone=False, setting=setting, dataset=dataset)


def _find_matching(pattern: str, setting: str) -> Corpus:
    """The files that match a pattern such as "texts/wiki.*.jsonl.gz", below the folder before its first wildcard."""
    parts = Path(pattern).expanduser().parts
    wild = next(index for index, part in enumerate(parts) if set(part) & set("*?["))
    root = Path(*parts[:wild])
    matches = [path for path in root.glob("/".join(parts[wild:])) if path.is_file() and not path.name.startswith(".")]
    if not matches:
        raise DataError(f'{setting} ("{pattern}") matches no file; give {STDLIB}, or {_FORMATS}')
    files = tuple(sorted(path.relative_to(root).as_posix() for path in matches))
    return Corpus(pattern, root, files, alone=False, setting=setting)


def is_held_out(name: str, validation_fraction: float) -> bool:
    """Whether the document called ``name`` is in the validation split: its name's hash falls below the fraction."""
    value = int.from_bytes(hashlib.sha256(name.encode("utf-8", "surrogateescape")).digest()[:8], "big")
    return value < validation_fraction * 2**64


def _walk(root: Path, skipped_folders: set[str]) -> Iterator[str]:
    """POSIX paths, relative to root, of the files below it; hidden ones and skipped folders are left out."""
    for folder, folders, names in os.walk(root):
        folders[:] = [name for name in folders if name not in skipped_folders and not name.startswith(".")]
        relative = Path(folder).relative_to(root)
        yield from ((relative / name).as_posix() for name in names if not name.startswith("."))


def _is_library_module(name: str) -> bool:
    """Whether a file is library source; what the build generates (`_sysconfigdata*`, `config-*`) differs by machine."""
    return name.endswith(".py") and not name.startswith(("_sysconfigdata", "config-"))


def _status(path: Path) -> os.stat_result | None:
    try:
        return path.stat()
    except OSError:
        return None
