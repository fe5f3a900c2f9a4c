"""What a report is made from: study.json and every trial's result.json, read once, grouped by arm, x and seed.

Pure reading: nothing is computed here but the grouping. A trial that left no result is kept, as missing.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from spes_core.errors import ConfigError, Problem
from spes_core.events import as_float
from workbench.mirrored import digest, run_of
from workbench.report.printing import setting
from workbench.trees import lookup

DEFAULT_TOLERANCE = 0.02
"""Relative loss increase that counts as none where the study does not say."""


@dataclass(frozen=True, kw_only=True)
class Trial:
    """One trial and all that its result.json says; fields are empty where it says nothing."""

    id: str
    name: str
    arm: str
    method: str
    role: str
    seed: int
    axes: dict[str, Any]
    status: str
    reason: str
    log_tail: tuple[str, ...]
    metrics: dict[str, float]
    result: dict[str, Any]
    run: str = ""
    """Id of its run in MLflow, where that is known."""
    run_page: str = ""
    """Address of that run's page."""

    @property
    def done(self) -> bool:
        """Whether its numbers may be used."""
        return self.status == "done"

    @property
    def config(self) -> dict[str, Any]:
        """The resolved RunConfig as a dict."""
        return dict(self.result.get("config") or {})

    @property
    def exchanges_gradients(self) -> bool:
        """Whether gradients are exchanged inside every step, so that no clock tells exchange from compute."""
        return bool(lookup(self.config, "sync.exchange") == "gradients")

    def part(self, name: str) -> Any:
        """A part of the result ("curves", "memory", ...), or an empty dict."""
        return self.result.get(name) or {}


@dataclass(frozen=True, kw_only=True)
class Series:
    """What one line of a figure stands for: an arm and, in studies of several axes, the axes that are not x."""

    arm: str
    method: str
    role: str
    others: tuple[tuple[str, Any], ...] = ()

    @property
    def label(self) -> str:
        """The arm's name, with the other axes behind it."""
        extra = ", ".join(setting(path, value) for path, value in self.others)
        return f"{self.arm} ({extra})" if extra else self.arm


@dataclass(frozen=True, kw_only=True)
class Cell:
    """The trials of one series at one x (None: x does not apply to the series), by seed."""

    series: Series
    x: Any
    trials: tuple[Trial, ...]

    def values(self, metric: str) -> dict[int, float]:
        """The metric of every finished trial that has it, by seed."""
        return {t.seed: t.metrics[metric] for t in self.trials if t.done and metric in t.metrics}

    @property
    def done(self) -> list[Trial]:
        """The finished trials."""
        return [trial for trial in self.trials if trial.done]

    @property
    def exchanges_gradients(self) -> bool:
        """Whether gradients are exchanged inside every step of its trials."""
        return any(trial.exchanges_gradients for trial in self.done)


@dataclass(frozen=True, kw_only=True)
class Evidence:
    """A study with its trials."""

    folder: Path
    study: dict[str, Any]
    trials: tuple[Trial, ...]
    strays: tuple[str, ...]
    """Trial folders on disk that the study does not name (from an earlier form of it); they are not used."""

    @property
    def metric(self) -> str:
        """The primary metric's name."""
        return str(self._primary.get("name", "eval/loss"))

    @property
    def smaller_is_better(self) -> bool:
        """Whether the primary metric is minimized."""
        return str(self._primary.get("goal", "minimize")).startswith("min")

    @property
    def _primary(self) -> dict[str, Any]:
        return dict((self.study.get("metrics") or {}).get("primary") or {})

    @property
    def report(self) -> dict[str, Any]:
        """The study's report settings."""
        return dict(self.study.get("report") or {})

    @property
    def tolerance(self) -> float:
        """Largest relative loss increase that counts as equal to the reference."""
        value = self.report.get("tolerance")
        return DEFAULT_TOLERANCE if value is None else float(value)

    @property
    def leads_with_bytes(self) -> bool:
        """Whether the study is about what bytes buy: report.hero."""
        return bool(self.report.get("hero") == "bytes")

    @property
    def arms(self) -> list[str]:
        """Names of the arms in the study's order."""
        named = [str(arm["name"]) for arm in self.study.get("arms") or []]
        return list(dict.fromkeys([*named, *(trial.arm for trial in self.trials)]))

    @cached_property
    def x_path(self) -> str | None:
        """The axis that figures run along: report.x, or else the axis that varies, with any that it decides."""
        if self.report.get("x"):
            return str(self.report["x"])
        values: dict[str, set[str]] = {}
        for trial in self.trials:
            for path, value in trial.axes.items():
                values.setdefault(path, set()).add(str(value))
        varying = [path for path, seen in values.items() if len(seen) > 1]
        return next((path for path in varying if all(self._fixed(self.trials, p, [path]) for p in varying)), None)

    @staticmethod
    def _fixed(trials: Iterable[Trial], path: str, by: Sequence[str]) -> bool:
        """Whether the axes ``by`` decide the value of ``path`` in these trials, as in zipped axes and constant ones."""
        seen: dict[tuple[str, ...], set[str]] = {}
        for trial in trials:
            seen.setdefault(tuple(str(trial.axes.get(p)) for p in by), set()).add(str(trial.axes.get(path)))
        return all(len(values) == 1 for values in seen.values())

    @cached_property
    def _telling(self) -> dict[str, list[str]]:
        """By arm, the axes beside x that tell its trials apart: those that neither x nor one another decide."""
        found: dict[str, list[str]] = {}
        for arm in self.arms:
            trials = [trial for trial in self.trials if trial.arm == arm]
            kept: list[str] = []
            for path in sorted({path for trial in trials for path in trial.axes} - {self.x_path}):
                if not self._fixed(trials, path, [*([self.x_path] if self.x_path else []), *kept]):
                    kept.append(path)
            found[arm] = kept
        return found

    @cached_property
    def cells(self) -> list[Cell]:
        """Trials grouped by series and x: series in the study's order, x ascending (words in the study's order)."""
        grouped: dict[tuple[Series, Any], list[Trial]] = {}
        for trial in self.trials:
            others = tuple((path, _plain(trial.axes.get(path))) for path in self._telling[trial.arm])
            series = Series(arm=trial.arm, method=trial.method, role=trial.role, others=others)
            x = _plain(trial.axes.get(self.x_path)) if self.x_path else None
            grouped.setdefault((series, x), []).append(trial)
        order = {series: index for index, series in enumerate(dict.fromkeys(s for s, _ in grouped))}
        arms = {arm: index for index, arm in enumerate(self.arms)}
        keys = sorted(grouped, key=lambda key: (arms[key[0].arm], order[key[0]], self._x_key(key[1])))
        return [Cell(series=s, x=x, trials=tuple(sorted(grouped[s, x], key=lambda t: t.seed))) for s, x in keys]

    @cached_property
    def series(self) -> list[Series]:
        """All series, in the study's order of arms."""
        return list(dict.fromkeys(cell.series for cell in self.cells))

    def cells_of(self, series: Series) -> list[Cell]:
        """The cells of one series, x ascending."""
        return [cell for cell in self.cells if cell.series == series]

    @cached_property
    def x_values(self) -> list[Any]:
        """Every value of x in the study, ascending, words in the study's order; empty where no axis applies."""
        return sorted({cell.x for cell in self.cells if cell.x is not None}, key=self._x_key)

    def _x_key(self, value: Any) -> tuple[int, float]:
        """Orders None, numbers, then words as the study first names them."""
        if value is None:
            return (0, 0.0)
        if isinstance(value, int | float) and not isinstance(value, bool):
            return (1, float(value))
        return (2, float(self._words.index(value)))

    @cached_property
    def _words(self) -> list[Any]:
        return list(dict.fromkeys(_plain(trial.axes.get(self.x_path)) for trial in self.trials if self.x_path))

    @cached_property
    def reference(self) -> Series | None:
        """The series that others are compared with: the first of role "reference"."""
        return next((series for series in self.series if series.role == "reference"), None)

    @cached_property
    def gradient_series(self) -> list[Series]:
        """The series that exchange gradients inside every step."""
        return list(dict.fromkeys(cell.series for cell in self.cells if cell.exchanges_gradients))

    def reference_cell(self, cell: Cell) -> Cell | None:
        """The reference's cell to compare ``cell`` with: at the same x where the reference has an x."""
        if self.reference is None or cell.series == self.reference:
            return None
        cells = self.cells_of(self.reference)
        return next((other for other in cells if other.x in (None, cell.x)), None)

    @property
    def done(self) -> list[Trial]:
        """The finished trials."""
        return [trial for trial in self.trials if trial.done]

    @property
    def seeds(self) -> list[int]:
        """All seeds of the study."""
        return sorted({trial.seed for trial in self.trials})


def read(study_dir: Path) -> Evidence:
    """Read a study folder. Raises ConfigError when study.json is missing or unreadable; trials may be missing."""
    path = study_dir / "study.json"
    try:
        study = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ConfigError([Problem(str(path), "does not exist; give the folder of a study, results/<study>")]) from None
    except (OSError, ValueError) as error:
        raise ConfigError([Problem(str(path), f"cannot be read: {error}")]) from error
    if not isinstance(study, dict):
        raise ConfigError([Problem(str(path), "must hold one JSON object, as study.py writes it")])
    methods = {str(arm["name"]): str(arm.get("method", "")) for arm in study.get("arms") or []}
    trials = tuple(_read_trial(study_dir, entry, methods) for entry in study.get("trials") or [])
    return Evidence(folder=study_dir, study=study, trials=trials, strays=_strays(study_dir, trials))


def _read_trial(study_dir: Path, entry: Mapping[str, Any], methods: Mapping[str, str]) -> Trial:
    name, arm = str(entry["name"]), str(entry["arm"])
    folder = study_dir / "trials" / name
    content = _bytes_of(folder / "result.json")
    result, status, reason = _read_result(content, str(entry.get("id", "")))
    run, run_page = (run_of(folder, digest(content)) if isinstance(content, bytes) and result else None) or ("", "")
    error = result.get("error") or {}
    return Trial(
        id=str(entry.get("id", "")),
        name=name,
        arm=arm,
        method=str((result.get("trial") or {}).get("method") or methods.get(arm) or arm),
        role=str(entry.get("role") or "treatment"),
        seed=int(entry.get("seed") or 0),
        axes=dict(entry.get("axes") or {}),
        status=status,
        reason=reason or _reason(error),
        log_tail=tuple(str(line) for line in error.get("log_tail") or ()),
        metrics=_finite_numbers(result.get("metrics") or {}),
        result=result,
        run=run,
        run_page=run_page,
    )


def _bytes_of(path: Path) -> bytes | OSError:
    try:
        return path.read_bytes()
    except OSError as error:
        return error


def _read_result(content: bytes | OSError, identity: str) -> tuple[dict[str, Any], str, str]:
    """The result, its status, and why there is none. A result of another identity is not this trial's."""
    if isinstance(content, FileNotFoundError):
        return {}, "missing", "no result.json: not started, or not finished yet"
    try:
        if isinstance(content, OSError):
            raise content
        result = json.loads(content.decode("utf-8"))
    except (OSError, ValueError) as error:
        return {}, "missing", f"result.json cannot be read: {error}"
    if not isinstance(result, dict):
        return {}, "missing", "result.json holds no JSON object"
    found = (result.get("trial") or {}).get("id")
    if found != identity:
        return (
            {},
            "missing",
            f"result.json is of trial {found}, made under other settings or data, and is not used",
        )
    return result, str(result.get("status", "failed")), ""


def _reason(error: Mapping[str, Any]) -> str:
    message, process = str(error.get("message") or ""), str(error.get("process") or "")
    return f"{process}: {message}" if process and process not in message else message


def _finite_numbers(metrics: Mapping[str, Any]) -> dict[str, float]:
    """Numbers only; "nan" and "inf" (written as strings) are left out, so that no mean can contain them."""
    numbers = {name: as_float(value) for name, value in metrics.items() if value is not None}
    return {name: value for name, value in numbers.items() if abs(value) < float("inf")}


def _strays(study_dir: Path, trials: Iterable[Trial]) -> tuple[str, ...]:
    folder, named = study_dir / "trials", {trial.name for trial in trials}
    on_disk = sorted(path.name for path in folder.iterdir() if path.is_dir()) if folder.is_dir() else []
    return tuple(name for name in on_disk if name not in named)


def _plain(value: Any) -> Any:
    """A hashable form of an axis value."""
    return json.dumps(value) if isinstance(value, dict | list) else value
