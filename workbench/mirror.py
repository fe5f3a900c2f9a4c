"""The controller's side of the MLflow mirror: hands finished trials to `workbench.tracking` and never waits for it."""

from __future__ import annotations

import contextlib
import json
import queue
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable
from pathlib import Path

from workbench.failures import last_words
from workbench.launch.launcher import child_environment

CLOSE_TIMEOUT_S = 60.0
"""How long `Mirror.close` waits for the mirror to catch up."""


def warn_on_stderr(message: str) -> None:
    """Print one warning."""
    print(f"warning: {message}", file=sys.stderr)


class Mirror:
    """A running `workbench.tracking` process. Whatever happens to it, a study goes on and warns once.

    Start it in the main thread: the process ends with the thread that started it.
    """

    def __init__(
        self,
        results_dir: Path,
        study: str,
        *,
        tracking_uri: str | None = None,
        warn: Callable[[str], None] = warn_on_stderr,
    ) -> None:
        self._warn, self._warned = warn, False
        self._ready, self._queue = threading.Event(), queue.SimpleQueue[Path | None]()
        self._stderr = tempfile.TemporaryFile()  # noqa: SIM115 (closed by close)
        argv = [sys.executable, "-m", "workbench.tracking", "--die-with-parent"]
        argv += ["--results", str(results_dir), "--study", study]
        argv += ["--tracking-uri", tracking_uri] if tracking_uri is not None else []
        self._process = subprocess.Popen(
            argv,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._stderr,
            env=child_environment({"MLFLOW_DISABLE_TELEMETRY": "true"}),
            start_new_session=True,
        )
        self._threads = [
            threading.Thread(target=target, name="mlflow-mirror", daemon=True) for target in (self._write, self._read)
        ]
        for thread in self._threads:
            thread.start()

    def wait_ready(self, timeout_s: float = CLOSE_TIMEOUT_S) -> bool:
        """Wait until the store and the experiment exist, or cannot be made; whether it came to either."""
        return self._ready.wait(timeout_s)

    def add(self, trial_dir: Path) -> None:
        """Have a finished trial mirrored; returns at once."""
        self._queue.put(trial_dir.absolute())

    def close(self, timeout_s: float = CLOSE_TIMEOUT_S) -> None:
        """Wait until every trial is mirrored, but no longer than ``timeout_s``."""
        self._queue.put(None)
        try:
            self._process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            self._say(f"MLflow has not caught up within {timeout_s:g} s; the next run of the study tries again")
            self._process.kill()
            self._process.wait()
        for thread in self._threads:
            thread.join(timeout=5)
        self._stderr.close()

    def _write(self) -> None:
        """Send the names of finished trials (own thread: the process may be slow to read)."""
        assert self._process.stdin is not None
        with contextlib.suppress(BrokenPipeError), self._process.stdin as stdin:
            while (trial_dir := self._queue.get()) is not None:
                stdin.write(json.dumps(str(trial_dir)).encode() + b"\n")
                stdin.flush()

    def _read(self) -> None:
        """Take in what the process says until its end (own thread)."""
        assert self._process.stdout is not None
        with self._process.stdout as stdout:
            for line in stdout:
                message = json.loads(line)
                if message["event"] == "ready":
                    self._ready.set()
                elif message["event"] == "warning":
                    self._say(message["message"])
        if self._process.wait() != 0:
            self._say(f"the MLflow mirror ended: {last_words(self._stderr)}")
        self._ready.set()

    def _say(self, message: str) -> None:
        if not self._warned:
            self._warned = True
            self._warn(f"{message} (results are complete without it)")
