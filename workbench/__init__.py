"""The study workbench; in a notebook, `load` gives a study's results as a table."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import pandas as pd


def load(study: str | Path, results: str | Path = "results") -> pd.DataFrame:
    """The results of a study, one row a trial, whatever its status.

    ``study``: its folder, its name in the folder ``results``, or its YAML file. Columns: trial, id, arm, role, method,
    seed, status, error, one for each axis (by its path, such as "sync.interval_steps"), and one for each metric (see
    `workbench.metrics`); what a trial lacks is missing. Curves are in each trial's result.json. Raises StudyError when
    there is no such study.
    """
    from workbench import frame

    return frame.load(study, results)
