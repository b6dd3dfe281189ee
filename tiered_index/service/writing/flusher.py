"""The flusher: moves entries from the write buffer into unsealed files, in order, and makes them durable.

`run_once` is one round; a round that failed half-way is continued by the next one, never begun again. Threads: rounds
are serialised by a lock; `put` never takes it.
"""

from __future__ import annotations

import contextlib
import threading
from dataclasses import dataclass, field
from functools import partial

import numpy as np

from tiered_index.clock import Clock
from tiered_index.errors import IndexClosed, TieredIndexError
from tiered_index.service.answers.validation import Columns
from tiered_index.service.log.records import max_positions
from tiered_index.service.writing.appenders import Appender
from tiered_index.service.writing.buffer import WriteBuffer

# entries of one round, unless a single put_batch was larger
_ROUND = 1 << 19


@dataclass
class _Round:
    """The rows that one flush must write; `done` counts rows of each appender that are durable."""

    main: Columns
    quarantine: Columns
    positions: dict[str, int]
    done_main: int = 0
    done_quarantine: int = 0


@dataclass(eq=False)
class Flusher:
    """Writes one buffer by two appenders. `quarantined` counts entries whose clock was out of bounds."""

    buffer: WriteBuffer
    main: Appender
    quarantine: Appender
    clock: Clock
    max_late_s: float
    max_early_s: float
    positions: dict[str, int]
    quarantined: int = 0
    error: TieredIndexError | None = None
    # when the position of a source moved last, by the clock's monotonic time
    moved_s: dict[str, float] = field(default_factory=dict)
    _round: _Round | None = None
    _closed: bool = False
    _lock: threading.RLock = field(default_factory=threading.RLock)

    def end(self) -> None:
        """From here on every call raises `IndexClosed`: the files are somebody else's."""
        with self._lock:
            self._closed = True

    def _check_open(self) -> None:
        if self._closed:
            raise IndexClosed("the index is closed")

    def run_once(self) -> int:
        """Flush what is buffered now; return how many entries became durable. Raises typed errors; nothing is lost."""
        with self._lock:
            self._check_open()
            newest = self.buffer.close_chunk()
            flushed = 0
            while self.buffer.released < newest:
                flushed += self._run_round()
            self.main.reserve_next()
            for appender in (self.quarantine, self.main):
                appender.show()
            return flushed

    def _run_round(self) -> int:
        if self._round is None:
            self._round = self._begin()
        current = self._round
        try:
            # positions become durable with the last rows written: the main ones, else the quarantine's
            has_main = bool(len(current.main["second"]))
            if len(current.quarantine["second"]):
                self.quarantine.write(
                    current.quarantine,
                    current.done_quarantine,
                    {} if has_main else current.positions,
                    partial(setattr, current, "done_quarantine"),
                )
            if has_main or (current.positions and not len(current.quarantine["second"])):
                progress = partial(setattr, current, "done_main")
                self.main.write(current.main, current.done_main, current.positions, progress)
        except TieredIndexError as error:
            self.error = error
            raise
        self.error = None
        self.positions = max_positions(self.positions, current.positions)
        self.moved_s |= dict.fromkeys(current.positions, self.clock.monotonic_s())
        self.buffer.end_flush()
        self._round = None  # last: a round that did not get here is gone on with
        return len(current.main["second"]) + len(current.quarantine["second"])

    def flush(self) -> None:
        """Flush everything that was put before the call."""
        self.run_once()

    def learn(self, positions: dict[str, int]) -> None:
        """Take over positions that the log knows to be durable."""
        with self._lock:
            self.positions = max_positions(self.positions, positions)

    def seal(self) -> None:
        """Flush, then seal the files: the quarantine's first, so that the main file's positions cover it."""
        with self._lock:
            self.flush()
            self.roll()

    def roll(self) -> None:
        """Seal the files as they are."""
        with self._lock:
            self._check_open()
            self.quarantine.roll()
            self.main.roll()

    def roll_older_than(self, created_ms: float) -> None:
        """Seal the files that were begun before `created_ms`, with what is buffered by now."""
        with self._lock:
            self._check_open()
            old = [
                appender
                for appender in (self.quarantine, self.main)
                if appender.active is not None and appender.active.created_ms <= created_ms
            ]
            if old:
                # the flusher's own round tells an error
                with contextlib.suppress(TieredIndexError):
                    self.flush()
            for appender in old:
                # full ones were sealed by the flush
                if appender.active is not None and appender.active.created_ms <= created_ms:
                    appender.roll()

    def _begin(self) -> _Round:
        chunks = self.buffer.begin_flush(_ROUND)
        parts = [chunk.columns() for chunk in chunks]
        columns = (
            {name: np.concatenate([part[name] for part in parts]) for name in parts[0]} if len(parts) > 1 else parts[0]
        )
        positions: dict[str, int] = {}
        for chunk in chunks:
            positions = max_positions(positions, chunk.positions)
        now_s = self.clock.now_ms() / 1000
        seconds = columns["second"]
        low, high = now_s - self.max_late_s, now_s + self.max_early_s
        if not len(seconds) or (seconds.min() >= low and seconds.max() <= high):
            return _Round(columns, {name: values[:0] for name, values in columns.items()}, positions)
        bad = (seconds < low) | (seconds > high)
        # wild clocks lie far apart: in order of time they fill as few files as possible
        order = np.flatnonzero(bad)
        order = order[np.argsort(seconds[order], kind="stable")]
        begun = _Round({n: v[~bad] for n, v in columns.items()}, {n: v[order] for n, v in columns.items()}, positions)
        self.quarantined += len(order)
        return begun
