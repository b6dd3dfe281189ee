"""The records in an index's archive as batches of entries, from which `ingest archive:URI` makes an index again, and
their copies in the archive of that index.

The keys of a file are those of `--key` when it was written, which its footer has, and those that were added later. One
thread. Memory: one file.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import pyarrow as pa
import pyarrow.compute as pc
from msgspec import structs

from tiered_index.connectors.archive import ArchivedTable
from tiered_index.connectors.archiver import ColumnArchiver
from tiered_index.connectors.kafka.client.broker import Place
from tiered_index.connectors.kafka.columns import FORMAT, SCHEMA, SIZE, entry_columns, keys_in_notes, keys_of_rows
from tiered_index.connectors.kafka.names import BEGIN_PREFIX, LOST_PREFIX, Name
from tiered_index.connectors.source import Loss
from tiered_index.errors import CorruptFile, InvalidArgument, RootBehind, StorageBehind
from tiered_index.service.index import IndexService
from tiered_index.service.log import topic_keys
from tiered_index.service.log.records import ArchivedSegment
from tiered_index.service.read.segments.archive import SegmentArchive
from tiered_index.types import inclusive


@dataclass(frozen=True)
class RecordFile:
    """An archived file of records.

    - `segment`: the segment of the file.
    - `file`: its bytes.
    - `table`: its records and notes.
    - `entries`: a row for each key of each record, as columns of a batch.
    """

    segment: ArchivedSegment
    file: bytes
    table: ArchivedTable
    entries: pa.RecordBatch

    @property
    def records(self) -> pa.Table:
        """The records of the file."""
        return self.table.records


class ArchivedRecords(NamedTuple):
    """The entries of one archived file: columns of a batch, and the number of `messages`. `end`: where to continue.

    `skipped` are ranges of offsets before `end` that are missing or damaged. `whole` is the file, unless it is damaged.
    """

    columns: pa.RecordBatch
    end: int
    messages: int
    skipped: tuple[Loss, ...]
    whole: RecordFile | None


def source_of(store: str, positions: Mapping[str, int]) -> str:
    """Return the name of the newest position of a partition's log, by the positions of its index."""
    names = [name for text in positions if (name := Name.parse(text)) is not None and name.store == store]
    newest = max(names, key=lambda name: (name.generation, positions[str(name)]), default=None)
    return store if newest is None else str(newest)


def rule_positions(stores: Sequence[str], positions: Mapping[str, int]) -> dict[str, int]:
    """Return the positions that say which keys were indexed, where logs began, and what of them is lost.

    They are for an index of the same records.
    """
    begins = {f"{prefix}{store}" for store in stores for prefix in (BEGIN_PREFIX, LOST_PREFIX)}
    rules = [topic_keys.rule_positions(positions, topic_keys.scope_of(store)) for store in stores]
    return {name: at for of_topic in rules for name, at in of_topic.items()} | {
        name: at for name, at in positions.items() if name in begins
    }


def begin_of(
    store: str, segments: Sequence[ArchivedSegment], positions: Mapping[str, int], expired: Mapping[str, int]
) -> int:
    """Return the offset at which a partition's records begin: that of its log, or of the records that have not expired.

    `segments` are those of the partition's log. `positions` and `expired` (offsets by store) are those of their index.
    """
    begin = max(positions.get(f"{BEGIN_PREFIX}{store}", 0), expired.get(store, 0))
    # an index that lost its root may have begun behind what it had archived
    return min([begin, *(segment.start for segment in segments[:1])])


def archived_records(
    archive: SegmentArchive,
    segments: Sequence[ArchivedSegment],
    position: int,
    *,
    skip_corrupt: bool = False,
    skip_missing: bool = False,
) -> Iterator[ArchivedRecords]:
    """Yield the entries of each file of a partition's log from a position on.

    Raises `CorruptFile` at a damaged or missing file; with `skip_corrupt` and `skip_missing` it is `skipped` instead.
    Raises `InvalidArgument` if a file lacks keys that a function gave.
    """
    for segment in segments:
        if segment.end <= position:
            continue
        begin, skipped = position, []
        if begin < segment.start:
            missing = f"no archived file has offsets {inclusive(begin, segment.start)} of {segment.store}"
            if not skip_missing:
                raise CorruptFile(segment.name, missing)
            skipped.append(Loss("missing", begin, segment.start, None, missing, topic=segment.topic))
            begin = segment.start
        try:
            file = archive.verified(segment, 0, segment.size_bytes)
            table = FORMAT.decode(file, segment.name)
            # a key that was added later, too
            later = topic_keys.rules_of(archive.state().positions, topic_keys.scope_of(segment.store))
            known = FORMAT.keys_of(table, later)
            if isinstance(known, str):
                lack = f"{segment.name} {known}"
                if not skip_missing:
                    raise InvalidArgument(
                        f"{lack}: ingest its rows as Parquet, by --key; --skip-missing indexes it without these keys"
                    )
                skipped.append(Loss("missing", begin, segment.end, None, lack, topic=segment.topic))
                keys = keys_of_rows(table.records, keys_in_notes(table.notes), later)
            else:
                keys = known.to_pylist()
        except (StorageBehind, RootBehind):
            raise
        except CorruptFile as error:
            if not skip_corrupt:
                raise
            begin_ms, end_ms = segment.times or (0, None)
            of_times: dict[str, Any] = {"begin_ms": begin_ms, "end_ms": end_ms, "topic": segment.topic}
            skipped.append(Loss("corrupt", begin, segment.end, None, str(error), **of_times))
            file, table, keys = b"", ArchivedTable(SCHEMA.empty_table(), {}), []
        whole = _record_file(segment, file, table, keys)
        columns = whole.entries.filter(pc.greater_equal(whole.entries["offset"], begin))
        messages = pc.sum(pc.greater_equal(whole.records["offset"], begin)).as_py() or 0
        yield ArchivedRecords(columns, segment.end, messages, tuple(skipped), whole if file else None)
        position = segment.end


def _record_file(segment: ArchivedSegment, file: bytes, table: ArchivedTable, keys: Sequence[list[str]]) -> RecordFile:
    """Return a file with its records and entries. An entry of a record without a time gets that of its upload."""
    texts = pa.array([key for of_record in keys for key in of_record], pa.string())
    records = table.records.append_column(SIZE, pa.array(FORMAT.sizes_of(table.records)))
    counts = list(map(len, keys))
    entries = pa.RecordBatch.from_pydict(entry_columns(_place(segment), records, texts, counts, segment.published_ms))
    return RecordFile(segment, file, table, entries)


def _place(segment: ArchivedSegment) -> Place:
    """Return the topic and the partition of a segment."""
    name = Name.parse(segment.store)
    assert name is not None, "a segment of a partition"
    return name.topic, name.partition


class RecordCopies:
    """Copies archived files of records into the archive of another index, many by one log record. One thread.

    Records of an offset that the index has archived are not copied again. Methods raise as
    `IndexService.archive_columns`.
    """

    def __init__(self, index: IndexService) -> None:
        self.archiver = ColumnArchiver(index, FORMAT)
        self.records = 0
        """The number of records that were copied."""

    def add(self, whole: RecordFile, erased: pa.Array) -> None:
        """Send a copy of a file without the records of which `erased` is true. The archiver is to name it."""
        segment, records, file = whole.segment, whole.records, whole.file
        begin = max(self.archiver.end(segment.store), segment.start)
        if begin >= segment.end:
            return
        if has_erased := bool(pc.any(erased).as_py()):
            segment = structs.replace(segment, source=segment.source or (segment.crc32, segment.head_crc32))
        if has_erased or begin > segment.start:
            records = records.filter(pc.and_(pc.greater_equal(records["offset"], begin), pc.invert(erased)))
            file = FORMAT.encode(records, whole.table.notes)
        if self.archiver.send(segment.store, begin, segment.end, records, file=file, copied=segment):
            self.records += len(records)
