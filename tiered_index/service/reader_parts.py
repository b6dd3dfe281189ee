"""What the views of one reader share: caches, the bound of ranges, and the threads that wait for storages.

A request under way can't be broken off. What nobody waits for any longer, since a deadline came first, goes on in a daemon thread until it
ends by itself.
Threads: every method from any thread, but none of `threads`' own.
"""

from __future__ import annotations

import contextvars
from collections.abc import Callable, Sequence
from concurrent.futures import Future, wait
from dataclasses import dataclass
from functools import partial
from typing import TypeVar

from tiered_index.errors import BudgetExceeded
from tiered_index.service.cold.cache_room import CacheRoom
from tiered_index.service.cold.caches import Caches
from tiered_index.service.cold.travel import Travel
from tiered_index.service.daemon_pool import DaemonPool, NoThread
from tiered_index.storage.deadline import check_deadline, no_deadline, remaining_s

__all__ = ["ReaderParts"]

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class ReaderParts:
    """Caches in memory, the one on disk if any, the bound of ranges, and threads."""

    caches: Caches
    room: CacheRoom | None
    travel: Travel
    threads: DaemonPool

    def begin(self, read: Callable[[], T]) -> Future[T]:
        """Have a log read in another thread, without the lookup's deadline; its requests are counted to the lookup.

        Raises `InvalidArgument` where the reader is closed, `NoThread` where there is no thread.
        """

        def act() -> T:
            with no_deadline():
                return read()

        return self.threads.submit(contextvars.copy_context().run, act)

    def side_by_side(self, calls: Sequence[Callable[[], T]]) -> list[Future[T]]:
        """Make calls without a deadline, each in a thread of its own as far as there are any, the rest in the caller's; return them when
        all have ended."""
        made = self._begun(self.begin, calls)
        wait(made)
        return made

    def in_time(self, calls: Sequence[tuple[str, Callable[[], T]]], late: Callable[[T], object] = lambda _: None) -> list[T]:
        """Return what calls return, in order; they are made side by side and held to the caller's deadline. Each says what it is about.

        Raises the first one's error; `BudgetExceeded`, naming what was not done, where the deadline comes before all have ended. What a
        call returned, or will return, is given to `late` then.
        """
        if len(calls) == 1 and remaining_s() is None:
            return [calls[0][1]()]
        if calls:
            check_deadline(calls[0][0])
        made = self._begun(lambda call: self.threads.submit(contextvars.copy_context().run, call), [call for _, call in calls])
        unfinished = wait(made, remaining_s()).not_done
        try:
            for (doing, _), future in zip(calls, made, strict=True):
                if future in unfinished:
                    raise BudgetExceeded(f"timeout_s was reached while {doing}")
            return [future.result() for future in made]
        except BaseException:
            for future in made:
                if not future.cancel():
                    future.add_done_callback(partial(_hand_over, late))
            raise

    def close(self) -> None:
        """Let go of threads and memory. Idempotent."""
        self.threads.close()
        self.travel.close()
        self.caches.clear()

    def _begun(self, begin: Callable[[Callable[[], T]], Future[T]], calls: Sequence[Callable[[], T]]) -> list[Future[T]]:
        made: list[Future[T]] = []
        for call in calls:
            try:
                made.append(begin(call))
            except NoThread:
                made.append(_made(call))
        return made


def _hand_over(late: Callable[[T], object], future: Future[T]) -> None:
    if future.exception() is None:
        late(future.result())


def _made(call: Callable[[], T]) -> Future[T]:
    future: Future[T] = Future()
    try:
        future.set_result(call())
    except Exception as error:  # noqa: BLE001 - whoever asks for the result gets it
        future.set_exception(error)
    return future
