"""The page over all reports of a folder: newest first, with each question and verdict, from their provenance.json."""

from __future__ import annotations

import json
import os
from dataclasses import dataclass
from pathlib import Path

from spes_core.errors import ConfigError, Problem

GENERATOR = "spes-workbench index of reports"
"""Marks a page that may be written again."""


@dataclass(frozen=True, kw_only=True)
class Entry:
    """One report of the index."""

    folder: str
    name: str
    title: str
    byline: str
    verdict: str
    started_at: str
    has_pdf: bool


def entries(reports_dir: Path) -> list[Entry]:
    """The reports in the folder, newest first; folders without a readable provenance.json are left out."""
    found = []
    for path in sorted(reports_dir.glob("*/provenance.json")):
        try:
            about = json.loads(path.read_text(encoding="utf-8"))
            found.append(
                Entry(
                    folder=path.parent.name,
                    name=str(about["name"]),
                    title=str(about.get("title") or about.get("question") or about["name"]),
                    byline=str(about.get("byline") or ""),
                    verdict=str((about.get("verdict") or [""])[0]),
                    started_at=str(about.get("started_at") or ""),
                    has_pdf=(path.parent / "report.pdf").is_file(),
                )
            )
        except (OSError, ValueError, KeyError, TypeError):
            continue
    return sorted(found, key=lambda entry: entry.started_at, reverse=True)


def refresh(reports_dir: Path) -> None:
    """Bring the folder's index up to date, where it has one that `write_index` wrote."""
    page = reports_dir / "index.html"
    if page.is_file() and GENERATOR in page.read_text(encoding="utf-8", errors="replace"):
        write_index(reports_dir)


def write_index(reports_dir: Path) -> Path:
    """Write reports_dir/index.html. Raises ConfigError where a page of another origin stands there."""
    import jinja2
    from markupsafe import Markup

    from workbench.report.render import FACES, TEMPLATES, data_uri, marks

    page = reports_dir / "index.html"
    if page.exists() and GENERATOR not in page.read_text(encoding="utf-8", errors="replace"):
        raise ConfigError([Problem(str(page), "is no index of reports and is left as it is; move it away, then retry")])
    found = entries(reports_dir)
    if not found:
        raise ConfigError([Problem(str(reports_dir), "holds no report; render one with python -m workbench.report")])
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(TEMPLATES), autoescape=True, trim_blocks=True, lstrip_blocks=True,
        undefined=jinja2.StrictUndefined,
    )  # fmt: skip
    environment.filters["marks"] = marks
    content = environment.get_template("index.html.j2").render(
        entries=found,
        generator=GENERATOR,
        faces=[(*face, data_uri(face[3])) for face in FACES],
        style=Markup((TEMPLATES / "page.css").read_text(encoding="utf-8")),
    )
    temporary = page.with_name(f".{page.name}.{os.getpid()}")
    temporary.write_text(content, encoding="utf-8", newline="\n")
    temporary.replace(page)
    return page
