"""Gives up objects and archived segments that are missing or damaged, by name. Answers then name them as lost.

The log record is permanent. Restore copies first (`repair.py`). One thread.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from types import MappingProxyType

from tiered_index.errors import InvalidArgument
from tiered_index.service.jobs.whole import is_bad
from tiered_index.service.log.log import StorageLog
from tiered_index.service.log.records import ArchivedSegment, LogRecord, LostObject, StoredObject
from tiered_index.service.log.state import LogState
from tiered_index.service.read.segments import Segments
from tiered_index.storage.base import Storage


def named(state: LogState, file: str) -> list[StoredObject]:
    """Return the objects with a name, with a file's id, or of a window table's id."""
    return [stored for stored in state.inputs.values() if file in _names(stored)]


def give_up(
    storage: Storage,
    log: StorageLog,
    names: Sequence[str],
    unpublished: Mapping[str, LostObject] = MappingProxyType({}),
    *,
    dry_run: bool = False,
) -> list[LostObject | ArchivedSegment]:
    """Give up what is missing or damaged of `names` by one record, and `unpublished` files by id.

    A name is that of an archived segment, or as in `named`. Each object of `names` is read whole. Return all that is
    lost of `names`, also objects that were given up before. `dry_run`: record nothing. Raises `InvalidArgument` for a
    name that has nothing lost, and the errors of the storage. Then nothing is given up.
    """
    state = log.refresh()
    segments = Segments(state, storage)
    bad: list[StoredObject | ArchivedSegment] = []
    for name in names:
        known: list[StoredObject | ArchivedSegment] = [*segments.named([name]), *named(state, name)]
        gone = [stored for stored in known if is_bad(storage, stored)]
        if not gone and name not in unpublished and not any(name in _names(lost) for lost in state.lost.values()):
            problem = (
                "its objects are whole: leave it out"
                if known
                else "the log names no such file: `tiered-index verify --deep` lists what is missing or damaged"
            )
            raise InvalidArgument(f"--lost {name}: {problem}")
        bad += gone
    gone_segments = [stored for stored in bad if isinstance(stored, ArchivedSegment)]
    objects = [stored for stored in bad if isinstance(stored, StoredObject)]

    def make(state: LogState) -> LogRecord | None:
        gone = tuple({stored.name: stored for stored in objects if state.input_of(stored.name)}.values())
        local = [lost for lost in unpublished.values() if lost.name not in state.lost]
        present = Segments(state, storage)
        removals = [present.removal(segment) for segment in present.named(segment.name for segment in gone_segments)]
        if not (gone or local or removals):
            return None  # an earlier try or a merge has removed them
        remove, hide = (tuple(x for removal in removals for x in removal.get(name, ())) for name in ("remove", "hide"))
        remove += tuple(stored.name for stored in gone)
        return LogRecord(0, "remove", 0, "", 0, remove=remove, hide=hide, lost=(*map(LostObject.of, gone), *local))

    if dry_run:
        planned = {lost.name: lost for lost in (*map(LostObject.of, objects), *unpublished.values())}
        state = replace(state, lost={**state.lost, **planned})
    else:
        state = log.append("what was lost", None, make)
    return [*(lost for lost in state.lost.values() if not set(names).isdisjoint(_names(lost))), *gone_segments]


def _names(stored: StoredObject | LostObject) -> tuple[str, ...]:
    names = stored.name, stored.file_id
    return names if stored.shard is None else (*names, stored.shard.table)
