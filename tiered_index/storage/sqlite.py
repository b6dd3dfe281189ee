"""Objects in one SQLite database (`sqlite:///file.db`), for one machine and all its processes.

An object's bytes are in chunks of 256 KiB. One transaction inserts them and the object's name. When a call returns, its
effect is durable. Each read sees one consistent state and never waits for a writer (write-ahead log). Writers wait for
one another. The first write makes the file. Bytes of deleted objects are overwritten and their space is used again. The
file never shrinks, because that would rewrite it under its readers. Errors in addition to the contract's: `DiskFull`,
`CorruptFile`, `UnsupportedVersion`. Do not use it on a network file system, which lacks the locks.

    objects   name -> number of the first chunk, size, time
    chunks    number -> bytes, `CHUNK_BYTES` a row; those of an object have successive numbers

Threads: any number, in any number of processes. SQLite's locks decide between processes. The threads of one process
share a connection for reads and one for writes. They wait for their turn here: SQLite polls, which starves some of
them. Every wait is bounded. File locks don't pass to a forked child, but SQLite's memory of them does: a fork waits for
the transactions of other threads, and closes the connections. Parent and child then open others.
"""

from __future__ import annotations

import io
import os
import random
import sqlite3
import tempfile
import threading
import time
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, suppress
from functools import partial
from pathlib import Path
from typing import Any, Self, TypeVar
from urllib.parse import SplitResult, quote

from tiered_index import errors
from tiered_index.base.clock import Clock, SystemClock
from tiered_index.storage.base import PAGE, Bytes, ObjectInfo, SizedStorage, Writer, check_name, check_prefix
from tiered_index.storage.disk import blocks, local_path, typed_errors

# `TIDX`, in SQLite's header at byte 68
APPLICATION_ID = 0x54494458
# Version of these tables, in SQLite's header at byte 60
VERSION = 2
# Bytes of a chunk; an object's last one is shorter
CHUNK_BYTES = 1 << 18
# Content of a stream that is in memory (more is in a file), and deleted bytes with which a transaction ends
MOST_BYTES = 8 << 20
# SQLite's own wait for locks does not cover the making of a database
_ATTEMPTS = 8
_TABLES = f"""BEGIN IMMEDIATE;
CREATE TABLE IF NOT EXISTS objects (name TEXT PRIMARY KEY, first INTEGER NOT NULL, size_bytes INTEGER NOT NULL,
    modified_ms INTEGER NOT NULL) WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS chunks (number INTEGER PRIMARY KEY, data BLOB NOT NULL);
PRAGMA application_id={APPLICATION_ID};
PRAGMA user_version={VERSION};
COMMIT"""
# Larger pages make a chunk's list of pages shorter, smaller ones make commits of small objects cheaper. FULL: a commit
# is on the disk when it returns. Deleted bytes are overwritten: an erasure promises that none is left.
PRAGMAS = ("page_size=16384", "synchronous=FULL", "trusted_schema=0", "secure_delete=1", "journal_size_limit=67108864")
_MARKS = """SELECT application_id, user_version, (SELECT count(*) FROM sqlite_master)
    FROM pragma_application_id, pragma_user_version"""
_OBJECTS = """SELECT name, first, size_bytes, modified_ms FROM objects WHERE name >= ? AND name > ? AND name < ?
    ORDER BY name LIMIT ?"""
# The error and the advice for names of SQLite's result codes or for their first words; the first match applies.
# ERROR: our statements are correct, so a table is missing or has other columns
_LACKS, _MISCONFIGURED = errors.StorageMisconfigured.lacking, errors.StorageMisconfigured
_NO_ABILITY = "the file system of {} has no file locks, shared maps of files or sync of folders: use another one"
_MEANINGS: tuple[tuple[str, Callable[..., errors.TieredIndexError], str], ...] = (
    ("IOERR_LOCK IOERR_RDLOCK IOERR_SHMLOCK IOERR_SHMMAP IOERR_SHMOPEN IOERR_DIR_FSYNC", _LACKS, _NO_ABILITY),
    ("FULL", errors.DiskFull, "make room or move the database"),
    ("CANTOPEN READONLY PERM AUTH NOLFS", _MISCONFIGURED, "check path and permissions of it and of {}"),
    ("NOTADB", _MISCONFIGURED, "correct the storage's URI, or restore the file if its first page is damaged"),
    ("CORRUPT FORMAT MISMATCH CONSTRAINT ERROR", errors.CorruptFile, "the database is damaged: restore it"),
)
_T = TypeVar("_T")


class SqliteStorage(SizedStorage):
    """Objects in the database file at `path`; `busy_timeout_s` bounds every wait for another writer."""

    has_server = False

    def __init__(self, path: Path, *, busy_timeout_s: float = 30.0, clock: Clock | None = None) -> None:
        self.path, self._clock = path.absolute(), clock or SystemClock()
        self.uri = "sqlite" + self.path.as_uri().removeprefix("file")
        self._reads = _Connection(self.path, "BEGIN", busy_timeout_s)
        self._writes = _Connection(self.path, "BEGIN IMMEDIATE", busy_timeout_s)

    @classmethod
    def from_uri(cls, uri: SplitResult, options: Any) -> Self:
        """As `Storage.from_uri`."""
        return cls(local_path(uri, "sqlite:///file.db"))

    def put(self, name: str, data: Bytes) -> None:
        """Store `data` under `name` in one transaction."""
        self.insert(name, io.BytesIO(data), memoryview(data).nbytes)

    def put_if_absent(self, name: str, data: Bytes) -> None:
        """Store `data` if `name` does not exist; the transaction decides. Raises `ObjectExists`."""
        self.insert(name, io.BytesIO(data), memoryview(data).nbytes, if_absent=True)

    def insert(self, name: str, content: Any, size_bytes: int, *, if_absent: bool = False) -> None:
        """Store the `size_bytes` bytes of a file, `content`, in one transaction."""
        doing = f"writing {check_name(name)!r}"

        def insert(database: sqlite3.Connection) -> None:
            if self._remove(name, database) is not None and if_absent:
                raise errors.ObjectExists(name, self.uri)
            (first,) = database.execute("SELECT ifnull(max(number), 0) + 1 FROM chunks").fetchone()
            for chunk in enumerate(blocks(content, size_bytes, CHUNK_BYTES, doing), first):
                # one call each: a signal handler may fork between them, and within none
                database.execute("INSERT INTO chunks VALUES (?, ?)", chunk)
            database.execute("INSERT INTO objects VALUES (?, ?, ?, ?)", (name, first, size_bytes, self.now_ms()))

        self._writes.transact(doing, insert, make=True)

    def open_writer(self, name: str) -> _SqliteWriter:
        """As `Storage.open_writer`; bytes beyond the first `MOST_BYTES` are in a temporary file meanwhile."""
        return _SqliteWriter(self, name)

    def head(self, name: str) -> ObjectInfo:
        return self._reads.transact(f"looking at {name!r}", partial(self._find, check_name(name)))[1]

    def list(self, prefix: str = "", *, start_after: str = "") -> Iterator[ObjectInfo]:
        """Yield objects in order of name; each page of 1,000 is one state of the database."""
        check_prefix(prefix, start_after)
        page: Sequence[tuple[int, ObjectInfo]] = [(0, ObjectInfo(start_after, 0, 0))] * PAGE
        while len(page) == PAGE:
            # DEL sorts after every character of a name
            bounds = prefix, page[-1][1].name, f"{prefix}\x7f", PAGE
            page = self._reads.transact(f"listing {prefix!r}", partial(self._rows, bounds))
            yield from (info for _, info in page)

    def delete_many(self, names: Iterable[str]) -> None:
        """Remove objects durably, in transactions of `MOST_BYTES` or more: the log needs room for all bytes of one."""
        doomed = [check_name(name) for name in names]

        def delete(database: sqlite3.Connection) -> int:
            removed_bytes = count = 0
            while count < len(doomed) and removed_bytes < MOST_BYTES:
                removed_bytes += self._remove(doomed[count], database) or 0
                count += 1
            return count

        while doomed:
            del doomed[: self._writes.transact(f"deleting {doomed[0]!r} and others", delete)]

    def now_ms(self) -> int:
        """Return this machine's time: no other machine writes to the database."""
        return self._clock.now_ms()

    def purge(self, older_than_ms: int) -> tuple[str, ...]:
        """Empty the write-ahead log: once checkpointed, it keeps its bytes until it is truncated or written again."""

        def truncate(database: sqlite3.Connection) -> bool:
            # not possible within a transaction
            database.execute("COMMIT")
            return bool(database.execute("PRAGMA wal_checkpoint(TRUNCATE)").fetchone()[0])

        is_busy = True
        with suppress(errors.DiskFull):
            is_busy = self._writes.transact("emptying the log", truncate)
        return (f"{self.path}-wal",) if is_busy else ()

    def close(self) -> None:
        """Close the connections once no thread uses them; later calls raise `IndexClosed`. Idempotent."""
        self._reads.close()
        self._writes.close()

    def _read(self, name: str, extent: Callable[[int], tuple[int, int]]) -> tuple[bytes, int]:
        def read(database: sqlite3.Connection) -> tuple[bytes, int]:
            first, info = self._find(name, database)
            start, length = extent(info.size_bytes)
            # the range is in the chunks from `begin` to `end`, both included
            begin, end = start // CHUNK_BYTES, (start + length - 1) // CHUNK_BYTES
            command = "SELECT data FROM chunks WHERE number BETWEEN ? AND ? ORDER BY number"
            rows = database.execute(command, (first + begin, first + end)).fetchall()
            data = b"".join(chunk for (chunk,) in rows if type(chunk) is bytes)
            expected = min((end + 1) * CHUNK_BYTES, info.size_bytes) - begin * CHUNK_BYTES
            if len(data) != expected:
                problem = f"bytes of {name!r} are missing or have a wrong length"
                raise errors.CorruptFile(str(self.path), problem, expected=expected, found=len(data))
            return data[start % CHUNK_BYTES :][:length], info.size_bytes

        return self._reads.transact(f"reading {check_name(name)!r}", read)

    def _find(self, name: str, database: sqlite3.Connection) -> tuple[int, ObjectInfo]:
        """Return the first chunk and the description of an object. Raises `ObjectNotFound`."""
        for first, info in self._rows((name, "", "\x7f", 1), database):
            if info.name == name:
                return first, info
        raise errors.ObjectNotFound(name, self.uri)

    def _rows(self, bounds: Any, database: sqlite3.Connection) -> Sequence[tuple[int, ObjectInfo]]:
        """Return first chunks and descriptions of objects. Raises `CorruptFile`."""
        rows = []
        for name, *numbers in database.execute(_OBJECTS, bounds).fetchall():
            if type(name) is not str or any(type(number) is not int or number < 0 for number in numbers):
                raise errors.CorruptFile(str(self.path), f"the row of an object has wrong values: {numbers!r:.99}")
            rows.append((numbers[0], ObjectInfo(name, *numbers[1:])))
        return rows

    def _remove(self, name: str, database: sqlite3.Connection) -> int | None:
        """Remove an object, and return its size in bytes; None: it was not there."""
        with suppress(errors.ObjectNotFound):
            first, info = self._find(name, database)
            numbers = first, first + (info.size_bytes - 1) // CHUNK_BYTES
            database.execute("DELETE FROM chunks WHERE number BETWEEN ? AND ?", numbers)
            database.execute("DELETE FROM objects WHERE name = ?", (name,))
            return info.size_bytes
        return None


class _SqliteWriter(Writer):
    """Collects an object in memory or in a temporary file, so that no transaction waits for the caller."""

    def __init__(self, storage: SqliteStorage, name: str) -> None:
        super().__init__(name)
        self._storage, self._doing = storage, f"writing {name!r}"
        # Beside the database, where there is room. It has no name: a kill leaves nothing. Without a buffer: a forked
        # child would write its own
        self._content: Any = tempfile.SpooledTemporaryFile(MOST_BYTES, buffering=0, dir=str(storage.path.parent))  # noqa: SIM115

    def _write(self, data: memoryview) -> None:
        with typed_errors(self._doing, needs_folder=True):
            while data:
                data = data[self._content.write(data) :]

    def _finish(self) -> None:
        self._storage.insert(self.name, self._content, self.size_bytes)
        self._drop()

    def _drop(self) -> None:
        self._content.close()


class _Connection:
    """A connection for one kind of transaction, opened on use. Threads take turns."""

    def __init__(self, path: Path, begin: str, timeout_s: float) -> None:
        self._path, self._begin, self._timeout_s = path, begin, timeout_s
        self.lock, self._is_closed = threading.RLock(), False
        self._database: sqlite3.Connection | None = None
        # device and inode of the open file; None: there was none, and the database is in memory
        self._file: tuple[int, int] | None = None
        _connections.add(self)

    def transact(self, doing: str, act: Callable[[sqlite3.Connection], _T], *, make: bool = False) -> _T:
        """Return `act(database)` of one transaction, repeated while other processes hold a lock.

        An error undoes the transaction. Without a database `act` gets an empty one: a file with `make`, else in memory.
        """
        deadline_s = time.monotonic() + self._timeout_s
        if not self.lock.acquire(timeout=self._timeout_s):
            problem = f"other threads used the database for {self._timeout_s:g} s: try again later"
            raise errors.StorageUnavailable(f"{doing} in {self._path}: {problem}")
        attempt = 0
        try:
            while True:
                attempt += 1
                try:
                    # commits, or undoes after an error
                    with self._connected(make) as database:
                        database.execute(self._begin)
                        return act(database)
                except sqlite3.Error as error:
                    fault = translate(error, doing=doing, path=self._path)
                    is_passing = isinstance(fault, errors.StorageUnavailable) and time.monotonic() < deadline_s
                    if not is_passing or attempt == _ATTEMPTS:
                        raise fault from error
                time.sleep(random.uniform(0, 0.01 * 2**attempt))
        finally:
            self.lock.release()

    def _connected(self, make: bool) -> sqlite3.Connection:
        """Return a connection to the file that is there now, or to an empty database in memory if there is none."""
        if self._is_closed:
            raise errors.IndexClosed(f"the storage {self._path} is closed")
        file = self._found()
        # there was no database, its file was replaced, or an undo failed
        if self._database is None or self._file != file or (make and not file) or self._database.in_transaction:
            self.drop()
            self._database = self._opened(file, make)
        return self._database

    def _found(self) -> tuple[int, int] | None:
        """Return device and inode of the database file; None if there is none."""
        try:
            status = self._path.stat()
        except OSError as error:
            # another error is found again, and reported, when the file is opened
            return None if isinstance(error, FileNotFoundError | NotADirectoryError) else (0, 0)
        return status.st_dev, status.st_ino

    def _opened(self, file: tuple[int, int] | None, make: bool) -> sqlite3.Connection:
        """Return a connection to a database with our tables: the file, in which `make` makes them, or one in memory."""
        is_stored = make or file is not None
        where = f"file:{quote(str(self._path))}?mode={'rwc' if make else 'rw'}" if is_stored else ":memory:"
        with ExitStack() as unfinished:
            database = sqlite3.connect(where, self._timeout_s, uri=True, isolation_level=None, check_same_thread=False)
            unfinished.callback(database.close)
            for pragma in PRAGMAS:
                database.execute(f"PRAGMA {pragma}")
            if not self._has_tables(database):
                if is_stored and not make:
                    return self._opened(None, make)
                database.execute("PRAGMA journal_mode=WAL")
                database.executescript(_TABLES)
            self._file = (file or self._found()) if is_stored else None
            unfinished.pop_all()
        return database

    def _has_tables(self, database: sqlite3.Connection) -> bool:
        """Return whether the database has our tables; False if it is empty.

        Raises `UnsupportedVersion` for another version of ours, `StorageMisconfigured` for anything else.
        """
        application, version, tables = database.execute(_MARKS).fetchone()
        if application == APPLICATION_ID:
            errors.UnsupportedVersion.unless_read(str(self._path), "database", VERSION, version)
        if application != APPLICATION_ID and (application or version or tables):
            problem = "is a database of another program; correct the storage's URI"
            raise errors.StorageMisconfigured(f"{self._path} {problem}")
        return bool(application)

    def close(self) -> None:
        """Close the database once no thread uses it; later calls raise `IndexClosed`."""
        self._is_closed = True
        if self.lock.acquire(timeout=self._timeout_s):
            self.drop()
            self.lock.release()

    def drop(self) -> None:
        """Close the database; the next transaction opens it again. The caller has the lock."""
        if self._database is not None:
            self._database.close()
        self._database = self._file = None


def translate(error: sqlite3.Error, *, doing: str, path: Path) -> errors.TieredIndexError:
    """Return the typed error for `error`, raised by the database at `path` while `doing` something."""
    # errors of Python's own module have no code
    code = getattr(error, "sqlite_errorname", "SQLITE_INTERNAL").removeprefix("SQLITE_") + "_"
    for names, kind, advice in _MEANINGS:
        if any(code.startswith(f"{name}_") for name in names.split()):
            text = f"{doing} in {path}: {error}: {advice.format(path.parent)}"
            return kind(str(path), text) if kind is errors.CorruptFile else kind(text)
    # most often another process holds a lock
    return errors.StorageUnavailable(f"{doing} in {path}: {error}: try again later")


_connections: weakref.WeakSet[_Connection] = weakref.WeakSet()
# One thread forks at a time, and holds the locks of these connections. It may have one already: a signal handler forks
# in a transaction, which finds its connection closed and runs again
_forking, _held = threading.RLock(), list[list[_Connection]]()


def _before_fork() -> None:
    _forking.acquire()
    _held.append([])
    for connection in list(_connections):
        connection.lock.acquire()
        _held[-1].append(connection)
        connection.drop()


def _after_fork() -> None:
    for connection in _held.pop():
        connection.lock.release()
    _forking.release()


os.register_at_fork(before=_before_fork, after_in_parent=_after_fork, after_in_child=_after_fork)
