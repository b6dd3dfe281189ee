"""The records in an index's archive as batches of entries, from which `ingest archive:URI` makes an index again.

The keys of a file are those of `--key` when it was written, which its footer has. One thread. Memory: one file.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

import pyarrow as pa
import pyarrow.compute as pc

from tiered_index.errors import CorruptFile, InvalidArgument
from tiered_index.follow import Loss
from tiered_index.format.columnar import decode_columns
from tiered_index.kafka.archive import keys_of_file, records_of
from tiered_index.kafka.columns import SCHEMA, SIZE, entry_columns
from tiered_index.kafka.keys import FUNCTION, RecordKeys
from tiered_index.kafka.names import BEGIN_PREFIX, Name
from tiered_index.service.jobs.segment_archive import SegmentArchive
from tiered_index.service.log import topic_keys
from tiered_index.service.log.records import ArchivedSegment
from tiered_index.types import inclusive


class ArchivedRecords(NamedTuple):
    """The entries of one archived file: columns of a batch, and the number of `messages`. `end`: where to continue.

    `skipped` are ranges of offsets before `end` that are missing or damaged.
    """

    columns: pa.RecordBatch
    end: int
    messages: int
    skipped: tuple[Loss, ...]


def source_of(store: str, positions: Mapping[str, int]) -> str:
    """Return the name of the newest position of a partition's log, by the positions of its index."""
    names = [name for text in positions if (name := Name.parse(text)) is not None and name.store == store]
    newest = max(names, key=lambda name: (name.generation, positions[str(name)]), default=None)
    return store if newest is None else str(newest)


def rule_positions(stores: Sequence[str], positions: Mapping[str, int]) -> dict[str, int]:
    """Return the positions that say which keys were indexed and where logs began, for an index of the same records."""
    begins = {f"{BEGIN_PREFIX}{store}" for store in stores}
    rules = [topic_keys.rule_positions(positions, topic_keys.scope_of(store)) for store in stores]
    return {name: at for of_topic in rules for name, at in of_topic.items()} | {
        name: at for name, at in positions.items() if name in begins
    }


def begin_of(store: str, positions: Mapping[str, int], expired: Mapping[str, int]) -> int:
    """Return the offset at which a partition's records begin: that of its log, or of the records that have not expired.

    `positions` and `expired` (offsets by store) are those of the index of the archive.
    """
    return max(positions.get(f"{BEGIN_PREFIX}{store}", 0), expired.get(store, 0))


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
    Raises `InvalidArgument` if a function gave the keys.
    """
    for segment in segments:
        if segment.end <= position:
            continue
        begin, skipped = position, []
        if begin < segment.start:
            missing = f"no archived file has offsets {inclusive(begin, segment.start)} of {segment.store}"
            if not skip_missing:
                raise CorruptFile(segment.name, missing)
            skipped.append(Loss("missing", begin, segment.start, None, missing))
            begin = segment.start
        table, keys = SCHEMA.empty_table(), RecordKeys()
        try:
            file = archive.verified(segment, 0, segment.size_bytes)
            if FUNCTION in (rules := keys_of_file(file)):
                raise InvalidArgument(f"{segment.name}: a function gave the keys: ingest its rows as Parquet, by --key")
            # a key that was added later, too
            known = topic_keys.rules_of(archive.state().positions, topic_keys.scope_of(segment.store))
            keys, table = RecordKeys.by_rules({*rules, *known}), decode_columns(file)
        except CorruptFile as error:
            if not skip_corrupt:
                raise
            skipped.append(Loss("corrupt", begin, segment.end, None, str(error)))
        table = table.filter(pc.greater_equal(table["offset"], begin))
        yield ArchivedRecords(_entries(table, keys, segment), segment.end, len(table), tuple(skipped))
        position = segment.end


def _entries(table: pa.Table, keys: RecordKeys, segment: ArchivedSegment) -> pa.RecordBatch:
    """Return a row for each key of each record. A record without a time gets that of its upload."""
    name = Name.parse(segment.store)
    assert name is not None
    records = records_of(table)
    keys_of_records = [keys.of(record) for record in records]
    texts = pa.array([key for of_record in keys_of_records for key in of_record], pa.string())
    table = table.append_column(SIZE, pa.array([record.size for record in records], pa.int64()))
    place, counts = (name.topic, name.partition), list(map(len, keys_of_records))
    return pa.RecordBatch.from_pydict(entry_columns(place, table, texts, counts, segment.published_ms))
