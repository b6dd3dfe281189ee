"""A state that lookups read again when it is old: the log of one index, or the list of the indexes below a prefix.

The rule. A state is as old as the beginning of the read that made it. A lookup that begins when the state is older than
`refresh_interval_s` needs a new one. The first such lookup begins to read, and the others join it: one read is under
way. A lookup without a deadline waits until the read has ended. One with a deadline waits for at most half of its time.
If the present state can answer it completely, it does not wait for the read of another lookup. Then it uses the state
that is there. If the last read failed, or the state is too old, the answer says so, until a later read succeeds. No
answer fails because of a read that began before its lookup: the lookup waits for a later one.

A reader of several indexes waits only `patience_s` for a response of each. One that does not respond is *away*: lookups
report that at once. After a pause, one read in the background asks it again.
Threads: every method from any thread.
"""

from __future__ import annotations

import contextlib
import copy
import math
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future
from functools import partial
from typing import Any, TypeAlias, TypeVar

from tiered_index.base.call import RequestContext, active_context, remaining_s
from tiered_index.base.clock import Clock
from tiered_index.base.locks import call_lock
from tiered_index.base.threads import DaemonPool, NoThread, have_ended
from tiered_index.config import IndexConfig
from tiered_index.errors import BudgetExceeded, CorruptFile, StorageError, StorageUnavailable, TieredIndexError
from tiered_index.service.read.files.compacted import DamagedFile
from tiered_index.service.read.files.snapshot import Handle
from tiered_index.service.read.parts import ReaderParts, ended
from tiered_index.storage.metering import Usage

# after an error the state is tried again after this time at the latest, even if lookups don't need it
_RETRY_S = 1.0
BRIEF_S = 0.2
"""Lookups in several indexes wait for another try of one that failed faster than this."""
# a read may be late by this time or by the interval, whichever is longer; after that no answer is complete
_OVERDUE_S = 30.0

T = TypeVar("T")
Read: TypeAlias = Future[Any]
"""A read that was begun."""


class Polled(ABC):
    """Base of states that are read again before lookups. `name` is for errors.

    `patience_s`: the time without a response after which it is away.
    """

    def __init__(
        self, name: str, config: IndexConfig, clock: Clock, parts: ReaderParts, patience_s: float = math.inf
    ) -> None:
        self.name, self.patience_s = name, patience_s
        self.usage = Usage()
        """The requests of all lookups and reads to it, also those that hang."""
        self._clock, self._parts, self._prices = clock, parts, config.prices
        self._interval_s = config.refresh_interval_s
        # held by the one who reads
        self._lock = call_lock()
        self._beginning = call_lock()
        # the newest read that was due; one that a caller asked for and that has not begun; all that have not ended
        self._due: Read | None = None
        self._requested: Read | None = None
        # with the pools of their threads
        self._running: dict[Read, DaemonPool] = {}
        # when the present read began, and the number of requests before it; None: there is none
        self._begun: tuple[float, int] | None = None
        self._away: TieredIndexError | None = None
        self._pause_s = _RETRY_S
        self._error: TieredIndexError | None = None
        # when the read began that ended with the error
        self._failed_s = clock.monotonic_s()
        # when the last successful read began: the state may be as old as that
        self._refreshed_s = clock.monotonic_s()

    @abstractmethod
    def _read(self, *, is_due: bool) -> Any:
        """Read a new state, with the lock held, and call `_refreshed_from`. `is_due`: nobody asked for this read."""

    # Reads

    def begin_due(self, begun_s: float, *, is_timed: bool) -> tuple[Read, bool] | None:
        """Return the read that a lookup begun at `begun_s` waits for, and whether this call began it; None: no wait.

        `is_timed`: the lookup has a deadline.
        """
        with self._beginning:
            if not self.is_due(begun_s):
                return None
            reading = self._due
            if reading is not None and not reading.done():
                return (reading, False) if self._is_awaited(begun_s, is_timed) else None
            try:
                reading = self._due = self._begin(self._read_due)
            except NoThread:
                # the present state answers, and the next lookup tries again
                if is_timed:
                    return None
            else:
                return None if self._away is not None else (reading, True)
        return ended(self._read_due), True

    def begin_requested(self) -> tuple[Read, bool]:
        """Return a read that begins after this call and raises its errors, and whether this call began it."""
        with self._beginning:
            if self._requested is not None:
                return self._requested, False
            try:
                self._requested = reading = self._begin(self._read_requested)
            except NoThread:
                pass
            else:
                return reading, True
        return ended(self._read_requested), True

    def refresh(self, begun_s: float) -> None:
        """Wait for the read that a lookup begun at `begun_s` needs, by the rule above."""
        if not self.is_due(begun_s):
            return
        left_s = remaining_s()
        until_s = None if left_s is None else time.monotonic() + left_s / 2
        # twice, because a read of another lookup may have begun before this one
        for _ in range(2):
            if (begun := self.begin_due(begun_s, is_timed=until_s is not None)) is None:
                continue
            reading, is_own = begun
            wait_for([(self, reading)], until_s)
            if reading.done():
                reading.result()
            if is_own:
                return

    def read_on(self, part: float = 0.5) -> Any:
        """Return the state of a read that begins after this call.

        Raises `BudgetExceeded` after a `part` of the time left, and the errors of the read.
        """
        left_s = remaining_s()
        until_s = None if left_s is None else time.monotonic() + left_s * part
        while True:
            reading, is_own = self.begin_requested()
            if wait_for([(self, reading)], until_s):
                raise self.away or BudgetExceeded(f"timeout_s was reached while reading the log of {self.name}")
            try:
                return reading.result()
            except BudgetExceeded:
                if is_own:
                    raise
                # the budget of the lookup that began the read: this one has its own

    def _begin(self, call: Callable[[], Any]) -> Read:
        """Read in another thread. Raises as `ReaderParts.begin`."""
        with self._context().counting(self.usage).active():
            reading = self._parts.begin(call)
        self._note_running(reading, self._parts.threads)
        if self._away is not None:
            # it takes no thread from the others
            self._parts.threads.replace_thread(reading)
        return reading

    def begin_search(self, pool: DaemonPool, search: Callable[[], T]) -> Future[T]:
        """Search the files in a thread of a pool. Raises as `DaemonPool.submit`."""
        with active_context().counting(self.usage).active():
            searching = pool.submit(search)
        self._note_running(searching, pool)
        return searching

    def _note_running(self, call: Read, pool: DaemonPool) -> None:
        self._running[call] = pool
        call.add_done_callback(lambda ended: self._running.pop(ended, None))

    def _context(self) -> RequestContext:
        """Return the context of a read: that of the lookup that begins it."""
        return active_context()

    def _read_requested(self) -> Any:
        return self._run(is_due=False)

    def _run(self, *, is_due: bool) -> Any:
        with self._lock:
            if not is_due:
                with self._beginning:
                    self._requested = None  # later callers need a later read
            self._begun = time.monotonic(), self.usage.requests
            try:
                return self._read(is_due=is_due)
            finally:
                self._begun = None

    def _read_due(self) -> None:
        """Read with at most half of the lookup's requests, but at least two: a listing and a record.

        If that fails or needs more, lookups report it and the next one tries again.
        """
        context = active_context()
        left = context.requests_left
        half = Usage(self._prices, max_requests=None if left is None else max(min(left, 2), left // 2))
        with contextlib.suppress(BudgetExceeded), context.counting(half).active():
            self._try(partial(self._run, is_due=True))

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
                self._away, self._pause_s = error, _RETRY_S

    # Whether a lookup needs one

    def fails(self, begun_s: float) -> bool:
        """Return whether a lookup that began at `begun_s` fails without a new state."""
        return self._is_too_old(begun_s) or self._error is not None

    def is_due(self, begun_s: float) -> bool:
        """Return whether a lookup that begins at `begun_s` needs a new state."""
        if self._away is not None:
            return self._clock.monotonic_s() - self._failed_s >= self._pause_s
        return self._clock.monotonic_s() - self._refreshed_s >= self._interval_s or self._fails_by_earlier(begun_s)

    def _is_awaited(self, begun_s: float, is_timed: bool) -> bool:
        return self._away is None and (not is_timed or self.fails(begun_s))

    def _fails_by_earlier(self, begun_s: float) -> bool:
        """Return whether a lookup would fail because of a read that began before it."""
        return self._error is not None and self._failed_s < begun_s and self.fails(begun_s)

    def _is_too_old(self, begun_s: float) -> bool:
        """Return whether the state is too old for a complete answer to a lookup that began at `begun_s`."""
        return begun_s - self._refreshed_s > self._oldest_s()

    def _oldest_s(self) -> float:
        """Return the greatest age of the state for a complete answer."""
        return self._interval_s + max(self._interval_s, _OVERDUE_S)

    def _problem(self, begun_s: float, refreshed_s: float, error: TieredIndexError | None, what: str) -> list[Handle]:
        """Return a file that fails with `error`, or because `what`, read at `refreshed_s`, is too old; else nothing."""
        late_s = begun_s - refreshed_s
        # a cheap test first
        if error is None and late_s > _OVERDUE_S and late_s > self._oldest_s():
            error = BudgetExceeded(
                f"{what} was last read {late_s:.0f} s ago, and this lookup had no time to read it again"
            )
        return unread(error)

    def _failed(self, error: TieredIndexError, begun_s: float) -> None:
        # before the error, which other threads read first
        self._failed_s = begun_s
        self._error = error
        self._refreshed_s = self._clock.monotonic_s() - max(0.0, self._interval_s - _RETRY_S)

    def _refreshed_from(self, begun_s: float) -> None:
        """Note a successful read that began at `begun_s`."""
        self._refreshed_s = begun_s
        self._error = self._away = None

    # Storages that do not respond

    @property
    def away(self) -> TieredIndexError | None:
        """The error of a storage that does not respond; None: it responds.

        It is a copy, because each raise adds frames to an error's traceback.
        """
        return copy.copy(self._away)

    @property
    def is_silent(self) -> bool:
        """Whether requests are under way, and none had a response for `patience_s`.

        Also if a read has not even sent a request by then.
        """
        begun = self._begun
        if begun is not None and begun[1] == self.usage.requests:
            return time.monotonic() - begun[0] >= self.patience_s
        return self.usage.is_silent(self.patience_s)

    def leave(self) -> TieredIndexError:
        """Report the storage as away until a read succeeds, and give its threads to the others. Return the error."""
        error = self._late()
        with self._beginning:
            if self._away is None:
                self._failed(error, self._clock.monotonic_s())
                # a pause as long as the wait that it may cost
                self._away, self._pause_s = error, max(_RETRY_S, self.patience_s)
            for call, pool in list(self._running.items()):
                pool.replace_thread(call)
        return copy.copy(error)

    def _late(self) -> StorageUnavailable:
        return StorageUnavailable(f"{self.name} did not answer within {self.patience_s:g} s")


def unread(error: TieredIndexError | None) -> list[Handle]:
    """Return a file that fails with `error`, so that no answer is complete; nothing for None."""
    if error is None:
        return []
    return [DamagedFile(error.file if isinstance(error, CorruptFile) else "log", "storage", error)]


def wait_for(readings: Iterable[tuple[Polled, Read]], until_s: float | None) -> Sequence[Polled]:
    """Wait for reads until `until_s` (`time.monotonic()`), and return the ones whose read has not ended.

    One that does not respond for its `patience_s` is away from then on.
    """
    late, pending = [], list(readings)
    while pending:
        pauses = [index.patience_s / 4 for index, _ in pending] + (
            [] if until_s is None else [until_s - time.monotonic()]
        )
        have_ended((reading for _, reading in pending), None if math.isinf(min(pauses)) else min(pauses))
        is_over = until_s is not None and time.monotonic() >= until_s
        still = []
        for index, reading in pending:
            if reading.done():
                continue
            if is_silent := index.is_silent:
                index.leave()
            if is_silent or is_over:
                late.append(index)
            else:
                still.append((index, reading))
        pending = still
    return late
