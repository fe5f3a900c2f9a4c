"""The running of a study: its trials, as many at the same time as there is room for, each mirrored; the report."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, closing, nullcontext
from itertools import chain, count
from pathlib import Path
from typing import Any, Literal

from workbench.budget import Budget, Need, Slot
from workbench.corpora import PreparedCorpus
from workbench.dryrun import axis_paths, axis_text
from workbench.durable import read_mapping
from workbench.errors import TrialBusy
from workbench.evaluating import Evaluations
from workbench.execute import ExecutionSettings, run_trial
from workbench.failures import died_silently
from workbench.launch.launcher import Launcher
from workbench.launch.local import open_launcher
from workbench.launch.remote import RemoteLauncher
from workbench.mirror import CLOSE_TIMEOUT_S, Mirror
from workbench.mirrored import unmirrored
from workbench.progress import Progress
from workbench.provenance import collect
from workbench.selection import is_selected
from workbench.slurm.trials import SlurmTrials
from workbench.spec import Study
from workbench.stopping import DivergenceRule, Rule, StopRequest, stop_on_signals
from workbench.store import Stored, StudyFolder
from workbench.sweep import axis_label
from workbench.terminal import LiveLines, PlainLines, duration, print_table, progress_lines
from workbench.together import Crew
from workbench.trials import Corpus, Trial, Variant, identify

Outcome = Literal["done", "some failed", "interrupted"]

_NOTHING = Need(cores=0, memory_bytes=0, gpus=0)
"""What trials that run elsewhere take of this machine."""
_ENDED_WELL = ("done", "pruned")
_NO_FAILURE = (*_ENDED_WELL, "interrupted", "busy")

_RESULT_COLUMNS = {
    "eval/loss": ("eval/loss", "{:.4f}"),
    "uplink GB": ("comm/uplink_gb", "{:.4g}"),
    "trained-state GB": ("mem/trained_state_gb", "{:.4g}"),
    "tokens/s": ("perf/tokens_per_s", "{:,.0f}"),
}
_MIRROR_PATIENCE_S = 20.0
"""How long the first trial waits for MLflow's store, so that making it disturbs no measurement."""

_MIRROR_STOP_S = 3.0
"""How long an interrupted study waits for the mirror; the next run catches up."""


class Campaign:
    """All trials of a study on prepared corpora; `run` takes them from what is stored to a report."""

    _bound = ""
    """Words before the number of trials to run."""

    def __init__(
        self,
        study: Study,
        variants: Sequence[Variant],
        corpora: Mapping[Corpus, PreparedCorpus],
        results: Path,
        report_dir: Path,
        command: str,
        *,
        only: Sequence[str] = (),
        fail_fast: bool = False,
        hosts: Callable[[], RemoteLauncher] | None = None,
    ) -> None:
        """``only``: patterns of the trials to run (`selection`); ``fail_fast``: the first failure stops the rest.

        ``hosts`` gives the launcher of the study's hosts, where it does not run on this machine; it is asked when there
        are trials to run, and the launcher is closed after the last.
        """
        self._study, self._corpora, self._command = study, corpora, command
        self._only, self._fail_fast, self._hosts = only, fail_fast, hosts
        self._budget = Budget.of(study.resources)
        self._folder, self._report_dir = StudyFolder(results), report_dir
        self._trials = identify(study, variants, lambda corpus: corpora[corpus].header.digest)
        self._stored: dict[str, Stored] = {trial.id: self._folder.stored(trial) for trial in self._trials}
        self._provenance: dict[str, Any] = collect()
        self._evaluations = Evaluations(
            settings=study.evaluation,
            device=study.launcher.device,
            threads=study.launcher.threads,
            timeout_s=study.resources.timeout_s,
        )
        self._is_new = False
        is_slurm = study.launcher.kind == "slurm"
        self._slurm = SlurmTrials(study, self._folder, self._execution_settings) if is_slurm else None

    def submit(self, *, retry_failed: bool) -> None:
        """Hand what is not done to Slurm and leave it there; the same command without --detach takes the results."""
        assert self._slurm is not None
        pending = [trial for trial in self._trials if self._is_pending(trial, retry_failed)]
        self._say_what_stays(pending)
        self._write_study()
        self._slurm.submit(pending)

    def run(self, *, retry_failed: bool) -> Outcome:
        """Run what is not done, write the report, show the results."""
        self._say_what_stays([trial for trial in self._trials if self._is_pending(trial, retry_failed)])
        self._write_study()
        if self._evaluate_earlier(retry_failed):
            print("interrupted; the same command continues", flush=True)
            return "interrupted"
        batches = self._batches(retry_failed)
        first = next(batches, None)
        if first is not None and self._run_trials(chain([first], batches), self._expected(first)):
            print("interrupted; the same command continues", flush=True)
            return "interrupted"
        if first is None:
            self._catch_up()
        self._take_from_others()
        report = self._report_dir / "index.html"
        if first is not None or self._is_new or not self._folder.is_older_than(report, self._trials):
            report = render_report(self._folder.path, self._report_dir)
        self._show_results()
        self._evaluations.say_missing(self._trial_dirs())
        print(f"report: {_shown(report)}")
        meant = [self._stored[trial.id] for trial in self._trials if is_selected(self._only, trial)]
        return "done" if all(stored.status in _ENDED_WELL for stored in meant) else "some failed"

    def _batches(self, retry_failed: bool) -> Iterator[Sequence[Trial]]:
        """Trials to run, in groups: each is asked for when the one before has ended and is stored."""
        if pending := [trial for trial in self._trials if self._is_pending(trial, retry_failed)]:
            yield pending

    def _expected(self, first: Sequence[Trial]) -> int:
        """How many trials there are to run, or how many at most."""
        return len(first)

    def _trial_dirs(self) -> list[Path]:
        """The folders of all trials that study.json names."""
        entries = read_mapping(self._folder.path / "study.json").get("trials") or ()
        return [self._folder.path / "trials" / entry["name"] for entry in entries]

    def _evaluate_earlier(self, retry_failed: bool) -> bool:
        """Evaluate trials that are done and lack scores, without training them again; whether the user stopped it.

        Without --only those are all of the study's that study.json names, the points of a search among them.
        """
        meant = [self._folder.trial_dir(trial) for trial in self._trials if is_selected(self._only, trial)]
        folders = meant if self._only else self._trial_dirs()
        with stop_on_signals() as stop_request:
            if self._evaluations.catch_up(folders, lambda: stop_request.made, retry=retry_failed):
                self._stored = {trial.id: self._folder.stored(trial) for trial in self._trials}
            return stop_request.made

    def _write_study(self) -> None:
        is_news = self._folder.write_study(self._study, self._trials, self._command, self._provenance)
        self._is_new = self._is_new or is_news

    def _is_pending(self, trial: Trial, retry_failed: bool) -> bool:
        return is_selected(self._only, trial) and is_pending(self._stored[trial.id], retry_failed=retry_failed)

    def _say_what_stays(self, pending: Sequence[Trial]) -> None:
        meant = [trial for trial in self._trials if is_selected(self._only, trial)]
        if len(meant) < len(self._trials):
            print(f"{len(self._trials) - len(meant)} trials are left out by --only")
        skipped = [self._stored[trial.id] for trial in meant if trial not in pending]
        done = [stored for stored in skipped if stored.status == "done"]
        if done:
            print(f"{len(done)} of {len(meant)} trials are done already and are not run again")
        if len(skipped) > len(done):
            print(f"{len(skipped) - len(done)} trials failed earlier and stay so; --retry-failed runs them again")
        digest = self._provenance["code_digest"]
        older = [stored for stored in done if stored.result.get("provenance", {}).get("code_digest") != digest]
        if older:
            print(f"warning: {len(older)} of the done trials were made by other code than the present; see the report")

    def _run_trials(self, batches: Iterator[Sequence[Trial]], total: int) -> bool:
        """Run the trials of one group after another; whether the user stopped them."""
        open_place = nullcontext if self._slurm is not None else self._hosts or open_launcher
        place: AbstractContextManager[Launcher | None] = open_place()
        with stop_on_signals() as stop_request, place as launcher:
            if isinstance(launcher, RemoteLauncher):
                launcher.is_stopped = lambda: stop_request.made
            mirror = Mirror(self._folder.path.parent, self._study.name)
            try:
                print(f"{self._bound}{total} trials to run; {self._preparing}", flush=True)
                _wait_for_store(mirror, stop_request)
                with progress_lines(total) as lines:
                    self._carry_out(batches, self._crew(launcher, lines, stop_request), lines, mirror, stop_request)
            finally:
                mirror.close(_MIRROR_STOP_S if stop_request.signal is not None else CLOSE_TIMEOUT_S)
            return stop_request.signal is not None

    def _carry_out(
        self,
        batches: Iterator[Sequence[Trial]],
        crew: Crew,
        lines: PlainLines | LiveLines,
        mirror: Mirror,
        stop_request: StopRequest,
    ) -> None:
        numbers = count(1)

        def begin(trial: Trial) -> None:
            lines.start(next(numbers), trial.name)

        # A group is asked for only by a study that goes on: a search would take what was stopped for ended.
        while not stop_request.made and (batch := next(batches, None)) is not None:
            if self._slurm is not None:
                self._slurm.submit(batch)
            with closing(crew.carry_out(batch, begin)) as ends:
                for trial, stored in ends:
                    self._stored[trial.id] = stored
                    lines.finish(trial.name, _outcome(stored))
                    if stored.status != "busy":  # whoever runs it mirrors it
                        mirror.add(self._folder.trial_dir(trial))
                    if self._fail_fast and stored.status not in _NO_FAILURE and not stop_request.made:
                        stop_request.reason = f"{trial.name} is {stored.status} (--fail-fast)"

    def _crew(self, launcher: Launcher | None, lines: PlainLines | LiveLines, stop_request: StopRequest) -> Crew:
        resources, launching = self._study.resources, self._study.launcher
        if launcher is None:  # the cluster has the room, and its queue the order
            return Crew(
                lambda trial, _: self._follow_trial(trial, lines, stop_request), lambda _: _NOTHING, self._budget, None,
                stop_request,
            )  # fmt: skip
        return Crew(
            lambda trial, slot: self._run_trial(trial, slot, launcher, lines, stop_request),
            lambda trial: _NOTHING if self._hosts else self._budget.need(trial.config, resources, launching),
            self._budget,
            _most_at_once(resources.parallel_trials, is_remote=self._hosts is not None),
            stop_request,
        )

    @property
    def _preparing(self) -> str:
        return f"preparing {'the engine and ' if self._slurm is None else ''}MLflow's store"

    def _take_from_others(self) -> None:
        """What other controllers have ended of the trials that they were running."""
        for trial in self._trials:
            if self._stored[trial.id].status == "busy" and (newest := self._folder.stored(trial)).result:
                self._stored[trial.id] = newest

    def _catch_up(self) -> None:
        """Mirror what the mirror of an earlier run did not come to; MLflow is not started for nothing."""
        if late := unmirrored(self._folder.path):
            print(f"MLflow lacks {len(late)} trials; mirroring them", flush=True)
            Mirror(self._folder.path.parent, self._study.name).close()

    def _run_trial(
        self, trial: Trial, slot: Slot, launcher: Launcher, lines: PlainLines | LiveLines, stop_request: StopRequest
    ) -> Stored:
        """Run one trial, again when a process died without a word, as often as the study allows.

        One that another controller has ended since this one began is not run a second time.
        """
        newest = self._folder.stored(trial)
        if not newest.will_run and newest != self._stored[trial.id]:
            return newest
        settings = self._execution_settings(trial, None if self._hosts else slot.gpus)

        def show(progress: Progress) -> None:
            lines.update(progress)

        for _ in range(1 + self._study.resources.retries):
            folder, rules = self._folder.trial_dir(trial), self._rules(trial)
            try:
                result = run_trial(trial, folder, settings, launcher, show, stop_request, rules)
            except TrialBusy as error:
                return Stored(status="busy", result={"error": {"message": str(error)}})
            if stop_request.made or not died_silently(result):
                break
        trial_dir = self._folder.trial_dir(trial)
        result = self._evaluations.complete(trial_dir, result, lambda: stop_request.made, gpus=slot.gpus)
        return Stored(status=result["status"], result=result)

    def _follow_trial(self, trial: Trial, lines: PlainLines | LiveLines, stop_request: StopRequest) -> Stored:
        """Wait for the job of a trial."""
        assert self._slurm is not None

        def show(progress: Progress) -> None:
            lines.update(progress)

        return self._slurm.run(trial, show, lambda: self._own_rules(trial), stop_request)

    def _execution_settings(self, trial: Trial, gpus: tuple[str, ...] | None = None) -> ExecutionSettings:
        resources, launching = self._study.resources, self._study.launcher
        limit_gb = resources.trial_memory_gb
        return ExecutionSettings(
            data_dir=self._corpora[Corpus.of(trial.config.data)].folder,
            device=launching.device,
            threads=launching.threads,
            server_address=f"127.0.0.1:{launching.port}",
            timeout_s=resources.timeout_s,
            memory_limit_bytes=None if limit_gb is None else int(limit_gb * 1e9),
            gpus=gpus,
            provenance=self._provenance,
        )

    def _rules(self, trial: Trial) -> list[Rule]:
        """What may end a trial before its last step, the same in all arms."""
        return [DivergenceRule(self._study.divergence), *self._own_rules(trial)]

    def _own_rules(self, trial: Trial) -> list[Rule]:
        """Those of them that need this controller."""
        return []

    def _show_results(self) -> None:
        axes = axis_paths(trial.axes for trial in self._trials)
        labels = [axis_label(path, axes) for path in axes]
        metrics = dict(_RESULT_COLUMNS)
        primary = self._study.metrics.primary.name
        if primary != "eval/loss":
            metrics = {primary: (primary, "{:.4g}"), **metrics}
        rows = []
        for trial in self._trials:
            stored = self._stored[trial.id]
            values = stored.result.get("metrics", {})
            numbers = [form.format(values[name]) if name in values else "-" for name, form in metrics.values()]
            points = [axis_text(trial.axes, path) for path in axes]
            rows.append([trial.arm, *points, str(trial.seed), *numbers, stored.status])
        columns = ["arm", *labels, "seed", *metrics, "status"]
        print_table(self._study.question, columns, rows, [*labels, "seed", *metrics])


def is_pending(stored: Stored, *, retry_failed: bool) -> bool:
    """Whether a trial of which this is known will run."""
    asked_for = retry_failed or stored.status == "pruned"  # outside the search that pruned it, a trial is whole
    return stored.will_run or (asked_for and stored.status != "done")


def _most_at_once(stated: int | Literal["auto"], *, is_remote: bool) -> int | None:
    """Most trials at the same time; None for as many as this machine has room for. Hosts take one unless told more."""
    if stated == "auto":
        return 1 if is_remote else None
    return stated


def _wait_for_store(mirror: Mirror, stop_request: StopRequest) -> None:
    """Return when MLflow's store is there, or is not worth waiting for."""
    deadline_s = time.monotonic() + _MIRROR_PATIENCE_S
    while not stop_request.made and time.monotonic() < deadline_s and not mirror.wait_ready(0.2):
        pass


def render_report(study_dir: Path, report_dir: Path) -> Path:
    """Write the report of a study from what is stored, and return its page."""
    from workbench.report.render import render

    paths = render(study_dir, report_dir)
    for remark in paths.remarks:
        print(f"note: {remark}")
    return paths.html


def _shown(path: Path) -> Path:
    """The path as a user at the current folder would write it."""
    return path.relative_to(Path.cwd()) if path.is_relative_to(Path.cwd()) else path


def _outcome(stored: Stored) -> str:
    metrics, error = stored.result.get("metrics", {}), stored.result.get("error") or {}
    if stored.status != "done":
        return f"{stored.status}: {error.get('message', 'no reason is known')}"
    took = metrics.get("perf/wall_time_s")
    parts = ["done" if took is None else f"done in {duration(took)}"]
    parts += [f"loss {metrics['eval/loss']:.4f}"] if "eval/loss" in metrics else []
    parts += [f"{metrics['perf/tokens_per_s']:,.0f} tokens/s"] if "perf/tokens_per_s" in metrics else []
    return "  ".join(parts)
