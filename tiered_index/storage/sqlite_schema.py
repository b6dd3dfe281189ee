"""What the database file of a `SqliteStorage` consists of, and how one is recognised, refused or made.

    objects   one row an object, the row that makes it visible: name -> body, size, time
    pieces    where the bytes of a body lie: (body, start) -> size, chunk
    chunks    the bytes, at most `CHUNK_BYTES` a row
    drafts    bodies that nothing names (yet, or any more), with the time they were last written; 0: given up
    uploads   unfinished multipart uploads
    parts     their parts: (upload, number) -> body, size, etag

Invariants: every body is named by exactly one row of `objects`, `parts` or `drafts`, in every committed state, so that nothing a crash
leaves is lost from sight; a body's number is never used again; the pieces of a body cover it from 0 on without holes. The file says what
it is by SQLite's own header fields: `APPLICATION_ID` and, as user_version, `VERSION`. Pure but for the connection it is given; any thread.
"""

from __future__ import annotations

import sqlite3
from enum import Enum
from pathlib import Path

from tiered_index.errors import StorageMisconfigured, UnsupportedVersion

__all__ = ["APPLICATION_ID", "CHUNK_BYTES", "VERSION", "Contents", "adopt", "create", "recognise"]

APPLICATION_ID = 0x54494458
"""`TIDX`, in SQLite's header at byte 68."""
VERSION = 1
"""Of these tables, in SQLite's header at byte 60."""
CHUNK_BYTES = 1 << 20
"""Bytes of a row of `chunks`; a body's last row is shorter. A reader takes the sizes from `pieces`."""

_PAGE_BYTES = 16_384
# A row's bytes are a chain of pages: larger pages shorten it, smaller ones make the commit of a small object cheaper.
_WAL_KEPT_BYTES = 64 << 20

_TABLES = (
    "CREATE TABLE objects (name TEXT PRIMARY KEY, body INTEGER NOT NULL, size_bytes INTEGER NOT NULL, modified_ms INTEGER NOT NULL)"
    " WITHOUT ROWID",
    "CREATE TABLE pieces (body INTEGER NOT NULL, start INTEGER NOT NULL, size_bytes INTEGER NOT NULL, chunk INTEGER NOT NULL,"
    " PRIMARY KEY (body, start)) WITHOUT ROWID",
    "CREATE TABLE chunks (id INTEGER PRIMARY KEY, data BLOB NOT NULL)",
    # AUTOINCREMENT: a number that a killed writer still knows must not become somebody else's body
    "CREATE TABLE drafts (body INTEGER PRIMARY KEY AUTOINCREMENT, touched_ms INTEGER NOT NULL)",
    "CREATE TABLE uploads (id TEXT PRIMARY KEY, name TEXT NOT NULL, started_ms INTEGER NOT NULL) WITHOUT ROWID",
    "CREATE INDEX uploads_by_name ON uploads (name, started_ms)",
    "CREATE TABLE parts (upload TEXT NOT NULL, number INTEGER NOT NULL, body INTEGER NOT NULL, size_bytes INTEGER NOT NULL,"
    " etag TEXT NOT NULL, PRIMARY KEY (upload, number)) WITHOUT ROWID",
)


class Contents(Enum):
    """What a database file holds."""

    NOTHING = "nothing"
    OURS = "ours"


def recognise(connection: sqlite3.Connection, path: Path) -> Contents:
    """Return what the file holds. Raises `UnsupportedVersion` for a later version of ours, `StorageMisconfigured` for anything else."""
    application, version, tables = _marks(connection)
    if application == APPLICATION_ID:
        if version != VERSION:
            raise UnsupportedVersion(
                str(path), "this database was written by another version of tiered_index", expected=VERSION, found=version
            )
        return Contents.OURS
    if application or version or tables:
        raise StorageMisconfigured(f"{path} is a database of another program; correct the storage's URI")
    return Contents.NOTHING


def _marks(connection: sqlite3.Connection) -> tuple[int, int, int]:
    """Return application id, version and number of tables of one moment: another process may be making them."""
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
    """Set what holds for one connection. FULL: a commit is on the disk when it returns, whatever the library was built with."""
    connection.execute("PRAGMA synchronous=FULL")
    connection.execute("PRAGMA trusted_schema=OFF")
    # Some builds overwrite what is deleted, which would write every dropped object once more.
    connection.execute("PRAGMA secure_delete=OFF")
    connection.execute(f"PRAGMA journal_size_limit={_WAL_KEPT_BYTES}")


def create(connection: sqlite3.Connection, path: Path) -> None:
    """Make the tables in a file that holds nothing; of racing processes one makes them, the others find them.

    Raises `StorageMisconfigured` where the file system has no shared memory for the write-ahead log.
    """
    connection.execute(f"PRAGMA page_size={_PAGE_BYTES}")
    mode = connection.execute("PRAGMA journal_mode=WAL").fetchone()[0]
    if mode != "wal":
        raise StorageMisconfigured(
            f"{path}: SQLite can't keep a write-ahead log here (journal mode {mode!r}); network file systems can't, use a local one"
        )
    connection.execute("BEGIN IMMEDIATE")
    try:
        if recognise(connection, path) is Contents.NOTHING:
            for table in _TABLES:
                connection.execute(table)
            connection.execute(f"PRAGMA application_id={APPLICATION_ID}")
            connection.execute(f"PRAGMA user_version={VERSION}")
        connection.execute("COMMIT")
    finally:
        if connection.in_transaction:
            connection.execute("ROLLBACK")
