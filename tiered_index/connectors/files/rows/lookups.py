"""Reads files of lookups: files of rows of any form.

A lookup is a row with `topic`, `key` and optionally `begin_ms` and `end_ms`. Other columns are skipped. Memory: a batch
of rows.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pyarrow as pa

from tiered_index.base.units import parse_time
from tiered_index.connectors.files.rows.batch import RowFile
from tiered_index.connectors.files.rows.columns import check_names
from tiered_index.connectors.files.rows.fields import written_keys
from tiered_index.connectors.files.rows.forms import rows_at
from tiered_index.connectors.files.rows.places import LocalFile
from tiered_index.connectors.files.rows.table import ColumnsFile
from tiered_index.connectors.files.rows.text import CsvFile, TextFile
from tiered_index.errors import InvalidArgument, listed
from tiered_index.service.read.answers.rows import check_key, check_range, check_topic
from tiered_index.service.write.validation import milliseconds
from tiered_index.types import Lookup

FIELDS = ("topic", "key", "begin_ms", "end_ms")
"""The columns of a lookup."""


def read_lookups(file: Path, begin_ms: int | None, end_ms: int | None, max_count: int) -> Iterator[Lookup]:
    """Yield the lookups of a file. `begin_ms` and `end_ms` are the defaults of rows without bounds.

    Raises `InvalidArgument`, which names the row, and `CorruptFile`.
    """
    for where, fields in _rows(rows_at(LocalFile(file))):
        try:
            begin, end = (
                default if (bound := _time(fields.get(name), end=name == "end_ms")) is None else bound
                for name, default in (("begin_ms", begin_ms), ("end_ms", end_ms))
            )
            if missing := [name for name in ("topic", "key") if fields.get(name) is None]:
                raise InvalidArgument(f"{missing[0]!r} is missing")
            topic, key = check_topic(fields["topic"]), check_key(fields["key"])
            check_range(begin, end, max_count)
        except (InvalidArgument, ValueError) as error:
            raise InvalidArgument(f"{file}: {where}: {error}") from error
        yield Lookup(topic=topic, key=key, begin_ms=begin, end_ms=end, max_count=max_count)


def _time(value: Any, *, end: bool) -> int | None:
    return (
        None if value is None or value == "" else parse_time(value if isinstance(value, str) else f"{value}", end=end)
    )


def _rows(rows: RowFile) -> Iterator[tuple[str, Mapping[str, Any]]]:
    """Yield the rows of a file, each with its number for errors. Raises `InvalidArgument`, `CorruptFile`."""
    if isinstance(rows, TextFile):
        if isinstance(rows, CsvFile):
            _check_columns(rows, rows.header)
        yield from text_rows(rows)
        return
    assert isinstance(rows, ColumnsFile)
    names = rows.table.schema.names
    _check_columns(rows, names)
    for first, table in rows.table.read([name for name in FIELDS if name in names]):
        for at, name in enumerate(table.column_names):
            if pa.types.is_timestamp(table[name].type):
                table = table.set_column(at, name, milliseconds(table[name]))
        for number, fields in enumerate(table.to_pylist(), first + 1):
            yield f"row {number:,}", fields


def text_rows(text: TextFile, key: str = "key") -> Iterator[tuple[str, Mapping[str, Any]]]:
    """Yield the rows of a text, each with its line for errors. Raises `InvalidArgument`, with the line.

    Empty cells of CSV are null. In NDJSON, a number in the member `key` is text, as written.
    """
    for where, fields in text.rows():
        is_csv = isinstance(text, CsvFile)
        yield where, {n: cell or None for n, cell in fields.items()} if is_csv else written_keys(fields, (key,))


def _check_columns(file: RowFile, names: list[str]) -> None:
    check_names(names, FIELDS, str(file.file))
    if missing := [name for name in ("topic", "key") if name not in names]:
        raise InvalidArgument(f"{file.file}: column {missing[0]!r} is missing; it has {listed(names) or 'none'}")
