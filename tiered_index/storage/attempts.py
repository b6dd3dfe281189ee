"""What a backend sends and gets beyond what a call is: repeats after a fault, further pages, a second look, bodies that broke off.

Whoever counts calls sets a listener for the time of one call; a backend tells it of each request just before sending, and of bytes that
came in vain. The listener travels in a context variable. Threads: a listener is told from whichever thread sends.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from contextvars import ContextVar
from typing import Protocol

__all__ = ["Listener", "came_in_vain", "listening", "sending"]


class Listener(Protocol):
    """Is told what goes over the wire."""

    def sending(self) -> None:
        """Hear of a request that is about to be sent; what this raises keeps it from being sent."""
        ...

    def came_in_vain(self, size_bytes: int) -> None:
        """Hear of bytes, at most so many, that were delivered and are asked for again."""
        ...


_listeners: ContextVar[tuple[Listener, ...]] = ContextVar("tiered_index_attempts", default=())


@contextlib.contextmanager
def listening(listener: Listener) -> Iterator[None]:
    """Tell `listener` what this context sends until the block ends. Where blocks nest, the outer listener is told, too, and first."""
    token = _listeners.set((*_listeners.get(), listener))
    try:
        yield
    finally:
        _listeners.reset(token)


def sending() -> None:
    """Say that a request is about to be sent. Raises `BudgetExceeded` where it must not be."""
    for listener in _listeners.get():
        listener.sending()


def came_in_vain(size_bytes: int) -> None:
    """Say that a body of at most so many bytes broke off or was not as asked."""
    for listener in _listeners.get():
        listener.came_in_vain(size_bytes)
