"""Reads footers and page headers of Parquet files (Thrift's compact protocol) without Arrow. Pure.

Arrow aborts the process for some damage of a column's metadata.
"""

from __future__ import annotations

from typing import Any, NamedTuple

# Types of values in Thrift's compact protocol. A field of the first two has no further bytes.
_TRUE, _FALSE, _BYTE, _I16, _I32, _I64, _DOUBLE, _BINARY, _LIST, _SET, _MAP, _STRUCT = range(1, 13)
_DEPTH = 16
# Fields of `FileMetaData`, `RowGroup`, `ColumnChunk` and `ColumnMetaData`.
_ROW_GROUPS, _COLUMNS, _METADATA = 4, 1, 3
_PATH, _CODEC, _VALUES, _SIZE, _DATA, _DICTIONARY = 3, 4, 5, 7, 9, 11


class Chunk(NamedTuple):
    """One column in one row group: the position and size of its pages, and the number of their codec."""

    path: tuple[str, ...]
    values: int
    codec: int
    begin: int
    size_bytes: int


def column_chunks(footer: bytes) -> list[list[Chunk]]:
    """Return the column chunks of each row group. Raises `ValueError` if the bytes are no footer."""
    try:
        groups = struct(footer)[0][_ROW_GROUPS]
        return [[_chunk(chunk[_METADATA]) for chunk in group[_COLUMNS]] for group in groups]
    except (AttributeError, IndexError, KeyError, TypeError, UnicodeDecodeError) as error:
        raise ValueError(f"no footer of a Parquet file: {error}") from error


def _chunk(column: dict[int, Any]) -> Chunk:
    # find the first page as Arrow does
    begin, dictionary = int(column[_DATA]), int(column.get(_DICTIONARY, 0))
    begin = dictionary if 0 < dictionary < begin else begin
    path = tuple(name.decode() for name in column[_PATH])
    return Chunk(path, int(column[_VALUES]), int(column[_CODEC]), begin, int(column[_SIZE]))


def struct(data: bytes) -> tuple[dict[int, Any], int]:
    """Return the struct at the start of `data` by field numbers, and its length. Raises `ValueError`, `IndexError`."""
    thrift = _Thrift(data)
    return thrift.struct(0), thrift.at


class _Thrift:
    """Reads values in order. A struct becomes a dict by field number."""

    def __init__(self, data: bytes) -> None:
        self._data = data
        self.at = 0

    def struct(self, depth: int) -> dict[int, Any]:
        if depth > _DEPTH:
            raise ValueError("values are nested too deeply")
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
            # each value has at least one byte
            self._check(count)
            return [self._value(head & 15, depth) for _ in range(count)]
        raise ValueError(f"a value of the unknown kind {kind}")

    def _byte(self) -> int:
        self.at += 1
        return self._data[self.at - 1]

    def _bytes(self, count: int) -> bytes:
        self._check(count)
        self.at += count
        return self._data[self.at - count : self.at]

    def _check(self, count: int) -> None:
        if count > len(self._data) - self.at:
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
