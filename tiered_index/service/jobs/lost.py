"""Gives up objects and archived segments that are missing or damaged, by name. Answers then name them as lost.

The log record is permanent. Restore copies first (`repair.py`). One thread.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from types import MappingProxyType

from tiered_index.errors import InvalidArgument
from tiered_index.service.jobs.repair import is_bad
from tiered_index.service.jobs.verify import check_segments
from tiered_index.service.jobs.verify_report import Report
from tiered_index.service.log.log import StorageLog
from tiered_index.service.log.records import ArchivedSegment, LogRecord, LostObject, StoredObject
from tiered_index.service.log.state import LogState
from tiered_index.service.read.segments import Segments
from tiered_index.storage.base import Storage
from tiered_index.types import no_progress


def named(state: LogState, file: str) -> list[StoredObject]:
    """Return the objects with a name, with a file's id, or of a window table's id."""
    return [stored for stored in state.inputs.values() if file in _names(stored)]


def give_up(
    storage: Storage,
    log: StorageLog,
    files: Sequence[str],
    unpublished: Mapping[str, LostObject] = MappingProxyType({}),
    *,
    dry_run: bool = False,
) -> list[LostObject]:
    """Give up the missing and damaged objects of `files` (each as in `named`), and `unpublished` files by id.

    Each object of `files` is read whole. Return all lost objects of `files`, also those that were given up before.
    `dry_run`: record nothing. Raises `InvalidArgument` if a file has no such object, and the errors of the storage.
    Then nothing is given up.
    """
    state = log.refresh()
    bad: list[StoredObject] = []
    for file in files:
        known = named(state, file)
        gone = [stored for stored in known if is_bad(storage, stored)]
        if not gone and file not in unpublished and not any(file in _names(lost) for lost in state.lost.values()):
            problem = (
                "its objects are whole: leave it out"
                if known
                else "the log names no such file: `tiered-index verify --deep` lists what is missing or damaged"
            )
            raise InvalidArgument(f"--lost {file}: {problem}")
        bad += gone

    if dry_run:
        planned = {lost.name: lost for lost in (*map(LostObject.of, bad), *unpublished.values())}
        state = replace(state, lost={**state.lost, **planned})
    else:
        state = _record_lost(log, bad, unpublished)
    return [lost for lost in state.lost.values() if not set(files).isdisjoint(_names(lost))]


def give_up_segments(
    storage: Storage, log: StorageLog, names: Sequence[str], *, dry_run: bool = False
) -> list[ArchivedSegment]:
    """Give up archived segments by the names of their objects, and return them. Their messages are then missing.

    Each object is read whole. `dry_run`: record nothing. Raises `InvalidArgument` if a segment is whole, and the errors
    of the storage. Then nothing is given up.
    """
    bad = Segments(log.refresh(), storage).named(names)
    for segment in bad:
        report = Report()
        check_segments(storage, [segment], report, no_progress, deep=True)
        if report.unchecked:
            raise report.unchecked[0][1]
        if not report.findings:
            raise InvalidArgument(f"--lost {segment.name}: the segment is whole: leave it out")

    def make(state: LogState) -> LogRecord | None:
        segments = Segments(state, storage)
        gone = [segments.removal(one) for one in segments.named(one.name for one in bad)]
        remove, hide = (tuple(x for one in gone for x in one.get(name, ())) for name in ("remove", "hide"))
        return LogRecord(0, "remove", 0, "", 0, remove=remove, hide=hide) if gone else None

    if bad and not dry_run:
        log.append("archived segments that were lost", None, make)
    return bad


def _record_lost(log: StorageLog, bad: Sequence[StoredObject], unpublished: Mapping[str, LostObject]) -> LogState:
    """Append the record that gives up the `bad` objects that the log still names, and `unpublished` files.

    Return the log's state.
    """

    def make(state: LogState) -> LogRecord | None:
        gone = tuple({stored.name: stored for stored in bad if state.input_of(stored.name)}.values())
        local = [lost for lost in unpublished.values() if lost.name not in state.lost]
        if not gone and not local:
            return None  # an earlier try or a merge has removed them
        names = tuple(stored.name for stored in gone)
        return LogRecord(0, "remove", 0, "", 0, remove=names, lost=(*map(LostObject.of, gone), *local))

    return log.append("the lost objects", None, make)


def _names(stored: StoredObject | LostObject) -> tuple[str, ...]:
    names = stored.name, stored.file_id
    return names if stored.shard is None else (*names, stored.shard.table)
