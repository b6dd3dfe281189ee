"""Objects that no log record names: what crashes left, and what merges have replaced. Found by a listing, deleted when asked.

An object that was uploaded a moment ago may be published in the next one, and a reader may still work at the log position before a merge:
so nothing younger than `older_than_s` is an orphan, nor what was removed from the log since.
Threads: any.
"""

from __future__ import annotations

from dataclasses import dataclass

from tiered_index.clock import Clock
from tiered_index.errors import InvalidArgument
from tiered_index.format.names import DATA_PREFIX, SEGMENTS_PREFIX, log_name
from tiered_index.service.log_records import LogRecord
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
    uploads = [
        handle for prefix in (DATA_PREFIX, SEGMENTS_PREFIX) for handle in storage.list_uploads(prefix, older_than_ms=before_ms)
    ]
    state = log.refresh()
    kept = state.objects.keys() | state.archive.keys() | _removed_since(storage, state.number, before_ms)
    return Orphans(tuple(info for info in listed if info.name not in kept), tuple(uploads))


def delete_orphans(storage: Storage, orphans: Orphans) -> None:
    """Delete them. Raises what the storage raises; what is left is found again."""
    storage.delete_many([info.name for info in orphans.objects])
    for handle in orphans.uploads:
        storage.abort_upload(handle)


def _removed_since(storage: Storage, last: int, before_ms: int) -> set[str]:
    """Return the names that records made since `before_ms` remove; costs one request a record."""
    removed: set[str] = set()
    for number in range(last, 0, -1):
        record = LogRecord.decode(storage.get(log_name(number)), log_name(number))
        if record.created_ms < before_ms:
            break
        removed.update(record.remove)
    return removed
