"""Objects with the retired ranges of a store: reads those that a state or a record names. SPEC.md section 9.

A record names such an object once a store has many ranges, so that checkpoints have only the others. A replay of the
whole log needs none of them. Threads: any.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from functools import partial

from msgspec import structs

from tiered_index.base.documents import checks
from tiered_index.base.threads import side_by_side
from tiered_index.errors import CorruptFile, ObjectNotFound
from tiered_index.format.segments.ranges import decode_ranges
from tiered_index.service.log.records import LogRecord, StoredRanges
from tiered_index.service.log.replaced import RangeTable
from tiered_index.service.log.state import LogState
from tiered_index.storage.base import Storage


def whole_state(storage: Storage, state: LogState) -> LogState:
    """Return the state of a checkpoint with all its ranges: a GET for each object. Raises as `read_ranges`."""
    if len(state.range_tables) == len(state.range_objects):
        return state
    return replace(state, range_tables=_tables(storage, state.range_objects.values())).completed()


def whole_record(storage: Storage, record: LogRecord) -> LogRecord:
    """Return a record with all its ranges: a GET for each object that a copy's record names. As `whole_state`."""
    if not (record.copied and record.ranges):
        return record
    tables = _tables(storage, record.ranges)
    expired = structs.replace(record.expired, replaced=record.expired.replaced.completed(tables))
    return replace(record, expired=expired, range_tables=tables)


def _tables(storage: Storage, objects: Iterable[StoredRanges]) -> dict[str, RangeTable]:
    named = list(objects)
    tables = side_by_side([partial(read_ranges, storage, stored) for stored in named])
    return {stored.store: table for stored, table in zip(named, tables, strict=True)}


def read_ranges(storage: Storage, stored: StoredRanges) -> RangeTable:
    """Return the table in an object. Raises `CorruptFile`, also if it is missing, and the errors of the storage."""
    try:
        data = storage.get(stored.name)
    except ObjectNotFound as error:
        problem = (
            "the log names this table of replaced ranges, but the storage does not have it: `tiered-index verify "
            "--deep --repair` writes it again"
        )
        raise CorruptFile(stored.name, problem) from error
    return checked_ranges(stored, data)


def checked_ranges(stored: StoredRanges, data: bytes) -> RangeTable:
    """Return the table in an object's bytes. Raises `CorruptFile`, also if it has other ranges than the log says."""
    with checks(stored.name, "table of ranges"):
        table = RangeTable.checked(decode_ranges(data, stored.name))
    stored.check(stored.name, table)
    return table
