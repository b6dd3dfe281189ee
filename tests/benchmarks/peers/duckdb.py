"""DuckDB: a table takes new entries, and settled entries are a Parquet file sorted by the key's hash.

The settings are those that "Performance Guide: File Formats" and "Parquet Tips" advise. Data is sorted by the filtered
column, so that the statistics of row groups skip almost all of them. Compression is zstd, and appends come from Arrow.
Row groups have a quarter of the default size, which makes single lookups cheaper.
"""

import os
from typing import Any

import pyarrow as pa

from tests.benchmarks.memory import disk_bytes
from tests.benchmarks.peers.data import hash_of, native_table
from tests.benchmarks.peers.protocol import CACHE_BYTES, Peer

_COLUMNS = '"key", "offset", queue_id, topic_id, size, second'
_ROW_GROUP = 30_720
_TABLE = """CREATE TABLE IF NOT EXISTS entries (
    "key" BIGINT, "offset" BIGINT, queue_id INTEGER, topic_id INTEGER, size INTEGER, second INTEGER)"""


class DuckDb(Peer):
    """DuckDB plans and runs a query for every lookup."""

    name = "DuckDB, Parquet"
    modules = ("duckdb",)

    def open(self) -> None:
        import duckdb

        self._parquet = self.folder / "entries.parquet"
        self._db = duckdb.connect(
            str(self.folder / "entries.duckdb"),
            config={
                "threads": os.cpu_count() or 1,
                "memory_limit": f"{CACHE_BYTES >> 20}MiB",
                "autoinstall_known_extensions": False,
                "autoload_known_extensions": False,
            },
        )
        self._db.execute("SET parquet_metadata_cache = true")
        self._db.execute(_TABLE)
        self._see()

    def _see(self) -> None:
        self._source = f"SELECT {_COLUMNS} FROM entries WHERE {{0}}"
        if self._parquet.exists():
            self._source += f" UNION ALL SELECT {_COLUMNS} FROM read_parquet('{self._parquet}') WHERE {{0}}"
        self._db.execute("PREPARE one AS " + self._source.format('"key" = $1'))

    def prepare(self, entries: pa.RecordBatch) -> Any:
        return native_table(entries)

    def put_batch(self, prepared: Any) -> None:
        # autocommit: the statement is a transaction, durable by DuckDB's write-ahead log
        self._db.register("arriving", prepared)
        self._db.execute(f"INSERT INTO entries SELECT {_COLUMNS} FROM arriving")
        self._db.unregister("arriving")

    def lookup(self, key: str) -> Any:
        rows = self._db.execute(f"EXECUTE one({hash_of(key)})").fetchall()
        return [row[1:] for row in rows]

    def lookup_many(self, keys: list[str]) -> Any:
        self._db.register("wanted", pa.table({"key": [hash_of(key) for key in keys]}))
        columns = self._db.execute(self._source.format('"key" IN (SELECT "key" FROM wanted)')).fetchnumpy()
        return list(zip(columns["key"].tolist(), columns["offset"].tolist(), strict=True))

    def settle(self) -> None:
        written = self.folder / "entries.parquet.new"
        self._db.execute(
            f"COPY ({self._source.format('true')} ORDER BY \"key\") TO '{written}' "
            f"(FORMAT parquet, COMPRESSION zstd, ROW_GROUP_SIZE {_ROW_GROUP})"
        )
        with written.open("rb") as file:
            os.fsync(file.fileno())
        written.rename(self._parquet)
        self._db.execute("TRUNCATE entries")
        self._db.execute("CHECKPOINT")
        self._see()

    def close(self) -> None:
        self._db.close()

    def stored_bytes(self) -> int:
        return disk_bytes(self.folder)
