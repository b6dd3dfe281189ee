"""The flusher: writes entries from the write buffer to unsealed files, in order, and makes them durable.

`run_once` flushes the buffer in rounds. A failed round is continued by the next call. Threads: a lock serialises
rounds; `put` never takes it.
"""

from __future__ import annotations

import contextlib
import threading
from dataclasses import dataclass, field

import numpy as np

from tiered_index.base.clock import Clock
from tiered_index.errors import IndexClosed, TieredIndexError
from tiered_index.service.log.records import max_positions
from tiered_index.service.write.appenders import Appender, FlushRun
from tiered_index.service.write.buffer import WriteBuffer
from tiered_index.service.write.marks import Marks
from tiered_index.service.write.validation import TopicTable

# entries of one round, unless a single `put_batch` has more
_ROUND = 1 << 19


@dataclass(eq=False)
class Flusher:
    """Writes one buffer with two appenders. `quarantined` counts entries with timestamps out of bounds.

    `is_flushing`: a round writes entries at present.
    """

    buffer: WriteBuffer
    main: Appender
    quarantine: Appender
    clock: Clock
    max_late_s: float
    max_early_s: float
    positions: dict[str, int]
    quarantined: int = 0
    error: TieredIndexError | None = None
    is_flushing: bool = False
    # the monotonic time at which the position of a source last changed
    moved_s: dict[str, float] = field(default_factory=dict)
    # what the current round must write, in this order
    _round: list[tuple[Appender, FlushRun]] | None = None
    _closed: bool = False
    lock: threading.RLock = field(default_factory=threading.RLock)

    @property
    def topics(self) -> TopicTable:
        """The topics of the writer, with their documents."""
        return self.main.context.topics

    def end(self) -> None:
        """Make every later call raise `IndexClosed`, since another writer may own the files."""
        with self.lock:
            self._closed = True

    def _check_open(self) -> None:
        if self._closed:
            raise IndexClosed("the index is closed: open it again")

    def run_once(self) -> int:
        """Flush the buffered entries; return how many became durable. Raises typed errors; a later call continues."""
        with self.lock:
            self._check_open()
            newest = self.buffer.close_chunk()
            flushed = 0
            try:
                while self.buffer.released < newest:
                    self.is_flushing = True
                    flushed += self._run_round()
            finally:
                self.is_flushing = False
            self.main.reserve_next()
            for appender in (self.quarantine, self.main):
                appender.show()
            return flushed

    def _run_round(self) -> int:
        if self._round is None:
            self._round = self._begin()
        current, written = self._round, self._round[-1][1]
        try:
            for appender, run in current:
                appender.write(run)
        except TieredIndexError as error:
            self.error = error
            raise
        self.error = None
        self.positions = max_positions(self.positions, written.positions)
        self.moved_s |= dict.fromkeys(written.positions, self.clock.monotonic_s())
        self.buffer.end_flush()
        self._round = None  # last: an interrupted round is continued
        return sum(run.count for _, run in current)

    def learn(self, positions: dict[str, int]) -> None:
        """Take over positions that are durable in the log."""
        with self.lock:
            self.positions = max_positions(self.positions, positions)

    def seal(self) -> None:
        """Flush, then seal the files: the quarantine's first, so that the main file's positions include it."""
        with self.lock:
            self.run_once()
            self.roll()

    def roll(self) -> None:
        """Seal the files without a flush."""
        with self.lock:
            self._check_open()
            self.quarantine.roll()
            self.main.roll()

    def roll_older_than(self, age_s: float) -> None:
        """Flush, then seal the files that are at least `age_s` old."""
        with self.lock:
            self._check_open()
            if self._older_than(age_s):
                # the flusher's own round reports the error
                with contextlib.suppress(TieredIndexError):
                    self.run_once()
            # the flush has sealed full files
            for appender in self._older_than(age_s):
                appender.roll()

    def _older_than(self, age_s: float) -> list[Appender]:
        now_ms = self.clock.now_ms()
        return [
            appender
            for appender in (self.quarantine, self.main)
            # the absolute difference, so that a clock that is set back can't keep a file open permanently
            if appender.active is not None and abs(now_ms - appender.active.journal.created_ms) >= age_s * 1000
        ]

    def _begin(self) -> list[tuple[Appender, FlushRun]]:
        chunks = self.buffer.begin_flush(_ROUND)
        parts = [chunk.columns() for chunk in chunks]
        columns = (
            {name: np.concatenate([part[name] for part in parts]) for name in parts[0]} if len(parts) > 1 else parts[0]
        )
        marks, row = Marks(), 0
        for chunk in chunks:
            marks.extend(chunk.marks, row)
            row += chunk.count
        positions = marks.positions
        now_s = self.clock.now_ms() / 1000
        run, seconds = FlushRun(columns, positions, self.positions, marks), columns["second"]
        low, high = now_s - self.max_late_s, now_s + self.max_early_s
        if not run.count or (run.interval[0] >= low and run.interval[1] <= high):
            return [(self.main, run)]
        bad = (seconds < low) | (seconds > high)
        # wrong timestamps are far apart: sorted by time they need the fewest files
        order = np.flatnonzero(bad)
        order = order[np.argsort(seconds[order], kind="stable")]
        self.quarantined += len(order)
        wild, fine = ({name: values[rows] for name, values in columns.items()} for rows in (order, ~bad))
        if bad.all():
            return [(self.quarantine, FlushRun(wild, positions))]
        # positions become durable after the quarantined rows
        plausible = FlushRun(fine, positions, self.positions, marks.among(~bad))
        return [(self.quarantine, FlushRun(wild)), (self.main, plausible)]
