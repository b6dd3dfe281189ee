"""Parquet files: one row a message, with `key` (text or a list of text) or `keys` (list of text).

Further columns are skipped, a position is a row number. A row without key makes no entry. Such a file does not grow:
its footer identifies it. One thread; memory: one batch.
"""

from __future__ import annotations

import contextlib
import hashlib
import io
from collections.abc import Iterator
from functools import partial

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from tiered_index.cli.sources.messages import Batch, Fields, Record, checked_message, entry_columns
from tiered_index.cli.sources.places import LocalFile, StoredFile
from tiered_index.errors import CorruptFile, InvalidArgument

MAGIC = b"PAR1"
BATCH_ROWS = 100_000
_FOOTER_BYTES = 1 << 20


class ParquetSource:
    """One file. Raises `InvalidArgument` for missing columns or bad rows, `CorruptFile` for damage."""

    unit = "rows"

    def __init__(self, place: LocalFile | StoredFile, fields: Fields | None = None) -> None:
        self.place = place
        self.fields = fields or Fields()
        try:
            with self._opened() as file:
                names = file.schema_arrow.names
                self._groups = [file.metadata.row_group(i).num_rows for i in range(file.metadata.num_row_groups)]
        except pa.ArrowException as error:
            raise CorruptFile(str(place), f"not a Parquet file that can be read: {error}") from error
        self.fields.check_columns(names, str(place))
        self._names = list(dict.fromkeys(name for name in self.fields.names.values() if name in names))
        self.total: int | None = sum(self._groups)

    @contextlib.contextmanager
    def _opened(self) -> Iterator[pq.ParquetFile]:
        if isinstance(self.place, LocalFile):
            with pq.ParquetFile(self.place.path, coerce_int96_timestamp_unit="ms") as file:
                yield file
        else:
            with (
                self.place.ranges() as handle,
                pq.ParquetFile(handle, pre_buffer=True, coerce_int96_timestamp_unit="ms") as file,
            ):
                yield file

    def fingerprint(self, length: int | None) -> tuple[int, str]:
        """Return the file's size and a hash of its last bytes, where the footer describes every row group."""
        with self.place.ranges() as handle:
            size = handle.seek(0, io.SEEK_END)
            handle.seek(max(0, size - _FOOTER_BYTES))
            return size, hashlib.sha256(handle.read(_FOOTER_BYTES)).hexdigest()[:16]

    def batches(self, start: int) -> Iterator[Batch]:
        """Yield the rows from number `start` on."""
        if self.total is not None and start > self.total:
            raise InvalidArgument(
                f"{self.place} is not what it was when it was taken up to row {start}: it has {self.total} rows"
            )
        first, before = 0, 0
        while first < len(self._groups) and before + self._groups[first] <= start:
            before += self._groups[first]
            first += 1
        position = before
        try:
            with self._opened() as file:
                groups = list(range(first, len(self._groups)))
                for rows in file.iter_batches(BATCH_ROWS, row_groups=groups, columns=self._names):
                    skip = min(len(rows), max(0, start - position))
                    position += len(rows)
                    if skip < len(rows):
                        yield self._batch(rows.slice(skip), position)
        except (pa.ArrowException, OSError) as error:
            raise CorruptFile(str(self.place), f"rows from {position} on can't be read: {error}") from error

    def _batch(self, rows: pa.RecordBatch, end: int) -> Batch:
        table = self.fields.of_table(pa.Table.from_batches([rows]))
        keys = table["keys" if "keys" in table.column_names else "key"]
        with_key = table.filter(pc.is_valid(keys)) if keys.null_count else table
        return Batch(entry_columns(with_key), len(rows), end, partial(self._records, table, end - len(rows)))

    def _records(self, table: pa.Table, first: int) -> Iterator[Record]:
        for number, fields in enumerate(table.to_pylist(), first):
            where = f"row {number + 1}"
            if fields.get("key", fields.get("keys")) is None:
                fields["keys"] = []
            try:
                yield Record(where, number, number + 1, checked_message(fields, self.fields))
            except InvalidArgument as error:
                yield Record(where, number, number + 1, None, str(error))
