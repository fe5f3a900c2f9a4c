"""Schedules: when rounds, merges and validations are due, and how large steps are."""

from __future__ import annotations

import pytest

from spes_core.config import MergeConfig, OptimConfig, RunConfig, from_dict
from spes_core.schedules import (
    due_merge_alpha,
    learning_rate,
    merge_alpha,
    merge_steps,
    round_steps,
    validation_steps,
)


def config_of(
    total_steps: int, interval_steps: int, merge_interval_steps: int = 50, until_step: int = 400
) -> RunConfig:
    return from_dict(
        {
            "budget_tokens": total_steps * 128 * 32,
            "sync": {"interval_steps": interval_steps},
            "merge": {"interval_steps": merge_interval_steps, "until_step": until_step},
        }
    )


def test_a_final_round_closes_when_the_last_step_is_no_multiple_of_h() -> None:
    assert round_steps(config_of(25, 10)) == [10, 20, 25]
    assert round_steps(config_of(20, 10)) == [10, 20]
    assert round_steps(config_of(5, 10)) == [5]


@pytest.mark.parametrize("interval_steps", [1, 7, 10, 25, 50])
def test_sweeping_h_up_to_the_merge_interval_does_not_change_the_number_of_merges(
    interval_steps: int,
) -> None:
    assert len(merge_steps(config_of(400, interval_steps, until_step=300))) == 5


def test_merges_happen_at_the_first_round_at_or_after_each_multiple() -> None:
    assert merge_steps(config_of(200, 30, until_step=1000)) == [60, 120, 150, 200]


def test_merge_weight_falls_linearly_to_zero_and_stays_there() -> None:
    merge = MergeConfig(alpha=0.2, until_step=100)
    assert merge_alpha(merge, 0) == 0.2
    assert merge_alpha(merge, 50) == pytest.approx(0.1)
    assert [merge_alpha(merge, step) for step in (100, 101, 10**9)] == [0, 0, 0]


def test_nothing_is_merged_when_merging_is_off() -> None:
    assert due_merge_alpha(MergeConfig(enabled=False), 0, 50) == 0


def test_learning_rate_rises_peaks_and_ends_at_the_stated_fraction() -> None:
    optim = OptimConfig(lr=1.0, warmup_fraction=0.1, final_lr_fraction=0.1, schedule="cosine")
    rates = [learning_rate(optim, step, 100) for step in range(1, 101)]
    assert rates[:10] == pytest.approx([step / 10 for step in range(1, 11)])
    assert rates[9:] == sorted(rates[9:], reverse=True)
    assert rates[-1] == pytest.approx(0.1)


@pytest.mark.parametrize("schedule", ["constant", "linear", "cosine"])
def test_one_step_is_enough_for_every_schedule(schedule: str) -> None:
    assert learning_rate(OptimConfig(lr=1.0, schedule=schedule), 1, 1) > 0  # type: ignore[arg-type]


def test_validation_is_due_at_the_first_round_after_each_multiple_and_at_the_end() -> None:
    config = from_dict(
        {
            "budget_tokens": 100 * 4096,
            "sync": {"interval_steps": 30},
            "validation": {"interval_tokens": 40 * 4096},
        }
    )
    assert validation_steps(config) == [60, 90, 100]


def test_without_rounds_validation_is_due_exactly_at_each_multiple() -> None:
    config = from_dict(
        {
            "budget_tokens": 100 * 4096,
            "sync": {"exchange": "gradients"},
            "validation": {"interval_tokens": 40 * 4096},
        }
    )
    assert validation_steps(config) == [40, 80, 100]
