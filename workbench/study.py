"""`python -m workbench.study STUDY.yaml`: read a study, expand it, run what is not done, report.

Everything that can be wrong is found before the first file is written.
"""

from __future__ import annotations

import argparse
import os
import shlex
import socket
import sys
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from spes_core.errors import DataError, Problem, SpesError
from workbench import commands
from workbench.errors import StudyError
from workbench.portable import portable_word

if TYPE_CHECKING:
    from workbench.campaign import Campaign
    from workbench.corpora import PreparedCorpus
    from workbench.hosts import StudyHosts
    from workbench.spec import Study
    from workbench.trials import Corpus, Variant

DONE, SOME_FAILED, BAD_INPUT, INTERRUPTED = 0, 1, 2, 130
"""Exit codes."""

_EPILOG = """\
overrides, in Hydra's grammar (quote brackets for the shell):
  run.nodes=2                                set a setting of every arm; any RunConfig path works under run
  arms.spes.merge.alpha=0.2                  set it for one arm
  model=small                                choose another config of a group (workbench/conf)
  'seeds=[0,1,2]'                            seeds
  'sweep.grid.sync.interval_steps=[5,10]'    the values of an axis, new or old
  ~sweep.grid.sync.interval_steps            take an axis out
  ~arms.dilico  +arms.outer.method=diloco    take an arm out; add one

exit codes:
  0    every trial (with --only: every one of these) is done; with --detach: submitted
  1    some trials failed; the report is still written
  2    the input is wrong; nothing was created
  130  interrupted

The same command again continues: trials that are done are skipped, failed ones stay failed until --retry-failed.
resources.parallel_trials=auto runs as many trials at the same time as cores, memory and GPUs allow.
With launcher.kind slurm each trial is a job: Ctrl-C cancels the jobs, a lost terminal leaves them, and the same command
waits for those that still run.

commands on results (each has --help; STUDY is results/<study>, a study's name, or its file):
  python -m workbench.study status STUDY                      how far it is, and what failed why
  python -m workbench.study cancel STUDY                      cancel its Slurm jobs
  python -m workbench.study table STUDY                       one row a trial
  python -m workbench.study compare STUDY                     arms over seeds, paired differences
  python -m workbench.study export STUDY --out FILE.tar.gz    one archive that another person can verify
  python -m workbench.study export-mlflow STUDY               its MLflow experiment, rebuilt from its results
  python -m workbench.study export-sky STUDY.yaml             a SkyPilot task: its trials on rented machines
  python -m workbench.study export-compose STUDY.yaml         a compose file: one trial in containers
  python -m workbench.study schema                            JSON Schema of a study file, for editors
"""


def main(arguments: Sequence[str] | None = None) -> int:
    """Command line; returns the exit code."""
    arguments = list(sys.argv[1:] if arguments is None else arguments)
    if arguments and arguments[0] in commands.COMMANDS:
        return commands.main(arguments)
    parser = _parser()
    if not arguments:
        parser.print_help()
        return DONE
    options = parser.parse_intermixed_args(arguments)
    command = shlex.join(["python", "-m", "workbench.study", *map(portable_word, arguments)])
    try:
        return run_study(options, command)
    except StudyError as error:
        for mistake in error.mistakes:
            print(f"error: {mistake}", file=sys.stderr)
        return BAD_INPUT
    except SpesError as error:
        print(f"error: {error}", file=sys.stderr)
        return SOME_FAILED
    except BrokenPipeError:
        # Whoever read the output (a pager, head) has seen enough; nothing must be written to it any more.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return SOME_FAILED
    except OSError as error:
        where = "" if error.filename else f" (results go to {options.results})"
        advice = "free space or give the folder back, then run the same command again"
        print(f"error: {error}{where}; {advice}", file=sys.stderr)
        return SOME_FAILED
    except RecursionError:
        print(f"error: {options.study} is nested too deeply to be a study", file=sys.stderr)
        return BAD_INPUT
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return INTERRUPTED


def run_study(options: argparse.Namespace, command: str) -> int:
    """Plan the study, and run it unless only the plan was asked for; returns the exit code."""
    from workbench.selection import select
    from workbench.spec import read_study
    from workbench.trials import expand, without_search

    study = read_study(options.study, options.overrides)
    variants = expand(study)
    select(options.only, without_search(study, variants))
    results, report = Path(options.results) / study.name, Path(options.reports) / study.name
    _require_writable(results, "--results")
    _require_writable(report, "--reports")
    if missing := list(study.evaluation.folder_problems()):
        raise StudyError([study.locate(problem) for problem in missing])
    if options.dry_run:
        from workbench.dryrun import show_plan

        shown = [one for one in variants if _may_run(study, one, options.only)]
        show_plan(study, shown, results, find_corpora(study, variants))
        if study.launcher.kind == "ssh":
            _show_hosts(study, shown)
        return DONE
    _require_detachable(study, options.detach)
    with _ready_place(study, variants, results, options) as hosts:
        corpora = prepare_corpora(study, variants)
        campaign = _campaign_kind(study)(
            study, variants, corpora, results, report, command,
            only=options.only, fail_fast=options.fail_fast, hosts=None if hosts is None else hosts.ready,
        )  # fmt: skip
        if options.detach:
            campaign.submit(retry_failed=options.retry_failed)
            return DONE
        outcome = campaign.run(retry_failed=options.retry_failed)
    return {"done": DONE, "some failed": SOME_FAILED, "interrupted": INTERRUPTED}[outcome]


@contextmanager
def _ready_place(
    study: Study, variants: Sequence[Variant], results: Path, options: argparse.Namespace
) -> Iterator[StudyHosts | None]:
    """Where the trials will run, once it can take them: the study's hosts, or None. Raises StudyError."""
    if study.launcher.kind == "ssh":
        from workbench.hosts import StudyHosts

        meant = [one for one in variants if _may_run(study, one, options.only)]
        with closing(StudyHosts(study, meant, find_corpora(study, meant))) as hosts:
            if _will_run(study, variants, results, options):
                hosts.ready()
            yield hosts
        return
    if study.launcher.kind == "slurm":
        from workbench.slurm.submission import require_slurm

        require_slurm(study, results)
    else:
        from workbench.budget import Budget, require_room

        _require_free_ports(study, max((len(variant.config.servers) for variant in variants), default=1))
        require_room(study, variants, Budget.of(study.resources))
    yield None


def _may_run(study: Study, variant: Variant, only: Sequence[str]) -> bool:
    """Whether --only leaves a variant in; those that stand for the space of a search it does not name."""
    from workbench.selection import is_selected

    return (study.search is not None and variant.arm.name == study.search.arm) or is_selected(only, variant)


def _will_run(study: Study, variants: Sequence[Variant], results: Path, options: argparse.Namespace) -> bool:
    """Whether there are trials to run, by what is known before any text is prepared or any point proposed."""
    from workbench.campaign import is_pending
    from workbench.selection import is_selected
    from workbench.store import StudyFolder
    from workbench.trials import Corpus, identify, without_search

    if not (results / "study.json").exists():
        return True
    known, found = without_search(study, variants), find_corpora(study, variants)
    if any(Corpus.of(variant.config.data) not in found for variant in known):
        return True
    folder, trials = StudyFolder(results), identify(study, known, lambda corpus: found[corpus].header.digest)
    meant = [trial for trial in trials if is_selected(options.only, trial)]
    return any(is_pending(folder.stored(trial), retry_failed=options.retry_failed) for trial in meant)


def _show_hosts(study: Study, variants: Sequence[Variant]) -> None:
    """Which host would run what."""
    from workbench.hosts import describe, placements, study_inventory

    for line in describe(placements(study, variants, study_inventory(study))):
        print(line)


def _campaign_kind(study: Study) -> type[Campaign]:
    if study.search is None:
        from workbench.campaign import Campaign

        return Campaign
    from workbench.searching import SearchCampaign

    return SearchCampaign


def find_corpora(study: Study, variants: Sequence[Variant]) -> dict[Corpus, PreparedCorpus]:
    """The corpora of the study that the cache has. Raises StudyError when one cannot be read or is too small."""
    from workbench.corpora import corpus_mistake, find_corpus, require_enough
    from workbench.trials import Corpus

    found = {}
    for corpus in dict.fromkeys(Corpus.of(variant.config.data) for variant in variants):
        try:
            prepared = find_corpus(corpus)
        except DataError as error:
            raise corpus_mistake(study, variants, corpus, error) from error
        if prepared is not None:
            found[corpus] = prepared
    ready = [variant for variant in variants if Corpus.of(variant.config.data) in found]
    require_enough(study, ready, found)
    return found


def prepare_corpora(study: Study, variants: Sequence[Variant]) -> dict[Corpus, PreparedCorpus]:
    """All corpora of the study, those missing prepared now. Raises StudyError when one is unusable or too small."""
    from workbench.corpora import corpus_mistake, prepare_corpus, require_enough
    from workbench.trials import Corpus

    corpora = find_corpora(study, variants)
    for corpus in dict.fromkeys(Corpus.of(variant.config.data) for variant in variants):
        if corpus not in corpora:
            print(f"preparing the corpus {corpus.path} (once; it is kept in the cache)", flush=True)
            try:
                corpora[corpus] = prepare_corpus(corpus)
            except DataError as error:
                raise corpus_mistake(study, variants, corpus, error) from error
    require_enough(study, variants, corpora)
    return corpora


def _require_detachable(study: Study, detach: bool) -> None:
    """Only what waits in a queue runs without its controller."""
    if not detach:
        return
    if study.launcher.kind != "slurm":
        raise StudyError([f"--detach: launcher.kind ({study.launcher.kind}) must be slurm; leave --detach out"])
    if study.search is not None:
        raise StudyError(["--detach: a search proposes its next trial from the last, so it must stay; leave it out"])


def _require_free_ports(study: Study, servers: int) -> None:
    """The ports from that which the study names on must be free now; a taken one would fail every trial."""
    first = study.launcher.port
    for port in range(first, first + servers) if first else ():
        with socket.socket() as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                probe.bind(("127.0.0.1", port))
            except (OSError, OverflowError) as error:
                reason = getattr(error, "strerror", None) or error
                which = f"({first})" if port == first else f"({first}; one of {servers} servers takes {port})"
                message = f"{which} cannot be listened on: {reason}; name another, or 0 for a free one"
                raise StudyError([study.locate(Problem("launcher.port", message))]) from error


def _require_writable(folder: Path, option: str) -> None:
    """The folder, or the nearest one above it that exists, must take new files."""
    nearest = next(path for path in (folder.absolute(), *folder.absolute().parents) if path.exists())
    if not nearest.is_dir() or not os.access(nearest, os.W_OK | os.X_OK):
        reason = "cannot be written to" if nearest.is_dir() else "is a file"
        raise StudyError([f"{option}: {nearest} {reason}; name another folder with {option} DIR"])


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m workbench.study",
        description="Run the study in a YAML file: plan its trials, run those that are not done, write the report.",
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("study", type=Path, help="the study file, such as studies/sync_interval.yaml")
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="changes to the study, see below")
    parser.add_argument("--dry-run", action="store_true", help="list the trials and what they cost; create nothing")
    parser.add_argument("--retry-failed", action="store_true", help="run failed trials again")
    parser.add_argument(
        "--only", action="append", default=[], metavar="PATTERN",
        help="run these trials alone: a name, an arm or axis=value, * for anything; may be repeated",
    )  # fmt: skip
    parser.add_argument("--fail-fast", action="store_true", help="stop all trials when the first one has failed")
    parser.add_argument(
        "--detach", action="store_true", help="with launcher.kind slurm: submit the trials and end, leaving their jobs"
    )
    parser.add_argument("--results", default="results", metavar="DIR", help="where results go (default: %(default)s)")
    parser.add_argument("--reports", default="reports", metavar="DIR", help="where reports go (default: %(default)s)")
    return parser


if __name__ == "__main__":
    sys.exit(main())
