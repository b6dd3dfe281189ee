"""Messages on their way into the index: what a source yields, and how messages become columns of entries. Pure.

A source yields batches. A batch has its columns ready where no value in it is in doubt (`columns`), and can always be
walked message by message (`records`), which is slow, exact, and names the place of whatever is wrong.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from tiered_index.errors import InvalidArgument
from tiered_index.format.schema import ROCKETMQ_SCHEMA
from tiered_index.service.answers.validation import check_keys, check_number, check_topic, message_row

__all__ = ["FIELDS", "Batch", "Message", "Record", "Source", "checked_message", "columns_of", "entry_columns"]

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


@dataclass(frozen=True, slots=True)
class Record:
    """One message's place in its source: `where` for people, [start, end) as positions.

    And the message or what is wrong with it.
    """

    where: str
    start: int
    end: int
    message: Message | None
    problem: str = ""


@dataclass(frozen=True)
class Batch:
    """A run of messages that ends at position `end`; `columns` are None where only `records` can tell what is in it."""

    columns: pa.RecordBatch | None
    messages: int
    end: int
    records: Callable[[], Iterator[Record]]


class Source(Protocol):
    """A file of messages. Positions count in `unit`; the same content has the same positions for ever."""

    path: Path
    unit: str
    total: int | None

    def batches(self, start: int) -> Iterator[Batch]:
        """Yield what lies behind position `start`, in order. Raises `InvalidArgument`, `CorruptFile`."""
        ...

    def fingerprint(self, length: int | None) -> tuple[int, str]:
        """Return (length, hash) of the identifying piece of the content; a given `length` asks for that much of it."""
        ...


def checked_message(fields: Mapping[str, Any]) -> Message:
    """Return a message of plain values. Raises `InvalidArgument` naming the field."""
    if missing := [name for name in (*FIELDS, "keys") if name not in fields]:
        raise InvalidArgument(f"{missing[0]!r} is missing")
    keys = fields["keys"]
    if not isinstance(keys, list):
        raise InvalidArgument(f"keys must be a list of text, not {keys!r:.80}")
    topic, queue_id, offset, size, second, _ = message_row(
        fields["topic"],
        fields["queue_id"],
        fields["offset"],
        fields["size"],
        fields["timestamp_ms"],
        {},
        ROCKETMQ_SCHEMA,
    )
    topic_id = fields.get("topic_id")
    return Message(
        topic,
        queue_id,
        offset,
        size,
        second * 1000,
        tuple(check_keys(keys)),
        check_number("topic_id", topic_id) if topic_id is not None else None,
    )


def columns_of(messages: list[Message]) -> dict[str, Any]:
    """Return messages as columns of entries; either all or none of them have a topic id."""
    rows = [(m, key) for m in messages for key in m.keys]
    columns: dict[str, Any] = {name: [getattr(m, name) for m, _ in rows] for name in FIELDS}
    columns["key"] = [key for _, key in rows]
    if messages and messages[0].topic_id is not None:
        columns["topic_id"] = [m.topic_id for m, _ in rows]
    return columns


def entry_columns(table: pa.Table) -> pa.RecordBatch | None:
    """Return one row an entry out of one row a message with a list column `keys`.

    None where a value is missing somewhere. A key that stands twice in one message counts once. Memory: the batch
    twice.
    """
    names = [name for name in (*FIELDS, "topic_id") if name in table.column_names]
    if "topic_id" in names and table["topic_id"].null_count == len(table):
        names.remove("topic_id")
    table = table.combine_chunks()
    lists = table["keys"].chunk(0) if table["keys"].num_chunks else pa.array([], pa.list_(pa.string()))
    if not (pa.types.is_list(lists.type) or pa.types.is_large_list(lists.type)):
        return None
    if lists.null_count or any(table[name].null_count for name in names):
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
    columns = {name: table[name].take(parents).combine_chunks() for name in names}
    return pa.RecordBatch.from_pydict({**{n: _array(c) for n, c in columns.items()}, "key": keys})


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


def _array(column: Any) -> pa.Array:
    if isinstance(column, pa.ChunkedArray):
        return column.chunk(0) if column.num_chunks else pa.array([], column.type)
    return column
