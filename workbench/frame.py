"""A study as a table for notebooks: one row a trial (`workbench.load`)."""

from __future__ import annotations

from pathlib import Path

import pandas as pd

from workbench.metrics import METRICS
from workbench.studyfolder import find_study
from workbench.summaries import summaries


def load(study: str | Path, results: str | Path = "results") -> pd.DataFrame:
    """See `workbench.load`."""
    trials = summaries(find_study(str(study), Path(results)))
    axes = list(dict.fromkeys(path for trial in trials for path in trial.axes))
    measured = {name for trial in trials for name in trial.metrics}
    metrics = [name for name in METRICS if name in measured] + sorted(measured - METRICS.keys())
    rows = [
        {
            "trial": trial.name,
            "id": trial.id,
            "arm": trial.arm,
            "role": trial.role,
            "method": trial.method,
            "seed": trial.seed,
            "status": trial.status,
            "error": trial.error,
            **{path: trial.axes.get(path) for path in axes},
            **{name: trial.metrics.get(name, float("nan")) for name in metrics},
        }
        for trial in trials
    ]
    columns = ["trial", "id", "arm", "role", "method", "seed", "status", "error", *axes, *metrics]
    return pd.DataFrame(rows, columns=list(dict.fromkeys(columns)))
