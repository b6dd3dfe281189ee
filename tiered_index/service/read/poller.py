"""The newest state of something that others change: the log of an index, or the list of the indexes below a prefix.

The rule. A state is as old as the beginning of the read that made it. A lookup that begins when the state is older than
`refresh_interval_s` needs a new one. The first such lookup begins to read, and the others join it: one read is under
way. A lookup without a deadline waits until the read has ended. One with a deadline waits for at most half of its time.
If the present state can answer it completely, it does not wait for the read of another lookup. Then it uses the state
that is there. If the last read failed, or the state is older than the interval and 30 s, the answer says so, until a
later read succeeds. No answer fails because of a read that began before its lookup: the lookup waits for a later one.

The poller is one thread of the process, which begins when lookups have to wait. If a lookup came since the last read,
it begins the next one shortly before the state is too old. A reader of several indexes waits only `responds_within_s`
for a response of each. The poller ends the waits for one that does not respond: lookups report that at once, and it
asks the storage again after a pause. Threads: every method from any thread.
"""

from __future__ import annotations

import contextlib
import copy
import heapq
import itertools
import math
import os
import threading
import time
import weakref
from abc import ABC, abstractmethod
from collections.abc import Callable
from concurrent.futures import Future
from functools import partial
from typing import Any, TypeAlias, TypeVar

from tiered_index.base.call import UNBOUNDED, Call, active_context
from tiered_index.base.clock import Clock
from tiered_index.base.locks import call_lock, shared_lock
from tiered_index.base.threads import Condition, DaemonPool, NoThread, PoolFuture, have_ended, start_thread
from tiered_index.config import IndexConfig
from tiered_index.errors import (
    BudgetExceeded,
    CorruptFile,
    IndexClosed,
    StorageError,
    StorageUnavailable,
    TieredIndexError,
)
from tiered_index.service.read.files.compacted import DamagedFile
from tiered_index.service.read.files.snapshot import Handle
from tiered_index.service.read.parts import ReaderParts, ended
from tiered_index.storage.metering import Usage

# after an error the state is read again after the first time, which doubles with each further error up to the second
_RETRY_S, _MOST_RETRY_S = 1.0, 10.0
# lookups in several indexes wait for another try of one that failed faster than this
_BRIEF_S = 0.2
# a read may be late by this time; after that no answer is complete
_LATE_S = 30.0
# the part of the interval by which the poller reads before lookups need it
_AHEAD = 0.1

T = TypeVar("T")
Read: TypeAlias = PoolFuture[Any]
"""A read that was begun."""


class Poller:
    """Looks at each state when it is time, in a thread that runs as long as there is a state to look at."""

    def __init__(self) -> None:
        self._changed = Condition(shared_lock(__name__))
        # by `time.monotonic()`; a time that the state does not name any more is void
        self._times: list[tuple[float, int, weakref.ref[PolledState]]] = []
        self._number = itertools.count()
        self._thread: threading.Thread | None = None

    def look_at(self, state: PolledState, pause_s: float) -> None:
        """Look at a state after a pause, or when it is planned if that is earlier. Raises `NoThread`."""
        look_s = time.monotonic() + pause_s
        if look_s >= state.look_s:
            return
        with self._changed:
            state.look_s = look_s
            heapq.heappush(self._times, (look_s, next(self._number), weakref.ref(state)))
            self._changed.notify()
            if self._thread is not None:
                return
            thread = self._thread = threading.Thread(target=self._run, name="tiered-index-poller", daemon=True)
        try:
            start_thread(thread)
        except BaseException:
            with self._changed:
                # the next plan of each state starts a thread
                for _, _, known in self._times:
                    if (planned := known()) is not None:
                        planned.look_s = math.inf
                self._times, self._thread = [], None
            raise

    def forget(self, state: PolledState) -> None:
        """Look at a state no more."""
        with self._changed:
            state.look_s = math.inf
            self._changed.notify()

    def _run(self) -> None:
        while (state := self._next()) is not None:
            if (pause_s := state.look()) is not None:
                self.look_at(state, pause_s)
            del state

    def _next(self) -> PolledState | None:
        """Wait until it is time to look at a state; None: there is none."""
        with self._changed:
            while self._times:
                look_s, _, known = self._times[0]
                state, wait_s = known(), look_s - time.monotonic()
                if state is None or state.look_s != look_s:
                    heapq.heappop(self._times)
                elif wait_s <= 0:
                    heapq.heappop(self._times)
                    state.look_s = math.inf
                    return state
                else:
                    # while it waits, the state may be collected
                    del state
                    self._changed.wait(min(wait_s, threading.TIMEOUT_MAX))
            self._thread = None
            return None


_poller = Poller()


def _renew_poller() -> None:
    """Replace the poller in a forked child, which has no thread of it."""
    global _poller
    _poller = Poller()


os.register_at_fork(after_in_child=_renew_poller)


class PolledState(ABC):
    """Base of states that are read again before lookups. `name` is for errors.

    `responds_within_s`: the time without a response after which no lookup waits for it.
    """

    def __init__(
        self, name: str, config: IndexConfig, clock: Clock, parts: ReaderParts, responds_within_s: float = math.inf
    ) -> None:
        self.name, self.responds_within_s = name, responds_within_s
        self.usage = Usage()
        """The requests of all lookups and reads to it, also those that hang."""
        self.look_s = math.inf
        """When the poller looks at it."""
        self._clock, self._parts, self._prices = clock, parts, config.prices
        self._interval_s = config.refresh_interval_s
        # held by the one who reads
        self._lock = call_lock()
        self._beginning = call_lock()
        # the newest read that was due, and one that a caller asked for and that has not begun
        self._due: Read | None = None
        self._requested: Read | None = None
        # calls whose thread has not ended, with this and its pool
        self._running: dict[PoolFuture[Any], tuple[Future[Any], DaemonPool]] = {}
        # when the present read began, and the number of requests before it; None: there is none
        self._begun: tuple[float, int] | None = None
        self._unresponsive: TieredIndexError | None = None
        self._error: TieredIndexError | None = None
        # when the read began that ended with the error, and the number of errors since the last success
        self._failed_s, self._failures = clock.monotonic_s(), 0
        # when the last successful read began: the state may be as old as that
        self._refreshed_s = clock.monotonic_s()
        # when lookups need another read
        self._next_s = self._refreshed_s + self._interval_s
        # whether a lookup came since the last read
        self._asked = self._is_over = False

    @abstractmethod
    def _read(self, *, is_due: bool) -> Any:
        """Read a new state, with the lock held, and call `_refreshed_from`. `is_due`: nobody asked for this read."""

    # Lookups

    def newest(self, begun_s: float, call: Call) -> None:
        """Wait for the read that a lookup begun at `begun_s` needs, by the rule above. `call` is the lookup's."""
        if not self.is_due(begun_s):
            return
        left_s = call.remaining_s()
        until_s = None if left_s is None else time.monotonic() + left_s / 2
        # twice, because a read of another lookup may have begun before this one
        for _ in range(2):
            if (begun := self.begin_due(begun_s, call, is_timed=until_s is not None)) is None:
                return
            reading, is_own = begun
            if have_ended([reading], _until(until_s)) and not reading.is_given_up:
                reading.result()
            if is_own:
                return

    def begin_due(self, begun_s: float, call: Call, *, is_timed: bool) -> tuple[Read, bool] | None:
        """Return the read that a lookup begun at `begun_s` waits for, and whether this call began it; None: no wait.

        The read counts for `call`, that of the lookup. `is_timed`: the lookup has a deadline.
        """
        with self._beginning:
            if not self.is_due(begun_s):
                return None
            reading = self._due
            if reading is not None and self.under_way is not None:
                return (reading, False) if not is_timed or self.fails(begun_s) else None
            with contextlib.suppress(NoThread):
                self._due = self._begin_read(self._read_due, call)
                return self._due, True
            if is_timed:
                # the present state answers, and the next lookup tries again
                return None
        return ended(partial(call.run, self._read_due)), True

    def begin_requested(self, call: Call) -> tuple[Read, bool]:
        """Return a read that begins now and raises its errors, and whether it was not begun before.

        It counts for `call`.
        """
        with self._beginning:
            if self._requested is not None:
                return self._requested, False
            with contextlib.suppress(NoThread):
                self._requested = self._begin_read(self._run, call)
                return self._requested, True
        return ended(partial(call.run, self._run)), True

    def read_anew(self, call: Call, part: float = 0.5) -> Any:
        """Return the state of a read that begins now, and counts for `call`.

        Raises `BudgetExceeded` after a `part` of the time left, and the errors of the read.
        """
        left_s = call.remaining_s()
        until_s = None if left_s is None else time.monotonic() + left_s * part
        while True:
            reading, is_own = self.begin_requested(call)
            if not have_ended([reading], _until(until_s)):
                raise BudgetExceeded(f"timeout_s was reached while reading the log of {self.name}")
            try:
                return reading.result()
            except BudgetExceeded:
                if is_own:
                    raise
                # the budget of the lookup that began the read: this one has its own

    def begin_search(self, pool: DaemonPool, search: Callable[[], T]) -> PoolFuture[T]:
        """Search the files in a thread of a pool. The search is given up as a read. Raises as `DaemonPool.submit`."""
        return self._begin(pool, search)

    # Reads

    @property
    def under_way(self) -> Future[None] | None:
        """The read that was due and has not ended, also if it was given up; None: there is none."""
        running = None if self._due is None else self._running.get(self._due)
        return None if running is None else running[0]

    def _begin_read(self, read: Callable[[], T], call: Call) -> PoolFuture[T]:
        """Read in another thread, without the deadline of `call`. Raises as `DaemonPool.submit`."""
        of_read = self._call_of_read(call).counting(self.usage).without_deadline()
        return self._begin(self._parts.threads, partial(of_read.run, read))

    def _begin(self, pool: DaemonPool, call: Callable[[], T]) -> PoolFuture[T]:
        """Call in a thread of a pool. The future ends with the call, or when it is given up."""
        future = PoolFuture[T](self._beginning)

        def called() -> T:
            try:
                return call()
            finally:
                with self._beginning:
                    self._running.pop(future, None)

        with self._beginning:
            running = future.runner = pool.submit(partial(future.run, called))
            self._running[future] = running, pool
        running.add_done_callback(partial(self._refused, future))
        if self._unresponsive is not None:
            # it takes no thread from the others
            pool.replace_thread(running)
        if not math.isinf(self.responds_within_s):
            self._plan(self.responds_within_s / 4)
        return future

    def _refused(self, future: PoolFuture[Any], running: Future[None]) -> None:
        """End a future whose call the pool could not begin."""
        if (error := running.exception()) is not None:
            self._running.pop(future, None)
            future.give_up(error)

    def _call_of_read(self, call: Call) -> Call:
        """Return the call of a read: that of the lookup that begins it."""
        return call

    def _run(self, *, is_due: bool = False) -> Any:
        with self._lock:
            if not is_due:
                with self._beginning:
                    self._requested = None  # later callers need a later read
            self._begun = time.monotonic(), self.usage.requests
            try:
                return self._read(is_due=is_due)
            finally:
                self._begun = None
                self._asked = False

    def _read_due(self) -> None:
        """Read with at most half of the lookup's requests, but at least two: a listing and a record.

        If that fails or needs more, lookups report it and the next one tries again.
        """
        context = active_context()
        left = context.requests_left
        half = Usage(self._prices, max_requests=None if left is None else max(min(left, 2), left // 2))
        with contextlib.suppress(BudgetExceeded), context.counting(half).active():
            self._try(partial(self._run, is_due=True))
        # without an interval each lookup needs a read that begins after it
        if self._interval_s > 0:
            self._plan(max(0.0, self._left_s()))

    def _try(self, read: Callable[[], object]) -> None:
        """Call `read`. After an error of the storage or damage, lookups fail until a later try succeeds."""
        begun_s, started_s = self._clock.monotonic_s(), time.monotonic()
        try:
            read()
        except (StorageError, CorruptFile) as error:
            self._failed(error, begun_s)
            is_slow = time.monotonic() - started_s >= _BRIEF_S and not math.isinf(self.responds_within_s)
            # others would wait for the retries of a storage that refuses connections
            if isinstance(error, StorageUnavailable) and is_slow and self._plan(max(0.0, self._left_s())):
                self._unresponsive = error

    # The poller

    def _plan(self, pause_s: float) -> bool:
        """Let the poller look at the state after a pause, and return whether it will."""
        if self._is_over:
            return False
        try:
            _poller.look_at(self, pause_s)
        except NoThread:
            return False
        return True

    def look(self) -> float | None:
        """Do what is due without waiting. Return the pause until the next look; None: a read or lookup plans it."""
        if self.is_silent:
            self.give_up()
        left_s = self._left_s()
        if left_s <= 0 and self._asked:
            with contextlib.suppress(NoThread, IndexClosed), self._beginning:
                if self.under_way is None:
                    self._due = self._begin_read(self._read_due, UNBOUNDED)
        if self._is_over:
            return None
        if self._running:
            return None if math.isinf(self.responds_within_s) else self.responds_within_s / 4
        if left_s > 0:
            return left_s
        return None if self._unresponsive is None else _RETRY_S

    def _left_s(self) -> float:
        """Return the time until the poller reads the state, if a lookup came since the last read."""
        ahead_s = 0.0 if self._error is not None else self._interval_s * _AHEAD
        return self._next_s - ahead_s - self._clock.monotonic_s()

    def give_up(self) -> None:
        """End all waits for the storage, report it until a read succeeds, and give its threads to the others."""
        error = self._late()
        with self._beginning:
            if self._unresponsive is None:
                self._failed(error, self._clock.monotonic_s(), self.responds_within_s)
                self._unresponsive = error
            running = list(self._running.items())
        for future, (thread, pool) in running:
            pool.replace_thread(thread)
            future.give_up(copy.copy(error))

    def stop(self) -> None:
        """Read the state no more in the background. Idempotent."""
        self._is_over = True
        _poller.forget(self)

    # Whether a lookup needs one

    def fails(self, begun_s: float) -> bool:
        """Return whether a lookup that began at `begun_s` fails without a new state."""
        return self._error is not None or begun_s - self._refreshed_s > self._interval_s + _LATE_S

    def is_due(self, begun_s: float) -> bool:
        """Note a lookup that begins at `begun_s`, and return whether it needs a new state, which may respond."""
        self._asked = True
        if self._unresponsive is not None:
            return False
        # or if the lookup would fail because of a read that began before it
        fails = self._error is not None and self._failed_s < begun_s and self.fails(begun_s)
        return fails or self._clock.monotonic_s() >= self._next_s

    def _problem(self, begun_s: float, refreshed_s: float, error: TieredIndexError | None, what: str) -> list[Handle]:
        """Return a file that fails with `error`, or because `what`, read at `refreshed_s`, is too old; else nothing."""
        late_s = begun_s - refreshed_s
        if error is None and late_s > self._interval_s + _LATE_S:
            error = BudgetExceeded(
                f"{what} was last read {late_s:.0f} s ago, and this lookup had no time to read it again"
            )
        return unread(error)

    def _failed(self, error: TieredIndexError, begun_s: float, waited_s: float = 0.0) -> None:
        """Note the error of a read that began at `begun_s`. The pause is at least as long as the wait that it cost."""
        # before the error, which other threads read first
        self._failed_s = begun_s
        self._error = error
        pause_s = min(_RETRY_S, self._interval_s) * 2.0 ** min(self._failures, 10)
        self._failures += 1
        self._next_s = self._clock.monotonic_s() + max(min(pause_s, _MOST_RETRY_S), waited_s)

    def _refreshed_from(self, begun_s: float) -> None:
        """Note a successful read that began at `begun_s`."""
        self._refreshed_s, self._next_s, self._failures = begun_s, begun_s + self._interval_s, 0
        self._error = self._unresponsive = None

    # Storages that do not respond

    @property
    def unresponsive(self) -> TieredIndexError | None:
        """The error of a storage that does not respond; None: it responds.

        It is a copy, because each raise adds frames to an error's traceback.
        """
        return copy.copy(self._unresponsive)

    @property
    def is_silent(self) -> bool:
        """Whether requests are under way, and none had a response for `responds_within_s`.

        Also if a read has not even sent a request by then.
        """
        begun = self._begun
        if begun is not None and begun[1] == self.usage.requests:
            return time.monotonic() - begun[0] >= self.responds_within_s
        return self.usage.is_silent(self.responds_within_s)

    def _late(self) -> StorageUnavailable:
        return StorageUnavailable(f"{self.name} did not answer within {self.responds_within_s:g} s")


def unread(error: TieredIndexError | None) -> list[Handle]:
    """Return a file that fails with `error`, so that no answer is complete; nothing for None."""
    if error is None:
        return []
    return [DamagedFile(error.file if isinstance(error, CorruptFile) else "log", "storage", error)]


def _until(until_s: float | None) -> float | None:
    """Return the time left until `until_s` (`time.monotonic()`); None: no bound."""
    return None if until_s is None else max(0.0, until_s - time.monotonic())
