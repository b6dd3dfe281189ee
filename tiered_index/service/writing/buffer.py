"""The write buffer: entries that are in no file yet, searchable at once.

An append takes a short lock and returns; the first user of a chunk, a query or the flusher, hashes its rows. A
chunk is visible until the flusher has it in a file; a closed one never changes except for its columns, and a call is in
one chunk whole. Callers may be interrupted at any line, and go on: each change is one assignment (to several attributes
at once, between whose stores no signal handler runs), or leaves only what is put right when the chunk is closed.
`PutRows` makes no object for a row that the garbage collector would visit.
"""

from __future__ import annotations

import copy
import struct
import threading
from collections.abc import Callable, Collection
from dataclasses import dataclass
from operator import itemgetter
from typing import Any

import numpy as np
import numpy.typing as npt

from tiered_index.errors import BackPressure, DiskFull, IndexClosed
from tiered_index.format.hashing import HashRule, code_units
from tiered_index.format.metadata import NamedStats, topic_stats
from tiered_index.format.schema import Schema, struct_format
from tiered_index.kernels import compiled
from tiered_index.service.answers.batch import LookupBatch, Matches, matching
from tiered_index.service.answers.rows import PreparedLookup, select_items
from tiered_index.service.answers.validation import Columns, TopicTable, hash_columns, hash_few
from tiered_index.service.catalog.catalog import LocalHandle
from tiered_index.service.log.records import max_positions
from tiered_index.service.threads import synchronized
from tiered_index.types import MAX_KEY_UNITS, MAX_TIMESTAMP_MS

ROWS = 1 << 12
"""Rows of one block, unless a single message has more keys."""
# keys that plain Python hashes sooner than NumPy does
_FEW = 16
Record = tuple[Any, ...]
"""(topic_id, queue_id, offset, size, second, *caller columns): what the entries of one message share."""
_RECORD = (("topic_id", "=i4"), ("queue_id", "=i4"), ("offset", "=i8"), ("size", "=i4"), ("second", "=i8"))


class RowCodec:
    """The packing of a row's numbers: `struct` writes them one row at a time, NumPy reads them all at once.

    `topics` has names and assigned ids, `rule` is how keys are hashed.
    """

    def __init__(self, schema: Schema, topics: TopicTable, rule: HashRule) -> None:
        self.topics = topics
        columns = [*_RECORD, *((c.name, np.dtype(c.dtype).newbyteorder("=").str) for c in schema.caller_columns)]
        self.schema = schema
        self.rule = rule
        self.dtype = np.dtype(columns)
        self.struct = struct.Struct("=" + "".join(struct_format(np.dtype(kind)) for _, kind in columns))
        assert self.struct.size == self.dtype.itemsize


class PutRows:
    """The rows of an open chunk and their keys. The compiled core has a class of this name that is used in its place:
    its `add` takes plain messages without the buffer's lock, `room` rows and `room_bytes` at most.
    """

    def __init__(self, topics: dict[str, int], row_size: int, rows: int, *_bounds: int) -> None:
        self.keys: list[str] = []
        self.data = bytearray(rows * row_size)
        self.size_bytes = 0
        self._row_size = row_size

    def add(
        self, topic: object, queue_id: object, key: object, offset: object, size: object, timestamp_ms: object
    ) -> bool:
        """Return False: take the other way."""
        return False

    def extend(self, keys: list[str], row: bytes, size_bytes: int) -> bool:
        """Add one row, packed, a key; False: there is no room, and nothing was added."""
        at = len(self.keys) * self._row_size
        if at + len(keys) * self._row_size > len(self.data):
            return False
        self.data[at : at + len(keys) * self._row_size] = row * len(keys)
        self.size_bytes += size_bytes
        self.keys += keys
        return True

    def close(self) -> None:
        """Do nothing: `add` takes nothing."""


class OpenChunk:
    """A chunk that still takes rows. `capacity` bounds its rows, `room` and `room_bytes` those that `add` may take."""

    __slots__ = ("_codec", "add", "positions", "rows")

    def __init__(self, codec: RowCodec, capacity: int, room: int = 0, room_bytes: int = 0) -> None:
        self._codec = codec
        core = compiled()
        make = PutRows if core is None else core.PutRows
        bounds = capacity, room, room_bytes, MAX_KEY_UNITS // 2, MAX_TIMESTAMP_MS
        self.rows: PutRows = make(codec.topics.assigned, codec.struct.size, *bounds)
        self.add = self.rows.add
        self.positions: dict[str, int] = {}

    def trim(self) -> None:
        """Give back the room that no row has taken."""
        del self.rows.data[len(self.rows.keys) * self._codec.struct.size :]

    def columns(self) -> Columns:
        """Return the rows as hashed columns."""
        codec, keys = self._codec, self.rows.keys
        rows = np.frombuffer(self.rows.data, codec.dtype, len(keys))
        given = np.ascontiguousarray(rows["topic_id"])
        if len(given) <= _FEW:
            topics = [codec.topics.name(topic_id) for topic_id in given.tolist()]
            columns = hash_few(topics, keys, codec.schema, codec.rule)
        else:
            if given.min() == given.max():
                ids, index = given[:1], np.zeros(len(given), np.int64)
            else:
                ids, index = np.unique(given, return_inverse=True)
            topics = [codec.topics.name(topic_id) for topic_id in ids.tolist()]
            columns = hash_columns(topics, index, code_units(keys), codec.schema, codec.rule)
        for name in codec.dtype.names or ():
            columns[name] = np.ascontiguousarray(rows[name])
        return columns


@dataclass(slots=True, eq=False)
class Chunk:
    """A run of put entries; `positions` are durable once it and all before it are. `number` grows by chunk."""

    number: int
    count: int
    size_bytes: int
    positions: dict[str, int]
    _content: OpenChunk | Columns
    _interval: tuple[int, int] | None = None

    def columns(self) -> Columns:
        """Return the entries as columns, computed the first time; two threads that need them may both do so."""
        content = self._content
        if isinstance(content, OpenChunk):
            content = self._content = content.columns()
        return content

    def interval(self) -> tuple[int, int]:
        """Return the smallest and the greatest second, computed the first time."""
        if self._interval is None:
            seconds = self.columns()["second"]
            self._interval = int(seconds.min()), int(seconds.max())
        return self._interval

    def merged_with(self, newer: Chunk) -> Chunk:
        """Return this chunk and the next one as one."""
        a, b = self.columns(), newer.columns()
        return Chunk(
            newer.number,
            self.count + newer.count,
            self.size_bytes + newer.size_bytes,
            max_positions(self.positions, newer.positions),
            {name: np.concatenate((a[name], b[name])) for name in a},
        )


# small chunks are merged so that a query meets few; larger ones are not worth copying
_MERGE_BELOW = 1 << 16


class BufferedChunk(LocalHandle):
    """A chunk as a query's handle."""

    file_id = "buffer"
    place = "buffer"
    lane = "main"
    sequence = 2**62

    def __init__(self, chunk: Chunk, topics: TopicTable, schema: Schema, rule: HashRule) -> None:
        self.hash = rule
        self._columns = chunk.columns()
        self._topics = topics
        self._schema = schema
        self.second_min, self.second_max = chunk.interval()

    @property
    def known_topics(self) -> Collection[str]:
        """Every topic that this writer was given."""
        return self._topics.names

    def topic_stats(self) -> NamedStats:
        """As `Handle.topic_stats`, from the entries."""
        columns = self._columns
        stats = topic_stats(columns["topic_id"], columns["size"], columns["second"])
        return [(self._topics.name(one.topic_id), one) for one in stats]

    def search(self, lookup: PreparedLookup) -> npt.NDArray[Any]:
        """Return the rows that answer `lookup`, in no order."""
        return select_items(self._columns, None, lookup, self._topics.ids(lookup.topic), self._schema)

    def search_many(self, batch: LookupBatch) -> Matches:
        """Return the rows that answer each lookup, in no order."""
        pairs = [(topic_id, topic) for topic in batch.topics for topic_id in self._topics.ids(topic)]
        return matching(batch, self._columns, itemgetter("second"), pairs, self._schema)


class WriteBuffer:
    """Bounded by entries and estimated bytes; `topics` has names and assigned ids, `rule` hashes keys, and `held_up`
    returns why the flusher can't write, if it can't.

    `open.add` takes most messages, without the lock: a user of the open chunk's rows closes it first.
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
        self._lock = threading.Lock()
        self.open = OpenChunk(self._codec, 0)
        """What takes rows."""
        self._ready: list[Chunk] = []
        self._flushing: tuple[Chunk, ...] = ()
        self._entries = 0  # of closed chunks, like the bytes
        self._bytes = 0
        self._newest = 0
        self._flushed_entries = 0
        self.refused = 0  # how many puts were pushed back
        self.released = 0  # number of the newest chunk that `end_flush` released
        self._closed = False
        self.refusal: BackPressure | None = None
        """Why the last put was pushed back, until there is room again."""

    @property
    def size(self) -> int:
        """Entries in the buffer."""
        return self._entries + len(self.open.rows.keys)

    @property
    def is_empty(self) -> bool:
        """Whether all that was put before the call is in files."""
        # in this order: what leaves the open chunk meanwhile is counted before
        return not self.open.rows.keys and not self._entries

    @property
    def taken_entries(self) -> int:
        """Entries that were ever put."""
        return self._flushed_entries + self.size

    @property
    def size_bytes(self) -> int:
        """Estimated bytes in the buffer."""
        return self._bytes + self.open.rows.size_bytes

    @synchronized
    def append_rows(
        self,
        keys: list[str],
        record: Record,
        size_bytes: int,
        source: str | None = None,
        position: int | None = None,
        agree: Callable[[], None] | None = None,
    ) -> None:
        """Add one message's entries. Raises `BackPressure`, or as `agree`, called last; nothing was added then."""
        self._admit(len(keys), size_bytes)
        if agree is not None:
            agree()
        row = self._codec.struct.pack(*record)
        if not self.open.rows.extend(keys, row, size_bytes):
            self._close_open()
            rows = max(ROWS, len(keys))
            left = self._max_entries - self._entries, self._max_bytes - self._bytes
            following = OpenChunk(self._codec, rows, *left)
            following.rows.extend(keys, row, size_bytes)
            # behind the extension: puts of other threads fill an open chunk without the lock
            self.open = following
        if source is not None and position is not None:
            # behind the entries: an interrupt in between leaves a position that comes again
            chunk = self.open
            chunk.positions[source] = max(position, chunk.positions.get(source, position))

    @synchronized
    def append_columns(
        self, columns: Columns, size_bytes: int, positions: dict[str, int], agree: Callable[[], None] | None = None
    ) -> None:
        """Add a batch of columns that are hashed already; `agree` and errors as `append_rows`."""
        # what the call is measured against must not grow meanwhile
        self.open.rows.close()
        self._admit(len(columns["second"]), size_bytes)
        if agree is not None:
            agree()
        self._close_open()
        self._append(Chunk(self._newest + 1, len(columns["second"]), size_bytes, dict(positions), columns), self.open)

    def snapshot(self) -> tuple[Chunk, ...]:
        """Return every chunk that isn't released, oldest first; whatever was put before the call is in one."""
        # on one line, as in `synchronized`; spelt out, since each lookup calls it
        with self._lock: chunks = self._closed_chunks()  # noqa: E701  # fmt: skip
        if len(chunks) < 2:
            return chunks
        self._merge_small()
        with self._lock: return self._closed_chunks()  # noqa: E701  # fmt: skip

    @synchronized
    def close(self) -> None:
        """Accept nothing more: whatever was accepted before is flushed by the flush that follows."""
        self._closed = True
        self.open.rows.close()

    @synchronized
    def close_chunk(self) -> int:
        """Close the open chunk; return the number of the newest closed one: all that was put is in it or before."""
        self._close_open()
        return self._newest

    @synchronized
    def begin_flush(self, max_entries: int) -> tuple[Chunk, ...]:
        """Return the oldest closed chunks, `max_entries` or one chunk; the same ones again until `end_flush`."""
        if not self._flushing:
            stop = entries = 0
            while stop < len(self._ready) and (not stop or entries + self._ready[stop].count <= max_entries):
                entries += self._ready[stop].count
                stop += 1
            taken, left = tuple(self._ready[:stop]), self._ready[stop:]
            self._flushing, self._ready = taken, left
        return self._flushing

    @synchronized
    def end_flush(self) -> None:
        """Release the chunks of `begin_flush`: they are in files now, durable and searchable there."""
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
            raise IndexClosed("the index is closed")
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
        if chunk.rows.keys or chunk.positions:
            chunk.rows.close()
            count, size_bytes = len(chunk.rows.keys), chunk.rows.size_bytes
            self._append(Chunk(self._newest + 1, count, size_bytes, chunk.positions, chunk), OpenChunk(self._codec, 0))
            chunk.trim()

    def _append(self, chunk: Chunk, following: OpenChunk) -> None:
        """Add a closed chunk, and from here on have `following` take rows."""
        ready, entries, size_bytes = [*self._ready, chunk], self._entries + chunk.count, self._bytes + chunk.size_bytes
        state = ready, entries, following, chunk.number, size_bytes
        # in this order, for `is_empty`
        self._ready, self._entries, self.open, self._newest, self._bytes = state

    def _closed_chunks(self) -> tuple[Chunk, ...]:
        self._close_open()
        return (*self._flushing, *self._ready)

    def _merge_small(self) -> None:
        """Keep chunks' sizes falling by halves, so that queries meet few. Puts wait only while chunks are exchanged."""
        while True:
            pair = self._ready[-2:]
            if len(pair) < 2 or pair[0].count > 2 * pair[1].count or pair[0].count + pair[1].count > _MERGE_BELOW:
                return
            if not self._exchange(pair, pair[0].merged_with(pair[1])):
                return  # on its way into a file, or merged by another query meanwhile

    @synchronized
    def _exchange(self, pair: list[Chunk], merged: Chunk) -> bool:
        ready = self._ready
        at = ready.index(pair[0]) if pair[0] in ready else len(ready)
        if ready[at : at + 2] != pair:
            return False
        self._ready = [*ready[:at], merged, *ready[at + 2 :]]
        return True
