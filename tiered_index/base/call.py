"""A call: its deadline, the counts of its requests and their limits, and whether anybody needs its result.

A lookup passes its `Call` as an argument down to its storage (`metering.MeteredStorage.bound`). Jobs, connectors and
callers of the package apply one to the storage calls of an `active` block. `Storage` itself has no argument for it, so
storages of other packages work unchanged: the metered storage applies the call to each request, and a backend asks
`remaining_s`. For work in another thread, use `Call.run`, or run it in a copy of the context. A deadline is checked
before an attempt and before a wait and never interrupts an attempt. Calls are immutable; threads: any number.

A backend calls `sending` before each request that it sends, and `wasted` for bytes that it has to read again.
"""

from __future__ import annotations

import contextlib
import contextvars
import time
from collections.abc import Callable
from concurrent.futures import Future
from contextvars import ContextVar
from typing import Any, Generic, NamedTuple, Protocol, TypeVar

from tiered_index.errors import BudgetExceeded

_T = TypeVar("_T")


class RequestCount(Protocol):
    """A count of requests and bytes that may limit them: `metering.Usage`."""

    @property
    def limited(self) -> bool: ...
    @property
    def requests_left(self) -> int | None: ...
    def count_between(self, size_bytes: int, /) -> None: ...


class Listener(Protocol):
    """Notified of the requests that a backend sends, and of the bytes that it reads again."""

    def sending(self) -> None: ...
    def wasted(self, size_bytes: int, /) -> None: ...


class Cancellation:
    """Whether nobody needs the results of a call any more. Threads: any number."""

    __slots__ = ("is_set",)

    def __init__(self) -> None:
        self.is_set = False

    def set(self) -> None:
        """Refuse all further requests of the call. Requests under way continue. Idempotent."""
        self.is_set = True


class Call(NamedTuple):
    """The deadline, counters, cancellations and threads of storage calls.

    `deadline_s` is a reading of `time.monotonic()`, or None. Each of `usages` counts the requests to any metered
    storage. `listeners` are notified of each request that a backend sends, the outer ones first.
    `submit` runs a part of the work in another thread; None: the caller's thread does all work. Without `waits`, only
    memory is read, neither a disk nor a storage. Once one of `cancellations` is set, no further request is sent.
    """

    deadline_s: float | None = None
    usages: tuple[RequestCount, ...] = ()
    listeners: tuple[Listener, ...] = ()
    submit: Callable[[Callable[[], Any]], Future[Any]] | None = None
    waits: bool = True
    cancellations: tuple[Cancellation, ...] = ()

    def until(self, deadline_s: float | None) -> Call:
        """Return this context with the earlier of its deadline and `deadline_s`; None changes nothing."""
        if deadline_s is None or (self.deadline_s is not None and self.deadline_s <= deadline_s):
            return self
        return self._replace(deadline_s=deadline_s)

    def without_deadline(self) -> Call:
        """Return this context for work that may outlive the call that began it."""
        return self if self.deadline_s is None else self._replace(deadline_s=None)

    def remaining_s(self) -> float | None:
        """Return the seconds to the deadline, negative after it; None: no deadline."""
        return None if self.deadline_s is None else self.deadline_s - time.monotonic()

    def check(self, doing: str) -> None:
        """Raise `BudgetExceeded` if the deadline has passed; `doing` is for the message."""
        if self.deadline_s is not None and self.deadline_s <= time.monotonic():
            raise BudgetExceeded(f"timeout_s was reached while {doing}")

    def with_threads(self, submit: Callable[[Callable[[], Any]], Future[Any]]) -> Call:
        """Return this context with `submit` for parts of the work."""
        return self._replace(submit=submit)

    def counting(self, usage: RequestCount) -> Call:
        """Return this context with `usage` also counting the requests to metered storages."""
        return self._replace(usages=(*self.usages, usage))

    def cancelled_by(self, cancellation: Cancellation) -> Call:
        """Return this context for work that `cancellation` also ends."""
        return self._replace(cancellations=(*self.cancellations, cancellation))

    @property
    def is_cancelled(self) -> bool:
        """Whether nobody needs the results any more."""
        return any(cancellation.is_set for cancellation in self.cancellations)

    @property
    def is_limited(self) -> bool:
        """Whether requests or bytes are limited."""
        return any(usage.limited for usage in self.usages)

    @property
    def requests_left(self) -> int | None:
        """Number of further requests that the limits allow; None: no limit."""
        left = [usage.requests_left for usage in self.usages]
        return min((number for number in left if number is not None), default=None)

    def run(self, act: Callable[[], _T]) -> _T:
        """Return the result of `act`, applying this context to its storage calls.

        It has a copy of the context: an interrupt can't leave this one to later calls.
        """
        return contextvars.copy_context().run(self._run, act)

    def _run(self, act: Callable[[], _T]) -> _T:
        request_context.set(self)
        return act()

    def active(self) -> Activation[None]:
        """Apply this context to the storage calls of this thread until the block ends."""
        return Activation(self, None)


class Activation(Generic[_T]):
    """A context manager, for one use, that makes a context active and yields `value`."""

    __slots__ = ("_context", "_token", "_value")

    def __init__(self, context: Call, value: _T) -> None:
        self._context, self._value = context, value

    def __enter__(self) -> _T:
        self._token = request_context.set(self._context)
        return self._value

    def __exit__(self, *exc: object) -> None:
        request_context.reset(self._token)


UNBOUNDED = Call()
"""The context of calls without limits, counters and threads. Compare contexts by value."""
request_context: ContextVar[Call] = ContextVar("tiered_index_request_context", default=UNBOUNDED)
"""The context of this thread's storage calls; `Call.active` sets it for a block."""


def active_context() -> Call:
    """Return the context of this thread's storage calls."""
    return request_context.get()


def deadline_at(monotonic_s: float | None) -> contextlib.AbstractContextManager[None]:
    """Set a deadline (of `time.monotonic()`) until the block ends. An earlier one stays in force; None sets none."""
    return request_context.get().until(monotonic_s).active()


def remaining_s() -> float | None:
    """Return the seconds to the deadline of this thread's storage calls, negative after it; None: no deadline."""
    return request_context.get().remaining_s()


def check_deadline(doing: str) -> None:
    """Raise `BudgetExceeded` if the deadline of this thread's storage calls has passed; `doing` is for the message."""
    request_context.get().check(doing)


def sending() -> None:
    """Report a request that is about to be sent. Raises `BudgetExceeded` if it would exceed a limit."""
    for listener in request_context.get().listeners:
        listener.sending()


def wasted(size_bytes: int) -> None:
    """Report a body of at most `size_bytes` bytes that broke off or was not the requested one."""
    for listener in request_context.get().listeners:
        listener.wasted(size_bytes)
