"""Objects on their way into the storage that no log record names yet: sent in parts, completed or taken back.

Names are unique to the attempt. Who sends leaves a multipart upload unfinished where another one decides; whoever
publishes completes it. Memory: two parts an upload. Threads: one an upload; any number of uploads.
"""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from dataclasses import dataclass

from tiered_index.clock import Clock
from tiered_index.errors import CorruptFile, StorageError, StorageUnavailable, TieredIndexError
from tiered_index.format.trailer import Trailer
from tiered_index.service.log.log import Make, StorageLog
from tiered_index.service.log.records import LogRecord, StoredObject
from tiered_index.service.log.state import LogState
from tiered_index.storage.base import PartInfo, Storage, UploadHandle

__all__ = [
    "MAX_AGE_S",
    "FinishedObject",
    "JobOverdue",
    "Upload",
    "abandon",
    "age_s_of",
    "append_in_time",
    "check_age",
    "complete",
    "stored_file",
]

MAX_AGE_S = 23 * 3600
"""How long after it began to be uploaded an object may be published: an hour less than `orphans` spares by default what
no record names.
"""
_PART_BYTES = 16 << 20


class JobOverdue(TieredIndexError):
    """A job took so long that what it has uploaded may be swept at any moment; nothing was published. Divide the work,
    run it again.
    """

    exit_code = 3


@dataclass(frozen=True, slots=True)
class FinishedObject:
    """An object as it will stand in the log, and its unfinished upload; None: it was put whole."""

    stored: StoredObject
    upload: UploadHandle | None
    parts: tuple[PartInfo, ...]


class Upload:
    """An object on its way: parts of `part_bytes`, or one put where it is smaller."""

    def __init__(self, storage: Storage, name: str, part_bytes: int = _PART_BYTES) -> None:
        self.name = name
        self.size_bytes = 0
        self.handle: UploadHandle | None = None
        self.parts: list[PartInfo] = []
        self._storage = storage
        self._part_bytes = max(part_bytes, storage.min_part_bytes)
        self._held: list[bytes] = []
        self._held_bytes = 0

    def write(self, data: bytes | memoryview) -> None:
        """Take the next bytes; what makes a full part and leaves one behind it is sent."""
        self._held.append(bytes(data))
        self._held_bytes += len(data)
        self.size_bytes += len(data)
        while self._held_bytes >= 2 * self._part_bytes:
            joined = b"".join(self._held)
            self._send(joined[: self._part_bytes])
            self._held, self._held_bytes = [joined[self._part_bytes :]], len(joined) - self._part_bytes

    def finish(self) -> None:
        """Send what is held: at least one full part before it was sent, or all of it is put as one object."""
        rest = b"".join(self._held)
        self._held = []
        if self.handle is None:
            self._storage.put(self.name, rest)
        else:
            self._send(rest)

    def abandon(self) -> None:
        """Take back what was sent; what can't be is left to `orphans`: the error that led here is the one that
        counts.
        """
        with contextlib.suppress(StorageError):
            if self.handle is not None:
                self._storage.abort_upload(self.handle)
            elif self.size_bytes:
                self._storage.delete(self.name)

    def _send(self, data: bytes) -> None:
        if self.handle is None:
            self.handle = self._storage.begin_upload(self.name)
        self.parts.append(self._storage.upload_part(self.handle, len(self.parts) + 1, data))


def complete(finished: Sequence[FinishedObject], storage: Storage) -> None:
    """Complete the uploads, so that each object is there as it was written.

    Raises `CorruptFile`, what the storage raises.
    """
    for one in finished:
        if one.upload is not None:
            storage.complete_upload(one.upload, one.parts)
        size = storage.head(one.stored.name).size_bytes
        if size != one.stored.size_bytes:
            raise CorruptFile(
                one.stored.name, "object has another size than was written", expected=one.stored.size_bytes, found=size
            )


def abandon(finished: Sequence[FinishedObject], storage: Storage) -> None:
    """Delete what a job that will not be published has uploaded; what can't be deleted is left to `orphans`."""
    for one in finished:
        if one.upload is not None:
            with contextlib.suppress(StorageError):  # it may be complete already
                storage.abort_upload(one.upload)
        with contextlib.suppress(StorageError):
            storage.delete(one.stored.name)


def append_in_time(
    what: str, finished: Sequence[FinishedObject], make: Make, storage: Storage, log: StorageLog
) -> LogState:
    """Append the record of a job that has uploaded `finished`, which say in `published_ms` when it began to, by this
    host's clock.

    Raises `JobOverdue` where that is `MAX_AGE_S` ago, and takes the uploads back; as `StorageLog.append`.
    """

    def made_in_time(state: LogState) -> LogRecord | None:
        record = make(state)
        age_s = max((age_s_of(one.stored.published_ms, log.clock) for one in finished), default=0.0)
        if record is not None and age_s >= MAX_AGE_S:
            raise JobOverdue(
                f"{storage.uri}: {what} began {age_s / 3600:.1f} hours ago and would be published now; what it "
                f"uploaded may be swept as "
                f"orphans after {MAX_AGE_S // 3600} hours, so nothing was published: divide the work, or give it "
                f"more workers"
            )
        return record

    try:
        return log.append(what, None, made_in_time)
    except JobOverdue:
        abandon(finished, storage)
        raise


def age_s_of(began_ms: int, clock: Clock) -> float:
    """Return how long ago an upload was begun, by this host's clock; one that was put back counts as one that went
    on.
    """
    return abs(clock.now_ms() - began_ms) / 1000


def check_age(name: str, began_ms: int, clock: Clock, storage: Storage) -> None:
    """Raise `StorageUnavailable` where the upload of an object that is about to be published was begun `MAX_AGE_S` ago:
    it is sent anew.
    """
    if (age_s := age_s_of(began_ms, clock)) >= MAX_AGE_S:
        raise StorageUnavailable(
            f"{storage.uri}: {name} was uploaded {age_s / 3600:.1f} hours ago and no record names it yet; it may be "
            f"swept as an orphan at "
            "any moment, so it isn't published, but sent anew"
        )


def stored_file(name: str, trailer: Trailer, size_bytes: int, published_ms: int) -> StoredObject:
    """Return a compacted file, of which `trailer` is the trailer, as it will stand in the log under `name`."""
    metadata, tail = trailer.metadata, trailer.tail
    return StoredObject(
        name=name,
        file_id=metadata.file_id,
        lane=metadata.lane,
        sequence=int(metadata.more.get("sequence", 0)),
        second_min=metadata.second_min,
        second_max=metadata.second_max,
        count=metadata.count,
        size_bytes=size_bytes,
        trailer_position=tail.position,
        filter_length=tail.filter_length,
        directory_length=tail.directory_length,
        metadata_length=tail.metadata_length,
        published_ms=published_ms,
    )
