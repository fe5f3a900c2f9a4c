"""`python -m workbench.evaluate TRIAL --tasks arc_easy,piqa`: scores of a trial's final weights by lm-eval.

They go to the trial's evaluation.json and from there into its result.json. What is scored already, under the same
weights, task version and settings, is not run again; a task that cannot be loaded is listed with its reason. TRIAL may
also be a folder in Hugging Face format, whose scores go to an evaluation.json inside it.
"""

from __future__ import annotations

import argparse
import os
import signal
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from spes_core.errors import SpesError
from spes_core.filedigest import file_digest
from spes_core.processlife import die_with_parent
from workbench import evaluating_tasks
from workbench.durable import read_mapping
from workbench.errors import StudyError, TrialBusy
from workbench.evaluating_scores import (
    FILE,
    HF_FILE,
    Entry,
    ScoreBook,
    copy_of,
    over_nodes,
    weights_digests,
    weights_files,
)
from workbench.evaluating_tasks import Task
from workbench.settings import Evaluation
from workbench.terminal import print_table

if TYPE_CHECKING:
    from workbench.evaluating_model import LanguageModel

DONE, SOME_MISSING, BAD_INPUT, INTERRUPTED = 0, 1, 2, 130
BUSY = 3
"""Exit codes; busy: another process runs or evaluates the trial."""


@dataclass(frozen=True, kw_only=True)
class Target:
    """What is evaluated: one set of weights, or those of several nodes, and where the scores go."""

    folder: Path
    file: str
    weights: dict[str, str]
    """Digest by file name."""
    models: dict[str, Callable[[Path], LanguageModel]] = field(repr=False)
    """How to load each; takes an empty folder to work in."""
    is_trial: bool

    @property
    def enters_result(self) -> bool:
        """Whether the scores belong to the trial's result."""
        return self.is_trial and self.file == FILE


def main(arguments: Sequence[str] | None = None) -> int:
    """Command line; returns the exit code."""
    options = _parser().parse_args(arguments)
    if options.die_with_parent:
        die_with_parent()
    try:
        return run(options)
    except StudyError as error:
        for mistake in error.mistakes:
            print(f"error: {mistake}", file=sys.stderr)
    except (SpesError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return BUSY if isinstance(error, TrialBusy) else BAD_INPUT
    except KeyboardInterrupt:
        print("interrupted; the same command continues", file=sys.stderr)
        return INTERRUPTED
    return BAD_INPUT


def run(options: argparse.Namespace) -> int:
    """Evaluate what is not yet, show the scores asked for; returns the exit code."""
    settings = Evaluation(
        tasks=tuple(name.strip() for name in options.tasks.split(",") if name.strip()),
        data_dir=None if options.data_dir is None else str(options.data_dir.absolute()),
        limit=options.limit,
        batch_size=options.batch_size,
        dtype=options.dtype,
    )
    if problems := [*settings.folder_problems(), *settings.problems(asked=True)]:
        named = {"evaluation." + name: "--" + name.replace("_", "-") for name in asdict(settings)}
        raise StudyError([f"{named.get(p.path.split('[')[0], p.path)}: {p.message}" for p in problems])
    target, tasks = _target(options), evaluating_tasks.resolve(settings.tasks)
    with _held(target):
        book = ScoreBook(target.folder, target.file, target.weights)
        again = not options.keep_missing
        todo = book.lacking(tasks, settings, again=again)
        leaves = {leaf.label for task in tasks for leaf in task.leaves}
        if todo:
            print(f"{len(todo)} of {len(leaves)} tasks to run, with {len(target.weights)} weights file(s)", flush=True)
            _evaluate(target, todo, settings, book, tasks)
        else:
            print(f"all {len(leaves)} tasks are in {target.file} already; nothing is run", flush=True)
        book.show(tasks)
        book.store(into_result=target.enters_result)
    entries = {task.label: book.entries[task.label] for task in tasks}
    _print(target, entries)
    return DONE if all(entry["status"] == "done" for entry in entries.values()) else SOME_MISSING


def _evaluate(
    target: Target, todo: Sequence[Task], settings: Evaluation, book: ScoreBook, tasks: Sequence[Task]
) -> None:
    """Run every task on every weights file; what is complete is stored at once: a stop loses one task at most."""
    if settings.data_dir is not None:
        os.environ["HF_HUB_OFFLINE"] = os.environ["HF_DATASETS_OFFLINE"] = "1"
    os.environ["TQDM_DISABLE"] = "1"
    from workbench.evaluation import DecoderLM, go_offline, run_task

    found: dict[str, list[Entry]] = {task.label: [] for task in todo}
    with tempfile.TemporaryDirectory(prefix="evaluation-") as scratch:
        for number, (name, load) in enumerate(target.models.items()):
            (work := Path(scratch) / str(number)).mkdir()
            try:
                lm: DecoderLM | str = DecoderLM(load(work), settings.batch_size)
            except Exception as error:  # a model that cannot be loaded makes every task missing, with the reason
                lm = _reason(error)
            for task in todo:
                try:
                    if isinstance(lm, str):
                        raise SpesError(lm)
                    entry = run_task(lm, task, copy_of(task, settings.folder), settings.limit, work / "tasks")
                    entry = {"status": "done", **entry, "dtype": settings.dtype}
                except Exception as error:  # one task must never stop the others, whatever the harness raises
                    entry = {"status": "missing", "reason": _reason(error)}
                    if isinstance(error, ConnectionError):
                        go_offline()
                found[task.label].append(entry)
                print(f"{task.label}  {_text(entry)}{'' if len(target.models) == 1 else '  ' + name}", flush=True)
                if len(found[task.label]) == len(target.models):
                    book.add(task, settings, over_nodes(found[task.label]))
                    book.show(tasks, only_known=True)
                    book.store(into_result=target.enters_result)


def _reason(error: Exception) -> str:
    text = " ".join(str(error).split())
    if isinstance(error, ConnectionError):
        text += "; a data_dir with copies needs no network"
    return text if isinstance(error, SpesError) and text else f"{type(error).__name__}: {text}"


def _target(options: argparse.Namespace) -> Target:
    """What TRIAL names. Raises StudyError and DataError."""
    folder: Path = options.trial
    if (folder / "config.json").is_file() and not (folder / "run.json").exists():
        return _hf_target(folder.absolute(), options)
    from workbench.verify import find_trial

    trial_dir = find_trial(folder)
    status = read_mapping(trial_dir / "result.json").get("status")
    if status != "done":
        raise StudyError([f"{trial_dir}: a trial that ended as {status} has no final weights to evaluate"])
    files = weights_files(trial_dir)

    def own(path: Path) -> Callable[[Path], LanguageModel]:
        def load(scratch: Path) -> LanguageModel:
            from workbench.evaluating_model import exported_model, trial_model

            if options.hf:
                return exported_model(trial_dir, path, scratch / "export", options.device, options.dtype)
            return trial_model(trial_dir, path, options.device, options.dtype)

        return load

    models = {path.name: own(path) for path in files}
    file = HF_FILE if options.hf else FILE
    return Target(folder=trial_dir, file=file, weights=weights_digests(files), models=models, is_trial=True)


def _hf_target(folder: Path, options: argparse.Namespace) -> Target:
    files = sorted(folder.glob("*.safetensors"))
    if not files:
        raise StudyError([f"{folder} holds no .safetensors file to evaluate"])

    def load(_: Path) -> LanguageModel:
        from workbench.evaluating_model import hf_model

        return hf_model(folder, options.device, options.dtype)

    weights = {path.name: file_digest(path) for path in files}
    return Target(folder=folder, file=FILE, weights=weights, models={folder.name: load}, is_trial=False)


@contextmanager
def _held(target: Target) -> Iterator[None]:
    """No one else runs or evaluates the trial meanwhile. Raises TrialBusy."""
    if target.is_trial:
        from workbench.execute import exclusive

    with exclusive(target.folder) if target.is_trial else nullcontext():
        yield


def _print(target: Target, entries: dict[str, Entry]) -> None:
    rows = []
    for label, entry in entries.items():
        base = [label, str(entry["shots"])]
        if entry["status"] != "done":
            rows.append([*base, "-", "-", "-", "-", "-", f"missing: {entry['reason']}"])
            continue
        chance = "-" if entry["chance"] is None else f"{entry['chance']:.4f}"
        cut = entry["truncated"]
        note = f"{cut} of {entry['requests']} requests cut to {entry['context']} tokens" if cut else ""
        for name, metric in entry["metrics"].items():
            error = "-" if metric["stderr"] is None else f"{metric['stderr']:.4f}"
            rows.append([*base, name, f"{metric['value']:.4f}", error, chance, str(entry["n"]), note])
    columns = ["task", "shots", "metric", "score", "item s.e.", "guessing", "items", "note"]
    print_table(f"scores of {target.folder.name} ({target.folder / target.file})", columns, rows, columns[3:7])


def _text(entry: Entry) -> str:
    if entry["status"] != "done":
        return f"missing: {entry['reason']}"
    scores = [
        f"{name} {metric['value']:.4f}" + ("" if metric["stderr"] is None else f" ± {metric['stderr']:.4f}")
        for name, metric in entry["metrics"].items()
    ]
    return f"{'  '.join(scores)}  n {entry['n']}"


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m workbench.evaluate",
        description="Score a trial's final weights with lm-eval; what is scored already is not run again.",
        epilog=f"{evaluating_tasks.SUITE}: {', '.join(evaluating_tasks.SUITE_TASKS)}. blimp: its 67 paradigms and "
        "their mean; one alone is blimp_<paradigm>.",
    )
    parser.add_argument("trial", type=Path, help="results/<study>/<trial>, or a folder in Hugging Face format")
    parser.add_argument(
        "--tasks", required=True, metavar="NAME[:SHOTS],...", help="tasks of lm-eval, or a suite's name"
    )
    parser.add_argument("--limit", type=int, metavar="N", help="only the first N items of each task")
    parser.add_argument("--data-dir", type=Path, metavar="DIR", help="offline copies: DIR/<task>/<split>.jsonl.gz")
    parser.add_argument(
        "--batch-size", type=int, default=Evaluation.batch_size, metavar="N", help="default %(default)s"
    )
    parser.add_argument("--device", choices=("auto", "cpu", "cuda"), default="auto")
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32", help="default %(default)s")
    parser.add_argument("--hf", action="store_true", help=f"export the trial first, and score that into {HF_FILE}")
    parser.add_argument("--keep-missing", action="store_true", help="do not try again what was missing before")
    parser.add_argument("--die-with-parent", action="store_true", help=argparse.SUPPRESS)
    return parser


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # so that what is in scratch is removed
    sys.exit(main())
