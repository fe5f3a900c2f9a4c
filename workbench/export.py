"""One archive of a study that another person can unpack and verify.

It holds study.json; of each trial run.json, trial.json, outcome.json, result.json, evaluation.json, events and logs
(final weights where asked for); the report; and manifest.json with the SHA-256 of each file. Tokens, checkpoints and
addresses stay here. The same files give the same bytes: names are sorted, and times and owners left out.
"""

from __future__ import annotations

import gzip
import io
import json
import os
import tarfile
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO

from workbench.durable import read_mapping
from workbench.errors import StudyError
from workbench.integrity import MANIFEST, file_sha256

_TRIAL = (
    "run.json",
    "trial.json",
    "outcome.json",
    "result.json",
    "evaluation.json",
    "events/*.jsonl",
    "logs/*.log",
    "provenance/**/*",
)
_WEIGHTS = "weights/*.safetensors"
_STUDY = ("study.json", "search/*.json", "provenance/**/*")


def export(study_dir: Path, report_dir: Path | None, out: Path, *, weights: bool = False) -> str:
    """Write the archive ``out`` (.tar.gz); returns its SHA-256.

    Raises StudyError when ``out`` exists, or the study has no finished trial.
    """
    if out.suffixes[-2:] != [".tar", ".gz"] and out.suffix != ".tgz":
        raise StudyError([f"--out ({out}) must end in .tar.gz or .tgz: that is what is written"])
    if out.exists():
        raise StudyError([f"--out ({out}) exists and is not overwritten; name another file, or remove it"])
    if not out.absolute().parent.is_dir():
        raise StudyError([f"--out ({out}) lies in no folder; make {out.parent} first"])
    files = dict(_files(study_dir, report_dir, weights))
    if not any(name.endswith("/result.json") for name in files):
        raise StudyError([f"{study_dir} has no finished trial to export; run the study first"])
    draft = out.with_name(f".{out.name}.{os.getpid()}")
    try:
        with draft.open("xb") as file:
            _write(file, read_mapping(study_dir / "study.json").get("name") or study_dir.name, files)
        os.link(draft, out)  # unlike a rename, this never replaces a file that has come in the meantime
    except FileExistsError as error:
        raise StudyError([f"--out ({out}) exists and is not overwritten; name another file"]) from error
    finally:
        draft.unlink(missing_ok=True)
    return file_sha256(out)


def _files(study_dir: Path, report_dir: Path | None, weights: bool) -> Iterator[tuple[str, Path]]:
    """Name in the archive and place of every file, in the order of names within each part."""
    yield from _matching(study_dir, _STUDY, "")
    for result in sorted(study_dir.glob("trials/*/result.json")):
        trial_dir = result.parent
        patterns = (*_TRIAL, _WEIGHTS) if weights else _TRIAL
        yield from _matching(trial_dir, patterns, f"trials/{trial_dir.name}/")
    if report_dir is not None:
        yield from _matching(report_dir, ("**/*",), "report/")


def _matching(folder: Path, patterns: tuple[str, ...], prefix: str) -> Iterator[tuple[str, Path]]:
    for pattern in patterns:
        for path in sorted(folder.glob(pattern)):
            if path.is_file() and not path.name.startswith("."):
                yield prefix + path.relative_to(folder).as_posix(), path


def _write(file: BinaryIO, study: str, files: dict[str, Path]) -> None:
    digests = {name: file_sha256(path) for name, path in files.items()}
    manifest = json.dumps({"schema": 1, "files": digests}, indent=1, ensure_ascii=False) + "\n"
    with (
        gzip.GzipFile(filename="", mode="wb", fileobj=file, mtime=0, compresslevel=6) as packed,
        tarfile.open(fileobj=packed, mode="w", format=tarfile.PAX_FORMAT) as archive,
    ):
        content = manifest.encode()
        archive.addfile(_member(f"{study}/{MANIFEST}", len(content)), io.BytesIO(content))
        for name, path in files.items():
            with path.open("rb") as source:
                archive.addfile(_member(f"{study}/{name}", path.stat().st_size), source)


def _member(name: str, size_bytes: int) -> tarfile.TarInfo:
    """A plain file without time or owner."""
    member = tarfile.TarInfo(name)
    member.size, member.mode, member.mtime = size_bytes, 0o644, 0
    return member
