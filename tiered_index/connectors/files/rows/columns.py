"""Converts messages (rows or documents) to columns of entries, one row for each key. Pure.

A message has its keys in `keys`, a list of text, or in `key`, one key or a list. If it has both, `keys` counts.
"""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from tiered_index.base.units import time_with_zone
from tiered_index.errors import InvalidArgument
from tiered_index.format.schema import ROCKETMQ_SCHEMA, Column, Schema
from tiered_index.service.read.answers.rows import check_topic
from tiered_index.service.write.validation import check_keys, check_number, message_row, milliseconds

# The fields of every message, in addition to its keys and an optional `topic_id`
FIELDS = ("topic", "queue_id", "offset", "size", "timestamp_ms")
# Bounds on the memory that one file or body needs: bytes of one row or line, columns of a table
MAX_ROW_BYTES = 16 << 20
MAX_COLUMNS = 10_000

FromClocks = Callable[[npt.NDArray[np.int64]], npt.NDArray[np.int64]]
"""Converts times of the clocks of a zone, in milliseconds, to epoch milliseconds."""


@dataclass(frozen=True, slots=True)
class CheckedMessage:
    """One checked message. `topic_id` is None if the index assigns it."""

    topic: str
    queue_id: int
    offset: int
    size: int
    timestamp_ms: int
    keys: tuple[str, ...]
    topic_id: int | None
    # Values of the index's own columns, in order of declaration
    own: tuple[Any, ...] = ()


def checked_message(
    fields: Mapping[str, Any],
    shown: Callable[[str], str] = repr,
    key_field: str = "keys",
    schema: Schema = ROCKETMQ_SCHEMA,
) -> CheckedMessage:
    """Return the checked message of a mapping, with the schema's own columns. Raises `InvalidArgument`.

    `shown` returns a field's name for the error; `key_field` is the name of the keys there.
    """
    own = {column.name: column for column in schema.caller_columns}
    if missing := [name for name in (*FIELDS, *own) if name not in fields]:
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
    if isinstance(time_ms, str):
        time_ms, _ = _time_with_zone(time_ms)
    own_values = {name: own_value(column, fields[name]) for name, column in own.items()}
    topic, queue_id, offset, size, second, values = message_row(
        topic, queue_id, offset, size, time_ms, own_values, schema
    )
    checked_keys = tuple(check_keys(keys))
    topic_id = check_number("topic_id", fields["topic_id"]) if fields.get("topic_id") is not None else None
    return CheckedMessage(topic, queue_id, offset, size, second * 1000, checked_keys, topic_id, values)


def own_value(column: Column, value: Any) -> Any:
    """Return the value of an own column from a text file: bytes from text, a number from digits, or the text."""
    kind = np.dtype(column.dtype).kind
    if not isinstance(value, str) or column.is_text:
        return value
    if kind == "S":
        return value.encode("utf-8", "surrogatepass")
    try:
        return float(value) if kind == "f" else int(value)
    except ValueError as error:
        raise InvalidArgument(f"{column.name} must be a number, not {value!r:.80}") from error


def own_type(column: Column) -> pa.DataType:
    """Return the Arrow type with which an own column is read from a text file: text for bytes, too."""
    dtype = np.dtype(column.dtype)
    if dtype.kind == "S":
        return pa.string()
    return pa.float64() if dtype.kind == "f" else pa.uint64() if dtype.kind == "u" else pa.int64()


def _time_with_zone(text: str) -> tuple[int, bool]:
    try:
        return time_with_zone(text)
    except ValueError as error:
        raise InvalidArgument(f"timestamp_ms is epoch milliseconds or ISO 8601, not {text!r:.80}") from error


def times_ms(texts: pa.ChunkedArray, of_clocks: FromClocks | None = None) -> pa.ChunkedArray:
    """Return texts as epoch milliseconds, as `exact_time`. Raises `InvalidArgument`.

    `of_clocks` converts times without a zone, and then no text is null; None: they are UTC.
    """
    # Arrow reads the usual forms faster, if all texts have the same one
    for kind in (pa.int64(), *(pa.timestamp(unit, zone) for zone in ("UTC", None) for unit in ("us", "ns"))):
        with contextlib.suppress(pa.ArrowInvalid):
            times = texts.cast(kind)
            if pa.types.is_integer(kind):
                return times
            moments = milliseconds(times)
            if of_clocks is None or kind.tz is not None:
                return moments
            return pa.chunked_array([of_clocks(moments.to_numpy())])
    read = [None if text is None else _time_with_zone(text) for text in texts.to_pylist()]
    if of_clocks is None:
        return pa.chunked_array([pa.array([None if time is None else time[0] for time in read], pa.int64())])
    numbers = np.array([time[0] for time in read if time is not None], np.int64)
    lacks_zone = np.array([not time[1] for time in read if time is not None])
    numbers[lacks_zone] = of_clocks(numbers[lacks_zone])
    return pa.chunked_array([numbers])


def check_names(names: Sequence[str], used: Iterable[str], whose: str) -> None:
    """Raise `InvalidArgument` if a table has too many columns, or a `used` name twice. `whose` names the table."""
    if len(names) > MAX_COLUMNS:
        raise InvalidArgument(f"{whose} has {len(names):,} columns; at most {MAX_COLUMNS:,} are read")
    counts = Counter(names)
    if twice := [name for name in used if counts[name] > 1]:
        raise InvalidArgument(f"{whose}: column {twice[0]!r} appears twice")


def check_kinds(
    kinds: Mapping[str, pa.DataType], shown: Callable[[str], str] = repr, where: str = "", own: Sequence[Column] = ()
) -> None:
    """Raise `InvalidArgument` for a column of a wrong type; `shown` returns its name there, `where` begins the text."""
    declared = {column.name: column for column in own}
    for field, kind in kinds.items():
        dtype = np.dtype(declared[field].dtype) if field in declared else None
        if pa.types.is_null(kind) or _may_be(field, kind, dtype):
            continue
        if field in declared:
            told = declared[field].spoken_type if declared[field].is_text else np.dtype(declared[field].dtype)
            raise InvalidArgument(f"{where}column {shown(field)} has the type {kind}, but must have {told}: cast it")
        others = {"topic": "text", "key": "text or a list of text", "keys": "a list of text", "timestamp_ms": "times"}
        told = f"has the type {f'{kind}':.80}, but must have {others.get(field, 'integers')}"
        raise InvalidArgument(f"{where}column {shown(field)} {told}: cast it")


def _may_be(field: str, kind: pa.DataType, own: np.dtype[Any] | None) -> bool:
    if own is not None:
        if own.kind == "S":
            return is_text(kind) or bool(pa.types.is_binary(kind) or pa.types.is_fixed_size_binary(kind))
        return bool(pa.types.is_integer(kind) or (own.kind == "f" and pa.types.is_floating(kind)))
    if field in ("key", "keys"):
        if has_items(kind):
            return is_text(kind.value_type) or bool(pa.types.is_null(kind.value_type))
        return field == "key" and is_text(kind)
    if field == "topic":
        return is_text(kind)
    return bool(pa.types.is_integer(kind) or (field == "timestamp_ms" and pa.types.is_timestamp(kind)))


def is_text(kind: pa.DataType) -> bool:
    """Return whether a column has text, dictionary-encoded or not."""
    kind = kind.value_type if pa.types.is_dictionary(kind) else kind
    return bool(pa.types.is_string(kind) or pa.types.is_large_string(kind) or pa.types.is_string_view(kind))


def text_bytes(column: pa.Array) -> npt.NDArray[np.int64]:
    """Return the size of each row's text or bytes (i64). A list has the sum of its items.

    A row of a dictionary, and of a run, has the size of its text, even if other rows share it.
    """
    if pa.types.is_run_end_encoded(column.type):
        lengths = pa.RunEndEncodedArray.from_arrays(column.run_ends, pa.array(text_bytes(column.values)))
        decoded = pc.run_end_decode(lengths.slice(column.offset, len(column)))
        return np.asarray(decoded.to_numpy(zero_copy_only=False), np.int64)
    if has_items(column.type):
        # the sum of a slice is a difference of running sums
        sums = np.concatenate([np.zeros(1, np.int64), np.cumsum(text_bytes(pc.list_flatten(column)))])
        counts = pc.list_value_length(column).fill_null(0).to_numpy(zero_copy_only=False).astype(np.int64)
        ends = np.cumsum(counts)
        return np.asarray(sums[ends] - sums[ends - counts], np.int64)
    if pa.types.is_dictionary(column.type):
        lengths = text_bytes(column.dictionary)
        indices = column.indices.fill_null(0).to_numpy(zero_copy_only=False)
        used = lengths[indices] if len(lengths) else np.zeros(len(column), np.int64)
        return np.where(column.indices.is_null().to_numpy(zero_copy_only=False), 0, used)
    if not (is_text(column.type) or pa.types.is_binary(column.type) or pa.types.is_large_binary(column.type)):
        return np.zeros(len(column), np.int64)
    return np.asarray(pc.binary_length(column).fill_null(0).to_numpy(zero_copy_only=False), np.int64)


def plain_text(column: pa.Array) -> pa.Array:
    """Return a column of text, or lists of it, without dictionaries, views and runs; any other column unchanged."""
    if pa.types.is_run_end_encoded(column.type):
        return plain_text(pc.run_end_decode(column))
    if pa.types.is_fixed_size_list(column.type):
        column = column.cast(pa.large_list(column.type.value_type))
    if is_list(column.type):
        ends = np.cumsum(pc.list_value_length(column).fill_null(0).to_numpy(zero_copy_only=False), dtype=np.int64)
        offsets = pa.array(np.concatenate([np.zeros(1, np.int64), ends]))
        texts = plain_text(pc.list_flatten(column))
        return pa.LargeListArray.from_arrays(offsets, texts, mask=column.is_null() if column.null_count else None)
    if is_text(column.type):
        return column.cast(pa.large_string())
    return column.dictionary_decode() if pa.types.is_dictionary(column.type) else column


def columns_of(messages: list[CheckedMessage], own: Sequence[str] = ()) -> dict[str, Any]:
    """Return the entries of messages as columns, with the `own` ones. All or none of the messages have a topic id."""
    rows = [(m, key) for m in messages for key in m.keys]
    columns: dict[str, Any] = {name: [getattr(m, name) for m, _ in rows] for name in FIELDS}
    columns["topic"] = _shared_texts(columns["topic"])
    columns["key"] = [key for _, key in rows]
    if messages and messages[0].topic_id is not None:
        columns["topic_id"] = [m.topic_id for m, _ in rows]
    return columns | {name: [m.own[place] for m, _ in rows] for place, name in enumerate(own)}


def _shared_texts(texts: list[str]) -> Any:
    """Return texts as a dictionary, so that a topic is not copied for each key."""
    places = {text: place for place, text in enumerate(dict.fromkeys(texts))}
    return pa.DictionaryArray.from_arrays(
        pa.array([places[text] for text in texts], pa.int32()), pa.array(places, pa.large_string())
    )


def entry_columns(table: pa.Table, own: Sequence[str] = ()) -> pa.RecordBatch | None:
    """Return the entries of messages, one row an entry; None if a value may be missing.

    `table` has one row a message, with `keys` (lists) or `key`. Of other columns only the index's `own` are kept. A
    repeated key of one message counts once. Memory: the batch twice.
    """
    names = [name for name in (*FIELDS, "topic_id", *own) if name in table.column_names]
    if "topic_id" in names and table["topic_id"].null_count == len(table):
        names.remove("topic_id")
    if any(_may_lack(table[name]) for name in names):
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
    if not _keyless_are_sound(table, lists, [name for name in names if name not in own]):
        return None
    if pc.list_flatten(lists).null_count:
        return None
    rows, keys = each_key(lists)
    parents = pa.array(rows)
    if not pa.types.is_dictionary(table["topic"].type):
        # repeat a number for each key of a message, not its topic
        table = table.set_column(table.column_names.index("topic"), "topic", table["topic"].dictionary_encode())
    # a combined column has one chunk, or none if there is no row
    return _batch({**{name: table[name].take(parents).combine_chunks() for name in names}, "key": keys})


def _may_lack(column: pa.ChunkedArray) -> bool:
    """Return whether a value may be missing: a dictionary may have a null, too."""
    chunks = column.chunks if pa.types.is_dictionary(column.type) else ()
    return bool(column.null_count) or any(chunk.dictionary.null_count for chunk in chunks)


def each_key(lists: pa.Array) -> tuple[npt.NDArray[np.int64], pa.Array]:
    """Return the list's index (i64) and the key of each distinct key of each list, in order. Nulls are skipped."""
    keys, rows = pc.list_flatten(lists), pc.list_parent_indices(lists).to_numpy().astype(np.int64)
    if keys.null_count:
        valid = pc.is_valid(keys).to_numpy(zero_copy_only=False)
        keys, rows = keys.drop_null(), rows[valid]
    if (rows[1:] == rows[:-1]).any():
        # number the (list, key) pairs, and keep the first of equal ones
        codes = keys.dictionary_encode()
        pairs = rows * max(1, len(codes.dictionary)) + codes.indices.to_numpy()
        first = np.unique(pairs, return_index=True)[1]
        if len(first) < len(keys):
            first.sort()
            keys, rows = keys.take(pa.array(first)), rows[first]
    return rows, keys


def is_list(kind: pa.DataType) -> bool:
    """Return whether a column has lists."""
    return bool(pa.types.is_list(kind) or pa.types.is_large_list(kind))


def has_items(kind: pa.DataType) -> bool:
    """Return whether a column has lists, also of fixed size."""
    return is_list(kind) or bool(pa.types.is_fixed_size_list(kind))


def _keyless_are_sound(table: pa.Table, lists: pa.Array, names: list[str]) -> bool:
    """Return whether messages without keys are valid. They make no entry, so no later step checks them."""
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
