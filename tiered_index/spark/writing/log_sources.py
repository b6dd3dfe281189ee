"""Reads commit logs for a build: RocketMQ store directories, and ``archive:STORAGE-URI[?store=NAME]``.

One task reads one segment. Damage raises an error with file and offset, or is skipped and counted. Archived segments
are read by ranged requests, in bounded memory, and checked against their table.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import socket
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from urllib.parse import unquote

import pyarrow as pa
import pyarrow.compute as pc

from tiered_index.base.clock import SystemClock
from tiered_index.connectors.rocketmq.archive.archive import ArchivedLog, segments_by_store, trusted
from tiered_index.connectors.rocketmq.log.columns import ALL_TOPICS, Selection, SkippedRange
from tiered_index.connectors.rocketmq.log.commitlog import CommitLogReader, MissingOffsets
from tiered_index.connectors.rocketmq.log.segments import list_segments
from tiered_index.connectors.rocketmq.log.store import StoreDirectory
from tiered_index.errors import InvalidArgument
from tiered_index.service.log.log import StorageLog
from tiered_index.service.log.records import ArchivedSegment
from tiered_index.service.read.segments.archive import SegmentArchive
from tiered_index.service.read.segments.segments import Segments
from tiered_index.spark.addresses import AddressOf
from tiered_index.spark.frames import arrow_schema
from tiered_index.spark.writing.census import HAS_KEY, Census

_ARCHIVE = "archive:"
_STORE = "store="
_COLUMNS = "topic string, queue_id int, key string, offset long, size int, timestamp_ms long"
_ARROW = arrow_schema(_COLUMNS)
LOG_COLUMNS = tuple(_ARROW.names)
# The default of `ingest`, so that an audit against a store compares the same messages
_SELECTION = Selection()


def is_archive(path: str | os.PathLike[str]) -> bool:
    """Return whether a source names archived segments."""
    return os.fspath(path).startswith(_ARCHIVE)


@dataclass(frozen=True, slots=True)
class Stretch:
    """Messages that start at offsets [begin, end) of one segment of a log, in a `folder` or `archived` at `uri`.

    `gap_end`: no segment has the offsets before it, which are skipped; None: the segment has all of them.
    """

    begin: int
    end: int
    folder: str = ""
    uri: str = ""
    archived: ArchivedSegment | None = None
    gap_end: int | None = None

    @property
    def store(self) -> str:
        """The archived store; empty for a folder."""
        return "" if self.archived is None else self.archived.store


def local_stretches(folder: Path) -> list[Stretch]:
    """Return the segments of a store's folder of segments."""
    return [Stretch(segment.start, segment.end, str(folder)) for segment in list_segments(folder)]


def archived_stretches(uri: str, store: str | None, address_of: AddressOf) -> list[Stretch]:
    """Return the archived segments of a store, or of all. Raises `InvalidArgument` for none, `NotAnIndex`."""
    with address_of(uri).open() as storage:
        segments = Segments(StorageLog(storage, SystemClock()).open(), storage)
        by_store = segments_by_store(segments, () if store is None else (store,), uri)
        return [Stretch(s.start, s.end, "", uri, s) for of_store in by_store.values() for s in of_store]


@contextlib.contextmanager
def opened(
    stretch: Stretch, address_of: AddressOf, *, skip_corrupt: bool, selection: Selection = ALL_TOPICS
) -> Iterator[CommitLogReader]:
    """Yield the reader of a stretch, which checks CRCs; `selection` is that of messages. Executor.

    Raises `InvalidArgument` for a folder that is missing on this host, which would be read as an empty log.
    """
    if stretch.archived is None:
        reader = CommitLogReader(Path(stretch.folder), check_crc=True, selection=selection)
        if not stretch.begin and not reader.segments():
            raise InvalidArgument(
                f"{reader.folder} has no segment on this host ({socket.gethostname()}): local paths must lead to the "
                "same files on every executor"
            )
        yield reader
        return
    with address_of(stretch.uri).open() as storage:
        log = StorageLog(storage, SystemClock())
        archive = SegmentArchive(storage, lambda: log.state, log.open)
        yield ArchivedLog(archive, stretch.archived, skip_corrupt=skip_corrupt, selection=selection)


@dataclass(frozen=True)
class LogReader:
    """Reads the entries of stretches in tasks."""

    address_of: AddressOf
    skip_corrupt: bool

    def __call__(self, stretches: Iterable[Stretch], names: Sequence[str]) -> Iterator[pa.RecordBatch | Census]:
        """Yield the fields `names` (of `LOG_COLUMNS`) of the entries; with `HAS_KEY` also what was skipped."""
        for stretch in stretches:
            with opened(stretch, self.address_of, skip_corrupt=self.skip_corrupt, selection=_SELECTION) as reader:
                for part in _entries(reader, stretch, self.skip_corrupt):
                    if isinstance(part, pa.RecordBatch):
                        yield part.append_column(HAS_KEY, pc.is_valid(part.column("key"))).select(list(names))
                    elif HAS_KEY in names:
                        yield part


def log_stretches(paths: Sequence[str], address_of: AddressOf, *, skip_corrupt: bool = False) -> list[Stretch]:
    """Return the segments of local stores, or archived segments.

    With `skip_corrupt`, gaps between segments are parts of the stretches after them. Raises as `archived_stretches`,
    and without `skip_corrupt` as `check_gaps`.
    """
    stretches: list[Stretch] = []
    for path in paths:
        if is_archive(path):
            of_path = archived_stretches(*_archive_of(path), address_of)
        else:
            of_path = local_stretches(StoreDirectory.open(Path(path)).commitlog)
        if not skip_corrupt:
            check_gaps(path, of_path)
        gaps = {after: before.end for before, after in _gaps(of_path)}
        stretches += [
            replace(stretch, begin=gaps[stretch], gap_end=stretch.begin) if stretch in gaps else stretch
            for stretch in of_path
        ]
    return stretches


def check_gaps(path: str, stretches: Sequence[Stretch]) -> None:
    """Raise `MissingOffsets` if segments are missing between two of the same log, such as those on another disk."""
    for before, after in _gaps(stretches):
        problem = "no segment has them: those of another disk must be in the folder, and skip_corrupt leaves them out"
        raise MissingOffsets(path, problem, before.end, after.begin, is_between=True)


def _gaps(stretches: Sequence[Stretch]) -> list[tuple[Stretch, Stretch]]:
    """Return the segments before and after each gap within one log."""
    pairs = itertools.pairwise(stretches)
    return [(before, after) for before, after in pairs if before.store == after.store and before.end != after.begin]


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


def _entries(reader: CommitLogReader, stretch: Stretch, skip_corrupt: bool) -> Iterator[pa.RecordBatch | Census]:
    """Yield the entries of a stretch, and what was skipped.

    Raises `CorruptFile` unless `skip_corrupt` is True.
    """
    start, end = stretch.begin, stretch.end
    skipped: list[SkippedRange] = []
    for batch in reader.batches(start, skip_corrupt=skip_corrupt, skip_missing=skip_corrupt):
        # another task reads the bytes after the segment
        mine = [passed for passed in batch.skipped if start <= passed.begin < end]
        for passed in mine:
            # a segment that was there when the segments were listed
            if passed.is_missing and passed.end != stretch.gap_end:
                raise MissingOffsets(passed.file, passed.problem, passed.begin, passed.end)
        skipped += mine
        if batch.begin >= end:
            break
        if len(columns := trusted(batch.columns, reader)):
            cells = [columns.column(field.name).cast(field.type) for field in _ARROW]
            yield pa.RecordBatch.from_arrays(cells, schema=_ARROW)
        if batch.end >= end:
            break
    if isinstance(reader, ArchivedLog):
        skipped += reader.damaged
    joined = tuple([(passed.file, passed.begin, passed.end, passed.problem) for passed in _joined(skipped)])
    if joined:
        yield Census(
            skipped_ranges=len(joined), skipped_bytes=sum(end - begin for _, begin, end, _ in joined), skipped=joined
        )


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
