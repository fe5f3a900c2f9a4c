"""Tokenized corpora on disk, made once: `prepare`, or `python -m spes_core.data.tokenize SOURCE ...`.

A folder appears under its final name by one rename when it is complete, so a process that is killed leaves nothing
that could be mistaken for one. What it left is gone on from.
"""

from __future__ import annotations

import fcntl
import os
import shutil
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from glob import escape
from pathlib import Path

from spes_core.config import DataConfig
from spes_core.data import shards
from spes_core.data.preparation import FoundCorpora, Preparation
from spes_core.data.progress import Progress
from spes_core.errors import DataError


def prepare(config: DataConfig, cache: Path | None = None, progress: Progress | None = None) -> Path:
    """The folder of ``config``'s corpus or domains in token ids, made in ``cache`` unless a sound one is there.

    Depends on what `Preparation` holds. Several processes may call this at once: one works, the others wait for it.
    ``progress`` gets a line of text now and then. Raises DataError when the corpus cannot be used.
    """
    found = Preparation.of(config).find()
    return write_once(_cached(found, cache), found, progress or (lambda message: None))


def find_prepared(config: DataConfig, cache: Path | None = None) -> Path | None:
    """The folder that `prepare` would return without any work; None when there is none. Raises DataError as it does."""
    folder = _cached(Preparation.of(config).find(), cache)
    return folder if _is_sound(folder) else None


def prepare_at(asked: Preparation, place: Path | None, cache: Path | None, tell: Progress) -> Path:
    """What is asked in a folder of one's own (None: in the cache), made unless it is there.

    Raises DataError when the corpus cannot be used, or the place holds something else.
    """
    found = asked.find()
    folder = _cached(found, cache) if place is None else place.absolute()
    if place is not None and not str(place).isprintable():
        raise DataError(f"--out {str(place)!r} must be a name of printable characters in UTF-8; name another folder")
    try:
        taken = folder.exists() and any(folder.iterdir() if folder.is_dir() else [folder])
    except OSError as error:
        raise DataError(f"the folder {folder} cannot be read ({error}); name another with --cache or --out") from error
    if place is not None and taken:
        known = shards.read_header(folder).preparation_key if _is_sound(folder) else None
        if known != found.key:
            raise DataError(f"--out {place} holds something else; name another folder, or remove it")
    return write_once(folder, found, tell)


def default_cache() -> Path:
    """$XDG_CACHE_HOME/spes-workbench, or ~/.cache/spes-workbench."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "spes-workbench"


def write_once(folder: Path, found: FoundCorpora, tell: Progress) -> Path:
    """Write the folder unless it is there, waiting for another process that does. Raises DataError."""
    if _is_sound(folder):
        return folder
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        with _locked(folder.with_name(f"{folder.name}.lock"), tell):
            if not _is_sound(folder):
                _write(folder, found, tell)
    except OSError as error:
        raise DataError(
            f"the folder {folder} cannot be written ({error}); free space there, or name another with --cache or --out"
        ) from error
    return folder


def _write(folder: Path, found: FoundCorpora, tell: Progress) -> None:
    """The same for the holder of the lock: what fails leaves nothing, what is killed is gone on from."""
    from spes_core.data.encode import write_folder  # numpy: not needed to find what is there

    part = folder.with_name(f"{folder.name}.{found.key}.part")
    for left in folder.parent.glob(f"{escape(folder.name)}.*.part"):
        if left != part:  # of other text or settings, which must not be gone on from
            shutil.rmtree(left)
    part.mkdir(exist_ok=True)  # or what a killed process left: nobody else holds the lock
    try:
        write_folder(part, found, tell)
        _require_unchanged(found)
        _publish(part, folder)
    except Exception:
        shutil.rmtree(part, ignore_errors=True)
        raise


def main(arguments: list[str] | None = None) -> int:
    """The command; its exit status."""
    from spes_core.data.tokenize_command import run

    return run(arguments)


def _require_unchanged(found: FoundCorpora) -> None:
    if found.preparation.find() != found:
        raise DataError(f'the corpus ("{found.preparation.name}") changed while it was being read; prepare it again')


def _cached(found: FoundCorpora, cache: Path | None) -> Path:
    return (cache or default_cache()).absolute() / found.key


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
    if folder.exists():  # torn, of another format, or empty: nothing that could be used
        shutil.rmtree(folder)
    part.rename(folder)


if __name__ == "__main__":
    sys.exit(main())
