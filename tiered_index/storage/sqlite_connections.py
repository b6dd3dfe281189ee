"""Connections to one database file, and transactions on them that are repeated while somebody else is in the way.

Invariants: one thread uses a connection at a time; none is lent while a caller's code runs outside a transaction, so none is held
by a listing between two pages; idle ones never outlive the file they were opened on, nor a fork.

Locks: SQLite's own decide between processes. Writers of one process queue at a lock of ours first, because SQLite's waiting is polling
and starves some. Every wait is bounded by `busy_timeout_s`; then it is `StorageUnavailable`.

Forks: locks on files don't pass to a child, but the library's memory of them does, and a child that believed it could lose another
process's data. So before a fork every connection is closed, and both sides open new ones. Threads: any number.
"""

from __future__ import annotations

import os
import random
import sqlite3
import threading
import time
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar
from urllib.parse import quote

from tiered_index.errors import InvalidArgument, StorageMisconfigured, StorageUnavailable, TieredIndexError
from tiered_index.storage.sqlite_errors import is_passing, translate
from tiered_index.storage.sqlite_schema import Contents, adopt, create, recognise

__all__ = ["ConnectionPool"]

_T = TypeVar("_T")
_ATTEMPTS = 8
_LONGEST_WAIT_S = 0.25
_KEPT = 16
# idle connections; a burst of more threads opens more and closes them again


@dataclass(frozen=True)
class _Link:
    """One open connection, and the file (device, inode) that it was opened on."""

    connection: sqlite3.Connection
    file: tuple[int, int]


class ConnectionPool:
    """Connections to `path`; the file is made by the first `write`."""

    def __init__(self, path: Path, busy_timeout_s: float, *, sleep: Callable[[float], None] = time.sleep) -> None:
        self.path = path
        self._timeout_s = busy_timeout_s
        self._sleep = sleep
        self._state = threading.Condition()
        self._idle: list[_Link] = []
        self._lent = 0
        self._closed = False
        self._forking = False
        self._forked_while_lent = False
        self._writer = threading.Lock()
        with _registry_lock:
            _pools.add(self)

    def read(self, doing: str, action: Callable[[sqlite3.Connection], _T], absent: Callable[[], _T]) -> _T:
        """Return what `action` makes of one consistent state of the database, or `absent()` where there is no database (yet).

        `action` may be called again. Raises its typed errors, and those of `sqlite_errors`.
        """
        return self._repeat(doing, lambda: self._transact("BEGIN", action, absent))

    def write(self, doing: str, action: Callable[[sqlite3.Connection], _T]) -> _T:
        """Run `action` in one write transaction, durable when this returns, undone whole if it raises. `action` may be called again."""
        return self._repeat(doing, lambda: self._write(doing, action))

    def close(self) -> None:
        """Close every connection, lent ones when they come back. Idempotent."""
        with self._state:
            self._closed = True
            idle, self._idle = self._idle, []
        for link in idle:
            link.connection.close()

    def _repeat(self, doing: str, once: Callable[[], _T]) -> _T:
        deadline_s = time.monotonic() + self._timeout_s
        attempt = 1
        while True:
            try:
                return once()
            except sqlite3.Error as error:
                if not is_passing(error) or attempt == _ATTEMPTS or time.monotonic() >= deadline_s:
                    raise translate(error, doing=doing, path=self.path) from error
            self._sleep(random.uniform(0, min(_LONGEST_WAIT_S, 0.01 * 2**attempt)))
            attempt += 1

    def _write(self, doing: str, action: Callable[[sqlite3.Connection], _T]) -> _T:
        if not self._writer.acquire(timeout=self._timeout_s):
            raise StorageUnavailable(f"{doing} in {self.path}: other threads kept writing for {self._timeout_s:g} s")
        try:
            return self._transact("BEGIN IMMEDIATE", action, None)
        finally:
            self._writer.release()

    def _transact(self, begin: str, action: Callable[[sqlite3.Connection], _T], absent: Callable[[], _T] | None) -> _T:
        """Run `action` between `begin` and COMMIT; without `absent` the database is made where there is none."""
        link = self._take(make=absent is None)
        if link is None:
            assert absent is not None
            return absent()
        connection, sound = link.connection, False
        try:
            connection.execute(begin)
            result = action(connection)
            connection.execute("COMMIT")
            sound = True
            return result
        except TieredIndexError:
            connection.execute("ROLLBACK")
            sound = True
            raise
        finally:
            self._give_back(link, sound=sound)

    def _take(self, *, make: bool) -> _Link | None:
        with self._state:
            self._state.wait_for(lambda: not self._forking, self._timeout_s)
            if self._closed:
                raise InvalidArgument(f"the storage {self.path} is closed")
            if self._forked_while_lent:
                raise StorageUnavailable(f"{self.path} was in use by another thread when this process was forked; start it afresh")
            self._lent += 1
        link: _Link | None = None
        try:
            link = self._fresh(self._existing(), make=make)
            return link
        finally:
            if link is None:
                self._returned()

    def _existing(self) -> tuple[int, int] | None:
        try:
            status = self.path.stat()
        except (FileNotFoundError, NotADirectoryError):
            return None  # opening tells what is wrong, where it is to be written
        except OSError as error:
            raise StorageMisconfigured(f"looking at {self.path}: {error.strerror}: check the permissions of its folders") from error
        return status.st_dev, status.st_ino

    def _fresh(self, file: tuple[int, int] | None, *, make: bool) -> _Link | None:
        """Return an idle connection to `file`, or a new one; None where there is nothing to read."""
        while True:
            with self._state:
                link = self._idle.pop() if self._idle else None
            if link is None:
                break
            if link.file == file:
                return link
            link.connection.close()  # somebody replaced or removed the file
        if file is None and not make:
            return None
        connection = self._open(make=make)
        try:
            adopt(connection)
            if recognise(connection, self.path) is Contents.NOTHING:
                if not make:
                    connection.close()
                    return None
                create(connection, self.path)
            status = self.path.stat()
        except BaseException:
            connection.close()
            raise
        return _Link(connection, (status.st_dev, status.st_ino))

    def _open(self, *, make: bool) -> sqlite3.Connection:
        return sqlite3.connect(
            f"file:{quote(str(self.path))}?mode={'rwc' if make else 'rw'}",
            uri=True,
            timeout=self._timeout_s,
            isolation_level=None,
            check_same_thread=False,
        )

    def _give_back(self, link: _Link, *, sound: bool) -> None:
        try:
            with self._state:
                if sound and not self._closed and len(self._idle) < _KEPT:
                    self._idle.append(link)
                    return
            link.connection.close()  # also rolls back what is open
        finally:
            self._returned()

    def _returned(self) -> None:
        with self._state:
            self._lent -= 1
            self._state.notify_all()

    def _before_fork(self) -> None:
        """Wait for lent connections, close all, and lend none until `_after_fork`, which the same thread calls."""
        self._state.acquire()
        self._forking = True  # or threads that read on and on would never leave a moment without a lent connection
        self._state.wait_for(lambda: not self._lent, self._timeout_s)
        while self._idle:
            self._idle.pop().connection.close()

    def _after_fork(self, *, child: bool) -> None:
        self._forked_while_lent |= child and self._lent > 0
        self._forking = False
        self._state.notify_all()
        self._state.release()


_registry_lock = threading.Lock()
_pools: weakref.WeakSet[ConnectionPool] = weakref.WeakSet()
_held: list[ConnectionPool] = []


def _before_fork() -> None:
    _registry_lock.acquire()
    _held[:] = list(_pools)
    for pool in _held:
        pool._before_fork()


def _after_fork(*, child: bool) -> None:
    for pool in _held:
        pool._after_fork(child=child)
    _held.clear()
    _registry_lock.release()


os.register_at_fork(
    before=_before_fork,
    after_in_parent=lambda: _after_fork(child=False),
    after_in_child=lambda: _after_fork(child=True),
)
