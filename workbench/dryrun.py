"""What `--dry-run` prints: every trial, what it will cost, and whether it is done already. Creates nothing."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

from workbench.corpora import PreparedCorpus
from workbench.plan import Prediction, merge_warning, predict
from workbench.searchspace import Search
from workbench.spec import Study
from workbench.store import Stored, StudyFolder
from workbench.sweep import axis_label, value_text
from workbench.terminal import duration, print_table
from workbench.trials import Corpus, Variant, config_digest, identify, without_search

_NUMERIC = ("seed", "steps", "rounds", "merges", "trained params", "memory GB/node", "uplink GB/node")
_TRANSFER = "transfer s/round"
"""Column of the predicted time of a round's bytes, where a run states its link."""


def show_plan(
    study: Study, variants: Sequence[Variant], results: Path, corpora: Mapping[Corpus, PreparedCorpus]
) -> None:
    """Print the plan; trials whose corpus is not prepared have no id yet and are shown with their config's digest."""
    samples, variants = variants, without_search(study, variants)
    predictions = [predict(variant.config) for variant in variants]
    axes = axis_paths(variant.axes for variant in variants)
    labels = [axis_label(path, axes) for path in axes]
    has_link = any(prediction.round_transfer_s is not None for prediction in predictions)
    numeric = (*_NUMERIC, _TRANSFER) if has_link else _NUMERIC
    columns = ["trial", "arm", *labels, *numeric, "status"]
    rows, statuses = [], []
    for variant, prediction in zip(variants, predictions, strict=True):
        name, status = _identity(study, variant, results, corpora)
        values = [axis_text(variant.axes, path) for path in axes]
        costs = _costs(prediction)[: len(numeric) - 1]
        rows.append([name, variant.arm.name, *values, str(variant.seed), *costs, status])
        statuses.append(status)
    print(f"{study.name}: {study.question}\n")
    if rows:
        print_table(f"{len(rows)} trials", columns, rows, [*labels, *numeric])
        print()
    if study.search is not None:
        stand_ins = [variant for variant in samples if variant.arm.name == study.search.arm]
        for line in describe_search(study, study.search, stand_ins):
            print(line)
        print()
    for note in _notes(study, variants, predictions, statuses):
        print(note)


def describe_search(study: Study, search: Search, stand_ins: Sequence[Variant]) -> list[str]:
    """The space of a search, how many trials it comes to, and what they cost, from points that stand for the space."""
    costs = [predict(variant.config) for variant in stand_ins]
    size = "a continuum" if search.size is None else f"{search.size:,} points"
    confirmed = len(search.confirm.seeds) * (search.confirm.top + any(arm.role == "reference" for arm in study.arms))
    trials = search.target * len(study.seeds) + confirmed
    goals = ", ".join(f"{objective.goal} {objective.metric}" for objective in search.objectives)
    lines = [
        f"search of {search.arm}: {goals}",
        *(f"  subject to {constraint.text()}" for constraint in search.constraints),
        *(f"  over {axis.text()}" for axis in search.axes),
        f"  space: {size}; {search.target} of them are tried ({search.sampler}) with {len(study.seeds)} seeds each",
    ]
    if search.pruner:
        within = ", and at each validation of the first" if search.prunes_runs else ""
        lines.append(f"  pruner: {search.pruner}, after each seed{within}")
    if search.confirm.seeds:
        seeds = ", ".join(map(str, search.confirm.seeds))
        lines.append(f"  the best {search.confirm.top} are run again with fresh seeds {seeds}: {confirmed} trials")
    ranges = [
        f"{name} {_span([getattr(cost, key) for cost in costs])}"
        for name, key in (
            ("steps", "steps"), ("rounds", "rounds"), ("memory GB/node", "memory_gb"), ("uplink GB/node", "uplink_gb"),
        )
    ]  # fmt: skip
    return [*lines, f"  cost: at most {trials} trials, each of {', '.join(ranges)}"]


def _span(values: Sequence[float]) -> str:
    low, high = f"{min(values):.4g}", f"{max(values):.4g}"
    return low if low == high else f"{low} to {high}"


def axis_paths(points: Iterable[Mapping[str, object]]) -> tuple[str, ...]:
    """Every axis that some trial has, in order; ``points`` are the axes of each."""
    return tuple(dict.fromkeys(path for axes in points for path in axes))


def axis_text(axes: Mapping[str, object], path: str) -> str:
    """The value on an axis, or a dash where the axis does not apply."""
    return value_text(axes[path]) if path in axes else "-"


def explain(stored: Stored) -> str:
    """What will happen to a trial when the study runs."""
    if stored.status == "done":
        return "done"
    if stored.status == "interrupted":
        return "will run (was interrupted)"
    return "will run" if stored.will_run else f"{stored.status} (--retry-failed runs it again)"


def _identity(
    study: Study, variant: Variant, results: Path, corpora: Mapping[Corpus, PreparedCorpus]
) -> tuple[str, str]:
    """Name and status of a trial, as far as they can be known."""
    prepared = corpora.get(Corpus.of(variant.config.data))
    if prepared is None:
        return (
            f"{variant.label} (config {config_digest(variant.config)[:8]})",
            "will run (data not prepared yet)",
        )
    trial = identify(study, [variant], lambda _: prepared.header.digest)[0]
    return trial.name, explain(StudyFolder(results).stored(trial))


def _costs(prediction: Prediction) -> list[str]:
    """A cell for every numeric column but the seed, that of the link last."""
    return [
        str(prediction.steps),
        str(prediction.rounds),
        str(prediction.merges),
        f"{prediction.parameters_trained:,}",
        f"{prediction.memory_gb:.3g}",
        f"{prediction.uplink_gb:.4g}",
        "-" if prediction.round_transfer_s is None else f"{prediction.round_transfer_s:.3g}",
    ]


def _notes(
    study: Study, variants: Sequence[Variant], predictions: Sequence[Prediction], statuses: Sequence[str]
) -> list[str]:
    to_run = sum(status.startswith("will run") for status in statuses)
    notes = [f"{to_run} of {len(variants)} trials will run{' before the search' if study.search else ''}."]
    if study.evaluation.tasks:
        notes.append(f"Each is then scored on {', '.join(study.evaluation.tasks)}, where it is not yet.")
    if any("not prepared" in status for status in statuses):
        notes.append("The corpus is not prepared yet: trials get their ids when the study runs.")
    if warning := merge_warning(variants):
        notes.append(f"warning: {warning}.")
    largest_gb = max((prediction.memory_gb for prediction in predictions), default=0.0)
    if (memory_gb := study.hardware.memory_gb) is not None and largest_gb > memory_gb:
        notes.append(f"warning: {largest_gb:.3g} GB per node exceed hardware.memory_gb ({memory_gb:g}).")
    if (link := study.hardware.link_gbit_per_s) is not None:
        longest_s = max((prediction.uplink_time_s(link) for prediction in predictions), default=0.0)
        notes.append(f"At {link:g} Gbit/s the longest uplink of one node takes {duration(longest_s)} in total.")
    return notes
