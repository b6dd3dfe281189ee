"""Connections to one database file, and transactions that are repeated while another connection holds a lock.

One thread uses a connection at a time; a connection is closed if its file was replaced. SQLite's locks decide between
processes. Writers of one process first wait for a lock of this module, because SQLite waits by polling, which starves
some. Every wait is bounded by `busy_timeout_s`. File locks don't pass to a forked child, but SQLite's memory of them
does: idle connections are closed before a fork, and a database whose connection was in use is refused in the child.
Threads: any number.

    objects   one row an object, the row that makes it visible: name -> body, size, time
    pieces    the rows that hold a body: (body, start) -> size, chunk
    chunks    the bytes, at most `CHUNK_BYTES` per row;
    drafts    bodies that have no name yet or any more, with the time of their last write; -1: to be removed
    uploads   unfinished multipart uploads
    parts     their parts: (upload, number) -> body, size, etag
    overwritten  a table without rows; if it exists, no free page has bytes of deleted objects

In every committed state exactly one row of `objects`, `parts` or `drafts` names a body. Its number is never used again.
Its pieces cover it from 0 without gaps.
"""

from __future__ import annotations

import contextlib
import os
import random
import sqlite3
import threading
import time
import weakref
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar
from urllib.parse import quote

from tiered_index.errors import (
    CorruptFile,
    DiskFull,
    IndexClosed,
    StorageMisconfigured,
    StorageUnavailable,
    TieredIndexError,
    UnsupportedVersion,
)

# An extended result code holds the primary one in its lowest byte.
_PRIMARY = 0xFF
_PASSING = frozenset({sqlite3.SQLITE_BUSY, sqlite3.SQLITE_LOCKED, sqlite3.SQLITE_PROTOCOL, sqlite3.SQLITE_SCHEMA})
_SET_UP = frozenset(
    {sqlite3.SQLITE_CANTOPEN, sqlite3.SQLITE_READONLY, sqlite3.SQLITE_PERM, sqlite3.SQLITE_AUTH, sqlite3.SQLITE_NOLFS}
)
_DAMAGE = frozenset({sqlite3.SQLITE_CORRUPT, sqlite3.SQLITE_FORMAT, sqlite3.SQLITE_MISMATCH, sqlite3.SQLITE_CONSTRAINT})
_MOVED = sqlite3.SQLITE_READONLY_DBMOVED
# Extended codes of operations that a file system lacks
_LACKS = {
    sqlite3.SQLITE_IOERR_DIR_FSYNC: "sync of folders",
    sqlite3.SQLITE_IOERR_LOCK: "file locks",
    sqlite3.SQLITE_IOERR_RDLOCK: "file locks",
    sqlite3.SQLITE_IOERR_SHMLOCK: "file locks",
    sqlite3.SQLITE_IOERR_SHMMAP: "shared maps of files",
    sqlite3.SQLITE_IOERR_SHMOPEN: "shared maps of files",
}


def is_passing(error: sqlite3.Error) -> bool:
    """Return whether a repeat may succeed: another connection held a lock, or the file was replaced."""
    code = _code(error)
    return code & _PRIMARY in _PASSING or code == _MOVED


def translate(error: sqlite3.Error, *, doing: str, path: Path) -> TieredIndexError:
    """Return the typed error for `error`, raised by the database at `path` while `doing` something."""
    code = _code(error) & _PRIMARY
    text = f"{doing} in {path}: {error}"
    if is_passing(error):
        return StorageUnavailable(f"{text}: another process holds a lock on the database: try again later")
    if (ability := _LACKS.get(_code(error))) is not None:
        return StorageMisconfigured.lacking(
            f"{text}: the file system of {path.parent} has no {ability}: use a folder of another one"
        )
    if code == sqlite3.SQLITE_FULL:
        return DiskFull(f"{text}: make room or move the database")
    if code in _SET_UP:
        return StorageMisconfigured(f"{text}: check the path, that its folder exists, and the permissions of both")
    if code == sqlite3.SQLITE_NOTADB:
        return StorageMisconfigured(
            f"{text}: correct the storage's URI, or restore the file if its first page was damaged"
        )
    if code in _DAMAGE:
        return CorruptFile(str(path), f"damaged database, found while {doing}: {error}")
    if code == sqlite3.SQLITE_ERROR:
        # Our statements are correct: a table is missing or has other columns
        return CorruptFile(str(path), f"the database's tables are not as they were made: {error}")
    return StorageUnavailable(text)


def _code(error: sqlite3.Error) -> int:
    # Errors of Python's own module have no code
    return int(getattr(error, "sqlite_errorcode", sqlite3.SQLITE_INTERNAL))


# `TIDX`, in SQLite's header at byte 68
APPLICATION_ID = 0x54494458
# Version of these tables, in SQLite's header at byte 60
VERSION = 1
# Bytes of a row of `chunks`; a body's last row is shorter. A reader takes the sizes from `pieces`.
CHUNK_BYTES = 1 << 20
# A row is a chain of pages: larger pages make it shorter, smaller ones make commits of small objects cheaper
_PAGE_BYTES = 16_384
_WAL_KEPT_BYTES = 64 << 20

_TABLES = (
    "CREATE TABLE objects (name TEXT PRIMARY KEY, body INTEGER NOT NULL, size_bytes INTEGER NOT NULL, "
    "modified_ms INTEGER NOT NULL) WITHOUT ROWID",
    "CREATE TABLE pieces (body INTEGER NOT NULL, start INTEGER NOT NULL, size_bytes INTEGER NOT NULL, "
    "chunk INTEGER NOT NULL, PRIMARY KEY (body, start)) WITHOUT ROWID",
    "CREATE TABLE chunks (id INTEGER PRIMARY KEY, data BLOB NOT NULL)",
    # AUTOINCREMENT: never reuse the number of a body, which a paused writer may still use
    "CREATE TABLE drafts (body INTEGER PRIMARY KEY AUTOINCREMENT, touched_ms INTEGER NOT NULL)",
    "CREATE TABLE uploads (id TEXT PRIMARY KEY, name TEXT NOT NULL, started_ms INTEGER NOT NULL) WITHOUT ROWID",
    "CREATE INDEX uploads_by_name ON uploads (name, started_ms)",
    "CREATE TABLE parts (upload TEXT NOT NULL, number INTEGER NOT NULL, body INTEGER NOT NULL, "
    "size_bytes INTEGER NOT NULL, etag TEXT NOT NULL, PRIMARY KEY (upload, number)) WITHOUT ROWID",
)
# Marks a database that has no deleted bytes in free pages, as databases of an earlier version may have
_OVERWRITTEN = "CREATE TABLE overwritten (mark INTEGER)"


def typed(path: Path, rows: Iterable[tuple[Any, ...]], *kinds: type) -> Iterator[tuple[Any, ...]]:
    """Yield rows; check that their values are of `kinds` and numbers not negative. Raises `CorruptFile`."""
    for row in rows:
        for value, kind in zip(row, kinds, strict=True):
            if not isinstance(value, kind) or (isinstance(value, int) and value < 0):
                raise CorruptFile(
                    str(path),
                    "a row of the database has a value of a wrong type",
                    expected=kind.__name__,
                    found=type(value).__name__,
                )
        yield row


def recognise(connection: sqlite3.Connection, path: Path) -> bool:
    """Return whether the file has our tables; False if it is empty.

    Raises `UnsupportedVersion` for a later version of ours, `StorageMisconfigured` for anything else.
    """
    application, version, tables = _marks(connection)
    if application == APPLICATION_ID:
        if version != VERSION:
            problem = "this database was written by another version of tiered_index"
            raise UnsupportedVersion(str(path), problem, expected=VERSION, found=version)
        return True
    if application or version or tables:
        raise StorageMisconfigured(f"{path} is a database of another program; correct the storage's URI")
    return False


def _marks(connection: sqlite3.Connection) -> tuple[int, int, int]:
    """Return application id, version and number of tables, read in one transaction."""
    alone = not connection.in_transaction
    if alone:
        connection.execute("BEGIN")
    try:
        tables = connection.execute("SELECT count(*) FROM sqlite_master").fetchone()[0]
        application = connection.execute("PRAGMA application_id").fetchone()[0]
        return application, connection.execute("PRAGMA user_version").fetchone()[0], tables
    finally:
        if alone:
            connection.execute("ROLLBACK")


def adopt(connection: sqlite3.Connection) -> None:
    """Set the pragmas of a new connection."""
    # FULL: a commit is on the disk when it returns
    connection.execute("PRAGMA synchronous=FULL")
    connection.execute("PRAGMA trusted_schema=OFF")
    # Overwrite deleted bytes: an erasure promises that none is left
    connection.execute("PRAGMA secure_delete=ON")
    connection.execute(f"PRAGMA journal_size_limit={_WAL_KEPT_BYTES}")


def create(connection: sqlite3.Connection, path: Path) -> None:
    """Make the tables in an empty file, once among racing processes. Raises `StorageMisconfigured` without a WAL."""
    connection.execute(f"PRAGMA page_size={_PAGE_BYTES}")
    mode = connection.execute("PRAGMA journal_mode=WAL").fetchone()[0]
    if mode != "wal":
        raise StorageMisconfigured(
            f"{path}: SQLite can't have a write-ahead log here (journal mode {mode!r}), for example on a network file "
            f"system: use a local one"
        )
    connection.execute("BEGIN IMMEDIATE")
    try:
        if not recognise(connection, path):
            for table in (*_TABLES, _OVERWRITTEN):
                connection.execute(table)
            connection.execute(f"PRAGMA application_id={APPLICATION_ID}")
            connection.execute(f"PRAGMA user_version={VERSION}")
        connection.execute("COMMIT")
    finally:
        if connection.in_transaction:
            connection.execute("ROLLBACK")


_T = TypeVar("_T")
_ATTEMPTS = 8
_LONGEST_WAIT_S = 0.25
# Most idle connections
_KEPT = 16


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
        self._state = threading.Lock()
        self._idle: list[_Link] = []
        self._lent = 0
        self._closed = False
        self._pid = os.getpid()
        self._writer = threading.Lock()
        _pools[id(self)] = self

    def read(self, doing: str, action: Callable[[sqlite3.Connection], _T], absent: Callable[[], _T]) -> _T:
        """Return `action(connection)` of one read transaction, which may be repeated; `absent()` without a database."""
        self._check_process()
        return self._repeat(doing, lambda: self._transact("BEGIN", action, absent))

    def write(
        self, doing: str, action: Callable[[sqlite3.Connection], _T], absent: Callable[[], _T] | None = None
    ) -> _T:
        """Return `action(connection)` of one write transaction, which may be repeated and is durable at the return.

        An error undoes all of it. Without a database return `absent()` or, if `absent` is None, make the database.
        """
        self._check_process()
        return self._repeat(doing, lambda: self._write(doing, action, absent))

    def _check_process(self) -> None:
        if self._pid != os.getpid():
            raise IndexClosed(IndexClosed.FORKED)

    def overwrite(self, doing: str) -> tuple[str, ...]:
        """Overwrite all deleted bytes in the file and its write-ahead log.

        Return those of the two that may still have some, since other connections read or the disk is full.
        """
        self._check_process()
        if not self._writer.acquire(timeout=self._timeout_s):
            return (f"{self.path}-wal",)
        try:
            return self._repeat(doing, self._overwrite)
        finally:
            self._writer.release()

    def _overwrite(self) -> tuple[str, ...]:
        link = self._take(make=False)
        if link is None:
            return ()
        connection, sound = link.connection, False
        try:
            marked = "SELECT 1 FROM sqlite_master WHERE name = 'overwritten'"
            if connection.execute(marked).fetchone() is None:
                connection.execute("VACUUM")
                connection.execute(_OVERWRITTEN)
            # a checkpointed log keeps its bytes until it is truncated or written again
            is_busy = connection.execute("PRAGMA wal_checkpoint(TRUNCATE)").fetchone()[0]
            sound = True
            return (f"{self.path}-wal",) if is_busy else ()
        except sqlite3.Error as error:
            if isinstance(translate(error, doing="overwriting", path=self.path), DiskFull):
                return (str(self.path),)
            raise
        finally:
            self._give_back(link, sound=sound)

    def close(self) -> None:
        """Close every connection; connections in use are closed when they are returned. Idempotent."""
        self._closed = True
        self._close_idle()

    def _repeat(self, doing: str, once: Callable[[], _T]) -> _T:
        deadline_s = time.monotonic() + self._timeout_s
        attempt = 1
        while True:
            try:
                return once()
            except sqlite3.Error as error:
                if not is_passing(error) or attempt == _ATTEMPTS or time.monotonic() >= deadline_s:
                    raise translate(error, doing=doing, path=self.path) from error
            except OSError as error:
                raise StorageUnavailable(f"{doing} in {self.path}: {error}") from error
            self._sleep(random.uniform(0, min(_LONGEST_WAIT_S, 0.01 * 2**attempt)))
            attempt += 1

    def _write(self, doing: str, action: Callable[[sqlite3.Connection], _T], absent: Callable[[], _T] | None) -> _T:
        if not self._writer.acquire(timeout=self._timeout_s):
            raise StorageUnavailable(
                f"{doing} in {self.path}: other threads wrote for {self._timeout_s:g} s: try again later"
            )
        try:
            return self._transact("BEGIN IMMEDIATE", action, absent)
        finally:
            self._writer.release()

    def _transact(self, begin: str, action: Callable[[sqlite3.Connection], _T], absent: Callable[[], _T] | None) -> _T:
        """Run `action` between `begin` and COMMIT. Without a database return `absent()`, or make it if that is None."""
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
            if self._closed:
                raise IndexClosed(f"the storage {self.path} is closed")
            self._lent += 1
        link: _Link | None = None
        try:
            file = self._existing()
            if file in _copied:
                raise StorageUnavailable(
                    f"{self.path} was in use by another thread when this process was forked: start a new process"
                )
            link = self._fresh(file, make=make)
            return link
        finally:
            if link is None:
                self._returned()

    def _existing(self) -> tuple[int, int] | None:
        try:
            status = self.path.stat()
        except (FileNotFoundError, NotADirectoryError):
            return None  # a write reports the error when it opens the file
        except OSError as error:
            raise StorageMisconfigured(
                f"looking at {self.path}: {error.strerror}: check the permissions of its folders"
            ) from error
        return status.st_dev, status.st_ino

    def _fresh(self, file: tuple[int, int] | None, *, make: bool) -> _Link | None:
        """Return an idle connection to `file`, or a new one; None if there is no database and `make` is False."""
        while True:
            with self._state:
                link = self._idle.pop() if self._idle else None
            if link is None:
                break
            if link.file == file:
                return link
            link.connection.close()  # the file was replaced or removed
        if file is None and not make:
            return None
        connection = self._open(make=make)
        try:
            adopt(connection)
            if not recognise(connection, self.path):
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
            link.connection.close()  # also rolls back an open transaction
        finally:
            self._returned()

    def _returned(self) -> None:
        with self._state:
            self._lent -= 1

    def _close_idle(self) -> None:
        with self._state:
            idle, self._idle = self._idle, []
        for link in idle:
            link.connection.close()


_pools: weakref.WeakValueDictionary[int, ConnectionPool] = weakref.WeakValueDictionary()
# device and inode of databases that had open connections when this process was forked
_copied: set[tuple[int, int] | None] = set()


def _before_fork() -> None:
    for reference in _pools.valuerefs():
        if (pool := reference()) is not None:
            pool._close_idle()


def _in_child() -> None:
    for reference in _pools.valuerefs():
        if (pool := reference()) is not None and (pool._lent or pool._idle):
            with contextlib.suppress(StorageMisconfigured):
                _copied.add(pool._existing())
    _copied.discard(None)


os.register_at_fork(before=_before_fork, after_in_child=_in_child)
