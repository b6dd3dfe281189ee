"""Records of the storage's log. SPEC.md section 9. Pure.

A record is one JSON document and a line ``#crc32 xxxxxxxx``. It adds objects and archived segments, removes others, and
has the writer's epoch, the attempt's id and source positions. `state` has the result of all records.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from typing import Annotated, Any, Literal

from tiered_index.documents import (
    COUNT,
    CRC32,
    MILLISECONDS,
    SECONDS,
    SIZE,
    Malformed,
    Optional,
    checked,
    fields_of,
    integer,
    list_of,
    load,
    map_of,
    nullable,
    record,
    text,
    tuple_of,
)
from tiered_index.errors import CorruptFile, UnsupportedVersion
from tiered_index.format.archived import queues_bytes_of
from tiered_index.format.bloom import FILTER_BLOCK_BYTES
from tiered_index.format.hashing import HASH_RULES, HashRule
from tiered_index.format.layout import MOST_ITEMS, Layout
from tiered_index.format.metadata import FILE_ID, POSITIONS
from tiered_index.format.names import DATA_PREFIX, SEGMENTS_PREFIX, topic_of_store
from tiered_index.format.schema import Schema
from tiered_index.format.slots import SlotMap
from tiered_index.format.trailer import Directory, Trailer, parse_trailer
from tiered_index.kernels import crc32
from tiered_index.retention import EXPIRED, NOTHING, Expired
from tiered_index.types import LostFile, inclusive

LOG_VERSION = 6
"""The newest version, of documents with columnar segments.

Others: 4 with digests or roots, 3 with tombstones, 2 with horizons, else 1.
"""
OF_ROWS = 5
"""The version of checkpoints with many objects, and of those with changes."""
_CHAINED = 4
_MARK = b"\n#crc32 "
_PART = r"/[A-Za-z0-9_=+@-][A-Za-z0-9._=+@-]{0,127}"
# a part of an object's name. Records can only name objects below the prefix of their kind
DATA_NAME = text(rf"{DATA_PREFIX[:-1]}({_PART}){{1,3}}")
_SEGMENT_NAME = text(rf"{SEGMENTS_PREFIX[:-1]}({_PART}){{1,4}}")
_PLACE = integer(0, 2**62)
_SOURCE = nullable(tuple_of(CRC32, CRC32))
_COLUMNS = nullable(tuple_of(integer(1, 2**62), integer(1, 2**31)))
DIGEST = text("[0-9a-f]{32}")


def digest_of(data: bytes) -> str:
    """Return the digest of a record's bytes: 32 hexadecimal digits of BLAKE2b."""
    return hashlib.blake2b(data, digest_size=16).hexdigest()


def document_version(expired: Expired, archive: Iterable[ArchivedSegment], *digests: object) -> int:
    """Return the version of a document with `expired`, `archive`, and with `digests` of records or marks of roots."""
    columnar = any(segment.columns is not None for segment in archive)
    return LOG_VERSION if columnar else max(expired.log_version, _CHAINED if any(digests) else 1)


def max_positions(first: dict[str, int], second: dict[str, int]) -> dict[str, int]:
    """Return the greater position of each source. A source's position never decreases."""
    return first | {source: max(position, first.get(source, position)) for source, position in second.items()}


Origin = Literal["build", "writer"]
"""The origin of entries: jobs that built tables from a source, or live writers (files, streams)."""


class Stored:
    """Base class of dataclasses that are stored as documents: fields in order, without those with default values."""

    __slots__ = ()

    def to_json(self) -> dict[str, Any]:
        """Return the fields as stored in a record."""
        document: dict[str, Any] = {}
        for name, declared in self.__dataclass_fields__.items():  # type: ignore[attr-defined]
            value = getattr(self, name)
            if value != declared.default:
                document[name] = value.to_json() if hasattr(value, "to_json") else value
        return document


QUARANTINE_S = 1 << 31
"""The length in seconds of a window for implausible times. No merge reads such a window.

It is the range of a time difference of 32 bits.
"""


@dataclass(frozen=True, slots=True)
class TableShard(Stored):
    """An object's part of a window table.

    - One record adds or removes all shards of a table, except for lost ones.
    - The window is [`begin_s`, `begin_s` + `window_s`) epoch seconds.
    - The shard has the slots [`slot_low`, `slot_high`) of `slots`. A slot that is too large for one object has several
      shards with the same range, each with entries of another time.
    - All entries of a table have one `origin`; None: an older version wrote the table.
    """

    table: Annotated[str, FILE_ID]
    begin_s: Annotated[int, SECONDS]
    window_s: Annotated[int, integer(1, 2**42)]
    slots: Annotated[SlotMap, SlotMap.from_json]
    slot_low: Annotated[int, COUNT]
    slot_high: Annotated[int, COUNT]
    origin: Annotated[Origin | None, text("build|writer")] = None


@dataclass(frozen=True, slots=True)
class StoredObject(Stored):
    """An object that the log names. Seconds are inclusive.

    `shard` is its part of a window table; None: it is a file. `hash` is the hash rule of its keys.
    """

    name: Annotated[str, DATA_NAME]
    file_id: Annotated[str, FILE_ID]
    lane: Annotated[str, text()]
    sequence: Annotated[int, COUNT]
    second_min: Annotated[int, SECONDS]
    second_max: Annotated[int, SECONDS]
    count: Annotated[int, integer(1, 2**36)]
    size_bytes: Annotated[int, SIZE]
    trailer_position: Annotated[int, SIZE]
    filter_length: Annotated[int, SIZE]
    directory_length: Annotated[int, SIZE]
    metadata_length: Annotated[int, SIZE]
    published_ms: Annotated[int, MILLISECONDS]
    shard: Annotated[TableShard | None, SHARD] = None
    hash: Annotated[HashRule, text("|".join(HASH_RULES))] = "abs"

    @property
    def part(self) -> TableShard:
        """The `shard` of an object that is one."""
        assert self.shard is not None
        return self.shard

    @property
    def file(self) -> str:
        """The id of the file, or of the window table of a shard."""
        return self.file_id if self.shard is None else self.shard.table

    @property
    def origin(self) -> Origin | None:
        """The origin of its entries. A file has the origin ``writer``."""
        return "writer" if self.shard is None else self.shard.origin

    @property
    def directory_position(self) -> int:
        """The byte position of the directory. Directory, metadata and tail are contiguous, to the end of the object."""
        return self.trailer_position + self.filter_length

    def items_bytes(self, schema: Schema) -> int:
        """Return an estimate of the bytes of the entries, never less than the true number."""
        return min(self.count * schema.item.itemsize, self.trailer_position)


@dataclass(frozen=True, slots=True)
class ArchivedSegment(Stored):
    """A closed segment of a source's log, kept as one object: [start, end) of the log of `store`.

    The segment has these bytes of the log. A columnar segment is a Parquet file of records instead: start and end are
    record numbers. Its footer is at the end of the object, after the checksums of its pieces.
    """

    name: Annotated[str, _SEGMENT_NAME]
    store: Annotated[str, text()]
    start: Annotated[int, _PLACE]
    size_bytes: Annotated[int, SIZE]
    crc32: Annotated[int, CRC32]
    head_crc32: Annotated[int, CRC32]
    """CRC32 of the first 1 MiB, which distinguishes stores."""
    object_bytes: Annotated[int, SIZE]
    """Size of the object: the segment, optional queue offsets, the checksums of its pieces, and a tail."""
    published_ms: Annotated[int, MILLISECONDS]
    """The time before the segment was read, by the writer's clock."""
    source: Annotated[tuple[int, int] | None, _SOURCE] = None
    """`crc32` and `head_crc32` of the source's file, if messages of the segment were erased."""
    columns: Annotated[tuple[int, int] | None, _COLUMNS] = None
    """The number of record numbers and the footer's bytes of a columnar segment; None: not columnar."""

    @property
    def end(self) -> int:
        """The offset after the last byte, or the number after the last record."""
        return self.start + (self.size_bytes if self.columns is None else self.columns[0])

    @property
    def topic(self) -> str | None:
        """The topic of all messages of the segment; None: it may have messages of many topics."""
        return None if self.columns is None else topic_of_store(self.store)

    @property
    def footer_bytes(self) -> int:
        """The bytes of a columnar segment's footer, at its end; 0: not columnar."""
        return 0 if self.columns is None else self.columns[1]

    @property
    def queues_bytes(self) -> int:
        """The bytes of queue offsets in the object; 0: it has none."""
        return queues_bytes_of(self.size_bytes, self.object_bytes)

    def ranges(self, position: int, length: int) -> list[tuple[int, int]]:
        """Return the object's ranges (start, length) with the segment's `length` bytes from `position` on."""
        footer_at = self.size_bytes - self.footer_bytes
        before = max(min(length, footer_at - position), 0)
        moved = position + before + self.object_bytes - self.size_bytes
        return [one for one in ((position, before), (moved, length - before)) if one[1]]

    @property
    def place(self) -> tuple[str, int]:
        """Store and start offset, which identify the segment."""
        return self.store, self.start

    @classmethod
    def from_json(cls, document: dict[str, Any]) -> ArchivedSegment:
        """Return the segment of a document of `to_json`. Unknown fields are ignored. Raises `Malformed`."""
        return _ARCHIVED(document)


@dataclass(frozen=True, slots=True)
class StreamBatch:
    """A stream's last published batch. `checksum` (u64) is a sum over its entries, in any order and tables."""

    number: int
    entries: int
    checksum: int

    def to_json(self) -> dict[str, Any]:
        """Return the fields as stored in a record."""
        return {"number": self.number, "entries": self.entries, "checksum": f"{self.checksum:016x}"}


RangeKind = Literal["corrupt", "missing", "rewritten"]
_REASONS: dict[RangeKind, str] = {
    "corrupt": "are damaged, and were skipped",
    "missing": "were deleted before they were read, and were skipped",
    "rewritten": "were cut off or rewritten after they were read",
}


@dataclass(frozen=True, slots=True)
class SourceRange(Stored):
    """Positions [`begin`, `end`) of a followed source that were skipped, or rewritten after they were read.

    - `messages`: the least number of messages there; None: not known.
    - `topic`: the only topic that has messages there; None: any topic.
    """

    source: Annotated[str, text()]
    kind: Annotated[RangeKind, text("corrupt|missing|rewritten")]
    begin: Annotated[int, _PLACE]
    end: Annotated[int, _PLACE]
    messages: Annotated[int | None, nullable(COUNT)] = None
    topic: Annotated[str | None, nullable(text())] = None

    @property
    def reason(self) -> str:
        """The reason why messages of the range may be missing."""
        offsets = "commit log offsets" if self.source.startswith("rocketmq:") else "offsets"
        count = "" if self.messages is None else f" (at least {self.messages:,} messages)"
        return f"{offsets} {inclusive(self.begin, self.end)}{count} {_REASONS[self.kind]}"

    def lost(self, begin_ms: int, end_ms: int) -> LostObject:
        """Return the lost object of the range, whose messages have times in [`begin_ms`, `end_ms`], epoch ms."""
        identity = f"{self.source}\0{self.topic}\0{self.kind}\0{self.begin}\0{self.end}"
        file_id = f"{self.kind}-{hashlib.blake2b(identity.encode(), digest_size=12).hexdigest()}"
        second_min, second_max = sorted((begin_ms // 1000, end_ms // 1000))
        name = f"{DATA_PREFIX}{file_id}/skipped"
        return LostObject(name, file_id, second_min, second_max, max(self.messages or 1, 1), range=self)


@dataclass(frozen=True, slots=True)
class LostObject(Stored):
    """A lost object that a record gave up. Answers lack its entries permanently. Seconds are inclusive.

    `range` is set if it never was an object, but a range of a source.
    """

    name: str
    file_id: str
    second_min: int
    second_max: int
    count: int
    shard: TableShard | None = None
    hash: HashRule = "abs"
    range: SourceRange | None = None

    @classmethod
    def of(cls, stored: StoredObject) -> LostObject:
        """Return the lost object of a stored object."""
        return cls(**{name: getattr(stored, name) for name in cls.__slots__ if name != "range"})

    @property
    def lacks_entries(self) -> bool:
        """Whether answers lack entries: false for rewritten messages, whose entries the index has."""
        return self.range is None or self.range.kind != "rewritten"

    def joined(self, later: LostObject) -> LostObject:
        """Return one lost object, of this name, for two ranges of one source."""
        assert self.range is not None and later.range is not None
        one, other = self.range, later.range
        counts = [count for count in (one.messages, other.messages) if count is not None]
        begin, end = min(one.begin, other.begin), max(one.end, other.end)
        both = replace(one, begin=begin, end=end, messages=sum(counts) if counts else None)
        return replace(
            self,
            second_min=min(self.second_min, later.second_min),
            second_max=max(self.second_max, later.second_max),
            count=max(sum(counts), 1),
            range=both,
        )

    @property
    def file(self) -> str:
        """The id of the file, or of the window table of a shard."""
        return self.shard.table if self.shard is not None else self.file_id

    def told(self, source: str | None = None) -> LostFile:
        """Return the lost file as answers report it."""
        begin_ms, end_ms = self.second_min * 1000, self.second_max * 1000
        file, reason = (self.file, None) if self.range is None else (self.range.source, self.range.reason)
        return LostFile(file=file, begin_ms=begin_ms, end_ms=end_ms, entries=self.count, source=source, reason=reason)

    def concerns(self, second_min: int, second_max: int, *hashes: int, topic: str | None = None) -> bool:
        """Return whether it may have had answers in an inclusive range of seconds.

        `hashes` are the hashes of a key by the rules ``abs`` and ``mask``; without them any key counts. `topic` is that
        of the lookup (None: any).
        """
        if self.second_min > second_max or self.second_max < second_min or not self.lacks_entries:
            return False
        if self.range is not None and topic is not None and self.range.topic not in (None, topic):
            return False
        shard = self.shard
        if shard is None or not hashes:
            return True
        mine = {"abs": hashes[:1], "mask": hashes[1:], "both": hashes}[self.hash]
        return any(shard.slot_low <= shard.slots.slot_of(key_hash) < shard.slot_high for key_hash in mine)


@dataclass(frozen=True)
class IndexDescriptor(Stored):
    """The content of record 1, which never changes: the id of the index and the layout of its files."""

    index_id: Annotated[str, FILE_ID]
    layout: Annotated[Layout, Layout.from_json]
    offset_space: Annotated[str, text()]


@dataclass(frozen=True)
class LogRecord:
    """One record. Readers ignore its `kind` (``create``, ``publish``, ``expire``, ``erase`` ...)."""

    number: Annotated[int, COUNT]
    kind: Annotated[str, text()]
    epoch: Annotated[int, COUNT]
    attempt: Annotated[str, text()]
    created_ms: Annotated[int, MILLISECONDS]
    add: tuple[StoredObject, ...] = ()
    remove: tuple[str, ...] = ()
    positions: dict[str, int] = field(default_factory=dict)
    genesis: IndexDescriptor | None = None
    archive: tuple[ArchivedSegment, ...] = ()
    batches: dict[str, StreamBatch] = field(default_factory=dict)
    lost: tuple[LostObject, ...] = ()
    expired: Expired = NOTHING
    left_out: Annotated[int, COUNT] = 0
    """Number of entries that a merge left out, because they had expired or were erased."""
    previous: Annotated[str, DIGEST] = ""
    """The digest of the record before this one; empty: an older version wrote this record."""
    root: Annotated[str, text()] = ""
    """The id of the root whose writer wrote this record; empty: a job, or an older version."""
    copied: Annotated[str, DIGEST] = ""
    """Only of a copy's record: the digest of the source's record up to which the copy has everything."""
    put_before_ms: Annotated[int, MILLISECONDS] = 0
    """No entry that was put before this time, by the writer's or job's clock, waits for a later record; 0: not said."""
    digest: str = field(default="", compare=False)
    """The digest of this record's bytes; empty before it is encoded."""

    def encode(self) -> bytes:
        """Return the record's bytes."""
        chain = {"previous": self.previous, "root": self.root, "copied": self.copied}
        return encode_document(
            {
                "version": document_version(self.expired, self.archive, *chain.values()),
                "kind": self.kind,
                "number": self.number,
                "epoch": self.epoch,
                "attempt": self.attempt,
                "created_ms": self.created_ms,
                "add": [o.to_json() for o in self.add],
                "remove": list(self.remove),
                "positions": self.positions,
                "genesis": self.genesis.to_json() if self.genesis else None,
                **optional_members(self.archive, self.batches, self.lost, self.expired),
                **({"left_out": self.left_out} if self.left_out else {}),
                **({"put_before_ms": self.put_before_ms} if self.put_before_ms else {}),
                **{name: value for name, value in chain.items() if value},
            }
        )

    @classmethod
    def decode(cls, data: bytes, file: str) -> LogRecord:
        """Return the record in `data`. Raises `CorruptFile` or `UnsupportedVersion`."""
        return replace(checked(_RECORD, decode_document(data, file), file, "log record"), digest=digest_of(data))


def optional_members(
    archive: Iterable[ArchivedSegment], batches: dict[str, StreamBatch], lost: Iterable[LostObject], expired: Expired
) -> dict[str, Any]:
    """Return the fields that records and checkpoints have only if they are not empty."""
    archived = [segment.to_json() for segment in archive]
    streams = {stream: batch.to_json() for stream, batch in batches.items()}
    losses = [one.to_json() for one in lost]
    members = {"archive": archived, "batches": streams, "lost": losses}
    present = {name: member for name, member in members.items() if member}
    return {**present, "expired": expired.to_json()} if expired else present


def encode_document(document: dict[str, Any]) -> bytes:
    """Return the bytes of a JSON document with its version (by default 1) and CRC32."""
    return sealed_text(json_text({"version": 1, **document}))


def json_text(value: Any) -> str:
    """Return the compact JSON text of a value."""
    return json.dumps(value, separators=(",", ":"))


def sealed_text(text: str) -> bytes:
    """Return the bytes of a document's text and its CRC32."""
    body = text.encode()
    return body + _MARK + f"{crc32(body):08x}\n".encode()


def decode_document(data: bytes, file: str, newest: int = LOG_VERSION) -> dict[str, Any]:
    """Return the document in `data`, after a check of its CRC32 and of its version (at most `newest`)."""
    body, mark, tail = data.rpartition(_MARK)
    expected = f"{crc32(body):08x}\n".encode()
    if not mark or tail != expected:
        raise CorruptFile(file, "does not match its CRC32", offset=len(body), expected=expected, found=tail[:16])
    document = load(body, file, "the text before its CRC32")
    found = document.get("version") if isinstance(document, dict) else None
    if not isinstance(document, dict) or type(found) is not int or not 1 <= found <= newest:
        problem = f"log version {found} is newer than this reader: upgrade tiered_index"
        raise UnsupportedVersion(file, problem, expected=newest, found=found)
    return document


def check_slots(stored: StoredObject, descriptor: IndexDescriptor | None, file: str) -> None:
    """Raise `CorruptFile` for a shard whose base slots differ from the index's: no lookup would find its entries."""
    base = descriptor.layout.slots if descriptor is not None else 0
    if stored.shard is not None:
        problem = f"{stored.name} has other base slots than the index"
        CorruptFile.unless_equal(file, problem, base, stored.shard.slots.base)


def table_shard(*values: Any, **fields: Any) -> TableShard:
    """Return a checked `TableShard`. Raises `Malformed`."""
    shard = TableShard(*values, **fields)
    if shard.slot_low >= shard.slot_high:
        raise Malformed(f"more than {shard.slot_low}", shard.slot_high, ".slot_high")
    return shard


def stored_object(*values: Any, **fields: Any) -> StoredObject:
    """Return a checked `StoredObject`. Raises `Malformed`."""
    stored = StoredObject(*values, **fields)
    if stored.second_min > stored.second_max:
        raise Malformed(f"a second from {stored.second_min} on", stored.second_max, ".second_max")
    if stored.directory_position > stored.size_bytes or stored.count > stored.size_bytes * MOST_ITEMS:
        raise Malformed("the size of all its parts", stored.size_bytes, ".size_bytes")
    if stored.filter_length % FILTER_BLOCK_BYTES:
        raise Malformed(f"a number of blocks of {FILTER_BLOCK_BYTES} bytes", stored.filter_length, ".filter_length")
    return stored


def _lost(**fields: Any) -> LostObject:
    lost = LostObject(**fields)
    if lost.second_min > lost.second_max:
        raise Malformed(f"a second from {lost.second_min} on", lost.second_max, ".second_max")
    return lost


def _segment(**fields: Any) -> ArchivedSegment:
    segment = ArchivedSegment(**fields)
    if segment.size_bytes > segment.object_bytes:
        raise Malformed(f"at least {segment.size_bytes}", segment.object_bytes, ".object_bytes")
    if segment.footer_bytes > segment.size_bytes:
        raise Malformed(f"at most {segment.size_bytes}", segment.footer_bytes, ".columns")
    return segment


def latest_ms(added: Iterable[StoredObject]) -> int:
    """Return the last time at which the sending of one of the objects began, epoch ms; 0: there are none."""
    return max((one.published_ms for one in added), default=0)


SHARD_FIELDS = fields_of(TableShard)
SHARD = record(table_shard, **SHARD_FIELDS)
OBJECT_FIELDS = fields_of(StoredObject)
OBJECT = record(stored_object, **OBJECT_FIELDS)
DESCRIPTOR = record(IndexDescriptor, **fields_of(IndexDescriptor))
_ARCHIVED = record(_segment, **fields_of(ArchivedSegment))
_LOST = record(
    _lost,
    **{name: OBJECT_FIELDS[name] for name in LostObject.__slots__ if name in OBJECT_FIELDS},
    range=Optional(nullable(record(SourceRange, **fields_of(SourceRange))), None),
)
_BATCH = record(
    lambda number, entries, checksum: StreamBatch(number, entries, int(checksum, 16)),
    number=COUNT,
    entries=COUNT,
    checksum=text("[0-9a-f]{16}"),
)
COMMON: dict[str, Any] = {
    "positions": POSITIONS,
    "archive": Optional(list_of(_ARCHIVED), ()),
    "batches": Optional(map_of(_BATCH), {}),
    "lost": Optional(list_of(_LOST), ()),
    "expired": EXPIRED,
}
"""The checks of the fields that records and checkpoints have."""
_RECORD = record(
    LogRecord,
    **fields_of(LogRecord),
    **COMMON,
    add=list_of(OBJECT),
    remove=list_of(text()),
    genesis=nullable(DESCRIPTOR),
)


def verified_trailer(stored: StoredObject, data: bytes | memoryview) -> Trailer:
    """Verify and return the trailer in the last bytes of an object. Raises `CorruptFile`, also for another file's."""
    trailer = parse_trailer(data, stored.name, stored.size_bytes)
    meta, tail = trailer.metadata, trailer.tail
    found = (meta.file_id, meta.count, meta.is_shard, meta.layout.hash, tail.position, tail.filter_length)
    is_shard = stored.shard is not None
    said = (stored.file_id, stored.count, is_shard, stored.hash, stored.trailer_position, stored.filter_length)
    CorruptFile.unless_equal(stored.name, "the object differs from its description in the log", said, found)
    # a copy: a view would keep all of `data`, which may be a summary of 16 MiB
    directory = Directory(trailer.directory.groups.copy(), trailer.directory.blocks.copy())
    return Trailer(tail, directory, meta)
