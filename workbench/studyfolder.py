"""Finding the results of a study that someone names: by its folder, its name, or its YAML file."""

from __future__ import annotations

from pathlib import Path

import yaml

from workbench.durable import read_mapping
from workbench.errors import StudyError


def find_study(given: str, results: Path) -> Path:
    """The folder of results that has the study.json of the study called ``given``. Raises StudyError."""
    candidates = [Path(given), results / given]
    if given.endswith((".yaml", ".yml")):
        candidates = [results / _name_in(Path(given))]
    for folder in candidates:
        if read_mapping(folder / "study.json"):
            return folder
    torn = [folder for folder in candidates if (folder / "study.json").exists()]
    if torn:
        raise StudyError([f"{torn[0] / 'study.json'} is no readable JSON; run the study again, which writes it anew"])
    known = sorted(path.parent.name for path in results.glob("*/study.json"))
    hint = (
        f"; studies in {results}: {', '.join(known)}"
        if known
        else f"; {results} holds none; say where with --results DIR"
    )
    raise StudyError([f"{given}: no results of such a study, looked in {' and '.join(map(str, candidates))}{hint}"])


def _name_in(path: Path) -> str:
    try:
        content = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, yaml.YAMLError) as error:
        raise StudyError([f"{path} cannot be read: {str(error).splitlines()[0]}"]) from error
    name = content.get("name") if isinstance(content, dict) else None
    if not isinstance(name, str):
        raise StudyError([f"{path} is no study: it has no name"])
    return name
