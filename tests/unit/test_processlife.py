"""The end of a process: its own exit status, whatever threads of libraries do meanwhile."""

from __future__ import annotations

import subprocess
import sys

import pytest

ABORTS_IN_FINALISATION = """
import atexit, os, runpy, sys
atexit.register(os.abort)
"""


def run(code: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", ABORTS_IN_FINALISATION + code], capture_output=True, text=True, check=False, timeout=120
    )


def test_the_end_keeps_the_status_and_what_was_printed_and_skips_finalisation() -> None:
    done = run("from spes_core.processlife import end\nprint('out')\nprint('err', file=sys.stderr)\nend(3)")
    assert (done.returncode, done.stdout, done.stderr) == (3, "out\n", "err\n")


@pytest.mark.parametrize("module", ["spes_core.node", "spes_core.server"])
def test_a_node_and_a_server_end_without_finalisation_which_their_threads_could_abort(module: str) -> None:
    done = run(f"sys.argv = ['x', 'missing/run.json']\nrunpy.run_module({module!r}, run_name='__main__')")
    assert done.returncode in (1, 2) and "missing" in done.stderr
