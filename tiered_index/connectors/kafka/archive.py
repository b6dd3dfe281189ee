"""Records of Kafka in an index's archive: the archiver beside a source. `columns` has the form of its files.

The log of a partition is a store of the archive (`Name.store`), and a columnar segment has the records of a range of
its offsets. The index's log says up to which offset a partition is archived; nothing else does. So the archiver
continues there, with a separate client, up to the source's durable position. A crash at any step leaves a file without
a name in the log, or a named one: no record is missing or doubled.

Records are archived well before the broker deletes them: at a quarter of the retention of their topic, and soon if the
oldest one that waits has that age, by its own time. Those that it deleted before, or that went with their topic, are a
loss with both offsets; each is reported once. One thread uses a `KafkaArchiver`; `stop`, `archived` and `losses`: any.
"""

from __future__ import annotations

import contextlib
import itertools
import threading
import time
from collections.abc import Generator
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING
from urllib.parse import unquote, urlsplit

import pyarrow as pa

from tiered_index.connectors.archive.archiver import ColumnArchiver, archived_end
from tiered_index.connectors.kafka.client.broker import Place, ReadStopped, TopicRetention
from tiered_index.connectors.kafka.columns import FORMAT, RecordLists, archived_table, notes_of_records
from tiered_index.connectors.kafka.names import BEGIN_PREFIX, LOST_PREFIX, Name, positions_by_store
from tiered_index.connectors.source import Loss
from tiered_index.errors import StorageUnavailable, listed
from tiered_index.service.read.segments.segments import Segments
from tiered_index.service.reader import IndexReader
from tiered_index.storage.local import encode

if TYPE_CHECKING:
    from tiered_index.connectors.kafka.source import KafkaSource

# the bytes of a record in memory, less those of its texts
_RECORD_BYTES = 100
# a round ends after so many partitions that can't be archived now: each may take as long as a request may
_FAILURES = 3
# a partition is archived before its time if about so many bytes wait; if none is archived yet, so many records
_WORTH_BYTES, _WORTH_RECORDS = 8 << 20, 100_000
# The share of a topic's retention, in time and in bytes, that records wait at most
_SHARE = 4
# How often it is asked for, and how often if it is unknown or short; no archive keeps up with one that is too short
_ASK_S, _ASK_AGAIN_S, _SHORT_S, _TOO_SHORT_S = 60.0, 10.0, 600, 60
# So long wait records at most that are old already, by their own times
_OLD_S = 15.0
EVERY_S = 3600.0


def archived_files(reader: IndexReader, topic: str) -> list[str]:
    """Return the paths or URIs of a topic's archived files, as DuckDB, Spark and Arrow open them."""
    segments = reader.segments()
    stores = [store for store in segments.stores if (name := Name.parse(store)) is not None and name.topic == topic]
    names = [segment.name for store in stores for segment in segments.of(store)]
    place = reader.storage.uri.partition("?")[0]
    if not place.startswith("file://"):
        return [f"{place}/{name}" for name in names]
    return [str(Path(unquote(urlsplit(place).path)) / encode(name)) for name in names]


_NO_RETENTION = TopicRetention(None, None)


@dataclass(eq=False)
class KafkaArchiver:
    """Archives the records that a source has put: an `Archiver`.

    A record waits at most `every_s`, less where much waits or the broker would delete it soon. An object has some
    `segment_bytes` of records, before they are compressed. It has an attribute for each fact about the stores that it
    keeps from round to round, by the name of the store.
    """

    source: KafkaSource
    segment_bytes: int = 32 << 20
    every_s: float = EVERY_S
    losses: list[Loss] = field(default_factory=list)

    # records that wait may be deleted while the command is not running
    ends_whole = True

    def __post_init__(self) -> None:
        # of each store: the offset from which on records wait, and since when
        self._waiting: dict[str, tuple[int, int]] = {}
        # of each store: the end of the records that are lost
        self._passed: dict[str, int] = {}
        self._retentions: dict[str, TopicRetention] = {}
        # of each topic: when it was asked for
        self._asked_s: dict[str, float] = {}
        self._unknown: set[str] = set()
        self._too_short: set[str] = set()
        # of each store: the end of the records that waited when a retention became shorter
        self._at_once: dict[str, int] = {}
        self._index, self._clock = self.source.index, self.source.clock
        self._stopped = threading.Event()
        self._columns = ColumnArchiver(self._index, FORMAT)
        # partitions that could not be archived last time, by store; the latest one is the last of the next round
        self._failed: dict[str, int] = {}
        self._failures = itertools.count(1)

    @property
    def archived(self) -> int:
        """The number of archived objects."""
        return self._columns.archived

    @property
    def passed_over(self) -> tuple[Loss, ...]:
        """The records that the broker deleted before they were archived."""
        return tuple(self.losses)

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
        self._learn_retentions()
        self._index.segment_archive.refresh()
        self._lose_deleted()
        try:
            for name, until in sorted(self.source.settled(), key=lambda settled: self._failed.get(settled[0].store, 0)):
                try:
                    if not self._stopped.is_set() and (whole or self._is_due(name, until)):
                        self._archive(name, until, whole=whole)
                    self._failed.pop(name.store, None)
                except ReadStopped:
                    break
                except StorageUnavailable as error:
                    # a partition may be away for long, and the others must not wait for it
                    self._failed[name.store] = next(self._failures)
                    errors.append(error)
                    if len(errors) == _FAILURES:
                        break
        finally:
            # after an error the records are read again
            self._columns.name()
        if errors:
            raise errors[0]
        return self.archived - before

    def _is_due(self, name: Name, until: int) -> bool:
        segments = self._index.segment_archive.segments()
        due, now_ms, partition = self._due(segments, name), self._clock.now_ms(), self.source.partition(name)
        if (waiting := until - due) <= 0:
            return False
        begin, since_ms = self._waiting.get(name.store, (-1, now_ms))
        if begin != due:
            since_ms = now_ms
            self._waiting[name.store] = due, now_ms
        # records of an earlier run wait for an unknown time; others are being deleted, or may soon be
        if due < max(partition.begun, partition.log.begin, self._at_once.get(name.store, 0)):
            return True
        age_ms, size_bytes = self._retentions.get(name.topic, _NO_RETENTION)
        record_bytes = segments.bytes_an_offset(name.store) or _WORTH_BYTES / _WORTH_RECORDS
        if waiting * record_bytes >= _WORTH_BYTES:
            return True
        if size_bytes is not None and waiting * max(record_bytes, partition.record_bytes) * _SHARE >= size_bytes:
            return True
        limit_s = self.every_s if age_ms is None else min(self.every_s, age_ms / 1000 / _SHARE)
        oldest_ms = partition.oldest.since(due)
        if age_ms is not None and oldest_ms is not None and (now_ms - oldest_ms) * _SHARE >= age_ms:
            limit_s = min(limit_s, _OLD_S)
        # the absolute difference, so that a clock that is set back can't keep records out of the archive
        return abs(now_ms - since_ms) >= limit_s * 1000

    def _due(self, segments: Segments, store: Name | str) -> int:
        """Return the offset in a log from which on records are not archived, and not known as lost."""
        text = store if isinstance(store, str) else store.store
        known = (self._index.durable_position(prefix + text) or 0 for prefix in (BEGIN_PREFIX, LOST_PREFIX))
        return max(self._columns.end(text, segments), *known, self._passed.get(text, 0))

    def _learn_retentions(self) -> None:
        """Ask for the retention of topics, again every minute, or sooner if it is short.

        One that can't be known or is too short is noted once. Records that wait when it becomes shorter are due.
        """
        settled, now_s = self.source.settled(), time.monotonic()
        topics = [topic for topic in sorted({name.topic for name, _ in settled}) if self._is_to_ask(topic, now_s)]
        if not topics:
            return
        retentions = self.source.broker.retentions(topics, self._stopped)
        self._asked_s |= dict.fromkeys(topics, time.monotonic())
        known = {topic: retention for topic, retention in retentions.items() if isinstance(retention, TopicRetention)}
        shorter = {
            topic for topic, retention in known.items() if retention.is_shorter(self._retentions.get(topic, retention))
        }
        self._at_once |= {name.store: until for name, until in settled if name.topic in shorter}
        self._retentions |= known
        too_short = {
            topic for topic, (age_ms, _) in known.items() if age_ms is not None and age_ms < 1000 * _TOO_SHORT_S
        }
        if new := sorted(too_short - self._too_short):
            self.source.note(
                f"the broker may delete records of {listed(new, 3)} after less than {_TOO_SHORT_S} seconds, and no "
                f"archive keeps up with that: set retention.ms, or local.retention.ms, to more"
            )
        self._too_short = self._too_short - known.keys() | too_short
        unknown = {topic: reason for topic, reason in retentions.items() if not isinstance(reason, TopicRetention)}
        if new := sorted(unknown.keys() - self._unknown):
            self.source.note(
                f"the retention of {len(new):,} topics is not known, the first {new[0]}: {unknown[new[0]]}; their "
                f"records wait up to {self.every_s:g} seconds for the archive: --archive-every sets a shorter time"
            )
        self._unknown = self._unknown - known.keys() | unknown.keys()

    def _is_to_ask(self, topic: str, now_s: float) -> bool:
        """Return whether it is time to ask for the retention of a topic."""
        age_ms, _ = self._retentions.get(topic, _NO_RETENTION)
        is_short = topic in self._unknown or (age_ms is not None and age_ms < 1000 * _SHORT_S)
        return now_s - self._asked_s.get(topic, float("-inf")) >= (_ASK_AGAIN_S if is_short else _ASK_S)

    def _lose_deleted(self) -> None:
        """Note records that went with their topics."""
        segments = self._index.segment_archive.segments()
        for name, until in self.source.deleted():
            if (due := self._due(segments, name)) < until:
                self._lose(name, due, until, f"{name.topic}/{name.partition}: its topic was deleted")

    def _archive(self, name: Name, until: int, *, whole: bool) -> None:
        """Archive the records of a partition up to an offset, one segment after the other, while they are due."""
        begin, end = self._next_range(self._index.segment_archive.segments(), name, until)
        if begin >= end:
            return
        self._check_log(name)  # also before the read, which is useless while topic ids can't be read
        with contextlib.closing(self._segments((name.topic, name.partition), begin, end)) as segments:
            for records, end in segments:
                self._check_log(name)
                keys, place = self.source.all_keys(), (name.topic, name.partition)
                keys_of = None if keys.function is None else keys.of
                table, notes = archived_table(place, records, keys_of), notes_of_records(keys.rules, name.topic_id)
                self._columns.send(name.store, begin, end, table, notes)
                begin = end
                if self._columns.is_full:
                    self._columns.name()
                if self._stopped.is_set() or not (whole or self._is_due(name, until)):
                    return

    def _next_range(self, segments: Segments, name: Name, until: int) -> tuple[int, int]:
        """Return the next offsets to archive. Earlier records that the broker no longer has are a loss."""
        known, place = archived_end(segments, name.store), f"{name.topic}/{name.partition}"
        due = self._due(segments, name)
        if due >= until:
            return due, until
        begin, end, _ = self.source.broker.range((name.topic, name.partition), self._stopped)
        if known is None and name.log:
            self._lose_logs_before(segments, name, place)
        if begin > due:
            self._lose(
                name, due, min(begin, until), f"{place}: offset {due:,} is next, and the log begins at {begin:,}"
            )
        # a log that was cut may end before the position
        return max(begin, due), min(until, end)

    def _lose_logs_before(self, segments: Segments, name: Name, place: str) -> None:
        positions = positions_by_store(self._index.durable_positions())
        for before in [name._replace(log=log).store for log in range(name.log)]:
            put = positions.get(before, 0)
            if (end := self._due(segments, before)) < put:
                problem = f"{place}: the log before was archived up to {end:,}, and was put up to {put:,}"
                self._lose(before, end, put, problem)

    def _lose(self, name: Name | str, begin: int, end: int, problem: str) -> None:
        """Note a loss. The index keeps its end, so that no later run notes it again."""
        self.losses.append(Loss("missing", begin, end, None, f"not archived: {problem}"))
        store = name if isinstance(name, str) else name.store
        self._passed[store] = end
        self.source.pass_over(store, end)

    def _segments(self, place: Place, begin: int, until: int) -> Generator[tuple[pa.Table, int], None, None]:
        """Yield the records of a partition, each time those of one segment and the offset behind them.

        A segment ends with messages that the client returned together, which are at most 500 and about 64 MiB.
        """
        added = RecordLists()
        with contextlib.closing(self.source.broker.messages(place, begin, until, self._stopped)) as batches:
            for batch in batches:
                added.add(batch)
                if added.size_bytes + len(added.offsets) * _RECORD_BYTES >= self.segment_bytes:
                    begin = added.offsets[-1] + 1
                    yield added.table(), begin
                    added = RecordLists()
        if begin < until:
            yield added.table(), until

    def _check_log(self, name: Name) -> None:
        """Raise `StorageUnavailable` if the log that was read may be another one than that of the position."""
        if name.topic_id and self.source.broker.topic_id(name.topic, self._stopped) != name.topic_id:
            raise StorageUnavailable(f"{name.topic}: its id is not {name.topic_id} any more, or can't be asked now")
