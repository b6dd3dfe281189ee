"""Records of the storage's log. SPEC.md section 9. Pure.

A record is one JSON document and a line ``#crc32 xxxxxxxx``. It adds objects and catalogs of segments, removes others,
and has the writer's epoch, the attempt's id and source positions. `state` has the result of all records.
"""

from __future__ import annotations

import hashlib
import re
from base64 import b64encode
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Annotated, Any, Literal, TypeVar

import msgspec
from msgspec import UNSET, Meta, Struct, UnsetType
from msgspec.structs import replace

from tiered_index.base.documents import (
    Count,
    Crc32,
    Digest,
    FileId,
    Length,
    Milliseconds,
    Place,
    Seconds,
    Size,
    decoded,
    encoded,
)
from tiered_index.base.kernels import crc32
from tiered_index.errors import CorruptFile, UnsupportedVersion
from tiered_index.format.keys.bloom import FILTER_BLOCK_BYTES
from tiered_index.format.keys.hashing import HashRule
from tiered_index.format.keys.spelling import split_name
from tiered_index.format.layout import MOST_ITEMS, Layout, SlotMap
from tiered_index.format.metadata import MOST_ENTRIES, Positions
from tiered_index.format.names import CATALOG_PREFIX, DATA_PREFIX, RANGES_PREFIX
from tiered_index.format.schema import Schema, read_schema
from tiered_index.format.segments.catalog import CatalogDirectory, decode_end, decode_group
from tiered_index.format.segments.ranges import MOST_RANGES, ranges_crc32
from tiered_index.format.segments.segment import DATA_PART as DATA_PART
from tiered_index.format.segments.segment import ArchivedSegment as ArchivedSegment
from tiered_index.format.segments.segment import Stored as Stored
from tiered_index.format.segments.segment import Text
from tiered_index.format.topic_documents import Documents, StoredDocuments, documents_in, stored_documents
from tiered_index.format.trailer import Directory, Trailer, parse_trailer
from tiered_index.service.log.expired import NOTHING, Expired, StoredExpired
from tiered_index.service.log.replaced import Range, RangeTable
from tiered_index.service.log.replaced import Replacement as Replacement
from tiered_index.types import LostFile, inclusive

LOG_VERSION = 10
_MARK = b"\n#crc32 "
T = TypeVar("T")
_PART = f"/{DATA_PART}"
DATA_NAME = re.compile(rf"\A{DATA_PREFIX[:-1]}({_PART}){{1,3}}\Z")
DataName = Annotated[str, Meta(pattern=DATA_NAME.pattern)]
CatalogName = Annotated[str, Meta(pattern=rf"\A{CATALOG_PREFIX[:-1]}{_PART}\Z")]
RangesName = Annotated[str, Meta(pattern=rf"\A{RANGES_PREFIX[:-1]}{_PART}\Z")]
Entries = Annotated[int, Meta(ge=1, le=MOST_ENTRIES)]
FilterLength = Annotated[Size, Meta(multiple_of=FILTER_BLOCK_BYTES)]


def digest_of(data: bytes) -> str:
    """Return the digest of a record's bytes: 32 hexadecimal digits of BLAKE2b."""
    return hashlib.blake2b(data, digest_size=16).hexdigest()


def max_positions(first: dict[str, int], second: dict[str, int]) -> dict[str, int]:
    """Return the greater position of each source. A source's position never decreases."""
    return first | {source: max(position, first.get(source, position)) for source, position in second.items()}


Origin = Literal["build", "writer"]
"""The origin of entries: jobs that built tables from a source, or live writers (files, streams)."""


QUARANTINE_S = 1 << 31
"""The length in seconds of a window for implausible times. No merge reads such a window.

It is the range of a time difference of 32 bits.
"""


class TableShard(Stored, frozen=True):
    """An object's part of a window table.

    - One record adds or removes all shards of a table, except for lost ones.
    - The window is [`begin_s`, `begin_s` + `window_s`) epoch seconds.
    - The shard has the slots [`slot_low`, `slot_high`) of `slots`. A slot that is too large for one object has several
      shards with the same range, each with entries of another time.
    - All entries of a table have one `origin`.
    """

    table: FileId
    begin_s: Seconds
    window_s: Length
    slots: SlotMap
    slot_low: Count
    slot_high: Count
    origin: Origin

    def __post_init__(self) -> None:
        if self.slot_low >= self.slot_high:
            raise ValueError(f"`slot_high` is {self.slot_high}, not more than {self.slot_low}")


class StoredObject(Stored, frozen=True):
    """An object that the log names. Seconds are inclusive.

    `shard` is its part of a window table; None: it is a file. `hash` is the hash rule of its keys.
    """

    name: DataName
    file_id: FileId
    lane: str
    sequence: Count
    second_min: Seconds
    second_max: Seconds
    count: Entries
    size_bytes: Size
    trailer_position: Size
    filter_length: FilterLength
    directory_length: Size
    metadata_length: Size
    published_ms: Milliseconds
    shard: TableShard | None = None
    hash: HashRule = "abs"
    generation: Count = 0
    """That of the replaced ranges of which it can have no entry, because a rewrite has left them out."""

    def __post_init__(self) -> None:
        _check_seconds(self.second_min, self.second_max)
        if self.directory_position > self.size_bytes or self.count > self.size_bytes * MOST_ITEMS:
            raise ValueError(f"`size_bytes` is {self.size_bytes}, too few for all its parts")

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
    def origin(self) -> Origin:
        """The origin of its entries. A file has the origin ``writer``."""
        return "writer" if self.shard is None else self.shard.origin

    @property
    def directory_position(self) -> int:
        """The byte position of the directory. Directory, metadata and tail are contiguous, to the end of the object."""
        return self.trailer_position + self.filter_length

    def items_bytes(self, schema: Schema) -> int:
        """Return an estimate of the bytes of the entries, never less than the true number."""
        return min(self.count * schema.item.itemsize, self.trailer_position)


RetiredPlaces = Mapping[str, Mapping[int, int]]
"""By store, the start of each retired segment that a catalog still lists, with the generation of its retirement."""
_Packed = Annotated[bytes, Meta(min_length=1, max_length=1 << 26)]


MOST_INLINE = 16
"""Most segments of a catalog that a record carries in itself."""


class StoredCatalog(Stored, frozen=True, dict=True):
    """A catalog of segments that the log names.

    `directory` is that at the end of the object, as it is there. A catalog of up to `MOST_INLINE` segments may be no
    object: then the log has its bytes, in `data`. The segments of such a catalog may lie between those of others.

    `generation` counts the records that retired segments: the catalog shows no segment of a place that was retired
    later. None: after the record that adds the catalog.
    """

    name: CatalogName
    size_bytes: Size
    published_ms: Milliseconds
    directory: _Packed | None = None
    data: _Packed | None = None
    generation: Count | None = None

    def __post_init__(self) -> None:
        if (self.directory is None) is (self.data is None):
            raise ValueError("a catalog has either `directory` or `data`")
        if self.data is not None and (self.size_bytes != len(self.data) or self.rows.count > MOST_INLINE):
            raise ValueError(f"`data` has {len(self.data)} bytes and {self.rows.count} segments")
        if self.rows.groups[-1].position + self.rows.groups[-1].length > self.size_bytes:
            raise ValueError(f"`size_bytes` is {self.size_bytes}, too few for all its groups")

    @cached_property
    def rows(self) -> CatalogDirectory:
        """The directory: logs and groups."""
        if self.data is not None:
            return decode_end(self.data, self.name)
        return CatalogDirectory.decode(self.directory or b"", self.name)

    @cached_property
    def places(self) -> frozenset[tuple[str, int]]:
        """Store and start of each segment of a catalog in a record."""
        assert self.data is not None
        logs, groups, places = self.rows.logs, self.rows.groups, set[tuple[str, int]]()
        for group in groups:
            rows = decode_group(self.data[group.position :][: group.length], group, logs, self.name)
            places |= {(logs[number].store, start) for number, start in rows.places}
        return frozenset(places)

    def has(self, store: str, offset: int) -> bool:
        """Return whether `offset` of a store is between the first and the last segment of the store."""
        number = self.rows.numbers.get(store)
        return number is not None and self.rows.logs[number].start <= offset < self.rows.logs[number].end

    def is_before(self, generation: int) -> bool:
        """Return whether segments that were retired in a generation are not shown."""
        return (self.generation or 0) < generation

    @property
    def object_bytes(self) -> int:
        """The bytes of the objects of all its segments."""
        return sum(log.object_bytes for log in self.rows.logs)

    def to_json(self) -> dict[str, Any]:
        """Return the fields as stored in a record."""
        return {
            name: b64encode(value).decode() if isinstance(value, bytes) else value
            for name, value in super().to_json().items()
        }


class RetiredSegment(Stored, frozen=True):
    """A segment that a record has replaced or given up. Catalogs of earlier generations still list it."""

    name: Text
    store: str
    start: Place

    @property
    def place(self) -> tuple[str, int]:
        """Store and start offset, which identify the segment."""
        return self.store, self.start


class StoredRanges(Stored, frozen=True):
    """An object with the `count` retired ranges of `store` after a record. `crc32` is that of the table."""

    name: RangesName
    store: str
    count: Annotated[int, Meta(ge=1, le=MOST_RANGES)]
    crc32: Crc32
    size_bytes: Size
    published_ms: Milliseconds

    def check(self, file: str, table: RangeTable) -> None:
        """Raise `CorruptFile`, naming `file`, unless it has the ranges of `table`."""
        stated, present = (self.count, self.crc32), (len(table), ranges_crc32(table.rows))
        problem = f"{self.name} has other replaced ranges of {self.store} than the log"
        CorruptFile.unless_equal(file, problem, stated, present)


class StreamBatch(Struct, frozen=True):
    """A stream's last published batch. `checksum` (u64) is a sum over its entries, in any order and tables."""

    number: int
    entries: int
    checksum: int

    def to_json(self) -> dict[str, Any]:
        """Return the fields as stored in a record."""
        return {"number": self.number, "entries": self.entries, "checksum": f"{self.checksum:016x}"}


RangeKind = Literal["corrupt", "missing", "rewritten", "catalog", "unread", "away"]
_REASONS: dict[RangeKind, str] = {
    "corrupt": "are damaged, and were skipped",
    "missing": "were deleted before they were read, and were skipped",
    "rewritten": "were cut off or rewritten after they were read",
    "catalog": "have segments that only a lost catalog listed",
    "unread": "are not read yet",
    "away": "can't be read as long as their files are away",
}
_NO_MORE = "can't be read any more for"
_REASONS_OF_KEY: dict[RangeKind, str] = {
    "unread": "are not read yet for",
    "away": "are of files that were gone or had changed, and are not read yet for",
}


class LostRange(Stored, frozen=True):
    """Positions [`begin`, `end`) of a followed source that were skipped, or rewritten after they were read.

    - `messages`: the least number of messages there; None: not known.
    - `topic`: the only topic that has messages there; None: any topic.
    - `catalog`: of kind ``catalog`` the lost catalog. Then `source` is a store. The catalog had its segments there.
    - `key`: the only rule whose keys the messages lack. None: they have no keys.

    Of kind ``unread`` they are read later, and of kind ``away`` when their files are back. Both are in no record:
    positions say them (`topic_keys.py`).
    """

    source: str
    kind: RangeKind
    begin: Place
    end: Place
    messages: Count | None = None
    topic: str | None = None
    catalog: CatalogName | None = None
    key: str | None = None

    def __post_init__(self) -> None:
        if (self.kind == "catalog") is (self.catalog is None):
            raise ValueError("a range of a lost catalog does not name it, or another range does")

    @property
    def reason(self) -> str:
        """The reason why messages of the range may be missing."""
        if self.catalog is not None:
            return (
                f"{self.catalog}, which listed segments of {self.source} with offsets "
                f"{inclusive(self.begin, self.end)}, was lost, and a record gave it up"
            )
        count = "" if self.messages is None else f" (at least {self.messages:,} messages)"
        why = _REASONS[self.kind]
        if self.key is not None:
            why = f"{_REASONS_OF_KEY.get(self.kind, _NO_MORE)} --key {self.key}"
        return f"offsets {inclusive(self.begin, self.end)}{count} {why}"

    def has_key(self, key: str) -> bool:
        """Return whether messages of the range may lack a key: any key, unless the rule gives its keys a name."""
        name = "" if self.key is None else split_name(self.key)[0]
        return key.startswith(name)

    def lost(self, begin_ms: int, end_ms: int) -> LostObject:
        """Return the lost object of the range, whose messages have times in [`begin_ms`, `end_ms`], epoch ms."""
        identity = f"{self.source}\0{self.topic}\0{self.kind}\0{self.begin}\0{self.end}"
        identity += f"\0{self.catalog}" if self.catalog is not None else ""
        identity += f"\0\0{self.key}" if self.key is not None else ""
        digest = hashlib.blake2b(identity.encode(), digest_size=12)
        file_id = f"{self.kind}-{digest.hexdigest()}"
        second_min, second_max = sorted((begin_ms // 1000, end_ms // 1000))
        name = f"{DATA_PREFIX}{file_id}/skipped"
        return LostObject(name, file_id, second_min, second_max, max(self.messages or 1, 1), range=self)


class LostObject(Stored, frozen=True):
    """A lost object that a record gave up. Answers lack its entries permanently. Seconds are inclusive.

    `range` is set if it never was an object, but a range of a source.
    """

    name: DataName
    file_id: FileId
    second_min: Seconds
    second_max: Seconds
    count: Entries
    shard: TableShard | None = None
    hash: HashRule = "abs"
    range: LostRange | None = None

    def __post_init__(self) -> None:
        _check_seconds(self.second_min, self.second_max)

    @classmethod
    def of(cls, stored: StoredObject) -> LostObject:
        """Return the lost object of a stored object."""
        return cls(**{name: getattr(stored, name) for name in cls.__struct_fields__ if name != "range"})

    @classmethod
    def of_catalog(cls, stored: StoredCatalog, retired: RetiredPlaces, expired: Mapping[str, int]) -> list[LostObject]:
        """Return the lost ranges of a catalog, one for each log. `count` is about the number of its segments.

        Segments that are `retired` are not lost with it, and no log that has expired (the offset of each store).
        """
        lost = []
        for log in stored.rows.logs:
            if log.end > expired.get(log.store, 0):
                gone = [start for start, after in retired.get(log.store, {}).items() if stored.is_before(after)]
                left = log.count - sum(log.start <= start < log.end for start in gone)
                lacking = LostRange(log.store, "catalog", log.start, log.end, catalog=stored.name)
                # a retired segment may have been in another catalog, between those of this one
                lost.append(replace(lacking.lost(log.first_ms, log.last_ms), count=max(left, 1)))
        return lost

    @property
    def is_of_catalog(self) -> bool:
        """Whether it is a range of a catalog that was given up: its segments are lost, not entries."""
        return self.range is not None and self.range.kind == "catalog"

    @property
    def lacks_entries(self) -> bool:
        """Whether answers lack entries: false for rewritten messages and lost catalogs, whose entries the index has."""
        return self.range is None or self.range.kind not in ("rewritten", "catalog")

    def joined(self, later: LostObject) -> LostObject:
        """Return one lost object, of this name, for two ranges of one source."""
        assert self.range is not None and later.range is not None
        mine, theirs = self.range, later.range
        counts = [count for count in (mine.messages, theirs.messages) if count is not None]
        begin, end = min(mine.begin, theirs.begin), max(mine.end, theirs.end)
        both = replace(mine, begin=begin, end=end, messages=sum(counts) if counts else None)
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

    def lost_file(self, source: str | None = None) -> LostFile:
        """Return the lost file as answers report it."""
        begin_ms, end_ms = self.second_min * 1000, self.second_max * 1000
        file, reason = (self.file, None) if self.range is None else (self.range.source, self.range.reason)
        return LostFile(file=file, begin_ms=begin_ms, end_ms=end_ms, entries=self.count, source=source, reason=reason)

    def concerns(
        self, second_min: int, second_max: int, *hashes: int, topic: str | None = None, key: str | None = None
    ) -> bool:
        """Return whether it may have had answers in an inclusive range of seconds.

        `hashes` are the hashes of a key by the rules ``abs`` and ``mask``; without them any key counts. `topic` and
        `key` are those of the lookup (None: any).
        """
        if self.second_min > second_max or self.second_max < second_min or not self.lacks_entries:
            return False
        if self.range is not None and topic is not None and self.range.topic not in (None, topic):
            return False
        if self.range is not None and key is not None and not self.range.has_key(key):
            return False
        shard = self.shard
        if shard is None or not hashes:
            return True
        mine = {"abs": hashes[:1], "mask": hashes[1:], "both": hashes}[self.hash]
        return any(shard.slot_low <= shard.slots.slot_of(key_hash) < shard.slot_high for key_hash in mine)


class IndexDescriptor(Stored, frozen=True):
    """The content of record 1, which never changes: the id of the index and the layout of its files."""

    index_id: FileId
    layout: Layout
    offset_space: str


@dataclass(frozen=True)
class LogRecord:
    """One record. Readers ignore its `kind` (``create``, ``publish``, ``expire``, ``erase`` ...)."""

    number: int
    kind: str
    epoch: int
    attempt: str
    created_ms: int
    add: tuple[StoredObject, ...] = ()
    remove: tuple[str, ...] = ()
    positions: dict[str, int] = field(default_factory=dict)
    documents: Documents = field(default_factory=dict)
    """The new revisions of topics' documents."""
    genesis: IndexDescriptor | None = None
    batches: dict[str, StreamBatch] = field(default_factory=dict)
    lost: tuple[LostObject, ...] = ()
    expired: Expired = NOTHING
    left_out: int = 0
    """Number of entries that a merge left out, because they had expired or were erased."""
    previous: str = ""
    """The digest of the record before this one; empty in record 1."""
    root: str = ""
    """The id of the root whose writer wrote this record; empty: a job."""
    copied: str = ""
    """Only of a copy's record: the digest of the source's record up to which the copy has everything."""
    put_before_ms: int = 0
    """No entry that was put before this time, by the writer's or job's clock, waits for a later record; 0: not said."""
    catalogs: tuple[StoredCatalog, ...] = ()
    retire: tuple[RetiredSegment, ...] = ()
    """Segments that catalogs list, and that are replaced or given up."""
    retired: RetiredPlaces = field(default_factory=dict)
    """Of a copy's record, the retired segments of all records so far."""
    replaced: tuple[Replacement, ...] = ()
    """The new readings of files that this record announces."""
    expiry_ms: int = 0
    """Only of an expiry's record: its present time, epoch milliseconds."""
    dropped: Mapping[str, tuple[Range, ...]] = field(default_factory=dict)
    """The retired ranges, by store, of which no file can have an entry any more."""
    ranges: tuple[StoredRanges, ...] = ()
    """Objects with all retired ranges of stores after this record; in the record of a copy, all such objects."""
    range_tables: Mapping[str, RangeTable] = field(default_factory=dict, compare=False)
    """Of a copy's record, the tables of `ranges`, by store."""
    digest: str = field(default="", compare=False)
    """The digest of this record's bytes; empty before it is encoded."""

    def encode(self) -> bytes:
        """Return the record's bytes."""
        return encode_document(
            {
                "version": LOG_VERSION,
                "kind": self.kind,
                "number": self.number,
                "epoch": self.epoch,
                "attempt": self.attempt,
                "created_ms": self.created_ms,
                "previous": self.previous,
                "add": [o.to_json() for o in self.add],
                "remove": list(self.remove),
                "positions": self.positions,
                "genesis": self.genesis.to_json() if self.genesis else None,
                **optional_members(self.batches, self.lost, self.catalogs, self.ranges),
                **documents_member(self.documents),
                **retired_member(self.retired),
                **expired_member(self.expired, self.range_tables),
                **({"retire": [segment.to_json() for segment in self.retire]} if self.retire else {}),
                **({"replaced": [replaced.to_json() for replaced in self.replaced]} if self.replaced else {}),
                **({"dropped": self.dropped} if self.dropped else {}),
                **({"left_out": self.left_out} if self.left_out else {}),
                **({"put_before_ms": self.put_before_ms} if self.put_before_ms else {}),
                **({"expiry_ms": self.expiry_ms} if self.expiry_ms else {}),
                **({"root": self.root} if self.root else {}),
                **({"copied": self.copied} if self.copied else {}),
            }
        )

    @classmethod
    def decode(cls, data: bytes, file: str) -> LogRecord:
        """Return the record in `data`. Raises `CorruptFile` or `UnsupportedVersion`."""
        stored = decode_document(data, file, _StoredRecord, "log record", LOG_VERSION)
        return cls(**stored.members(), digest=digest_of(data))


def optional_members(
    batches: dict[str, StreamBatch],
    lost: Iterable[LostObject],
    catalogs: Iterable[StoredCatalog],
    ranges: Iterable[StoredRanges],
) -> dict[str, Any]:
    """Return the fields that records and checkpoints have only if they are not empty."""
    streams = {stream: batch.to_json() for stream, batch in batches.items()}
    losses = [lost_object.to_json() for lost_object in lost]
    members: dict[str, Any] = {"batches": streams, "lost": losses}
    groups: dict[str, Iterable[Stored]] = {"catalogs": catalogs, "ranges": ranges}
    members |= {name: [part.to_json() for part in group] for name, group in groups.items()}
    return {name: member for name, member in members.items() if member}


def documents_member(documents: Documents) -> dict[str, Any]:
    """Return the field `documents` unless it is empty."""
    return {"documents": stored_documents(documents)} if documents else {}


def retired_member(retired: RetiredPlaces) -> dict[str, Any]:
    """Return the field `retired` unless it is empty: for each store the starts and their generations."""
    return {"retired": {store: [list(of), list(of.values())] for store, of in retired.items()}} if retired else {}


def expired_member(expired: Expired, tables: Mapping[str, RangeTable]) -> dict[str, Any]:
    """Return the field `expired` unless it is empty, without the ranges of `tables`, which are in objects."""
    return {"expired": expired.to_json(tables)} if expired != NOTHING else {}


def encode_document(document: dict[str, Any]) -> bytes:
    """Return the bytes of a JSON document, which has its version, and its CRC32."""
    body = encoded(document)
    return body + _MARK + f"{crc32(body):08x}\n".encode()


def decode_document(data: bytes, file: str, kind: type[T], what: str, version: int) -> T:
    """Return the document in `data` as its type `kind`, after a check of CRC32 and version.

    Raises `CorruptFile` and `UnsupportedVersion`.
    """
    body, mark, tail = data.rpartition(_MARK)
    expected = f"{crc32(body):08x}\n".encode()
    if not mark or tail != expected:
        raise CorruptFile(file, "does not match its CRC32", offset=len(body), expected=expected, found=tail[:16])
    stated = decoded(body, _Version, file, "the text before its CRC32").version
    UnsupportedVersion.unless_read(file, what, version, stated)
    return decoded(body, kind, file, what, hook=read_schema)


class _Version(Struct):
    version: int


def check_slots(stored: StoredObject, descriptor: IndexDescriptor | None, file: str) -> None:
    """Raise `CorruptFile` for a shard whose base slots differ from the index's: no lookup would find its entries."""
    base = descriptor.layout.slots if descriptor is not None else 0
    if stored.shard is not None:
        problem = f"{stored.name} has other base slots than the index"
        CorruptFile.unless_equal(file, problem, base, stored.shard.slots.base)


def _check_seconds(second_min: int, second_max: int) -> None:
    if second_min > second_max:
        raise ValueError(f"`second_max` is {second_max}, before {second_min}")


def latest_ms(added: Iterable[StoredObject]) -> int:
    """Return the last time at which the sending of one of the objects began, epoch ms; 0: there are none."""
    return max((stored.published_ms for stored in added), default=0)


class _StoredBatch(Struct):
    number: Count
    entries: Count
    checksum: Annotated[str, Meta(pattern=r"\A[0-9a-f]{16}\Z")]


class Common(Struct, kw_only=True):
    """The stored fields that records and checkpoints have."""

    positions: Positions
    documents: StoredDocuments = ()
    catalogs: tuple[StoredCatalog, ...] = ()
    retired: dict[str, tuple[tuple[Place, ...], tuple[Count, ...]]] = msgspec.field(default_factory=dict)
    batches: dict[str, _StoredBatch] = msgspec.field(default_factory=dict)
    lost: tuple[LostObject, ...] = ()
    expired: StoredExpired | UnsetType = UNSET
    ranges: tuple[StoredRanges, ...] = ()

    def members(self) -> dict[str, Any]:
        """Return all fields by name."""
        members = {name: getattr(self, name) for name in self.__struct_fields__}
        stored = self.batches.items()
        members["batches"] = {
            name: StreamBatch(batch.number, batch.entries, int(batch.checksum, 16)) for name, batch in stored
        }
        members["documents"] = documents_in(self.documents)
        members["expired"] = self.expired.read() if self.expired else NOTHING
        members["retired"] = {store: dict(zip(*of, strict=True)) for store, of in self.retired.items()}
        return members


class _StoredRecord(Common, kw_only=True):
    number: Count
    kind: str
    epoch: Count
    attempt: str
    created_ms: Milliseconds
    add: tuple[StoredObject, ...]
    remove: tuple[str, ...]
    genesis: IndexDescriptor | None
    retire: tuple[RetiredSegment, ...] = ()
    replaced: tuple[Replacement, ...] = ()
    dropped: dict[str, tuple[tuple[Place, Place], ...]] = msgspec.field(default_factory=dict)
    left_out: Count = 0
    previous: Annotated[str, Meta(pattern=r"\A([0-9a-f]{32})?\Z")]
    root: str = ""
    copied: Digest = ""
    put_before_ms: Milliseconds = 0
    expiry_ms: Milliseconds = 0


def verified_trailer(stored: StoredObject, data: bytes | memoryview) -> Trailer:
    """Verify and return the trailer in the last bytes of an object. Raises `CorruptFile`, also for another file's."""
    trailer = parse_trailer(data, stored.name, stored.size_bytes)
    meta, tail = trailer.metadata, trailer.tail
    stated = (meta.file_id, meta.count, meta.is_shard, meta.layout.hash, tail.position, tail.filter_length)
    is_shard = stored.shard is not None
    said = (stored.file_id, stored.count, is_shard, stored.hash, stored.trailer_position, stored.filter_length)
    CorruptFile.unless_equal(stored.name, "the object differs from its description in the log", said, stated)
    # a copy: a view would keep all of `data`
    directory = Directory(trailer.directory.groups.copy(), trailer.directory.blocks.copy())
    return Trailer(tail, directory, meta)
