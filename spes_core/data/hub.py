"""Hugging Face datasets as corpora: "hf:NAME[:CONFIG[:SPLIT]]" is streamed once into a compressed file of rows."""

from __future__ import annotations

import io
import json
import logging
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

from spes_core.data.progress import Progress
from spes_core.errors import DataError

PREFIX = "hf:"
ATTEMPTS = 5
"""Failures in a row, without a row between them, that end a fetch."""
ATTEMPTS_AT_FIRST = 2
"""The same before the first row: the library below has then tried for half a minute each time."""
_FIRST_WAIT_S = 1.0
_TOLD_EVERY_ROWS = 10_000


@dataclass(frozen=True, kw_only=True)
class Dataset:
    """What is asked of the hub, or of a local folder that the datasets library reads."""

    name: str
    config: str | None
    split: str

    @property
    def identity(self) -> str:
        """By which a prepared copy is found again."""
        return json.dumps([self.name, self.config, self.split])


def parse(source: str, setting: str) -> Dataset:
    """The dataset that "hf:NAME[:CONFIG[:SPLIT]]" names; split "train" unless given. Raises DataError."""
    name, *rest = source.removeprefix(PREFIX).split(":")
    if not name or len(rest) > 2:
        raise DataError(f'{setting} ("{source}") must be hf:NAME, hf:NAME:CONFIG or hf:NAME:CONFIG:SPLIT')
    config, split = (*rest, "", "")[:2]
    return Dataset(name=name, config=config or None, split=split or "train")


def fetch(
    dataset: Dataset,
    path: Path,
    text_field: str,
    shown: str,
    tell: Progress,
    pause: Callable[[float], None] = time.sleep,
) -> None:
    """Write the text and "id" of every row to ``path`` (.jsonl.zst), which appears when it is whole.

    A connection that fails is tried again from the row where it broke. Raises DataError beginning with ``shown``.
    """
    tell(f"fetching {dataset.name}")
    partial = path.with_name(f"{path.name}.partial")
    with _compressed(partial) as file:
        written = failures = 0
        while True:
            before = written
            try:
                for row in _rows(dataset, skip=written):
                    file.write(_line(row, text_field))
                    written += 1
                    if written % _TOLD_EVERY_ROWS == 0:
                        tell(f"fetching {dataset.name}: {written} rows")
                break
            except Exception as error:
                # The libraries below raise many types for a connection that failed.
                failures = 1 if written > before else failures + 1
                if failures >= (ATTEMPTS if written else ATTEMPTS_AT_FIRST) or _is_final(error):
                    raise _unusable(shown, failures, error) from error
                tell(f"fetching {dataset.name}: trying again after {type(error).__name__}")
                pause(_FIRST_WAIT_S * 2 ** (failures - 1))
    partial.rename(path)


def _rows(dataset: Dataset, skip: int) -> Iterable[Mapping[str, Any]]:
    """The rows of the split from one on, in the dataset's own order."""
    import datasets

    datasets.disable_progress_bars()
    logging.getLogger("huggingface_hub").setLevel(logging.ERROR)  # its own tries: ours are told
    folder = Path(dataset.name).expanduser()
    if (folder / "dataset_info.json").is_file() or (folder / "dataset_dict.json").is_file():
        saved: Any = datasets.load_from_disk(str(folder))
        rows = saved[dataset.split] if isinstance(saved, datasets.DatasetDict) else saved
    else:
        name = str(folder) if folder.is_dir() else dataset.name
        rows = datasets.load_dataset(name, dataset.config, split=dataset.split, streaming=True)
    return rows.skip(skip) if skip else rows  # type: ignore[no-any-return]


def _line(row: Mapping[str, Any], text_field: str) -> bytes:
    kept = {field: row[field] for field in (text_field, "id") if field in row}
    plain = {field: value if isinstance(value, str | int) else None for field, value in kept.items()}
    return json.dumps(plain).encode() + b"\n"


def _is_final(error: Exception) -> bool:
    """Whether trying again cannot help: the library is missing, or there is no such dataset, config or split."""
    return isinstance(error, ImportError | ValueError | KeyError | FileNotFoundError)


def _unusable(shown: str, failures: int, error: Exception) -> DataError:
    if isinstance(error, ImportError):
        return DataError(f"{shown} needs the package datasets; install spes-workbench[evaluation]")
    reason = " ".join(f"{type(error).__name__}: {error}".split())[:300]
    tries = f" after {failures} attempts" if failures > 1 else ""
    return DataError(
        f"{shown} cannot be fetched{tries} ({reason}); check name, config, split and network, or fetch it elsewhere and"
        " name its files"
    )


@contextmanager
def _compressed(path: Path) -> Iterator[IO[bytes]]:
    import pyarrow

    with (
        pyarrow.OSFile(str(path), "wb") as raw,
        pyarrow.CompressedOutputStream(raw, "zstd") as stream,
        io.BufferedWriter(stream, 1 << 20) as file,
    ):
        yield file
