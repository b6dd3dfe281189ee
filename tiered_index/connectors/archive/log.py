"""The archived messages of one log as batches of entries, from which `ingest archive:URI` makes an index again, and
their copies in the archive of that index.

There is one reader for all columnar archives. A connector whose index says more about a log derives its own. One
thread. Memory: one file.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc
from msgspec import structs

from tiered_index.connectors.archive.archiver import ColumnArchiver
from tiered_index.connectors.archive.columns import ArchivedTable, ArchiveFormat, entries_of
from tiered_index.connectors.registry import CONNECTORS
from tiered_index.connectors.source import Loss
from tiered_index.errors import CorruptFile, InvalidArgument, RootBehind, StorageBehind
from tiered_index.format.names import queue_id_of_store, topic_of_store
from tiered_index.format.segments.columnar import NUMBER
from tiered_index.service.index import IndexService
from tiered_index.service.log.records import ArchivedSegment
from tiered_index.service.read.segments.archive import SegmentArchive
from tiered_index.service.reader import IndexReader
from tiered_index.types import inclusive


@dataclass(frozen=True)
class ArchivedFile:
    """An archived file of a log.

    - `segment`: the segment of the file.
    - `file`: its bytes; empty if not all of its records are read.
    - `table`: the records that are read, and the notes.
    - `entries`: an entry for each key of each of these records, as columns of a batch.
    """

    segment: ArchivedSegment
    file: bytes
    table: ArchivedTable
    entries: pa.RecordBatch


class ArchivedBatch(NamedTuple):
    """The entries of one archived file: columns of a batch, and the number of `messages`. `end`: where to continue.

    `skipped` are ranges of offsets before `end` that are missing or damaged. `whole` is the file, unless it is damaged.
    """

    columns: Any
    end: int
    messages: int
    skipped: tuple[Loss, ...]
    whole: ArchivedFile | None = None


@dataclass(frozen=True)
class ColumnLog:
    """The archived messages of one log.

    - `form`: the form of its files.
    - `archive`: the archive of the index.
    - `store`: the name of the log's store.
    - `takes`: returns whether the messages of a topic are read.
    """

    form: ArchiveFormat
    archive: SegmentArchive
    store: str
    takes: Callable[[str], bool]

    has_sizes = True
    """Whether the sizes of entries are those that the archive has."""

    @cached_property
    def segments(self) -> Sequence[ArchivedSegment]:
        """The segments of the log."""
        return list(self.archive.segments().of(self.store))

    @property
    def place(self) -> tuple[str | None, int]:
        """The topic (None: many) and the queue of the messages."""
        return topic_of_store(self.store), queue_id_of_store(self.store)

    @property
    def is_left_out(self) -> bool:
        """Whether the index has entries of the log, and no archived message: these entries are left out."""
        return not self.segments

    @property
    def source(self) -> str:
        """The name of the log's position, in the index and in one that is made of the archive."""
        return self.store

    @property
    def positions(self) -> Mapping[str, int]:
        """The positions that say how the messages were indexed, for an index of the same messages."""
        return {}

    @property
    def rules(self) -> Collection[str]:
        """The rules of keys that the index has of the log: see `ArchiveFormat.keys`."""
        return ()

    @property
    def expired(self) -> int | None:
        """The offset before which the messages have expired, also in an index of the archive; None: none has."""
        return self.archive.state().expired.segments.get(self.store)

    @property
    def begin(self) -> int:
        """The offset at which the messages begin."""
        return next((segment.start for segment in self.segments), 0)

    def check(self, *, skip_missing: bool) -> None:
        """Raise `InvalidArgument`, before an index is made, if messages are missing that can't be skipped."""

    def link(self, index: IndexService) -> None:
        """Add to an index, before the entries, what their messages need beside the archive."""

    def missing(self, position: int, *, skip_missing: bool) -> list[Loss]:
        """Return the ranges of messages from a position on that no segment has, by their begins.

        Raises `CorruptFile` if there are any, unless `skip_missing`.
        """
        losses = []
        for segment in self.segments:
            if position < segment.start:
                problem = f"no archived file has offsets {inclusive(position, segment.start)} of {self.store}"
                if not skip_missing:
                    raise CorruptFile(segment.name, problem)
                losses.append(Loss("missing", position, segment.start, None, problem, topic=segment.topic))
            position = max(position, segment.end)
        return losses

    def keys_at_least(self, table: ArchivedTable) -> pa.ListArray:
        """Return those keys of the records of a file that are known, if not all are."""
        keys: pa.ListArray = table.records["keys"].combine_chunks()
        return keys

    def batches(
        self, position: int | None, *, skip_corrupt: bool = False, skip_missing: bool = False
    ) -> Iterator[ArchivedBatch]:
        """Yield the entries of each file from a position on (None: from the begin).

        Raises as `missing`, and `CorruptFile` at a damaged file; with `skip_missing` and `skip_corrupt` these are
        `skipped` instead. Raises `InvalidArgument` if not all keys of a file are known, unless `skip_missing`.
        """
        reached = self.begin if position is None else position
        missing = deque(self.missing(reached, skip_missing=skip_missing))
        for segment in self.segments:
            if segment.end <= reached:
                continue
            begin, skipped, whole = max(reached, segment.start), list[Loss](), None
            while missing and missing[0].begin < begin:
                skipped.append(missing.popleft())
            try:
                whole, lack = self._read(segment, skip_missing=skip_missing)
                if lack:
                    skipped.append(Loss("missing", begin, segment.end, None, lack, topic=segment.topic))
            except (StorageBehind, RootBehind):
                raise
            except CorruptFile as error:
                if not skip_corrupt:
                    raise
                begin_ms, end_ms = segment.times or (0, None)
                of_times: dict[str, Any] = {"begin_ms": begin_ms, "end_ms": end_ms, "topic": segment.topic}
                skipped.append(Loss("corrupt", begin, segment.end, None, str(error), **of_times))
            if whole is None:
                yield ArchivedBatch(self._nothing, segment.end, 0, tuple(skipped))
            else:
                columns = whole.entries.filter(pc.greater_equal(whole.entries["offset"], begin))
                messages = pc.sum(pc.greater_equal(whole.table.records[NUMBER], begin)).as_py() or 0
                yield ArchivedBatch(columns, segment.end, messages, tuple(skipped), whole)
            reached = segment.end
        if missing:
            yield ArchivedBatch(self._nothing, reached, 0, tuple(missing))

    @property
    def _nothing(self) -> pa.RecordBatch:
        return entries_of(self.form, self.form.schema.empty_table())

    def _read(self, segment: ArchivedSegment, *, skip_missing: bool) -> tuple[ArchivedFile, str | None]:
        """Return the file of a segment, and what its entries lack (None: nothing). Raises as `batches`."""
        file, lack = self.archive.verified(segment, 0, segment.size_bytes), None
        table = self.form.decode(file, segment.name)
        topics = table.records["topic"].unique().to_pylist()
        if (taken := [topic for topic in topics if self.takes(topic)]) != topics:
            records = table.records.filter(pc.is_in(table.records["topic"], pa.array(taken, pa.string())))
            file, table = b"", table._replace(records=records)
        # also keys that were added later
        keys = self.form.keys_of(table, self.rules)
        if isinstance(keys, str):
            lack = f"{segment.name} {keys}"
            if not skip_missing:
                raise InvalidArgument(
                    f"{lack}: ingest its rows as Parquet, by --key; --skip-missing indexes it without these keys"
                )
            keys = self.keys_at_least(table)
        # an entry of a record without a time gets that of its upload
        entries = entries_of(self.form, table.records, keys, self.place[1], segment.published_ms)
        return ArchivedFile(segment, file, table, entries), lack


def logs_of(form: ArchiveFormat, scheme: str, archive: SegmentArchive, takes: Callable[[str], bool]) -> list[ColumnLog]:
    """Return the logs of a connector, also those of which no message is archived: `Connector.archived_logs`.

    `scheme` begins the names of its stores. Its positions have the same names.
    """
    state = archive.state()
    put = {name for name, at in state.positions.items() if at > state.expired.segments.get(name, 0)}
    stores = {store for store in {*put, *archive.segments().stores} if store.startswith(scheme)}
    return [ColumnLog(form, archive, store, takes) for store in sorted(stores)]


def logs_of_index(reader: IndexReader, takes: Callable[[str], bool]) -> dict[str, ColumnLog]:
    """Return the logs of columnar archives in an index, by their stores, and those of which it has only entries.

    `takes` returns whether the messages of a topic are asked for. Raises `ConfigError` if their connector is not
    installed.
    """
    known = reader.segments()
    packages = {document.connector: document.package for document in reader.topic_documents().values()}
    names = {*packages}
    for store in known.stores:
        if store not in known.byte_stores and ((topic := topic_of_store(store)) is None or takes(topic)):
            # also without a document, which may have been lost with a root
            name = CONNECTORS.of_store(store)
            names.add(CONNECTORS.spec(name, packages.get(name, "")).name)
    logs: dict[str, ColumnLog] = {}
    for name in sorted(filter(CONNECTORS.has, names)):
        if (of_connector := getattr(CONNECTORS.connector(name), "archived_logs", None)) is not None:
            logs |= {log.store: log for log in of_connector(reader.segment_archive, takes)}
    return logs


class ColumnCopies:
    """Copies archived files into the archive of another index, many by one log record. One thread.

    Messages at an offset that the index has archived are not copied again. Methods raise as
    `IndexService.archive_columns`.
    """

    def __init__(self, index: IndexService) -> None:
        self._index = index
        # by the notes of their forms
        self._archivers: dict[str, ColumnArchiver] = {}
        self.messages = 0
        """The number of messages that were copied."""

    def add(self, form: ArchiveFormat, whole: ArchivedFile, erased: npt.NDArray[np.bool_]) -> None:
        """Send a copy of a file without the records of which `erased` is true. `name` adds it to the archive."""
        archiver = self._archivers.setdefault(form.note, ColumnArchiver(self._index, form))
        segment, records, file = whole.segment, whole.table.records, whole.file
        begin = max(archiver.end(segment.store), segment.start)
        if begin >= segment.end:
            return
        if erased.any():
            segment = structs.replace(segment, source=segment.source or (segment.crc32, segment.head_crc32))
        if erased.any() or begin > segment.start or not file:
            records = records.filter(pa.array((records[NUMBER].to_numpy() >= begin) & ~erased))
            file = form.encode(records, whole.table.notes)
        if archiver.send(segment.store, begin, segment.end, records, file=file, copied=segment):
            self.messages += len(records)

    @property
    def can_wait(self) -> bool:
        """Whether copies wait for `name`, and more may."""
        archivers = self._archivers.values()
        return any(archiver.waits for archiver in archivers) and not any(archiver.is_full for archiver in archivers)

    def name(self) -> None:
        """Add all copies that were sent to the archive."""
        for archiver in self._archivers.values():
            archiver.name()
