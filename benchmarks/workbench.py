"""What a study costs beside its training, measured: `python -m benchmarks.workbench [--quick]`.

Finished studies are made from one real trial of a second: its events stand for those of every trial, and all files are
written by the workbench's own writers, so that commands find what they would find after hours of training. A command's
time is that of a process of its own, with its imports; only the plan is timed after them. The processor time beside
it tells a slow command from a busy machine.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median_low

from workbench import study as study_command
from workbench.durable import write_json
from workbench.execute import ExecutionSettings, describe_trial, run_trial
from workbench.launch.local import open_launcher
from workbench.provenance import collect
from workbench.results import build_result
from workbench.spec import read_study
from workbench.store import StudyFolder
from workbench.study import prepare_corpora
from workbench.terminal import print_table
from workbench.trials import Corpus, Trial, expand, identify

STUDY = """\
schema: 1
name: {name}
question: What does a study of {trials} trials cost beside its training?
defaults: [model/tiny, data/default, launcher/local]
run:
  nodes: 2
  budget_tokens: 40_960
  data: {{corpus: CORPUS, tokenizer_vocab_size: 512, sequence_length: 64}}
  merge: {{enabled: false}}
  validation: {{interval_tokens: 20_480, max_sequences: 8}}
  log: {{interval_steps: 1}}
arms:
  dilico: {{method: dilico, role: reference}}
  spes: {{method: spes, merge.enabled: false}}
sweep: {{grid: {{sync.interval_steps: [1, 2, 4, 5, 10]}}}}
seeds: {seeds}
report: {{x: sync.interval_steps, log_x: true}}
"""
STEPS = 40
BARS_S = {
    "plan of 40 trials (--dry-run), after imports": 2.0,
    "the same command with a misspelt setting": 2.0,
    "status of 200 trials of 5,000 points": 2.0,
    "a finished study of 40 trials, run again": 5.0,
    "report of 40 trials": 20.0,
    "report of 200 trials of 5,000 points": 60.0,
}


@dataclass(frozen=True, kw_only=True)
class Made:
    """A study file and the results that belong to it."""

    folder: Path
    """Where its commands run."""
    name: str

    @property
    def study_dir(self) -> Path:
        """Its results."""
        return self.folder / "results" / self.name


def write_study_file(folder: Path, name: str, num_seeds: int, corpus: str) -> Path:
    """A study of 10 points for each seed."""
    text = STUDY.format(name=name, trials=10 * num_seeds, seeds=list(range(num_seeds))).replace("CORPUS", corpus)
    path = folder / f"{name}.yaml"
    path.write_text(text, encoding="utf-8")
    return path


def make_finished(folder: Path, path: Path, points: int) -> Made:
    """Results of every trial of the study at ``path``, from one real trial; ``points`` of training in each curve."""
    study = read_study(path)
    variants = expand(study)
    corpora = prepare_corpora(study, variants)
    trials = identify(study, variants, lambda corpus: corpora[corpus].header.digest)
    provenance = collect()
    settings = ExecutionSettings(
        data_dir=corpora[Corpus.of(trials[0].config.data)].folder, device="cpu", provenance=provenance
    )
    results = StudyFolder(folder / "results" / study.name)
    real = folder / "real"
    with open_launcher() as launcher:
        outcome = run_trial(trials[0], real, settings, launcher)
    if outcome["status"] != "done":
        raise RuntimeError(f"the trial that stands for all has status {outcome['status']}: {outcome['error']}")
    for events in (real / "events").glob("node-*.jsonl"):
        events.write_text(_longer(events.read_text(encoding="utf-8"), points), encoding="utf-8")
    for trial in trials:
        _write_trial(trial, results.trial_dir(trial), real, settings)
    results.write_study(study, trials, f"python -m workbench.study {path.name}", provenance)
    return Made(folder=folder, name=study.name)


def _longer(text: str, points: int) -> str:
    """The events with as many of training as asked for, by repeating the last in steps between."""
    lines = text.splitlines()
    last = max(index for index, line in enumerate(lines) if '"kind": "train"' in line)
    event = json.loads(lines[last])
    have = sum('"kind": "train"' in line for line in lines)
    more = [json.dumps({**event, "step": event["step"] + 1 + index}) for index in range(points - have)]
    return "\n".join([*lines[: last + 1], *more, *lines[last + 1 :]]) + "\n"


def _write_trial(trial: Trial, trial_dir: Path, real: Path, settings: ExecutionSettings) -> None:
    for name in ("events", "logs"):
        (trial_dir / name).mkdir(parents=True)
        for file in (real / name).iterdir():
            os.link(file, trial_dir / name / file.name)
    describe_trial(trial, trial_dir, settings)
    os.link(real / "outcome.json", trial_dir / "outcome.json")
    write_json(trial_dir / "result.json", build_result(trial_dir))


@dataclass(frozen=True, order=True)
class Took:
    """Time of a command."""

    wall_s: float
    cpu_s: float
    """Processor time of it and its own processes."""


def command_s(folder: Path, *arguments: str, status: int = 0) -> Took:
    """Time of a command in a process of its own. Raises RuntimeError with its output at another exit status."""
    began_s, before = time.perf_counter(), os.times()
    done = subprocess.run(
        [sys.executable, "-m", *arguments], cwd=folder, capture_output=True, text=True, check=False, env=_environment()
    )
    after = os.times()
    used_s = after.children_user + after.children_system - before.children_user - before.children_system
    took = Took(time.perf_counter() - began_s, used_s)
    if done.returncode != status:
        raise RuntimeError(f"{' '.join(arguments)} ended with {done.returncode}:\n{done.stdout}\n{done.stderr}")
    return took


def plan_s(path: Path) -> Took:
    """Time of a plan in this process, whose imports have been made by an earlier one."""
    began_s, used_s = time.perf_counter(), time.process_time()
    with contextlib.redirect_stdout(io.StringIO()):
        status = study_command.main([str(path), "--dry-run"])
    if status != 0:
        raise RuntimeError(f"the plan of {path} ended with {status}")
    return Took(time.perf_counter() - began_s, time.process_time() - used_s)


def measure(folder: Path, corpus: str, turns: int, *, few: tuple[int, int], many: tuple[int, int]) -> dict[str, Took]:
    """The median for each bar; ``few`` and ``many``: seeds (10 trials each) and points of the two studies."""
    names = list(BARS_S)
    path = write_study_file(folder, "few", few[0], corpus)
    small = make_finished(folder, path, few[1])
    wrong = folder / "wrong.yaml"
    wrong.write_text(path.read_text(encoding="utf-8").replace("budget_tokens", "budget_tokns"), encoding="utf-8")
    command_s(folder, "workbench.study", path.name)  # mirrors the trials and writes the first report
    timed: dict[str, Callable[[], Took]] = {
        names[0]: lambda: plan_s(path),
        names[1]: lambda: command_s(folder, "workbench.study", wrong.name, status=2),
        names[3]: lambda: command_s(folder, "workbench.study", path.name),
        names[4]: lambda: command_s(folder, "workbench.report", str(small.study_dir)),
    }
    plan_s(path)
    found = {name: median_low(call() for _ in range(turns)) for name, call in timed.items()}
    (folder / "large").mkdir()
    large = make_finished(folder / "large", write_study_file(folder / "large", "many", many[0], corpus), many[1])
    status = ("workbench.study", "status", str(large.study_dir))
    found[names[2]] = median_low(command_s(large.folder, *status) for _ in range(turns))
    found[names[5]] = command_s(large.folder, "workbench.report", str(large.study_dir))
    return {name: found[name] for name in names}


def main(arguments: Sequence[str] | None = None) -> int:
    """Command line; 1 when a bar is missed."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.workbench", description=__doc__.split("\n")[0])
    parser.add_argument("--quick", action="store_true", help="smaller studies, once: no figure of it is a bar's")
    parser.add_argument("--corpus", default="stdlib", help="default: %(default)s")
    options = parser.parse_args(arguments)
    few, many = ((1, STEPS), (1, 100)) if options.quick else ((4, 100), (20, 5000))
    with tempfile.TemporaryDirectory() as folder:
        found = measure(Path(folder).resolve(), options.corpus, 1 if options.quick else 3, few=few, many=many)
    rows = [_row(name, took) for name, took in found.items()]
    title = f"{'quick, ' if options.quick else ''}{os.cpu_count()} CPUs, load average {os.getloadavg()[0]:.1f}"
    columns = ("what", "bar s", "measured s", "CPU s", "")
    print_table(title, columns, rows, columns[1:4])
    return int(not options.quick and any(took.wall_s > BARS_S[name] for name, took in found.items()))


def _row(name: str, took: Took) -> list[str]:
    verdict = "met" if took.wall_s <= BARS_S[name] else "missed"
    return [name, f"{BARS_S[name]:g}", f"{took.wall_s:.2f}", f"{took.cpu_s:.2f}", verdict]


def _environment() -> dict[str, str]:
    root = str(Path(__file__).resolve().parent.parent)
    return {**os.environ, "PYTHONPATH": os.pathsep.join([root, os.environ.get("PYTHONPATH", "")])}


if __name__ == "__main__":
    sys.exit(main())
