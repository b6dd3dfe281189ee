"""Requests that a backend sends beyond those that a call is: repeats after a fault, further pages, a second look.

Whoever counts calls sets a listener for the time of one call; a backend tells it of each request just before sending. The listener
travels in a context variable. Threads: a listener is told from whichever thread sends.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from contextvars import ContextVar

__all__ = ["listening", "sending"]

_listener: ContextVar[Callable[[], None] | None] = ContextVar("tiered_index_sending", default=None)


@contextlib.contextmanager
def listening(listener: Callable[[], None]) -> Iterator[None]:
    """Tell `listener` of each request that this context sends until the block ends; what it raises keeps the request from being sent.

    Where blocks nest, the outer listener is told, too.
    """
    token = _listener.set(listener if (outer := _listener.get()) is None else _both(outer, listener))
    try:
        yield
    finally:
        _listener.reset(token)


def sending() -> None:
    """Say that a request is about to be sent. Raises `BudgetExceeded` where it must not be."""
    listener = _listener.get()
    if listener is not None:
        listener()


def _both(outer: Callable[[], None], inner: Callable[[], None]) -> Callable[[], None]:
    def tell() -> None:
        outer()
        inner()

    return tell
