"""`python -m workbench.verify results/<study>/<trial>`: check a stored trial, and train it again.

First result.json is computed again from the trial's other files and compared (`workbench.integrity`); ``--quick`` stops
there. Then the run in run.json is repeated in a scratch folder and compared (`workbench.rerun`): bit by bit where code,
numerical packages and hardware are those of the trial, else losses within a tolerance, and payload bytes, rounds and
trained state exactly. The trial's folder is only read.
"""

from __future__ import annotations

import argparse
import shutil
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from spes_core.config import DataConfig, RunConfig
from spes_core.errors import ConfigError, DataError, SpesError
from spes_core.runfile import RunFile
from workbench.corpora import prepare_corpus
from workbench.durable import read_mapping
from workbench.errors import StudyError
from workbench.execute import ExecutionSettings, run_trial
from workbench.integrity import check_files
from workbench.launch.local import open_launcher
from workbench.provenance import collect
from workbench.rerun import LOSS_TOLERANCE, compare, environment_differences, why_not_exact
from workbench.terminal import print_table, progress_lines
from workbench.trials import Corpus, Trial
from workbench.verdict import Check, equal, print_checks

PASS, FAIL, BAD_INPUT, INTERRUPTED = 0, 1, 2, 130
"""Exit codes."""
_FILES = ("run.json", "trial.json", "result.json")


def main(arguments: Sequence[str] | None = None) -> int:
    """Command line; returns the exit code."""
    options = _parser().parse_args(arguments)
    try:
        return verify(options)
    except StudyError as error:
        for mistake in error.mistakes:
            print(f"error: {mistake}", file=sys.stderr)
    except (SpesError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return INTERRUPTED
    return BAD_INPUT


def verify(options: argparse.Namespace) -> int:
    """Check the files, and unless that is all that is wanted, train again; returns the exit code."""
    trial_dir = find_trial(options.trial)
    stored = read_mapping(trial_dir / "result.json")
    files = check_files(trial_dir)
    print_checks(f"files of {trial_dir.name}", files)
    if options.quick or not all(check.passed for check in files):
        return _conclude(files)
    if stored["status"] != "done":
        raise StudyError([f"{trial_dir}: a trial that ended as {stored['status']} is not repeated; --quick checks it"])
    config = RunFile.load(trial_dir / "run.json").config
    changed = environment_differences(stored["provenance"], collect())
    _print_environment(changed)
    reasons = [] if options.exact else why_not_exact(config, changed)
    tolerance = LOSS_TOLERANCE if options.tolerance is None else options.tolerance
    if not reasons and options.tolerance is None:
        tolerance = 0.0
    print("equal bits are asked for" if tolerance == 0 else f"losses may differ by {tolerance:g} of their value")
    print("".join(f"  because {reason}\n" for reason in reasons), end="", flush=True)
    return _conclude([*files, *_repeat(trial_dir, stored, options, tolerance)])


def find_trial(given: Path) -> Path:
    """The folder of a finished trial; results/<study>/<trial> may leave out trials/. Raises StudyError."""
    folder = given if (given / "run.json").exists() else given.parent / "trials" / given.name
    missing = [name for name in _FILES if not read_mapping(folder / name)]
    if not missing:
        return folder.absolute()
    if not given.exists() and not folder.exists():
        raise StudyError([f"{given} does not exist; name the folder of a trial, such as results/<study>/<trial>"])
    place = folder if folder.exists() else given
    raise StudyError([f"{place} is not the folder of a finished trial: it has no readable {', '.join(missing)}"])


def _repeat(trial_dir: Path, stored: dict[str, Any], options: argparse.Namespace, tolerance: float) -> list[Check]:
    """Train again in a scratch folder and compare."""
    run, about = RunFile.load(trial_dir / "run.json"), read_mapping(trial_dir / "trial.json")
    config = _located(run.config, options)
    data_dir, digest = _data(run, config)
    data = equal("data digest", about["data"].get("digest"), digest, "the same tokens")
    if not data.passed:
        print_checks("data", [data])
        return [data]
    scratch = Path(tempfile.mkdtemp(prefix="verify-", dir=options.scratch))
    try:
        settings = ExecutionSettings(
            data_dir=data_dir, device=run.device, threads=run.threads, provenance=stored["provenance"]
        )
        fresh = _train(_trial(about["trial"], config), scratch / "trial", settings)
        checks = compare(trial_dir, stored, scratch / "trial", fresh, tolerance)
        print_checks("run again", [data, *checks])
        return [data, *checks]
    finally:
        if options.keep:
            print(f"the repeated run is in {scratch}")
        else:
            shutil.rmtree(scratch, ignore_errors=True)


def _train(trial: Trial, folder: Path, settings: ExecutionSettings) -> dict[str, Any]:
    with open_launcher() as launcher, progress_lines(1) as lines:
        lines.start(1, trial.name)
        result = run_trial(trial, folder, settings, launcher, lines.update)
        lines.finish(trial.name, str(result["status"]))
    if result["status"] == "interrupted":
        raise KeyboardInterrupt
    return result


def _trial(identity: dict[str, Any], config: RunConfig) -> Trial:
    fields = {name: identity[name] for name in ("id", "name", "study", "arm", "role", "axes", "seed")}
    return Trial(**fields, config=config)


def _located(config: RunConfig, options: argparse.Namespace) -> RunConfig:
    """The run with its files where they are on this machine; their digests, not their places, count."""
    if options.corpus:
        config = replace(config, data=_data_at(config.data, options.corpus))
    if config.init.kind != "weights":
        return config
    weights = Path(options.init_weights or config.init.weights or "").absolute()
    if not weights.is_file():
        raise StudyError([f"init.weights ({weights}) is not on this machine; name the file with --init-weights FILE"])
    return replace(config, init=replace(config.init, weights=str(weights)))


def _data_at(data: DataConfig, places: list[str]) -> DataConfig:
    """The settings of the data with its corpora at these places, PATH or for a domain NAME=PATH."""
    if not data.domains:
        return replace(data, corpus=places[-1])
    domains = dict(data.domains)
    for place in places:
        name, equals, path = place.partition("=")
        if name not in domains or not equals:
            names = ", ".join(domains)
            raise StudyError([f"--corpus {place} must be NAME=PATH, where NAME is a domain of the trial ({names})"])
        domains[name] = replace(domains[name], corpus=path)
    return replace(data, domains=domains)


def _data(run: RunFile, config: RunConfig) -> tuple[Path, str]:
    """Folder and digest of the run's tokens: where they were, or prepared again from the corpus. Raises StudyError."""
    folder = Path(run.data_dir)
    if config.data == run.config.data and (header := read_mapping(folder / "header.json")):
        return folder, str(header.get("digest"))
    try:
        prepared = prepare_corpus(Corpus.of(config.data))
    except (DataError, ConfigError) as error:
        message = f"data.corpus cannot be used: {error}; name the corpus with --corpus PATH, or use --quick"
        raise StudyError([message]) from error
    return prepared.folder, prepared.header.digest


def _print_environment(changed: list[tuple[str, str, str]]) -> None:
    if not changed:
        print("code, packages and hardware are those of the trial")
        return
    print_table("differences of environment", ("part", "trial", "now"), changed)


def _conclude(checks: Sequence[Check]) -> int:
    failed = [check.name for check in checks if not check.passed]
    if not failed:
        print(f"PASS: all {len(checks)} checks hold")
        return PASS
    print(f"FAIL: {len(failed)} of {len(checks)} checks do not hold: {', '.join(dict.fromkeys(failed))}")
    return FAIL


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m workbench.verify",
        description="Check the files of a finished trial against each other, then train it again and compare.",
        epilog="exit codes: 0 everything holds, 1 something does not, 2 bad input, 130 interrupted",
        allow_abbrev=False,
    )
    parser.add_argument("trial", type=Path, help="folder of the trial, such as results/<study>/<trial>")
    parser.add_argument("--quick", action="store_true", help="only check the files; train nothing")
    strictness = parser.add_mutually_exclusive_group()
    strictness.add_argument("--exact", action="store_true", help="ask for the same bits whatever else differs")
    strictness.add_argument("--tolerance", type=_fraction, metavar="X", help="accept losses within X of their value")
    parser.add_argument(
        "--corpus",
        action="append",
        metavar="[NAME=]PATH",
        help="where the corpus is on this machine; of a mixture, once for each domain that has moved",
    )
    parser.add_argument("--init-weights", type=Path, metavar="FILE", help="where the initial weights are")
    parser.add_argument("--scratch", type=Path, metavar="DIR", help="folder for the repeated run (default: temporary)")
    parser.add_argument("--keep", action="store_true", help="keep the repeated run")
    return parser


def _fraction(given: str) -> float:
    value = float(given)
    if not 0 < value < 1:
        raise argparse.ArgumentTypeError(f"({given}) must be above 0 and below 1")
    return value


if __name__ == "__main__":
    sys.exit(main())
