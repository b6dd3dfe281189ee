"""Copies of the rows of files in an index's archive: Parquet files, as those of Kafka's records.

The copies of a log of files have a store of their own, with the same offsets (`rows_store`). A row is copied before its
entries are put. So the log says up to which offset rows are copied, and a run that was killed copies only the rest. A
row has its keys beside its text, so that a lookup and an erasure need no other file, and `ingest archive:URI` makes an
index again. One thread uses a `RowArchiver`.
"""

from __future__ import annotations

import bisect
import hashlib
import heapq
import itertools
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from tiered_index.connectors.archive.archiver import ColumnArchiver
from tiered_index.connectors.archive.columns import SHARED, ArchiveFormat, entries_of
from tiered_index.connectors.archive.log import ColumnLog
from tiered_index.connectors.files.identity import OldOffsets, first_name
from tiered_index.connectors.files.known_files import Plan, offsets_end
from tiered_index.connectors.files.rows.batch import RowBatch
from tiered_index.connectors.source import Loss
from tiered_index.errors import CorruptFile, InvalidArgument, ObjectNotFound
from tiered_index.format.names import LINKED, ROWS, queue_id_of_store, rows_store
from tiered_index.format.segments.columnar import NUMBER, byte_lengths
from tiered_index.format.segments.segment import LinkedSegment
from tiered_index.service.index import IndexService
from tiered_index.service.log import topic_keys
from tiered_index.service.log.records import ArchivedSegment
from tiered_index.service.log.topic_keys import added_end
from tiered_index.service.read.segments.archive import SegmentArchive
from tiered_index.service.read.segments.segments import Segments
from tiered_index.types import inclusive

SCHEMA = pa.schema(
    {
        "topic": SHARED["topic"],
        "file": pa.string(),
        "row": pa.int64(),
        "line": pa.int64(),
        "size": pa.int64(),
        NUMBER: SHARED[NUMBER],
        "timestamp": SHARED["timestamp"],
        "keys": SHARED["keys"],
        "text": pa.binary(),
    }
)


def _text_bytes(rows: pa.Table) -> npt.NDArray[np.int64]:
    # the names of files are alike
    return byte_lengths(rows, ["text"])


FORMAT = ArchiveFormat(
    "archived rows of files",
    "tiered_index.rows",
    2,
    SCHEMA,
    texts=("file", "keys.list.element", "text"),
    text_bytes=_text_bytes,
)
# files that one record names
_LINKS_AT_ONCE = 10_000
SEGMENT_BYTES = 32 << 20
"""About the bytes of rows in one object, before they are compressed."""


def decoded_rows(archive: SegmentArchive, segment: ArchivedSegment) -> pa.Table:
    """Return all rows of a segment. Raises as `ArchiveFormat.read`."""
    return FORMAT.read(archive, segment).records


def copies_of(batch: RowBatch, topics: pa.DictionaryArray, uri: str, shift: int, begin: int = 0) -> pa.Table:
    """Return the copies of the rows of a batch from offset `begin` on, by offset: see `RowArchiver.add_rows`."""
    of_keys, keys = batch.by_entry()
    order = np.argsort(batch.positions[of_keys], kind="stable")
    order = order[batch.positions[of_keys[order]] + shift >= begin]
    of_keys = of_keys[order]
    positions, firsts = np.unique(batch.positions[of_keys], return_index=True)
    if not len(positions):
        return SCHEMA.empty_table()
    rows, ends = of_keys[firsts], np.append(firsts, len(order)).astype(np.int32)
    in_order = keys.take(pa.array(order)).cast(pa.string()).combine_chunks()
    lines = batch.lines(positions)
    columns = {
        "topic": topics.take(pa.array(rows)).cast(pa.string()),
        "file": pa.repeat(pa.scalar(uri, pa.string()), len(positions)),
        "row": pa.array(positions),
        "line": pa.nulls(len(positions), pa.int64()) if lines is None else lines,
        "size": pa.array(batch.sizes[rows]),
        NUMBER: pa.array(positions + shift),
        "timestamp": pa.array(batch.times_ms[rows]).cast(SCHEMA.field("timestamp").type),
        "keys": pa.ListArray.from_arrays(pa.array(ends), in_order),
        "text": pa.array(batch.texts(positions, batch.sizes[rows]), pa.binary()),
    }
    return pa.table(columns, schema=SCHEMA)


class CopiedOffsets:
    """The offsets of a log of files whose rows have archived copies, which stay answers.

    Rows whose copies were erased have none. Methods raise as `decoded_rows`.
    """

    def __init__(self, segments: Segments, log: str) -> None:
        self._segments, self._store = segments, rows_store(log)
        # the ranges of segments of which copies were erased, by their names
        self._ranges = dict[str, list[tuple[int, int]]]()

    def without(self, old: Iterable[OldOffsets]) -> tuple[OldOffsets, ...]:
        """Return the parts of old offsets that have no copies."""
        left = list[OldOffsets]()
        for start, end, times in old:
            for copy in self._between(start, end):
                for begin, behind in self._with_copies(copy):
                    if start < (begin := min(begin, end)):
                        left.append(OldOffsets(start, begin, times))
                    start = max(start, behind)
            if start < end:
                left.append(OldOffsets(start, end, times))
        return tuple(left)

    def erased(self, ranges: Iterable[tuple[int, int]]) -> tuple[OldOffsets, ...]:
        """Return the parts of ranges of offsets whose rows had copies, which were erased."""
        rewritten = [
            OldOffsets(max(start, copy.start), min(end, copy.end), None)
            for start, end in ranges
            for copy in self._between(start, end)
            if copy.source is not None
        ]
        return self.without(rewritten)

    def _between(self, start: int, end: int) -> Iterator[ArchivedSegment]:
        """Yield the archived segments that have offsets of [start, end)."""
        return itertools.takewhile(lambda copy: copy.start < end, self._segments.of(self._store, start))

    def _with_copies(self, copy: ArchivedSegment) -> list[tuple[int, int]]:
        """Return the ranges of offsets of an archived segment that have copies: all, unless some were erased."""
        if copy.source is None:
            return [(copy.start, copy.end)]
        if copy.name not in self._ranges:
            storage, state = self._segments.storage, self._segments.state
            assert storage is not None, "copies are in the storage of the index"
            rows = decoded_rows(SegmentArchive(storage, lambda: state, lambda: state), copy)
            offsets, sizes = rows[NUMBER].to_numpy(), rows["size"].to_numpy()
            # the next row of a text is behind a newline of one or two bytes
            has_gap = offsets[1:] > (offsets + np.where(sizes > 0, sizes + 2, 1))[:-1]
            begins = offsets[np.append(np.ones(min(1, len(offsets)), bool), has_gap)]
            ends = (offsets + np.maximum(sizes, 1))[np.append(has_gap, np.ones(min(1, len(offsets)), bool))]
            self._ranges[copy.name] = list(zip(begins.tolist(), ends.tolist(), strict=True))
        return self._ranges[copy.name]


def check_reread(copied: CopiedOffsets, plan: Plan) -> None:
    """Raise `InvalidArgument` if rows are to be read in another way, and have archived copies, which stay."""
    reread = (unread for unread in plan.unread if unread.is_reread)
    with_copies = [unread for unread in reread if copied.without(unread.old) != unread.old]
    if with_copies:
        raise InvalidArgument(
            f"{with_copies[0].listed.uri}{f' and {len(with_copies) - 1:,} more' if with_copies[1:] else ''} can't be "
            "read in another way (--time, --time-unit, --time-zone, --topic field:, --delimiter, --quote): the "
            "archived copies of its rows stay as they are. Give the options of before, or index the files into "
            "another --topic"
        )


class CopiedTexts:
    """The texts of archived rows that no segment of a file has any more: they stay answers.

    A newer reading of a file leaves out as many equal rows of it. `unread` are ranges of offsets without a file.
    """

    def __init__(self, archive: SegmentArchive, log: str, unread: Iterable[tuple[int, int]]) -> None:
        self._archive, self._store = archive, rows_store(log)
        self._counts: dict[str, Counter[bytes]] = {}
        self._read: tuple[str, pa.Table] | None = None
        segments = archive.segments()
        for start, end in unread if segments.end(self._store) else ():
            for copy in segments.of(self._store, start):
                if copy.start >= end:
                    break
                rows = self._rows(copy, start, end)
                for file, text in zip(rows["file"].to_pylist(), rows["text"].to_pylist(), strict=True):
                    self._counts.setdefault(first_name(file), Counter())[_digest(text)] += 1

    def __bool__(self) -> bool:
        return bool(self._counts)

    def names(self, uri: str, ranges: Iterable[tuple[int, int]]) -> list[str]:
        """Return the names of a file before rotations: now, and when the first rows of its offsets were copied."""
        names, segments = [first_name(uri)], self._archive.segments()
        for start, end in ranges if self else ():
            for copy in segments.of(self._store, start):
                if copy.start >= end:
                    break
                if files := self._rows(copy, start, end)["file"][:1].to_pylist():
                    names += map(first_name, files)
                    break
        return [*dict.fromkeys(names)]

    def _rows(self, copy: ArchivedSegment, start: int, end: int) -> pa.Table:
        """Return the rows of an archived segment at offsets [start, end)."""
        if self._read is None or self._read[0] != copy.name:
            self._read = copy.name, decoded_rows(self._archive, copy)
        rows = self._read[1]
        begin, behind = np.searchsorted(rows[NUMBER].to_numpy(), (start, end)).tolist()
        return rows.slice(begin, behind - begin)

    def left_out(self, batch: RowBatch, names: Iterable[str]) -> RowBatch:
        """Return the rows of a batch of a file with `names` that have no copies. The batch has whole rows."""
        counts = [self._counts[name] for name in names if name in self._counts]
        if not counts:
            return batch
        positions, firsts = np.unique(batch.positions, return_index=True)
        known = set[int]()
        for position, text in zip(positions.tolist(), batch.texts(positions, batch.sizes[firsts]), strict=True):
            digest = _digest(text)
            if (has_copy := next((of_name for of_name in counts if of_name[digest]), None)) is not None:
                has_copy[digest] -= 1
                known.add(position)
        return batch.only(~np.isin(batch.positions, list(known))) if known else batch


def _digest(text: bytes) -> bytes:
    return hashlib.blake2b(text, digest_size=16).digest()


class RowArchiver(ColumnArchiver):
    """Copies the rows of one log of files."""

    def __init__(self, index: IndexService, store: str) -> None:
        super().__init__(index, FORMAT)
        self.store = rows_store(store)

    def add_rows(self, topics: pa.DictionaryArray, uri: str, batch: RowBatch, shift: int, first: int) -> None:
        """Let the rows of a batch wait. `topics` has that of each row; `shift` is added to positions as offsets.

        `first` is the offset from which on the file is read.
        """
        begin = max(self.end(self.store), batch.begin + shift)
        self.add(self.store, first, batch.end + shift, copies_of(batch, topics, uri, shift, begin))


class RowsLog(ColumnLog):
    """The archived rows of one log of files.

    The linked files of the log say which offsets have rows: those that no copy has are missing. A run without
    `--archive` indexed them, or none of them has a key.
    """

    # a copy has no carriage return at the end of its line
    has_sizes = False
    # rows without a copy are missing, which is an error
    is_left_out = False
    # the linked files are taken over instead
    expired = None

    @property
    def source(self) -> str:
        """As `ColumnLog.source`: the store of the linked files."""
        return LINKED + self.store.removeprefix(ROWS)

    @property
    def positions(self) -> Mapping[str, int]:
        """As `ColumnLog.positions`: how the rows were indexed."""
        return topic_keys.positions_of(self.archive.state().positions, self.source)

    @property
    def begin(self) -> int:
        """As `ColumnLog.begin`."""
        expired = self.archive.state().expired.segments
        return max(expired.get(self.store, 0), expired.get(self.source, 0))

    def check(self, *, skip_missing: bool) -> None:
        """As `ColumnLog.check`."""
        self.missing(self.begin, skip_missing=skip_missing)

    def links(self, begin: int = 0) -> Iterator[LinkedSegment]:
        """Yield the files that end behind an offset of the log."""
        known = self.archive.segments().of_log(self.source, begin)
        return (segment for segment in known if isinstance(segment, LinkedSegment))

    def missing(self, position: int, *, skip_missing: bool) -> list[Loss]:
        """As `ColumnLog.missing`: the ranges of rows that no copy has.

        Raises `InvalidArgument` if there are any, unless `skip_missing`.
        """
        state, begin = self.archive.state(), position
        end = state.positions.get(self.source, 0)
        lost = ((gap.begin, gap.end, gap.reason) for gap in state.given_up.get(self.source, ()))
        # a file that was read as a whole, and has no time, has no row with a key
        added = added_end(state.positions, self.source)
        with_keys = (
            linked
            for linked in self.links(begin)
            if linked.rows is None or linked.times is not None or linked.start < added
        )
        known = ((linked.start, linked.end, linked.uri) for linked in with_keys) if begin < end else ()
        copies = list(self.archive.segments().of(self.store, begin))
        begins = [begin, *(copy.end for copy in copies)]
        ends = [*(copy.start for copy in copies), end]
        losses = list[Loss]()
        for first, last, name in heapq.merge(sorted(lost), known):
            at = max(bisect.bisect_right(begins, first) - 1, 0)
            while at < len(begins) and begins[at] < last:
                gap_begin, gap_end = max(first, begins[at]), min(last, ends[at])
                if gap_begin < gap_end:
                    problem = f"no copy has offsets {inclusive(gap_begin, gap_end)} of {self.source} ({name})"
                    losses.append(Loss("missing", gap_begin, gap_end, None, problem))
                at += 1
        if losses and not skip_missing:
            raise InvalidArgument(
                f"{losses[0].problem}: none of these rows has a key, or a run without --archive indexed them; "
                f"--skip-missing leaves them out"
            )
        return losses

    def copied_links(self, begin: int) -> Iterator[LinkedSegment]:
        """Yield `links` without the files that have no copied row: `ingest` of such a file indexes it."""
        gaps = {(loss.begin, loss.end) for loss in self.missing(self.begin, skip_missing=True)}
        copied = {linked.uri for linked in self.links() if (linked.start, linked.end) not in gaps} if gaps else ()
        return (linked for linked in self.links(begin) if not gaps or linked.uri in copied)

    def link(self, index: IndexService) -> None:
        """Add the files of the log to an index that lacks them. Raises `InvalidArgument` if it has others."""
        mine, theirs = index.segment_archive.segments(), self.archive.segments()
        last: LinkedSegment | None = None
        finished = list[LinkedSegment]()
        for linked in mine.of_log(self.source):
            if not isinstance(linked, LinkedSegment):
                continue
            if not linked.is_open:
                last = linked
                continue
            # it was being read when an earlier run took it over
            known = theirs.segment(self.source, linked.start)
            if isinstance(known, LinkedSegment) and (known.start, known.uri) == (linked.start, linked.uri):
                finished += [] if known.is_open else [known]
        if last is not None:
            self._check_same(index, last)
        if finished:
            index.link([], finished)
        new = self.copied_links(offsets_end(mine, self.source))
        while chunk := list(itertools.islice(new, _LINKS_AT_ONCE)):
            index.link(chunk)

    def _check_same(self, index: IndexService, last: LinkedSegment) -> None:
        """Raise `InvalidArgument` if the last of an index's files is not one of the log: both have gone on."""
        if last.end <= self.archive.state().expired.segments.get(self.source, 0):
            return
        known = self.archive.segments().segment(self.source, last.start)
        if not isinstance(known, LinkedSegment) or (last.end, last.blocks) != (known.end, known.blocks):
            raise InvalidArgument(
                f"{index.storage.uri} has indexed files of {self.source} since it was made of this archive, such as "
                f"{last.uri}: only `ingest FILES` adds to them"
            )


def archived_logs(archive: SegmentArchive, takes: Callable[[str], bool]) -> list[RowsLog]:
    """Return the logs of rows, also those whose rows no run has copied. As `Connector.archived_logs`."""
    stores = archive.segments().stores
    rows = {rows_store(store) if store.startswith(LINKED) else store for store in stores}
    return [RowsLog(FORMAT, archive, store, takes) for store in sorted(rows) if store.startswith(ROWS)]


class RowsOfCopy(NamedTuple):
    """The rows of one archived file (`SCHEMA`), and the columns of their entries. `end`: where to continue."""

    columns: pa.RecordBatch
    end: int
    rows: pa.Table


def copied_from(archive: SegmentArchive, log: str, position: int) -> Iterator[RowsOfCopy]:
    """Yield the archived rows of a log of files from a position on, up to the first ones that have no copies.

    Those of a damaged copy have none. Raises the storage's errors.
    """
    store = rows_store(log)
    for copy in archive.segments().of(store, position):
        # offsets between that no file has any more are those of a reading that was given up
        before = next(archive.segments().of_log(log, position), None) if copy.start > position else None
        if before is not None and before.start < copy.start:
            break
        try:
            rows = decoded_rows(archive, copy)
        except (CorruptFile, ObjectNotFound):
            break
        rows = rows.filter(pc.greater_equal(rows[NUMBER], position))
        yield RowsOfCopy(entries_of(FORMAT, rows, queue_id=queue_id_of_store(store)), copy.end, rows)
        position = copy.end
