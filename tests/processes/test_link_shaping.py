"""Paced transfers take as long as ones that the kernel shapes."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


def reason_to_skip() -> str:
    """Why this machine cannot shape a link; empty when it can."""
    if sys.platform != "linux" or os.geteuid() != 0:
        return "kernel shaping needs root on Linux"
    if missing := [tool for tool in ("ip", "tc", "unshare", "nsenter") if shutil.which(tool) is None]:
        return f"kernel shaping needs {', '.join(missing)}"
    trial = (
        "ip link add here type veth peer name there && tc qdisc add dev here root tbf rate 1mbit burst 16kb latency 1ms"
    )
    done = subprocess.run(["unshare", "--net", "sh", "-c", trial], capture_output=True, text=True, check=False)
    return f"no shaped network namespace can be made here: {done.stderr.strip()}" if done.returncode else ""


def test_paced_transfers_take_as_long_as_those_that_the_kernel_shapes() -> None:
    if reason := reason_to_skip():
        print(f"skipped: {reason}")
        pytest.skip(reason)
    # Other work on the machine can only slow a transfer down: of three measurements the least disturbed counts.
    command, off = ["unshare", "--net", sys.executable, "-m", "tests.processes.shaped_link"], []
    for _ in range(3):
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60, check=False)
        assert done.returncode == 0, done.stderr
        rows = json.loads(done.stdout)
        assert len(rows) == 10
        off = [row for row in rows if row["paced_s"] != pytest.approx(row["kernel_s"], rel=0.1)]
        if not off:
            return
    pytest.fail(f"in each of three measurements some transfer differed; in the last: {off}")
