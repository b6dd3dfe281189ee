"""Parts of one search, made side by side by the threads that search files.

Whoever asks for the parts makes those that no thread has begun. So it waits only for what runs, never for a free thread: parts may have
parts, and the threads that search files may ask for parts of their own. Threads: any.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, wait
from contextvars import ContextVar
from typing import Any, TypeVar

from tiered_index.errors import BudgetExceeded
from tiered_index.service.daemon_pool import NoThread
from tiered_index.storage.deadline import remaining_s

__all__ = ["Submit", "by_threads", "side_by_side"]

T = TypeVar("T")
Submit = Callable[[Callable[[], Any]], "Future[Any]"]
"""Has a call run in another thread, in a copy of the caller's context."""
_submit: ContextVar[Submit | None] = ContextVar("tiered_index_side_by_side", default=None)


@contextlib.contextmanager
def by_threads(submit: Submit) -> Iterator[None]:
    """Let `side_by_side` in this context, and copies of it, use the threads behind `submit` until the block ends."""
    token = _submit.set(submit)
    try:
        yield
    finally:
        _submit.reset(token)


def side_by_side(parts: Sequence[Callable[[], T]]) -> list[T]:
    """Return what the parts return, in their order; raises the first one's error, and then begins no more of them."""
    submit = _submit.get()
    if submit is None or len(parts) < 2:
        return [part() for part in parts]
    futures: list[Future[T]] = []
    with contextlib.suppress(NoThread):  # then they are made here
        futures += map(submit, parts[1:])
    try:
        found = [parts[0]()]
        for part, future in zip(parts[1:], futures, strict=False):
            found.append(part() if future.cancel() else _ended(future))
        found += [part() for part in parts[1 + len(futures) :]]
    finally:
        for future in futures:
            future.cancel()
    return found


def _ended(future: Future[T]) -> T:
    if wait([future], remaining_s()).not_done:
        raise BudgetExceeded("timeout_s was reached while waiting for parts of a file")
    return future.result()
