"""Footers of Parquet files: how many values each list column has, read without Arrow.

A few bytes can stand for any number of values, and Arrow decodes a row whole. So the number is needed before it reads a
row. Arrow ends the process for some damage of a column's metadata, so this module reads the footer's Thrift (compact
protocol) itself. Pure.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

# Kinds of values in Thrift's compact protocol; the first two are a field's whole value.
_TRUE, _FALSE, _BYTE, _I16, _I32, _I64, _DOUBLE, _BINARY, _LIST, _SET, _MAP, _STRUCT = range(1, 13)
_DEPTH = 16
# Fields of `FileMetaData`, `RowGroup`, `ColumnChunk` and `ColumnMetaData`.
_ROW_GROUPS, _COLUMNS, _ROWS, _METADATA, _PATH, _VALUES = 4, 1, 3, 3, 3, 5


def chunk_values(footer: bytes) -> Iterator[list[tuple[str, int]]]:
    """Yield each row group's column chunks: the top of the column's path, and how many values it says it has.

    Raises `ValueError` for bytes that are no footer.
    """
    try:
        document = _Thrift(footer).struct(0)
        for group in document[_ROW_GROUPS]:
            chunks = [chunk[_METADATA] for chunk in group[_COLUMNS]]
            yield [(chunk[_PATH][0].decode(), int(chunk[_VALUES])) for chunk in chunks]
    except (AttributeError, IndexError, KeyError, TypeError, UnicodeDecodeError) as error:
        raise ValueError(f"no footer of a Parquet file: {error}") from error


class _Thrift:
    """Reads values in order; a struct becomes a dictionary by field number."""

    def __init__(self, data: bytes) -> None:
        self._data = data
        self._at = 0

    def struct(self, depth: int) -> dict[int, Any]:
        if depth > _DEPTH:
            raise ValueError("values lie too deep in each other")
        fields: dict[int, Any] = {}
        number = 0
        while head := self._byte():
            number = number + (head >> 4) if head >> 4 else self._signed()
            kind = head & 15
            fields[number] = kind == _TRUE if kind in (_TRUE, _FALSE) else self._value(kind, depth + 1)
        return fields

    def _value(self, kind: int, depth: int) -> Any:
        if kind in (_I16, _I32, _I64):
            return self._signed()
        if kind in (_TRUE, _FALSE, _BYTE):
            return self._byte()
        if kind == _DOUBLE:
            return self._bytes(8)
        if kind == _BINARY:
            return self._bytes(self._unsigned())
        if kind == _STRUCT:
            return self.struct(depth)
        if kind in (_LIST, _SET):
            head = self._byte()
            count = head >> 4 if head >> 4 < 15 else self._unsigned()
            # each value takes a byte at least
            self._check(count)
            return [self._value(head & 15, depth) for _ in range(count)]
        raise ValueError(f"a value of the unknown kind {kind}")

    def _byte(self) -> int:
        self._at += 1
        return self._data[self._at - 1]

    def _bytes(self, count: int) -> bytes:
        self._check(count)
        self._at += count
        return self._data[self._at - count : self._at]

    def _check(self, count: int) -> None:
        if count > len(self._data) - self._at:
            raise ValueError("it ends too soon")

    def _unsigned(self) -> int:
        value = shift = 0
        while True:
            byte = self._byte()
            value |= (byte & 127) << shift
            if byte < 128:
                return value
            shift += 7
            if shift > 63:
                raise ValueError("a number of more than 64 bits")

    def _signed(self) -> int:
        value = self._unsigned()
        return value >> 1 ^ -(value & 1)
