"""What each failure of SQLite means for the caller. Pure, any thread.

`is_passing` marks what another attempt may cure; `translate` is for what remains. Messages name the file and say what to do.
"""

from __future__ import annotations

import sqlite3
from pathlib import Path

from tiered_index.errors import CorruptFile, DiskFull, StorageMisconfigured, StorageUnavailable, TieredIndexError

__all__ = ["is_passing", "translate"]

_PRIMARY = 0xFF
# An extended result code holds the primary one in its lowest byte.

_PASSING = frozenset({sqlite3.SQLITE_BUSY, sqlite3.SQLITE_LOCKED, sqlite3.SQLITE_PROTOCOL, sqlite3.SQLITE_SCHEMA})
_SET_UP = frozenset({sqlite3.SQLITE_CANTOPEN, sqlite3.SQLITE_READONLY, sqlite3.SQLITE_PERM, sqlite3.SQLITE_AUTH, sqlite3.SQLITE_NOLFS})
_DAMAGE = frozenset({sqlite3.SQLITE_CORRUPT, sqlite3.SQLITE_FORMAT, sqlite3.SQLITE_MISMATCH, sqlite3.SQLITE_CONSTRAINT})
_MOVED = sqlite3.SQLITE_READONLY_DBMOVED


def is_passing(error: sqlite3.Error) -> bool:
    """Return whether the same call may succeed a moment later: another connection was in the way, or the file was replaced."""
    code = _code(error)
    return code & _PRIMARY in _PASSING or code == _MOVED


def translate(error: sqlite3.Error, *, doing: str, path: Path) -> TieredIndexError:
    """Return the typed error for `error`, raised by the database at `path` while `doing` something."""
    code = _code(error) & _PRIMARY
    text = f"{doing} in {path}: {error}"
    if is_passing(error):
        return StorageUnavailable(f"{text}: another process keeps the database locked")
    if code == sqlite3.SQLITE_FULL:
        return DiskFull(f"{text}: make room or move the database")
    if code in _SET_UP:
        return StorageMisconfigured(f"{text}: check the path, that its folder exists, and the permissions of both")
    if code == sqlite3.SQLITE_NOTADB:
        return StorageMisconfigured(f"{text}: correct the storage's URI, or restore the file if its first page was damaged")
    if code in _DAMAGE:
        return CorruptFile(str(path), f"damaged database, found while {doing}: {error}")
    if code == sqlite3.SQLITE_ERROR:
        # Our statements are right, so tables are missing or not as we make them.
        return CorruptFile(str(path), f"the database's tables are not as they were made: {error}")
    return StorageUnavailable(text)


def _code(error: sqlite3.Error) -> int:
    # Errors that Python's module raises by itself carry no code.
    return int(getattr(error, "sqlite_errorcode", sqlite3.SQLITE_INTERNAL))
