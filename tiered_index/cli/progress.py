"""Progress on stderr for long commands, and their end by signals."""

from __future__ import annotations

import _thread
import signal
import sys
import threading
import time
from collections.abc import Callable
from types import FrameType
from typing import TYPE_CHECKING, Any

from tiered_index.cli.exit_codes import DONE, INTERRUPTED
from tiered_index.cli.output import printable, tell

if TYPE_CHECKING:
    from rich.progress import Progress as Bar
    from rich.progress import TaskID

_LINE_INTERVAL_S = 5.0


class ProgressDisplay:
    """Progress of `total` steps (None: unknown): a bar on a terminal, else a line every few seconds. One thread."""

    def __init__(self, title: str, total: int | None, *, quiet: bool, stream: Any = None) -> None:
        self._title = printable(title)
        self._total = total
        self._stream = stream if stream is not None else sys.stderr
        self._quiet = quiet
        self._bar: Bar | None = None
        self._task: TaskID | None = None
        self._printed_s = time.monotonic()

    def __enter__(self) -> ProgressDisplay:
        if not self._quiet and self._stream.isatty():
            # imported on use: most commands draw no bar
            from rich.console import Console
            from rich.progress import BarColumn, TaskProgressColumn, TextColumn, TimeElapsedColumn, TimeRemainingColumn
            from rich.progress import Progress as Bar

            columns = (
                TextColumn("{task.description}", markup=False),
                BarColumn(),
                TaskProgressColumn(),
                TimeElapsedColumn(),
                TimeRemainingColumn(),
                TextColumn("{task.fields[detail]}", markup=False),
            )
            self._bar = Bar(*columns, console=Console(file=self._stream), transient=True)
            self._task = self._bar.add_task(self._title, total=self._total, detail="")
            self._bar.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self._bar is not None:
            self._bar.stop()

    def update(self, done: int, detail: str = "", total: int | None = None) -> None:
        """Show the number of `done` steps; `total` replaces the total."""
        if self._quiet:
            return
        self._total = self._total if total is None else total
        detail = printable(detail)
        if self._bar is not None and self._task is not None:
            self._bar.update(self._task, completed=done, total=self._total, detail=detail)
            return
        now = time.monotonic()
        if now - self._printed_s >= _LINE_INTERVAL_S:
            self._printed_s = now
            share = f"{100 * done / self._total:.0f} %" if self._total else f"{done:,}"
            tell(f"{self._title}: {share}{', ' + detail if detail else ''}\n", self._stream)

    def counting(self, unit: str) -> Callable[[int], None]:
        """Return a function that adds to the number of done steps, from any thread, and shows it."""
        lock, done = threading.Lock(), 0

        def count(more: int) -> None:
            nonlocal done
            with lock:
                done += more
                self.update(done, f"{done:,} {unit}")

        return count


class Ending:
    """Handles signals: the first SIGTERM or SIGINT sets `event`, a second one ends the command at once.

    Main thread only. `exit_code` is 130 after SIGINT, else 0.
    """

    def __init__(self) -> None:
        self.event = threading.Event()
        self.exit_code = DONE
        self._before: dict[int, Any] = {}

    def __enter__(self) -> Ending:
        self._before = {number: signal.signal(number, self._heard) for number in (signal.SIGTERM, signal.SIGINT)}
        return self

    def __exit__(self, *_: object) -> None:
        self._restore()

    def _heard(self, number: int, _: FrameType | None) -> None:
        self.exit_code = INTERRUPTED if number == signal.SIGINT else DONE
        self._restore()
        # in a thread: this one may be in a method of the event, and have its lock
        _thread.start_new_thread(self.event.set, ())

    def _restore(self) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)
        self._before = {}
