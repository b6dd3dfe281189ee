"""State of a storage that a reader refreshes every `refresh_interval_s`, in one thread for all lookups.

After a failed refresh, lookups fail until a later one succeeds. They also fail if the last refresh is too old. A lookup
never fails because of a refresh that began before the lookup: it waits for a later one.

A reader of several indexes waits for each of them only `patience_s`. A storage that takes longer is *away*: lookups
report that at once, until a refresh in the background succeeds.
Threads: every method from any thread.
"""

from __future__ import annotations

import contextlib
import math
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable
from concurrent.futures import Future, wait
from typing import NamedTuple, TypeAlias

from tiered_index.clock import Clock
from tiered_index.errors import BudgetExceeded, CorruptFile, StorageError, StorageUnavailable, TieredIndexError
from tiered_index.service.catalog.catalog import Handle
from tiered_index.service.files.compacted import DamagedFile
from tiered_index.storage.context import active_context
from tiered_index.storage.metering import Usage
from tiered_index.storage.prices import PriceTable

# after an error the storage is tried again after this time at the latest, even if lookups don't need it
_RETRY_S = 1.0
# a refresh may be late by this time or by the interval, whichever is longer; after that no answer is complete
_OVERDUE_S = 30.0

Begin: TypeAlias = Callable[[Callable[[], object]], Future[object]]
"""Runs a call in another thread."""


class Reading(NamedTuple):
    """A refresh, and when it began (`time.monotonic()`)."""

    ends: Future[object]
    begun_s: float


class Refreshed(ABC):
    """Base of states that are refreshed before lookups.

    `name` is that of the storage in errors. `away` has the error of a storage that took longer than `patience_s`.
    """

    def __init__(
        self, name: str, clock: Clock, interval_s: float, prices: PriceTable, patience_s: float = math.inf
    ) -> None:
        self.name = name
        self.patience_s = patience_s
        self.away: StorageUnavailable | None = None
        self._clock = clock
        self._interval_s = interval_s
        self._prices = prices
        self._beginning = threading.Lock()
        # the newest refresh; None: none yet
        self._refresh: Reading | None = None
        # the newest one that a caller asked for
        self._asked: Reading | None = None
        self._error: TieredIndexError | None = None
        # when the refresh began that ended with the error
        self._failed_s = clock.monotonic_s()
        # when the last successful refresh began: the state may be as old as that
        self._refreshed_s = clock.monotonic_s()

    @abstractmethod
    def refresh(self) -> object:
        """Read new log records, then call `_refreshed_from`."""

    def due_refresh(self, begun_s: float, begin: Begin) -> tuple[Reading, bool] | None:
        """Return the refresh that a lookup begun at `begun_s` needs, and whether this call began it; None: none is due.

        `begin` runs a call in another thread. Raises as `begin`.
        """
        # on one line, as in `synchronized`
        with self._beginning: return self._due_refresh(begun_s, begin)  # noqa: E701  # fmt: skip

    def _due_refresh(self, begun_s: float, begin: Begin) -> tuple[Reading, bool] | None:
        if not self._is_due(begun_s):
            return None
        is_new = self._refresh is None or self._refresh.ends.done()
        if self._refresh is None or is_new:
            self._refresh = Reading(begin(self.refresh_due), time.monotonic())
        return self._refresh, is_new

    def new_refresh(self, begin: Begin) -> Reading:
        """Begin a refresh that raises its error. While the storage is away, one is under way at most."""
        with self._beginning:
            if self.away is None or self._asked is None or self._asked.ends.done():
                self._asked = Reading(begin(self.refresh), time.monotonic())
            return self._asked

    def wait(self, reading: Reading, until_s: float | None = None) -> bool:
        """Wait for a refresh until `until_s` (`time.monotonic()`). Return whether it ended, or raise its error.

        If it takes longer than `patience_s`, the storage is away from then on.
        """
        patience_ends_s = reading.begun_s + self.patience_s
        ends_s = patience_ends_s if until_s is None else min(patience_ends_s, until_s)
        if wait([reading.ends], None if math.isinf(ends_s) else max(0.0, ends_s - time.monotonic())).done:
            reading.ends.result()
            return True
        if time.monotonic() >= patience_ends_s:
            self.leave()
        return False

    def leave(self) -> StorageUnavailable:
        """Report the storage as away from now on, until a refresh succeeds. Return the error."""
        error = StorageUnavailable(f"{self.name} did not answer within {self.patience_s:g} s")
        if self.away is None:
            self._failed(error, self._clock.monotonic_s())
            self.away = error
        return error

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
        return begun_s - self._refreshed_s >= self._interval_s or self._fails_by_earlier(begun_s)

    def fails(self, begun_s: float) -> bool:
        """Return whether a lookup that began at `begun_s` fails without a refresh."""
        return self._is_too_old(begun_s) or self._error is not None

    def _is_due(self, begun_s: float) -> bool:
        if self.away is not None:
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
        begun_s = self._clock.monotonic_s()
        try:
            read()
        except (StorageError, CorruptFile) as error:
            self._failed(error, begun_s)

    def _failed(self, error: TieredIndexError, begun_s: float) -> None:
        # before the error, which other threads read first
        self._failed_s = begun_s
        self._error = error
        self._refreshed_s = self._clock.monotonic_s() - max(0.0, self._interval_s - _RETRY_S)

    def _refreshed_from(self, begun_s: float) -> None:
        """Note a successful refresh that began at `begun_s`."""
        self._refreshed_s = begun_s
        self.away = None

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
