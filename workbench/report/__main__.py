"""`python -m workbench.report results/<study> ...`: render a study's report again, or compare several studies.

One study: reports/<study>. Several: one report that sets them side by side, reports/<a>+<b>. `--index` writes the page
over all reports. Exit codes: 0 written, 2 bad input (nothing written).
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from spes_core.errors import ConfigError
from workbench.report.index import write_index
from workbench.report.render import ReportPaths, render, render_comparison


def main(arguments: Sequence[str] | None = None) -> int:
    """Render what is asked for and print where it is."""
    parser = argparse.ArgumentParser(
        prog="python -m workbench.report",
        description="Render the report of a study, or one report that compares several.",
    )
    parser.add_argument("study_dirs", type=Path, nargs="*", metavar="results/STUDY", help="folders of studies")
    parser.add_argument("--out", type=Path, metavar="DIR", help="folder of the report (default: reports/<study>)")
    parser.add_argument(
        "--index", type=Path, nargs="?", const=Path("reports"), metavar="REPORTS",
        help="also write the page over all reports of this folder (default: reports)",
    )  # fmt: skip
    given = parser.parse_args(arguments)
    if not given.study_dirs and given.index is None:
        parser.error("give the folder of a study, results/<study>, or --index")
    try:
        if given.study_dirs:
            _tell(_render(given.study_dirs, given.out))
        if given.index is not None:
            print(write_index(given.index))
    except ConfigError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return 0


def _render(study_dirs: list[Path], out: Path | None) -> ReportPaths:
    names = [path.resolve().name for path in study_dirs]
    report_dir = out or Path("reports") / "+".join(names)
    return render(study_dirs[0], report_dir) if len(study_dirs) == 1 else render_comparison(study_dirs, report_dir)


def _tell(paths: ReportPaths) -> None:
    for path in (paths.html, paths.pdf):
        if path is not None:
            print(path)
    for remark in paths.remarks:
        print(remark, file=sys.stderr)


if __name__ == "__main__":
    sys.exit(main())
