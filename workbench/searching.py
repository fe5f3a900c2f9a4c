"""The running of a search: propose a point, make its trials, tell what they gave, confirm the winners.

Results are the truth. What optuna was told can be computed again from them, and a point's identity is its trials' ids,
so that a repeated point costs nothing. Beside the trials, results/<study>/search/ holds::

    journal.log   what was proposed, as optuna writes it
    search.json   the points in order, with their trials: what the report reads
    lock          held while a controller searches
"""

from __future__ import annotations

import fcntl
import json
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

from spes_core.errors import SpesError
from workbench.campaign import Campaign, Outcome
from workbench.corpora import PreparedCorpus
from workbench.durable import read_mapping, write_json
from workbench.launch.remote import RemoteLauncher
from workbench.points import Sample, Scored, score, winners
from workbench.search import Proposal, Proposals
from workbench.searchspace import Search
from workbench.spec import Arm, Study
from workbench.stopping import PruningRule, Rule
from workbench.sweep import axis_label, value_text
from workbench.trials import Corpus, Trial, Variant, config_digest, identify, resolve, without_search

_MOST_IDLE = 100
"""Proposals in a row that bring no new point before the search ends."""


@dataclass(kw_only=True)
class Point:
    """A distinct point of the search, in the order of its first proposal."""

    number: int
    axes: dict[str, Any]
    trials: list[Trial]
    """One for each seed of the study."""
    state: str = "open"
    """"open", "done", "pruned" or "failed"."""
    reason: str = ""
    repeats: int = 0
    scored: Scored | None = None


class SearchCampaign(Campaign):
    """A campaign whose searched arm has the trials that a search proposes; the other arms run first."""

    _bound = "at most "

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
        search = study.search
        assert search is not None
        self._search: Search = search
        self._arm = next(arm for arm in study.arms if arm.name == search.arm)
        self._samples = [variant for variant in variants if variant.arm.name == search.arm]
        others = without_search(study, variants)
        super().__init__(
            study, others, corpora, results, report_dir, command, only=only, fail_fast=fail_fast, hosts=hosts
        )
        reference = next((variant for variant in others if variant.arm.role == "reference"), None)
        self._references: dict[int, Trial] = {}
        if reference is not None:
            for seed in (*study.seeds, *search.confirm.seeds):
                self._references[seed] = self._trial(reference.arm, reference.axes, seed)
        self._ledger: dict[str, Point] = {}
        """The points so far, by their trials' ids."""
        self._untold = search.target
        self._winners: list[Point] = []
        self._confirming: dict[int, list[Trial]] = {}
        self._retry_failed = False
        self._proposals: Proposals | None = None
        self._prunable: dict[str, Proposal] = {}
        """By the ids of trials that may be stopped at their validations."""

    def run(self, *, retry_failed: bool) -> Outcome:
        """Search, confirm, report; a second controller of the same search is refused."""
        with _exclusive(self._folder.path / "search"):
            return super().run(retry_failed=retry_failed)

    def _batches(self, retry_failed: bool) -> Iterator[Sequence[Trial]]:
        """The other arms' trials, then those of one point after another, then the winners on fresh seeds."""
        self._retry_failed = retry_failed
        if self._only:  # they name trials of the other arms: those of the search are not known yet
            yield from super()._batches(retry_failed)
            return
        journal = self._folder.path / "search" / "journal.log"
        self._proposals = proposals = Proposals(journal, self._form(), self._search)
        self._take_over(proposals)
        told = sum(proposal.state != "open" and not proposal.is_repeat for proposal in proposals.history())
        if told:
            print(f"search: {told} of {self._search.target} points are known already", flush=True)
        self._untold = max(0, self._search.target - told)
        yield from super()._batches(retry_failed)
        if missing := self._missing_reference():
            print(f"the search waits: {missing}; --retry-failed runs it again", flush=True)
            return
        yield from self._continue(proposals)
        yield from self._propose(proposals)
        yield from self._confirm()
        self._write()

    def _run_trials(self, batches: Iterator[Sequence[Trial]], total: int) -> bool:
        was_interrupted = super()._run_trials(batches, total)
        if self._proposals is not None and not was_interrupted:
            self._write()  # a failure may have ended the search within a point
        return was_interrupted

    def _own_rules(self, trial: Trial) -> list[Rule]:
        rules = super()._own_rules(trial)
        if (proposal := self._prunable.get(trial.id)) is not None and (proposals := self._proposals) is not None:
            rules.append(PruningRule(trial.config, partial(proposals.should_stop, proposal)))
        return rules

    def _expected(self, first: Sequence[Trial]) -> int:
        if self._only:
            return len(first)
        fixed = sum(self._is_pending(trial, self._retry_failed) for trial in self._trials if trial not in first)
        fresh = len(self._search.confirm.seeds) * (self._search.confirm.top + bool(self._references))
        return len(first) + fixed + self._untold * len(self._study.seeds) + fresh

    def _missing_reference(self) -> str:
        """Why no point can be compared with the reference; empty where it can, or need not."""
        if all(constraint.tolerance is None for constraint in self._search.constraints):
            return ""
        needed = [trial for seed, trial in self._references.items() if seed in self._study.seeds]
        failed = [trial.name for trial in needed if self._status(trial) != "done"]
        return f"its constraints need the reference, and {failed[0]} has no result" if failed else ""

    # --- Points ---

    def _take_over(self, proposals: Proposals) -> None:
        """Tell a search that was edited what is stored of points that its earlier forms proposed."""
        known = [proposal.params for proposal in proposals.history()]
        earlier = [params for params in proposals.earlier() if params not in known]
        kept = 0
        for params in earlier:
            point = self._point(params) if self._search.holds(params) else None
            scored = self._scored(point) if point is not None and self._is_stored(point) else None
            if scored is not None:
                proposals.add(params, scored.values, self._violations(scored))
                kept += 1
        if earlier and not known:
            print(f"the search was edited: {kept} of {len(earlier)} earlier points still count", flush=True)

    def _continue(self, proposals: Proposals) -> Iterator[Sequence[Trial]]:
        """Take up what earlier runs proposed: remember what was told, finish what was open, make again what is lost."""
        for proposal in proposals.history():
            point = self._point(proposal.params)
            if point is None:
                if proposal.state == "open":
                    proposals.close(proposal, "failed")
                continue
            known = self._remember(point, proposal)
            if proposal.state == "open":
                yield from self._evaluate(proposals, proposal, known)
            elif proposal.state == "pruned":
                self._remember_pruned(known)
            elif not proposal.is_repeat:
                yield from self._restore(proposals, proposal, known)

    def _remember_pruned(self, point: Point) -> None:
        seen = [trial for trial in point.trials if self._folder.stored(trial).status != "new"]
        for trial in seen:
            self._add(trial)
        self._prune(point, len(seen))

    def _prune(self, point: Point, seeds: int) -> None:
        """Give up a point after its first seeds, the last of which may have been stopped within its run."""
        stopped = [trial for trial in point.trials if self._status(trial) == "pruned"]
        point.state, point.reason = "pruned", f"pruned after {seeds} of {len(point.trials)} seeds"
        if stopped:
            point.reason = str(self._folder.stored(stopped[0]).result["error"]["message"])

    def _restore(self, proposals: Proposals, proposal: Proposal, point: Point) -> Iterator[Sequence[Trial]]:
        """Make again what is missing of a point that was told, or failed and is asked for."""
        pending = [trial for trial in point.trials if self._must_run(trial)]
        if pending:
            yield pending
        self._settle(point)
        if proposal.state == "failed" and point.scored is not None:
            proposals.add(proposal.params, point.scored.values, self._violations(point.scored), mends=True)

    def _propose(self, proposals: Proposals) -> Iterator[Sequence[Trial]]:
        """New points until there are as many as asked for, or no other is proposed."""
        idle = 0
        while len(self._ledger) < self._search.target:
            if idle and self._search.size is not None and not proposals.untested():
                return
            if idle == _MOST_IDLE:
                print(f"the search ends: {idle} proposals in a row repeated a point or could not run", flush=True)
                return
            proposal, known = proposals.ask(), len(self._ledger)
            point = self._point(proposal.params)
            if point is None:
                proposals.close(proposal, "failed")
            else:
                yield from self._evaluate(proposals, proposal, self._remember(point, proposal))
            idle = 0 if len(self._ledger) > known else idle + 1

    def _evaluate(self, proposals: Proposals, proposal: Proposal, point: Point) -> Iterator[Sequence[Trial]]:
        """Make what is missing of a proposed point, seed by seed where it may be pruned, and tell what came out."""
        is_repeat = point.number != proposal.number
        if not is_repeat or point.state == "open":
            yield from self._make(proposals, proposal, point)
        if point.scored is not None:
            proposals.tell(proposal, point.scored.values, self._violations(point.scored), is_repeat=is_repeat)
        else:
            proposals.close(proposal, "pruned" if point.state == "pruned" else "failed", is_repeat=is_repeat)
        self._write()

    def _make(self, proposals: Proposals, proposal: Proposal, point: Point) -> Iterator[Sequence[Trial]]:
        if self._search.pruner is None:
            pending = [trial for trial in point.trials if self._must_run(trial)]
            if pending:
                yield pending
            self._settle(point)
            return
        means: list[float] = []
        for seeds, trial in enumerate(point.trials, start=1):
            if self._must_run(trial):
                if seeds == 1 and self._search.prunes_runs:
                    self._prunable[trial.id] = proposal
                yield [trial]
            if self._status(trial) == "pruned":
                return self._prune(point, seeds)
            scored = self._scored(point, seeds)
            if scored is None:
                break
            means.append(scored.values[0])
            if seeds < len(point.trials) and proposals.should_prune(proposal, means):
                return self._prune(point, seeds)
        self._settle(point)

    def _remember(self, point: Point, proposal: Proposal) -> Point:
        """The point as it is known; one that was proposed before is that earlier one."""
        key = " ".join(trial.id for trial in point.trials)
        known = self._ledger.setdefault(key, point)
        if known is point:
            point.number = proposal.number
        else:
            known.repeats += 1
        return known

    def _point(self, params: Mapping[str, Any]) -> Point | None:
        """The trials of a point; None when it breaks a rule."""
        trials = []
        for seed in self._study.seeds:
            variant, _ = resolve(self._arm, dict(params), seed)
            if variant is None:
                return None
            trials.append(self._identify(variant))
        return Point(number=-1, axes=dict(trials[0].axes), trials=trials)

    def _settle(self, point: Point) -> None:
        """What became of a point whose trials have ended."""
        if busy := [trial.name for trial in point.trials if self._status(trial) == "busy"]:
            raise SearchBusy(f"{busy[0]} is being run by another process; wait for it to end")
        point.scored = self._scored(point)
        point.state = "done" if point.scored is not None else "failed"

    def _scored(self, point: Point, seeds: int | None = None) -> Scored | None:
        """The scores over the first seeds, or all; None, with the reason, where there are none."""
        trials = point.trials[:seeds]
        try:
            if failed := [trial for trial in trials if self._status(trial) != "done"]:
                raise ValueError(f"{failed[0].name}: {self._status(failed[0])}")
            return score(
                self._sample(trials), self._sample([*self._references.values()]),
                self._search.objectives, self._search.constraints,
            )  # fmt: skip
        except ValueError as error:
            point.reason = str(error)
            return None

    def _violations(self, scored: Scored) -> dict[str, float]:
        texts = [constraint.text() for constraint in self._search.constraints]
        return dict(zip(texts, scored.violations, strict=True))

    # --- Confirmation ---

    def _confirm(self) -> Iterator[Sequence[Trial]]:
        """The winners, and the reference, on the fresh seeds."""
        done = [point for point in self._ledger.values() if point.scored is not None]
        scores = [point.scored for point in done if point.scored is not None]
        best = winners(scores, self._search.objectives, self._search.confirm.top)
        self._winners = [done[index] for index in best]
        seeds = self._search.confirm.seeds
        if not seeds or not self._winners:
            return
        for point in self._winners:
            self._confirming[point.number] = [self._trial(self._arm, point.axes, seed) for seed in seeds]
        trials = [self._references[seed] for seed in seeds] if self._references else []
        trials += [trial for fresh in self._confirming.values() for trial in fresh]
        for trial in trials:
            self._add(trial)
        if pending := [trial for trial in trials if self._must_run(trial)]:
            yield pending

    # --- Trials ---

    def _is_pending(self, trial: Trial, retry_failed: bool) -> bool:
        is_pruned = self._stored[trial.id].status == "pruned"
        return not (is_pruned and self._search.pruner is not None) and super()._is_pending(trial, retry_failed)

    def _must_run(self, trial: Trial) -> bool:
        self._add(trial)
        return self._is_pending(trial, self._retry_failed)

    def _add(self, trial: Trial) -> None:
        """Make a trial one of the study's."""
        if trial.id not in {known.id for known in self._trials}:
            self._trials.append(trial)
            self._stored[trial.id] = self._folder.stored(trial)

    def _status(self, trial: Trial) -> str:
        return self._stored[trial.id].status if trial.id in self._stored else self._folder.stored(trial).status

    def _is_stored(self, point: Point) -> bool:
        return all(self._folder.stored(trial).status == "done" for trial in point.trials)

    def _sample(self, trials: Sequence[Trial]) -> Sample:
        """{seed: metrics} of the finished ones."""
        stored = {trial.seed: self._folder.stored(trial) for trial in trials}
        return {seed: found.result.get("metrics", {}) for seed, found in stored.items() if found.status == "done"}

    def _trial(self, arm: Arm, axes: Mapping[str, Any], seed: int) -> Trial:
        variant, problems = resolve(arm, dict(axes), seed)
        assert variant is not None, problems  # it differs in its seed alone from one that resolved
        return self._identify(variant)

    def _identify(self, variant: Variant) -> Trial:
        return identify(self._study, [variant], lambda corpus: self._corpora[corpus].header.digest)[0]

    def _form(self) -> str:
        """All that gives told numbers their meaning."""
        search = self._search
        sample = self._samples[0]
        about = {
            "axes": [asdict(axis) for axis in search.axes],
            "objectives": [asdict(objective) for objective in search.objectives],
            "constraints": [asdict(constraint) for constraint in search.constraints],
            "seeds": self._study.seeds,
            "settings": config_digest(sample.config),
            "data": self._corpora[Corpus.of(sample.config.data)].header.digest,
            "references": [self._references[seed].id for seed in self._study.seeds if seed in self._references],
        }
        return json.dumps(about, sort_keys=True)

    def _show_results(self) -> None:
        super()._show_results()
        if not self._ledger:
            return
        for point in self._winners:
            label = ", ".join(
                f"{axis_label(path, tuple(point.axes))}={value_text(point.axes[path])}" for path in point.axes
            )
            values = point.scored.values if point.scored is not None else ()
            named = zip(self._search.objectives, values, strict=True)
            shown = ", ".join(f"{objective.metric} {value:.4g}" for objective, value in named)
            print(f"winner: {label}  {shown}; the report says whether fresh seeds confirm it")
        if not self._winners:
            print("no winner: no point has results that keep every constraint")

    def _write(self) -> None:
        """search.json and study.json, as far as the search is."""
        assert self._proposals is not None
        search, points = self._search, list(self._ledger.values())
        content = {
            "schema": 1,
            "arm": search.arm,
            "n_trials": search.n_trials,
            "target": search.target,
            "size": search.size,
            "space": [axis.text() for axis in search.axes],
            "axes": [axis.path for axis in search.axes],
            "sampler": search.sampler,
            "pruner": search.pruner,
            "objectives": [asdict(objective) for objective in search.objectives],
            "constraints": [asdict(constraint) for constraint in search.constraints],
            "confirm": {"top": search.confirm.top, "seeds": list(search.confirm.seeds)},
            "seeds": list(self._study.seeds),
            "references": {str(seed): trial.name for seed, trial in self._references.items()},
            "points": [
                {
                    "number": point.number,
                    "axes": point.axes,
                    "state": point.state,
                    "reason": point.reason,
                    "repeats": point.repeats,
                    "trials": [trial.name for trial in point.trials if trial.id in self._stored],
                    "confirmed_by": [trial.name for trial in self._confirming.get(point.number, [])],
                }
                for point in points
            ],
            "winners": [point.number for point in self._winners],
            "importances": self._proposals.importances(),
        }  # fmt: skip
        file = self._folder.path / "search" / "search.json"
        if content != read_mapping(file):
            write_json(file, content)
            self._is_new = True
        super()._write_study()

    def _write_study(self) -> None:
        """Before the points are known, what earlier runs wrote of them stays."""
        if self._proposals is not None or not (self._folder.path / "study.json").exists():
            super()._write_study()


class SearchBusy(SpesError):
    """Another controller runs this search."""


@contextmanager
def _exclusive(folder: Path) -> Iterator[None]:
    """Hold the search; the system lets go when this process dies."""
    folder.mkdir(parents=True, exist_ok=True)
    lock = os.open(folder / "lock", os.O_RDWR | os.O_CREAT, 0o644)
    try:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise SearchBusy(f"{folder} is being searched by another process; wait for it to end") from error
        yield
    finally:
        os.close(lock)
