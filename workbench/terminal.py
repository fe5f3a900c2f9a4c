"""What a study shows while it works: tables and the progress of trials, rich on a terminal, plain lines elsewhere."""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Sequence
from types import TracebackType
from typing import TYPE_CHECKING, Self

from workbench.progress import Progress

if TYPE_CHECKING:
    from rich.progress import Progress as RichProgress
    from rich.progress import TaskID

PLAIN_INTERVAL_S = 5.0
"""Shortest time between two progress lines of one trial when the output is no terminal."""


def print_table(title: str, columns: Sequence[str], rows: Sequence[Sequence[str]], numeric: Sequence[str] = ()) -> None:
    """Print a table; columns named in ``numeric`` are aligned to the right. Nothing is cut or wrapped when piped."""
    if sys.stdout.isatty():
        _print_rich_table(title, columns, rows, numeric)
        return
    widths = [max(len(cell) for cell in cells) for cells in zip(columns, *rows, strict=True)]
    print(title)
    for row in (columns, ["-" * width for width in widths], *rows):
        cells = [
            cell.rjust(width) if name in numeric else cell.ljust(width)
            for cell, width, name in zip(row, widths, columns, strict=True)
        ]
        print("  ".join(cells).rstrip())


def _print_rich_table(
    title: str, columns: Sequence[str], rows: Sequence[Sequence[str]], numeric: Sequence[str]
) -> None:
    from rich import box
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    table = Table(title=title, title_justify="left", title_style="bold", box=box.SIMPLE_HEAD)
    for name in columns:
        table.add_column(name, justify="right" if name in numeric else "left", overflow="fold")
    for row in rows:
        table.add_row(*(Text(cell) for cell in row))
    Console(highlight=False).print(table)


def duration(seconds: float | None) -> str:
    """ "1:02:03", "4:05", or "?" when it is not known."""
    if seconds is None:
        return "?"
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"


def progress_text(progress: Progress) -> str:
    """The state of a trial in one line, without its name."""
    loss = "?" if progress.loss_nats is None else f"{progress.loss_nats:.3f}"
    rate = "?" if progress.tokens_per_s is None else f"{progress.tokens_per_s:,.0f}"
    resumed = f"resumed at step {progress.resumed_at_step}  " if progress.resumed_at_step else ""
    return (
        f"{resumed}step {progress.step}/{progress.total_steps}  loss {loss}  {rate} tokens/s"
        f"  round {progress.round}  ETA {duration(progress.remaining_s)}"
    )


class PlainLines:
    """A line for each trial's start and end, and one every few seconds between; may be shared by threads."""

    def __init__(self, total: int) -> None:
        self._total = total
        self._lock = threading.Lock()
        self._places: dict[str, str] = {}
        self._shown_at_s: dict[str, float] = {}

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        """Nothing is held."""

    def start(self, number: int, name: str) -> None:
        """The trial with this number (from 1) and name begins."""
        with self._lock:
            self._places[name] = f"[{number}/{self._total}] {name}"
            self._shown_at_s[name] = time.monotonic()
            print(f"{self._places[name]}  starting", flush=True)

    def update(self, progress: Progress) -> None:
        """A trial has advanced."""
        with self._lock:
            if time.monotonic() - self._shown_at_s[progress.trial] >= PLAIN_INTERVAL_S:
                self._shown_at_s[progress.trial] = time.monotonic()
                print(f"{self._places[progress.trial]}  {progress_text(progress)}", flush=True)

    def finish(self, name: str, outcome: str) -> None:
        """The trial with this name has ended."""
        with self._lock:
            print(f"{self._places[name]}  {outcome}", flush=True)


class LiveLines:
    """One bar for the study and one for each running trial, redrawn in place; finished trials scroll up.

    May be shared by threads.
    """

    def __init__(self, total: int) -> None:
        from rich.progress import BarColumn, TextColumn
        from rich.progress import Progress as RichProgress

        self._total = total
        self._places: dict[str, str] = {}
        self._trials: dict[str, TaskID] = {}
        self._ended = 0
        self._started_at_s = 0.0
        columns = (
            TextColumn("{task.description}"),
            BarColumn(bar_width=24),
            TextColumn("{task.fields[state]}"),
        )
        self._progress: RichProgress = RichProgress(*columns, refresh_per_second=4)
        self._study: TaskID = self._progress.add_task("study", total=total, state="")

    def __enter__(self) -> Self:
        self._progress.start()
        self._started_at_s = time.monotonic()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._progress.stop()

    def start(self, number: int, name: str) -> None:
        """The trial with this number (from 1) and name begins."""
        self._places[name] = f"[{number}/{self._total}] {name}"
        self._trials[name] = self._progress.add_task(name, total=None, state="starting")
        self._show_study(number)

    def update(self, progress: Progress) -> None:
        """A trial has advanced."""
        state = progress_text(progress)
        self._progress.update(
            self._trials[progress.trial], total=progress.total_steps, completed=progress.step, state=state
        )

    def finish(self, name: str, outcome: str) -> None:
        """The trial with this name has ended."""
        self._progress.remove_task(self._trials.pop(name))
        self._ended += 1
        self._progress.advance(self._study)
        self._progress.console.print(f"{self._places[name]}  {outcome}", markup=False, highlight=False)

    def _show_study(self, begun: int) -> None:
        running = f"trial {begun}/{self._total}" if len(self._trials) < 2 else f"{len(self._trials)} trials"
        self._progress.update(self._study, description=running, state=self._remaining())

    def _remaining(self) -> str:
        if not self._ended:
            return ""
        elapsed_s = time.monotonic() - self._started_at_s
        return f"ETA {duration(elapsed_s / self._ended * (self._total - self._ended))}"


def progress_lines(total: int) -> PlainLines | LiveLines:
    """The progress display that fits the output, for a number of trials."""
    return LiveLines(total) if sys.stdout.isatty() else PlainLines(total)
