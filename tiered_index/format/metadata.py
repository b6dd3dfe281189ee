"""The metadata of a compacted file or shard: geometry, schema, order, topics, positions. SPEC.md section 6."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, fields
from functools import cached_property, lru_cache
from operator import attrgetter
from typing import Any

import numpy as np
import numpy.typing as npt

from tiered_index.documents import (
    COUNT,
    CRC32,
    MILLISECONDS,
    SECONDS,
    Check,
    Malformed,
    Optional,
    checked,
    integer,
    load,
    map_of,
    nullable,
    record,
    rows_of,
    shallow,
    text,
    tuple_of,
)
from tiered_index.errors import UnsupportedVersion
from tiered_index.format.layout import HEADER_SIZE, Layout
from tiered_index.format.packed import TOPIC_ID, Packing, read_options
from tiered_index.format.slots import SlotMap

Array = npt.NDArray[Any]

# A file's id, which is part of paths and of objects' names.
FILE_ID = text(r"[0-9A-Za-z_-]{1,64}")
# Durable position of each source
POSITIONS = map_of(COUNT)
# The file before this one in its lane (the sequence of files of one appender), and its number of durable entries
PREDECESSOR = tuple_of(FILE_ID, integer(0, 2**31))


def topic_table(value: Any) -> tuple[tuple[int, str], ...]:
    """Check a topic table: pairs (id, name), each id once."""
    pairs = _PAIRS(value)
    if len({topic_id for topic_id, _ in pairs}) != len(pairs):
        raise Malformed("a list of ids that differ, with their names", value)
    return pairs


_PAIRS = rows_of(TOPIC_ID, text())


@dataclass(frozen=True)
class Metadata:
    """The metadata of a compacted file, stored as JSON.

    - `second_min` and `second_max` are the true interval of the entries (inclusive, epoch seconds).
    - `begin_ms` and `end_ms` are those of the header.
    - `topics` are the (id, name) pairs of the file.
    - `slot_base` and the half-open `slot_range` say which slots a shard holds. A whole file holds all.
    - `lane` is ``main`` or ``quarantine``.
    - `more` has the other fields of the document.
    """

    file_id: str
    layout: Layout
    count: int
    begin_ms: int
    end_ms: int
    second_min: int
    second_max: int
    slots_in_use: int
    header_crc32: int
    slots_crc32: int
    topics: tuple[tuple[int, str], ...]
    source_positions: dict[str, int]
    lane: str
    offset_space: str
    slot_base: int
    slot_range: tuple[int, int]
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
        """Return the name and the stats of each topic; stats are None if the file has none."""
        names = dict(self.topics)
        if "topic_stats" not in self.more:
            return [(name, None) for name in names.values()]
        return named_stats([TopicStats(*row) for row in self.more["topic_stats"]], names)

    @cached_property
    def slot_map(self) -> SlotMap:
        """The map of hashes to slots. A shard stores it; in a whole file the slot is the hash modulo the slots."""
        return SlotMap.from_json(self.more["slot_map"]) if self.is_shard else SlotMap(self.layout.slots)

    @cached_property
    def packing(self) -> Packing | None:
        """The packing of the runs; None: they are plain."""
        if "packed" not in self.more:
            return None
        return Packing(self.layout.schema, self.slot_map.base, read_options(self.more["packed"]))

    def items_of(self, data: bytes | memoryview, count: int, file: str) -> Array:
        """Return the `count` items (structured) of a run's verified bytes. Raises `CorruptFile`."""
        if self.packing is None:
            return np.frombuffer(data, self.layout.schema.item)
        return self.packing.unpack([data], np.array([count]), file)[0]

    @property
    def version(self) -> int:
        """The format version that a reader must know."""
        if "packed" not in self.more:
            return self.layout.version
        if isinstance(packed := self.more["packed"], dict) and packed.get("topics"):
            return 5
        return 3 if self.is_shard else 4

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
        """Return the metadata's bytes (UTF-8 JSON; lone surrogates stay as escapes)."""
        stored = {each.name: getattr(self, each.name) for each in fields(self) if each.name != "more"}
        document = {**stored, "layout": self.layout.to_json(), "order": self.order, **self.more}
        return json.dumps(document, separators=(",", ":"), sort_keys=True).encode()

    @classmethod
    def decode(cls, data: bytes | memoryview, file: str) -> Metadata:
        """Return the metadata in `data`, which has passed its CRC. Unknown fields are kept in `more`.

        Raises `CorruptFile` for fields of the wrong type or range and for fields that contradict each other. Raises
        `UnsupportedVersion` for an unknown order.
        """
        metadata, order = checked(_metadata, load(data, file, "metadata"), file, "metadata")
        if order != metadata.order:
            problem = f"unknown order {order[:40]!r} within slots"
            raise UnsupportedVersion(file, problem, expected=metadata.order, found=order[:40])
        return metadata

    def end_of_items(self) -> int | None:
        """Return the byte position of the end of the arrays, by geometry and count; None if they are packed."""
        if self.packing is not None:
            return None
        size = self.layout.schema.item.itemsize
        return HEADER_SIZE + size * self.count if self.is_shard else self.layout.compacted_size(self.count)


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


NamedStats = list[tuple[str, TopicStats | None]]


def named_stats(stats: Iterable[TopicStats], names: Mapping[int, str]) -> NamedStats:
    """Return each topic's name with its stats. An id without a name gets a name such as ``#17``."""
    return [(names.get(one.topic_id, f"#{one.topic_id}"), one) for one in stats]


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
    for one in stats:
        other = sums.get(one.topic_id)
        sums[one.topic_id] = (
            one
            if other is None
            else TopicStats(
                one.topic_id,
                one.entries + other.entries,
                one.bytes + other.bytes,
                min(one.second_min, other.second_min),
                max(one.second_max, other.second_max),
            )
        )
    return [sums[topic_id] for topic_id in sorted(sums)]


def _metadata(document: Any) -> tuple[Metadata, str]:
    """Check a metadata document; return the metadata and the order that it declares."""
    values = _FIELDS(document)
    _MORE(document)
    more = {name: value for name, value in document.items() if name not in values}
    for name in more.keys() - {"topic_stats"}:  # its rows are checked, and are many
        shallow(more[name])
    order = values.pop("order")
    metadata = Metadata(**values, more=more)
    slots, (low, high), is_shard = metadata.slot_map, metadata.slot_range, metadata.is_shard
    most = slots.slots if is_shard else metadata.slot_base
    if not low < high <= most or not (is_shard or high - low == slots.slots):
        raise Malformed(f"a range of {most} slots", [low, high], ".slot_range")
    if slots.base != metadata.layout.slots or (is_shard and metadata.slot_base != slots.base):
        raise Malformed(f"{metadata.layout.slots} base slots", metadata.slot_base, ".slot_base")
    if not is_shard and metadata.count > metadata.layout.capacity:
        raise Malformed(f"{metadata.layout.capacity} entries at most", metadata.count, ".count")
    if "packed" in more and metadata.order != "answer":
        raise Malformed("no packed items in a file of preset rocketmq", more["packed"], ".packed")
    if metadata.second_min > metadata.second_max:
        raise Malformed(f"a second from {metadata.second_min} on", metadata.second_max, ".second_max")
    return metadata, order


_SLOT = integer(0, 2**60)
_FIELDS: Check[dict[str, Any]] = record(
    dict,
    file_id=FILE_ID,
    layout=Layout.from_json,
    count=integer(1, 2**36),
    begin_ms=MILLISECONDS,
    end_ms=MILLISECONDS,
    second_min=SECONDS,
    second_max=SECONDS,
    slots_in_use=_SLOT,
    header_crc32=CRC32,
    slots_crc32=CRC32,
    order=text(),
    topics=topic_table,
    source_positions=POSITIONS,
    lane=text(),
    offset_space=text(),
    slot_base=_SLOT,
    slot_range=tuple_of(_SLOT, _SLOT),
    writer=text(),
)
# Fields of `more` that this version knows; of others only the depth is checked
_MORE: Check[dict[str, Any]] = record(
    dict,
    sequence=Optional(COUNT, 0),
    predecessor=Optional(nullable(PREDECESSOR), None),
    created_ms=Optional(MILLISECONDS, 0),
    log_number=Optional(COUNT, 0),
    table=Optional(FILE_ID, ""),
    window_s=Optional(integer(1, 2**42), 0),
    checksum=Optional(text("[0-9a-f]{1,16}"), ""),
    slot_map=Optional(SlotMap.from_json, None),
    topic_stats=Optional(rows_of(TOPIC_ID, COUNT, integer(-(2**62), 2**62), SECONDS, SECONDS), ()),
    packed=Optional(read_options, None),
)
