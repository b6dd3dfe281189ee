"""Records of the storage's log and the state they add up to. SPEC.md section 9.

A record is one JSON document, a line ``#crc32 xxxxxxxx`` behind it; it adds objects and archived segments, removes
others, and carries the writer's epoch, the attempt's id and source positions. `LogState` is the fold of records 1..n, a
checkpoint a stored `LogState`. Pure.
"""

from __future__ import annotations

import json
import zlib
from bisect import bisect_left, bisect_right
from collections.abc import Iterable
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from tiered_index.documents import (
    COUNT,
    CRC32,
    MILLISECONDS,
    SECONDS,
    SIZE,
    Malformed,
    Optional,
    checked,
    integer,
    list_of,
    load,
    map_of,
    nullable,
    record,
    text,
)
from tiered_index.errors import CorruptFile, UnsupportedVersion
from tiered_index.format.bloom import FILTER_BLOCK_BYTES
from tiered_index.format.layout import Layout
from tiered_index.format.names import DATA_PREFIX, SEGMENTS_PREFIX
from tiered_index.format.slot_map import SlotMap
from tiered_index.format.trailer import FILE_ID, POSITIONS

__all__ = [
    "ArchivedSegment",
    "IndexDescriptor",
    "LogRecord",
    "LogState",
    "StoredObject",
    "StreamBatch",
    "TableShard",
    "decode_document",
    "encode_document",
]

LOG_VERSION = 1
_MARK = b"\n#crc32 "


def max_positions(first: dict[str, int], second: dict[str, int]) -> dict[str, int]:
    """Return the greater position of each source: a source's position never goes back."""
    merged = dict(first)
    for source, position in second.items():
        merged[source] = max(position, merged.get(source, position))
    return merged


@dataclass(frozen=True, slots=True)
class TableShard:
    """What part of which window table an object is. All shards of a table come and go in one record.

    The window is [`begin_s`, `begin_s` + `window_s`) epoch seconds; the object holds slots [`slot_low`, `slot_high`) of
    `slots`. A slot too large for one object is spread over several of the same range, each with the entries of a time
    of its own.
    """

    table: str
    begin_s: int
    window_s: int
    slots: SlotMap
    slot_low: int
    slot_high: int

    def to_json(self) -> dict[str, Any]:
        """Return the fields as stored in a record."""
        return {
            "table": self.table,
            "begin_s": self.begin_s,
            "window_s": self.window_s,
            "slots": self.slots.to_json(),
            "slot_low": self.slot_low,
            "slot_high": self.slot_high,
        }


@dataclass(frozen=True, slots=True)
class StoredObject:
    """One object that exists by the log's word.

    Seconds are inclusive epoch seconds, `size_bytes` is the whole object's.

    `shard` says which part of a window table it is; None: a file of its own.
    """

    name: str
    file_id: str
    lane: str
    sequence: int
    second_min: int
    second_max: int
    count: int
    size_bytes: int
    trailer_position: int
    filter_length: int
    directory_length: int
    metadata_length: int
    published_ms: int
    shard: TableShard | None = None

    @property
    def directory_position(self) -> int:
        """Where directory, metadata and tail start: one range to the end of the object."""
        return self.trailer_position + self.filter_length

    def to_json(self) -> dict[str, Any]:
        """Return the fields as stored in a record."""
        document = {name: getattr(self, name) for name in _PLAIN}
        return document if self.shard is None else {**document, "shard": self.shard.to_json()}


_PLAIN = tuple(name for name in StoredObject.__slots__ if name != "shard")


@dataclass(frozen=True, slots=True)
class ArchivedSegment:
    """A closed segment of a source's log, kept as one object: bytes [start, end) of the log of `store`."""

    name: str
    store: str
    start: int
    size_bytes: int
    crc32: int
    head_crc32: int
    """CRC32 of the first piece of 1 MiB: enough to tell one store from another."""
    object_bytes: int
    """Size of the object: the segment, the checksums of its pieces, and a tail."""
    published_ms: int
    """The writer's clock before it read the segment."""

    @property
    def end(self) -> int:
        """The offset behind the last byte."""
        return self.start + self.size_bytes

    @property
    def place(self) -> tuple[str, int]:
        """Store and start: of one store, one segment begins at an offset."""
        return self.store, self.start

    def to_json(self) -> dict[str, Any]:
        """Return the fields as stored in a record."""
        return {name: getattr(self, name) for name in self.__slots__}

    @classmethod
    def from_json(cls, document: dict[str, Any]) -> ArchivedSegment:
        """Return the segment that `to_json` described; unknown fields are ignored. Raises `Malformed`."""
        return _ARCHIVED(document)


@dataclass(frozen=True, slots=True)
class StreamBatch:
    """The last batch of a stream that was published: its number, and what tells it from another batch of that number.

    `checksum` (u64) is a sum over the entries that depends neither on their order nor on how they were cut into tables.
    """

    number: int
    entries: int
    checksum: int

    def to_json(self) -> dict[str, Any]:
        """Return the fields as stored in a record."""
        return {"number": self.number, "entries": self.entries, "checksum": f"{self.checksum:016x}"}


@dataclass(frozen=True)
class IndexDescriptor:
    """What record 1 fixes for good: which index this is and what its files look like."""

    index_id: str
    layout: Layout
    offset_space: str

    def to_json(self) -> dict[str, Any]:
        """Return the fields as stored in record 1."""
        return {"index_id": self.index_id, "layout": self.layout.to_json(), "offset_space": self.offset_space}


@dataclass(frozen=True)
class LogRecord:
    """One record.

    `kind`: ``create``, ``fence``, ``publish``, ``archive``, ``remove``; others are folded by what they add and remove.
    """

    number: int
    kind: str
    epoch: int
    attempt: str
    created_ms: int
    add: tuple[StoredObject, ...] = ()
    remove: tuple[str, ...] = ()
    positions: dict[str, int] = field(default_factory=dict)
    genesis: IndexDescriptor | None = None
    archive: tuple[ArchivedSegment, ...] = ()
    batches: dict[str, StreamBatch] = field(default_factory=dict)

    def encode(self) -> bytes:
        """Return the record's bytes."""
        return encode_document(
            {
                "kind": self.kind,
                "number": self.number,
                "epoch": self.epoch,
                "attempt": self.attempt,
                "created_ms": self.created_ms,
                "add": [o.to_json() for o in self.add],
                "remove": list(self.remove),
                "positions": self.positions,
                "genesis": self.genesis.to_json() if self.genesis else None,
                **_archive_json(self.archive),
                **_batches_json(self.batches),
            }
        )

    @classmethod
    def decode(cls, data: bytes, file: str) -> LogRecord:
        """Return the record in `data`; raises `CorruptFile` or `UnsupportedVersion`."""
        return checked(_RECORD, decode_document(data, file), file, "log record")


@dataclass(frozen=True)
class LogState:
    """What exists at one position of the log. Immutable: a reader keeps the state it works at."""

    number: int = 0
    epoch: int = 0
    genesis: IndexDescriptor | None = None
    objects: dict[str, StoredObject] = field(default_factory=dict)
    positions: dict[str, int] = field(default_factory=dict)
    archive: dict[str, ArchivedSegment] = field(default_factory=dict)
    batches: dict[str, StreamBatch] = field(default_factory=dict)

    def apply(self, record: LogRecord, file: str) -> LogState:
        """Return the state after `record`, which must be the next one.

        Raises `CorruptFile` for one that contradicts the state.
        """
        return self.fold([(record, file)])

    def fold(self, records: Iterable[tuple[LogRecord, str]]) -> LogState:
        """Return the state after `records`, each with its name, in order; one copy is made for all. Errors as
        `apply`.
        """
        fold = self.folding()
        for added, file in records:
            fold.add(added, file)
        return fold.state() if fold.number > self.number else self

    def folding(self) -> LogReplay:
        """Return this state as one that records can be added to, one after the other."""
        return LogReplay(self)

    def object_of(self, file_id: str) -> StoredObject | None:
        """Return the object that holds file `file_id`, or None."""
        return self._by_file.get(file_id)

    def segment_at(self, store: str, start: int) -> ArchivedSegment | None:
        """Return the archived segment of `store` that begins at offset `start`, or None."""
        found = self.segments_of(store)
        at = bisect_left(found, start, key=lambda segment: segment.start)
        return found[at] if at < len(found) and found[at].start == start else None

    def segment_holding(self, store: str, offset: int) -> ArchivedSegment | None:
        """Return the archived segment of `store` that holds byte `offset` of its log, or None."""
        found = self.segments_of(store)
        at = bisect_right(found, offset, key=lambda segment: segment.start) - 1
        return found[at] if at >= 0 and offset < found[at].end else None

    def segments_of(self, store: str) -> list[ArchivedSegment]:
        """Return the archived segments of `store`, by their start."""
        return self._by_store.get(store, [])

    @property
    def stores(self) -> tuple[str, ...]:
        """The stores of which segments are archived."""
        return tuple(self._by_store)

    @cached_property
    def files(self) -> dict[str, StoredObject]:
        """The objects that are files of their own, by file id."""
        return {o.file_id: o for o in self.objects.values() if o.shard is None}

    @cached_property
    def tables(self) -> dict[str, list[StoredObject]]:
        """The shards of each window table, by the table's id."""
        tables: dict[str, list[StoredObject]] = {}
        for stored in self.objects.values():
            if stored.shard is not None:
                tables.setdefault(stored.shard.table, []).append(stored)
        return tables

    @cached_property
    def _by_store(self) -> dict[str, list[ArchivedSegment]]:
        stores: dict[str, list[ArchivedSegment]] = {}
        for segment in sorted(self.archive.values(), key=lambda segment: (segment.store, segment.start)):
            stores.setdefault(segment.store, []).append(segment)
        return stores

    @cached_property
    def _by_file(self) -> dict[str, StoredObject]:
        return {o.file_id: o for o in reversed(self.objects.values())}

    def encode(self) -> bytes:
        """Return a checkpoint's bytes."""
        return encode_document(
            {
                "kind": "checkpoint",
                "number": self.number,
                "epoch": self.epoch,
                "genesis": self.genesis.to_json() if self.genesis else None,
                "objects": [o.to_json() for o in self.objects.values()],
                "positions": self.positions,
                **_archive_json(self.archive.values()),
                **_batches_json(self.batches),
            }
        )

    @classmethod
    def decode(cls, data: bytes, file: str) -> LogState:
        """Return the state in a checkpoint; raises `CorruptFile`."""
        return checked(_STATE, decode_document(data, file), file, "checkpoint")


class LogReplay:
    """A state that changes in place while records are added to it."""

    def __init__(self, begun: LogState) -> None:
        self.number, self._epoch, self._genesis, self._positions = (
            begun.number,
            begun.epoch,
            begun.genesis,
            begun.positions,
        )
        self._objects, self._archive, self._copied = begun.objects, begun.archive, False
        self._batches = begun.batches
        self._places: set[tuple[str, int]] | None = None  # of the segments in the archive, once they matter

    def add(self, record: LogRecord, file: str) -> None:
        """Add the next record.

        Raises `CorruptFile` where it contradicts those before; nothing may be added after that.
        """
        if record.number != self.number + 1:
            raise CorruptFile(
                file, "log record has another number than its name", expected=self.number + 1, found=record.number
            )
        if (record.number == 1) != (record.genesis is not None):
            raise CorruptFile(file, "only record 1 creates an index")
        if not self._copied:
            self._objects, self._archive, self._copied = dict(self._objects), dict(self._archive), True
        if record.archive and self._places is None:
            self._places = {segment.place for segment in self._archive.values()}
        places = self._places if self._places is not None else set()
        for name in record.remove:
            if self._objects.pop(name, None) is None:
                segment = self._archive.pop(name, None)
                if segment is None:
                    raise CorruptFile(file, f"removes {name!r}, which does not exist")
                places.discard(segment.place)
        self._genesis = self._genesis or record.genesis
        for added in record.add:
            if added.name in self._objects:
                raise CorruptFile(file, f"adds {added.name!r}, which exists already")
            _check_slots(added, self._genesis, file)
            self._objects[added.name] = added
        for segment in record.archive:
            if segment.name in self._archive or segment.place in places:
                raise CorruptFile(file, f"archives {segment.name!r} of {segment.store!r}, which is archived already")
            self._archive[segment.name] = segment
            places.add(segment.place)
        self.number = record.number
        self._epoch = max(self._epoch, record.epoch)
        self._positions = max_positions(self._positions, record.positions)
        later = {
            s: batch
            for s, batch in record.batches.items()
            if s not in self._batches or batch.number > self._batches[s].number
        }
        self._batches = {**self._batches, **later} if later else self._batches

    def state(self) -> LogState:
        """Return the state reached."""
        return LogState(
            self.number, self._epoch, self._genesis, self._objects, self._positions, self._archive, self._batches
        )


def _archive_json(segments: Iterable[ArchivedSegment]) -> dict[str, Any]:
    """Return the optional member of records and checkpoints: none where nothing is archived."""
    listed = [segment.to_json() for segment in segments]
    return {"archive": listed} if listed else {}


def _batches_json(batches: dict[str, StreamBatch]) -> dict[str, Any]:
    """Return the optional member of records and checkpoints: none where no stream has one."""
    return {"batches": {stream: batch.to_json() for stream, batch in batches.items()}} if batches else {}


def encode_document(document: dict[str, Any]) -> bytes:
    """Return a JSON document with version and CRC32."""
    body = json.dumps({"version": LOG_VERSION, **document}, separators=(",", ":")).encode()
    return body + _MARK + f"{zlib.crc32(body):08x}\n".encode()


def decode_document(data: bytes, file: str) -> dict[str, Any]:
    """Return the document in `data` after checking its CRC32 and version."""
    body, mark, tail = data.rpartition(_MARK)
    expected = f"{zlib.crc32(body):08x}\n".encode()
    if not mark or tail != expected:
        raise CorruptFile(file, "does not match its CRC32", offset=len(body), expected=expected, found=tail[:16])
    document = load(body, file, "what matches its CRC32")
    if not isinstance(document, dict) or document.get("version") != LOG_VERSION:
        found = document.get("version") if isinstance(document, dict) else None
        raise UnsupportedVersion(
            file, f"log version {found} is newer than this reader", expected=LOG_VERSION, found=found
        )
    return document


def _check_slots(stored: StoredObject, genesis: IndexDescriptor | None, file: str) -> None:
    """Raise `CorruptFile` for a shard of other base slots than the index has: no lookup, no merge would find its
    entries.
    """
    base = genesis.layout.slots if genesis is not None else 0
    if stored.shard is not None and stored.shard.slots.base != base:
        raise CorruptFile(
            file, f"{stored.name} has other base slots than the index", expected=base, found=stored.shard.slots.base
        )


def _table_shard(**fields: Any) -> TableShard:
    shard = TableShard(**fields)
    if shard.slot_low >= shard.slot_high:
        raise Malformed(f"more than {shard.slot_low}", shard.slot_high, ".slot_high")
    return shard


def _stored_object(**fields: Any) -> StoredObject:
    stored = StoredObject(**fields)
    if stored.second_min > stored.second_max:
        raise Malformed(f"no second before {stored.second_min}", stored.second_max, ".second_max")
    if stored.directory_position > stored.size_bytes or stored.count > stored.size_bytes:
        raise Malformed("the size of all its parts", stored.size_bytes, ".size_bytes")
    if stored.filter_length % FILTER_BLOCK_BYTES:
        raise Malformed(f"a number of blocks of {FILTER_BLOCK_BYTES} bytes", stored.filter_length, ".filter_length")
    return stored


def _segment(**fields: Any) -> ArchivedSegment:
    segment = ArchivedSegment(**fields)
    if segment.size_bytes > segment.object_bytes:
        raise Malformed(f"at least {segment.size_bytes}", segment.object_bytes, ".object_bytes")
    return segment


def _state(**fields: Any) -> LogState:
    objects, archive = fields.pop("objects"), fields.pop("archive")
    state = LogState(**fields, objects={o.name: o for o in objects}, archive={s.name: s for s in archive})
    if len(state.objects) != len(objects) or len(state.archive) != len({segment.place for segment in archive}):
        raise Malformed("each object and each segment once", [*objects, *archive], ".objects")
    for stored in objects:
        _check_slots(stored, state.genesis, "checkpoint")
    return state


_PART = r"/[A-Za-z0-9_=+@-][A-Za-z0-9._=+@-]{0,127}"
# of an object's name; a record can only name objects below the prefix of their kind
_DATA_NAME = text(rf"{DATA_PREFIX[:-1]}({_PART}){{1,3}}")
_SEGMENT_NAME = text(rf"{SEGMENTS_PREFIX[:-1]}({_PART}){{1,4}}")
_SHARD = record(
    _table_shard,
    table=FILE_ID,
    begin_s=SECONDS,
    window_s=integer(1, 2**42),
    slots=SlotMap.from_json,
    slot_low=COUNT,
    slot_high=COUNT,
)
_OBJECT = record(
    _stored_object,
    name=_DATA_NAME,
    file_id=FILE_ID,
    lane=text(),
    sequence=COUNT,
    second_min=SECONDS,
    second_max=SECONDS,
    count=integer(1, 2**36),
    size_bytes=SIZE,
    trailer_position=SIZE,
    filter_length=SIZE,
    directory_length=SIZE,
    metadata_length=SIZE,
    published_ms=MILLISECONDS,
    shard=Optional(_SHARD, None),
)
_ARCHIVED = record(
    _segment,
    name=_SEGMENT_NAME,
    store=text(),
    start=integer(0, 2**62),
    size_bytes=SIZE,
    crc32=CRC32,
    head_crc32=CRC32,
    object_bytes=SIZE,
    published_ms=MILLISECONDS,
)
_BATCH = record(
    lambda number, entries, checksum: StreamBatch(number, entries, int(checksum, 16)),
    number=COUNT,
    entries=COUNT,
    checksum=text("[0-9a-f]{16}"),
)
_GENESIS = record(IndexDescriptor, index_id=FILE_ID, layout=Layout.from_json, offset_space=text())
_ARCHIVE, _BATCHES = Optional(list_of(_ARCHIVED), ()), Optional(map_of(_BATCH), {})
_RECORD = record(
    LogRecord,
    number=COUNT,
    kind=text(),
    epoch=COUNT,
    attempt=text(),
    created_ms=MILLISECONDS,
    add=list_of(_OBJECT),
    remove=list_of(text()),
    positions=POSITIONS,
    genesis=nullable(_GENESIS),
    archive=_ARCHIVE,
    batches=_BATCHES,
)
_STATE = record(
    _state,
    number=COUNT,
    epoch=COUNT,
    genesis=_GENESIS,
    objects=list_of(_OBJECT),
    positions=POSITIONS,
    archive=_ARCHIVE,
    batches=_BATCHES,
)
