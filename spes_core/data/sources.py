"""Corpora: what `data.corpus` names, as a stream of documents in an order that no machine changes.

"stdlib" is the running interpreter's standard library, one document a module; "stdlib:json,xml*" is the part of it in
top-level packages, or modules ("stdlib:*.py"), that match one of the patterns. Any other corpus is a file or a folder:

- ``.jsonl``, ``.jsonl.gz``: one JSON object a line, its text in the field "text", optionally a name in "id";
- text or code (``.txt``, ``.txt.gz``, ``.md``, ``.py``, ...): one document a file; a file that is given alone is cut
  at blank lines into documents of about `PIECE_BYTES` bytes, because one document cannot be split into train and
  validation.

What cannot be used is counted by reason and named; hidden files and caches in a folder are not part of a corpus.
"""

from __future__ import annotations

import difflib
import fnmatch
import gzip
import hashlib
import json
import os
import platform
import sysconfig
import zlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from stat import S_ISREG
from typing import IO

from spes_core.errors import DataError

STDLIB = "stdlib"
PIECE_BYTES = 8_000
ROW_SUFFIXES = (".jsonl", ".jsonl.gz")
TEXT_SUFFIXES = (
    *(".txt", ".txt.gz", ".md", ".rst", ".tex", ".html", ".css", ".yaml", ".yml", ".toml", ".ini", ".cfg"),
    *(
        ".py",
        ".pyi",
        ".c",
        ".h",
        ".cc",
        ".cpp",
        ".hpp",
        ".cu",
        ".cs",
        ".java",
        ".js",
        ".ts",
        ".go",
        ".rs",
        ".rb",
    ),
    *(
        ".php",
        ".sh",
        ".sql",
        ".r",
        ".jl",
        ".scala",
        ".kt",
        ".swift",
        ".lua",
        ".pl",
        ".hs",
        ".ml",
        ".clj",
        ".f90",
    ),
)
_FORMATS = "a .txt, .jsonl or .jsonl.gz file or a folder of them or of code"
_SKIPPED_FOLDERS = {"__pycache__", "node_modules", "site-packages", "dist-packages"}
_TEST_FOLDERS = {"test", "tests", "idle_test"}
_FIRST = 5


@dataclass(frozen=True)
class Document:
    """One text of a corpus; the name is relative to the corpus and decides its split."""

    name: str
    text: str


@dataclass
class Skipped:
    """What was left out of a corpus, by reason: how many, and where the first few are."""

    counts: dict[str, int] = field(default_factory=dict)
    first: dict[str, list[str]] = field(default_factory=dict)
    prefix: str = ""
    """Stands before every place."""

    def within(self, prefix: str) -> Skipped:
        """The same lists, with more before every place."""
        return Skipped(self.counts, self.first, self.prefix + prefix)

    def add(self, reason: str, where: str) -> None:
        """Count one row, document or file at ``where`` ("file" or "file:line")."""
        self.counts[reason] = self.counts.get(reason, 0) + 1
        named = self.first.setdefault(reason, [])
        if len(named) < _FIRST:
            named.append(self.prefix + where)

    def __str__(self) -> str:
        return "; ".join(
            f"{count} {reason} ({', '.join(self.first[reason])}{', ...' if count > len(self.first[reason]) else ''})"
            for reason, count in self.counts.items()
        )


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

    @property
    def is_stdlib(self) -> bool:
        """Whether it is the standard library, or a part of it."""
        return _is_stdlib(self.name)

    def identity(self) -> str:
        """SHA-256 (hex) by which a cached copy is found again, without reading any text.

        The standard library: interpreter version, file names, sizes. Elsewhere: absolute path, names, sizes and
        modification times, as `make` and `git` do.
        """
        digest = hashlib.sha256()
        place = platform.python_version() if self.is_stdlib else str(self.root.resolve())
        digest.update(f"{self.is_stdlib} {self.alone} {place}\n".encode("utf-8", "surrogateescape"))
        for name in self.files:
            status = _status(self.root / name)
            time_ns = 0 if status is None or self.is_stdlib else status.st_mtime_ns
            size = -1 if status is None else status.st_size
            digest.update(f"{name} {size} {time_ns}\n".encode("utf-8", "surrogateescape"))
        return digest.hexdigest()

    def documents(self, skipped: Skipped) -> Iterator[Document]:
        """Every usable document, in order; what is not usable goes to ``skipped``.

        Raises DataError for a damaged compressed file: how much is lost is unknown.
        """
        for name in self.files:
            path = self.root / name
            status = _status(path)
            if status is None or not S_ISREG(status.st_mode):
                skipped.add("not a readable file", name)
                continue
            try:
                yield from self._read(path, name, skipped)
            except (EOFError, gzip.BadGzipFile, zlib.error) as error:
                raise DataError(f"{path} is damaged ({error}); fetch or compress it again") from error
            except OSError as error:
                if self.alone:
                    raise DataError(f'{self.setting} ("{self.name}") cannot be read: {error}') from error
                skipped.add("not a readable file", name)

    def _read(self, path: Path, name: str, skipped: Skipped) -> Iterator[Document]:
        lower = name.lower()
        if lower.endswith(ROW_SUFFIXES):
            return _rows(path, name, skipped)
        if lower.endswith(TEXT_SUFFIXES):
            return _pieces(path, name, skipped) if self.alone else _whole(path, name, skipped)
        skipped.add("of a file type that is not read", name)
        return iter(())


def find(corpus: str, setting: str = "data.corpus") -> Corpus:
    """The corpus that ``setting`` names. Raises DataError when there is none or it has no file."""
    if _is_stdlib(corpus):
        return _find_stdlib(corpus, setting)
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


def _open(path: Path) -> IO[bytes] | gzip.GzipFile:
    if path.suffix.lower() == ".gz":
        return gzip.open(path, "rb")
    return path.open("rb")


def _whole(path: Path, name: str, skipped: Skipped) -> Iterator[Document]:
    """The one document of a text file."""
    with _open(path) as file:
        content = file.read().removeprefix(b"\xef\xbb\xbf")
    if b"\0" in content:
        skipped.add("with binary content", name)
    elif (text := _decoded(content, name, skipped)) is not None:
        yield from _unless_empty(text, name, name, skipped)


def _pieces(path: Path, name: str, skipped: Skipped) -> Iterator[Document]:
    """A text file cut at the first blank line after PIECE_BYTES, or at any line's end after four times as many."""
    with _open(path) as file:
        lines: list[bytes] = []
        size = start = index = 0
        for number, line in enumerate(file):
            content = line.removeprefix(b"\xef\xbb\xbf") if number == 0 else line
            lines.append(content)
            size += len(content)
            if size >= 4 * PIECE_BYTES or (size >= PIECE_BYTES and not content.strip()):
                yield from _piece(lines, name, index, start, skipped)
                lines, size, start, index = [], 0, number + 1, index + 1
        if lines:
            yield from _piece(lines, name, index, start, skipped)


def _piece(lines: list[bytes], name: str, index: int, start: int, skipped: Skipped) -> Iterator[Document]:
    where = f"{name}:{start + 1}"
    if (text := _decoded(b"".join(lines), where, skipped)) is not None:
        yield from _unless_empty(text, f"{name}#{index}", where, skipped)


def _rows(path: Path, name: str, skipped: Skipped) -> Iterator[Document]:
    """The documents of a JSON-lines file."""
    with _open(path) as file:
        for number, line in enumerate(file, start=1):
            content = line.removeprefix(b"\xef\xbb\xbf") if number == 1 else line
            where = f"{name}:{number}"
            if not content.strip():
                skipped.add("empty lines", where)
            elif (text := _decoded(content, where, skipped)) is not None:
                yield from _row(text, name, number, skipped)


def _row(line: str, name: str, number: int, skipped: Skipped) -> Iterator[Document]:
    where = f"{name}:{number}"
    try:
        row = json.loads(line)
    except (ValueError, RecursionError):
        skipped.add("not valid JSON", where)
        return
    if not isinstance(row, dict):
        skipped.add("not a JSON object", where)
    elif "text" not in row:
        skipped.add('without the field "text"', where)
    elif not isinstance(row["text"], str):
        skipped.add('with a field "text" that is not text', where)
    elif not _is_encodable(row["text"]):
        skipped.add("with half a surrogate pair", where)
    else:
        key = row.get("id")
        known = isinstance(key, str | int) and not isinstance(key, bool) and str(key).isprintable() and key != ""
        yield from _unless_empty(row["text"], f"{name}:{key if known else f'line {number}'}", where, skipped)


def _is_encodable(text: str) -> bool:
    """Whether UTF-8 can hold the text; JSON can escape halves of surrogate pairs, which it cannot."""
    try:
        text.encode("utf-8")
    except UnicodeEncodeError:
        return False
    return True


def _decoded(content: bytes, where: str, skipped: Skipped) -> str | None:
    try:
        return content.decode("utf-8")
    except UnicodeDecodeError:
        skipped.add("not UTF-8", where)
        return None


def _unless_empty(text: str, name: str, where: str, skipped: Skipped) -> Iterator[Document]:
    if text.strip():
        yield Document(name, text)
    else:
        skipped.add("without text", where)
