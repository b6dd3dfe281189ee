"""Gives up objects, segments and catalogs that are missing or damaged, by name. Answers then name them as lost.

With a catalog, all segments are lost that only it lists. The record keeps their ranges of offsets.

The log record is permanent. Restore copies first (`repair.py`). One thread.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from types import MappingProxyType

from tiered_index.errors import InvalidArgument
from tiered_index.service.jobs.rewriting.whole import is_bad
from tiered_index.service.log.log import StorageLog
from tiered_index.service.log.records import ArchivedSegment, LogRecord, LostObject, StoredCatalog, StoredObject
from tiered_index.service.log.state import LogState
from tiered_index.service.read.segments.segments import Segments
from tiered_index.storage.base import Storage


def named(state: LogState, file: str) -> list[StoredObject]:
    """Return the objects with a name, with a file's id, or of a window table's id."""
    return [stored for stored in state.objects.values() if file in _names(stored)]


def give_up(
    storage: Storage,
    log: StorageLog,
    names: Sequence[str],
    unpublished: Mapping[str, LostObject] = MappingProxyType({}),
    *,
    dry_run: bool = False,
) -> list[LostObject | ArchivedSegment]:
    """Give up what is missing or damaged of `names` by one record, and `unpublished` files by id.

    A name is that of an archived segment or of a catalog, or as in `named`. Each object of `names` is read whole.
    Return all that is lost of `names`, also objects that were given up before; a catalog as `LostObject.of_catalog`.
    `dry_run`: record nothing. Raises `InvalidArgument` for a name that has nothing lost, and the errors of the storage.
    Then nothing is given up.
    """
    state = log.refresh()
    segments = Segments(state, storage)
    bad: list[StoredObject | ArchivedSegment | StoredCatalog] = []
    for name in names:
        candidates: list[StoredObject | ArchivedSegment | StoredCatalog] = [*named(state, name)]
        if name in state.catalogs:
            candidates.append(state.catalogs[name])
        elif not candidates:
            candidates += segments.named([name])
        gone = [stored for stored in candidates if is_bad(storage, stored)]
        if not gone and name not in unpublished and not any(name in _names(lost) for lost in state.lost.values()):
            problem = (
                "its objects are whole: leave it out"
                if candidates
                else "the log names no such file: `tiered-index verify --deep` lists what is missing or damaged"
            )
            raise InvalidArgument(f"--lost {name}: {problem}")
        bad += gone
    gone_segments = [stored for stored in bad if isinstance(stored, ArchivedSegment)]
    objects = [stored for stored in bad if isinstance(stored, StoredObject)]
    catalogs = {stored.name: stored for stored in bad if isinstance(stored, StoredCatalog)}

    def make(state: LogState) -> LogRecord | None:
        gone = tuple({stored.name: stored for stored in objects if stored.name in state.objects}.values())
        local = [lost for lost in unpublished.values() if lost.name not in state.lost]
        unlisted = [catalogs[name] for name in catalogs if name in state.catalogs]
        present = Segments(_without(state, unlisted), storage)
        removed = present.change([], present.named(segment.name for segment in gone_segments))
        if not (gone or local or unlisted or any(removed.values())):
            return None  # an earlier try or a merge has removed them
        removed["remove"] = (*(stored.name for stored in gone), *(stored.name for stored in unlisted))
        lost = (*map(LostObject.of, gone), *local, *_ranges(state, unlisted))
        return LogRecord(0, "remove", 0, "", 0, lost=lost, **removed)

    if dry_run:
        ranges = _ranges(state, catalogs.values())
        planned = {lost.name: lost for lost in (*map(LostObject.of, objects), *unpublished.values(), *ranges)}
        state = replace(state, lost={**state.lost, **planned})
    else:
        state = log.append("what was lost", None, make)
    return [*(lost for lost in state.lost.values() if not set(names).isdisjoint(_names(lost))), *gone_segments]


def _ranges(state: LogState, catalogs: Iterable[StoredCatalog]) -> list[LostObject]:
    """Return the ranges that are lost with catalogs of a state."""
    retired, expired = state.retired, state.expired.segments
    return list(itertools.chain(*(LostObject.of_catalog(stored, retired, expired) for stored in catalogs)))


def _without(state: LogState, catalogs: Sequence[StoredCatalog]) -> LogState:
    """Return a state without catalogs."""
    names = {stored.name for stored in catalogs}
    return replace(state, catalogs={name: stored for name, stored in state.catalogs.items() if name not in names})


def _names(stored: StoredObject | LostObject) -> tuple[str, ...]:
    names: tuple[str, ...] = stored.name, stored.file_id
    if isinstance(stored, LostObject) and stored.range is not None and stored.range.catalog is not None:
        names += (stored.range.catalog,)
    return names if stored.shard is None else (*names, stored.shard.table)
