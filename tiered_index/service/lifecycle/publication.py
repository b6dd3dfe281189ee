"""Publications: objects are sent under new names, then one log record names them.

Uploads, archived segments, staged files, compactions, merges and Spark builds use this.

```
                ┌─ the record is there ─────────> recorded
send ─> sent ─ append ─ its answer is lost ──> unknown: the log, read again, shows which of the others
                └─ others were first, or fenced ─> taken over: the uploads are deleted
```
A writer (`epoch`) keeps sent objects for its next try. A job (None) deletes objects that certainly were not published.
An object that the log names, or may still name, is never deleted. No object is published later than `MAX_AGE_S` after
its sending began. Memory: two parts per upload. Threads: one for each upload or publication.
"""

from __future__ import annotations

import contextlib
import secrets
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy.typing as npt

from tiered_index.errors import (
    CorruptFile,
    DiskFull,
    InvalidArgument,
    ObjectNotFound,
    StorageError,
    StorageUnavailable,
    TieredIndexError,
    WriterFenced,
)
from tiered_index.format.compacted import SealedFile
from tiered_index.format.names import data_name
from tiered_index.format.trailer import Trailer, parse_trailer
from tiered_index.service.log.log import Make, StorageLog
from tiered_index.service.log.records import LogRecord, Origin, StoredObject, TableShard
from tiered_index.service.log.state import LogState
from tiered_index.storage.base import Bytes, PartInfo, Storage, UploadHandle

MAX_AGE_S = 23 * 3600
"""Longest time from the begin of sending to publication: an hour less than `orphans` keeps unnamed objects by default.
"""
_PART_BYTES = 16 << 20


class JobOverdue(TieredIndexError):
    """A job took so long that a sweep may delete its uploads. Nothing was published. Divide the work."""

    exit_code = 3


class Upload:
    """Sends one object: by one put, or in parts of `part_bytes`.

    The last part has at most `last_bytes` (None: less than two parts).
    """

    def __init__(
        self, storage: Storage, name: str, part_bytes: int = _PART_BYTES, last_bytes: int | None = None
    ) -> None:
        self.name = name
        self.size_bytes = 0
        self.handle: UploadHandle | None = None
        self.parts: list[PartInfo] = []
        self._storage = storage
        self._part_bytes = max(part_bytes, storage.min_part_bytes)
        self._last_bytes = 2 * self._part_bytes - 1 if last_bytes is None else max(last_bytes, self._part_bytes)
        self._held: list[bytes | memoryview] = []
        self._held_bytes = 0

    def write(self, data: bytes | memoryview) -> None:
        """Add the next bytes, and send full parts. Read-only buffers are not copied."""
        view = memoryview(data)
        self._held.append(view if view.readonly else bytes(view))
        self._held_bytes += len(view)
        self.size_bytes += len(view)
        if self._held_bytes > self._last_bytes:
            while self._held_bytes > self._last_bytes:
                self._send(self._taken(self._part_bytes), len(self.parts) + 1)
            self._held = [bytes(rest) for rest in self._held]  # copies, so that the buffers can be freed

    def place(self, start: int, data: bytes) -> None:
        """Send the part from `start`, a multiple of the part size, in any order. Don't use it together with `write`.

        Less than a part from 0 is the whole object.
        """
        if not start and len(data) < self._part_bytes:
            self.write(data)
        else:
            self._send(data, start // self._part_bytes + 1)

    def finish(self, began_ms: int = 0) -> SentObject:
        """Send the remaining bytes, or the whole object by one put. Return the sent object, with `began_ms`."""
        rest = self._taken(self._held_bytes)
        if self.handle is None:
            self._storage.put(self.name, rest)
        elif rest:
            self._send(rest, len(self.parts) + 1)
        return SentObject(self.name, self.size_bytes, began_ms, self.handle, tuple(self.parts))

    def abandon(self, *, is_fresh: bool = True) -> None:
        """Abort the upload, or delete the object. Errors are ignored: `orphans` deletes the rest later.

        An object whose name is not `is_fresh` is kept, because others may have published it.
        """
        self._held.clear()
        with contextlib.suppress(StorageError, DiskFull):
            if self.handle is not None:
                self._storage.abort_upload(self.handle)
            elif self.size_bytes and is_fresh:
                self._storage.delete(self.name)

    def _taken(self, length: int) -> Bytes:
        """Remove and return the first `length` bytes that are held."""
        self._held_bytes -= length
        taken: list[bytes | memoryview] = []
        while length:
            first = memoryview(self._held.pop(0))
            if len(first) > length:
                self._held.insert(0, first[length:])
            taken.append(first[:length])
            length -= len(taken[-1])
        return taken[0] if len(taken) == 1 else b"".join(taken)

    def _send(self, data: Bytes, number: int) -> None:
        if self.handle is None:
            self.handle = self._storage.begin_upload(self.name)
        self.parts.append(self._storage.upload_part(self.handle, number, data))


@dataclass(frozen=True, slots=True)
class SentObject:
    """A sent object, and its unfinished upload (None: it is complete). `began_ms` is by the sender's clock."""

    name: str
    size_bytes: int
    began_ms: int
    upload: UploadHandle | None
    parts: tuple[PartInfo, ...]


@dataclass(frozen=True, slots=True)
class FinishedObject:
    """An object of a job as the log will describe it. Its `published_ms` is the begin of its sending."""

    stored: StoredObject
    sent: SentObject


def send_object(
    storage: Storage,
    name: str,
    fill: Callable[[Upload], object],
    began_ms: int,
    part_bytes: int = _PART_BYTES,
    last_bytes: int | None = None,
) -> SentObject:
    """Send an object without completing its upload. `fill` writes its bytes. After an error the object is deleted."""
    upload = Upload(storage, name, part_bytes, last_bytes)
    try:
        fill(upload)
        return upload.finish(began_ms)
    except BaseException:
        upload.abandon()
        raise


class Publication:
    """Sent objects, until a record names them or never will. `epoch` is the writer's; None: a job."""

    def __init__(self, log: StorageLog, objects: Sequence[SentObject], epoch: int | None = None) -> None:
        self._objects = list(objects)
        self._log, self._storage, self._epoch = log, log.storage, epoch

    @classmethod
    def send(
        cls,
        log: StorageLog,
        name: str,
        fill: Callable[[Upload], object],
        part_bytes: int = _PART_BYTES,
        last_bytes: int | None = None,
        epoch: int | None = None,
    ) -> Publication:
        """Send an object as `send_object` does, and complete its upload. Times are by the log's clock."""
        sent = send_object(log.storage, name, fill, log.clock.now_ms(), part_bytes, last_bytes)
        publication = cls(log, [sent], epoch)
        with publication.undone():
            publication.complete()
        return publication

    @contextlib.contextmanager
    def undone(self) -> Iterator[None]:
        """Return a context manager that deletes the objects after an error: no record can name them yet."""
        try:
            yield
        except BaseException:
            abandon(self._objects, self._storage)
            raise

    def complete(self) -> None:
        """Complete the uploads. Raises `ObjectNotFound` for a missing object.

        A wrong size raises `CorruptFile` for a job, `StorageUnavailable` for a writer.
        """
        for number, one in enumerate(self._objects):
            if one.upload is not None:
                # an earlier request may have completed it without an answer: the object's size decides
                with contextlib.suppress(ObjectNotFound):
                    self._storage.complete_upload(one.upload, one.parts)
                self._objects[number] = replace(one, upload=None)
            size = self._storage.head(one.name).size_bytes
            if self._epoch is not None and size != one.size_bytes:
                raise StorageUnavailable(
                    f"{self._storage.uri}: {one.name} has {size:,} bytes after its upload, not {one.size_bytes:,}"
                )
            problem = "object has another size than was written"
            CorruptFile.unless_equal(one.name, problem, one.size_bytes, size)

    @property
    def sent(self) -> SentObject:
        """The object, if there is only one."""
        return self._objects[0]

    @property
    def is_overdue(self) -> bool:
        """Whether it is too late to publish the objects, because `orphans` may delete them."""
        return self._age_s >= MAX_AGE_S

    @property
    def _age_s(self) -> float:
        """Seconds since the sending began, by this host's clock. A clock that was set back counts like one that ran."""
        now_ms = self._log.clock.now_ms()
        return max((abs(now_ms - one.began_ms) for one in self._objects), default=0) / 1000

    def record(self, what: str, make: Make, holder: Callable[[LogState], object] = lambda state: "others") -> LogState:
        """Append the record that `make` returns (None: others were first). Return the log's state.

        `holder` returns the object that the log has in place of these; None: none. Raises the errors of
        `StorageLog.append` and `make`. If it is too late it raises `JobOverdue` for a job, `StorageUnavailable` for a
        writer.
        """

        def made_in_time(state: LogState) -> LogRecord | None:
            record = make(state)
            if record is not None and (record.add or record.archive) and self.is_overdue:
                raise self._overdue(what)
            return record

        try:
            state = self._log.append(what, self._epoch, made_in_time)
        except TieredIndexError as error:
            is_over = self._epoch is None and not isinstance(error, StorageError | DiskFull | InvalidArgument)
            if is_over or isinstance(error, WriterFenced):
                # no later record can name the objects; after `InvalidArgument` the caller may try another record
                self.resolve(self._log.state)
            raise
        if holder(state) is not None:  # otherwise an earlier record of unknown outcome may name the objects
            self.resolve(state)
        return state

    def resolve(self, state: LogState) -> None:
        """Delete the objects that `state` does not name. Call it only if no later record can name them."""
        left = [one for one in self._objects if one.name not in state.objects and one.name not in state.archive]
        abandon(left, self._storage)

    def _overdue(self, what: str) -> TieredIndexError:
        where, hours = self._storage.uri, self._age_s / 3600
        if self._epoch is None:
            return JobOverdue(
                f"{where}: {what} began {hours:.1f} hours ago and is too late to publish: its uploads may be swept as "
                f"orphans after {MAX_AGE_S // 3600} hours. Nothing was published: divide the work, or use more workers"
            )
        return StorageUnavailable(
            f"{where}: {self.sent.name} was uploaded {hours:.1f} hours ago, but no record names it yet. It may be "
            f"swept as an orphan, so it will be sent again"
        )


def abandon(objects: Iterable[SentObject], storage: Storage) -> None:
    """Delete objects that no record will name. After an error `orphans` deletes them later."""
    for one in objects:
        if one.upload is not None:
            with contextlib.suppress(StorageError, DiskFull):  # it may be complete already
                storage.abort_upload(one.upload)
        with contextlib.suppress(StorageError, DiskFull):  # an orphan only costs space
            storage.delete(one.name)


def abort_uploads(storage: Storage, prefix: str, is_left: Callable[[str], bool]) -> None:
    """Abort the unfinished uploads below `prefix` for whose names `is_left` is true."""
    for handle in list(storage.list_uploads(prefix)):
        if is_left(handle.name):
            storage.abort_upload(handle)


def send_compacted(storage: Storage, sealed: SealedFile, entries: npt.NDArray[Any], now_ms: int) -> FinishedObject:
    """Send a file's compacted form without publishing it. `entries`: see `Compaction`. After an error it is deleted."""
    trailer: list[Trailer] = []

    def fill(upload: Upload) -> None:
        last: bytes | memoryview = b""
        for last in sealed.compacted(entries):
            upload.write(last)
        trailer.append(parse_trailer(last, upload.name, upload.size_bytes))

    sent = send_object(storage, data_name(sealed.file_id, secrets.token_hex(8)), fill, now_ms)
    stored = stored_file(sent.name, trailer[0], sent.size_bytes, now_ms)
    return FinishedObject(stored, sent)


def stored_file(
    name: str, trailer: Trailer, size_bytes: int, published_ms: int, origin: Origin | None = None
) -> StoredObject:
    """Return the log's description of object `name`, a compacted file with `trailer`, or a shard from `origin`."""
    metadata, tail = trailer.metadata, trailer.tail
    shard = None
    if metadata.is_shard:
        table, window_s = metadata.more.get("table", ""), metadata.more.get("window_s", 0)
        begin_s, slot_range = metadata.begin_ms // 1000, metadata.slot_range
        shard = TableShard(table, begin_s, window_s, metadata.slot_map, *slot_range, origin)
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
        shard=shard,
        hash=metadata.layout.hash,
    )


_OF_ENTRIES = ("file_id", "lane", "second_min", "second_max", "count", "hash", "shard")


def unlike(stored: StoredObject, other: StoredObject, *names: str) -> str | None:
    """Return the first difference between two objects, as text; None: `other` can replace `stored`.

    It compares file, number and times of entries, hash rule, shard, and the fields `names`.
    """
    for name in (*_OF_ENTRIES, *names):
        if (expected := getattr(stored, name)) != (found := getattr(other, name)):
            return f"{name} {found!r}, the log says {expected!r}"
    return None
