"""The evaluation of a study's trials: each in a process of its own, after the trial is done, or at a later run.

An evaluation that fails never fails its trial: the tasks that it owed are listed as missing, with the reason. They stay
so, like failed trials, until they are asked for again.
"""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from spes_core.errors import DataError
from workbench.durable import read_mapping
from workbench.errors import TrialBusy
from workbench.evaluate import BUSY
from workbench.evaluating_scores import FILE, ScoreBook, weights_digests, weights_files
from workbench.evaluating_tasks import Task, resolve
from workbench.execute import exclusive
from workbench.failures import log_bytes, tail
from workbench.launch.launcher import STOP_GRACE_S, child_environment, signal_group
from workbench.settings import Evaluation

LOG = "evaluation.log"
"""Name of the log in a trial's logs/."""
_POLL_S = 0.2


@dataclass(frozen=True, kw_only=True)
class Evaluations:
    """What a study wants to know of each trial that is done, and how it is found out.

    In its methods ``stopped`` says whether the user wants an end, and ``retry`` tries again what was missing before.
    """

    settings: Evaluation
    device: str
    threads: int
    timeout_s: float | None

    @cached_property
    def tasks(self) -> list[Task]:
        """The tasks asked for."""
        return resolve(self.settings.tasks)

    def complete(
        self,
        trial_dir: Path,
        result: dict[str, Any],
        stopped: Callable[[], bool],
        *,
        retry: bool = False,
        gpus: Sequence[str] | None = None,
    ) -> dict[str, Any]:
        """The result of a trial with its scores: evaluated now where some are lacking, the trial being done.

        ``gpus``: those that the trial was given, which its evaluation has, too; None for all.
        """
        if not self._is_owed(trial_dir, result, retry=retry) or stopped():
            return result
        reason = self._run(trial_dir, stopped, retry=retry, gpus=gpus)
        if reason is not None:
            with suppress(TrialBusy), exclusive(trial_dir):  # who has the trial by now scores it, or says why not
                self._note_missing(trial_dir, reason)
        return read_mapping(trial_dir / "result.json")

    def _note_missing(self, trial_dir: Path, reason: str) -> None:
        """Store why scores are lacking, in the place of a process that did not come to its end."""
        if (book := _book(trial_dir)) is None:
            return
        for leaf in book.lacking(self.tasks, self.settings, again=False):
            book.add(leaf, self.settings, {"status": "missing", "reason": reason})
        book.show(self.tasks)
        book.store(into_result=True)  # as its process has done, if it came to its end

    def catch_up(self, trial_dirs: Iterable[Path], stopped: Callable[[], bool], *, retry: bool) -> int:
        """Evaluate the trials of earlier runs that lack scores; how many there were."""
        if not self.settings.tasks:
            return 0
        results = {folder: read_mapping(folder / "result.json") for folder in trial_dirs}
        owed = [folder for folder, result in results.items() if self._is_owed(folder, result, retry=retry)]
        for number, folder in enumerate(owed, start=1):
            if stopped():
                break
            print(f"evaluating {number} of {len(owed)} trials that lack scores: {folder.name}", flush=True)
            self.complete(folder, results[folder], stopped, retry=retry)
        return len(owed)

    def say_missing(self, trial_dirs: Iterable[Path]) -> None:
        """Print what could not be evaluated, once for each reason."""
        found: dict[tuple[str, str], list[str]] = {}
        for folder in trial_dirs:
            scored = (read_mapping(folder / "result.json").get("evaluation") or {}).get("tasks") or {}
            for label, entry in scored.items():
                if entry["status"] != "done":
                    found.setdefault((label, entry["reason"]), []).append(folder.name)
        for (label, reason), names in found.items():
            who = names[0] if len(names) == 1 else f"{len(names)} trials"
            print(f"missing: the score of {label} of {who}: {reason}; --retry-failed tries again")

    def _is_owed(self, trial_dir: Path, result: dict[str, Any], *, retry: bool) -> bool:
        """Whether a trial is done and lacks a score."""
        if not self.settings.tasks or result.get("status") != "done":
            return False
        book = _book(trial_dir)
        if book is None:
            return False
        shown = (result.get("evaluation") or {}).get("tasks") or {}
        return bool(book.lacking(self.tasks, self.settings, again=retry)) or any(
            task.label not in shown for task in self.tasks
        )

    def _run(
        self, trial_dir: Path, stopped: Callable[[], bool], *, retry: bool, gpus: Sequence[str] | None
    ) -> str | None:
        """Run the process to its end; why scores may still be lacking.

        None when that is no failure: the user stopped it, or another process has the trial and may score it.
        """
        path = trial_dir / "logs" / LOG
        path.parent.mkdir(exist_ok=True)
        start_bytes, started_s = log_bytes(path), time.monotonic()
        with path.open("ab") as log:
            process = subprocess.Popen(
                self._command(trial_dir, retry=retry),
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                env=child_environment(self._environment(gpus)),
                start_new_session=True,
            )
        try:
            while process.poll() is None:
                if stopped():
                    return None
                if self.timeout_s is not None and time.monotonic() - started_s > self.timeout_s:
                    return f"resources.timeout ({self.timeout_s:g} s) was reached"
                with suppress(subprocess.TimeoutExpired):
                    process.wait(_POLL_S)
            if process.returncode == BUSY:
                return None
            said = tail(path, start_bytes)
            return f"its process ended with status {process.returncode}: {said[-1] if said else 'without a word'}"
        finally:
            _end(process)

    def _command(self, trial_dir: Path, *, retry: bool) -> list[str]:
        settings = self.settings
        command = [sys.executable, "-m", "workbench.evaluate", str(trial_dir), "--tasks", ",".join(settings.tasks)]
        command += ["--batch-size", str(settings.batch_size), "--dtype", settings.dtype, "--device", self.device]
        command += [] if settings.folder is None else ["--data-dir", str(settings.folder.absolute())]
        command += [] if settings.limit is None else ["--limit", str(settings.limit)]
        command += [] if retry else ["--keep-missing"]
        return [*command, "--die-with-parent"]

    def _environment(self, gpus: Sequence[str] | None) -> dict[str, str]:
        """What must be in place before a numerical library is loaded."""
        threads = str(self.threads)
        names = ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS")
        more = {"OMP_WAIT_POLICY": "PASSIVE", "PYTHONUNBUFFERED": "1", "TOKENIZERS_PARALLELISM": "false"}
        more |= {} if gpus is None else {"CUDA_VISIBLE_DEVICES": ",".join(gpus)}
        return dict.fromkeys(names, threads) | more


def _book(trial_dir: Path) -> ScoreBook | None:
    """What is stored of a trial; None where it has no weights that can be read."""
    try:
        return ScoreBook(trial_dir, FILE, weights_digests(weights_files(trial_dir)))
    except DataError:
        return None


def _end(process: subprocess.Popen[bytes]) -> None:
    """End a process with its group: SIGTERM, then SIGKILL."""
    for number in (15, 9):
        if process.poll() is not None:
            return
        signal_group(process.pid, number)
        with suppress(subprocess.TimeoutExpired):
            process.wait(STOP_GRACE_S)
