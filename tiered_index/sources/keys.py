"""Reads files of lookups: Parquet, NDJSON, or CSV with a header.

A lookup is a row with `topic`, `key` and optionally `begin_ms` and `end_ms`. Other columns are skipped. Memory: a batch
of rows.
"""

from __future__ import annotations

import csv
import gzip
import json
import re
import zlib
from collections.abc import Iterator, Mapping, Sequence
from itertools import chain
from pathlib import Path
from typing import Any

import pyarrow as pa

from tiered_index.errors import CorruptFile, InvalidArgument
from tiered_index.service.read.rows import check_key, check_range, check_topic
from tiered_index.service.write.validation import milliseconds
from tiered_index.sources.columns import bounded_lines, check_names
from tiered_index.sources.messages import json_fields
from tiered_index.sources.parquet import ParquetTable
from tiered_index.sources.places import CSV, NDJSON, PARQUET, LocalFile
from tiered_index.sources.rows.mapping import Dialect
from tiered_index.types import Lookup, parse_time

FIELDS = ("topic", "key", "begin_ms", "end_ms")
"""The columns of a lookup."""
_SURROGATE = re.compile("[\ud800-\udfff]")
_TOLD = {
    "unexpected end of data": "a quote is not closed",
    "',' expected after '\"'": "'\"' in a quoted cell is not doubled",
    "new-line character": "a line ends with \\r alone, or a cell with \\r has no quotes",
}


def read_lookups(file: Path, begin_ms: int | None, end_ms: int | None, max_count: int) -> Iterator[Lookup]:
    """Yield the lookups of a file. `begin_ms` and `end_ms` are the defaults of rows without bounds.

    Raises `InvalidArgument`, which names the row.
    """
    for where, fields in _rows(file):
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


def _rows(file: Path) -> Iterator[tuple[str, Mapping[str, Any]]]:
    """Return the rows of a file, each with its number for errors. Raises `InvalidArgument`, `CorruptFile`."""
    name = file.name.lower()
    rows = next((read for kinds, read in _KINDS if name.endswith(kinds)), None)
    if rows is None:
        raise InvalidArgument(
            f"--keys {file}: a file of keys is .parquet, .ndjson (.jsonl, .json), or .csv with a header"
        )
    return rows(file)


def _lines(file: Path) -> Iterator[bytes]:
    """Yield the lines of a file, gzipped or not. Raises `InvalidArgument`, `CorruptFile`."""
    try:
        with gzip.open(file) if file.name.endswith(".gz") else file.open("rb") as lines:
            yield from bounded_lines(lines.readline, f"{file}: ")
    except (gzip.BadGzipFile, EOFError, zlib.error) as error:
        raise CorruptFile(str(file), str(error)) from error
    except OSError as error:
        raise InvalidArgument(f"{file}: {error.strerror}") from error


def _csv_rows(file: Path) -> Iterator[tuple[str, Mapping[str, Any]]]:
    rows = csv_rows(file)
    _, header = next(rows, (1, []))
    _check_columns(file, header)
    for line, cells in rows:
        yield f"line {line:,}", {name: cell or None for name, cell in zip(header, cells, strict=True)}


def csv_rows(file: Path) -> Iterator[tuple[int, list[str]]]:
    """Yield the rows of a CSV file (RFC 4180, UTF-8), each with the number of its first line.

    The header decides whether commas, tabs, semicolons or bars are between values. Empty lines are skipped. Raises
    `InvalidArgument`, which names the line, also if rows have different numbers of cells.
    """
    line, width = 1, 0
    try:
        lines = _decoded(file)
        header = next(lines, "")
        delimiter = max(Dialect().delimiters, key=header.count)
        reader = csv.reader(chain([header], lines), delimiter=delimiter, strict=True)
        for cells in reader:
            width = width or len(cells)
            if len(cells) not in (0, width):
                raise InvalidArgument(
                    f"{file}: line {line:,} has {len(cells)} cell{'s' * (len(cells) > 1)}, the header {width}"
                )
            if cells:
                yield line, cells
            line = reader.line_num + 1
    except csv.Error as error:
        raise InvalidArgument(f"{file}: line {line:,}: {_csv_problem(str(error))}") from error


def _decoded(file: Path) -> Iterator[str]:
    # Lines end with \n. A single \r is part of a cell; csv refuses it in a cell without quotes.
    for number, line in enumerate(_lines(file), 1):
        try:
            yield line.decode("utf-8-sig" if number == 1 else "utf-8")
        except UnicodeDecodeError as error:
            raise InvalidArgument(f"{file}: line {number:,} is not UTF-8: {error.reason}") from error


def _csv_problem(problem: str) -> str:
    """Return a clearer text for the usual errors of module `csv`, and its own text for others."""
    if problem.startswith("field larger"):
        return f"a cell has more than {csv.field_size_limit():,} characters; is its quote closed?"
    return next((ours for theirs, ours in _TOLD.items() if problem.startswith(theirs)), problem)


def ndjson_rows(file: Path, key: str = "key") -> Iterator[tuple[str, Mapping[str, Any]]]:
    """Yield the objects of a file, each with its line number for errors. Raises `InvalidArgument`, with the line.

    `key` is the member that has the keys: a number there is text, as written.
    """
    for number, line in enumerate(_lines(file), 1):
        if line.strip():
            where = f"line {number:,}"
            fields = json_fields(line, (key,), f"{file}: {where}: ")
            # Tables and services refuse half a surrogate pair, as an escape or as bytes
            if (b"\\u" in line or b"\xed" in line) and _SURROGATE.search(json.dumps(fields, ensure_ascii=False)):
                raise InvalidArgument(f"{file}: {where}: it has half of a surrogate pair")
            yield where, fields


def _parquet_rows(file: Path) -> Iterator[tuple[str, Mapping[str, Any]]]:
    table = ParquetTable(LocalFile(file))
    names = table.schema.names
    _check_columns(file, names)
    for first, rows in table.read([name for name in FIELDS if name in names]):
        for name in rows.column_names:
            if pa.types.is_timestamp(rows[name].type):
                rows = rows.set_column(rows.column_names.index(name), name, milliseconds(rows[name]))
        for number, fields in enumerate(rows.to_pylist(), first + 1):
            yield f"row {number:,}", fields


def _check_columns(file: Path, names: Sequence[str]) -> None:
    check_names(names, FIELDS, str(file))
    if missing := [name for name in ("topic", "key") if name not in names]:
        raise InvalidArgument(f"{file}: column {missing[0]!r} is missing; it has {', '.join(names) or 'none'}")


_KINDS = ((CSV, _csv_rows), (NDJSON, ndjson_rows), (PARQUET, _parquet_rows))
