"""`python -m workbench.report results/<study> [--out reports/<study>]`: render a study's report again.

Exit codes: 0 written, 2 bad input (nothing written).
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from spes_core.errors import ConfigError
from workbench.report.render import render


def main(arguments: Sequence[str] | None = None) -> int:
    """Render the report of one study folder and print where it is."""
    parser = argparse.ArgumentParser(prog="python -m workbench.report", description="Render the report of a study.")
    parser.add_argument("study_dir", type=Path, help="folder of the study: results/<study>")
    parser.add_argument("--out", type=Path, help="folder of the report (default: reports/<study>)")
    given = parser.parse_args(arguments)
    study_dir: Path = given.study_dir
    try:
        paths = render(study_dir, given.out or Path("reports") / study_dir.resolve().name)
    except ConfigError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    for path in (paths.html, paths.pdf):
        if path is not None:
            print(path)
    for remark in paths.remarks:
        print(remark, file=sys.stderr)
    return 0


if __name__ == "__main__":
    sys.exit(main())
