"""Finds and deletes orphans: objects that the log does not name, left by crashes or replaced by merges. Threads: any.

A new object may be published soon, and a reader may still use an object that was just merged. So nothing younger than
`older_than_s` is an orphan, and no object that was removed since (see `publication.MAX_AGE_S`). A staged file is an
orphan if the log has or had it, or if no ticket names it. It is one, too, if its only ticket is old and of a fenced
writer. Foreign objects are reported and kept.

It also gives up lost objects, which the log names but the storage does not have. One log record gives them up. From
then on answers are complete except for their entries, and say so permanently. It is safe to repeat this.
"""

from __future__ import annotations

import contextlib
import logging
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import TypeVar

from tiered_index.errors import CorruptFile, DiskFull, InvalidArgument, ObjectNotFound, StorageError
from tiered_index.format.names import (
    CHECKPOINT_PREFIX,
    DATA_PREFIX,
    EPOCH_PREFIX,
    LEASE_PREFIX,
    LOG_PREFIX,
    SEGMENTS_PREFIX,
    STAGING_PREFIX,
    TICKET_SUFFIX,
)
from tiered_index.service.lifecycle.staged import Ticket
from tiered_index.service.log.log import StorageLog, own_objects
from tiered_index.service.log.records import ArchivedSegment, LogRecord, LostObject, StoredObject
from tiered_index.service.log.state import LogState
from tiered_index.storage.base import PROBE_PREFIX, ObjectInfo, Storage, UploadHandle

Named = TypeVar("Named", bound=StoredObject | ArchivedSegment)
Item = TypeVar("Item")
_AT_ONCE = 1000
_log = logging.getLogger(__name__)
_LISTED = (DATA_PREFIX, SEGMENTS_PREFIX, PROBE_PREFIX)
_KEPT = (LOG_PREFIX, CHECKPOINT_PREFIX, EPOCH_PREFIX, LEASE_PREFIX)
MIN_AGE_S = 3600.0
"""The least `older_than_s`: an upload takes less time."""


@dataclass(frozen=True, slots=True)
class Orphans:
    """Objects and unfinished uploads that may be deleted, and `foreign` objects of any age, which are kept."""

    objects: tuple[ObjectInfo, ...]
    uploads: tuple[UploadHandle, ...]
    log: StorageLog
    foreign: tuple[ObjectInfo, ...] = ()
    # half-made work of killed processes that is older is deleted with them, by the storage's clock
    before_ms: int = 0

    @property
    def size_bytes(self) -> int:
        """The bytes of the objects."""
        return sum(info.size_bytes for info in self.objects)


def find_orphans(
    storage: Storage,
    log: StorageLog,
    *,
    older_than_s: float = 86400.0,
    removed_s: float | None = None,
    beat: Callable[[], object] = lambda: None,
) -> Orphans:
    """Return objects that the log does not name and that are older than `older_than_s`.

    Objects that records removed `removed_s` ago are included (None: `older_than_s` ago). Ages are by the storage's
    clock, because hosts' clocks differ. `beat` is called again and again meanwhile. Raises `InvalidArgument`, and the
    errors of the storage.
    """
    if not older_than_s >= MIN_AGE_S:
        raise InvalidArgument(
            f"older_than_s must be at least 1h ({MIN_AGE_S:.0f} s), not {older_than_s!r} s: an upload may still run"
        )
    now_ms = storage.now_ms()
    before_ms = now_ms - round(older_than_s * 1000)
    foreign: list[ObjectInfo] = []

    def own(prefix: str) -> Iterator[ObjectInfo]:
        return _beating(own_objects(storage, prefix, foreign=foreign.append), beat)

    for prefix in _KEPT:
        deque(own(prefix), 0)
    # most objects are named now: they are dropped while they are listed, so that memory does not grow with them
    known = log.refresh()
    listed = [info for prefix in _LISTED for info in own(prefix) if not _names_object(known, info.name)]
    staged = list(own(STAGING_PREFIX))
    tickets, renewed = _tickets(storage, staged)
    uploads = [
        handle
        for prefix in (DATA_PREFIX, SEGMENTS_PREFIX, STAGING_PREFIX)
        for handle in storage.list_uploads(prefix, older_than_ms=before_ms)
    ]
    # the log after the listing, so that objects that are published meanwhile are known
    state = log.refresh()
    recent = _beating(log.numbers_since(state.number, before_ms), beat)
    removed = {number: log.record(number).remove for number in recent}
    over: set[str] = set()
    if removed_s is not None and removed_s < older_than_s:
        since_ms = now_ms - round(removed_s * 1000)
        young = set(log.numbers_since(state.number, since_ms)) if removed_s else set()
        over = {name for number in removed.keys() - young for name in removed.pop(number)}
    listed += _infos(storage, _beating([name for name in over if _names_object(known, name)], beat))
    listed = [info for info in listed if info.modified_ms < before_ms or info.name in over]
    young_removed = {name for names in removed.values() for name in names}
    waiting = _waiting(log, state, tickets, before_ms)
    listed += [
        info
        for info in staged
        if info.modified_ms < before_ms and info.name not in waiting and _file_of(info) not in renewed
    ]
    orphaned, strange = (
        tuple(i for i in infos if i.name not in young_removed and not _names_object(state, i.name))
        for infos in (listed, foreign)
    )
    return Orphans(orphaned, tuple(uploads), log, strange, before_ms)


def delete_orphans(storage: Storage, orphans: Orphans, beat: Callable[[], object] = lambda: None) -> Orphans:
    """Delete the orphans that still no record or ticket names. Return them. Raises the errors of the storage.

    `beat` is called again and again meanwhile.
    """
    deleted: list[ObjectInfo] = []
    doomed = {info.name for info in orphans.objects}
    for start in _beating(range(0, len(orphans.objects), _AT_ONCE), beat):
        batch = orphans.objects[start : start + _AT_ONCE]
        asked: set[str] = set()
        if any(info.name.startswith(STAGING_PREFIX) for info in batch):
            tickets = [info for info in own_objects(storage, STAGING_PREFIX) if info.name.endswith(TICKET_SUFFIX)]
            asked = {_file_of(info) for info in tickets if info.name not in doomed}
        state = orphans.log.refresh()
        gone = [
            i
            for i in batch
            if not _names_object(state, i.name) and not (i.name.startswith(STAGING_PREFIX) and _file_of(i) in asked)
        ]
        storage.delete_many([info.name for info in gone])
        deleted += gone
    for handle in _beating(orphans.uploads, beat):
        storage.abort_upload(handle)
    # no listing shows half-made files, drafts and bytes of deleted objects
    try:
        storage.purge(orphans.before_ms)
    except (StorageError, DiskFull) as error:
        _log.warning("half-made files of killed processes stay; the next sweep tries again: %s", error)
    return replace(orphans, objects=tuple(deleted))


def _beating(items: Iterable[Item], beat: Callable[[], object]) -> Iterator[Item]:
    """Yield the items. Call `beat` before each, and at the end."""
    for item in items:
        beat()
        yield item
    beat()


def _names_object(state: LogState, name: str) -> bool:
    return name in state.objects or name in state.archive


def _infos(storage: Storage, names: Iterable[str]) -> list[ObjectInfo]:
    """Return the descriptions of the objects that the storage has: a request each."""
    found = []
    for name in names:
        with contextlib.suppress(ObjectNotFound):
            found.append(storage.head(name))
    return found


def _file_of(info: ObjectInfo) -> str:
    return info.name.split("/")[1]


def _tickets(storage: Storage, staged: Sequence[ObjectInfo]) -> tuple[list[tuple[Ticket, int]], set[str]]:
    """Return the tickets, each with the time of its put, and the files whose ticket has just been replaced."""
    tickets, renewed = [], set()
    for info in staged:
        if info.name.endswith(TICKET_SUFFIX):
            try:
                with contextlib.suppress(CorruptFile):
                    tickets.append((Ticket.decode(storage.get(info.name), info.name), info.modified_ms))
            except ObjectNotFound:
                renewed.add(_file_of(info))
    return tickets, renewed


def _waiting(log: StorageLog, state: LogState, tickets: Sequence[tuple[Ticket, int]], before_ms: int) -> set[str]:
    """Return the names of the tickets that are still valid, and of their objects."""
    current = [ticket.log_number for ticket, _ in tickets if ticket.epoch == state.epoch]
    removed = log.removed_files(state, min(current)) if current else set()

    def is_over(ticket: Ticket, modified_ms: int) -> bool:
        if state.object_of(ticket.file_id) is not None:
            return True
        return ticket.file_id in removed if ticket.epoch == state.epoch else modified_ms < before_ms

    return {
        name
        for ticket, modified_ms in tickets
        if not is_over(ticket, modified_ms)
        for name in (ticket.name, ticket.object)
    }


def not_there(storage: Storage, objects: Iterable[Named]) -> list[Named]:
    """Return the objects that the storage does not have: a request each. Raises the errors of the storage."""
    missing = []
    for stored in objects:
        try:
            storage.head(stored.name)
        except ObjectNotFound:
            missing.append(stored)
    return missing


def named(state: LogState, file: str) -> list[StoredObject]:
    """Return the objects with a name, with a file's id, or of a window table's id."""
    return [stored for stored in state.objects.values() if file in _names(stored)]


def give_up(
    storage: Storage,
    log: StorageLog,
    files: Sequence[str],
    unpublished: Mapping[str, LostObject] = MappingProxyType({}),
    *,
    dry_run: bool = False,
) -> list[LostObject]:
    """Give up the lost objects of `files` (each as in `named`), and `unpublished` files by id.

    Return all lost objects of `files`, also those that were given up before. `dry_run`: record nothing. Raises
    `InvalidArgument` if a file has no lost object, and the errors of the storage. Then nothing is given up.
    """
    state = log.refresh()
    missing: list[StoredObject] = []
    for file in files:
        known = named(state, file)
        gone = not_there(storage, known)
        if not gone and file not in unpublished and not any(file in _names(one) for one in state.lost.values()):
            problem = (
                "the storage has all its objects: leave it out"
                if known
                else "the log names no such file: `tiered-index verify` lists the missing ones"
            )
            raise InvalidArgument(f"--lost {file}: {problem}")
        missing += gone

    if dry_run:
        planned = {one.name: one for one in (*map(LostObject.of, missing), *unpublished.values())}
        state = replace(state, lost={**state.lost, **planned})
    else:
        state = record_lost(log, missing, unpublished)
    return [one for one in state.lost.values() if not set(files).isdisjoint(_names(one))]


def record_lost(
    log: StorageLog, missing: Sequence[StoredObject], unpublished: Mapping[str, LostObject] = MappingProxyType({})
) -> LogState:
    """Append the record that gives up the `missing` objects that the log still names, and `unpublished` files.

    Return the log's state.
    """

    def make(state: LogState) -> LogRecord | None:
        gone = tuple({stored.name: stored for stored in missing if stored.name in state.objects}.values())
        local = [one for one in unpublished.values() if one.name not in state.lost]
        if not gone and not local:
            return None  # an earlier try or a merge has removed them
        names = tuple(stored.name for stored in gone)
        return LogRecord(0, "remove", 0, "", 0, remove=names, lost=(*map(LostObject.of, gone), *local))

    return log.append("the lost objects", None, make)


def _names(one: StoredObject | LostObject) -> tuple[str, ...]:
    return (one.name, one.file_id) if one.shard is None else (one.name, one.file_id, one.shard.table)
