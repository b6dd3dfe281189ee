"""Progress of long work, on stderr only: a bar on a terminal, a line every few seconds elsewhere, nothing with --quiet.

    with Progress("ingesting", total, "bytes", quiet=False) as progress:
        progress.update(done, "12,000 entries")

One thread.
"""

from __future__ import annotations

import sys
import time
from types import TracebackType
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, TaskID, TaskProgressColumn, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.progress import Progress as Bar

from tiered_index.cli.output import printable

__all__ = ["Progress"]

_LINE_INTERVAL_S = 5.0


class Progress:
    """One piece of work of `total` steps (None: unknown)."""

    def __init__(self, title: str, total: int | None, *, quiet: bool, stream: Any = None) -> None:
        self._title = printable(title)
        self._total = total
        self._stream = stream if stream is not None else sys.stderr
        self._quiet = quiet
        self._bar: Bar | None = None
        self._task: TaskID | None = None
        self._printed_s = time.monotonic()

    def __enter__(self) -> Progress:
        if not self._quiet and self._stream.isatty():
            columns = (TextColumn("{task.description}", markup=False), BarColumn(), TaskProgressColumn(), TimeElapsedColumn(),
                       TimeRemainingColumn(), TextColumn("{task.fields[detail]}", markup=False))  # fmt: skip
            self._bar = Bar(*columns, console=Console(file=self._stream), transient=True)
            self._task = self._bar.add_task(self._title, total=self._total, detail="")
            self._bar.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        if self._bar is not None:
            self._bar.stop()

    def update(self, done: int, detail: str = "") -> None:
        """Say how many steps are done."""
        if self._quiet:
            return
        detail = printable(detail)
        if self._bar is not None and self._task is not None:
            self._bar.update(self._task, completed=done, detail=detail)
            return
        now = time.monotonic()
        if now - self._printed_s >= _LINE_INTERVAL_S:
            self._printed_s = now
            share = f"{100 * done / self._total:.0f} %" if self._total else f"{done:,}"
            self._stream.write(f"{self._title}: {share}{', ' + detail if detail else ''}\n")
            self._stream.flush()
