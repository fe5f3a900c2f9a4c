"""Documents out of one file: rows of JSON lines or parquet, whole texts, or the pieces of a text.

What cannot be used is counted by reason and named by its place.
"""

from __future__ import annotations

import gzip
import io
import json
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any

from spes_core.errors import DataError

PIECE_BYTES = 8_000
LINE_SUFFIXES = (".jsonl", ".jsonl.gz", ".jsonl.zst")
ROW_SUFFIXES = (*LINE_SUFFIXES, ".parquet")
TEXT_SUFFIXES = (
    *(".txt", ".txt.gz", ".md", ".rst", ".tex", ".html", ".css", ".yaml", ".yml", ".toml", ".ini", ".cfg"),
    *(".py", ".pyi", ".c", ".h", ".cc", ".cpp", ".hpp", ".cu", ".cs", ".java", ".js", ".ts", ".go", ".rs", ".rb"),
    *(".php", ".sh", ".sql", ".r", ".jl", ".scala", ".kt", ".swift", ".lua", ".pl", ".hs", ".ml", ".clj", ".f90"),
)
_FIRST = 5
_PARQUET_ROWS = 256


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
class Reading:
    """One file on its way into documents."""

    path: Path
    name: str
    """Of the file, in the names of its documents."""
    text_field: str
    """Field of a row that holds its text."""
    skipped: Skipped

    def documents(self, cut_text: bool) -> Iterator[Document]:
        """Every usable document, in order; a text is one document, or with ``cut_text`` several.

        Raises DataError for a damaged compressed file, because how much is lost is unknown, OSError for one that
        cannot be opened.
        """
        lower = self.name.lower()
        try:
            if lower.endswith(".parquet"):
                yield from self._parquet_rows()
            elif lower.endswith(LINE_SUFFIXES):
                yield from self._rows()
            elif lower.endswith(TEXT_SUFFIXES):
                yield from self._pieces() if cut_text else self._whole()
            else:
                self.skipped.add("of a file type that is not read", self.name)
        except (EOFError, gzip.BadGzipFile, zlib.error) as error:
            raise self._damaged(error) from error
        except OSError as error:
            if error.errno is None:  # not the system's: what is in the file
                raise self._damaged(error) from error
            raise

    def _damaged(self, error: Exception) -> DataError:
        reason = " ".join(str(error).split())
        return DataError(f"{self.path} is damaged ({reason}); fetch or compress it again")

    def _whole(self) -> Iterator[Document]:
        """The one document of a text file."""
        with _opened(self.path) as file:
            content = file.read().removeprefix(b"\xef\xbb\xbf")
        if b"\0" in content:
            self.skipped.add("with binary content", self.name)
        elif (text := self._decoded(content, self.name)) is not None:
            yield from self._unless_empty(text, self.name, self.name)

    def _pieces(self) -> Iterator[Document]:
        """A text file cut at the first blank line after PIECE_BYTES, or at any line's end after four times as many."""
        with _opened(self.path) as file:
            lines: list[bytes] = []
            size = start = index = 0
            for number, line in enumerate(file):
                content = line.removeprefix(b"\xef\xbb\xbf") if number == 0 else line
                lines.append(content)
                size += len(content)
                if size >= 4 * PIECE_BYTES or (size >= PIECE_BYTES and not content.strip()):
                    yield from self._piece(lines, index, start)
                    lines, size, start, index = [], 0, number + 1, index + 1
            if lines:
                yield from self._piece(lines, index, start)

    def _piece(self, lines: list[bytes], index: int, start: int) -> Iterator[Document]:
        where = f"{self.name}:{start + 1}"
        if (text := self._decoded(b"".join(lines), where)) is not None:
            yield from self._unless_empty(text, f"{self.name}#{index}", where)

    def _rows(self) -> Iterator[Document]:
        """The documents of a JSON-lines file."""
        with _opened(self.path) as file:
            for number, line in enumerate(file, start=1):
                content = line.removeprefix(b"\xef\xbb\xbf") if number == 1 else line
                where = f"{self.name}:{number}"
                if not content.strip():
                    self.skipped.add("empty lines", where)
                elif (text := self._decoded(content, where)) is not None:
                    yield from self._json_row(text, number, where)

    def _json_row(self, line: str, number: int, where: str) -> Iterator[Document]:
        try:
            row = json.loads(line)
        except (ValueError, RecursionError):
            self.skipped.add("not valid JSON", where)
            return
        if isinstance(row, dict):
            yield from self._row(row, f"line {number}", where)
        else:
            self.skipped.add("not a JSON object", where)

    def _parquet_rows(self) -> Iterator[Document]:
        """The documents of a parquet file, a few rows at a time."""
        import pyarrow
        import pyarrow.parquet

        number = 0
        try:
            with pyarrow.parquet.ParquetFile(self.path) as file:
                columns = [name for name in (self.text_field, "id") if name in file.schema_arrow.names]
                for batch in file.iter_batches(batch_size=_PARQUET_ROWS, columns=columns):
                    for row in batch.to_pylist() if columns else [{}] * batch.num_rows:
                        number += 1
                        yield from self._row(row, f"row {number}", f"{self.name}:{number}")
        except pyarrow.ArrowException as error:
            raise self._damaged(error) from error

    def _row(self, row: dict[str, Any], place: str, where: str) -> Iterator[Document]:
        """The document of a row, named by its id or else by its place in the file."""
        if self.text_field not in row:
            self.skipped.add(f'without the field "{self.text_field}"', where)
        elif not isinstance(text := row[self.text_field], str):
            self.skipped.add(f'with a field "{self.text_field}" that is not text', where)
        elif not _is_encodable(text):
            self.skipped.add("with half a surrogate pair", where)
        else:
            key = row.get("id")
            known = isinstance(key, str | int) and not isinstance(key, bool) and str(key).isprintable() and key != ""
            yield from self._unless_empty(text, f"{self.name}:{key if known else place}", where)

    def _decoded(self, content: bytes, where: str) -> str | None:
        try:
            return content.decode("utf-8")
        except UnicodeDecodeError:
            self.skipped.add("not UTF-8", where)
            return None

    def _unless_empty(self, text: str, name: str, where: str) -> Iterator[Document]:
        if text.strip():
            yield Document(name, text)
        else:
            self.skipped.add("without text", where)


def _is_encodable(text: str) -> bool:
    """Whether UTF-8 can hold the text; JSON can escape halves of surrogate pairs, which it cannot."""
    try:
        text.encode("utf-8")
    except UnicodeEncodeError:
        return False
    return True


@contextmanager
def _opened(path: Path) -> Iterator[IO[bytes] | gzip.GzipFile]:
    suffix = path.suffix.lower()
    if suffix == ".gz":
        with gzip.open(path, "rb") as file:
            yield file
    elif suffix == ".zst":
        import pyarrow

        with pyarrow.OSFile(str(path)) as raw, pyarrow.CompressedInputStream(raw, "zstd") as stream:
            yield io.BufferedReader(stream, 1 << 20)
    else:
        with path.open("rb") as plain:
            yield plain
