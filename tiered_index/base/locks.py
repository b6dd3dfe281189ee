"""Locks that a call holds while Python code of others may run.

While a call holds a lock, the garbage collector may run a finalizer (`__del__`), and a signal its handler, in the same
thread. If that code calls the index, it would wait for a thread that waits for it. So each index knows its locks, and a
call of a thread that holds one of them raises `NestedCall`.

The locks are those of `threading`: an interrupt can't come between taking one and the block that frees it.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterable, Iterator
from contextvars import ContextVar
from typing import Any

from tiered_index.errors import NestedCall

Lock = Any
"""An `RLock`. The type has no public name, and none for the question who owns it."""
# only its text says whether it is held
_RLOCK = type(threading.RLock())
# the locks of the index that is being opened in this context
_collected: ContextVar[list[Lock] | None] = ContextVar("_collected", default=None)
# the locks of modules, by module
_shared: dict[str, Lock] = {}


def call_lock() -> Lock:
    """Return a lock that calls of the index that is being opened hold for a moment."""
    lock, locks = threading.RLock(), _collected.get()
    if locks is not None:
        locks.append(lock)
    return lock


def shared_lock(module: str) -> Lock:
    """Return a new lock of a module, which calls of all indexes hold for a moment."""
    lock = _shared[module] = threading.RLock()
    return lock


@contextlib.contextmanager
def collecting(locks: list[Lock]) -> Iterator[None]:
    """Add the locks that `call_lock` makes in the block to `locks`."""
    token = _collected.set(locks)
    try:
        yield
    finally:
        _collected.reset(token)


def check_not_nested(locks: Iterable[Lock]) -> None:
    """Raise `NestedCall` if this thread holds one of `locks` or a lock of a module."""
    for lock in (*locks, *_shared.values()):
        if is_held_here(lock):
            raise NestedCall(NestedCall.TEXT)


def is_held_here(lock: Lock) -> bool:
    """Return whether this thread holds a lock."""
    return bool(lock._is_owned())


def is_held_elsewhere(lock: Lock) -> bool:
    """Return whether another thread holds a lock. It is not taken: an interrupt could leave it held."""
    return not is_held_here(lock) and isinstance(lock, _RLOCK) and not repr(lock).startswith("<unlocked")
