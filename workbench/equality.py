"""The equality gate: arms are compared only when what the study declares equal is equal, outside the declared axes."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import TYPE_CHECKING, Any

from spes_core.config import to_dict
from spes_core.errors import Problem
from workbench.doubt import is_open
from workbench.sweep import value_text
from workbench.trees import covers, leaves, lookup

if TYPE_CHECKING:
    from workbench.spec import Study
    from workbench.trials import Variant

_BUDGET = "budget_tokens"
_STEPS = (_BUDGET, "data.global_batch_sequences", "data.sequence_length")


def differences(study: Study, variants: Sequence[Variant], open_paths: Collection[str] = ()) -> list[str]:
    """One line for each setting under the study's ``equal`` that differs between two arms; empty when all agree.

    ``open_paths``: settings that are left out, because of other mistakes about them.
    """
    firsts = {variant.arm.name: variant for variant in reversed(variants)}
    if len(firsts) < 2:
        return []
    axes = {path for arm in study.arms for path in arm.sweep.axes}
    mistakes = []
    for path, values in _compared(firsts, study.equal, axes | set(open_paths)).items():
        if len({repr(value) for value in values.values()}) > 1:
            shown = ", ".join(f"{arm} has {value_text(value)}" for arm, value in values.items())
            message = f"must be equal in all arms ({shown}); set it under run, or take it out of equal"
            mistakes.append(_locate(study, path, list(values), message))
    is_known = not any(is_open(path, open_paths) for path in _STEPS)
    if _BUDGET in study.equal and not any(covers(axis, _BUDGET) for axis in axes) and not mistakes and is_known:
        mistakes += _rounded_budgets(study, variants)
    return mistakes


def _compared(firsts: dict[str, Variant], equal: Sequence[str], axes: set[str]) -> dict[str, dict[str, Any]]:
    """{path: {arm: value}} of every single setting that must be equal."""
    trees = {arm: to_dict(variant.config) for arm, variant in reversed(firsts.items())}
    compared: dict[str, dict[str, Any]] = {}
    for outer in equal:
        for arm, tree in trees.items():
            value = lookup(tree, outer)
            settings = leaves(value, outer) if isinstance(value, dict) else [(outer, value)]
            for path, leaf in settings:
                if not any(covers(axis, path) for axis in axes):
                    compared.setdefault(path, {})[arm] = leaf
    return compared


def _rounded_budgets(study: Study, variants: Sequence[Variant]) -> list[str]:
    """Whole steps must come to the same number of tokens wherever arms meet at the same values of their common axes."""
    common = set.intersection(*({*arm.sweep.axes} for arm in study.arms))
    tokens: dict[str, dict[str, int]] = {}
    for variant in variants:
        point = ", ".join(f"{path} {value_text(value)}" for path, value in variant.axes.items() if path in common)
        trained = variant.config.total_steps * variant.config.tokens_per_step
        tokens.setdefault(point, {})[variant.arm.name] = trained
    mistakes = []
    for point, by_arm in tokens.items():
        if len(set(by_arm.values())) > 1:
            shown = ", ".join(f"{arm} trains on {count}" for arm, count in by_arm.items())
            where = f" at {point}" if point else ""
            message = f"in whole steps differs between arms{where} ({shown}); make it a multiple of every arm's step"
            mistakes.append(_locate(study, _BUDGET, list(by_arm), message))
    return mistakes


def _locate(study: Study, path: str, arms: Sequence[str], message: str) -> str:
    for arm in arms:
        if study.composition.written(f"arms.{arm}.{path}"):
            return study.locate(Problem(f"arms.{arm}.{path}", message))
    return study.locate(Problem(f"run.{path}", message))
