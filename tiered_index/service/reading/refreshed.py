"""State of a storage that a reader refreshes every `refresh_interval_s`, in one thread for all lookups.

After a failed refresh, lookups fail until a later one succeeds. They also fail if the last refresh is too old. A lookup
never fails because of a refresh that began before the lookup: it waits for a later one.

A reader of several indexes waits only `patience_s` for a response of each. A storage that does not respond is *away*:
lookups report that at once, until a refresh in the background succeeds.
Threads: every method from any thread.
"""

from __future__ import annotations

import contextlib
import copy
import math
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable
from concurrent.futures import Future, wait
from typing import Any, Generic, TypeAlias, TypeVar

from tiered_index.clock import Clock
from tiered_index.errors import BudgetExceeded, CorruptFile, StorageError, StorageUnavailable, TieredIndexError
from tiered_index.service.catalog.catalog import Handle
from tiered_index.service.files.compacted import DamagedFile
from tiered_index.storage.context import active_context
from tiered_index.storage.metering import Usage
from tiered_index.storage.pools import DaemonPool
from tiered_index.storage.prices import PriceTable
from tiered_index.storage.silence import Silence

T = TypeVar("T")
# after an error the storage is tried again after this time at the latest, even if lookups don't need it
_RETRY_S = 1.0
BRIEF_S = 0.2
"""Lookups in several indexes wait for another try of one that failed faster than this."""
# a refresh may be late by this time or by the interval, whichever is longer; after that no answer is complete
_OVERDUE_S = 30.0

Begin: TypeAlias = Callable[[Callable[[], object]], Future[object]]
"""Runs a call in another thread."""


class Readings:
    """The readings of one storage, which may wait for each other: those that run now, and when the last one ended."""

    def __init__(self) -> None:
        self.running: set[Reading[Any]] = set()
        self.ended_s = 0.0


class Reading(Generic[T]):
    """A refresh or opening in another thread, begun by `begin`. Raises as `begin`."""

    def __init__(
        self, begin: Callable[[Callable[[], T]], Future[T]], call: Callable[[], T], group: Readings | None = None
    ) -> None:
        # None: the call still waits for a thread
        self._started_s: float | None = None
        self._call, self._usage, self._silence = call, Usage(), Silence()
        self._group = group or Readings()
        self.ends = begin(self._run)

    def _run(self) -> T:
        self._started_s = time.monotonic()
        self._group.running.add(self)
        try:
            with active_context().counting(self._usage).active():
                return self._call()
        finally:
            self._group.ended_s = time.monotonic()
            self._group.running.discard(self)

    def is_silent(self, patience_s: float) -> bool:
        """Return whether the storage has not responded for `patience_s` to this reading, or to the one before it."""
        if (started_s := self._started_s) is None:
            return False
        if self._usage.requests:
            return self._silence.lasts([self._usage], patience_s)
        if time.monotonic() - max(started_s, self._group.ended_s) < patience_s:
            return False
        # it waits for the lock of another one
        return all(one.is_silent(patience_s) for one in list(self._group.running) if one._usage.requests)


class Refreshed(ABC):
    """Base of states that are refreshed before lookups.

    `name` is that of the storage in errors.
    """

    def __init__(
        self, name: str, clock: Clock, interval_s: float, prices: PriceTable, patience_s: float = math.inf
    ) -> None:
        self.name = name
        self.patience_s = patience_s
        self._away: TieredIndexError | None = None
        # whether the searches that hung when the storage was left are over
        self._hanging: list[Callable[[], bool]] = []
        self._leaving = threading.Lock()
        self._readings = Readings()
        self._clock = clock
        self._interval_s = interval_s
        self._prices = prices
        self._beginning = threading.Lock()
        # the newest refresh; None: none yet
        self._refresh: Reading[object] | None = None
        # the newest one that a caller asked for
        self._asked: Reading[object] | None = None
        self._error: TieredIndexError | None = None
        # when the refresh began that ended with the error
        self._failed_s = clock.monotonic_s()
        # when the last successful refresh began: the state may be as old as that
        self._refreshed_s = clock.monotonic_s()

    @abstractmethod
    def refresh(self) -> object:
        """Read new log records, then call `_refreshed_from`."""

    def due_refresh(self, begun_s: float, begin: Begin) -> tuple[Reading[object], bool] | None:
        """Return the refresh that a lookup begun at `begun_s` needs, and whether this call began it; None: none is due.

        `begin` runs a call in another thread. Raises as `begin`.
        """
        with self._beginning:
            if not self._is_due(begun_s):
                return None
            is_new = self._refresh is None or self._refresh.ends.done()
            if self._refresh is None or is_new:
                self._refresh = Reading(begin, self.refresh_due, self._readings)
            return self._refresh, is_new

    def new_refresh(self, begin: Begin) -> Reading[object]:
        """Begin a refresh that raises its error. While the storage is away, one is under way at most."""
        with self._beginning:
            if self._away is None or self._asked is None or self._asked.ends.done():
                self._asked = Reading(begin, self.refresh, self._readings)
            return self._asked

    @property
    def away(self) -> TieredIndexError | None:
        """The error of a storage that does not respond; None: it responds.

        It is a copy, because each raise adds frames to an error's traceback.
        """
        return copy.copy(self._away)

    def leave(self, are_over: Callable[[], bool] | None = None) -> TieredIndexError:
        """Report the storage as away until a refresh succeeds, and hanging searches `are_over`. Return the error."""
        error = StorageUnavailable(f"{self.name} did not answer within {self.patience_s:g} s")
        with self._leaving:
            if are_over is not None:
                self._hanging.append(are_over)
            if self._away is None:
                self._failed(error, self._clock.monotonic_s())
                self._away = error
        return copy.copy(error)

    def refresh_due(self) -> None:
        """Refresh with at most half of the lookup's requests, but at least two: a listing and a record.

        If that fails or needs more, lookups report it and the next one tries again.
        """
        context = active_context()
        left = context.requests_left
        half = Usage(self._prices, max_requests=None if left is None else max(min(left, 2), left // 2))
        with contextlib.suppress(BudgetExceeded), context.counting(half).active():
            self._try(self._read_due)

    def asks_before(self, begun_s: float) -> bool:
        """Return whether a lookup that begins at `begun_s` may send requests before it reads a file."""
        if self._away is not None:
            return self._is_retry_due()
        return begun_s - self._refreshed_s >= self._interval_s or self._fails_by_earlier(begun_s)

    def fails(self, begun_s: float) -> bool:
        """Return whether a lookup that began at `begun_s` fails without a refresh."""
        return self._is_too_old(begun_s) or self._error is not None

    def _is_due(self, begun_s: float) -> bool:
        if self._away is not None:
            return self._is_retry_due()
        return self._clock.monotonic_s() - self._refreshed_s >= self._interval_s or self._fails_by_earlier(begun_s)

    def _is_retry_due(self) -> bool:
        return self._clock.monotonic_s() - self._failed_s >= _RETRY_S

    def _fails_by_earlier(self, begun_s: float) -> bool:
        """Return whether a lookup would fail because of a refresh that began before it."""
        return self._error is not None and self._failed_s < begun_s and self.fails(begun_s)

    def _is_too_old(self, begun_s: float) -> bool:
        """Return whether the state is too old for a complete answer to a lookup that began at `begun_s`."""
        return begun_s - self._refreshed_s > self._oldest_s()

    def _oldest_s(self) -> float:
        """Return the greatest age of the state for a complete answer."""
        return self._interval_s + max(self._interval_s, _OVERDUE_S)

    def _read_due(self) -> object:
        """As `refresh`, if it is due."""
        return self.refresh()

    def _try(self, read: Callable[[], object]) -> None:
        """Call `read`. After an error of the storage or damage, lookups fail until a later try succeeds."""
        begun_s, started_s = self._clock.monotonic_s(), time.monotonic()
        try:
            read()
        except (StorageError, CorruptFile) as error:
            self._failed(error, begun_s)
            is_slow = time.monotonic() - started_s >= BRIEF_S
            # others would wait for the retries of a storage that refuses connections
            if isinstance(error, StorageUnavailable) and is_slow and not math.isinf(self.patience_s):
                self._away = error

    def _failed(self, error: TieredIndexError, begun_s: float) -> None:
        # before the error, which other threads read first
        self._failed_s = begun_s
        self._error = error
        self._refreshed_s = self._clock.monotonic_s() - max(0.0, self._interval_s - _RETRY_S)

    def _refreshed_from(self, begun_s: float) -> None:
        """Note a successful refresh that began at `begun_s`."""
        self._refreshed_s = begun_s
        with self._leaving:
            self._hanging = [are_over for are_over in self._hanging if not are_over()]
            if not self._hanging:
                self._away = None
            else:
                self._failed_s = self._clock.monotonic_s()

    def _problem(self, begun_s: float, refreshed_s: float, error: TieredIndexError | None, what: str) -> list[Handle]:
        """Return a file that fails with `error`, or because `what`, read at `refreshed_s`, is too old; else nothing."""
        late_s = begun_s - refreshed_s
        # a cheap test first
        if error is None and late_s > _OVERDUE_S and late_s > self._oldest_s():
            error = BudgetExceeded(
                f"{what} was last read {late_s:.0f} s ago, and this lookup had no time to read it again"
            )
        return unread(error)


def unread(error: TieredIndexError | None, source: str | None = None) -> list[Handle]:
    """Return a file that fails with `error`, so that no answer is complete; nothing for None."""
    if error is None:
        return []
    file = DamagedFile(error.file if isinstance(error, CorruptFile) else "log", "storage", error)
    file.source = source
    return [file]


def wait_for(
    readings: Iterable[tuple[Refreshed, Reading[object]]],
    until_s: float | None,
    threads: DaemonPool,
    *,
    raises: bool = True,
) -> list[Refreshed]:
    """Wait for refreshes in `threads` until `until_s` (`time.monotonic()`), and return the ones that did not end.

    A storage that does not respond for its `patience_s` is away from then on, and its thread is replaced. If it
    `raises`, it raises the errors of refreshes that ended.
    """
    left, pending = [], list(readings)
    while pending:
        pauses = [one.patience_s / 4 for one, _ in pending] + ([] if until_s is None else [until_s - time.monotonic()])
        wait([reading.ends for _, reading in pending], None if math.isinf(min(pauses)) else max(0.0, min(pauses)))
        now_s, still = time.monotonic(), []
        for one, reading in pending:
            if reading.ends.done():
                if raises:
                    reading.ends.result()
            elif reading.is_silent(one.patience_s):
                one.leave()
                threads.replace_thread(reading.ends)
                left.append(one)
            elif until_s is not None and now_s >= until_s:
                left.append(one)
            else:
                still.append((one, reading))
        pending = still
    return left
