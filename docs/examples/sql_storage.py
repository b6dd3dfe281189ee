"""A storage of another package: objects in an SQL database. docs/embedding.md explains the parts."""

import sqlite3
import threading
import time
import uuid
from urllib.parse import unquote

from tiered_index.errors import ObjectExists, ObjectNotFound, StorageUnavailable
from tiered_index.storage.base import BufferedWriter, ObjectInfo, SizedStorage, check_name, check_prefix

PIECE = 1 << 20
TABLES = """
CREATE TABLE IF NOT EXISTS object (name TEXT PRIMARY KEY, body TEXT, size INTEGER, modified_ms INTEGER);
CREATE TABLE IF NOT EXISTS piece (body TEXT, start INTEGER, data BLOB, written_ms INTEGER, PRIMARY KEY (body, start));
"""


class SqlStorage(SizedStorage):
    """Objects in two tables of an SQL database: a body is some rows of `PIECE` bytes, and a name has one body."""

    def __init__(self, path):
        self.uri = f"sql://{path}"
        self._lock = threading.Lock()
        self._database = sqlite3.connect(path, check_same_thread=False, timeout=60, isolation_level="IMMEDIATE")
        self._database.executescript(TABLES)

    @classmethod
    def from_uri(cls, uri, options):
        return cls(unquote(uri.path))

    def run(self, *statements):
        """Run statements and their parameters in one transaction. Return the rows of the last one, and its count."""
        try:
            with self._lock, self._database as database:
                for statement, parameters in statements:
                    cursor = database.execute(statement, parameters)
                return cursor.fetchall(), cursor.rowcount
        except sqlite3.OperationalError as error:
            raise StorageUnavailable(f"{self.uri}: {error}") from error

    def head(self, name):
        return ObjectInfo(name, *self._find(name)[1:])

    def list(self, prefix="", *, start_after=""):
        check_prefix(prefix, start_after)
        command = "SELECT name, size, modified_ms FROM object WHERE name > ? AND name >= ? ORDER BY name LIMIT 1000"
        page = [(start_after, 0, 0)]
        while page:
            page, _ = self.run((command, (page[-1][0], prefix)))
            for row in page:
                if not row[0].startswith(prefix):
                    return
                yield ObjectInfo(*row)

    def put(self, name, data):
        with self.open_writer(name) as writer:
            writer.write(data)

    def put_if_absent(self, name, data):
        with SqlWriter(self, name, only_if_absent=True) as writer:
            writer.write(data)

    def open_writer(self, name):
        return SqlWriter(self, name)

    def delete_many(self, names):
        for name in [check_name(name) for name in names]:
            drop = "DELETE FROM piece WHERE body = (SELECT body FROM object WHERE name = ?)"
            self.run((drop, (name,)), ("DELETE FROM object WHERE name = ?", (name,)))

    def purge(self, older_than_ms):
        half_made = "FROM piece WHERE body NOT IN (SELECT body FROM object)"
        self.run((f"DELETE {half_made} AND written_ms < ?", (older_than_ms,)))
        rows, _ = self.run((f"SELECT DISTINCT body {half_made}", ()))
        return tuple(f"{self.uri}: {body}" for (body,) in rows)

    def close(self):
        with self._lock:
            self._database.close()

    def _find(self, name):
        rows, _ = self.run(("SELECT body, size, modified_ms FROM object WHERE name = ?", (check_name(name),)))
        if not rows:
            raise ObjectNotFound(name, self.uri)
        return rows[0]

    def _read(self, name, extent):
        while True:
            body, size, _ = stored = self._find(name)
            start, length = extent(size)
            command = "SELECT data FROM piece WHERE body = ? AND start > ? AND start < ? ORDER BY start"
            rows, _ = self.run((command, (body, start - PIECE, start + length)))
            data = b"".join(row[0] for row in rows)[start % PIECE :][:length]
            if len(data) == length:
                return data, size
            if self._find(name) == stored:  # otherwise another object took its name meanwhile
                raise StorageUnavailable(f"{self.uri}: {name} has lost rows")


class SqlWriter(BufferedWriter):
    """Writes rows of a new body, which no name has before the end."""

    def __init__(self, storage, name, only_if_absent=False):
        super().__init__(name)
        self._run, self._place, self._only_if_absent = storage.run, storage.uri, only_if_absent
        self._body = uuid.uuid4().hex

    def _send_part(self):
        for at in range(0, len(self._held), PIECE):
            row = self._body, self._sent_bytes + at, bytes(self._held[at : at + PIECE]), time.time_ns() // 10**6
            self._run(("INSERT INTO piece VALUES (?, ?, ?, ?)", row))

    def _finish(self):
        self._send()
        row = self.name, self._body, self._sent_bytes, time.time_ns() // 10**6
        if self._only_if_absent:
            _, count = self._run(("INSERT OR IGNORE INTO object VALUES (?, ?, ?, ?)", row))
            if not count:
                raise ObjectExists(self.name, self._place)
            return
        drop = "DELETE FROM piece WHERE body = (SELECT body FROM object WHERE name = ?)"
        self._run((drop, (self.name,)), ("INSERT OR REPLACE INTO object VALUES (?, ?, ?, ?)", row))

    def _drop(self):
        self._run(("DELETE FROM piece WHERE body = ?", (self._body,)))
