"""Reads one record of a columnar archive: records of Kafka, rows of files, and restart points of packed texts.

The footer of a segment says which row group has an offset, so a record costs one ranged read once its footer is known.
Threads: any.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import pyarrow as pa

from tiered_index.base.call import check_deadline
from tiered_index.errors import ObjectNotFound
from tiered_index.format.segments.columnar import NUMBER, RowGroup, decode_group, row_group_of
from tiered_index.service.log.records import ArchivedSegment
from tiered_index.service.read.answers.messages import Search
from tiered_index.service.read.segments.archive import SegmentArchive

# how often a segment is looked for that was replaced since the log was read
_LOOKS = 5


class ArchivedRecord(NamedTuple):
    """The record at an offset, as a table of one row, or of none if `segment` has no record there."""

    segment: ArchivedSegment
    footer: bytes
    row: pa.Table


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
