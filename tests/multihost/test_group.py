"""Ranks that exchange gradients on two hosts: the bits of one host, and all of them end when one torchrun does."""

from __future__ import annotations

import os
import signal
import sys
import threading
from dataclasses import replace
from pathlib import Path
from typing import Any

import psutil
import pytest

from spes_core.config import CheckpointConfig, RunConfig
from spes_core.data.tokenize import prepare
from spes_core.events import read_events
from tests.equivalence.participants import assert_bitwise_equal
from tests.multihost.testbed import Testbed
from tests.processes.runs import final_weights, write_corpus
from tests.processes.test_launch import wait_until
from tests.processes.test_launch_engine import config, trial
from workbench.execute import ExecutionSettings, run_trial
from workbench.launch.inventory import Host, Inventory
from workbench.launch.local import open_launcher
from workbench.launch.preflight import check
from workbench.launch.remote import RemoteLauncher

pytestmark = [pytest.mark.multihost, pytest.mark.xdist_group("multihost")]

PORT = 5201


def gradients(steps: int) -> RunConfig:
    """Three ranks: of two numbers alone the sum has the same bits in any order."""
    made = config(steps=steps, exchange="gradients", checkpoint=CheckpointConfig(interval_rounds=2))
    return replace(made, nodes=3)


def test_it(hosts: Testbed, tmp_path: Path) -> None:
    print(gradients(24))
