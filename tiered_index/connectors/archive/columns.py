"""The columnar archive: the form of its files, and how one record is read and found by its place.

A connector names the columns of its files by an `ArchiveFormat`: records of Kafka, rows of files, and restart points of
packed texts. The footer has their version, and says which row group has an offset, so a record costs one ranged read
once its footer is known. Threads: any.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from tiered_index.base.call import check_deadline
from tiered_index.base.units import MAX_TIMESTAMP_MS
from tiered_index.errors import BudgetExceeded, CorruptFile, ObjectNotFound, StorageError, UnsupportedVersion
from tiered_index.format.names import generation_of_store, queue_of_log
from tiered_index.format.segments.columnar import (
    NUMBER,
    RowGroup,
    byte_lengths,
    decode_columns,
    decode_group,
    encode_columns,
    row_group_of,
)
from tiered_index.format.segments.segment import Times, times_of
from tiered_index.service.log.records import ArchivedSegment
from tiered_index.service.read.answers.messages import Fetched, MessageState, Search
from tiered_index.service.read.segments.archive import SegmentArchive
from tiered_index.service.read.segments.segments import Segments

# how often a segment is looked for that was replaced since the log was read
_LOOKS = 5
CLOCK_STEP_S = 1
"""Entries of the preset `rocketmq` may be one second off."""
# the bytes of a key in memory, about
_KEY_BYTES = 40

SHARED = {
    "topic": pa.string(),
    NUMBER: pa.int64(),
    "timestamp": pa.timestamp("ms", "UTC"),
    "keys": pa.list_(pa.string()),
}
"""The columns of each connector's messages, with their types; it names further ones."""


class ArchivedTable(NamedTuple):
    """All records of an archived file, and the notes in its footer by name."""

    records: pa.Table
    notes: Mapping[str, str]


@dataclass(frozen=True)
class ArchiveFormat:
    """The form of a connector's archived files.

    - `name`: what a file has, for messages to people.
    - `note`: the name of the footer's note with the `version` of the columns. SPEC.md section 12 lists them.
    - `schema`: the columns. The records are in order of the column `offset`.
    - `texts`: the paths of columns that are compressed.
    - `text_bytes`: returns the bytes of the texts of each record (i64, n), without those of its keys, by which a file
      is divided into row groups. None: the bytes of the columns of `texts`.
    - `keys`: returns all keys of each record by the notes of its file, and by further rules of keys that an index has;
      or the reason why they are not known, as text about the file. None: those of the column ``keys``.
    """

    name: str
    note: str
    version: int
    schema: pa.Schema
    texts: tuple[str, ...] = ()
    text_bytes: Callable[[pa.Table], npt.NDArray[np.int64]] | None = None
    keys: Callable[[ArchivedTable, Collection[str]], pa.ListArray | str] | None = None

    def encode(self, records: pa.Table, notes: Mapping[str, str] | None = None) -> bytes:
        """Return the file of records, with further notes."""
        sizes = self.sizes_of(records)
        if "keys" in records.column_names:
            counts = pc.list_value_length(records["keys"]).fill_null(0).to_numpy()
            sizes = sizes + _KEY_BYTES * counts.astype(np.int64)
        # a compressor for each column of a row group costs more than what it saves of an empty one
        texts = [path for path in self.texts if records[path.partition(".")[0]].null_count < len(records)]
        return encode_columns(records, sizes, texts, {self.note: str(self.version), **(notes or {})})

    def sizes_of(self, records: pa.Table) -> npt.NDArray[np.int64]:
        """Return the bytes of each record (i64, n): see `text_bytes`."""
        if self.text_bytes is not None:
            return self.text_bytes(records)
        return byte_lengths(records, {path.partition(".")[0] for path in self.texts} - {"keys"})

    def decode(self, file: bytes, name: str) -> ArchivedTable:
        """Return the records of a file, which errors call `name`. Raises `CorruptFile`, `UnsupportedVersion`."""
        records = decode_columns(file)
        notes = {key.decode(): value.decode() for key, value in (records.schema.metadata or {}).items()}
        version = notes.get(self.note, "")
        if version.isdecimal():
            UnsupportedVersion.unless_read(name, self.name, self.version, int(version))
        if not version.isdecimal() or records.schema.names != self.schema.names:
            raise CorruptFile(name, f"no {self.name}", expected=self.schema.names, found=records.schema.names)
        return ArchivedTable(records.cast(self.schema), notes)

    def read(self, archive: SegmentArchive, segment: ArchivedSegment) -> ArchivedTable:
        """Return the records of a segment. Raises as `decode` and `SegmentArchive.verified`."""
        return self.decode(archive.verified(segment, 0, segment.size_bytes), segment.name)

    def keys_of(self, table: ArchivedTable, rules: Collection[str]) -> pa.ListArray | str:
        """Return all keys of each record, or the reason why they are not known: see `keys`."""
        return table.records["keys"].combine_chunks() if self.keys is None else self.keys(table, rules)


def times_in(records: pa.Table) -> Times | None:
    """Return the smallest and the greatest time, epoch milliseconds. None: there is none, or a record has no time."""
    times = records["timestamp"]
    return None if times.null_count else times_of(times.cast(pa.int64()).to_numpy())


def entries_of(
    form: ArchiveFormat, records: pa.Table, keys: pa.ListArray | None = None, queue_id: int = 0, no_time_ms: int = 0
) -> pa.RecordBatch:
    """Return an entry for each key of each record, as columns of a batch; `keys` None: those of the column ``keys``.

    A record without a time gets `no_time_ms`. A time beyond the greatest one becomes that, and is quarantined. The size
    of an entry is that of the column ``size``, if the form has it.
    """
    keys = records["keys"].combine_chunks() if keys is None else keys
    of_entry = pc.list_parent_indices(keys)
    sizes = records["size"] if "size" in records.column_names else pa.array(form.sizes_of(records))
    times_ms = records["timestamp"].cast(pa.int64()).fill_null(no_time_ms)
    columns = {
        "topic": records["topic"].combine_chunks().dictionary_encode().take(of_entry),
        "queue_id": np.full(len(of_entry), queue_id, np.int64),
        "key": pc.list_flatten(keys).cast(pa.large_string()),
        "offset": records[NUMBER].take(of_entry).combine_chunks(),
        "size": sizes.take(of_entry).to_numpy(),
        "timestamp_ms": np.minimum(times_ms.take(of_entry).to_numpy(), MAX_TIMESTAMP_MS),
    }
    return pa.RecordBatch.from_pydict(columns)


class ArchivedRecord(NamedTuple):
    """The record at an offset, as a table of one row, or of none if `segment` has no record there."""

    segment: ArchivedSegment
    footer: bytes
    row: pa.Table


@dataclass(slots=True)
class ArchiveSearch(Search):
    """The search for the message of an entry, or of a place: at the source, and in the archive.

    - `state`: of a message that is not found.
    - `is_archived`: whether a segment has its offset.
    - `no_archive`: the reason why there is no message, if none has.
    """

    state: MessageState = "missing"
    is_archived: bool = False
    no_archive: str = "no archive has it"

    def result(self) -> Fetched:
        """Return the result and its cost."""
        if not self.is_archived:
            self.problems.append(self.no_archive)
        return self.outcome(lambda: self.missing(self.state, damaged=self.damaged))


def read_archived(
    archive: SegmentArchive,
    scheme: str,
    place: tuple[str, int, int],
    search: ArchiveSearch,
    take: Callable[[ArchivedRecord], None],
) -> None:
    """Look for the record of a place (topic, queue and offset) in the archived logs of its queue, the newest first.

    `scheme` begins the names of the connector's stores. `take` judges a record; the look ends once `search` has found
    the message.
    """
    topic, queue_id, offset = place
    before = len(search.problems)
    for store in _logs_of(archive.segments(), scheme, topic, queue_id):
        try:
            record = record_at(archive, store, offset, search)
        except (CorruptFile, StorageError, BudgetExceeded) as error:
            search.note(error)
            continue
        if record is None:
            segments = archive.segments()
            if offset < segments.state.expired.segments.get(store, 0):
                # what only the source could tell stays open
                search.state = "expired" if search.error is None else search.state
                search.problems.append(f"it has expired in the archive of {store}")
            elif (lost := segments.given_up(store, offset)) is not None:
                search.problems.append(lost.reason)
            continue
        search.is_archived = True
        if len(record.row):
            take(record)
        elif record.segment.source is not None:
            search.state = "erased"
            name = record.segment.name
            search.problems.append(f"records were erased out of {name}, and it has none at this offset")
        else:
            name = record.segment.name
            search.problems.append(f"{name} has no record at this offset: the source had none, either")
        if search.found is not None:
            search.error = None
            # what archives of other logs of the queue have there is no problem
            search.found = replace(search.found, problem="; ".join(search.problems[:before]) or None)
            break


def _logs_of(segments: Segments, scheme: str, topic: str, queue_id: int) -> list[str]:
    """Return the stores of a queue's logs that are archived or were, the newest first."""
    stores = {*segments.stores, *segments.state.expired.segments, *segments.state.given_up}
    mine = [store for store in stores if store.startswith(scheme) and queue_of_log(store) == (topic, queue_id)]
    return sorted(mine, key=generation_of_store, reverse=True)


class GroupRows(NamedTuple):
    """The rows of one row group of a segment; None: the segment's `footer` names no such group."""

    footer: bytes
    rows: pa.Table | None


def record_at(archive: SegmentArchive, store: str, offset: int, search: Search) -> ArchivedRecord | None:
    """Return the record at an offset of the log of a store; None: no segment has the offset.

    `search` is charged, and its `read_from` names the segment. A segment that another record replaced is looked for
    again. Raises `ObjectNotFound` if each of 5 segments was replaced, `CorruptFile`, and the errors of the storage.
    """
    for left in reversed(range(_LOOKS)):
        reads = list[int]()
        try:
            segment = next(iter(archive.holding(offset, store, reads)), None)
            if segment is None:
                return None
            search.read_from = segment.name
            footer, rows = group_rows(archive, segment, partial(row_group_of, number=offset), search)
        except ObjectNotFound:
            if not left:
                raise
            # a record has put another object in its place, or it has expired
            archive.refresh()
        else:
            at = -1 if rows is None else rows[NUMBER].index(offset).as_py()
            return ArchivedRecord(segment, footer, pa.table({}) if rows is None or at < 0 else rows.slice(at, 1))
        finally:
            search.charge(reads)
    raise AssertionError("the last look returns or raises")


def group_rows(
    archive: SegmentArchive, segment: ArchivedSegment, group_of: Callable[[bytes], RowGroup | None], search: Search
) -> GroupRows:
    """Return the rows of the group that `group_of` picks by a segment's footer.

    `search` is charged. Raises `ObjectNotFound` (removed), `CorruptFile`, and the errors of the storage.
    """
    check_deadline(f"reading {segment.name}")
    if archive.known_table(segment) is None:
        search.requests += 1
        search.bytes += segment.object_bytes - segment.size_bytes + segment.footer_bytes
    footer = archive.table(segment).footer
    if (group := group_of(footer)) is None:
        return GroupRows(footer, None)
    search.requests += 1
    search.bytes += group.end - group.begin
    data = archive.verified(segment, group.begin, group.end - group.begin)
    return GroupRows(footer, decode_group(footer, group, data))
