"""Writes a study's report: index.html, report.pdf, a CSV beside every figure, a .tex for every table, provenance.json.

The report is a function of study.json and the trials' result.json alone: the same files give the same bytes.
"""

from __future__ import annotations

import base64
import hashlib
import importlib.metadata
import json
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from workbench.report.parallel import in_parallel

if TYPE_CHECKING:  # matplotlib, pandas and weasyprint are slow to import: only a rendering pays for them
    from workbench.report.document import Document, Figure
    from workbench.report.evidence import Evidence

TEMPLATES = Path(__file__).parent / "templates"
FACES = (
    ("Workbench Serif", 400, "normal", "serif-400"),
    ("Workbench Serif", 400, "italic", "serif-400-italic"),
    ("Workbench Serif", 600, "normal", "serif-600"),
    ("Workbench Serif Greek", 400, "normal", "serif-400-greek"),
    ("Workbench Sans", 400, "normal", "sans-400"),
    ("Workbench Sans", 700, "normal", "sans-600"),
    ("Workbench Sans Greek", 400, "normal", "sans-400-greek"),
    ("Workbench Sans Greek", 700, "normal", "sans-600-greek"),
    ("Workbench Mono", 400, "normal", "mono-400"),
)
"""Family, weight, style and file of every typeface that the page carries with it."""
NO_PDF = (
    "report.pdf was not written: weasyprint needs the system libraries pango and harfbuzz; install them (on Debian:"
    " apt-get install libpango-1.0-0 libpangoft2-1.0-0 libharfbuzz-subset0) and render again"
)


@dataclass(frozen=True, kw_only=True)
class ReportPaths:
    """What was written. ``remarks`` are lines for the user, such as why there is no PDF."""

    html: Path
    pdf: Path | None
    csv: tuple[Path, ...]
    tex: tuple[Path, ...]
    provenance: Path
    remarks: tuple[str, ...]


def render(study_dir: Path, report_dir: Path) -> ReportPaths:
    """Render the report of a study folder; ``report.formats`` of the study decides what is written beside the HTML.

    Raises ConfigError when study.json is missing or unreadable. Trials that failed or are missing are reported.
    """
    from workbench.report.compose import compose
    from workbench.report.evidence import read

    study_dir, report_dir = study_dir.resolve(), report_dir.resolve()
    evidence = read(study_dir)
    document = compose(evidence, report_dir)
    return _write_report(document, report_dir, _provenance(evidence))


def render_comparison(study_dirs: Sequence[Path], report_dir: Path) -> ReportPaths:
    """Render one report that sets several studies side by side. Raises ConfigError as `render` does."""
    from workbench.report.across import compose, provenance
    from workbench.report.evidence import read
    from workbench.report.versions import one_version_a_cell

    studies = [one_version_a_cell(read(study_dir.resolve())) for study_dir in study_dirs]
    report_dir = report_dir.resolve()
    return _write_report(compose(studies, report_dir), report_dir, provenance(studies))


def _write_report(document: Document, report_dir: Path, origin: dict[str, Any]) -> ReportPaths:
    report_dir.mkdir(parents=True, exist_ok=True)
    _remove_old(report_dir)
    drawn = in_parallel([partial(_pictures, figure) for figure in document.figures])
    pictures = {figure.id: svgs for figure, svgs in zip(document.figures, drawn, strict=True)}
    html = report_dir / "index.html"
    _write(html, _page(document, pictures, for_pdf=False))
    written = in_parallel(
        [
            partial(_write_pdf, document, report_dir, pictures),
            *(partial(_write_csv, figure, report_dir) for figure in document.figures if "csv" in document.formats),
        ]
    )
    pdf, remarks = written[0]
    provenance = report_dir / "provenance.json"
    from workbench.report.index import refresh

    about = {**origin, "title": document.title, "byline": document.byline, "verdict": list(document.verdict)}
    _write(provenance, json.dumps(about, indent=1, ensure_ascii=False) + "\n")
    refresh(report_dir.parent)
    return ReportPaths(
        html=html,
        pdf=pdf,
        csv=tuple(written[1:]),
        tex=_write_tex(document, report_dir),
        provenance=provenance,
        remarks=remarks,
    )


def _remove_old(report_dir: Path) -> None:
    """Files of an earlier rendering, so that none of them outlives the figure or table it belonged to."""
    for pattern in ("figure_*.csv", "table_*.tex", "report.pdf"):
        for path in report_dir.glob(pattern):
            path.unlink()


def _pictures(figure: Figure) -> dict[str, str]:
    """The figure as SVG for a page and for a telephone."""
    from workbench.report.document import PAGE, PHONE
    from workbench.report.svg import to_svg

    return {
        name: to_svg(figure.draw(layout), f"{figure.id}-{name}") for name, layout in (("wide", PAGE), ("narrow", PHONE))
    }


def _page(document: Document, pictures: dict[str, dict[str, str]], *, for_pdf: bool) -> str:
    """The whole page as HTML. The PDF's has one SVG per figure, in plain colours, and no links to files beside it."""
    import jinja2
    from markupsafe import Markup

    from workbench.report import document as parts
    from workbench.report.svg import themed

    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(TEMPLATES), autoescape=True, trim_blocks=True, lstrip_blocks=True,
        undefined=jinja2.StrictUndefined,
    )  # fmt: skip
    environment.filters["marks"] = marks
    environment.tests["of"] = lambda block, kind: isinstance(block, getattr(parts, kind))
    paint: Callable[[str], str] = str if for_pdf else themed
    return environment.get_template("page.html.j2").render(
        document=document,
        pictures={key: {name: Markup(paint(svg)) for name, svg in drawn.items()} for key, drawn in pictures.items()},
        for_pdf=for_pdf,
        with_csv="csv" in document.formats,
        numbers={block.id: f"Figure {index}" for index, block in enumerate(document.figures, 1)}
        | {f"table:{block.id}": f"Table {index}" for index, block in enumerate(document.tables, 1)},
        faces=[(*face, data_uri(face[3])) for face in FACES],
        style=Markup((TEMPLATES / "page.css").read_text(encoding="utf-8")),
        script=Markup((TEMPLATES / "page.js").read_text(encoding="utf-8")),
    )


def marks(text: str) -> Any:
    """Escaped text with ``*emphasis*`` and ```code``` as elements."""
    import re

    from markupsafe import Markup, escape

    marked = re.sub(r"\*([^*\s][^*]*)\*", r"<em>\1</em>", str(escape(text)).replace(" %", "\u00a0%"))
    return Markup(re.sub(r"`([^`]+)`", r"<code>\1</code>", marked))


def data_uri(stem: str) -> str:
    """A typeface of the templates folder as an address that holds it."""
    return "data:font/woff2;base64," + base64.b64encode((TEMPLATES / f"{stem}.woff2").read_bytes()).decode()


def _write_pdf(
    document: Document, report_dir: Path, pictures: dict[str, dict[str, str]]
) -> tuple[Path | None, tuple[str, ...]]:
    if "pdf" not in document.formats:
        return None, ()
    try:
        import weasyprint
        from weasyprint.urls import URLFetcher
    except (ImportError, OSError):
        return None, (NO_PDF,)
    only_data = URLFetcher(allowed_protocols=("data",), fail_on_errors=True)
    path, page = report_dir / "report.pdf", _page(document, pictures, for_pdf=True)
    identifier = hashlib.sha256(page.encode()).digest()[:16]
    content = weasyprint.HTML(string=page, url_fetcher=only_data).write_pdf(pdf_identifier=identifier)
    path.write_bytes(content)
    return path, ()


def _write_csv(figure: Figure, report_dir: Path) -> Path:
    path = report_dir / f"figure_{figure.id}.csv"
    figure.data.to_csv(path, index=False, lineterminator="\n")
    return path


def _write_tex(document: Document, report_dir: Path) -> tuple[Path, ...]:
    from workbench.report.latex import to_latex

    if "latex" not in document.formats:
        return ()
    paths = []
    for table in document.tables:
        paths.append(report_dir / f"table_{table.id}.tex")
        _write(paths[-1], to_latex(table))
    return tuple(paths)


def _provenance(evidence: Evidence) -> dict[str, Any]:
    """The provenance of the trials, and the digest of every result file that the report was made from."""
    from workbench.report.origins import origins, present, started_at

    study = evidence.study
    trials = []
    for trial in evidence.trials:
        path = evidence.folder / "trials" / trial.name / "result.json"
        digest = hashlib.sha256(path.read_bytes()).hexdigest() if path.is_file() else None
        trials.append({"id": trial.id, "name": trial.name, "status": trial.status, "result_sha256": digest})
    packages = ("matplotlib", "pandas", "numpy", "weasyprint", "jinja2")
    return {
        "schema": 1,
        **{key: study.get(key) for key in ("name", "question", "command", "study_file", "created_at")},
        "started_at": started_at(evidence) or None,
        "trials": trials,
        "provenance": [
            {"trials": [trial.name for trial in origin.trials], **origin.provenance} for origin in origins(evidence)
        ],
        "rendered_with": {
            "provenance": present(evidence),
            "packages": {name: importlib.metadata.version(name) for name in packages},
        },
    }


def _write(path: Path, content: str) -> None:
    """Write a text file so that a reader sees the old one or the new one, never half of it."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    temporary.write_text(content, encoding="utf-8", newline="\n")
    temporary.replace(path)
