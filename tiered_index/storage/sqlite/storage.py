"""Objects in one SQLite database (`sqlite:///file.db`), for one machine and all its processes.

An object's bytes are in rows of 1 MiB; one last row, its name, makes them visible. When a call returns, its effect is
durable. Each read sees one consistent state and never waits for a writer (write-ahead log). The first write makes the
file. Bytes of deleted objects are overwritten and their space is used again. The file never shrinks, because that would
rewrite it under its readers. Errors in addition to the contract's: `DiskFull`, `CorruptFile`, `UnsupportedVersion`.
Threads: any number, in any number of processes. After a fork, open a new storage. Do not use it on a network file
system, which lacks the locks. In a multipart upload each part is a body. Completion assigns the parts' rows to the
object in one transaction, without copying bytes. The transaction that would name a part refuses it after abort or
completion.
"""

from __future__ import annotations

import hashlib
import logging
import sqlite3
import uuid
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import islice
from pathlib import Path
from typing import Any, NoReturn, Self
from urllib.parse import SplitResult, unquote

from tiered_index.clock import Clock, SystemClock
from tiered_index.errors import ConfigError, InvalidArgument, ObjectExists, ObjectNotFound
from tiered_index.storage.base import (
    PAGE,
    Bytes,
    ObjectInfo,
    PartInfo,
    SizedStorage,
    UploadHandle,
    check_name,
    check_part,
    check_parts,
    check_prefix,
)
from tiered_index.storage.disk import Disk, local_path
from tiered_index.storage.sqlite.bodies import Bodies, new_body
from tiered_index.storage.sqlite.connections import ConnectionPool, typed

_log = logging.getLogger(__name__)
_DELETE_BATCH = 500
# Sorts after every character of a name
_LAST = "\x7f"


class SqliteStorage(SizedStorage):
    """Objects in the database file at `path`; `busy_timeout_s` bounds every wait for another writer."""

    def __init__(self, path: Path, *, busy_timeout_s: float = 30.0, clock: Clock | None = None) -> None:
        self.path = path.absolute()
        self.uri = "sqlite" + self.path.as_uri().removeprefix("file")
        self._clock = clock or SystemClock()
        self._pool = ConnectionPool(self.path, busy_timeout_s)
        self._bodies = Bodies(self._pool, self._clock)

    @classmethod
    def from_uri(cls, uri: SplitResult, options: Any, disk: Disk | None, parallel_reads: int | None) -> Self:
        """As `Storage.from_uri`."""
        if unquote(uri.path).endswith("/"):
            raise ConfigError("a sqlite URI names a file, absolute: sqlite:///file.db")
        path = local_path(uri, "sqlite:///file.db")
        # SQLAlchemy and others read three slashes as a relative path, and four as an absolute one
        other = Path(uri.path.removeprefix("/"))
        is_ambiguous = not uri.netloc and not uri.path.startswith("//") and other.parent.is_dir()
        if is_ambiguous and not path.exists() and other.absolute() != path:
            text = "sqlite://%s is the file %s. Other tools take it for %s: write four slashes for an absolute path"
            _log.warning(text, uri.path, path, other.absolute())
        return cls(path)

    def put(self, name: str, data: Bytes) -> None:
        """Store `data` under `name`: up to 16 MiB in one transaction, more in several; the last one names it."""
        check_name(name)
        view = memoryview(data).cast("B")
        self._bodies.finish(
            self._bodies.store(f"writing {name!r}", view, lambda c, body: self._name_object(c, name, body, view.nbytes))
        )

    def put_if_absent(self, name: str, data: Bytes) -> None:
        """Store `data` if `name` does not exist; the table's primary key decides. Raises `ObjectExists`."""
        check_name(name)
        view = memoryview(data).cast("B")

        def name_it(connection: sqlite3.Connection, body: int) -> None:
            row = (name, body, view.nbytes, self._clock.now_ms())
            if not connection.execute("INSERT OR IGNORE INTO objects VALUES (?, ?, ?, ?)", row).rowcount:
                raise ObjectExists(name, self.uri)

        doing = f"writing {name!r}"
        if self._pool.read(doing, lambda connection: self._row(connection, name), lambda: None):
            raise ObjectExists(name, self.uri)  # only saves a write; the INSERT decides
        self._bodies.store(doing, view, name_it)

    def head(self, name: str) -> ObjectInfo:
        check_name(name)
        doing = f"looking at {name!r}"
        _, size, modified_ms = self._pool.read(
            doing, lambda connection: self._find(connection, name), lambda: self._refuse(name)
        )
        return ObjectInfo(name, size, modified_ms)

    def list(self, prefix: str = "", *, start_after: str = "") -> Iterator[ObjectInfo]:
        """Yield objects in order of name; each page of 1,000 is one state of the database."""
        check_prefix(prefix, start_after)

        def page(connection: sqlite3.Connection) -> tuple[ObjectInfo, ...]:
            rows = connection.execute(
                "SELECT name, size_bytes, modified_ms FROM objects WHERE name >= ? AND name > ? AND name < ? ORDER "
                "BY name LIMIT ?",
                (prefix, start_after, prefix + _LAST, PAGE),
            )
            return tuple(ObjectInfo(*row) for row in typed(self.path, rows, str, int, int))

        while True:
            infos: tuple[ObjectInfo, ...] = self._pool.read(f"listing {prefix!r}", page, tuple)
            yield from infos
            if len(infos) < PAGE:
                return
            start_after = infos[-1].name

    def delete(self, name: str) -> None:
        """Remove the object durably."""
        self.delete_many([name])

    def delete_many(self, names: Iterable[str]) -> None:
        """Remove many objects, 500 a transaction."""
        remaining = iter([check_name(name) for name in names])
        while batch := list(islice(remaining, _DELETE_BATCH)):
            self._bodies.finish(self._delete(batch))

    def begin_upload(self, name: str) -> UploadHandle:
        handle = UploadHandle(check_name(name), uuid.uuid4().hex, self._clock.now_ms())
        row = (handle.upload_id, handle.name, handle.started_ms)
        self._pool.write(
            f"starting an upload of {name!r}",
            lambda connection: connection.execute("INSERT INTO uploads VALUES (?, ?, ?)", row),
        )
        return handle

    def upload_part(self, handle: UploadHandle, number: int, data: Bytes) -> PartInfo:
        """Store one part, replacing an earlier one of that number; its `etag` is the SHA-256 of the bytes."""
        check_part(number)
        doing = f"writing part {number} of {handle.name!r}"
        # Only saves a write; the check in `name_it` decides
        self._pool.read(doing, lambda c: self._check_open(c, handle), lambda: self._refuse_upload(handle))
        view = memoryview(data).cast("B")
        part = PartInfo(number, hashlib.sha256(view).hexdigest(), view.nbytes)

        def name_it(connection: sqlite3.Connection, body: int) -> Sequence[int]:
            self._check_open(connection, handle)
            key = (handle.upload_id, number)
            old = connection.execute("SELECT body FROM parts WHERE upload = ? AND number = ?", key).fetchone()
            connection.execute(
                "INSERT OR REPLACE INTO parts VALUES (?, ?, ?, ?, ?)", (*key, body, part.size_bytes, part.etag)
            )
            return self._bodies.give_up(connection, [old[0]] if old else [])

        self._bodies.finish(self._bodies.store(doing, view, name_it))
        return part

    def complete_upload(self, handle: UploadHandle, parts: Sequence[PartInfo]) -> None:
        """Publish the object and drop the upload in one transaction, without writing its bytes again."""
        check_name(handle.name)

        def write(connection: sqlite3.Connection) -> Sequence[int]:
            self._check_open(connection, handle)
            stored = self._parts(connection, handle)
            whole, size = new_body(connection, self._clock.now_ms()), 0
            connection.execute("DELETE FROM drafts WHERE body = ?", (whole,))
            for part in check_parts(handle.name, parts, self.min_part_bytes):
                body, part_size, etag = stored.pop(part.number, (0, 0, None))
                if etag != part.etag:
                    raise InvalidArgument(f"part {part.number} of {handle.name!r} was not uploaded with that etag")
                connection.execute("UPDATE pieces SET body = ?, start = start + ? WHERE body = ?", (whole, size, body))
                size += part_size
            _drop(connection, handle)
            unnamed = self._bodies.give_up(connection, [body for body, _, _ in stored.values()])
            return [*unnamed, *self._name_object(connection, handle.name, whole, size)]

        doing = f"completing {handle.name!r}"
        self._bodies.finish(self._pool.write(doing, write, lambda: self._refuse_upload(handle)))

    def abort_upload(self, handle: UploadHandle) -> None:
        def write(connection: sqlite3.Connection) -> Sequence[int]:
            if not _is_open(connection, handle):
                return []
            bodies = [body for body, _, _ in self._parts(connection, handle).values()]
            _drop(connection, handle)
            return self._bodies.give_up(connection, bodies)

        self._bodies.finish(self._pool.write(f"aborting an upload of {handle.name!r}", write, tuple))

    def list_uploads(self, prefix: str = "", *, older_than_ms: int | None = None) -> Iterator[UploadHandle]:
        """Yield unfinished uploads, ordered by name and start."""
        check_prefix(prefix)

        def read(connection: sqlite3.Connection) -> tuple[UploadHandle, ...]:
            rows = connection.execute(
                "SELECT name, id, started_ms FROM uploads WHERE name >= ?1 AND substr(name, 1, length(?1)) = ?1"
                " AND (?2 IS NULL OR started_ms < ?2) ORDER BY name, started_ms, id",
                (prefix, older_than_ms),
            )
            return tuple(UploadHandle(*row) for row in typed(self.path, rows, str, str, int))

        return iter(self._pool.read("listing uploads", read, tuple))

    def now_ms(self) -> int:
        """Return this machine's time: no other machine writes to the database."""
        return self._clock.now_ms()

    def purge(self, older_than_ms: int) -> tuple[str, ...]:
        """Remove drafts of killed writers, overwrite freed pages, and empty the write-ahead log."""
        self._bodies.sweep(older_than_ms)

        def drafts(connection: sqlite3.Connection) -> list[str]:
            rows = connection.execute("SELECT body FROM drafts")
            return [f"{self.path}: draft {body}" for (body,) in typed(self.path, rows, int)]

        left: list[str] = self._pool.read("listing drafts", drafts, list)
        return (*left, *self._pool.overwrite("overwriting freed pages"))

    def close(self) -> None:
        """Close the connections; later calls raise `IndexClosed`. Idempotent."""
        self._pool.close()

    def _read(self, name: str, extent: Callable[[int], tuple[int, int]]) -> tuple[bytes, int]:
        check_name(name)

        def read(connection: sqlite3.Connection) -> tuple[bytes, int]:
            body, size, _ = self._find(connection, name)
            return self._bodies.read(connection, body, *extent(size)), size

        return self._pool.read(f"reading {name!r}", read, lambda: self._refuse(name))

    def _row(self, connection: sqlite3.Connection, name: str) -> tuple[int, int, int] | None:
        rows = connection.execute("SELECT body, size_bytes, modified_ms FROM objects WHERE name = ?", (name,))
        return next(typed(self.path, rows, int, int, int), None)

    def _find(self, connection: sqlite3.Connection, name: str) -> tuple[int, int, int]:
        return self._row(connection, name) or self._refuse(name)

    def _refuse(self, name: str) -> NoReturn:
        raise ObjectNotFound(name, self.uri)

    def _name_object(self, connection: sqlite3.Connection, name: str, body: int, size: int) -> Sequence[int]:
        """Make `body` the object called `name`; return bodies for `Bodies.finish`."""
        old = self._row(connection, name)
        connection.execute(
            "INSERT OR REPLACE INTO objects VALUES (?, ?, ?, ?)", (name, body, size, self._clock.now_ms())
        )
        return self._bodies.give_up(connection, [old[0]] if old else [])

    def _delete(self, names: Sequence[str]) -> Sequence[int]:
        marks = ", ".join("?" * len(names))

        def write(connection: sqlite3.Connection) -> Sequence[int]:
            gone = connection.execute(f"SELECT body FROM objects WHERE name IN ({marks})", names).fetchall()
            connection.execute(f"DELETE FROM objects WHERE name IN ({marks})", names)
            return self._bodies.give_up(connection, [body for (body,) in gone])

        return self._pool.write(f"deleting {len(names)} objects", write, tuple)

    def _parts(self, connection: sqlite3.Connection, handle: UploadHandle) -> dict[int, tuple[int, int, str]]:
        """Return body, size and etag of an upload's parts by number."""
        rows = connection.execute(
            "SELECT number, body, size_bytes, etag FROM parts WHERE upload = ?", (handle.upload_id,)
        )
        return {number: (body, size, etag) for number, body, size, etag in typed(self.path, rows, int, int, int, str)}

    def _check_open(self, connection: sqlite3.Connection, handle: UploadHandle) -> None:
        if not _is_open(connection, handle):
            self._refuse_upload(handle)

    def _refuse_upload(self, handle: UploadHandle) -> NoReturn:
        where = f"the unfinished uploads (upload {handle.upload_id[:32]} was aborted or completed)"
        raise ObjectNotFound(handle.name, where)


def _is_open(connection: sqlite3.Connection, handle: UploadHandle) -> bool:
    row = connection.execute("SELECT 1 FROM uploads WHERE id = ? AND name = ?", (handle.upload_id, handle.name))
    return row.fetchone() is not None


def _drop(connection: sqlite3.Connection, handle: UploadHandle) -> None:
    connection.execute("DELETE FROM parts WHERE upload = ?", (handle.upload_id,))
    connection.execute("DELETE FROM uploads WHERE id = ?", (handle.upload_id,))
