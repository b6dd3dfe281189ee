"""The write buffer: entries that are not in a file yet, but are already searchable.

An append takes a short lock and returns. The first user of a chunk, a lookup or the flusher, hashes it. A chunk is
visible until the flusher has written it to a file. A closed chunk never changes, except that its columns are computed.
All rows of a call are in one chunk. Lookups close the open chunk and merge small ones, and may be interrupted: each of
these changes is one assignment (to several attributes at once; no signal handler runs between their stores).
`PutRows` creates no objects per row that the garbage collector would visit.
"""

from __future__ import annotations

import copy
import struct
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from tiered_index.base.kernels import compiled
from tiered_index.base.locks import call_lock
from tiered_index.base.units import MAX_TIMESTAMP_MS
from tiered_index.errors import BackPressure, DiskFull, IndexClosed
from tiered_index.format.keys.hashing import HashRule, code_units, lookup_numbers
from tiered_index.format.schema import Schema, struct_format
from tiered_index.service.read.files.hot_rows import HotRows
from tiered_index.service.write.marks import Marks
from tiered_index.service.write.validation import Columns, TopicTable, hash_columns, hash_few
from tiered_index.types import MAX_KEY_UNITS, MAX_TOPIC_UNITS

ROWS = 1 << 12
"""Rows of one chunk, unless a single message has more keys, or rows are wide."""
_CHUNK_BYTES = 1 << 20
# up to this many keys, plain Python hashes faster than NumPy
_FEW = 16
Record = tuple[Any, ...]
"""(topic_id, queue_id, offset, size, second, *caller columns): the values that all entries of a message share."""
_RECORD = (("topic_id", "=i4"), ("queue_id", "=i4"), ("offset", "=i8"), ("size", "=i4"), ("second", "=i8"))


class RowCodec:
    """Packs the numbers of rows: `struct` writes one row at a time, NumPy reads all rows at once.

    `topics` has names and assigned ids. `rule` is the hash rule of keys.
    """

    def __init__(self, schema: Schema, topics: TopicTable, rule: HashRule) -> None:
        self.topics = topics
        columns = [*_RECORD, *((c.name, np.dtype(c.dtype).newbyteorder("=").str) for c in schema.caller_columns)]
        self.schema = schema
        self.rule = rule
        self.dtype = np.dtype(columns)
        self.struct = struct.Struct("=" + "".join(struct_format(np.dtype(kind)) for _, kind in columns))
        assert self.struct.size == self.dtype.itemsize
        # bytes of the caller's columns in a row
        self.more_bytes = self.struct.size - struct.calcsize("=iiqiq")


class PutRows:
    """The rows of an open chunk and their keys.

    The compiled core's class `PutRows` replaces it if available: its `add` takes plain messages without the buffer's
    lock, up to `room` rows and `room_bytes`.
    """

    def __init__(self, topics: dict[str, int], row_size: int, marks: Marks, rows: int, *_bounds: int) -> None:
        self.keys: list[str] = []
        self.data = bytearray(rows * row_size)
        self.size_bytes = 0
        self._row_size = row_size
        self._marks = marks

    def add(self, *message: object) -> int:
        """Return 0, since nothing was added: the caller must use `WriteBuffer.append_rows`."""
        return 0

    def extend(
        self, keys: list[str], row: bytes, size_bytes: int, source: str | None = None, position: int | None = None
    ) -> bool:
        """Add the packed `row` once per key, and the position of their source.

        False: there is too little space, and nothing was added.
        """
        at = len(self.keys) * self._row_size
        if at + len(keys) * self._row_size > len(self.data):
            return False
        self.data[at : at + len(keys) * self._row_size] = row * len(keys)
        self.size_bytes += size_bytes
        self.keys += keys
        if source is not None and position is not None:
            # after the entries: an interrupt in between only leaves an older position
            self._marks.add(len(self.keys), source, position)
        return True

    def close(self) -> None:
        """Do nothing, since `add` never takes a row."""


class OpenChunk:
    """A chunk that takes rows. `capacity` bounds its rows, `room` and `room_bytes` the rows that `add` takes."""

    __slots__ = ("_codec", "add", "marks", "rows")

    def __init__(self, codec: RowCodec, capacity: int, room: int = 0, room_bytes: int = 0) -> None:
        self._codec = codec
        core = compiled()
        make = PutRows if core is None else core.PutRows
        bounds = capacity, room, room_bytes, MAX_KEY_UNITS // 2, MAX_TIMESTAMP_MS
        self.marks = Marks()
        self.rows: PutRows = make(codec.topics.assigned, codec.struct.size, self.marks, *bounds)
        self.add = self.rows.add

    def trim(self) -> None:
        """Free the unused space."""
        del self.rows.data[len(self.rows.keys) * self._codec.struct.size :]

    def columns(self) -> Columns:
        """Return the rows as columns, with hashed keys."""
        codec, keys = self._codec, self.rows.keys
        rows = np.frombuffer(self.rows.data, codec.dtype, len(keys))
        topic_ids = np.ascontiguousarray(rows["topic_id"])
        if len(topic_ids) <= _FEW:
            topics = [codec.topics.name(topic_id) for topic_id in topic_ids.tolist()]
            columns = hash_few(topics, keys, codec.schema, codec.rule)
        else:
            if topic_ids.min() == topic_ids.max():
                ids, index = topic_ids[:1], np.zeros(len(topic_ids), np.int64)
            else:
                ids, index = np.unique(topic_ids, return_inverse=True)
            topics = [codec.topics.name(topic_id) for topic_id in ids.tolist()]
            columns = hash_columns(topics, index, code_units(keys), codec.schema, codec.rule)
        for name in codec.dtype.names or ():
            columns[name] = np.ascontiguousarray(rows[name])
        return columns


@dataclass(slots=True, eq=False)
class Chunk:
    """A run of entries. The marks' positions are durable once it and all earlier ones are. `number` grows by chunk."""

    number: int
    count: int
    size_bytes: int
    marks: Marks
    content: OpenChunk | Columns
    _interval: tuple[int, int] | None = None

    def columns(self) -> Columns:
        """Return the entries as columns, computed on first use; two threads may both compute them."""
        content = self.content
        if isinstance(content, OpenChunk):
            content = self.content = content.columns()
        return content

    def interval(self) -> tuple[int, int]:
        """Return the smallest and the greatest second, computed on first use."""
        if self._interval is None:
            seconds = self.columns()["second"]
            self._interval = int(seconds.min()), int(seconds.max())
        return self._interval

    def merged_with(self, newer: Chunk) -> Chunk:
        """Return this chunk and the next as one."""
        a, b, marks = self.columns(), newer.columns(), Marks()
        marks.extend(self.marks, 0)
        marks.extend(newer.marks, self.count)
        return Chunk(
            newer.number,
            self.count + newer.count,
            self.size_bytes + newer.size_bytes,
            marks,
            {name: np.concatenate((a[name], b[name])) for name in a},
        )


# most entries that `lacks` compares, of these most that are not hashed yet, and most chunks
_COMPARED, _LISTED, _PARTS = 1 << 16, 1 << 11, 16
# smaller chunks are merged, so that a lookup searches few; larger ones are not worth the copy
_MERGE_BELOW = 1 << 16
# a chunk of so many entries is flushed alone
_ALONE = 1 << 17


class BufferedChunk(HotRows):
    """A chunk as a handle for lookups."""

    file_id = "buffer"
    where = "buffer"
    place = "buffer"
    lane = "main"
    sequence = 2**62

    def __init__(self, chunk: Chunk, topics: TopicTable, schema: Schema, rule: HashRule) -> None:
        self.hash, self.schema = rule, schema
        self._columns, self._topics = chunk.columns(), topics
        self.second_min, self.second_max = chunk.interval()

    @property
    def known_topics(self) -> Collection[str]:
        """All topics of this writer."""
        return self._topics.names

    def columns(self) -> Columns:
        """See `HotRows.columns`."""
        return self._columns

    def seconds_of(self, entries: Any) -> npt.NDArray[np.int64]:
        """See `HotRows.seconds_of`."""
        seconds: npt.NDArray[np.int64] = entries["second"]
        return seconds

    def topic_pairs(self, topics: Iterable[str] | None = None) -> list[tuple[int, str]]:
        """See `HotRows.topic_pairs`."""
        names = list(self._topics.names) if topics is None else topics
        return [(topic_id, topic) for topic in names for topic_id in self._topics.ids(topic)]


class WriteBuffer:
    """The write buffer, bounded by entries and estimated bytes.

    `topics` has names and assigned ids, `rule` hashes keys, and `held_up` returns the error that stops the flusher.

    `open.add` takes most messages without the lock. Close the open chunk before you use its rows.
    """

    def __init__(
        self,
        schema: Schema,
        topics: TopicTable,
        max_entries: int,
        max_bytes: int,
        rule: HashRule = "abs",
        held_up: Callable[[], DiskFull | None] = lambda: None,
    ) -> None:
        self._held_up = held_up
        self._codec = RowCodec(schema, topics, rule)
        self._max_entries, self._max_bytes = max_entries, max_bytes
        self.lock = call_lock()
        self.open = OpenChunk(self._codec, 0)
        """The open chunk."""
        self._ready: list[Chunk] = []
        self._flushing: tuple[Chunk, ...] = ()
        self._entries = 0  # of closed chunks, as are the bytes
        self._bytes = 0
        self._newest = 0
        self._flushed_entries = 0
        self.refused = 0  # the number of refused puts
        self.released = 0  # the number of the newest chunk that `end_flush` released
        self._closed = False
        self.refusal: BackPressure | None = None
        """The error of the last refused put; None after the next flush."""

    @property
    def size(self) -> int:
        """Entries in the buffer."""
        return self._entries + len(self.open.rows.keys)

    @property
    def is_empty(self) -> bool:
        """Whether all entries that were put before the call are in files."""
        # in this order: entries that leave the open chunk in between count as closed before that
        return not self.open.rows.keys and not self._entries

    def lacks(self, topic: str, key: str) -> bool:
        """Return whether no entry that was put before the call, and is not in a file, has the key in the topic.

        False: an entry may have it. The schema must have fingerprints.
        """
        if self.size > _COMPARED or type(topic) is not str or type(key) is not str:
            return False
        if len(topic) > MAX_TOPIC_UNITS or len(key) > MAX_KEY_UNITS:
            return False
        # in this order, because entries move to `_ready`, then to `_flushing`, then to files
        parts: list[OpenChunk | Columns] = [self.open]
        parts += [chunk.content for chunk in self._ready]
        parts += [chunk.content for chunk in self._flushing]
        if len(parts) > _PARTS:
            return False
        fingerprint, listed = None, 0
        for part in parts:
            if isinstance(part, OpenChunk):
                listed += len(part.rows.keys)
                if listed > _LISTED or key in part.rows.keys:
                    return False
            else:
                if fingerprint is None:
                    fingerprint = lookup_numbers(topic, key)[2]
                if (part["fingerprint"] == fingerprint).any():
                    return False
        return True

    @property
    def taken_entries(self) -> int:
        """The number of entries ever put."""
        return self._flushed_entries + self.size

    @property
    def size_bytes(self) -> int:
        """Estimated bytes in the buffer."""
        return self._bytes + self.open.rows.size_bytes

    def append_rows(
        self,
        keys: list[str],
        record: Record,
        size_bytes: int,
        source: str | None = None,
        position: int | None = None,
        agree: Callable[[], None] | None = None,
    ) -> None:
        """Add one message's entries. Raises `BackPressure`, or as `agree`, called last. An error adds nothing.

        `size_bytes` does not include the caller's columns.
        """
        with self.lock:
            size_bytes += len(keys) * self._codec.more_bytes
            self._admit(len(keys), size_bytes)
            if agree is not None:
                agree()
            row = self._codec.struct.pack(*record)
            # a key of a subclass may not be equal to its own text
            keys = [key if type(key) is str else str.__str__(key) for key in keys]
            if not self.open.rows.extend(keys, row, size_bytes, source, position):
                self._close_open()
                rows = max(min(ROWS, _CHUNK_BYTES // self._codec.struct.size), len(keys))
                left = self._max_entries - self._entries, self._max_bytes - self._bytes
                following = OpenChunk(self._codec, rows, *left)
                following.rows.extend(keys, row, size_bytes, source, position)
                # after `extend`: other threads add to the open chunk without the lock
                self.open = following

    def append_columns(
        self, columns: Columns, size_bytes: int, positions: dict[str, int], agree: Callable[[], None] | None = None
    ) -> None:
        """Add a batch of columns with hashed keys; `agree` and errors as in `append_rows`."""
        count, marks = len(columns["second"]), Marks()
        for source, position in positions.items():
            marks.add(count, source, position)
        with self.lock:
            # the buffer must not grow during the check
            self.open.rows.close()
            self._admit(count, size_bytes)
            if agree is not None:
                agree()
            self._close_open()
            self._append(Chunk(self._newest + 1, count, size_bytes, marks, columns), self.open)

    def snapshot(self) -> tuple[Chunk, ...]:
        """Return the chunks that are not released, oldest first, with all entries that were put before the call."""
        with self.lock:
            chunks = self._closed_chunks()
        if len(chunks) < 2:
            return chunks
        self._merge_small()
        with self.lock:
            return self._closed_chunks()

    def close(self) -> None:
        """Accept no more entries; the next flush writes the accepted ones."""
        with self.lock:
            self._closed = True
            self.open.rows.close()

    def close_chunk(self) -> int:
        """Close the open chunk. Return the number of the newest closed chunk: it and earlier ones have all entries."""
        with self.lock:
            self._close_open()
            return self._newest

    def begin_flush(self, max_entries: int) -> tuple[Chunk, ...]:
        """Return the oldest closed chunks, at most `max_entries` or one chunk; the same ones until `end_flush`.

        A large chunk comes alone: a sync of its own costs less than a copy of its columns.
        """
        with self.lock:
            if not self._flushing:
                stop = entries = 0
                while stop < len(self._ready) and (not stop or entries + self._ready[stop].count <= max_entries):
                    entries += self._ready[stop].count
                    stop += 1
                    if max(chunk.count for chunk in self._ready[stop - 1 : stop + 1]) >= _ALONE:
                        break
                taken, left = tuple(self._ready[:stop]), self._ready[stop:]
                self._flushing, self._ready = taken, left
            return self._flushing

    def end_flush(self) -> None:
        """Release the chunks of `begin_flush`, after their entries are durable and searchable in files."""
        with self.lock:
            if self._flushing:
                count = sum(chunk.count for chunk in self._flushing)
                entries, flushed = self._entries - count, self._flushed_entries + count
                size_bytes = self._bytes - sum(chunk.size_bytes for chunk in self._flushing)
                newest = self._flushing[-1].number
                state = (), entries, flushed, size_bytes, newest
                self._flushing, self._entries, self._flushed_entries, self._bytes, self.released = state
            self.refusal = None

    def _admit(self, entries: int, size_bytes: int) -> None:
        if self._closed:
            raise IndexClosed("the index is closed: open it again")
        held, held_bytes = self.size, self.size_bytes
        if held and (held + entries > self._max_entries or held_bytes + size_bytes > self._max_bytes):
            text = (
                f"the write buffer holds {held:,} entries ({held_bytes:,} bytes) that are not flushed yet; its bounds "
                f"are {self._max_entries:,} entries and {self._max_bytes:,} bytes: slow down and repeat the call"
            )
            self.refused += 1
            of_entries = held + entries > self._max_entries
            number, bound = (held, self._max_entries) if of_entries else (held_bytes, self._max_bytes)
            self.refusal = BackPressure(text, number=number, bound=bound)
            if (cause := self._held_up()) is not None:
                self.refusal = DiskFull(f"{cause}; {text}", reason=cause.reason, number=cause.number, bound=cause.bound)
            raise copy.copy(self.refusal)

    def _close_open(self) -> None:
        chunk = self.open
        if chunk.rows.keys or chunk.marks.positions:
            chunk.rows.close()
            count, size_bytes = len(chunk.rows.keys), chunk.rows.size_bytes
            # before other threads see the chunk: their arrays over its rows would prevent it
            chunk.trim()
            closed = Chunk(self._newest + 1, count, size_bytes, chunk.marks, chunk)
            self._append(closed, OpenChunk(self._codec, 0))

    def _append(self, chunk: Chunk, following: OpenChunk) -> None:
        """Add a closed chunk, and make `following` the open chunk."""
        ready, entries, size_bytes = [*self._ready, chunk], self._entries + chunk.count, self._bytes + chunk.size_bytes
        state = ready, entries, following, chunk.number, size_bytes
        # in this order for `is_empty`
        self._ready, self._entries, self.open, self._newest, self._bytes = state

    def _closed_chunks(self) -> tuple[Chunk, ...]:
        self._close_open()
        return (*self._flushing, *self._ready)

    def _merge_small(self) -> None:
        """Merge small chunks, so that lookups search few. Puts wait only while the merged chunk replaces two."""
        while True:
            pair = self._ready[-2:]
            if len(pair) < 2 or pair[0].count > 2 * pair[1].count or pair[0].count + pair[1].count > _MERGE_BELOW:
                return
            if not self._exchange(pair, pair[0].merged_with(pair[1])):
                return  # the flusher took it, or another lookup merged it

    def _exchange(self, pair: list[Chunk], merged: Chunk) -> bool:
        with self.lock:
            ready = self._ready
            at = ready.index(pair[0]) if pair[0] in ready else len(ready)
            if ready[at : at + 2] != pair:
                return False
            self._ready = [*ready[:at], merged, *ready[at + 2 :]]
            return True
