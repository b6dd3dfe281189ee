"""The write buffer: what was put and isn't in a file yet, searchable at once.

`append_rows` and `append_columns` take a short lock and return; hashing is left to whoever needs a chunk first, a query or the flusher.
A chunk stays visible to queries until the flusher says that it is in a file. Order of chunks is order of puts.

Invariants: a chunk never changes but for its hashes being filled in; a call is in one chunk whole; `size` counts entries not yet released.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from tiered_index.errors import BackPressure, InvalidArgument
from tiered_index.format.hashing import code_units
from tiered_index.format.schema import Schema
from tiered_index.service.batch_query import Found, QuestionBatch
from tiered_index.service.columns import Columns, hash_columns
from tiered_index.service.rows import Question, rows_of_columns
from tiered_index.service.topics import TopicTable

__all__ = ["BufferedChunk", "Chunk", "WriteBuffer", "later_positions"]

Row = tuple[Any, ...]
"""(topic, key, topic_id, queue_id, offset, size, second, *caller columns)"""
_MERGE_BELOW = 1 << 14
# small chunks are merged so that a query meets few; larger ones are not worth copying


def later_positions(first: dict[str, int], second: dict[str, int]) -> dict[str, int]:
    """Return the greater position of each source: a source's position never goes back."""
    merged = dict(first)
    for source, position in second.items():
        merged[source] = max(position, merged.get(source, position))
    return merged


@dataclass(slots=True)
class Chunk:
    """A run of put entries; `positions` are durable once this chunk and all before it are. `number` grows from chunk to chunk."""

    schema: Schema
    number: int = 0
    count: int = 0
    size_bytes: int = 0
    positions: dict[str, int] = field(default_factory=dict)
    _rows: list[Row] | None = None
    _columns: Columns | None = None
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def columns(self) -> Columns:
        """Return the entries as columns, hashing them the first time."""
        if self._columns is None:
            with self._lock:
                if self._columns is None:
                    self._columns = _columns_of(self._rows or [], self.schema)
                    self._rows = None
        return self._columns


def _columns_of(rows: list[Row], schema: Schema) -> Columns:
    names = [c.name for c in schema.caller_columns]
    if not rows:
        transposed: list[Any] = [() for _ in range(7 + len(names))]
    else:
        transposed = list(zip(*rows, strict=True))
    topics = list(dict.fromkeys(transposed[0]))
    place = {topic: i for i, topic in enumerate(topics)}
    index = np.fromiter((place[topic] for topic in transposed[0]), np.int32, len(rows))
    columns = hash_columns(topics, index, code_units(transposed[1]), schema)
    for name, dtype, values in zip(
        ("topic_id", "queue_id", "offset", "size", "second"), ("i4", "i4", "i8", "i4", "i8"), transposed[2:7], strict=True
    ):
        columns[name] = np.array(values, dtype)
    for c, values in zip(schema.caller_columns, transposed[7:], strict=True):
        columns[c.name] = np.array(values, np.dtype(c.dtype).newbyteorder("="))
    return columns


class BufferedChunk:
    """A chunk as a query's handle."""

    file_id = "buffer"
    place = "buffer"
    lane = "main"
    is_local = True
    sequence = 2**62

    def __init__(self, chunk: Chunk, topics: TopicTable, schema: Schema) -> None:
        self._columns = chunk.columns()
        self._topics = topics
        self._schema = schema
        seconds = self._columns["second"]
        self.second_min, self.second_max = int(seconds.min()), int(seconds.max())

    def search(self, question: Question) -> npt.NDArray[Any]:
        """Return the rows that answer `question`, in no order."""
        return rows_of_columns(self._columns, question, self._topics.ids(question.topic), self._schema)

    def search_many(self, batch: QuestionBatch) -> Found:
        """Return the rows that answer each question, in no order."""
        items, questions = batch.join(self._columns["key_hash"])
        picked = {name: values[items] for name, values in self._columns.items()}
        pairs = [(topic_id, topic) for topic in batch.topics for topic_id in self._topics.ids(topic)]
        return batch.select(picked, questions, picked["second"], pairs, self._schema)


class WriteBuffer:
    """Bounded by entries and by estimated bytes; a call that would pass a bound is refused whole, unless the buffer is empty."""

    def __init__(self, schema: Schema, max_entries: int, max_bytes: int) -> None:
        self._schema = schema
        self._max_entries, self._max_bytes = max_entries, max_bytes
        self._lock = threading.Lock()
        self._open = self._fresh()
        self._ready: list[Chunk] = []
        self._flushing: tuple[Chunk, ...] = ()
        self._entries = 0
        self._bytes = 0
        self._newest = self._released = 0
        self._closed = False

    @property
    def size(self) -> int:
        """Entries in the buffer."""
        return self._entries

    @property
    def size_bytes(self) -> int:
        """Estimated bytes in the buffer."""
        return self._bytes

    def append_rows(
        self, rows: list[Row], size_bytes: int, source: str | None, position: int | None, agree: Callable[[], None] | None = None
    ) -> None:
        """Add the entries of one message. Raises `BackPressure`, or what `agree` raises, which is asked last; then nothing was added."""
        count = len(rows)
        with self._lock:
            self._admit(count, size_bytes, agree)
            chunk = self._open
            assert chunk._rows is not None
            chunk._rows += rows
            chunk.count += count
            chunk.size_bytes += size_bytes
            if source is not None and position is not None:
                chunk.positions[source] = max(position, chunk.positions.get(source, position))

    def append_columns(
        self, columns: Columns, size_bytes: int, positions: dict[str, int], agree: Callable[[], None] | None = None
    ) -> None:
        """Add a batch of columns that are hashed already; `agree` and errors as `append_rows`."""
        chunk = Chunk(self._schema, 0, len(columns["second"]), size_bytes, dict(positions), None, columns)
        with self._lock:
            self._admit(chunk.count, size_bytes, agree)
            self._close_open()
            self._append(chunk)

    def snapshot(self) -> tuple[Chunk, ...]:
        """Return every chunk that isn't released, oldest first."""
        with self._lock:
            self._close_open()
            self._merge_small()
            return (*self._flushing, *self._ready)

    def close(self) -> None:
        """Accept nothing more: whatever was accepted before is flushed by the flush that follows."""
        with self._lock:
            self._closed = True

    def close_chunk(self) -> int:
        """Close the chunk that takes rows; return the number of the newest closed one: everything put so far is in it or before it."""
        with self._lock:
            self._close_open()
            return self._newest

    @property
    def released(self) -> int:
        """Number of the newest chunk that `end_flush` released."""
        return self._released

    def begin_flush(self, max_entries: int) -> tuple[Chunk, ...]:
        """Return the oldest closed chunks, `max_entries` or one chunk; the same ones again until `end_flush`."""
        with self._lock:
            if not self._flushing:
                stop = entries = 0
                while stop < len(self._ready) and (not stop or entries + self._ready[stop].count <= max_entries):
                    entries += self._ready[stop].count
                    stop += 1
                self._flushing, self._ready = tuple(self._ready[:stop]), self._ready[stop:]
            return self._flushing

    def end_flush(self) -> None:
        """Release the chunks of `begin_flush`: they are in files now, durable and searchable there."""
        with self._lock:
            self._entries -= sum(chunk.count for chunk in self._flushing)
            self._bytes -= sum(chunk.size_bytes for chunk in self._flushing)
            if self._flushing:
                self._released = self._flushing[-1].number
            self._flushing = ()

    def _admit(self, entries: int, size_bytes: int, agree: Callable[[], None] | None) -> None:
        if self._closed:
            raise InvalidArgument("the index is closed")
        if self._entries and (self._entries + entries > self._max_entries or self._bytes + size_bytes > self._max_bytes):
            raise BackPressure(
                f"the write buffer holds {self._entries:,} entries ({self._bytes:,} bytes) that are not flushed yet; "
                f"its bounds are {self._max_entries:,} entries and {self._max_bytes:,} bytes: slow down and repeat the call"
            )
        if agree is not None:
            agree()
        self._entries += entries
        self._bytes += size_bytes

    def _fresh(self) -> Chunk:
        return Chunk(self._schema, _rows=[])

    def _close_open(self) -> None:
        if self._open.count or self._open.positions:
            self._append(self._open)
            self._open = self._fresh()

    def _append(self, chunk: Chunk) -> None:
        self._newest += 1
        chunk.number = self._newest
        self._ready.append(chunk)

    def _merge_small(self) -> None:
        """Keep the chunks' sizes falling by halves, so that a query meets few of them however puts and queries alternate."""
        while len(self._ready) > 1:
            first, second = self._ready[-2:]
            if first.count > 2 * second.count or first.count + second.count > _MERGE_BELOW:
                return
            a, b = first.columns(), second.columns()
            merged = {name: np.concatenate((a[name], b[name])) for name in a}
            self._ready[-2:] = [
                Chunk(
                    self._schema,
                    second.number,
                    first.count + second.count,
                    first.size_bytes + second.size_bytes,
                    later_positions(first.positions, second.positions),
                    None,
                    merged,
                )
            ]
