"""Records of one partition as a table, of messages of Kafka's client, and as an archived file."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from tiered_index.base.documents import decoder_of, encoded
from tiered_index.base.units import MAX_TIMESTAMP_MS
from tiered_index.connectors.archive.columns import SHARED, ArchivedTable, ArchiveFormat
from tiered_index.connectors.kafka.client.broker import Place, headers_of, kafka
from tiered_index.connectors.kafka.keys import FUNCTION, Headers, RecordKeys
from tiered_index.connectors.kafka.record import KafkaRecord, TimestampType
from tiered_index.format.segments.columnar import notes_of

# those of Spark's rows of Kafka; its numbers of clocks are Kafka's, one less than the client's
SCHEMA = pa.schema(
    {
        "key": pa.binary(),
        "value": pa.binary(),
        "topic": SHARED["topic"],
        "partition": pa.int32(),
        "offset": SHARED["offset"],
        "timestamp": SHARED["timestamp"],
        "timestampType": pa.int32(),
        "headers": pa.list_(pa.struct({"key": pa.string(), "value": pa.binary()})),
        # all keys of a record when the file was written, if a function gave them; null: the rules of `KEYS_NOTE` do
        "keys": SHARED["keys"],
    }
)
SIZE = "size"
"""The column of the bytes of key, value and headers, which no file has."""
KEYS_NOTE = "tiered_index.keys"
"""The values of `--key`, in the footer of a file: a list in JSON."""
TOPIC_ID_NOTE = "tiered_index.topic_id"
"""The id of the topic that a file's records are from, in its footer: 32 hexadecimal digits."""
_NO_TIME_MS = -1


class RecordLists:
    """Records of one partition that are added some at a time: no message of the client is kept.

    `is_whole`: whether the table has the values and headers. Otherwise it only has their sizes.
    """

    def __init__(self, *, is_whole: bool = True) -> None:
        self.offsets: list[int] = []
        self._keys: list[bytes | None] = []
        self._values: list[pa.Array] = []
        self._headers: list[Headers] = []
        # kind and milliseconds of each record
        self._stamps: list[int] = []
        self._sizes: list[npt.NDArray[np.int64]] = []
        self._is_whole = is_whole
        # the bytes of all keys, values and headers
        self.size_bytes = 0

    def add(self, messages: Sequence[Any]) -> None:
        """Add messages of the client."""
        message = kafka.Message
        self.offsets.extend(map(message.offset, messages))
        keys = list(map(message.key, messages))
        self._keys += keys
        headers = list(map(headers_of, messages))
        if self._is_whole:
            self._values.append(pa.array(list(map(message.value, messages)), pa.binary()))
            self._headers += headers
        self._stamps.extend(itertools.chain.from_iterable(map(message.timestamp, messages)))
        # the length of a message is that of its value
        sizes = np.array(list(map(len, messages)), np.int64) + np.array([len(key or b"") for key in keys], np.int64)
        if any(headers):
            sizes += np.array([_header_bytes(pairs) for pairs in headers], np.int64)
        self._sizes.append(sizes)
        self.size_bytes += int(sizes.sum())

    def table(self) -> pa.Table:
        """Return all records that were added, in their order: columns of `SCHEMA` and `SIZE`, without place and keys.

        A record without a time has a null.
        """
        clocks, times_ms = np.array(self._stamps, np.int64).reshape(-1, 2).T
        clocks = np.where(times_ms < 0, 0, clocks)
        times = pa.array(np.where(clocks == 0, _NO_TIME_MS, times_ms), mask=clocks == 0)
        columns = {
            "offset": pa.array(self.offsets, pa.int64()),
            "key": pa.array(self._keys, pa.binary()),
            "timestamp": times.cast(SCHEMA.field("timestamp").type),
            "timestampType": pa.array((clocks - 1).astype(np.int32)),
            SIZE: np.concatenate(self._sizes) if self._sizes else pa.array([], pa.int64()),
        }
        if self._is_whole:
            columns |= {"value": pa.chunked_array(self._values, pa.binary()), "headers": header_lists(self._headers)}
        return pa.table(columns)


def header_lists(headers: Sequence[Headers]) -> pa.Array:
    """Return the headers of records as lists; a record without headers has a null."""
    kind = SCHEMA.field("headers").type
    if not any(headers):
        return pa.nulls(len(headers), kind)
    flat = [pair for pairs in headers for pair in pairs]
    names, values = (
        pa.array([name for name, _ in flat], pa.string()),
        pa.array([value for _, value in flat], pa.binary()),
    )
    pairs = pa.StructArray.from_arrays([names, values], fields=list(kind.value_type))
    ends = list(itertools.accumulate(map(len, headers), initial=0))
    # the begin of a null is null
    begins = pa.array(
        [end if pairs else None for end, pairs in zip(ends, headers, strict=False)] + ends[-1:], pa.int32()
    )
    return pa.ListArray.from_arrays(begins, pairs, type=kind)


def entry_columns(
    place: Place, records: pa.Table, keys: pa.Array, counts: Sequence[int] | None, no_time_ms: int
) -> dict[str, Any]:
    """Return a batch of entries, one for each key of each record. `counts`: the keys of each record; None: one.

    A record without a time gets `no_time_ms`. A time beyond the greatest one becomes that, and is quarantined.
    """
    offsets, sizes = records["offset"].to_numpy(), records[SIZE].to_numpy()
    times = np.minimum(records["timestamp"].cast(pa.int64()).fill_null(no_time_ms), MAX_TIMESTAMP_MS)
    if counts is not None:
        rows = np.repeat(np.arange(len(records)), counts)
        offsets, sizes, times = offsets[rows], sizes[rows], times[rows]
    return {
        "topic": pa.DictionaryArray.from_arrays(pa.array(np.zeros(len(keys), np.int32)), pa.array([place[0]])),
        "queue_id": np.full(len(keys), place[1], np.int64),
        "key": keys,
        "offset": offsets,
        "size": sizes,
        "timestamp_ms": times,
    }


def archived_table(
    place: Place, records: pa.Table, keys_of: Callable[[KafkaRecord], list[str]] | None = None
) -> pa.Table:
    """Return the records of one partition as columns of `SCHEMA`; `records` are those of `RecordLists.table`.

    The column of keys is what `keys_of` returns for each record (None: all null).
    """
    same = {**dict(zip(("topic", "partition"), place, strict=True)), "keys": None}
    columns = {
        field.name: pa.repeat(pa.scalar(same[field.name], field.type), len(records))
        if field.name in same
        else records[field.name]
        for field in SCHEMA
    }
    table = pa.table(columns, schema=SCHEMA)
    if keys_of is not None:
        keys = pa.array(list(map(keys_of, records_of(table))), SHARED["keys"])
        table = table.set_column(SCHEMA.get_field_index("keys"), SCHEMA.field("keys"), keys)
    return table


def notes_of_records(rules: Sequence[str], topic_id: str = "") -> dict[str, str]:
    """Return the notes in the footer of a file: the `rules` and, unless it is unknown, the id of the topic."""
    return {KEYS_NOTE: encoded(list(rules)).decode()} | ({TOPIC_ID_NOTE: topic_id} if topic_id else {})


def keys_in_notes(notes: Mapping[str, str]) -> list[str]:
    """Return what `--key` gave when an archived file was written, by the notes in its footer."""
    return decoder_of(list[str]).decode(notes[KEYS_NOTE])


def archived_keys(table: ArchivedTable, later: Collection[str]) -> pa.ListArray | str:
    """Return all keys of each record of a file, as `ArchiveFormat.keys`: see `keys_of_rows`."""
    rules = keys_in_notes(table.notes)
    # the file has all keys of a function that was known when it was written
    if FUNCTION in later and FUNCTION not in rules:
        return "was archived without the keys that a function gave"
    return pa.array(keys_of_rows(table.records, rules, later), SHARED["keys"])


def keys_of_rows(rows: pa.Table, rules: Collection[str], later: Collection[str] = ()) -> list[list[str]]:
    """Return all keys of each row of an archived file, whose `rules` are those of `keys_in_notes`.

    `later`: rules that the topic has, or had, also those that are not the file's. Keys of a function are only those of
    the file: see `archived_keys`.
    """
    known: list[list[str] | None] = rows["keys"].to_pylist()
    more = {*later} - {*rules, FUNCTION}
    added = RecordKeys(tuple(more), are_new=False) if more else None
    if added is None and None not in known:
        return known  # type: ignore[return-value]
    by_rules = RecordKeys.by_rules({*rules, *later})
    return [
        by_rules.of(record) if keys is None else list(dict.fromkeys([*keys, *(added.of(record) if added else ())]))
        for record, keys in zip(records_of(rows), known, strict=True)
    ]


FORMAT = ArchiveFormat(
    "archived records of a broker",
    "tiered_index.records",
    2,
    SCHEMA,
    texts=("key", "value", "headers.list.element.key", "headers.list.element.value", "keys.list.element"),
    keys=archived_keys,
)


def topic_id_of_file(end: bytes) -> str:
    """Return the id of the topic that a file's records are from, by its footer or all of it; empty: unknown."""
    return notes_of(end).get(TOPIC_ID_NOTE, "")


def records_of(table: pa.Table) -> list[KafkaRecord]:
    """Return the records of an archived file's rows."""
    times = table["timestamp"].cast(pa.int64()).to_pylist()
    columns = [table[name].to_pylist() for name in SCHEMA.names if name not in ("timestamp", "keys")]
    return [
        KafkaRecord(topic, partition, offset, key, value, _headers(headers), time_ms, TimestampType(clock + 1))
        for time_ms, key, value, topic, partition, offset, clock, headers in zip(times, *columns, strict=True)
    ]


def _headers(rows: list[dict[str, Any]] | None) -> tuple[tuple[str, bytes | None], ...]:
    return tuple((row["key"], row["value"]) for row in rows or ())


def _header_bytes(headers: Headers) -> int:
    return sum(len(name.encode()) + len(value or b"") for name, value in headers)
