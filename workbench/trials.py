"""From a study to its trials: arms × axes × seeds, each a complete RunConfig with an identity.

`expand` knows no data; `identify` adds it. The identity of a trial is a digest of what decides its numbers: the
resolved configuration and the tokens. Names, paths, hosts and devices are outside it.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from spes_core.config import DataConfig, RunConfig, digest, from_dict, inapplicable
from spes_core.errors import ConfigError, DataError, Problem
from spes_core.filedigest import file_digest
from spes_core.rules import concerns, named_paths
from spes_core.structure import build
from workbench.doubt import ANYTHING, holds_anyway, is_open, is_setting
from workbench.equality import differences
from workbench.errors import StudyError
from workbench.metrics import domain_of
from workbench.spec import Arm, Study
from workbench.sweep import at, axis_label, value_text
from workbench.trees import Tree, covers, merge

_LONGEST_NAME = 120


@dataclass(frozen=True, kw_only=True)
class Variant:
    """A trial before its data are known."""

    arm: Arm
    axes: dict[str, Any]
    """Value by RunConfig path, of the axes that this run reads."""
    seed: int
    config: RunConfig

    @property
    def label(self) -> str:
        """Arm, axes and seed as a name: "spes-interval_steps=50-seed=0"."""
        labels = [f"{axis_label(path, tuple(self.axes))}={value_text(value)}" for path, value in self.axes.items()]
        name = "-".join([self.arm.name, *labels, f"seed={self.seed}"])
        return re.sub(r"[^A-Za-z0-9._=+,-]+", "_", name)[:_LONGEST_NAME]


@dataclass(frozen=True, kw_only=True)
class Trial:
    """One fully resolved run of a study."""

    id: str
    """16 hex digits; see `identity`."""
    name: str
    """Arm, axes, seed and the first 8 digits of the id: also the name of its folder."""
    study: str
    arm: str
    role: str
    axes: dict[str, Any]
    seed: int
    config: RunConfig


@dataclass(frozen=True, kw_only=True)
class Corpus:
    """The settings that decide how a corpus is prepared."""

    path: str
    """data.corpus; of a mixture the names of its domains."""
    tokenizer_vocab_size: int
    validation_fraction: float
    domains: tuple[tuple[str, str], ...] = ()
    """Name and corpus of each domain, in order."""
    tokenizer: str = "bpe"
    text_field: str = "text"
    max_repetition: float | None = None

    @classmethod
    def of(cls, data: DataConfig) -> Corpus:
        """The corpus that a run reads."""
        return cls(
            path=", ".join(data.domains) or data.corpus,
            tokenizer_vocab_size=data.tokenizer_vocab_size,
            validation_fraction=data.validation_fraction,
            domains=tuple((name, domain.corpus) for name, domain in data.domains.items()),
            tokenizer=data.tokenizer,
            text_field=data.text_field,
            max_repetition=data.max_repetition,
        )


def expand(study: Study) -> list[Variant]:
    """All trials of a study in order, each once.

    Raises StudyError with every mistake of the study, its runs and their comparison.
    """
    variants: list[Variant] = []
    broken: list[tuple[Variant, Sequence[Problem]]] = []
    mistakes = list(study.mistakes)
    for arm in study.arms:
        points = arm.sweep.points()
        if not points:
            where = f"arms.{arm.name}"
            mistakes.append(study.locate(Problem(where, "has no point left: sweep.exclude leaves out all of its axes")))
        for axes in points:
            for seed in study.seeds:
                variant, problems = resolve(arm, axes, seed)
                if variant is not None:
                    variants.append(variant)
                elif (draft := _draft(arm, axes, seed)) is not None:
                    broken.append((draft, problems))
                certain = [problem for problem in problems if holds_anyway(problem, arm.open_paths)]
                mistakes += [study.locate_run(arm, axes, problem) for problem in certain]
    mistakes += _mistakes_between(study, variants, broken)
    mistakes += _unmeasured_domain(study, variants)
    if mistakes:
        raise StudyError(mistakes)
    return _distinct(variants)


def _mistakes_between(
    study: Study, variants: Sequence[Variant], broken: Sequence[tuple[Variant, Sequence[Problem]]]
) -> list[str]:
    """The rules between runs, as far as they do not depend on what is wrong; ``broken``: runs that break rules."""
    open_paths = {path for arm in study.arms for path in arm.open_paths}
    failed = {path for _, problems in broken for problem in problems for path in named_paths(problem)}
    unsure = {draft.arm.name for draft, _ in broken} | {arm.name for arm in study.arms if arm.open_paths}
    order = {arm.name: index for index, arm in enumerate(study.arms)}
    all_runs = sorted([*variants, *(draft for draft, _ in broken)], key=lambda run: order[run.arm.name])
    known = [run for run in all_runs if ANYTHING not in run.arm.open_paths]
    mistakes = [
        *_repeated_arms(study, [variant for variant in variants if variant.arm.name not in unsure]),
        *differences(study, known, open_paths | failed),
        *_several_references(study, known),
    ]
    is_whole = {run.arm.name for run in all_runs} == set(study.composition.tree.get("arms") or ())
    x = study.report.x
    if x is not None and is_setting(x) and is_whole and not is_open(x, open_paths):
        mistakes += _unswept_x(study, all_runs)
    return mistakes


def without_search(study: Study, variants: Sequence[Variant]) -> list[Variant]:
    """The variants that run whatever is found: all but those that stand for the space of a search."""
    return [variant for variant in variants if study.search is None or variant.arm.name != study.search.arm]


def identify(study: Study, variants: Sequence[Variant], data_digest: Callable[[Corpus], str]) -> list[Trial]:
    """The variants as trials, on data with the given digests."""
    trials = []
    for variant in variants:
        id = identity(variant.config, data_digest(Corpus.of(variant.config.data)))
        trial = Trial(
            id=id,
            name=f"{variant.label}-{id[:8]}",
            study=study.name,
            arm=variant.arm.name,
            role=variant.arm.role,
            axes=dict(variant.axes),
            seed=variant.seed,
            config=variant.config,
        )
        trials.append(trial)
    return trials


def with_init_digest(config: RunConfig) -> RunConfig:
    """The run with the digest of the weights file that it starts from, and the file's absolute path.

    A file that is only on the hosts of the run is taken at its word, when the digest is given. Raises ConfigError.
    """
    if config.init.kind == "random" or config.init.weights is None:
        return config
    path, given = Path(config.init.weights).absolute(), config.init.digest
    if given is None or path.exists():
        try:
            found = file_digest(path)
        except DataError as error:
            raise ConfigError([Problem("init.weights", f"cannot be used: {error}")]) from error
        if given not in (None, found):
            message = f"({given}) must be the SHA-256 of init.weights, which is {found}; correct it or leave it out"
            raise ConfigError([Problem("init.digest", message)])
        given = found
    return replace(config, init=replace(config.init, weights=str(path), digest=given))


def config_digest(config: RunConfig) -> str:
    """SHA-256 (hex) of all that decides a run's numbers except its tokens: where the corpora lie is left out."""
    domains = {name: replace(domain, corpus="") for name, domain in config.data.domains.items()}
    return digest(replace(config, data=replace(config.data, corpus="", domains=domains)))


def identity(config: RunConfig, data_digest: str) -> str:
    """The id of a run on data with a digest: the first 16 hex digits of SHA-256 over both digests."""
    return hashlib.sha256(f"{config_digest(config)} {data_digest}".encode()).hexdigest()[:16]


def resolve(arm: Arm, axes: Mapping[str, Any], seed: int) -> tuple[Variant | None, Sequence[Problem]]:
    """One run, without the axes that it does not read; or why it cannot run."""
    try:
        config = from_dict(_settings(arm, axes, seed))
        unread = inapplicable(config)
        read = {path: value for path, value in axes.items() if not any(covers(outer, path) for outer in unread)}
        config = with_init_digest(from_dict(_settings(arm, read, seed)))
    except ConfigError as error:
        return None, [*error.problems, *_wrong_weights(arm, axes, seed, error.problems)]
    return Variant(arm=arm, axes=read, seed=seed, config=config), ()


def _draft(arm: Arm, axes: Mapping[str, Any], seed: int) -> Variant | None:
    """One run that may break rules, to be compared with others; None when not even its types are right."""
    try:
        config = build(RunConfig, _settings(arm, axes, seed))
    except ConfigError:
        return None
    return Variant(arm=arm, axes=dict(axes), seed=seed, config=config)


def _wrong_weights(arm: Arm, axes: Mapping[str, Any], seed: int, known: Sequence[Problem]) -> Sequence[Problem]:
    """What is wrong with the initial weights of a run that breaks other rules."""
    draft = _draft(arm, axes, seed)
    if draft is None or draft.config.init.weights is None or any(concerns(problem, ["init"]) for problem in known):
        return ()
    try:
        with_init_digest(draft.config)
    except ConfigError as error:
        return error.problems
    return ()


def _settings(arm: Arm, axes: Mapping[str, Any], seed: int) -> Tree:
    return merge(merge(arm.settings, at(dict(axes))), {"seed": seed})


def _key(variant: Variant) -> str:
    """What tells runs apart before their tokens are known: the digest leaves out how a corpus is prepared."""
    return f"{digest(variant.config)} {Corpus.of(variant.config.data)}"


def _distinct(variants: Sequence[Variant]) -> list[Variant]:
    """The variants without repeats; of equal ones the first stays."""
    first: dict[str, Variant] = {}
    for variant in variants:
        first.setdefault(_key(variant), variant)
    return list(first.values())


def _unswept_x(study: Study, variants: Sequence[Variant]) -> list[str]:
    """report.x must be an axis of some arm: a report would otherwise have nothing along it."""
    x = study.report.x
    axes = list(dict.fromkeys(path for variant in variants for path in variant.axes))
    if x is None or x in axes:
        return []
    message = f"({x}) is no axis of any arm; axes: {', '.join(axes) or 'none'}; sweep it, or leave report.x out"
    return [study.locate(Problem("report.x", message))]


def _unmeasured_domain(study: Study, variants: Sequence[Variant]) -> list[str]:
    """A metric of one domain must be of one that all runs are validated on that it is asked of.

    Those are all where it is the primary one, the searched arm's where a search asks for it, and the reference's where
    a limit is relative to that.
    """
    primary = study.metrics.primary.name
    wanted: list[tuple[str, str, Sequence[Variant]]] = [("metrics.primary.name", primary, variants)]
    if (search := study.search) is not None:
        searched = [variant for variant in variants if variant.arm.name == search.arm]
        compared = [*searched, *(variant for variant in variants if variant.arm.role == "reference")]
        wanted += [("search.objective", objective.metric, searched) for objective in search.objectives]
        for index, limit in enumerate(search.constraints):
            whose = searched if limit.tolerance is None else compared
            wanted.append((f"search.constraints[{index}].metric", limit.metric, whose))
    mistakes = []
    for path, metric, asked in wanted:
        domain = domain_of(metric)
        lacking = [variant for variant in asked if domain is not None and domain not in variant.config.data.domains]
        if lacking:
            names = ", ".join(lacking[0].config.data.domains) or "none"
            message = f"is of the domain {domain}, not among data.domains of arm {lacking[0].arm.name} ({names})"
            mistakes.append(study.locate(Problem(path, f"({metric}) {message}")))
    return mistakes


def _several_references(study: Study, variants: Sequence[Variant]) -> list[str]:
    """A search compares each of its points with the reference, so that must be one point."""
    arm = next((arm for arm in study.arms if arm.role == "reference"), None)
    if study.search is None or arm is None:
        return []
    mine = [variant for variant in variants if variant.arm is arm]
    points = {_key(replace(variant, config=replace(variant.config, seed=0))): variant for variant in mine}
    if len(points) < 2:
        return []
    axes = ", ".join(dict.fromkeys(path for variant in points.values() for path in variant.axes))
    message = f"must be one point where there is a search, and has {len(points)}: take {axes} away with a sweep of null"
    return [study.locate(Problem(f"arms.{arm.name}", message))]


def _repeated_arms(study: Study, variants: Sequence[Variant]) -> list[str]:
    """Arms of which every run is already in an earlier arm: a comparison with itself is a mistake."""
    seen: set[str] = set()
    mistakes = []
    for arm in study.arms:
        keys = {_key(variant) for variant in variants if variant.arm is arm}
        if keys and keys <= seen:
            message = "resolves to runs that earlier arms already hold; change what it sets, or remove it"
            mistakes.append(study.locate(Problem(f"arms.{arm.name}", message)))
        seen |= keys
    return mistakes
