"""The commands on a study's results: `python -m workbench.study export ...` and its like; each reads, none trains."""

from __future__ import annotations

import argparse
import os
import shlex
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from spes_core.errors import SpesError
from workbench.errors import StudyError

if TYPE_CHECKING:
    from workbench.corpora import PreparedCorpus
    from workbench.interchange import Exported
    from workbench.spec import Study
    from workbench.trials import Corpus, Variant

DONE, FAILED, BAD_INPUT, INTERRUPTED = 0, 1, 2, 130
"""Exit codes."""


def main(arguments: Sequence[str]) -> int:
    """Run one command, named by the first argument; returns the exit code."""
    name, *rest = arguments
    add, run = COMMANDS[name]
    parser = argparse.ArgumentParser(prog=f"python -m workbench.study {name}", description=run.__doc__)
    add(parser)
    try:
        return run(parser.parse_intermixed_args(rest))
    except StudyError as error:
        for mistake in error.mistakes:
            print(f"error: {mistake}", file=sys.stderr)
        return BAD_INPUT
    except BrokenPipeError:
        # Whoever read the output (a pager, head) has seen enough; nothing must be written to it any more.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return FAILED
    except (SpesError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return FAILED
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return INTERRUPTED


def _study_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("study", help="results/<study>, the name of a study, or its YAML file")
    parser.add_argument("--results", type=Path, default=Path("results"), metavar="DIR", help="default: %(default)s")


def _export_arguments(parser: argparse.ArgumentParser) -> None:
    _study_arguments(parser)
    parser.add_argument("--reports", type=Path, default=Path("reports"), metavar="DIR", help="default: %(default)s")
    parser.add_argument("--out", type=Path, required=True, metavar="FILE.tar.gz", help="the archive; must not exist")
    parser.add_argument("--weights", action="store_true", help="pack the final weights too")


def _export(options: argparse.Namespace) -> int:
    """Write one archive of a study's results that another person can unpack and verify."""
    from workbench.export import export
    from workbench.studyfolder import find_study

    study_dir = find_study(options.study, options.results)
    report_dir = options.reports / study_dir.resolve().name
    digest = export(study_dir, report_dir if report_dir.is_dir() else None, options.out, weights=options.weights)
    print(f"{options.out}: {options.out.stat().st_size / 1e6:.1f} MB, SHA-256 {digest}")
    if not report_dir.is_dir():
        print(f"note: there is no report in {report_dir}, so none is packed")
    return DONE


def _status(options: argparse.Namespace) -> int:
    """Show how far a study is: the status of every trial, and why those that failed did."""
    from workbench.reading import show_status
    from workbench.studyfolder import find_study

    show_status(find_study(options.study, options.results))
    return DONE


def _cancel(options: argparse.Namespace) -> int:
    """Cancel the Slurm jobs of a study and wait until they have ended; what was trained stays, and can be continued."""
    from workbench.slurm.status import cancel_study
    from workbench.studyfolder import find_study

    cancel_study(find_study(options.study, options.results))
    return DONE


def _table_arguments(parser: argparse.ArgumentParser) -> None:
    _study_arguments(parser)
    parser.add_argument("--metrics", nargs="+", default=[], metavar="NAME", help="metrics, such as eval/loss")
    parser.add_argument("--csv", action="store_true", help="comma-separated values, in full precision")


def _table(options: argparse.Namespace) -> int:
    """Show one row for each trial of a study."""
    from workbench.reading import show_table
    from workbench.studyfolder import find_study

    show_table(find_study(options.study, options.results), options.metrics, as_csv=options.csv)
    return DONE


def _compare_arguments(parser: argparse.ArgumentParser) -> None:
    _study_arguments(parser)
    parser.add_argument("--metric", metavar="NAME", help="what is compared (default: the study's primary metric)")
    parser.add_argument("--against", metavar="ARM", help="the arm to subtract (default: that with role reference)")


def _compare(options: argparse.Namespace) -> int:
    """Compare the arms of a study: means over seeds, and differences from the reference, paired by seed."""
    from workbench.reading import show_comparison
    from workbench.studyfolder import find_study

    show_comparison(find_study(options.study, options.results), options.metric, options.against)
    return DONE


def _mlflow_arguments(parser: argparse.ArgumentParser) -> None:
    _study_arguments(parser)
    place = parser.add_mutually_exclusive_group()
    place.add_argument("--store", type=Path, metavar="DIR", help="folder of the store (default: that of the results)")
    place.add_argument("--tracking-uri", metavar="URI", help="an MLflow server; what it has already is left alone")


def _export_mlflow(options: argparse.Namespace) -> int:
    """Rebuild the MLflow experiment of a study from its results, or fill another store or a server with it."""
    from workbench.mlflowexport import export_mlflow
    from workbench.studyfolder import find_study

    export_mlflow(find_study(options.study, options.results), options.store, options.tracking_uri)
    return DONE


def _no_arguments(parser: argparse.ArgumentParser) -> None:
    """The command takes none."""


def _schema(options: argparse.Namespace) -> int:
    """Print the JSON Schema of a study file, for editors that complete and check YAML."""
    import json

    from workbench.schema import study_schema

    print(json.dumps(study_schema(), indent=1, ensure_ascii=False))
    return DONE


def _interchange_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("study", type=Path, metavar="STUDY.yaml", help="the study's file")
    parser.add_argument("overrides", nargs="*", metavar="OVERRIDE", help="as python -m workbench.study takes them")
    parser.add_argument("--out", type=Path, metavar="FILE", help="default: <study>.sky.yaml or <study>.compose.yaml")


def _compose_arguments(parser: argparse.ArgumentParser) -> None:
    _interchange_arguments(parser)
    parser.add_argument("--trial", metavar="NAME", help="which trial (default: the first that exchanges in rounds)")


def _export_sky(options: argparse.Namespace) -> int:
    """Write a SkyPilot task that runs a study's trials on rented machines, and a folder with what they need."""
    from workbench.interchange import export_sky

    study, variants, corpora = _prepared(options)
    out = options.out or Path(f"{study.name}.sky.yaml")
    return _tell(export_sky(study, variants, corpora, out), shlex.join(["sky", "launch", str(out)]))


def _export_compose(options: argparse.Namespace) -> int:
    """Write a compose file that runs one trial of a study in containers, and a folder with what they need."""
    from workbench.interchange import export_compose

    study, variants, corpora = _prepared(options)
    out = options.out or Path(f"{study.name}.compose.yaml")
    command = shlex.join(["docker", "compose", "-f", str(out), "up", "--build"])
    return _tell(export_compose(study, variants, corpora, out, options.trial), command)


def _prepared(options: argparse.Namespace) -> tuple[Study, Sequence[Variant], Mapping[Corpus, PreparedCorpus]]:
    """The study, what runs whatever a search finds, and the text."""
    from workbench.spec import read_study
    from workbench.study import prepare_corpora
    from workbench.trials import expand, without_search

    study = read_study(options.study, options.overrides)
    variants = without_search(study, expand(study))
    if not variants:
        raise StudyError(["all trials of this study are those of its search, which proposes them while it runs"])
    return study, variants, prepare_corpora(study, variants)


def _tell(exported: Exported, command: str) -> int:
    print(f"{exported.file}: {', '.join(exported.trials)}")
    print(f"{exported.folder}: what it needs; it holds secrets of the run, so keep it private")
    if exported.left_out:
        print(f"left out: {', '.join(exported.left_out)}")
    print(f"next, from the repository's root: {command}")
    return DONE


Command = tuple[Callable[[argparse.ArgumentParser], None], Callable[[argparse.Namespace], int]]
COMMANDS: dict[str, Command] = {
    "status": (_study_arguments, _status),
    "cancel": (_study_arguments, _cancel),
    "table": (_table_arguments, _table),
    "compare": (_compare_arguments, _compare),
    "export": (_export_arguments, _export),
    "export-mlflow": (_mlflow_arguments, _export_mlflow),
    "export-sky": (_interchange_arguments, _export_sky),
    "export-compose": (_compose_arguments, _export_compose),
    "schema": (_no_arguments, _schema),
}
"""By name: what adds the command's arguments to a parser, and what runs it."""
