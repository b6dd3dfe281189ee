"""Stored objects as columns, for checkpoints. SPEC.md section 9. Pure.

Equal values of several objects share memory.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from operator import attrgetter
from typing import Annotated, Any

from msgspec import Meta, Struct

from tiered_index.base.documents import Count, FileId, Length, Milliseconds, Seconds, Size, typed
from tiered_index.format.keys.hashing import HashRule
from tiered_index.format.layout import SlotMap
from tiered_index.format.names import DATA_PREFIX, data_prefix
from tiered_index.service.log.records import (
    DATA_NAME,
    DATA_PART,
    Entries,
    FilterLength,
    Origin,
    StoredObject,
    TableShard,
)

Tail = Annotated[str, Meta(pattern=rf"{DATA_NAME.pattern}|\A{DATA_PART}\Z")]
"""The part of an object's name behind its file's prefix. With a slash it is the whole name."""
Table = tuple[FileId, Seconds, Length, tuple[Count, Count, Count], Origin]
"""A window table: name, begin, length, the slot map's base, split and join, origin."""


class Columns(Struct, kw_only=True):
    """A list for each field of the objects. `table` numbers the tables; an object without one has 0 as both slots."""

    file_id: list[FileId]
    tail: list[Tail]
    lane: list[str]
    sequence: list[Count]
    second_min: list[Seconds]
    second_max: list[Seconds]
    count: list[Entries]
    size_bytes: list[Size]
    trailer_position: list[Size]
    filter_length: list[FilterLength]
    directory_length: list[Size]
    metadata_length: list[Size]
    published_ms: list[Milliseconds]
    hash: list[HashRule]
    table: list[Count | None]
    slot_low: list[Count]
    slot_high: list[Count]
    generation: list[Count]

    def lists(self) -> list[list[Any]]:
        """Return the columns in the order of the fields."""
        return [getattr(self, name) for name in COLUMNS]


COLUMNS = Columns.__struct_fields__


def columns_of(objects: Iterable[StoredObject]) -> dict[str, Any]:
    """Return the members `tables` and `objects` of a state's document."""
    stored = list(objects)
    columns = {name: list(map(attrgetter(name), stored)) for name in COLUMNS if name in StoredObject.__struct_fields__}
    # without a call for each object
    prefixes = [f"{DATA_PREFIX}{file_id}/" for file_id in columns["file_id"]]
    columns["tail"] = [
        name[at:] if name[:at] == prefix and "/" not in name[at:] else name
        for name, prefix, at in zip(map(attrgetter("name"), stored), prefixes, map(len, prefixes), strict=True)
    ]
    tables: dict[tuple[Any, ...], int] = {}
    parts = [(None, 0, 0) if described.shard is None else _part(described.shard, tables) for described in stored]
    columns |= {name: [part[at] for part in parts] for at, name in enumerate(("table", "slot_low", "slot_high"))}
    said = [[name, begin, length, [at.base, at.split, at.join], origin] for name, begin, length, at, origin in tables]
    return {"tables": said, "objects": {name: columns[name] for name in COLUMNS}}


def _part(shard: TableShard, tables: dict[tuple[Any, ...], int]) -> tuple[int, int, int]:
    key = (shard.table, shard.begin_s, shard.window_s, shard.slots, shard.origin)
    return tables.setdefault(key, len(tables)), shard.slot_low, shard.slot_high


def objects_of(tables: Sequence[Table], columns: Sequence[Sequence[Any]]) -> list[StoredObject]:
    """Return the objects of verified `tables` and lists in the order of `COLUMNS`. Raises `ValueError`, `ConfigError`.

    The lists may be of different lengths, or name a table that is not there.
    """
    maps = [typed(dict(zip(("base", "split", "join"), table[3], strict=True)), SlotMap) for table in tables]
    seen: Any = {}
    ids, tails, lanes, sequences, lows_s, highs_s, *others, published, hashes, numbers, lows, highs, generations = (
        columns
    )
    lanes, lows_s, highs_s, published, hashes, lows, highs, generations = [
        list(map(seen.setdefault, column, column))
        for column in (lanes, lows_s, highs_s, published, hashes, lows, highs, generations)
    ]
    names = [tail if "/" in tail else f"{data_prefix(file_id)}{tail}" for file_id, tail in zip(ids, tails, strict=True)]
    shards = [
        None if number is None else _shard(tables, maps, number, low, high)
        for number, low, high in zip(numbers, lows, highs, strict=True)
    ]
    fields = (names, ids, lanes, sequences, lows_s, highs_s, *others, published, shards, hashes, generations)
    return [StoredObject(*values) for values in zip(*fields, strict=True)]


def _shard(tables: Sequence[Table], maps: Sequence[SlotMap], number: int, low: int, high: int) -> TableShard:
    if number >= len(tables):
        raise ValueError(f"An object names table {number} of {len(tables)}")
    name, begin_s, window_s, _, origin = tables[number]
    return TableShard(name, begin_s, window_s, maps[number], low, high, origin)
