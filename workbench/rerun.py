"""What a trial gave against what it gives when it is run again: pure comparisons of two trial folders' results."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from spes_core.config import RunConfig
from spes_core.weightsfile import values_digest
from workbench.recording import Recording
from workbench.verdict import Check, equal, text, within

LOSS_TOLERANCE = 0.02
"""Largest relative distance between losses where equal bits cannot be asked for."""

_DECIDING = ("platform", "code_digest", "packages.torch", "packages.numpy", "hardware.cpu", "hardware.gpus")
"""Parts of the provenance that may change the rounding of a product of matrices, or the arithmetic itself."""
_NOT_ENVIRONMENT = ("commit", "dirty", "diff_sha256", "untracked")
_EXACT_MEMORY = ("weights_bytes", "gradients_bytes", "moments_bytes")
_PAYLOAD = ("uplink_payload_bytes", "downlink_payload_bytes")


def environment_differences(stored: Mapping[str, Any], now: Mapping[str, Any]) -> list[tuple[str, str, str]]:
    """(part, then, now) of everything about code, packages and machine that is not what it was."""
    then_flat, now_flat = _flat(stored), _flat(now)
    parts = [part for part in dict.fromkeys((*then_flat, *now_flat)) if part not in _NOT_ENVIRONMENT]
    changed = [part for part in parts if then_flat.get(part) != now_flat.get(part)]
    return [(part, text(then_flat.get(part)), text(now_flat.get(part))) for part in changed]


def why_not_exact(config: RunConfig, changed: list[tuple[str, str, str]]) -> list[str]:
    """Reasons for which a repetition may differ in its last bits; none on the machine that made the trial."""
    reasons = [f"{part} differs" for part, _, _ in changed if part in _DECIDING]
    if config.sync.exchange == "rounds" and config.round.quorum < 1.0:
        reasons.append("round.quorum is below 1, so results depend on timing")
    if config.sync.exchange == "rounds" and config.round.local_time_s is not None:
        reasons.append("round.local_time_s is set, so results depend on timing")
    return reasons


def compare(
    stored_dir: Path, stored: Mapping[str, Any], fresh_dir: Path, fresh: Mapping[str, Any], tolerance: float
) -> list[Check]:
    """Every comparison of two results; ``tolerance`` 0 asks for the same bits, else it is that of losses."""
    checks = [equal("status", stored["status"], fresh["status"])]
    if fresh["status"] != "done":
        message = (fresh.get("error") or {}).get("message", "no reason is known")
        return [*checks, Check(name="re-run", stored="-", found=message, rule="comes to its end", passed=False)]
    if tolerance == 0:
        checks += _weights(stored_dir, fresh_dir)
        checks.append(_equal_trees("expert load", stored["expert_load"], fresh["expert_load"], "same bits"))
    for name in ("eval/loss", "train/loss"):
        checks.append(within(name, stored["metrics"].get(name), fresh["metrics"].get(name), tolerance))
    for name in ("validation", "train"):
        checks.append(_curve(f"{name} curve", stored["curves"][name], fresh["curves"][name], tolerance))
    checks += _costs(stored, fresh)
    return checks


def _weights(stored_dir: Path, fresh_dir: Path) -> Iterator[Check]:
    """Weights after every round, as the server recorded them, and those kept at the end."""
    then, now = (_round_digests(folder) for folder in (stored_dir, fresh_dir))
    if then:
        yield _sequence("weights after each round", then, now)
    for path in sorted((stored_dir / "weights").glob("*.safetensors")):
        again = fresh_dir / "weights" / path.name
        found = values_digest(again) if again.exists() else None
        yield equal(f"weights/{path.name}", values_digest(path), found, "same bits")


def _round_digests(trial_dir: Path) -> list[str]:
    return [str(event.get("digest")) for event in Recording(trial_dir / "events").server_rounds()]


def _sequence(name: str, then: list[str], now: list[str]) -> Check:
    apart = [index for index in range(max(len(then), len(now))) if then[index : index + 1] != now[index : index + 1]]
    stored = f"{len(then)} rounds, last {then[-1]}"
    found = f"{len(now)} rounds, last {now[-1] if now else '-'}"
    gap = f"{len(apart)} rounds differ, first {apart[0]}" if apart else ""
    return Check(name=name, stored=stored, found=found, rule="same bits", passed=not apart, difference=gap)


def _curve(name: str, then: list[dict[str, Any]], now: list[dict[str, Any]], tolerance: float) -> Check:
    """The losses of two curves point by point: the pair that is furthest apart."""
    steps = [[point["step"] for point in curve] for curve in (then, now)]
    if steps[0] != steps[1] or not then:
        return equal(name, f"{len(then)} points", f"{len(now)} points", "points at the same steps")
    pairs = [(point["step"], point["loss_nats"], again["loss_nats"]) for point, again in zip(then, now, strict=True)]
    step, stored, found = max(pairs, key=_distance)
    return within(f"{name}, furthest at step {step}", stored, found, tolerance)


def _distance(pair: tuple[int, float | None, float | None]) -> float:
    _, stored, found = pair
    if stored is None or found is None:
        return 0.0 if stored == found else float("inf")
    return abs(found - stored)


def _costs(stored: Mapping[str, Any], fresh: Mapping[str, Any]) -> Iterator[Check]:
    """What is arithmetic, and so must be equal on any machine: payload bytes, rounds, merges, trained state."""
    for field in _PAYLOAD:
        then, now = ([row[field] for row in result["rounds"]] for result in (stored, fresh))
        if then or now:
            yield _equal_trees(f"{field} by round and node", then, now, "equal")
    if not stored["rounds"] and "comm/uplink_gb" in stored["metrics"]:
        yield equal("comm/uplink_gb", stored["metrics"]["comm/uplink_gb"], fresh["metrics"].get("comm/uplink_gb"))
    for name in ("comm/rounds", "merge/count"):
        if name in stored["metrics"]:
            yield equal(name, stored["metrics"][name], fresh["metrics"].get(name))
    for part in _EXACT_MEMORY:
        then, now = ([row[part] for row in result["memory"]["measured"]] for result in (stored, fresh))
        yield _equal_trees(f"{part} by node", then, now, "equal")


def _equal_trees(name: str, then: list[Any], now: list[Any], rule: str) -> Check:
    """Two nested lists of numbers: their totals are shown, every number is compared."""
    stored, found = _total(then), _total(now)
    difference = "" if then == now else f"{found - stored:+.6g} in total"
    passed = then == now
    return Check(name=name, stored=text(stored), found=text(found), rule=rule, passed=passed, difference=difference)


def _total(tree: Any) -> float:
    if isinstance(tree, list):
        return sum(map(_total, tree))
    return tree or 0


def _flat(tree: Mapping[str, Any], path: str = "") -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for key, value in tree.items():
        flat |= _flat(value, f"{path}{key}.") if isinstance(value, Mapping) else {path + key: value}
    return flat
