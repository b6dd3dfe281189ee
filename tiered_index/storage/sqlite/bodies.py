"""Writes, reads and removes bodies: the bytes of a `SqliteStorage`'s objects and parts, in rows of 1 MiB.

A body of more than 16 rows is written as a draft, 16 rows a transaction; the last transaction names it. Large bodies
are removed in the same way. A killed process leaves drafts, which `sweep` removes by age. The functions with a
connection run inside a transaction. Threads: any number.
"""

from __future__ import annotations

import contextlib
import sqlite3
from collections.abc import Callable, Iterable
from functools import partial
from typing import TypeVar

from tiered_index.clock import Clock
from tiered_index.errors import CorruptFile, StorageUnavailable, TieredIndexError
from tiered_index.storage.sqlite.connections import CHUNK_BYTES, ConnectionPool, typed

_T = TypeVar("_T")
# 16 MiB: bounds the growth of the write-ahead log and the wait of other writers
_ROWS_A_TRANSACTION = 16
# Time of a draft to be removed: older than any age, and never the time of a draft that is being written
_GIVEN_UP_MS = -1


class Bodies:
    """The bodies in one database."""

    def __init__(self, pool: ConnectionPool, clock: Clock) -> None:
        self._pool = pool
        self._clock = clock

    def store(self, doing: str, data: memoryview, name_it: Callable[[sqlite3.Connection, int], _T]) -> _T:
        """Store `data` (of bytes) and return `name_it(connection, body)`, which names it in the last transaction.

        `name_it` may be called again. After an error nothing is named; the rows are removed, or left to `sweep`.
        """
        starts = range(0, data.nbytes, CHUNK_BYTES)
        firsts = range(0, max(len(starts), 1), _ROWS_A_TRANSACTION)
        batches = [starts[first : first + _ROWS_A_TRANSACTION] for first in firsts]
        draft: int | None = None
        try:
            for batch in batches[:-1]:
                draft = self._write_batch(doing, draft, data, batch)

            def write_last(connection: sqlite3.Connection) -> _T:
                body = self._append(connection, draft, data, batches[-1])
                connection.execute("DELETE FROM drafts WHERE body = ?", (body,))
                return name_it(connection, body)

            return self._pool.write(doing, write_last)
        except TieredIndexError:
            if draft is not None:
                # Raise the first error; rows that can't be removed now are swept by age
                with contextlib.suppress(TieredIndexError):
                    self._remove(draft)
            raise

    def _write_batch(self, doing: str, draft: int | None, data: memoryview, starts: range) -> int:
        return self._pool.write(doing, lambda connection: self._append(connection, draft, data, starts))

    def _append(self, connection: sqlite3.Connection, draft: int | None, data: memoryview, starts: range) -> int:
        if draft is None:
            body = new_body(connection, self._clock.now_ms())
        else:
            body = draft
            touched = connection.execute(
                "UPDATE drafts SET touched_ms = ? WHERE body = ? AND touched_ms != ?",
                (self._clock.now_ms(), body, _GIVEN_UP_MS),
            )
            if touched.rowcount != 1:
                raise StorageUnavailable(
                    f"{self._pool.path}: the unfinished write was swept as abandoned; write it again"
                )
        for start in starts:
            row = data[start : start + CHUNK_BYTES]
            chunk = connection.execute("INSERT INTO chunks (data) VALUES (?)", (row,)).lastrowid
            connection.execute("INSERT INTO pieces VALUES (?, ?, ?, ?)", (body, start, row.nbytes, chunk))
        return body

    def read(self, connection: sqlite3.Connection, body: int, start: int, length: int) -> bytes:
        """Return `length` bytes of `body` from `start`; read only the rows that hold them. Raises `CorruptFile`."""
        if not length:
            return b""
        end = start + length
        rows = connection.execute(
            "SELECT start, size_bytes, chunk FROM pieces WHERE body = ?1 AND start < ?3"
            " AND start >= ifnull((SELECT max(start) FROM pieces WHERE body = ?1 AND start <= ?2), 0) ORDER BY start",
            (body, start, end),
        )
        found: list[bytes] = []
        damage = partial(CorruptFile, str(self._pool.path))
        position = start
        for piece_start, size, chunk in typed(self._pool.path, rows, int, int, int):
            if not piece_start <= position < piece_start + size:
                break
            with connection.blobopen("chunks", "data", chunk, readonly=True) as blob:
                if len(blob) != size:
                    raise damage(f"row {chunk} has a wrong length", expected=size, found=len(blob))
                blob.seek(position - piece_start)
                found.append(blob.read(min(end, piece_start + size) - position))
            position += len(found[-1])
        if position != end:
            raise damage(f"bytes of body {body} are missing", expected=end, found=position)
        return found[0] if len(found) == 1 else b"".join(found)

    def give_up(self, connection: sqlite3.Connection, bodies: Iterable[int]) -> list[int]:
        """Remove bodies without a name. Return the large ones, which become drafts; pass them to `finish`."""
        return [body for body in bodies if not self._removed_at_once(connection, body)]

    def _removed_at_once(self, connection: sqlite3.Connection, body: int) -> bool:
        few = connection.execute(
            "SELECT chunk FROM pieces WHERE body = ? LIMIT ?", (body, _ROWS_A_TRANSACTION + 1)
        ).fetchall()
        if len(few) > _ROWS_A_TRANSACTION:
            connection.execute("INSERT INTO drafts VALUES (?, ?)", (body, _GIVEN_UP_MS))
            return False
        connection.executemany("DELETE FROM chunks WHERE id = ?", few)
        connection.execute("DELETE FROM pieces WHERE body = ?", (body,))
        return True

    def finish(self, given_up: Iterable[int]) -> None:
        """Remove the bodies that `give_up` returned, after its transaction; a failure leaves them to `sweep`."""
        with contextlib.suppress(TieredIndexError):
            for body in given_up:
                self._remove(body)

    def sweep(self, older_than_ms: int) -> None:
        """Remove drafts last written before `older_than_ms` (epoch ms)."""

        def old(connection: sqlite3.Connection) -> list[tuple[int]]:
            return connection.execute("SELECT body FROM drafts WHERE touched_ms < ?", (older_than_ms,)).fetchall()

        def condemn(connection: sqlite3.Connection) -> list[tuple[int]]:
            bodies = old(connection)
            connection.executemany(
                "UPDATE drafts SET touched_ms = ? WHERE body = ?", [(_GIVEN_UP_MS, body) for (body,) in bodies]
            )
            return bodies

        doing = "sweeping drafts"
        # do not begin a write transaction if there is nothing to sweep
        bodies = self._pool.write(doing, condemn) if self._pool.read(doing, old, list) else []
        for (body,) in bodies:
            self._remove(body)

    def _remove(self, body: int) -> None:
        """Remove a draft, in transactions of bounded size."""
        while self._pool.write("removing a draft", lambda connection: self._remove_some(connection, body)):
            pass

    def _remove_some(self, connection: sqlite3.Connection, body: int) -> bool:
        """Remove rows of a draft; return whether there are more. A writer still at work finds its draft removed."""
        pieces = connection.execute(
            "SELECT chunk, start FROM pieces WHERE body = ? LIMIT ?", (body, 4 * _ROWS_A_TRANSACTION)
        ).fetchall()
        connection.executemany("DELETE FROM chunks WHERE id = ?", [(chunk,) for chunk, _ in pieces])
        connection.executemany(
            "DELETE FROM pieces WHERE body = ? AND start = ?", [(body, start) for _, start in pieces]
        )
        if len(pieces) < 4 * _ROWS_A_TRANSACTION:
            connection.execute("DELETE FROM drafts WHERE body = ?", (body,))
            return False
        connection.execute("UPDATE drafts SET touched_ms = ? WHERE body = ?", (_GIVEN_UP_MS, body))
        return True


def new_body(connection: sqlite3.Connection, now_ms: int) -> int:
    """Return the number of a new draft, never used before."""
    body = connection.execute("INSERT INTO drafts (touched_ms) VALUES (?)", (now_ms,)).lastrowid
    assert body is not None
    return body
