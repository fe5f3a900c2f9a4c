"""Fixtures that several folders of tests use."""

from __future__ import annotations

from pathlib import Path

import pytest

SHARED_DATA = Path(__file__).resolve().parents[2] / "shared" / "data"


@pytest.fixture(scope="session")
def shared_data() -> Path:
    """The folder of real text and evaluation sets that lies beside the checkout, when there is one."""
    if not (SHARED_DATA / "text").is_dir():
        pytest.skip("needs the shared text in ../shared/data beside the checkout")
    return SHARED_DATA
