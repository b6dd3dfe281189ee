"""Objects that no log record names: what crashes left, and what merges have replaced. Found by a listing, deleted when asked.

An object that was uploaded a moment ago may be published in the next one, and a reader may still work at the log position before a merge:
so nothing younger than `older_than_s` is an orphan, nor what was removed from the log since. Staged files are orphans once the log has or
had them, or no ticket names them; those of a fenced writer wait for its return.
Threads: any.
"""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from dataclasses import dataclass

from tiered_index.clock import Clock
from tiered_index.errors import CorruptFile, InvalidArgument, ObjectNotFound
from tiered_index.format.names import DATA_PREFIX, SEGMENTS_PREFIX, STAGING_PREFIX, TICKET_SUFFIX
from tiered_index.service.log_records import LogState
from tiered_index.service.removals import Removals
from tiered_index.service.staged import Ticket
from tiered_index.service.storage_log import StorageLog
from tiered_index.storage.base import ObjectInfo, Storage, UploadHandle

__all__ = ["MIN_AGE_S", "Orphans", "delete_orphans", "find_orphans"]

MIN_AGE_S = 3600.0
"""Uploads take less than this; the least `older_than_s`."""


@dataclass(frozen=True, slots=True)
class Orphans:
    """Objects and unfinished uploads that may go."""

    objects: tuple[ObjectInfo, ...]
    uploads: tuple[UploadHandle, ...]

    @property
    def size_bytes(self) -> int:
        """Bytes of the objects."""
        return sum(info.size_bytes for info in self.objects)


def find_orphans(storage: Storage, log: StorageLog, clock: Clock, *, older_than_s: float = 86400.0) -> Orphans:
    """Return what no record names and what is older than `older_than_s` (at least an hour).

    The listing comes before the log, so that what is published meanwhile is known. Raises `InvalidArgument`, what the storage raises.
    """
    if not older_than_s >= MIN_AGE_S:
        raise InvalidArgument(f"older_than_s must be {MIN_AGE_S:.0f} or more, not {older_than_s!r}: an upload may be under way")
    before_ms = clock.now_ms() - round(older_than_s * 1000)
    listed = [info for prefix in (DATA_PREFIX, SEGMENTS_PREFIX) for info in storage.list(prefix) if info.modified_ms < before_ms]
    staged = list(storage.list(STAGING_PREFIX))
    tickets = _tickets(storage, staged)
    uploads = [
        handle
        for prefix in (DATA_PREFIX, SEGMENTS_PREFIX, STAGING_PREFIX)
        for handle in storage.list_uploads(prefix, older_than_ms=before_ms)
    ]
    state = log.refresh()
    kept = state.objects.keys() | state.archive.keys() | _removed_since(log, state.number, before_ms)
    over = _published(log, state, tickets)
    waiting = {name for ticket in tickets if ticket.file_id not in over for name in (ticket.name, ticket.object)}
    listed += [info for info in staged if info.modified_ms < before_ms and info.name not in waiting]
    return Orphans(tuple(info for info in listed if info.name not in kept), tuple(uploads))


def delete_orphans(storage: Storage, orphans: Orphans) -> None:
    """Delete them. Raises what the storage raises; what is left is found again."""
    storage.delete_many([info.name for info in orphans.objects])
    for handle in orphans.uploads:
        storage.abort_upload(handle)


def _removed_since(log: StorageLog, last: int, before_ms: int) -> set[str]:
    """Return the names that records put since `before_ms` remove; costs a request a record, and a listing a thousand.

    It is the storage's word that counts, as for all else here: the records' own times are of clocks of many hosts.
    """
    removed: set[str] = set()
    for number in log.numbers_since(last, before_ms):
        removed.update(log.record(number).remove)
    return removed


def _tickets(storage: Storage, staged: Sequence[ObjectInfo]) -> list[Ticket]:
    """Return the tickets among staged objects; a damaged one asks for nothing."""
    tickets = []
    for info in staged:
        if info.name.endswith(TICKET_SUFFIX):
            # one that is gone was renewed or is over: its file's writer knows what it has staged, and compacts it by itself if need be
            with contextlib.suppress(CorruptFile, ObjectNotFound):
                tickets.append(Ticket.decode(storage.get(info.name), info.name))
    return tickets


def _published(log: StorageLog, state: LogState, tickets: Sequence[Ticket]) -> set[str]:
    """Return the files of tickets that are in the log, or were."""
    if not tickets:
        return set()
    removed = Removals(log).files(state, min(ticket.log_number for ticket in tickets))
    return {ticket.file_id for ticket in tickets if state.object_of(ticket.file_id) is not None} | removed
