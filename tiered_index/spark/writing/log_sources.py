"""Reads commit logs for a build: RocketMQ store directories, and ``archive:STORAGE-URI[?store=NAME]``.

One task reads one segment. Damage raises an error with file and offset, or is skipped: rows with only `SKIPPED` report
it. Archived segments are read by ranged requests, in bounded memory, and checked against their table.
"""

from __future__ import annotations

import json
import os
import socket
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import unquote

import pyarrow as pa

from tiered_index.clock import SystemClock
from tiered_index.errors import InvalidArgument
from tiered_index.rocketmq.archive.archive import ArchivedLog, segments_by_store, trusted
from tiered_index.rocketmq.log.columns import Selection, SkippedRange
from tiered_index.rocketmq.log.commitlog import CommitLogReader, MissingOffsets
from tiered_index.rocketmq.log.store import StoreDirectory
from tiered_index.service.jobs.segment_archive import SegmentArchive
from tiered_index.service.log.log import StorageLog
from tiered_index.service.log.records import ArchivedSegment
from tiered_index.service.read.segments import Segments
from tiered_index.spark.addresses import AddressOf
from tiered_index.spark.frames import arrow_schema, each_split, frame_of_splits
from tiered_index.storage.base import Storage
from tiered_index.stored import typed

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

# Column of skipped ranges: a JSON list of file, first offset, end and problem. The other columns of such rows are null.
SKIPPED = "tiered_index_skipped"
_ARCHIVE = "archive:"
_STORE = "store="
_COLUMNS = f"topic string, queue_id int, key string, offset long, size int, timestamp_ms long, {SKIPPED} string"
_ARROW = arrow_schema(_COLUMNS)
LOG_COLUMNS = tuple(_ARROW.names)
# The default of `ingest`, so that an audit against a store compares the same messages
_SELECTION = Selection()


def is_archive(path: str | os.PathLike[str]) -> bool:
    """Return whether a source names archived segments."""
    return os.fspath(path).startswith(_ARCHIVE)


@dataclass(frozen=True, slots=True)
class LogEntries:
    """The entries of commit logs: segments, one to a partition, and the function with which tasks read them.

    Its columns are `LOG_COLUMNS`.
    """

    segments: DataFrame
    read: Callable[[Iterable[pa.RecordBatch]], Iterator[pa.RecordBatch]]


def log_entries(spark: SparkSession, stores: Sequence[StoreDirectory], skip_corrupt: bool) -> LogEntries:
    """Return the entries of local stores."""
    folders = [store.commitlog for store in stores]
    splits = [[str(f), segment.start, segment.end] for f in folders for segment in CommitLogReader(f).segments()]
    return LogEntries(frame_of_splits(spark, splits), partial(_read_local, skip_corrupt=skip_corrupt))


def archive_entries(
    spark: SparkSession, sources: Sequence[str], address_of: AddressOf, skip_corrupt: bool
) -> LogEntries:
    """Return the entries of archived segments. Raises `InvalidArgument` for none, `NotAnIndex`, as the storage."""
    splits: list[list[Any]] = []
    for source in sources:
        uri, store = _archive_of(source)
        with address_of(uri).open() as storage:
            segments = Segments(StorageLog(storage, SystemClock()).open(), storage)
            splits += [[uri, segment.to_json()] for segment in archived_segments(segments, store, uri)]
    read = partial(_read_archived, address_of=address_of, skip_corrupt=skip_corrupt)
    return LogEntries(frame_of_splits(spark, splits), read)


def archived_segments(segments: Segments, store: str | None, where: str) -> list[ArchivedSegment]:
    """Return the segments that an index has archived, of one store or all. Raises `InvalidArgument` for none."""
    by_store = segments_by_store(segments, () if store is None else (store,), where)
    return [segment for of_store in by_store.values() for segment in of_store]


def _archive_of(source: str) -> tuple[str, str | None]:
    """Return the storage's URI and the store, None for all."""
    place, _, query = source.removeprefix(_ARCHIVE).partition("?")
    if "://" not in place:
        form = "archive:STORAGE-URI[?store=NAME], archive:s3://bucket/index"
        raise InvalidArgument(f"archived segments are given as {form}, not {source}")
    parameters = [part for part in query.split("&") if part]
    stores = [unquote(part.removeprefix(_STORE)) for part in parameters if part.startswith(_STORE)]
    if len(stores) > 1 or stores == [""]:
        raise InvalidArgument(f"{source}: give store= once, with a name")
    rest = "&".join(part for part in parameters if not part.startswith(_STORE))
    return place + ("?" + rest if rest else ""), stores[0] if stores else None


def _read_local(batches: Iterable[pa.RecordBatch], skip_corrupt: bool) -> Iterator[pa.RecordBatch]:
    for folder, start, end in each_split(batches):
        reader = CommitLogReader(Path(folder), check_crc=True, selection=_SELECTION)
        check_is_here(reader, start)
        yield from _entries(reader, start, end, skip_corrupt)


def check_is_here(reader: CommitLogReader, start: int) -> None:
    """Raise `InvalidArgument` if a reader would take a folder that is missing on this host for an empty log."""
    if not start and not reader.segments():
        raise InvalidArgument(
            f"{reader.folder} has no segment on this host ({socket.gethostname()}): local paths must lead to the same "
            "files on every executor"
        )


def _read_archived(
    batches: Iterable[pa.RecordBatch], address_of: AddressOf, skip_corrupt: bool
) -> Iterator[pa.RecordBatch]:
    for uri, document in each_split(batches):
        segment = typed(document, ArchivedSegment)
        with address_of(uri).open() as storage:
            log = ArchivedLog(archive_in(storage), segment, skip_corrupt=skip_corrupt, selection=_SELECTION)
            yield from _entries(log, segment.start, segment.end, skip_corrupt)


def archive_in(storage: Storage) -> SegmentArchive:
    """Return the segment archive of an index's storage."""
    log = StorageLog(storage, SystemClock())
    return SegmentArchive(storage, lambda: log.state, log.open)


def _entries(reader: CommitLogReader, start: int, end: int, skip_corrupt: bool) -> Iterator[pa.RecordBatch]:
    """Yield the entries of the segment [start, end). Raises `CorruptFile` unless `skip_corrupt` is True."""
    skipped: list[SkippedRange] = []
    for batch in reader.batches(start, skip_corrupt=skip_corrupt, skip_missing=skip_corrupt):
        # another task reads the bytes after the segment
        mine = [passed for passed in batch.skipped if start <= passed.begin < end]
        for passed in mine:
            if passed.file == str(reader.folder):
                raise MissingOffsets(passed.file, passed.problem, passed.begin, passed.end)
        skipped += mine
        if batch.begin >= end:
            break
        if len(columns := trusted(batch.columns, reader)):
            cells = [columns.column(field.name).cast(field.type) for field in [*_ARROW][:-1]]
            yield pa.RecordBatch.from_arrays([*cells, pa.nulls(len(columns), pa.string())], schema=_ARROW)
        if batch.end >= end:
            break
    if isinstance(reader, ArchivedLog):
        skipped += reader.damaged
    if skipped:
        told = [json.dumps([one.file, one.begin, one.end, one.problem]) for one in _joined(skipped)]
        columns = [pa.nulls(len(told), kind) for kind in _ARROW.types[:-1]]
        yield pa.RecordBatch.from_arrays([*columns, pa.array(told, pa.string())], schema=_ARROW)


def _joined(ranges: Sequence[SkippedRange]) -> list[SkippedRange]:
    """Return ranges of one segment in order, with overlapping ones joined."""
    joined: list[SkippedRange] = []
    for passed in sorted(ranges, key=lambda passed: passed.begin):
        if joined and passed.begin < joined[-1].end:
            last = joined[-1]
            joined[-1] = SkippedRange(last.begin, max(last.end, passed.end), last.problem, last.file)
        else:
            joined.append(passed)
    return joined
