"""Multipart uploads of a `SqliteStorage`: each part is a body, and completing moves rows' places, not their bytes.

An upload exists while its row does; a part that arrives after abort or completion finds no row and is refused, in the transaction
that would have named it. Completion is one transaction. Threads: any number, in any number of processes.
"""

from __future__ import annotations

import hashlib
import sqlite3
import uuid
from collections.abc import Callable, Sequence

from tiered_index.clock import Clock
from tiered_index.errors import InvalidArgument, ObjectNotFound
from tiered_index.storage.base import PartInfo, UploadHandle
from tiered_index.storage.parts import check_part_number, check_parts
from tiered_index.storage.sqlite_bodies import Bodies, new_body
from tiered_index.storage.sqlite_connections import ConnectionPool

__all__ = ["SqliteUploads"]

Name = Callable[[sqlite3.Connection, str, int, int], Sequence[int]]
"""Names a body: (connection, object name, body, size) -> bodies given up, to be finished after the transaction."""


class SqliteUploads:
    """The unfinished uploads of one database; `name_object` is how the storage makes a body visible."""

    def __init__(self, pool: ConnectionPool, bodies: Bodies, clock: Clock, min_part_bytes: int, name_object: Name) -> None:
        self._pool = pool
        self._bodies = bodies
        self._clock = clock
        self._min_part_bytes = min_part_bytes
        self._name_object = name_object

    def begin(self, name: str) -> UploadHandle:
        """Start an upload and return its handle."""
        handle = UploadHandle(name, uuid.uuid4().hex, self._clock.now_ms())
        row = (handle.upload_id, handle.name, handle.started_ms)
        self._pool.write(
            f"starting an upload of {name!r}", lambda connection: connection.execute("INSERT INTO uploads VALUES (?, ?, ?)", row)
        )
        return handle

    def put_part(self, handle: UploadHandle, number: int, data: memoryview) -> PartInfo:
        """Store one part, replacing an earlier one of that number; its `etag` is the SHA-256 of the bytes."""
        check_part_number(number)
        doing = f"writing part {number} of {handle.name!r}"
        # Spares a late part the writing; the check beside the part's row is what counts.
        self._pool.read(doing, lambda connection: self._check_open(connection, handle), lambda: self._refuse(handle))
        part = PartInfo(number, hashlib.sha256(data).hexdigest(), data.nbytes)

        def name_it(connection: sqlite3.Connection, body: int) -> Sequence[int]:
            self._check_open(connection, handle)
            key = (handle.upload_id, number)
            old = connection.execute("SELECT body FROM parts WHERE upload = ? AND number = ?", key).fetchone()
            connection.execute("INSERT OR REPLACE INTO parts VALUES (?, ?, ?, ?, ?)", (*key, body, part.size_bytes, part.etag))
            return self._bodies.give_up(connection, [old[0]] if old else [])

        self._bodies.finish(self._bodies.store(doing, data, name_it))
        return part

    def complete(self, handle: UploadHandle, parts: Sequence[PartInfo]) -> None:
        """Publish the parts as one object and drop the upload, in one transaction."""

        def write(connection: sqlite3.Connection) -> Sequence[int]:
            self._check_open(connection, handle)
            stored = self._parts(connection, handle)
            whole, size = new_body(connection, self._clock.now_ms()), 0
            connection.execute("DELETE FROM drafts WHERE body = ?", (whole,))
            for part in check_parts(handle.name, parts, self._min_part_bytes):
                body, part_size, etag = stored.pop(part.number, (0, 0, None))
                if etag != part.etag:
                    raise InvalidArgument(f"part {part.number} of {handle.name!r} was not uploaded with that etag")
                connection.execute("UPDATE pieces SET body = ?, start = start + ? WHERE body = ?", (whole, size, body))
                size += part_size
            self._drop(connection, handle)
            unnamed = self._bodies.give_up(connection, [body for body, _, _ in stored.values()])
            return [*unnamed, *self._name_object(connection, handle.name, whole, size)]

        doing = f"completing {handle.name!r}"
        self._pool.read(doing, lambda connection: self._check_open(connection, handle), lambda: self._refuse(handle))
        self._bodies.finish(self._pool.write(doing, write))

    def abort(self, handle: UploadHandle) -> None:
        """Drop the upload and its parts; one that is gone is not an error."""
        doing = f"aborting an upload of {handle.name!r}"
        if not self._pool.read(doing, lambda connection: _is_open(connection, handle), lambda: False):
            return

        def write(connection: sqlite3.Connection) -> Sequence[int]:
            if not _is_open(connection, handle):
                return []
            bodies = [body for body, _, _ in self._parts(connection, handle).values()]
            self._drop(connection, handle)
            return self._bodies.give_up(connection, bodies)

        self._bodies.finish(self._pool.write(doing, write))

    def list(self, prefix: str, older_than_ms: int | None) -> tuple[UploadHandle, ...]:
        """Return the unfinished uploads, ordered by name and start."""

        def read(connection: sqlite3.Connection) -> tuple[UploadHandle, ...]:
            rows = connection.execute(
                "SELECT name, id, started_ms FROM uploads WHERE name >= ?1 AND substr(name, 1, length(?1)) = ?1"
                " AND (?2 IS NULL OR started_ms < ?2) ORDER BY name, started_ms, id",
                (prefix, older_than_ms),
            )
            return tuple(UploadHandle(*row) for row in rows)

        return self._pool.read("listing uploads", read, tuple)

    def _parts(self, connection: sqlite3.Connection, handle: UploadHandle) -> dict[int, tuple[int, int, str]]:
        rows = connection.execute("SELECT number, body, size_bytes, etag FROM parts WHERE upload = ?", (handle.upload_id,))
        return {number: (body, size, etag) for number, body, size, etag in rows}

    def _drop(self, connection: sqlite3.Connection, handle: UploadHandle) -> None:
        connection.execute("DELETE FROM parts WHERE upload = ?", (handle.upload_id,))
        connection.execute("DELETE FROM uploads WHERE id = ?", (handle.upload_id,))

    def _check_open(self, connection: sqlite3.Connection, handle: UploadHandle) -> None:
        if not _is_open(connection, handle):
            self._refuse(handle)

    def _refuse(self, handle: UploadHandle) -> None:
        where = f"the unfinished uploads (upload {handle.upload_id[:32]} was aborted or completed)"
        raise ObjectNotFound(handle.name, where)


def _is_open(connection: sqlite3.Connection, handle: UploadHandle) -> bool:
    row = connection.execute("SELECT 1 FROM uploads WHERE id = ? AND name = ?", (handle.upload_id, handle.name)).fetchone()
    return row is not None
