"""Parts that one reader's indexes share: caches and thread pools.

Threads: call every method from any thread, except from threads of the pool `threads`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from functools import partial
from typing import TypeVar

from tiered_index.base.call import active_context, check_deadline, remaining_s
from tiered_index.base.threads import DaemonPool, NoThread, PoolFuture, have_ended
from tiered_index.errors import BudgetExceeded
from tiered_index.service.read.caches.disk import DiskCache
from tiered_index.service.read.caches.store import ReadCache
from tiered_index.service.read.files.cold_path import RangeReadPool

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class ReaderParts:
    """The caches in memory and on disk (None: no disk cache), the pool of range reads, the threads that read logs."""

    caches: ReadCache
    disk_cache: DiskCache | None
    range_reads: RangeReadPool
    threads: DaemonPool

    def begin(self, read: Callable[[], T]) -> Future[T]:
        """Read a log in another thread, without the lookup's deadline. Raises as `DaemonPool.submit`."""
        with active_context().without_deadline().active():
            return self.threads.submit(read)

    def in_time(
        self, calls: Sequence[tuple[str, Callable[[], T]]], late: Callable[[T], object] = lambda _: None
    ) -> list[T]:
        """Run calls in parallel until the deadline, and return their results in order.

        Each call comes with a text for errors. Raises the first call's error, or `BudgetExceeded` with the text of an
        unfinished call at the deadline. After an error, `late` gets each result, also of calls still running.
        """
        if len(calls) == 1 and remaining_s() is None:
            return [calls[0][1]()]
        if calls:
            check_deadline(calls[0][0])
        made = [begun(self.threads.submit, call) for _, call in calls]
        try:
            have_ended(made, remaining_s())
            unfinished = {future for future in made if not future.done()}
            results = []
            for (doing, _), future in zip(calls, made, strict=True):
                # a part of the call may reach the same deadline first, and knows less
                if future in unfinished or isinstance(future.exception(), BudgetExceeded):
                    raise BudgetExceeded(f"timeout_s was reached while {doing}")
                results.append(future.result())
            return results
        except BaseException:  # also an interrupted wait: `late` closes the results
            for future in made:
                if not future.cancel():
                    future.add_done_callback(partial(hand_over, late))
            raise

    def close(self, until_s: float | None = None) -> None:
        """Release threads and memory; `until_s` as in `DaemonPool.close`. Idempotent."""
        self.threads.close(until_s)
        self.range_reads.close(until_s)
        self.caches.clear()


def begun(begin: Callable[[Callable[[], T]], Future[T]], call: Callable[[], T]) -> Future[T]:
    """Run a call by `begin`, or in the caller's thread if no thread can be started."""
    try:
        return begin(call)
    except NoThread:
        return ended(call)


def ended(call: Callable[[], T]) -> PoolFuture[T]:
    """Run a call in the caller's thread."""
    future = PoolFuture[T]()
    try:
        future.set_result(call())
    except Exception as error:  # noqa: BLE001 - the caller of `result` gets it
        future.set_exception(error)
    return future


def hand_over(late: Callable[[T], object], future: Future[T]) -> None:
    """Give `late` the result of a call that nobody waits for; an error is dropped."""
    if not future.cancelled() and future.exception() is None:
        late(future.result())
