"""Chunks of the write buffer: runs of entries that were put and aren't in a file yet.

`OpenChunk` takes messages one by one: numbers packed into a block of bytes, keys in a list. No object that the garbage collector would
have to visit is made for a row, and a block is small, so that turning one into columns never keeps the interpreter lock for long. A message
is in it from the one step on that adds its keys: a caller who is interrupted before has added nothing.
A `Chunk` is closed: it never changes but for its columns being computed by whoever needs them first, a query or the flusher.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from tiered_index.format.hashing import code_units
from tiered_index.format.schema import Schema
from tiered_index.service.columns import Columns, hash_columns
from tiered_index.service.log_records import max_positions

__all__ = [
    "ROWS",
    "Chunk",
    "OpenChunk",
    "Record",
    "RowCodec",
]

ROWS = 1 << 12
"""Rows of one block, unless a single message has more keys."""
Record = tuple[Any, ...]
"""(topic_id, queue_id, offset, size, second, *caller columns): what the entries of one message share."""
_RECORD = (("topic_id", "=i4"), ("queue_id", "=i4"), ("offset", "=i8"), ("size", "=i4"), ("second", "=i8"))
_FORMATS = {"i1": "b", "i2": "h", "i4": "i", "i8": "q", "u1": "B", "u2": "H", "u4": "I", "u8": "Q", "f2": "e", "f4": "f", "f8": "d"}


class RowCodec:
    """How the numbers of a row are packed: `struct` writes them one row at a time, NumPy reads them all at once."""

    def __init__(self, schema: Schema, name_of: Callable[[int], str]) -> None:
        columns = [*_RECORD, *((c.name, np.dtype(c.dtype).newbyteorder("=").str) for c in schema.caller_columns)]
        self.schema = schema
        self.name_of = name_of
        self.dtype = np.dtype(columns)
        self.struct = struct.Struct("=" + "".join(_format(np.dtype(kind)) for _, kind in columns))
        assert self.struct.size == self.dtype.itemsize


def _format(dtype: np.dtype[Any]) -> str:
    return f"{dtype.itemsize}s" if dtype.kind == "S" else _FORMATS[f"{dtype.kind}{dtype.itemsize}"]


class OpenChunk:
    """A chunk that still takes rows; used under the buffer's lock until it is closed. `capacity` bounds its rows."""

    __slots__ = ("_codec", "_pack_into", "_size", "capacity", "data", "keys", "positions", "size_bytes")

    def __init__(self, codec: RowCodec, capacity: int) -> None:
        self._codec = codec
        self._pack_into, self._size = codec.struct.pack_into, codec.struct.size
        self.capacity = capacity
        self.data = bytearray(capacity * self._size)
        self.keys: list[str] = []
        self.size_bytes = 0
        self.positions: dict[str, int] = {}

    def add(self, keys: Sequence[str], record: Record, size_bytes: int) -> None:
        """Add one row a key; there must be room."""
        at = len(self.keys) * self._size
        for _ in keys:
            self._pack_into(self.data, at, *record)
            at += self._size
        self.size_bytes += size_bytes
        self.keys += keys

    def trim(self) -> None:
        """Give back the room that no row has taken."""
        del self.data[len(self.keys) * self._size :]

    def columns(self) -> Columns:
        """Return the rows as hashed columns."""
        codec = self._codec
        rows = np.frombuffer(self.data, codec.dtype, len(self.keys))
        given = np.ascontiguousarray(rows["topic_id"])
        if len(given) and given.min() == given.max():
            ids, index = given[:1], np.zeros(len(given), np.int64)
        else:
            ids, index = np.unique(given, return_inverse=True)
        topics = [codec.name_of(topic_id) for topic_id in ids.tolist()]
        columns = hash_columns(topics, index, code_units(self.keys), codec.schema)
        for name in codec.dtype.names or ():
            columns[name] = np.ascontiguousarray(rows[name])
        return columns


@dataclass(slots=True)
class Chunk:
    """A run of put entries; `positions` are durable once this chunk and all before it are. `number` grows from chunk to chunk."""

    number: int
    count: int
    size_bytes: int
    positions: dict[str, int]
    _content: OpenChunk | Columns

    def columns(self) -> Columns:
        """Return the entries as columns, computing them the first time; two threads that need them first may both do so."""
        content = self._content
        if isinstance(content, OpenChunk):
            content = self._content = content.columns()
        return content

    def merged_with(self, newer: Chunk) -> Chunk:
        """Return this chunk and the next one as one."""
        a, b = self.columns(), newer.columns()
        return Chunk(
            newer.number, self.count + newer.count, self.size_bytes + newer.size_bytes, max_positions(self.positions, newer.positions),
            {name: np.concatenate((a[name], b[name])) for name in a},
        )  # fmt: skip
