"""Fixtures that several folders of tests use."""

from __future__ import annotations

import os
import signal
from pathlib import Path

# A shell that runs the tests in the background hands down an ignored SIGINT; whatever they start would ignore it too.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

# One thread for each process, before torch makes its pool: tests run in parallel and start processes of their own.
os.environ["OMP_NUM_THREADS"] = "1"
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
os.environ["MLFLOW_DISABLE_TELEMETRY"] = "true"

import hypothesis
import pytest

hypothesis.settings.register_profile("shared cores", deadline=None)
hypothesis.settings.load_profile("shared cores")

_ON_ONE_WORKER = (
    *("test_study_end_to_end", "test_verify", "test_remote", "test_shards", "test_mlflow_export"),
    *("test_report", "test_report_pages", "test_data_stdlib"),
)
"""Modules of which the fixtures take longer than most tests: each worker that got some would make them again."""

SHARED_DATA = Path(__file__).resolve().parents[2] / "shared" / "data"


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Name the group of each such module's tests, before they are dealt to workers."""
    for item in items:
        module = item.path.stem
        if module in _ON_ONE_WORKER:
            item.add_marker(pytest.mark.xdist_group(module))


@pytest.fixture(scope="session")
def shared_data() -> Path:
    """The folder of real text and evaluation sets that lies beside the checkout, when there is one."""
    if not (SHARED_DATA / "text").is_dir():
        pytest.skip("needs the shared text in ../shared/data beside the checkout")
    return SHARED_DATA
