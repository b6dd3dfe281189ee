"""Checks of messages and batches before they change anything, and the topic ids of one writer.

Limits:

- topic: 1 to 1,024 UTF-16 code units, not only blanks; key: 1 to 32,767
- `queue_id` and `size`: 0 to 2**31-1; `offset`: 0 to 2**63-1. Queue 2**31-1 is for rows of files (`owned.py`)
- `timestamp_ms`: 0 to 253,402,300,799,999 (the year 9999)

A topic id comes from the source, or is assigned from the topic's name: 2**30 and 30 bits of its CRC32. So it is the
same in every root. One id never means two names. Threads: any.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import math
import operator
import re
from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from types import MappingProxyType
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from tiered_index.base.locks import call_lock
from tiered_index.base.units import MAX_TIMESTAMP_MS
from tiered_index.errors import ConfigError, InvalidArgument
from tiered_index.format.keys.hashing import (
    CodeUnits,
    HashRule,
    assigned_topic_id,
    code_units,
    hash_batch,
    is_one_value,
    lookup_numbers,
    next_topic_id,
)
from tiered_index.format.schema import Column, Schema
from tiered_index.format.topic_documents import (
    NO_DOCUMENTS,
    Documents,
    Revision,
    TopicDocument,
    connectors_in,
    new_revisions,
)
from tiered_index.service.read.answers.rows import check_integer, check_key, check_text, check_topic
from tiered_index.types import MAX_KEY_UNITS, IndexItem


class TopicTable:
    """The topics of one writer: names by id, ids by name, and the documents of topics."""

    def __init__(self) -> None:
        # the newest revision of each topic, and the topics in the order in which they got one
        self._documents: dict[str, Revision] = {}
        self._described: list[str] = []
        self._copied: tuple[int, Documents] = 0, NO_DOCUMENTS
        self.connectors: frozenset[str] = frozenset()
        """The connectors that wrote topics."""
        self._lock = call_lock()
        self._names: dict[int, str] = {}
        self._ids: dict[str, frozenset[int]] = {}
        self.assigned: dict[str, int] = {}
        """The id that `assign` gave to each topic of which no source owns a queue. A put needs no check of others."""
        self._of_sources: set[str] = set()

    def assign(self, topic: str) -> int:
        """Return the assigned id of `topic`. Two names with one CRC get neighbouring ids."""
        known = self.assigned.get(topic)
        if known is not None:
            return known
        return self._assign(topic)

    def _assign(self, topic: str) -> int:
        with self._lock:
            topic_id = assigned_topic_id(topic)
            while self._names.get(topic_id, topic) != topic:
                topic_id = next_topic_id(topic_id)
            self._add(topic_id, topic)
            if topic not in self._of_sources:
                self.assigned[topic] = topic_id
            return topic_id

    def check_puts_of(self, topics: Iterable[str]) -> None:
        """Take topics out of `assigned`, because sources own queues of them."""
        with self._lock:
            for topic in topics:
                self._of_sources.add(topic)
                self.assigned.pop(topic, None)

    def give(self, pairs: Iterable[tuple[int, str]]) -> None:
        """Record all (id, topic) pairs of a source, or none and raise `InvalidArgument` if an id has another name."""
        with self._lock:
            fresh: dict[int, str] = {}
            for topic_id, topic in pairs:
                other = self._names.get(topic_id, fresh.get(topic_id, topic))
                if other != topic:
                    raise InvalidArgument(f"topic id {topic_id} of {topic!r} already means topic {other!r}")
                fresh[topic_id] = topic
            for topic_id, topic in fresh.items():
                self._add(topic_id, topic)

    def describe(self, described: Mapping[str, TopicDocument]) -> None:
        """Note the documents of topics, each as a new revision if the topic has another one."""
        with self._lock:
            self._know(new_revisions(self._documents, described))

    def learn(self, documents: Documents) -> None:
        """Take over documents that others wrote, or an earlier process."""
        with self._lock:
            known = self._documents
            self._know(
                {
                    topic: revision
                    for topic, revision in documents.items()
                    if topic not in known or known[topic].number < revision.number
                }
            )

    def _know(self, documents: Documents) -> None:
        if documents:
            self.connectors |= connectors_in(documents)
            self._documents |= documents
            self._described += documents

    @property
    def documents(self) -> Documents:
        """The newest document of each topic. Immutable, and another object after each change."""
        with self._lock:
            if self._copied[0] < len(self._described):
                self._copied = len(self._described), dict(self._documents)
            return self._copied[1]

    def document(self, topic: str) -> Documents:
        """Return the newest document of a topic, if it has one."""
        revision = self._documents.get(topic)
        return NO_DOCUMENTS if revision is None else {topic: revision}

    def documents_since(self, count: int) -> tuple[Documents, int]:
        """Return the documents of topics after the first `count` changes, and the number of all changes."""
        with self._lock:
            return {topic: self._documents[topic] for topic in self._described[count:]}, len(self._described)

    def ids(self, topic: str) -> frozenset[int]:
        """Return all ids of `topic`."""
        return self._ids.get(topic, frozenset())

    @property
    def names(self) -> Collection[str]:
        """All topics that have an id."""
        return self._ids.keys()

    def name(self, topic_id: int) -> str:
        """Return the topic of `topic_id`. Raises `KeyError` if it is unknown."""
        return self._names[topic_id]

    def _add(self, topic_id: int, topic: str) -> None:
        self._names[topic_id] = topic
        self._ids[topic] = self._ids.get(topic, frozenset()) | {topic_id}


Columns = dict[str, npt.NDArray[Any]]
"""Native-order columns of equal length: `second`, `key_hash`, `topic_id`, `queue_id`, `offset`, `size`, and the
schema's extra ones.
"""


def hash_columns(
    topics: Sequence[str], topic_index: npt.NDArray[Any], keys: CodeUnits, schema: Schema, rule: HashRule
) -> Columns:
    """Return `key_hash` and, for a keyed schema, `fingerprint` of n rows. Arguments: see `hash_batch`."""
    hashes, fingerprints = hash_batch(topics, topic_index, keys, fingerprints=schema.keyed, rule=rule)
    return {"key_hash": hashes, "fingerprint": fingerprints} if schema.keyed else {"key_hash": hashes}


def hash_few(topics: Sequence[str], keys: Sequence[str], schema: Schema, rule: HashRule) -> Columns:
    """Return the result of `hash_columns` for n keys and their n topics, one by one."""
    numbers = np.array(list(map(lookup_numbers, topics, keys)), np.int64).reshape(-1, 3)
    columns = {"key_hash": numbers[:, 1 if rule == "mask" else 0].astype(np.int32)}
    return columns | {"fingerprint": numbers[:, 2].astype(np.uint32)} if schema.keyed else columns


_LIMITS = {
    "queue_id": 2**31 - 1,
    "offset": 2**63 - 1,
    "size": 2**31 - 1,
    "timestamp_ms": MAX_TIMESTAMP_MS,
    "topic_id": 2**31 - 1,
    "source_position": 2**63 - 1,
    "key_hash": 2**31 - 1,
    "fingerprint": 2**32 - 1,
}
_CHECKED_ROWS = 1 << 16
_BATCH_NUMBERS = ("queue_id", "offset", "size", "timestamp_ms")


def check_keys(keys: str | Iterable[str]) -> list[str]:
    """Return the distinct keys of one message, in order. Raises `InvalidArgument`."""
    if isinstance(keys, str):
        return [check_key(keys)]
    if isinstance(keys, bytes | bytearray | memoryview):
        # an iterable of integers
        raise InvalidArgument(f"keys must be text or an iterable of text, not {keys!r:.80}")
    try:
        return list(dict.fromkeys(check_key(key) for key in keys))
    except TypeError as error:
        raise InvalidArgument(f"keys must be text or an iterable of text, not {keys!r:.80}") from error


def check_number(name: str, value: Any) -> int:
    """Return `value` as an integer within the limits of `name`. Raises `InvalidArgument`."""
    number = check_integer(name, value)
    if not 0 <= number <= _LIMITS[name]:
        raise InvalidArgument(f"{name} {number} is outside 0..{_LIMITS[name]}")
    return number


def check_position(source: object, position: object) -> tuple[str | None, int | None]:
    """Return a valid (source, position) pair: both or neither. Raises `InvalidArgument`."""
    if source is None and position is None:
        return None, None
    if not isinstance(source, str) or not source or position is None:
        raise InvalidArgument("give source (a non-empty text) and source_position together")
    return check_text("source", source), check_number("source_position", position)


def message_row(
    topic: object,
    queue_id: Any,
    offset: Any,
    size: Any,
    timestamp_ms: Any,
    extra: Mapping[str, Any],
    schema: Schema,
    defaults: Mapping[str, Any] = MappingProxyType({}),
) -> tuple[str, int, int, int, int, tuple[Any, ...]]:
    """Return the checked (topic, queue_id, offset, size, second, caller columns) of one message."""
    names = [c.name for c in schema.caller_columns]
    extra = {**defaults, **extra}
    if unknown := [name for name in extra if name not in names]:
        raise InvalidArgument(
            f"schema {schema.name} has no column {unknown[0]!r}" + (f"; it has {names}" if names else "")
        )
    if missing := [name for name in names if name not in extra]:
        raise InvalidArgument(f"column {missing[0]!r} of schema {schema.name} is missing")
    return (
        check_topic(topic),
        check_number("queue_id", queue_id),
        check_number("offset", offset),
        check_number("size", size),
        check_number("timestamp_ms", timestamp_ms) // 1000,
        tuple(_extra_value(c, extra[c.name]) for c in schema.caller_columns),
    )


def _extra_value(column: Column, value: Any) -> Any:
    dtype = np.dtype(column.dtype)
    if column.is_text:
        return _stored_text(column.name, value, dtype.itemsize)
    try:
        if dtype.kind in "iu":
            number = operator.index(value)
            limits = np.iinfo(dtype)
            if limits.min <= number <= limits.max:
                return number
        elif dtype.kind == "f":
            real = float(value)
            if not math.isfinite(real) or abs(real) <= float(np.finfo(dtype).max):
                return real
        elif isinstance(value, bytes | bytearray | memoryview) and len(value := bytes(value)) <= dtype.itemsize:
            return value
    except (TypeError, ValueError, OverflowError) as error:
        raise InvalidArgument(f"{column.name} must be a {dtype.name}, not {value!r:.80}") from error
    if dtype.kind == "S":
        raise InvalidArgument(f"{column.name} must be bytes, at most {dtype.itemsize}, not {value!r:.80}")
    raise InvalidArgument(f"{column.name} must fit {dtype.name}, which {value!r:.80} does not")


def _stored_text(name: str, value: Any, width: int) -> bytes:
    """Return a text, or bytes of UTF-8, as a text column of `width` bytes stores it. Raises `InvalidArgument`."""
    try:
        if isinstance(value, str):
            stored = str.encode(value)
        elif isinstance(value, bytes | bytearray | memoryview):
            stored = bytes(value)
            stored.decode()
        else:
            raise InvalidArgument(f"{name} must be text, not {value!r:.80}")
    except UnicodeError as error:
        has = "half a surrogate pair" if isinstance(error, UnicodeEncodeError) else "bytes that are not UTF-8"
        raise InvalidArgument(f"{name} must be text, and {value!r:.80} has {has}") from error
    if len(stored) > width:
        raise InvalidArgument(
            f"{name} must be text of at most {width:,} bytes in UTF-8, and {value!r:.80} has {len(stored):,}"
        )
    if b"\0" in stored:
        raise InvalidArgument(f"{name} must be text without NUL, not {value!r:.80}")
    return stored


def column_defaults(item_type: type[IndexItem] | None) -> dict[str, Any]:
    """Return the defaults that a class of entries declares for its columns. Raises `ConfigError` for a wrong one."""
    if item_type is None:
        return {}
    schema = Schema.of(item_type)
    fields = dataclasses.fields(item_type)
    declared = {field.name: field.metadata["default"] for field in fields if "default" in field.metadata}
    try:
        return {c.name: _extra_value(c, declared[c.name]) for c in schema.caller_columns if c.name in declared}
    except InvalidArgument as error:
        raise ConfigError(f"a default of {schema.name}: {error}") from error


class CheckedBatch(NamedTuple):
    """A batch as checked and hashed columns, the (id, name) pairs that it gives, and its distinct topics."""

    columns: Columns
    topic_ids: list[tuple[int, str]]
    topics: list[str]


def batch_columns(
    batch: Any,
    schema: Schema,
    topics: TopicTable,
    rule: HashRule = "abs",
    defaults: Mapping[str, Any] = MappingProxyType({}),
) -> CheckedBatch:
    """Return a batch of `put_batch` as checked and hashed columns.

    Columns: `topic`, `queue_id`, `key`, `offset`, `size`, `timestamp_ms`, optionally `topic_id`, and every caller
    column of the schema without a default. A topic is text, or dictionary-encoded; a time is an integer, or an Arrow
    timestamp. In place of `key` there may be `key_hash` and, for a keyed schema, `fingerprint`. A tuple of Arrow arrays
    as `key` are columns of keys, with nulls: the other columns have a value for each row, which has an entry for each
    of its keys. Raises `InvalidArgument` naming the column and the first bad row. It is long, because each column is
    checked against those before it.
    """
    columns_by_name = as_mapping(batch)
    hashed = "key" not in columns_by_name and "key_hash" in columns_by_name
    key_names = [name for name in ("key_hash", "fingerprint") if schema.keyed or name == "key_hash"]
    names = ["topic", *(key_names if hashed else ["key"]), *_BATCH_NUMBERS, *(c.name for c in schema.caller_columns)]
    if missing := [name for name in names if name not in columns_by_name and name not in defaults]:
        raise InvalidArgument(f"column {missing[0]!r} is missing; a batch needs {names}")
    if unknown := [name for name in columns_by_name if name not in (*names, "topic_id")]:
        raise InvalidArgument(f"column {unknown[0]!r} is unknown; a batch has {names} and optionally 'topic_id'")
    # the number of rows: of entries, unless rows have several keys
    keys, rows, copies, count = None, None, 1, 0
    if not hashed and has_columns_of_keys(batch_keys := columns_by_name["key"]):
        copies, count = len(batch_keys), len(batch_keys[0])
        if any(len(column) != count for column in batch_keys):
            raise InvalidArgument("ragged batch: its columns of keys differ in their number of rows")
        keys, rows = keys_of_rows([_text("key", column, nulls=True) for column in batch_keys])
    elif not hashed:
        keys = _text_parts("key", batch_keys)
        count = sum(map(len, keys))
    topic_index, distinct = distinct_topics(columns_by_name["topic"])
    count = len(topic_index) if hashed else count
    columns: Columns = {name: numbers_of(name, columns_by_name[name]) for name in key_names} if hashed else {}
    given_ids: list[tuple[int, str]] = []
    for name in (*_BATCH_NUMBERS, *(("topic_id",) if "topic_id" in columns_by_name else ())):
        columns[name] = numbers_of(name, columns_by_name[name])
    for c in schema.caller_columns:
        if c.name in columns_by_name:
            columns[c.name] = _extra_column(c, columns_by_name[c.name])
        else:
            columns[c.name] = np.full(count, defaults[c.name], np.dtype(c.dtype).newbyteorder("="))
    for name, values in (("topic", topic_index), *columns.items()):
        if len(values) != count:
            of = "topic" if hashed else "key"
            raise InvalidArgument(f"ragged batch: column {name!r} has {len(values):,} rows, {of!r} has {count:,}")
    begins = [*itertools.accumulate(map(len, keys or ()), initial=0)]
    units = [_key_units(part, begin) for part, begin in zip(keys or (), begins, strict=False)]
    if "topic_id" in columns:
        pairs = np.unique(columns["topic_id"] << 32 | topic_index.astype(np.int64)).tolist()
        given_ids = [(pair >> 32, distinct[pair & 0xFFFFFFFF]) for pair in pairs]
    else:
        ids = np.array([topics.assign(topic) for topic in distinct], np.int64)
        if is_one_value(topic_index):
            columns["topic_id"] = np.broadcast_to(ids, count)
        else:
            columns["topic_id"] = ids[topic_index] if count else np.zeros(0, np.int64)
    columns["second"] = columns.pop("timestamp_ms") // 1000
    for name in ("topic_id", "queue_id", "size"):
        columns[name] = _converted(columns[name], np.int32)
    if rows is not None or copies > 1:
        columns = {name: of_entries(values, rows, copies) for name, values in columns.items()}
        topic_index = of_entries(topic_index, rows, copies)
    else:
        # a copy, because the column may be on memory that the caller uses again after this call
        columns["offset"] = columns["offset"].copy()
    if keys is not None:
        parts = [
            hash_columns(distinct or ["-"], topic_index[begin : begin + len(part)], part, schema, rule)
            for part, begin in zip(units, begins, strict=False)
        ]
        columns |= {
            n: np.concatenate([part[n] for part in parts]) if len(parts) > 1 else v for n, v in parts[0].items()
        }
    else:
        for name in key_names:
            columns[name] = columns[name].astype(np.uint32 if name == "fingerprint" else np.int32)
    return CheckedBatch(columns, given_ids, distinct)


def has_columns_of_keys(keys: Any) -> bool:
    """Return whether the keys of a batch are columns of rows: a tuple of Arrow arrays."""
    return isinstance(keys, tuple) and bool(keys) and all(isinstance(column, pa.Array) for column in keys)


def keys_of_rows(columns: Sequence[pa.Array]) -> tuple[list[pa.Array], npt.NDArray[np.int64] | None]:
    """Return the keys of rows (n) in several columns without nulls, and the number of the row of each key (i64).

    None: each column has a key of every row.
    """
    if not any(column.null_count for column in columns):
        return [*columns], None
    rows = [np.flatnonzero(column.is_valid().to_numpy(zero_copy_only=False)) for column in columns]
    return [column.drop_null() for column in columns], np.concatenate(rows)


def of_entries(values: npt.NDArray[Any], rows: npt.NDArray[np.int64] | None, copies: int) -> npt.NDArray[Any]:
    """Return values of rows (n) as those of entries, which are in `rows`; None: all rows, `copies` times in turn."""
    if is_one_value(values):
        return np.broadcast_to(values[:1], len(values) * copies if rows is None else len(rows))
    # faster than `np.tile`
    return np.concatenate([values] * copies) if rows is None else values[rows]


def _converted(column: npt.NDArray[Any], kind: Any) -> npt.NDArray[Any]:
    """Return a copy of a column as another type. One value stays one value."""
    return np.broadcast_to(column[:1].astype(kind), len(column)) if is_one_value(column) else column.astype(kind)


def _key_units(keys: Any, first_row: int) -> CodeUnits:
    """Return the code units of keys, whose lengths are checked."""
    units = code_units(keys.cast(pa.large_string()))
    # in pieces that fit the CPU's cache
    for begin in range(0, len(units), _CHECKED_ROWS):
        lengths = np.diff(units.offsets[begin : begin + _CHECKED_ROWS + 1])
        if not (lengths.min() > 0 and lengths.max() <= MAX_KEY_UNITS):
            row = int(np.flatnonzero((lengths == 0) | (lengths > MAX_KEY_UNITS))[0])
            raise InvalidArgument(
                f"key in row {first_row + begin + row} has {int(lengths[row]):,} UTF-16 code units; "
                f"1..{MAX_KEY_UNITS:,} are allowed"
            )
    return units


# The name of an unnamed index in a frame that pandas exports.
_PANDAS_INDEX = re.compile(r"__index_level_[0-9]+__")


def as_mapping(batch: Any) -> dict[str, Any]:
    """Return the columns of a batch of `put_batch`; a stream is read. Raises `InvalidArgument`."""
    if not isinstance(batch, pa.RecordBatch | pa.Table) and hasattr(batch, "__arrow_c_stream__"):
        try:
            table = pa.RecordBatchReader.from_stream(batch).read_all()
            fields = [pa.field(f.name, known_layout(f.type)) for f in table.schema]
            batch = table.cast(pa.schema(fields))
        except (pa.ArrowException, TypeError, ValueError) as error:
            raise InvalidArgument(f"a {type(batch).__name__} can't be converted to an Arrow table: {error}") from error
        batch = batch.drop_columns([name for name in batch.column_names if _PANDAS_INDEX.fullmatch(name)])
    if isinstance(batch, pa.RecordBatch | pa.Table):
        if twice := [name for name, count in Counter(batch.schema.names).items() if count > 1]:
            raise InvalidArgument(f"a batch has two columns {twice[0]!r}: their names must differ")
        return {name: batch.column(name) for name in batch.schema.names}
    if isinstance(batch, Mapping):
        return dict(batch)
    raise InvalidArgument(f"a batch is an Arrow table, a data frame or a dict of arrays, not {type(batch).__name__}")


@functools.lru_cache(256)
def known_layout(kind: pa.DataType) -> pa.DataType:
    """Return a type as the engine reads it: an extension by its storage type, and views (of Polars, DataFusion) plain.

    Views are of text and bytes, also in dictionaries, lists, structs and maps, and of lists that are in nothing else.
    """
    if isinstance(kind, pa.BaseExtensionType):
        return known_layout(kind.storage_type)
    if _is_list_view(kind):
        return pa.large_list(kind.value_field.with_type(_without_views(kind.value_type)))
    return _without_views(kind)


def _is_list_view(kind: pa.DataType) -> bool:
    return bool(pa.types.is_list_view(kind) or pa.types.is_large_list_view(kind))


def _without_views(kind: pa.DataType) -> pa.DataType:
    if pa.types.is_dictionary(kind):
        return pa.dictionary(kind.index_type, _without_views(kind.value_type), kind.ordered)
    if pa.types.is_binary_view(kind):
        return pa.large_binary()
    if pa.types.is_string_view(kind):
        return pa.large_string()
    if pa.types.is_struct(kind):
        return pa.struct([field.with_type(_without_views(field.type)) for field in kind])
    if pa.types.is_map(kind):
        both = (field.with_type(_without_views(field.type)) for field in (kind.key_field, kind.item_field))
        return pa.map_(*both, kind.keys_sorted)
    if pa.types.is_fixed_size_list(kind):
        return pa.list_(kind.value_field.with_type(_without_views(kind.value_type)), kind.list_size)
    if pa.types.is_list(kind):
        return pa.list_(kind.value_field.with_type(_without_views(kind.value_type)))
    if pa.types.is_large_list(kind):
        return pa.large_list(kind.value_field.with_type(_without_views(kind.value_type)))
    return kind


def in_known_layout(array: Any) -> Any:
    """Return an array or chunked array of `known_layout`, unchanged if it has it."""
    known = known_layout(array.type)
    if known == array.type:
        return array
    if isinstance(array, pa.ExtensionArray):
        return in_known_layout(array.storage)
    if not _is_list_view(array.type):
        return array.cast(known)
    if isinstance(array, pa.ChunkedArray):
        return pa.chunked_array([in_known_layout(chunk) for chunk in array.chunks], known)
    # not by a cast: Arrow 26 makes lists without their last offset
    ends = np.cumsum(pc.list_value_length(array).fill_null(0).to_numpy(zero_copy_only=False), dtype=np.int64)
    offsets = pa.array(np.concatenate([np.zeros(1, np.int64), ends]))
    mask = array.is_null() if array.null_count else None
    return pa.LargeListArray.from_arrays(offsets, in_known_layout(pc.list_flatten(array)), known, mask=mask)


def _arrow(name: str, values: Any, wanted: str, *, nulls: bool = False) -> pa.Array:
    """Return `values` as one Arrow array, without nulls unless `nulls`."""
    if isinstance(values, str | bytes | set | frozenset | Mapping):
        raise InvalidArgument(f"column {name!r} must be a sequence of {wanted}, not a {type(values).__name__}")
    if isinstance(values, np.ndarray):
        values = values.astype(values.dtype.newbyteorder("="), copy=False)
    try:
        array = in_known_layout(values) if isinstance(values, pa.Array | pa.ChunkedArray) else pa.array(values)
    except (pa.ArrowException, TypeError, ValueError, OverflowError) as error:
        raise InvalidArgument(f"column {name!r} must be {wanted}: {error}") from error
    if isinstance(array, pa.ChunkedArray):
        array = array.chunk(0) if array.num_chunks == 1 else array.combine_chunks()
        if isinstance(array, pa.ChunkedArray):  # no chunk at all
            array = pa.concat_arrays(array.chunks) if array.num_chunks else pa.array([], array.type)
    if pa.types.is_dictionary(array.type) and array.dictionary.null_count:
        array = array.dictionary_decode()  # nulls may be in the dictionary, too
    if array.null_count and not nulls:
        counted = f"{array.null_count:,} null{'s' * (array.null_count > 1)}"
        raise InvalidArgument(f"column {name!r} has {counted}; a value ({wanted}) is needed in every row")
    return array


def _text_parts(name: str, values: Any) -> list[Any]:
    """Return a column of text as Arrow arrays: its chunks are not copied to one. Raises `InvalidArgument`."""
    if (
        isinstance(values, pa.ChunkedArray)
        and values.num_chunks > 1
        and not values.null_count
        and _is_text(values.type)
    ):
        return values.chunks  # type: ignore[no-any-return]
    return [_text(name, values)]


def _text(name: str, values: Any, *, nulls: bool = False) -> Any:
    """Return a column of text as an Arrow array. Raises `InvalidArgument`."""
    try:
        array = _arrow(name, values, "text", nulls=nulls)
    except InvalidArgument as error:
        if not isinstance(error.__cause__, UnicodeEncodeError):
            raise
        for row, value in enumerate(values):
            if not isinstance(value, str):
                raise InvalidArgument(f"column {name!r} must be text, row {row} is {value!r:.80}") from error
            check_text(f"{name} in row {row}", value)
        raise
    kind = array.type.value_type if pa.types.is_dictionary(array.type) else array.type
    if _is_text(kind):
        return array
    if len(array):
        raise InvalidArgument(f"column {name!r} must be text, not {array.type}")
    return pa.array([], pa.large_string())  # a column without a row may have any type


def distinct_topics(values: Any) -> tuple[npt.NDArray[Any], list[str]]:
    """Return the number of each row's topic, and the distinct topics. Raises `InvalidArgument`."""
    if isinstance(values, np.ndarray) and is_one_value(values):
        if type(values[0]) is not str:
            index, names = distinct_topics(values[:1].copy())
            return np.broadcast_to(index, len(values)), names
        return np.broadcast_to(np.int64(0), len(values)), [check_topic(values[0])]
    text = _text("topic", values)
    encoded = text.dictionary_encode()
    # NumPy counts no unsigned numbers of 64 bits
    index = encoded.indices.to_numpy(zero_copy_only=False).astype(np.int64, copy=False)
    try:
        names = encoded.dictionary.to_pylist()
    except UnicodeDecodeError as error:
        raise InvalidArgument("a topic has bytes that are not UTF-8") from error
    # an Arrow dictionary may have a name twice, and names that no row has
    used = np.bincount(index, minlength=len(names)) > 0
    places = {topic: place for place, topic in enumerate(dict.fromkeys(itertools.compress(names, used)))}
    if len(places) < len(names):
        index = np.array([places.get(topic, -1) for topic in names], np.int32)[index]
    for topic in places:
        check_topic(topic)
    return index, list(places)


def numbers_of(name: str, values: Any) -> npt.NDArray[np.int64]:
    """Return a column of numbers, or of times as epoch milliseconds. Raises `InvalidArgument`.

    It may be on the memory of `values`.
    """
    if isinstance(values, np.ndarray) and is_one_value(values):
        return np.broadcast_to(numbers_of(name, values[:1].copy()), len(values))
    if name == "timestamp_ms":
        values = _times(values)
    numbers = _integers(name, values)
    limit = _LIMITS[name]
    if numbers.dtype == np.uint64 and len(numbers) and int(numbers.max()) > limit:
        raise InvalidArgument(f"{name} {int(numbers.max())} is outside 0..{limit}")
    signed = numbers.astype(np.int64, copy=False)
    # as unsigned numbers, negative ones are beyond any limit
    if len(signed) and signed.view(np.uint64).max() <= limit:
        return signed
    if len(signed) and (bad := np.flatnonzero((signed < 0) | (signed > limit))).size:
        row = int(bad[0])
        raise InvalidArgument(f"{name} {int(signed[row])} in row {row} is outside 0..{limit}")
    return signed


def _times(values: Any) -> Any:
    """Return the times of a batch: timestamps of Arrow, NumPy or Python as epoch milliseconds, integers unchanged.

    A timestamp without a zone is UTC.
    """
    is_coarse = isinstance(values, np.ndarray) and values.dtype.kind == "M"
    if is_coarse and np.datetime_data(values.dtype)[0] not in ("s", "ms", "us", "ns"):
        values = values.astype("datetime64[s]")
    times = _arrow("timestamp_ms", values, "integers or times")
    return milliseconds(times) if pa.types.is_timestamp(times.type) else times


def milliseconds(times: Any) -> Any:
    """Return an Arrow timestamp column as integers of epoch milliseconds, floored. Raises `InvalidArgument`."""
    unit, counts = times.type.unit, times.cast(pa.int64())
    if unit == "s":
        try:
            return pc.multiply_checked(counts, 1000)
        except pa.ArrowInvalid as error:
            raise InvalidArgument(f"timestamp_ms: a time is out of range in milliseconds ({error})") from error
    if unit == "ms":
        return counts
    divisor = {"us": 1_000, "ns": 1_000_000}[unit]
    remainder = pc.subtract(counts, pc.multiply(pc.divide(counts, divisor), divisor))
    return pc.subtract(pc.divide(counts, divisor), pc.cast(pc.less(remainder, 0), pa.int64()))  # floor, not toward zero


def _integers(name: str, values: Any) -> npt.NDArray[Any]:
    array = _arrow(name, values, "integers")
    if len(array) and not pa.types.is_integer(array.type):
        raise InvalidArgument(f"column {name!r} must be integers, not {array.type}")
    return array.to_numpy(zero_copy_only=False) if len(array) else np.zeros(0, np.int64)


def _extra_column(column: Column, values: Any) -> npt.NDArray[Any]:
    name, dtype = column.name, np.dtype(column.dtype).newbyteorder("=")
    numbers: npt.NDArray[Any]
    if column.is_text:
        return _text_column(name, values, dtype)
    if dtype.kind == "S":
        return _bytes_column(name, values, dtype)
    if dtype.kind == "f":
        array = _arrow(name, values, dtype.name)
        if len(array) and not (pa.types.is_integer(array.type) or pa.types.is_floating(array.type)):
            raise InvalidArgument(f"column {name!r} must be {dtype.name}, not {array.type}")
        numbers = array.to_numpy(zero_copy_only=False).astype(np.float64)
        fits = ~np.isfinite(numbers) | (np.abs(numbers) <= float(np.finfo(dtype).max))
    else:
        numbers, limits = _integers(name, values), np.iinfo(dtype)
        fits = (numbers >= limits.min) & (numbers <= limits.max)
    if not fits.all():
        raise InvalidArgument(f"column {name!r} holds values that do not fit {dtype.name}")
    return numbers.astype(dtype)


def _bytes_column(name: str, values: Any, dtype: np.dtype[Any]) -> npt.NDArray[Any]:
    """Return a column of bytes, filled with NUL bytes to its width. NUL bytes of the caller are kept."""
    if isinstance(values, np.ndarray) and values.dtype.kind in "SV":
        # Arrow would cut such values at their first NUL byte
        values = values.tolist()
    wanted = f"bytes, at most {dtype.itemsize}"
    array = _arrow(name, values, wanted)
    kind = array.type
    if not _is_bytes(kind):
        if len(array):
            raise InvalidArgument(f"column {name!r} must be {wanted}, not {kind}")
    elif len(array) and pc.max(pc.binary_length(array)).as_py() > dtype.itemsize:
        raise InvalidArgument(f"column {name!r} must be {wanted}, but has longer values")
    return np.array(array.to_pylist(), dtype)


def _text_column(name: str, values: Any, dtype: np.dtype[Any]) -> npt.NDArray[Any]:
    """Return a column of text, or of bytes of UTF-8, as UTF-8 that is filled with NUL bytes to its width."""
    if isinstance(values, np.ndarray) and values.dtype.kind in "SV":
        values = values.tolist()
    wanted = f"text of at most {dtype.itemsize:,} bytes"
    try:
        array = _arrow(name, values, wanted)
    except InvalidArgument as error:
        if not isinstance(error.__cause__, UnicodeEncodeError):
            raise
        # Arrow has neither half a surrogate pair nor one as two characters, which is a text
        return np.array(_stored_texts(name, values, dtype.itemsize), dtype)
    kind = array.type.value_type if pa.types.is_dictionary(array.type) else array.type
    if not (_is_text(kind) or _is_bytes(kind)):
        if len(array):
            raise InvalidArgument(f"column {name!r} must be {wanted}, not {array.type}")
        return np.zeros(0, dtype)
    stored = (array.dictionary_decode() if kind != array.type else array).cast(pa.large_binary())
    try:
        texts = stored.cast(pa.large_string())
    except pa.ArrowInvalid:
        return np.array(_stored_texts(name, stored.to_pylist(), dtype.itemsize), dtype)
    is_wrong = pc.or_(pc.greater(pc.binary_length(stored), dtype.itemsize), pc.match_substring(stored, "\0"))
    if pc.any(is_wrong).as_py():
        _stored_texts(name, texts.to_pylist(), dtype.itemsize)
    return np.array(stored.to_pylist(), dtype)


def _stored_texts(name: str, values: Any, width: int) -> list[bytes]:
    """Return the texts of a column as `_stored_text`, whose errors name the row, too."""
    stored = []
    for row, value in enumerate(values):
        try:
            stored.append(_stored_text(f"column {name!r}", value, width))
        except InvalidArgument as error:
            raise InvalidArgument(f"{error} (row {row:,})") from error
    return stored


def _is_text(kind: pa.DataType) -> bool:
    return bool(pa.types.is_string(kind) or pa.types.is_large_string(kind))


def _is_bytes(kind: pa.DataType) -> bool:
    return bool(pa.types.is_binary(kind) or pa.types.is_large_binary(kind) or pa.types.is_fixed_size_binary(kind))
