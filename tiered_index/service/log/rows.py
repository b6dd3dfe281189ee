"""Stored objects as rows, for checkpoints of many objects. SPEC.md section 9. Pure.

A row has no field names, and the number of its window table: a third of the bytes of a document. Equal values of
several objects share memory.
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import partial
from operator import attrgetter
from typing import Any

from tiered_index.documents import COUNT, Malformed, integer, list_of, nullable, text, tuple_of
from tiered_index.format.metadata import FILE_ID
from tiered_index.format.names import data_prefix
from tiered_index.format.slots import SlotMap
from tiered_index.service.log.records import (
    DATA_NAME,
    OBJECT_FIELDS,
    SHARD_FIELDS,
    StoredObject,
    TableShard,
    stored_object,
    table_shard,
)

_SLOTS = tuple_of(integer(1, 2**28), integer(1, 2**31), integer(1, 2**28))
_TABLE = tuple_of(
    *[SHARD_FIELDS[name] for name in ("table", "begin_s", "window_s")],
    lambda value: SlotMap(*_SLOTS(value)),
    nullable(SHARD_FIELDS["origin"].check),
)
# the columns of an object; a row also has the id and the name's tail before them, and the part of a table after them
_COLUMNS = tuple(name for name in OBJECT_FIELDS if name not in ("name", "file_id", "shard", "hash"))
_columns_of = attrgetter(*_COLUMNS, "hash")
_ROW = tuple_of(
    FILE_ID,
    text(),
    *[OBJECT_FIELDS[name] for name in _COLUMNS],
    OBJECT_FIELDS["hash"].check,
    nullable(COUNT),
    COUNT,
    COUNT,
)


Tables = dict[tuple[Any, ...], int]
"""Window tables, and the numbers that rows name them by: in the order of their first rows."""


def rows_of(objects: Iterable[StoredObject]) -> dict[str, Any]:
    """Return the members `tables` and `objects` of a document."""
    tables: Tables = {}
    rows = [row_of(stored, tables) for stored in objects]
    return {"tables": said_of(tables), "objects": rows}


def row_of(stored: StoredObject, tables: Tables) -> list[Any]:
    """Return the row of an object, whose table is among `tables` then."""
    tail = stored.name.removeprefix(data_prefix(stored.file_id))
    table, low, high = None, 0, 0
    if (shard := stored.shard) is not None:
        key = (shard.table, shard.begin_s, shard.window_s, shard.slots, shard.origin)
        table, low, high = tables.setdefault(key, len(tables)), shard.slot_low, shard.slot_high
    # a tail with a slash would be taken for a whole name
    tail = stored.name if "/" in tail else tail
    return [stored.file_id, tail, *_columns_of(stored), table, low, high]


def said_of(tables: Tables) -> list[Any]:
    """Return tables as a document has them."""
    return [[name, begin, length, [at.base, at.split, at.join], origin] for name, begin, length, at, origin in tables]


def objects_of(tables: Any, rows: Any) -> tuple[StoredObject, ...]:
    """Return the objects of `tables` and `rows` of `rows_of`. Raises `Malformed` and `ConfigError`."""
    return list_of(partial(_object, list_of(_TABLE)(tables), {}))(rows)


def _object(tables: tuple[tuple[Any, ...], ...], shared: dict[Any, Any], row: Any) -> StoredObject:
    file_id, tail, lane, sequence, low_s, high_s, count, *sizes, published_ms, rule, table, low, high = _ROW(row)
    share = shared.setdefault
    shard: TableShard | None = None
    if table is not None:
        if table >= len(tables):
            raise Malformed(f"a number below {len(tables)}", table, ".table")
        name, begin_s, window_s, slots, origin = tables[table]
        shard = table_shard(name, begin_s, window_s, slots, share(low, low), share(high, high), origin)
    return stored_object(
        DATA_NAME(tail if "/" in tail else data_prefix(file_id) + tail),
        file_id,
        share(lane, lane),
        sequence,
        share(low_s, low_s),
        share(high_s, high_s),
        count,
        *sizes,
        share(published_ms, published_ms),
        shard,
        share(rule, rule),
    )
