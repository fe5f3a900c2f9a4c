"""What is due at which step: learning rate, rounds, merges, validation. Pure functions; steps count from 1.

"After step t" means that t optimizer steps have been taken.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from spes_core.config import MergeConfig, OptimConfig, RunConfig


def learning_rate(optim: OptimConfig, step: int, total_steps: int) -> float:
    """Learning rate of optimizer step ``step`` (1 ≤ step ≤ total_steps): linear warm-up, then the schedule."""
    assert 1 <= step <= total_steps
    warmup_steps = round(optim.warmup_fraction * total_steps)
    if step <= warmup_steps:
        return optim.lr * step / warmup_steps
    if optim.schedule == "constant":
        return optim.lr
    progress = (step - warmup_steps) / max(1, total_steps - warmup_steps)
    shape = 1 - progress if optim.schedule == "linear" else 0.5 * (1 + math.cos(math.pi * progress))
    return optim.lr * (optim.final_lr_fraction + (1 - optim.final_lr_fraction) * shape)


def round_steps(config: RunConfig) -> list[int]:
    """The steps after which a round closes; empty when this run has no rounds."""
    if config.sync.exchange != "rounds":
        return []
    interval, total = config.sync.interval_steps, config.total_steps
    steps = list(range(interval, total + 1, interval))
    return steps if steps and steps[-1] == total else [*steps, total]


def crosses_multiple(interval: int, previous: int, current: int) -> bool:
    """Whether a multiple of ``interval`` lies in (previous, current]."""
    return current // interval > previous // interval


def merge_alpha(merge: MergeConfig, step: int) -> float:
    """α(t) = α·(1 − t/T_merge), and 0 from T_merge on (design, section 7)."""
    return merge.alpha * (1 - step / merge.until_step) if step < merge.until_step else 0.0


def due_merge_alpha(merge: MergeConfig, previous_round_step: int, step: int) -> float:
    """The weight with which the round that closes after ``step`` merges; 0 when no merge is due."""
    due = merge.enabled and crosses_multiple(merge.interval_steps, previous_round_step, step)
    return merge_alpha(merge, step) if due else 0.0


def merge_steps(config: RunConfig) -> list[int]:
    """The steps after which experts are merged."""
    steps = round_steps(config)
    pairs = zip([0, *steps], steps, strict=False)
    return [step for previous, step in pairs if due_merge_alpha(config.merge, previous, step) > 0]


def checkpoint_steps(config: RunConfig) -> list[int]:
    """The steps after which a checkpoint is stored; with rounds, where every interval_rounds-th round has closed.

    None lies at the end: a run that stops there has only its last interval to repeat, and keeps a server to talk to.
    """
    checkpoint, total = config.checkpoint, config.total_steps
    if config.sync.exchange == "rounds":
        interval, candidates = checkpoint.interval_rounds, round_steps(config)
    else:
        interval, candidates = checkpoint.interval_steps, list(range(1, total + 1))
    return [step for step in candidates[interval - 1 :: interval] if step < total] if interval else []


def validation_steps(config: RunConfig) -> list[int]:
    """The steps after which the global model is validated.

    They lie at the first synchronized step at or after each multiple of validation.interval_tokens, and at the end;
    without rounds every step is synchronized.
    """
    total = config.total_steps
    candidates = round_steps(config) or list(range(1, total + 1))
    interval, per_step = config.validation.interval_tokens, config.tokens_per_step
    pairs = zip([0, *candidates], candidates, strict=False)
    return [
        step
        for previous, step in pairs
        if step == total or crosses_multiple(interval, previous * per_step, step * per_step)
    ]
