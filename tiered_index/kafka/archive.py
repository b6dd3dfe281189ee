"""Records of Kafka in an index's archive: the archiver beside a source, and the columns of the archived files.

The log of a partition is a store of the archive (`Name.store`), and a columnar segment has the records of a range of
its offsets. The index's log says up to which offset a partition is archived; nothing else does. So the archiver
continues there, with a separate client, up to the source's durable position. A crash at any step leaves a file without
a name in the log, or a named one: no record is missing or doubled. Records that the broker deleted before they were
archived are a loss with both offsets. One thread uses a `KafkaArchiver`; `stop`, `archived` and `losses`: any.
"""

from __future__ import annotations

import itertools
import json
import threading
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import unquote, urlsplit

import numpy as np
import pyarrow as pa

from tiered_index.errors import StorageUnavailable
from tiered_index.follow import Loss
from tiered_index.format.columnar import encode_columns, notes_of
from tiered_index.kafka.client import Stopped
from tiered_index.kafka.names import BEGIN_PREFIX, Name, archived_end, positions_by_store
from tiered_index.kafka.record import KafkaRecord, TimestampType
from tiered_index.service.log.records import ArchivedSegment
from tiered_index.service.log.state import LogState
from tiered_index.service.reader import IndexReader
from tiered_index.storage.local.files import encode

if TYPE_CHECKING:
    from tiered_index.kafka.source import KafkaSource

KEYS_NOTE = "tiered_index.keys"
"""The values of `--key`, in the footer of a file: a list in JSON."""
# those of Spark's rows of Kafka; its numbers of clocks are Kafka's, one less than the client's
SCHEMA = pa.schema(
    {
        "key": pa.binary(),
        "value": pa.binary(),
        "topic": pa.string(),
        "partition": pa.int32(),
        "offset": pa.int64(),
        "timestamp": pa.timestamp("ms", "UTC"),
        "timestampType": pa.int32(),
        "headers": pa.list_(pa.struct({"key": pa.string(), "value": pa.binary()})),
    }
)
# the bytes of a record in memory, less those of its texts
_RECORD_BYTES = 100
# a round ends after so many partitions that can't be archived now: each may take as long as a request may
_FAILURES = 3
# a partition is archived before its time if about so many bytes wait; if none is archived yet, so many records
_WORTH_BYTES, _WORTH_RECORDS = 8 << 20, 100_000


def encode_records(records: Sequence[KafkaRecord], keys: Sequence[str]) -> bytes:
    """Return the file of records of one partition, in order of their offsets."""
    rows = []
    for one in records:
        headers = [{"key": name, "value": value} for name, value in one.headers] or None
        plain = one.key, one.value, one.topic, one.partition, one.offset, one.timestamp_ms, one.timestamp_type - 1
        rows.append(dict(zip(SCHEMA.names, (*plain, headers), strict=True)))
    table = pa.Table.from_pylist(rows, schema=SCHEMA)
    sizes = np.array([one.size for one in records], np.int64)
    return encode_columns(table, sizes, {KEYS_NOTE: json.dumps(list(keys))})


def keys_of_file(end: bytes) -> list[str]:
    """Return what `--key` gave when an archived file was written, by its footer or all of it."""
    found: list[str] = json.loads(notes_of(end)[KEYS_NOTE])
    return found


def records_of(table: pa.Table) -> list[KafkaRecord]:
    """Return the records of an archived file's rows."""
    times = table["timestamp"].cast(pa.int64()).to_pylist()
    columns = [table[name].to_pylist() for name in SCHEMA.names if name != "timestamp"]
    return [
        KafkaRecord(topic, partition, offset, key, value, _headers(headers), time_ms, TimestampType(clock + 1))
        for time_ms, key, value, topic, partition, offset, clock, headers in zip(times, *columns, strict=True)
    ]


def _headers(rows: list[dict[str, Any]] | None) -> tuple[tuple[str, bytes | None], ...]:
    return tuple((row["key"], row["value"]) for row in rows or ())


def archived_files(reader: IndexReader, topic: str) -> list[str]:
    """Return the paths or URIs of a topic's archived files, as DuckDB, Spark and Arrow open them."""
    named = [(Name.parse(segment.store), segment.name) for segment in reader.archived()]
    names = [name for store, name in named if store is not None and store.topic == topic]
    place = reader.storage.uri.partition("?")[0]
    if not place.startswith("file://"):
        return [f"{place}/{name}" for name in names]
    return [str(Path(unquote(urlsplit(place).path)) / encode(name)) for name in names]


@dataclass(eq=False)
class KafkaArchiver:
    """Archives the records that a source has put: an `Archiver`.

    A partition gets an object at the latest `every_s` after its last one, earlier where much waits. An object has some
    `segment_bytes` of records, before they are compressed.
    """

    source: KafkaSource
    segment_bytes: int = 32 << 20
    every_s: float = 3600.0
    archived: int = 0
    losses: list[Loss] = field(default_factory=list)
    passed_over: tuple[Loss, ...] = ()

    def __post_init__(self) -> None:
        self._index, self._clock = self.source.index, self.source.clock
        # what reads on in a store, the next offset there, and the offset at which it ends
        self._reading: Iterator[KafkaRecord] = iter(())
        self._next: tuple[str, int, int] | None = None
        self._stopped = threading.Event()
        # partitions that could not be archived last time, by store; the latest one is the last of the next round
        self._failed: dict[str, int] = {}
        self._failures = itertools.count(1)
        self._begun_ms = self._clock.now_ms()

    def stop(self) -> None:
        """End the round soon. Any thread."""
        self._stopped.set()

    def run_once(self) -> int:
        """Archive records that have waited for long, or are many. Return the number of objects.

        Raises `StorageUnavailable`, `WriterFenced` and the errors of the client. Call it again later.
        """
        return self._run(whole=False)

    def finish(self) -> int:
        """Archive the records of all puts. Raises as `run_once`."""
        self._index.flush()
        return self._run(whole=True)

    def _run(self, *, whole: bool) -> int:
        before, errors = self.archived, list[StorageUnavailable]()
        try:
            for name, until in sorted(self.source.settled(), key=lambda one: self._failed.get(one[0].store, 0)):
                try:
                    while not self._stopped.is_set() and (whole or self._is_due(name, until)):
                        if not self._archive_next(name, until):
                            break
                    self._failed.pop(name.store, None)
                except Stopped:
                    break
                except StorageUnavailable as error:
                    # a partition may be away for long, and the others must not wait for it
                    self._failed[name.store] = next(self._failures)
                    errors.append(error)
                    if len(errors) == _FAILURES:
                        break
        finally:
            self._reading, self._next = iter(()), None
        if errors:
            raise errors[0]
        return self.archived - before

    def _is_due(self, name: Name, until: int) -> bool:
        state = self._index.segment_archive.state()
        last: ArchivedSegment | None = next(iter(state.segments_of(name.store)[-1:]), None)
        waiting = until - (archived_end(state, name.store) or 0)
        record_bytes = _WORTH_BYTES / _WORTH_RECORDS if last is None else last.size_bytes / (last.end - last.start)
        since_ms = self._begun_ms if last is None else last.published_ms
        # the absolute difference, so that a clock that is set back can't keep records out of the archive
        is_old = abs(self._clock.now_ms() - since_ms) >= self.every_s * 1000
        return waiting > 0 and (is_old or waiting * record_bytes >= _WORTH_BYTES)

    def _archive_next(self, name: Name, until: int) -> bool:
        """Archive records of a partition up to an offset; return whether there were any."""
        state = self._index.segment_archive.refresh()
        begin, until = self._next_range(state, name, until)
        if begin >= until:
            return False
        self._check_log(name)  # also before the read, which is useless while topic ids can't be read
        records, end = self._read(name, begin, until)
        self._check_log(name)
        file = encode_records(records, self.source.all_keys().given)
        self.archived += self._index.archive_columns(name.store, begin, end - begin, file)
        return True

    def _next_range(self, state: LogState, name: Name, until: int) -> tuple[int, int]:
        """Return the next offsets to archive. Earlier records that the broker no longer has are a loss."""
        known, place = archived_end(state, name.store), f"{name.topic}/{name.partition}"
        if known is not None and known >= until:
            return known, until
        begin, end, _ = self.source.broker.range((name.topic, name.partition), self._stopped)
        if known is None and name.log:
            self._lose_logs_before(state, name, place)
        due = known
        if due is None:
            due = self._index.durable_position(BEGIN_PREFIX + name.store) or 0
        if begin > due:
            self._lose(due, min(begin, until), f"{place}: offset {due:,} is next, and the log begins at {begin:,}")
        # a log that was cut may end before the position
        return max(begin, due), min(until, end)

    def _lose_logs_before(self, state: LogState, name: Name, place: str) -> None:
        positions = positions_by_store(self._index.durable_positions())
        for before in [name._replace(log=log).store for log in range(name.log)]:
            put = positions.get(before, 0)
            if (end := archived_end(state, before) or 0) < put:
                self._lose(end, put, f"{place}: the log before was archived up to {end:,}, and was put up to {put:,}")

    def _lose(self, begin: int, end: int, problem: str) -> None:
        loss = Loss("missing", begin, end, None, f"not archived: {problem}")
        if loss not in self.losses:
            self.losses.append(loss)

    def _read(self, name: Name, begin: int, until: int) -> tuple[list[KafkaRecord], int]:
        """Return records of a partition from `begin` on, and the offset behind them, at most `until`."""
        if self._next != (name.store, begin, until):
            self._reading = self.source.broker.records((name.topic, name.partition), begin, until, self._stopped)
        self._next = None
        records, size = list[KafkaRecord](), 0
        for record in self._reading:
            records.append(record)
            size += record.size + _RECORD_BYTES
            if size >= self.segment_bytes:
                self._next = name.store, record.offset + 1, until
                return records, record.offset + 1
        return records, until

    def _check_log(self, name: Name) -> None:
        """Raise `StorageUnavailable` if the log that was read may be another one than that of the position."""
        if name.topic_id and self.source.broker.topic_id(name.topic, self._stopped) != name.topic_id:
            raise StorageUnavailable(f"{name.topic}: its id is not {name.topic_id} any more, or can't be asked now")
