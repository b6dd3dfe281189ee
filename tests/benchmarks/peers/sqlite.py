"""SQLite by the standard library.

The settings are those that its documentation advises: write-ahead log, `synchronous = FULL` (a commit is durable), and
one transaction per batch. The table is its own index ("Clustered Indexes and the WITHOUT ROWID Optimization").
"""

import sqlite3
from typing import Any

import pyarrow as pa

from tests.benchmarks.memory import disk_bytes
from tests.benchmarks.peers.data import hash_of, packed
from tests.benchmarks.peers.protocol import CACHE_BYTES, Peer

_TABLE = """CREATE TABLE IF NOT EXISTS entries (
    key INTEGER, offset INTEGER, queue_id INTEGER, topic_id INTEGER, size INTEGER, second INTEGER,
    PRIMARY KEY (key, offset, queue_id, topic_id)) WITHOUT ROWID"""
_ONE = "SELECT offset, queue_id, topic_id, size, second FROM entries WHERE key = ?"
_AT_ONCE = 10_000


class Sqlite(Peer):
    """A B tree and its write-ahead log."""

    name = "SQLite"

    @classmethod
    def version(cls) -> str:
        return sqlite3.sqlite_version

    def open(self) -> None:
        self._db = sqlite3.connect(self.folder / "entries.db", isolation_level=None)
        for setting in ("journal_mode = WAL", "synchronous = FULL", f"cache_size = {-(CACHE_BYTES >> 10)}"):
            self._db.execute(f"PRAGMA {setting}")
        self._db.execute(_TABLE)

    def prepare(self, entries: pa.RecordBatch) -> Any:
        return packed(entries).tolist()

    def put_batch(self, prepared: Any) -> None:
        self._db.execute("BEGIN")
        self._db.executemany("INSERT OR REPLACE INTO entries VALUES (?, ?, ?, ?, ?, ?)", prepared)
        self._db.execute("COMMIT")

    def lookup(self, key: str) -> Any:
        return self._db.execute(_ONE, (hash_of(key),)).fetchall()

    def lookup_many(self, keys: list[str]) -> Any:
        rows = []
        for at in range(0, len(keys), _AT_ONCE):
            wanted = [hash_of(key) for key in keys[at : at + _AT_ONCE]]
            marks = ",".join("?" * len(wanted))
            rows += self._db.execute(f"SELECT * FROM entries WHERE key IN ({marks})", wanted).fetchall()
        return rows

    def settle(self) -> None:
        self._db.execute("PRAGMA wal_checkpoint(TRUNCATE)")

    def close(self) -> None:
        self._db.close()

    def stored_bytes(self) -> int:
        return disk_bytes(self.folder)
