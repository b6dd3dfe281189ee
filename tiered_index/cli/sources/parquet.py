"""Parquet files: one row a message, a position is a row number.

Columns: topic, queue_id, offset, size, timestamp_ms (integers or a timestamp), key (text) or keys (list of text), optionally topic_id;
further ones are passed over. A row without key makes no entry. A Parquet file does not grow, so its footer identifies it.
One thread; memory: one batch.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from tiered_index.cli.sources.messages import FIELDS, Batch, Record, checked_message, entry_columns
from tiered_index.errors import CorruptFile, InvalidArgument
from tiered_index.service.answers.validation import milliseconds

__all__ = ["MAGIC", "ParquetSource"]

MAGIC = b"PAR1"
BATCH_ROWS = 100_000
_FOOTER_BYTES = 1 << 20


class ParquetSource:
    """One file. Raises `InvalidArgument` for a missing column or a bad row, `CorruptFile` for a file that can't be decoded."""

    unit = "rows"

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            with pq.ParquetFile(path) as file:
                names = file.schema_arrow.names
                self._groups = [file.metadata.row_group(i).num_rows for i in range(file.metadata.num_row_groups)]
        except pa.ArrowException as error:
            raise CorruptFile(str(path), f"not a Parquet file that can be read: {error}") from error
        if missing := [name for name in FIELDS if name not in names]:
            raise InvalidArgument(f"{path}: column {missing[0]!r} is missing; it has {', '.join(names)}")
        if ("key" in names) == ("keys" in names):
            raise InvalidArgument(f"{path}: give a column 'key' (text) or a column 'keys' (list of text); it has {', '.join(names)}")
        self._names = [name for name in (*FIELDS, "key", "keys", "topic_id") if name in names]
        self.total: int | None = sum(self._groups)

    def fingerprint(self, length: int | None) -> tuple[int, str]:
        """Return the file's size and a hash of its last bytes, where the footer describes every row group."""
        size = self.path.stat().st_size
        with self.path.open("rb") as handle:
            handle.seek(max(0, size - _FOOTER_BYTES))
            return size, hashlib.sha256(handle.read()).hexdigest()[:16]

    def batches(self, start: int) -> Iterator[Batch]:
        """Yield the rows from number `start` on."""
        if self.total is not None and start > self.total:
            raise InvalidArgument(f"{self.path} is not what it was when it was taken up to row {start}: it has {self.total} rows")
        first, before = 0, 0
        while first < len(self._groups) and before + self._groups[first] <= start:
            before += self._groups[first]
            first += 1
        position = before
        try:
            with pq.ParquetFile(self.path, coerce_int96_timestamp_unit="ms") as file:
                groups = list(range(first, len(self._groups)))
                for rows in file.iter_batches(BATCH_ROWS, row_groups=groups, columns=self._names):
                    skip = min(len(rows), max(0, start - position))
                    position += len(rows)
                    if skip < len(rows):
                        yield self._batch(rows.slice(skip), position)
        except (pa.ArrowException, OSError) as error:
            raise CorruptFile(str(self.path), f"rows from {position} on can't be read: {error}") from error

    def _batch(self, rows: pa.RecordBatch, end: int) -> Batch:
        if pa.types.is_timestamp(rows["timestamp_ms"].type):
            times = milliseconds(rows["timestamp_ms"])
            rows = rows.set_column(rows.schema.get_field_index("timestamp_ms"), "timestamp_ms", times)
        keyed = rows["key" if "key" in self._names else "keys"]
        with_key = rows.filter(pc.is_valid(keyed)) if keyed.null_count else rows
        columns = with_key if "key" in self._names else entry_columns(pa.Table.from_batches([with_key]))
        return Batch(columns, len(rows), end, partial(_records, rows, end - len(rows)))


def _records(rows: pa.RecordBatch, first: int) -> Iterator[Record]:
    for number, row in enumerate(rows.to_pylist(), first):
        fields: dict[str, Any] = row
        if "key" in fields:
            key = fields.pop("key")
            fields["keys"] = [] if key is None else [key]
        elif fields["keys"] is None:
            fields["keys"] = []
        try:
            yield Record(f"row {number + 1}", number, number + 1, checked_message(fields))
        except InvalidArgument as error:
            yield Record(f"row {number + 1}", number, number + 1, None, str(error))
