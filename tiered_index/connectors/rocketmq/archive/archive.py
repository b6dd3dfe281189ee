"""Archives a store's closed commit log segments in the index's storage, and reads them as if they were local.

A segment is closed when a later one has data: the broker makes the next file in advance. With a follower, only segments
that it has put are archived, because unread ones may still be rewritten. Archived segments are read in whole pieces,
each checked. Their entries are those that a follower puts. Memory: some chunks of 16 MiB. One thread uses a
`SegmentArchiver` or an `ArchivedLog`; `stop`, `archived` and `losses`: any.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache, partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from tiered_index.base.call import check_deadline
from tiered_index.connectors.archive.log import ArchivedBatch
from tiered_index.connectors.rocketmq.follow.dispatcher import Dispatcher
from tiered_index.connectors.rocketmq.log.columns import (
    ALL_TOPICS,
    IndexBatch,
    MessageColumns,
    Selection,
    SkippedRange,
    decode_index_columns,
)
from tiered_index.connectors.rocketmq.log.commitlog import CommitLogReader, MissingOffsets
from tiered_index.connectors.rocketmq.log.layout import BLANK_BYTES
from tiered_index.connectors.rocketmq.log.message import HEAD_BYTES
from tiered_index.connectors.rocketmq.log.segments import Segment, list_segments, local_errors, pread, segment_name
from tiered_index.connectors.rocketmq.log.store import SOURCE_PREFIX
from tiered_index.connectors.source import Loss
from tiered_index.errors import CorruptFile, InvalidArgument, RootBehind, StorageBehind, StorageUnavailable
from tiered_index.format.names import ROWS
from tiered_index.format.segments.queue_offsets import ENTRY, encode_queues
from tiered_index.format.segments.segment import Times, times_of
from tiered_index.service.index import IndexService
from tiered_index.service.log.records import ArchivedSegment
from tiered_index.service.log.state import LogState
from tiered_index.service.read.segments.archive import SegmentArchive
from tiered_index.service.read.segments.segments import Segments

Stamp = tuple[int, ...]
# The place of the queue offset in a message.
# Selects no topic, so that no keys are decoded
_NO_KEYS = Selection(exclude=("*",))


class _Stopped(StorageUnavailable):
    """`stop` was called during a round."""


def closed_segments(folder: Path) -> tuple[Segment, ...]:
    """Return the segments that the broker has finished, oldest first."""
    segments = list_segments(folder)
    for last in range(len(segments) - 1, 0, -1):
        try:
            if pread(segments[last].path, BLANK_BYTES, 0).strip(b"\0"):
                return segments[:last]
        except FileNotFoundError:
            continue  # deleted since the folder was read
    return ()


def segments_by_store(known: Segments, stores: Sequence[str], where: str) -> dict[str, list[ArchivedSegment]]:
    """Return the archived segments of each of `stores`, without any of every store. Raises `InvalidArgument` for none.

    `where` names the index in errors.
    """
    if not known.byte_stores:
        begins = {"rows of files": ROWS, "Kafka's records": "kafka:"}
        for kind in (kind for kind, begin in begins.items() if any(name.startswith(begin) for name in known.stores)):
            raise InvalidArgument(
                f"{where} has no archived segments of a RocketMQ store, but {kind}: `ingest archive:URI` makes an "
                f"index of them"
            )
    if unknown := [name for name in stores if name not in known.byte_stores]:
        names = ", ".join(map(repr, known.byte_stores)) or "none"
        raise InvalidArgument(f"{where} has no archived segments of store {unknown[0]!r}; stores with some: {names}")
    if not known.byte_stores:
        raise InvalidArgument(f"{where} has no archived segments: `ingest --archive-segments` makes them")
    return {name: list(known.of(name)) for name in stores or known.byte_stores}


class SegmentArchiver:
    """Archives the closed segments in `commitlog_folder` as those of the store `store_name`.

    Every store of an index has its own name. With `skip_corrupt` a segment that can't be archived is a loss instead of
    an error, and is skipped until its file changes. `dispatcher` is the follower of this store, if any; without it
    every closed segment is archived. With `queues` a segment is archived with its queue offsets, unless it is damaged.
    """

    def __init__(
        self,
        index: IndexService,
        store_name: str,
        commitlog_folder: Path,
        *,
        skip_corrupt: bool = False,
        dispatcher: Dispatcher | None = None,
        queues: bool = False,
    ) -> None:
        self.index = index
        self._queues = queues
        self.store_name = store_name
        self.folder = commitlog_folder
        # Number of segments archived so far, also by a round under way
        self.archived = 0
        self.skip_corrupt = skip_corrupt
        self._dispatcher = dispatcher
        # Segments that were skipped, in order of detection; append-only
        self.losses: list[Loss] = []
        self._passed_over: dict[int, tuple[Stamp, Loss]] = {}  # skipped segments, with the stamp of the corrupt file
        self._done: dict[int, Stamp] = {}  # archived segments, with the stamp of the file that was archived
        self._stopped = threading.Event()

    @property
    def passed_over(self) -> tuple[Loss, ...]:
        """The losses of skipped segments that the store still has."""
        return tuple(loss for _, loss in self._passed_over.copy().values())

    def stop(self) -> None:
        """Make the round under way end soon, within a segment, and later rounds at once. Any thread."""
        self._stopped.set()

    def run_once(self) -> int:
        """Archive the closed segments that are not archived yet; return their number.

        A segment that was cut short, or differs from its archived copy, is a `CorruptFile`. Unless `skip_corrupt` is
        set, the first one is raised after all segments were tried. Raises `StorageUnavailable`, `StorageMisconfigured`,
        `WriterFenced`, `StorageBehind` and `RootBehind` at once. You may call it again after any error.
        """
        before = self.archived
        first: CorruptFile | None = None
        segments = self._settled()
        self._lose_deleted(segments)
        # an archived segment that was given up is archived again
        archived = self.index.segments()
        there = {segment.start for segment in segments if archived.at(self.store_name, segment.start) is not None}
        expired = self.index.expired.segments.get(self.store_name, 0)
        done = [s.start for s in segments if s.start in there or s.end <= expired]
        self._done = {start: self._done[start] for start in done if start in self._done}
        self._passed_over = {s.start: self._passed_over[s.start] for s in segments if s.start in self._passed_over}
        for segment in segments:
            if self._stopped.is_set():
                break
            try:
                self.archived += self._archive(segment)
            except _Stopped:
                break
            except FileNotFoundError:
                continue  # the broker deleted it
            except (StorageBehind, RootBehind):  # no damage of a segment, which would be skipped
                raise
            except CorruptFile as error:
                if self.skip_corrupt:
                    self._pass_over(segment, error)
                else:
                    first = first or error
        if first is not None:
            raise first
        return self.archived - before

    finish = run_once

    def _settled(self) -> list[Segment]:
        """Return the closed segments that the follower has put, oldest first."""
        taken = 2**63 - 1 if self._dispatcher is None else self._dispatcher.settled_before
        return [segment for segment in closed_segments(self.folder) if segment.end <= taken]

    def _lose_deleted(self, segments: Sequence[Segment]) -> None:
        """Note the segments between the last archived one and `segments`: the broker deleted them before."""
        if not segments or segments[0].start in self._done:
            return
        begin = self.index.segments().end(self.store_name) or segments[0].start
        begin = max(begin, self.index.expired.segments.get(self.store_name, 0))
        problem = "not archived: the broker deleted them before"
        loss = Loss("missing", begin, segments[0].start, None, problem)
        if begin < segments[0].start and loss not in self.losses:
            self.losses.append(loss)

    def _pass_over(self, segment: Segment, error: CorruptFile) -> None:
        loss = Loss("corrupt", segment.start, segment.end, None, f"not archived: {error}")
        self.losses.append(loss)
        with contextlib.suppress(FileNotFoundError):  # the broker deleted it
            self._passed_over[segment.start] = (*_stamp(segment.path), self._rewritten_ms(segment) or 0), loss

    def _archive(self, segment: Segment) -> bool:
        rewritten_ms = self._rewritten_ms(segment)
        stamp = _stamp(segment.path)
        seen = (*stamp, rewritten_ms or 0)
        if self._done.get(segment.start) == seen:
            return False
        if segment.start in self._passed_over and self._passed_over[segment.start][0] == seen:
            return False
        if segment.file_size < segment.end - segment.start:
            whole, problem = segment.end - segment.start, "was cut short and is not archived"
            raise CorruptFile(str(segment.path), problem, expected=whole, found=segment.file_size)

        def read(position: int, length: int) -> bytes:
            if self._stopped.is_set():
                raise _Stopped(f"{segment.path}: stopped while it was archived")
            data = pread(segment.path, length, position)
            # a round may be long: the broker may have cut its log within this segment since it began
            is_last = position + len(data) == segment.file_size
            if is_last and (_stamp(segment.path) != stamp or segment not in self._settled()):
                raise StorageUnavailable(f"{segment.path} was changed while it was read; try again")
            return data

        # one reading of the messages for both
        facts = cache(partial(segment_facts, segment.start, segment.file_size, read, queues=self._queues))
        fresh = self.index.archive(
            self.store_name,
            segment.start,
            segment.file_size,
            read,
            stamp[1] // 1_000_000,
            rewritten_ms,
            (lambda: facts().queues) if self._queues else None,
            lambda: (facts().rows, facts().times),
        )
        self._done[segment.start] = seen
        self._passed_over.pop(segment.start, None)
        return fresh

    def _rewritten_ms(self, segment: Segment) -> int | None:
        if self._dispatcher is None:
            return None
        return self._dispatcher.fingerprints.rewritten_ms(segment.start, segment.end)


def _stamp(path: Path) -> Stamp:
    with local_errors(path):
        status = path.stat()
    return status.st_size, status.st_mtime_ns, status.st_ctime_ns, status.st_ino


class _Messages(NamedTuple):
    """Successive messages of a segment. `numbers` has the place of each topic in `topics`, `end` is behind them."""

    columns: MessageColumns
    topics: list[str]
    numbers: npt.NDArray[np.int32]
    end: int


def _sound_messages(segment: Segment, begin: int) -> Iterator[_Messages]:
    """Yield the messages of a segment from offset `begin` on. Raises `CorruptFile`, and the errors of reading."""
    log = CommitLogReader(segment.path.parent, selection=_NO_KEYS, fixed=(segment,))
    for batch in log.batches(begin):
        check_deadline(f"reading the messages of {segment.path.name}")
        columns = batch.message_columns()
        topics, topic_numbers = columns.topics()
        if columns.count < len(batch.positions):
            raise CorruptFile(str(segment.path), "a message is damaged", offset=batch.begin - segment.start)
        yield _Messages(columns, topics, topic_numbers, batch.end)


class QueueScan:
    """The queue offsets of the visible messages of one segment, read from the messages themselves.

    `begin` is the segment's offset; `end` is the offset behind the last message. One thread.
    """

    def __init__(self, begin: int) -> None:
        self.begin = self.end = begin
        self._names: dict[str, int] = {}
        # for each batch: indices of topics, queue ids, queue offsets, entries
        self._parts = [tuple(np.zeros(0, kind) for kind in (np.int32, np.int32, np.int64, ENTRY))]

    def read_on(self, segment: Segment) -> None:
        """Read the messages from `end` on. Raises `CorruptFile` for damage, and the errors of reading."""
        for messages in _sound_messages(segment, self.end):
            self.add(messages)

    def add(self, messages: _Messages) -> None:
        """Take the next messages."""
        columns = messages.columns
        # the broker's queues have no other messages
        shown = columns.is_in_queue
        head, places = columns.head[shown], columns.positions[shown]
        numbers = np.array([self._names.setdefault(name, len(self._names)) for name in messages.topics], np.int32)
        queue_offset = columns.queue_offsets()[shown]
        entries = np.empty(len(places), ENTRY)
        entries["position"] = head["physical_offset"] - self.begin
        entries["size"], entries["store_ms"] = head["size"], head["store_ms"]
        self._parts.append((numbers[messages.numbers[shown]], head["queue_id"], queue_offset, entries))
        self.end = messages.end

    def is_of(self, segment: Segment) -> bool:
        """Return whether the last message that was read is still there, and forget it: it may have been half written.

        A broker that cut its log writes others from there on.
        """
        self._parts = [tuple(map(np.concatenate, zip(*self._parts, strict=True)))]
        topic, queue_id, queue_offset, entries = self._parts[0]
        if not len(entries):
            return self.end == self.begin
        last = entries[-1]
        at = int(last["position"])
        head = segment.read(HEAD_BYTES, at)
        self.end = self.begin + at
        self._parts = [(topic[:-1], queue_id[:-1], queue_offset[:-1], entries[:-1])]
        wanted = (int(last["size"]), int(queue_offset[-1]))
        return (int.from_bytes(head[:4], "big"), int.from_bytes(head[20:28], "big")) == wanted

    def encoded(self) -> bytes:
        """Return the queue offsets, as in an archived segment."""
        self._parts = [tuple(map(np.concatenate, zip(*self._parts, strict=True)))]
        return encode_queues(self.begin, list(self._names), *self._parts[0])


class SegmentFacts(NamedTuple):
    """The encoded queue offsets of a segment (empty: unknown), the number of its messages, and their times.

    Messages that are prepared or rolled back count, too. `rows` and `times` as in `ArchivedSegment`.
    """

    queues: bytes = b""
    rows: int | None = None
    times: Times | None = None


def segment_facts(
    start: int, size_bytes: int, read: Callable[[int, int], bytes], *, queues: bool = True
) -> SegmentFacts:
    """Return the facts of a segment that begins at `start`, with or without `queues`. Those of a damaged one are empty.

    The facts of a damaged segment would lack messages. `read(position, length)` returns bytes; its errors are raised.
    """
    name = Path(segment_name(start))
    segment = Segment(name, start, size_bytes, start + size_bytes, lambda length, position: read(position, length))
    scan, end, rows, bounds = QueueScan(start), start, 0, list[int]()
    try:
        for messages in _sound_messages(segment, start):
            end, rows = messages.end, rows + messages.columns.count
            if messages.columns.count:
                store_ms = messages.columns.head["store_ms"]
                bounds += int(store_ms.min()), int(store_ms.max())
            if queues:
                scan.add(messages)
    except CorruptFile:
        return SegmentFacts()
    if end < segment.end:
        return SegmentFacts()
    has_queues = queues and size_bytes <= 0xFFFFFFFF
    return SegmentFacts(scan.encoded() if has_queues else b"", rows, times_of(np.array(bounds, np.int64)))


class ArchivedLog(CommitLogReader):
    """The log of one archived segment, read in whole pieces, with checks of the bodies' CRC.

    A piece that does not match its CRC32 is `CorruptFile`. With `skip_corrupt` it reads as bytes that no message has,
    and `damaged` has its range: do not trust a message that overlaps it.
    """

    def __init__(
        self,
        archive: SegmentArchive,
        segment: ArchivedSegment,
        *,
        skip_corrupt: bool = False,
        chunk_bytes: int = 1 << 24,
        selection: Selection = ALL_TOPICS,
    ) -> None:
        """Fetch the table of pieces. Raises `CorruptFile` if it contradicts the log, and the storage's errors."""
        path = Path(segment.name)
        fixed = (Segment(path, segment.start, segment.size_bytes, segment.end, self._read),)
        super().__init__(path.parent, chunk_bytes, check_crc=True, selection=selection, fixed=fixed)
        self.damaged: list[SkippedRange] = []
        self._archive, self._segment, self._skip_corrupt = archive, segment, skip_corrupt
        self._table = archive.table(segment)
        # The last piece of the last read, in which the next read usually begins
        self._held: tuple[int, bytes] = (-1, b"")

    def _read(self, size_bytes: int, position: int) -> bytes:
        """Return bytes of the segment from checked pieces."""
        length = self._table.piece_bytes
        first, last = position // length, (position + size_bytes - 1) // length
        held, data = self._held
        begin = first
        if held == first:
            first += 1
        else:
            data = b""
        if first <= last:
            parts = [data, *self._fetched(first, last)]
            self._held = last, parts[-1]
            data = b"".join(parts)
        at = position - begin * length
        return data[at : at + size_bytes]

    def _fetched(self, first: int, last: int) -> list[bytes]:
        """Return the pieces `first` to `last`, by one request."""
        length, segment = self._table.piece_bytes, self._segment
        begin, end = first * length, min((last + 1) * length, segment.size_bytes)
        data = self._archive.read(segment, begin, end - begin)
        pieces = [data[at : at + length] for at in range(0, len(data), length)]
        for error in self._table.damage(segment.name, begin, data):
            if not self._skip_corrupt:
                raise error
            at = error.offset or 0
            number = (at - begin) // length
            pieces[number] = b"\xff" * len(pieces[number])
            at += segment.start
            damage = SkippedRange(at, at + len(pieces[number]), error.problem, segment.name)
            if damage not in self.damaged:
                self.damaged.append(damage)
        return pieces


def archived_batches(
    archive: SegmentArchive,
    segments: Sequence[ArchivedSegment],
    position: int | None,
    selection: Selection,
    *,
    skip_corrupt: bool = False,
    skip_missing: bool = False,
) -> Iterator[IndexBatch]:
    """Yield the entries of one store's segments from a position of its log (None: from the first segment).

    Raises `CorruptFile` at damage and `MissingOffsets` at a missing segment. With `skip_corrupt` and `skip_missing` the
    next batch has the `skipped` range instead. Messages that overlap a damaged piece are skipped.
    """
    missing: tuple[SkippedRange, ...] = ()
    for segment in segments:
        if position is not None and segment.end <= position:
            continue
        begin = segment.start if position is None else max(position, segment.start)
        if position is not None and begin > position:
            gap = MissingOffsets(segment.name, "no archived segment has them", position, begin)
            if not skip_missing:
                raise gap
            missing = (SkippedRange(position, begin, gap.problem, gap.file, is_missing=True),)
        position = begin
        try:
            log = ArchivedLog(archive, segment, skip_corrupt=skip_corrupt, selection=selection)
            for batch in log.batches(begin, skip_corrupt=skip_corrupt):
                skipped = missing + tuple(_with_cause(gap, log.damaged) for gap in batch.skipped)
                yield replace(batch, columns=trusted(batch.columns, log), skipped=skipped)
                missing, position = (), batch.end
                if batch.end >= segment.end:
                    break
        except (StorageBehind, RootBehind):
            raise
        except CorruptFile as error:
            # the object is gone, or its table is damaged
            if not skip_corrupt:
                raise
            rest = SkippedRange(position, segment.end, error.problem, segment.name)
            yield replace(decode_index_columns(b"", segment.end), skipped=(*missing, rest))
            missing = ()
        position = segment.end


def _with_cause(skipped: SkippedRange, damaged: Sequence[SkippedRange]) -> SkippedRange:
    """Return a range that has no readable message with the problem of the damaged piece there."""
    causes = (piece.problem for piece in damaged if piece.begin < skipped.end and piece.end > skipped.begin)
    return replace(skipped, problem=next(causes, skipped.problem))


def trusted(columns: Any, log: CommitLogReader) -> Any:
    """Return the rows whose messages do not overlap a damaged piece of the archived segment."""
    if len(columns) and isinstance(log, ArchivedLog) and log.damaged:
        begin = columns.column("offset").to_numpy()
        end = begin + columns.column("size").to_numpy()
        bad = np.zeros(len(begin), np.bool_)
        for piece in log.damaged:
            bad |= (begin < piece.end) & (end > piece.begin)
        columns = columns.filter(pa.array(~bad))
    return columns


def stores_of_entries(state: LogState) -> set[str]:
    """Return the stores of which an index has entries that have not expired."""
    of_stores = {
        name.removeprefix(SOURCE_PREFIX): at for name, at in state.positions.items() if name.startswith(SOURCE_PREFIX)
    }
    return {store for store, at in of_stores.items() if at > state.expired.segments.get(store, 0)}


@dataclass(frozen=True)
class StoreLog:
    """The archived segments of a store's log, as `ColumnLog` is those of other logs."""

    archive: SegmentArchive
    store: str
    segments: Sequence[ArchivedSegment]
    selection: Selection

    form = None
    place = None
    has_sizes = True
    expired = None

    @property
    def source(self) -> str:
        """The name of the log's position."""
        return SOURCE_PREFIX + self.store

    @property
    def positions(self) -> Mapping[str, int]:
        """Return nothing: messages have their keys."""
        return {}

    def check(self, *, skip_missing: bool) -> None:
        """As `ColumnLog.check`."""

    def link(self, index: IndexService) -> None:
        """As `ColumnLog.link`."""

    def batches(
        self, position: int | None, *, skip_corrupt: bool = False, skip_missing: bool = False
    ) -> Iterator[ArchivedBatch]:
        """As `ColumnLog.batches`; see `archived_batches`."""
        skips = {"skip_corrupt": skip_corrupt, "skip_missing": skip_missing}
        for batch in archived_batches(self.archive, self.segments, position, self.selection, **skips):
            skipped = tuple(map(_loss_of, batch.skipped))
            yield ArchivedBatch(batch.columns, batch.end, batch.messages, skipped)


def _loss_of(skipped: SkippedRange) -> Loss:
    problem = skipped.problem if skipped.is_missing else f"{skipped.file}: {skipped.problem}"
    return Loss("missing" if skipped.is_missing else "corrupt", skipped.begin, skipped.end, None, problem)
