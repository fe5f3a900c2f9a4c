"""A study's folder of results: study.json, and what is stored of each trial."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from workbench.durable import read_mapping, write_json
from workbench.portable import portable
from workbench.spec import Study
from workbench.trials import Trial

UNFINISHED = ("new", "interrupted")
"""Statuses of trials that the next run of a study takes up without being asked."""


@dataclass(frozen=True, kw_only=True)
class Stored:
    """What is known of a trial from earlier runs."""

    status: str
    """"new" when there is no result; else the status of the result."""
    result: dict[str, Any]
    """Content of result.json; empty when there is none."""

    @property
    def will_run(self) -> bool:
        """Whether the trial is taken up without being asked for."""
        return self.status in UNFINISHED


@dataclass(frozen=True)
class StudyFolder:
    """results/<study>: created by the first write."""

    path: Path

    def trial_dir(self, trial: Trial) -> Path:
        """Folder of one trial."""
        return self.path / "trials" / trial.name

    def stored(self, trial: Trial) -> Stored:
        """What is stored of a trial; a result of another identity under the same name counts as none."""
        result = read_mapping(self.trial_dir(trial) / "result.json")
        about = result.get("trial")
        if not isinstance(about, dict) or about.get("id") != trial.id:
            return Stored(status="new", result={})
        return Stored(status=str(result.get("status", "new")), result=result)

    def write_study(self, study: Study, trials: Sequence[Trial], command: str, provenance: dict[str, Any]) -> bool:
        """Write study.json: the question, the arms, the trials, the code at hand; whether that is news.

        Where the numbers come from is in each trial's own files; ``created_at`` stays that of the first writing.
        """
        self.path.mkdir(parents=True, exist_ok=True)
        methods = {trial.arm: trial.config.method for trial in trials}
        report = study.report
        below = [portable(source.path) for source in study.composition.source.sources[:-1]]
        content = {
            "schema": 1,
            "name": study.name,
            "question": study.question,
            "command": command,
            "study_file": portable(study.composition.source.path),
            **({"extends": below} if below else {}),
            "report": {
                "x": report.x,
                "log_x": report.log_x,
                "tolerance": report.tolerance,
                "hero": report.hero,
                "formats": list(report.formats),
            },
            "arms": [{"name": arm.name, "method": methods.get(arm.name), "role": arm.role} for arm in study.arms],
            "trials": [
                {
                    "id": trial.id,
                    "name": trial.name,
                    "arm": trial.arm,
                    "role": trial.role,
                    "axes": trial.axes,
                    "seed": trial.seed,
                }
                for trial in trials
            ],
            "metrics": {"primary": {"name": study.metrics.primary.name, "goal": study.metrics.primary.goal}},
            "equal": list(study.equal),
            **({"search": {"arm": study.search.arm}} if study.search else {}),
            "overrides": [str(override.input_line) for override in study.composition.overrides],
            "composed": study.composition.tree,
            "provenance": provenance,
        }
        file = self.path / "study.json"
        stored = read_mapping(file)
        content["created_at"] = stored.get("created_at") or datetime.now(UTC).isoformat(timespec="seconds")
        if content == stored:
            return False
        write_json(file, content)
        return True

    def is_older_than(self, report: Path, trials: Sequence[Trial]) -> bool:
        """Whether a report was written after everything that it is made from."""
        sources = [self.path / "study.json", self.path / "search" / "search.json"]
        sources += [*(self.trial_dir(trial) / "result.json" for trial in trials)]
        newest = max((source.stat().st_mtime_ns for source in sources if source.exists()), default=0)
        return report.exists() and report.stat().st_mtime_ns > newest
