"""Messages as callers have them, a row or a document each, and their entries as columns, a row for each key. Pure.

A message has its keys in `keys`, a list of text, or in `key`, one key or a list; of both, `keys` counts.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from tiered_index.errors import InvalidArgument
from tiered_index.format.schema import ROCKETMQ_SCHEMA
from tiered_index.service.answers.rows import check_topic
from tiered_index.service.answers.validation import check_keys, check_number, message_row

# What every message has beside its keys; `topic_id` is optional.
FIELDS = ("topic", "queue_id", "offset", "size", "timestamp_ms")


@dataclass(frozen=True, slots=True)
class Message:
    """One message, checked. `topic_id` is None where the source leaves it to the index."""

    topic: str
    queue_id: int
    offset: int
    size: int
    timestamp_ms: int
    keys: tuple[str, ...]
    topic_id: int | None


def checked_message(fields: Mapping[str, Any], shown: Callable[[str], str] = repr, key_field: str = "keys") -> Message:
    """Return a message of plain values. Raises `InvalidArgument` naming the field as `shown` gives it, and the keys by
    `key_field`.
    """
    if missing := [name for name in FIELDS if name not in fields]:
        raise InvalidArgument(f"{shown(missing[0])} is missing")
    keys = fields.get("keys")
    if keys is None and "key" in fields:
        keys = fields["key"]
        keys = [] if keys is None else keys if isinstance(keys, list) else [keys]
    elif "keys" not in fields:
        raise InvalidArgument(f"{shown(key_field)} is missing")
    if not isinstance(keys, list):
        raise InvalidArgument(f"keys must be a list of text, not {keys!r:.80}")
    topic, queue_id, offset, size, time_ms = (fields[name] for name in FIELDS)
    topic, queue_id, offset, size, second, _ = message_row(topic, queue_id, offset, size, time_ms, {}, ROCKETMQ_SCHEMA)
    checked_keys = tuple(check_keys(keys))
    topic_id = check_number("topic_id", fields["topic_id"]) if fields.get("topic_id") is not None else None
    return Message(topic, queue_id, offset, size, second * 1000, checked_keys, topic_id)


def columns_of(messages: list[Message]) -> dict[str, Any]:
    """Return messages as columns of entries; either all or none of them have a topic id."""
    rows = [(m, key) for m in messages for key in m.keys]
    columns: dict[str, Any] = {name: [getattr(m, name) for m, _ in rows] for name in FIELDS}
    columns["key"] = [key for _, key in rows]
    if messages and messages[0].topic_id is not None:
        columns["topic_id"] = [m.topic_id for m, _ in rows]
    return columns


def entry_columns(table: pa.Table) -> pa.RecordBatch | None:
    """Return one row an entry out of one row a message with a column `keys` (lists) or, where it has none, `key`.

    None where a value is missing somewhere. A key that stands twice in one message counts once. Memory: the batch
    twice.
    """
    names = [name for name in (*FIELDS, "topic_id") if name in table.column_names]
    if "topic_id" in names and table["topic_id"].null_count == len(table):
        names.remove("topic_id")
    if any(table[name].null_count for name in names):
        return None
    has_lists = "keys" in table.column_names and (
        "key" not in table.column_names or not len(table) or table["keys"].null_count < len(table)
    )
    table = table.combine_chunks()
    if not has_lists:
        return None if table["key"].null_count else _batch({name: table[name] for name in (*names, "key")})
    lists = table["keys"].chunk(0) if table["keys"].num_chunks else pa.array([], pa.list_(pa.string()))
    if not is_list(lists.type) or lists.null_count:
        return None
    if not _keyless_are_sound(table, lists, names):
        return None
    keys, parents = pc.list_flatten(lists), pc.list_parent_indices(lists)
    if keys.null_count:
        return None
    if len(keys) > len(table) or len(pc.unique(parents)) < len(keys):
        # a message with several keys: (message, key) pairs as one number each, the first of equal ones stays
        codes = keys.dictionary_encode()
        pairs = parents.to_numpy().astype(np.int64) * max(1, len(codes.dictionary)) + codes.indices.to_numpy()
        first = np.unique(pairs, return_index=True)[1]
        if len(first) < len(keys):
            kept = pa.array(np.sort(first))
            keys, parents = keys.take(kept), parents.take(kept)
    # combined columns have one chunk, or none where there is no row
    return _batch({**{name: table[name].take(parents).combine_chunks() for name in names}, "key": keys})


def is_list(kind: pa.DataType) -> bool:
    """Return whether a column has lists."""
    return bool(pa.types.is_list(kind) or pa.types.is_large_list(kind))


def _keyless_are_sound(table: pa.Table, lists: pa.Array, names: list[str]) -> bool:
    """Return whether messages without keys are well; they make no entry, so nobody else looks at them."""
    keyless = table.filter(pc.equal(pc.list_value_length(lists), 0))
    try:
        for name in names if len(keyless) else ():
            if name == "topic":
                for topic in pc.unique(keyless[name]).to_pylist():
                    check_topic(topic)
            elif pa.types.is_integer(keyless[name].type):
                for number in pc.min_max(keyless[name]).as_py().values():
                    check_number(name, number)
            else:
                return False
    except InvalidArgument:
        return False
    return True


def _batch(columns: Mapping[str, Any]) -> pa.RecordBatch:
    return pa.RecordBatch.from_pydict({name: _array(values) for name, values in columns.items()})


def _array(column: Any) -> pa.Array:
    if isinstance(column, pa.ChunkedArray):
        return column.chunk(0) if column.num_chunks else pa.array([], column.type)
    return column
