"""Publications: objects are sent under fresh names, then one log record names them. Uploads, archived segments, staged
files, compactions, merges and builds on Spark all go this way.

```
                ┌─ the record is there ─────────> recorded
send ─> sent ─ append ─ its answer is lost ──> unknown: the log, read again, shows which of the others
                └─ others were first, or fenced ─> taken over: what was sent is deleted
```
A writer (`epoch`) keeps what it has sent for its next try; a job (None) takes back what certainly was not published.
What the log names is never deleted, nor what it may name yet. Nothing is named `MAX_AGE_S` after its sending began.
Memory: two parts an upload. Threads: one an upload or publication; any number of them.
"""

from __future__ import annotations

import contextlib
import secrets
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy.typing as npt

from tiered_index.errors import (
    CorruptFile,
    InvalidArgument,
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
"""How long after it began to be sent an object may be published: an hour less than `orphans` spares by default what no
record names.
"""
_PART_BYTES = 16 << 20


class JobOverdue(TieredIndexError):
    """A job took so long that its uploads may be swept at any moment; nothing was published. Divide the work."""

    exit_code = 3


class Upload:
    """The sender of one object: one put, or parts of `part_bytes`, the last of up to `last_bytes` (None: < 2)."""

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
        """Take the next bytes; full parts that leave one behind them are sent. Read-only buffers aren't copied."""
        view = memoryview(data)
        self._held.append(view if view.readonly else bytes(view))
        self._held_bytes += len(view)
        self.size_bytes += len(view)
        if self._held_bytes > self._last_bytes:
            while self._held_bytes > self._last_bytes:
                self._send(self._taken(self._part_bytes), len(self.parts) + 1)
            self._held = [bytes(rest) for rest in self._held]  # which keeps no more in memory than it is

    def place(self, start: int, data: bytes) -> None:
        """Take the bytes from `start`, a multiple of a part's size, in any order: a full part is sent at once; less, at
        the beginning, is the whole object. Not for an upload that is written to.
        """
        if not start and len(data) < self._part_bytes:
            self.write(data)
        else:
            self._send(data, start // self._part_bytes + 1)

    def finish(self, began_ms: int = 0) -> SentObject:
        """Send what is held, as one object where that is all of it; return what was sent since `began_ms`."""
        rest = self._taken(self._held_bytes)
        if self.handle is None:
            self._storage.put(self.name, rest)
        elif rest:
            self._send(rest, len(self.parts) + 1)
        return SentObject(self.name, self.size_bytes, began_ms, self.handle, tuple(self.parts))

    def abandon(self, *, is_fresh: bool = True) -> None:
        """Delete the sent objects; `orphans` deletes the rest later. The error that led here counts. An object whose
        name is not `is_fresh` stays: others may have sent, and published, the same one.
        """
        self._held.clear()
        with contextlib.suppress(StorageError):
            if self.handle is not None:
                self._storage.abort_upload(self.handle)
            elif self.size_bytes and is_fresh:
                self._storage.delete(self.name)

    def _taken(self, length: int) -> Bytes:
        """Take `length` bytes off what is held."""
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
    """An object on its way, and its unfinished upload; None: it was put whole. `began_ms` by the sender's clock."""

    name: str
    size_bytes: int
    began_ms: int
    upload: UploadHandle | None
    parts: tuple[PartInfo, ...]


@dataclass(frozen=True, slots=True)
class FinishedObject:
    """An object of a job as it will stand in the log, and its unfinished upload; None: it was put whole."""

    stored: StoredObject
    upload: UploadHandle | None
    parts: tuple[PartInfo, ...]

    @property
    def sent(self) -> SentObject:
        """The object as it was sent; a job's objects say in `published_ms` when that began."""
        stored = self.stored
        return SentObject(stored.name, stored.size_bytes, stored.published_ms, self.upload, self.parts)


def send_object(
    storage: Storage,
    name: str,
    fill: Callable[[Upload], object],
    began_ms: int,
    part_bytes: int = _PART_BYTES,
    last_bytes: int | None = None,
) -> SentObject:
    """Send an object, whose upload is not completed; `fill` writes its bytes. What was sent before an error, or an
    interrupt, is taken back.
    """
    upload = Upload(storage, name, part_bytes, last_bytes)
    try:
        fill(upload)
        return upload.finish(began_ms)
    except BaseException:
        upload.abandon()
        raise


class Publication:
    """Objects that were sent, until a record names them or never will. `epoch` is the writer's, None a job's."""

    def __init__(
        self, storage: Storage, log: StorageLog, objects: Sequence[SentObject], epoch: int | None = None
    ) -> None:
        self._objects = list(objects)
        self._storage, self._log, self._epoch = storage, log, epoch

    @classmethod
    def send(
        cls,
        storage: Storage,
        log: StorageLog,
        name: str,
        fill: Callable[[Upload], object],
        part_bytes: int = _PART_BYTES,
        last_bytes: int | None = None,
        epoch: int | None = None,
    ) -> Publication:
        """Send an object whole, as `send_object`. The log's clock alone is used."""
        publication = cls(
            storage, log, [send_object(storage, name, fill, log.clock.now_ms(), part_bytes, last_bytes)], epoch
        )
        try:
            publication.complete()
        except BaseException:
            abandon([publication.sent], storage)
            raise
        return publication

    def complete(self) -> None:
        """Complete the uploads; of another size `CorruptFile` (to a job), `StorageUnavailable` (to a writer)."""
        for number, one in enumerate(self._objects):
            if one.upload is not None:
                self._storage.complete_upload(one.upload, one.parts)
                self._objects[number] = replace(one, upload=None)
            size = self._storage.head(one.name).size_bytes
            if size == one.size_bytes:
                continue
            if self._epoch is not None:
                raise StorageUnavailable(
                    f"{self._storage.uri}: {one.name} has {size:,} bytes after its upload, not {one.size_bytes:,}"
                )
            raise CorruptFile(one.name, "object has another size than was written", expected=one.size_bytes, found=size)

    @property
    def sent(self) -> SentObject:
        """The object of a publication of one."""
        return self._objects[0]

    @property
    def is_overdue(self) -> bool:
        """Whether it is too late to name the objects: `orphans` may be about to sweep them."""
        return self._age_s >= MAX_AGE_S

    @property
    def _age_s(self) -> float:
        """How long ago sending began, by this host's clock; one that was put back counts as one that went on."""
        now_ms = self._log.clock.now_ms()
        return max((abs(now_ms - one.began_ms) for one in self._objects), default=0) / 1000

    def record(self, what: str, make: Make, holder: Callable[[LogState], object] = lambda state: "others") -> LogState:
        """Append the record that `make` returns (None: others were first); return the log's state. `holder` returns
        what the log has in the place of the objects. Raises as `StorageLog.append` and `make`, and where it is too late
        `JobOverdue` to a job, `StorageUnavailable` to a writer.
        """

        def made_in_time(state: LogState) -> LogRecord | None:
            record = make(state)
            if record is not None and (record.add or record.archive) and self.is_overdue:
                raise self._overdue(what)
            return record

        try:
            state = self._log.append(what, self._epoch, made_in_time)
        except TieredIndexError as error:
            is_over = self._epoch is None and not isinstance(error, StorageError | InvalidArgument)
            if is_over or isinstance(error, WriterFenced):
                # what the log doesn't name now it never will; after `InvalidArgument` the caller may ask otherwise
                self.resolve(self._log.state)
            raise
        if holder(state) is not None:  # else an earlier record may have named the objects
            self.resolve(state)
        return state

    def resolve(self, state: LogState) -> None:
        """Take `state` as the log's last word: delete what it does not name."""
        left = [one for one in self._objects if one.name not in state.objects and one.name not in state.archive]
        abandon(left, self._storage)

    def _overdue(self, what: str) -> TieredIndexError:
        where, hours = self._storage.uri, self._age_s / 3600
        if self._epoch is None:
            return JobOverdue(
                f"{where}: {what} began {hours:.1f} hours ago and is too late to be published: its uploads may be "
                f"swept as orphans after {MAX_AGE_S // 3600} hours. Nothing was published: divide the work, or "
                f"give it more workers"
            )
        return StorageUnavailable(
            f"{where}: {self.sent.name} was uploaded {hours:.1f} hours ago and no record names it yet; it may be "
            f"swept as an orphan at any moment, so it is sent again"
        )


def abandon(objects: Iterable[SentObject], storage: Storage) -> None:
    """Delete what no record will name; what can't be deleted is left to `orphans`."""
    for one in objects:
        if one.upload is not None:
            with contextlib.suppress(StorageError):  # it may be complete already
                storage.abort_upload(one.upload)
        with contextlib.suppress(StorageError):  # an orphan costs only space
            storage.delete(one.name)


def abort_uploads(storage: Storage, prefix: str, is_left: Callable[[str], bool]) -> None:
    """Abort the unfinished uploads below `prefix` whose names are those of leftovers."""
    for handle in list(storage.list_uploads(prefix)):
        if is_left(handle.name):
            storage.abort_upload(handle)


def send_compacted(storage: Storage, sealed: SealedFile, entries: npt.NDArray[Any], now_ms: int) -> FinishedObject:
    """Send a file's compacted form, unpublished; `entries` as `Compaction` takes them. What was sent before an error
    is taken back.
    """
    trailer: list[Trailer] = []

    def fill(upload: Upload) -> None:
        last: bytes | memoryview = b""
        for last in sealed.compacted(entries):
            upload.write(last)
        trailer.append(parse_trailer(last, upload.name, upload.size_bytes))

    sent = send_object(storage, data_name(sealed.file_id, secrets.token_hex(8)), fill, now_ms)
    stored = stored_file(sent.name, trailer[0], sent.size_bytes, now_ms)
    return FinishedObject(stored, sent.upload, sent.parts)


def stored_file(
    name: str, trailer: Trailer, size_bytes: int, published_ms: int, origin: Origin | None = None
) -> StoredObject:
    """Return the log's description of a compacted file, or of a shard from `origin`, with this `trailer`, as object
    `name`.
    """
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
    """Return by which member `other` can't stand for an object, and both values: file, number and times of entries,
    their order and hash rule, and the members `names`; None: it can.
    """
    for name in (*_OF_ENTRIES, *names):
        if (expected := getattr(stored, name)) != (found := getattr(other, name)):
            return f"{name} {found!r}, the log says {expected!r}"
    return None
