"""Proposals of a search: the only user of optuna. Asks and tells; runs nothing and knows no result file.

The journal holds, for each form of a search, one optuna study: what was proposed and what it was told. A form is all
that gives the told numbers their meaning (space, objectives, constraints, seeds, settings, data), so that an edited
search never meets numbers or distributions of another one. Each proposal is drawn by a sampler seeded with the number
of proposals before it: a search that was stopped and continued proposes what an uninterrupted one would have.
"""

from __future__ import annotations

import hashlib
import json
import random
import warnings
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from workbench.errors import StudyError
from workbench.searchspace import Axis, Search

if TYPE_CHECKING:
    import optuna

State = Literal["open", "done", "pruned", "failed"]
Params = dict[str, Any]
_STATES: dict[str, State] = {"RUNNING": "open", "COMPLETE": "done", "PRUNED": "pruned", "FAIL": "failed"}
_STARTUP = 5
"""Proposals by chance before the estimator takes over, and points before a pruner compares."""
_BEST_SHARE = 0.25
"""Importance of a setting: how far its values among this best share of the points differ from those among all."""
_IN_RUN, _BETWEEN_SEEDS = 1_000, 10**9
"""Where a pruner's steps begin: those within the run of the first seed, and those after 1, 2, ... seeds."""
_PATIENCE = 10
"""Repeats in a row after which an untested point is drawn by chance."""


@dataclass(frozen=True, kw_only=True)
class Proposal:
    """A point that was proposed, and what became of it."""

    number: int
    params: Params
    state: State
    is_repeat: bool = False


class Proposals:
    """The proposals of one form of a search, kept in a journal file that survives kill −9.

    One process may have a journal open at a time; whoever opens it holds a lock.
    """

    def __init__(self, journal: Path, form: str, search: Search) -> None:
        self._search = search
        optuna = _optuna()
        journal.parent.mkdir(parents=True, exist_ok=True)
        _cut_torn_line(journal)
        self._storage = _open_storage(journal)
        self._name = hashlib.sha256(form.encode()).hexdigest()[:16]
        names = [summary.study_name for summary in optuna.get_all_study_summaries(self._storage)]
        self._earlier = [name for name in names if name != self._name]
        self._study = optuna.create_study(
            storage=self._storage,
            study_name=self._name,
            directions=[objective.goal for objective in search.objectives],
            load_if_exists=True,
            pruner=optuna.pruners.MedianPruner(n_startup_trials=_STARTUP, n_warmup_steps=0),
        )
        self._distributions = {axis.path: _distribution(axis) for axis in search.axes}
        self._close_incomplete()

    def history(self) -> list[Proposal]:
        """All proposals in order, those of a killed process that were never told as "open"."""
        trials = list(self._usable())
        mended = [trial.params for trial in trials if "mends" in trial.user_attrs]
        return [
            Proposal(
                number=trial.number,
                params=dict(trial.params),
                state="done" if trial.params in mended else _STATES[trial.state.name],
                is_repeat="repeat" in trial.user_attrs,
            )
            for trial in trials
            if "mends" not in trial.user_attrs
        ]

    def earlier(self) -> list[Params]:
        """The distinct points that other forms of this search proposed, oldest first."""
        optuna = _optuna()
        found: dict[str, Params] = {}
        for name in self._earlier:
            for trial in optuna.load_study(study_name=name, storage=self._storage).get_trials(deepcopy=False):
                if trial.params and trial.state.name != "RUNNING":
                    found.setdefault(json.dumps(trial.params, sort_keys=True), dict(trial.params))
        return list(found.values())

    def ask(self) -> Proposal:
        """The next proposal; after many repeats in a row, a point of a finite space that nobody proposed yet."""
        history = self.history()
        seed = int.from_bytes(hashlib.sha256(f"{self._search.sampler_seed} {len(history)}".encode()).digest()[:4])
        recent = history[-_PATIENCE:]
        stuck = len(recent) == _PATIENCE and all(proposal.is_repeat for proposal in recent)
        if stuck and (untested := self.untested()):
            self._study.enqueue_trial(random.Random(seed).choice(untested))
        self._study.sampler = _sampler(self._search.sampler, seed)
        trial = self._study.ask(fixed_distributions=self._distributions)
        return Proposal(number=trial.number, params=dict(trial.params), state="open")

    def tell(
        self, proposal: Proposal, values: Sequence[float], violations: Mapping[str, float], *, is_repeat: bool = False
    ) -> None:
        """The point's objectives, and how far it breaks each constraint (0 or below: it is kept)."""
        trial = self._trial(proposal)
        for name, violation in violations.items():
            if name not in trial.constraints:  # a killed process may have come this far
                trial.set_constraint(name, violation)
        if is_repeat:
            trial.set_user_attr("repeat", True)
        self._study.tell(proposal.number, list(values))

    def close(self, proposal: Proposal, state: Literal["pruned", "failed"], *, is_repeat: bool = False) -> None:
        """The point has no result."""
        optuna = _optuna()
        if is_repeat:
            self._trial(proposal).set_user_attr("repeat", True)
        kind = {"pruned": optuna.trial.TrialState.PRUNED, "failed": optuna.trial.TrialState.FAIL}[state]
        self._study.tell(proposal.number, state=kind)

    def add(
        self, params: Params, values: Sequence[float], violations: Mapping[str, float], *, mends: bool = False
    ) -> None:
        """A point whose results are known already, without a proposal, or that mends one that had failed."""
        optuna = _optuna()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            trial = optuna.trial.create_trial(
                params=params, distributions=self._distributions, values=list(values), constraints=dict(violations),
                user_attrs={"mends": True} if mends else {},
            )  # fmt: skip
        self._study.add_trial(trial)

    def should_prune(self, proposal: Proposal, means: Sequence[float]) -> bool:
        """Whether a point with these means after 1, 2, ... seeds falls behind the median of the others."""
        return self._falls_behind(
            proposal, {_BETWEEN_SEEDS + seeds: value for seeds, value in enumerate(means, start=1)}
        )

    def should_stop(self, proposal: Proposal, place: int, loss: float) -> bool:
        """Whether a run with this validation loss falls behind the median of the others at the same place (from 1)."""
        return self._falls_behind(proposal, {_IN_RUN + place: loss})

    def _falls_behind(self, proposal: Proposal, values: Mapping[int, float]) -> bool:
        trial, stored = self._trial(proposal), self._study.get_trials(deepcopy=False)[proposal.number]
        for step, value in values.items():
            if step not in stored.intermediate_values:
                trial.report(value, step)
        return bool(trial.should_prune())

    def importances(self) -> list[Params]:
        """{objective, setting, importance} for each; empty where too few points or one setting leave nothing to say."""
        optuna = _optuna()
        if len(self._distributions) < 2:
            return []
        rows = []
        told = {
            json.dumps(trial.params, sort_keys=True): trial
            for trial in self._study.get_trials(deepcopy=False)
            if trial.state.name == "COMPLETE"
        }
        if len(told) * _BEST_SHARE < 2:
            return []
        # Of a repeated point one counts: a sampler repeats good points, and chance would look like importance.
        distinct = optuna.create_study(directions=self._study.directions)
        distinct.add_trials(told.values())
        for index, objective in enumerate(self._search.objectives):
            sign = 1 if objective.goal == "minimize" else -1
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                found = optuna.importance.get_param_importances(
                    distinct,
                    evaluator=optuna.importance.PedAnovaImportanceEvaluator(target_quantile=_BEST_SHARE),
                    target=lambda trial, index=index, sign=sign: sign * trial.values[index],
                )
            rows += [
                {"objective": objective.metric, "setting": path, "importance": float(share)}
                for path, share in found.items()
            ]
        return rows

    def _usable(self) -> Iterator[optuna.trial.FrozenTrial]:
        """Proposals that came to a whole point."""
        for trial in self._study.get_trials(deepcopy=False):
            if trial.params.keys() == self._distributions.keys():
                yield trial

    def _close_incomplete(self) -> None:
        """Proposals of a process that was killed while they were drawn are no points."""
        optuna = _optuna()
        for trial in self._study.get_trials(deepcopy=False):
            if trial.state == optuna.trial.TrialState.RUNNING and trial.params.keys() != self._distributions.keys():
                self._study.tell(trial.number, state=optuna.trial.TrialState.FAIL)

    def untested(self) -> list[Params]:
        """The points of a finite space that were never proposed; none of a continuum."""
        if self._search.size is None:
            return []
        tested = [proposal.params for proposal in self.history()]
        return [point for point in self._search.points() if point not in tested]

    def _trial(self, proposal: Proposal) -> optuna.Trial:
        """Optuna's handle of a proposal that is not told yet, whichever process asked for it."""
        optuna = _optuna()
        frozen = self._study.get_trials(deepcopy=False)[proposal.number]
        return optuna.Trial(self._study, frozen._trial_id)  # type: ignore[no-any-return]


def _distribution(axis: Axis) -> Any:
    distributions = _optuna().distributions
    if axis.range is None:
        return distributions.CategoricalDistribution(axis.values)
    limits = axis.range
    if axis.is_int:
        return distributions.IntDistribution(
            int(limits.low), int(limits.high), log=limits.log, step=int(limits.step or 1)
        )
    return distributions.FloatDistribution(limits.low, limits.high, log=limits.log, step=limits.step)


def _sampler(name: str, seed: int) -> Any:
    samplers = _optuna().samplers
    return (
        samplers.RandomSampler(seed) if name == "random" else samplers.TPESampler(seed=seed, n_startup_trials=_STARTUP)
    )


class _HeldAlready:
    """In place of optuna's lock file, which outlives a killed process: the caller holds a lock that does not."""

    def acquire(self) -> bool:
        """Nothing to wait for."""
        return True

    def release(self) -> None:
        """Nothing to give back."""


def _open_storage(journal: Path) -> Any:
    _optuna()
    from optuna.storages import JournalStorage
    from optuna.storages.journal import JournalFileBackend

    try:
        return JournalStorage(JournalFileBackend(str(journal), lock_obj=_HeldAlready()))  # type: ignore[arg-type]
    except (ValueError, KeyError) as error:
        message = f"{journal} is damaged ({error}); move it away: stored trials are kept and the search starts anew"
        raise StudyError([message]) from error


def _cut_torn_line(journal: Path) -> None:
    """Take away a last line that a killed process wrote in part; the next one would be appended to it."""
    if not journal.exists():
        return
    content = journal.read_bytes()
    if content and not content.endswith(b"\n"):
        with journal.open("r+b") as file:
            file.truncate(content.rfind(b"\n") + 1)


def _optuna() -> Any:
    try:
        import optuna
    except ImportError as error:
        message = "a search needs optuna; install it with pip install 'spes-workbench[search]'"
        raise StudyError([message]) from error
    optuna.logging.set_verbosity(optuna.logging.ERROR)
    return optuna
