"""The metadata of a compacted file or shard: geometry, schema, order, topics, positions. SPEC.md section 6."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property, lru_cache
from operator import attrgetter
from typing import Annotated, Any

import numpy as np
import numpy.typing as npt
from msgspec import UNSET, Meta, Struct, UnsetType, field

from tiered_index.base.documents import (
    Count,
    Crc32,
    FileId,
    Int32,
    Length,
    Milliseconds,
    Seconds,
    checks,
    encoded,
    parsed,
    reader_of,
)
from tiered_index.errors import UnsupportedVersion
from tiered_index.format.layout import Layout, SlotMap
from tiered_index.format.packed import Packing, StoredOptions, is_packed, read_options
from tiered_index.format.schema import read_schema
from tiered_index.format.topic_documents import Documents, StoredDocuments, documents_in

Array = npt.NDArray[Any]

Positions = dict[str, Count]
"""The durable position of each source."""
Predecessor = tuple[FileId, Annotated[int, Meta(ge=0, le=2**31)]]
"""The file before one in its lane (the sequence of files of one appender), and its number of durable entries."""
Topics = tuple[tuple[Int32, str], ...]
"""The ids and names of topics, each id once."""
MOST_ENTRIES = 2**36
_DEPTH = 32
_Slot = Annotated[int, Meta(ge=0, le=2**60)]


def check_ids(topics: Topics) -> None:
    """Raise `ValueError` if two topics have one id."""
    if len(dict(topics)) != len(topics):
        raise ValueError("Two of `topics` have the same id")


class Metadata(Struct, frozen=True, dict=True):
    """The metadata of a compacted file, stored as JSON.

    - `second_min` and `second_max` are the true interval of the entries (inclusive, epoch seconds).
    - `begin_ms` and `end_ms` are those of the header.
    - `topics` are the (id, name) pairs of the file: a name for each id of its entries.
    - `slot_base` and the half-open `slot_range` say which slots a shard holds. A whole file holds all.
    - `lane` is ``main`` or ``quarantine``.
    - `more` has the other fields of the document.
    """

    file_id: FileId
    layout: Layout
    count: Annotated[int, Meta(ge=1, le=MOST_ENTRIES)]
    begin_ms: Milliseconds
    end_ms: Milliseconds
    second_min: Seconds
    second_max: Seconds
    slots_in_use: _Slot
    header_crc32: Crc32
    slots_crc32: Crc32
    topics: Topics
    source_positions: Positions
    lane: str
    offset_space: str
    slot_base: _Slot
    slot_range: tuple[_Slot, _Slot]
    writer: str
    more: dict[str, Any] = field(default_factory=dict)

    @cached_property
    def topic_names(self) -> frozenset[str]:
        """The names of `topics`."""
        return frozenset(name for _, name in self.topics)

    @cached_property
    def ids_by_topic(self) -> dict[str, frozenset[int]]:
        """The ids of each topic, by name."""
        ids = {name: _only(topic_id) for topic_id, name in self.topics}
        if len(ids) == len(self.topics):
            return ids
        several: dict[str, list[int]] = {}
        for topic_id, name in self.topics:
            several.setdefault(name, []).append(topic_id)
        return {name: frozenset(of_name) for name, of_name in several.items()}

    def stats_by_topic(self) -> NamedStats:
        """Return the name and the stats of each topic."""
        names = dict(self.topics)
        return [(names[row[0]], TopicStats(*row)) for row in self.more["topic_stats"]]

    @cached_property
    def documents(self) -> Documents:
        """The documents of topics that its writer knew. A shard has none: the log has them."""
        return documents_in(reader_of(StoredDocuments)(self.more.get("documents", ())))

    @cached_property
    def slot_map(self) -> SlotMap:
        """The map of hashes to slots. A shard stores it; in a whole file the slot is the hash modulo the slots."""
        return reader_of(SlotMap)(self.more["slot_map"]) if self.is_shard else SlotMap(self.layout.slots)

    @cached_property
    def packing(self) -> Packing | None:
        """The packing of the runs; None: they are plain (see `is_packed`)."""
        if "packed" not in self.more:
            return None
        return Packing(self.layout.schema, self.slot_map.base, read_options(self.more["packed"]))

    def items_of(self, data: bytes | memoryview, count: int, file: str) -> Array:
        """Return the `count` items (structured) of a run's verified bytes. Raises `CorruptFile`."""
        if self.packing is None:
            return np.frombuffer(data, self.layout.schema.item)
        return self.packing.unpack([data], np.array([count]), file)[0]

    @property
    def is_shard(self) -> bool:
        """Whether this describes a shard of a window table, which has no slot table."""
        return "slot_map" in self.more

    @property
    def order(self) -> str:
        """The order of entries within a slot, as stored. Shards are always in answer order."""
        return "newest_first" if self.layout.preset.newest_first and not self.is_shard else "answer"

    @cached_property
    def in_answer_order(self) -> bool:
        """Whether entries of a hash are in answer order, so that a lookup may stop early."""
        return self.order == "answer"

    def encode(self) -> bytes:
        """Return the metadata's bytes (JSON)."""
        stored = {name: getattr(self, name) for name in _MEMBERS}
        document = {**stored, "layout": self.layout.to_json(), "order": self.order, **self.more}
        return encoded(document, is_sorted=True)

    @classmethod
    def decode(cls, data: bytes | memoryview, file: str) -> Metadata:
        """Return the metadata in `data`, which has passed its CRC. Unknown fields are kept in `more`.

        Raises `CorruptFile` for fields of the wrong type or range and for fields that contradict each other. Raises
        `UnsupportedVersion` for an unknown order, and for plain runs of a file or shard that is packed.
        """
        document = parsed(data, file, "metadata")
        with checks(file, "metadata"):
            metadata, order = _metadata(document)
        if order != metadata.order:
            problem = f"unknown order {order[:40]!r} within slots"
            raise UnsupportedVersion(file, problem, expected=metadata.order, found=order[:40])
        if "packed" not in metadata.more and is_packed(metadata.layout.preset, is_shard=metadata.is_shard):
            problem = f"plain runs of preset {metadata.layout.preset.name}, and this program reads packed ones"
            raise UnsupportedVersion(file, f"{problem}: written by a development version: build the index again")
        return metadata

    def end_of_items(self) -> int | None:
        """Return the byte position of the end of the arrays, by geometry and count; None if they are packed."""
        return self.layout.compacted_size(self.count) if self.packing is None else None


@dataclass(frozen=True, slots=True)
class TopicStats:
    """The entries of one topic id: their number, their messages' bytes, first and last epoch second (inclusive)."""

    topic_id: int
    entries: int
    bytes: int
    second_min: int
    second_max: int


@lru_cache(1 << 16)
def _only(topic_id: int) -> frozenset[int]:
    """Return the set of one id. Many files have the same topics: they share these sets."""
    return frozenset((topic_id,))


NamedStats = list[tuple[str, TopicStats]]


def topic_stats(topic_ids: Array, sizes: Array, seconds: Array) -> list[TopicStats]:
    """Return the stats of each topic id in columns (integers in any byte order, n each), sorted by id."""
    columns = [np.asarray(column, column.dtype.newbyteorder("=")) for column in (topic_ids, sizes, seconds)]
    ids, sizes, seconds = columns
    if len(ids) and ids.min() == ids.max():
        # a quarter of the time of groups
        total = int(sizes.sum(dtype=np.int64))
        return [TopicStats(int(ids[0]), len(ids), total, int(seconds.min()), int(seconds.max()))]
    # Imported on use: a lookup of one key needs no Arrow
    import pyarrow as pa

    table = pa.table(columns, names=["id", "size", "second"])
    grouped = table.group_by("id", use_threads=False).aggregate(
        [("size", "count"), ("size", "sum"), ("second", "min"), ("second", "max")]
    )
    names = ("id", "size_count", "size_sum", "second_min", "second_max")
    return sorted(map(TopicStats, *(grouped[name].to_pylist() for name in names)), key=attrgetter("topic_id"))


def add_topic_stats(stats: Iterable[TopicStats]) -> list[TopicStats]:
    """Return the stats added up by topic id, sorted by id."""
    sums: dict[int, TopicStats] = {}
    for topic in stats:
        other = sums.get(topic.topic_id)
        sums[topic.topic_id] = (
            topic
            if other is None
            else TopicStats(
                topic.topic_id,
                topic.entries + other.entries,
                topic.bytes + other.bytes,
                min(topic.second_min, other.second_min),
                max(topic.second_max, other.second_max),
            )
        )
    return [sums[topic_id] for topic_id in sorted(sums)]


_MEMBERS = Metadata.__struct_fields__[:-1]


class _Known(Struct, kw_only=True):
    """The order of entries, and the fields of `more` that this version knows. Of others only the depth is checked."""

    order: str
    sequence: Count = 0
    predecessor: Predecessor | None = None
    created_ms: Milliseconds = 0
    log_number: Count = 0
    table: FileId = ""
    window_s: Length = 0
    checksum: Annotated[str, Meta(pattern=r"\A[0-9a-f]{1,16}\Z")] = ""
    slot_map: SlotMap | UnsetType = UNSET
    topic_stats: tuple[tuple[Int32, Count, Annotated[int, Meta(ge=-(2**62), le=2**62)], Seconds, Seconds], ...]
    packed: StoredOptions | UnsetType = UNSET
    documents: StoredDocuments = ()


def _metadata(document: Any) -> tuple[Metadata, str]:
    """Check a metadata document; return the metadata and the order that it declares."""
    order: str = reader_of(_Known)(document).order
    more = {name: value for name, value in document.items() if name not in _MEMBERS and name != "order"}
    # the rows of `topic_stats` are checked, and are many
    if any(_is_deep(value, _DEPTH) for name, value in more.items() if name != "topic_stats"):
        raise ValueError(f"The document is nested more than {_DEPTH} times")
    metadata: Metadata = reader_of(Metadata, read_schema)({**document, "more": more})
    check_ids(metadata.topics)
    if nameless := {row[0] for row in more["topic_stats"]} - {topic_id for topic_id, _ in metadata.topics}:
        raise ValueError(f"`topics` has no name for topic id {min(nameless)}")
    if not more["topic_stats"]:
        raise ValueError("`topic_stats` is empty, and the file has entries")
    slots, (low, high), is_shard = metadata.slot_map, metadata.slot_range, metadata.is_shard
    most = slots.slots if is_shard else metadata.slot_base
    if not low < high <= most or not (is_shard or high - low == slots.slots):
        raise ValueError(f"`slot_range` is {[low, high]}, not a range of {most} slots")
    if slots.base != metadata.layout.slots or (is_shard and metadata.slot_base != slots.base):
        raise ValueError(f"`slot_base` is {metadata.slot_base}, not {metadata.layout.slots}")
    if not is_shard and metadata.count > metadata.layout.capacity:
        raise ValueError(f"`count` is {metadata.count}, more than {metadata.layout.capacity}")
    if "packed" in more and not is_packed(metadata.layout.preset, is_shard=is_shard):
        raise ValueError(f"A file of preset {metadata.layout.preset.name} has packed items")
    if metadata.second_min > metadata.second_max:
        raise ValueError("`second_max` is before `second_min`")
    return metadata, order


def _is_deep(value: Any, depth: int) -> bool:
    """Return whether a value is nested more than `depth` times, so that it may be impossible to encode again."""
    members = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    return bool(members) and (not depth or any(_is_deep(member, depth - 1) for member in members))
