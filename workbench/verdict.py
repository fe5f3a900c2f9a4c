"""One line of a verification: what was stored, what was found, the rule between them, and whether it holds."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from workbench.terminal import print_table


@dataclass(frozen=True, kw_only=True)
class Check:
    """One comparison."""

    name: str
    stored: str
    """What the trial's folder says."""
    found: str
    """What was computed, or trained, now."""
    rule: str
    """What must hold between the two, with its tolerance."""
    passed: bool
    difference: str = ""
    """How far they are apart; empty where they are equal."""


def equal(name: str, stored: object, found: object, rule: str = "equal") -> Check:
    """Two values that must be the same."""
    difference = "" if stored == found else _gap(stored, found)
    same = stored == found
    return Check(name=name, stored=text(stored), found=text(found), rule=rule, passed=same, difference=difference)


def within(name: str, stored: float | None, found: float | None, tolerance: float) -> Check:
    """Two numbers at most ``tolerance`` × the stored one apart; 0 asks for the same bits."""
    if stored is None or found is None or tolerance == 0:
        return equal(name, stored, found, "same bits")
    distance = abs(found - stored)
    passed = distance <= tolerance * abs(stored)
    rule, gap = f"within {tolerance:.3g} of it", "" if stored == found else _gap(stored, found)
    return Check(name=name, stored=text(stored), found=text(found), rule=rule, passed=passed, difference=gap)


def print_checks(title: str, checks: Sequence[Check]) -> None:
    """Print a table with one line for each comparison."""
    columns = ("check", "stored", "found", "difference", "rule", "verdict")
    rows = [
        (check.name, check.stored, check.found, check.difference, check.rule, "PASS" if check.passed else "FAIL")
        for check in checks
    ]
    print_table(title, columns, rows)


def text(value: object) -> str:
    """A value in a cell; numbers in full, since a last digit may be what differs."""
    if value is None:
        return "-"
    shown = repr(value) if isinstance(value, float) else str(value)
    return shown if len(shown) <= 60 else f"{shown[:57]}..."


def _gap(stored: object, found: object) -> str:
    numbers = [value for value in (stored, found) if isinstance(value, int | float) and not isinstance(value, bool)]
    if len(numbers) < 2:
        return "differs"
    distance = numbers[1] - numbers[0]
    return f"{distance:+.3g} ({distance / abs(numbers[0]):+.2%})" if numbers[0] else f"{distance:+.3g}"
