"""Publications: whole objects are sent under new names, then one log record names them.

Uploads, archived segments, merges and Spark builds use this.

```
                ┌─ the record is there ─────────> recorded
send ─> sent ─ append ─ its answer is lost ──> unknown: the log, read again, shows which of the others
                └─ others were first, or fenced ─> taken over: the objects are deleted
```
A writer (`epoch`) keeps sent objects for its next try. A job (None) deletes objects that certainly were not published.
An object that the log names, or may still name, is never deleted. No object is published later than `MAX_AGE_S` after
its sending began. A sending that failed or crashed starts again under a new name. Threads: one for each publication.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

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
from tiered_index.format.trailer import Trailer
from tiered_index.service.log.log import Make, StorageLog
from tiered_index.service.log.records import LogRecord, Origin, StoredObject, TableShard
from tiered_index.service.log.state import LogState
from tiered_index.storage.base import Storage, Writer

K = TypeVar("K")
D = TypeVar("D")
MAX_AGE_S = 23 * 3600
"""Longest time from the begin of sending to publication: an hour less than `orphans` keeps unnamed objects by default.
"""


class JobOverdue(TieredIndexError):
    """A job took so long that a sweep may delete its objects. Nothing was published. Divide the work."""

    exit_code = 3


@dataclass(frozen=True, slots=True)
class SentObject:
    """A whole object. `began_ms` is the time at which its sending began, by the sender's clock."""

    name: str
    size_bytes: int
    began_ms: int


@dataclass(frozen=True, slots=True)
class FinishedObject:
    """An object of a job as the log will describe it, with the begin of its sending as its `published_ms`.

    `checksum` is that of its entries, if they are compared with those of its inputs.
    """

    stored: StoredObject
    sent: SentObject
    checksum: int = 0


def send_object(storage: Storage, name: str, fill: Callable[[Writer], object], began_ms: int) -> SentObject:
    """Send an object, whose bytes `fill` writes. After an error there is none."""
    with storage.open_writer(name) as stream:
        fill(stream)
        try:
            stream.close()
        except BaseException:
            with contextlib.suppress(StorageError, DiskFull):  # the answer may have been lost; an orphan costs space
                storage.delete_many([name])
            raise
    return SentObject(name, stream.size_bytes, began_ms)


class Publication:
    """Sent objects, until a record names them or never will. `epoch` is the writer's; None: a job.

    `named` says whether a state names an object; without it, only objects that records name themselves.
    """

    def __init__(
        self,
        log: StorageLog,
        objects: Sequence[SentObject],
        epoch: int | None = None,
        named: Callable[[LogState, str], bool] | None = None,
    ) -> None:
        self._objects, self._named = list(objects), named or LogState.names
        self.log, self._storage, self._epoch = log, log.storage, epoch

    @classmethod
    def send(
        cls,
        log: StorageLog,
        name: str,
        fill: Callable[[Writer], object],
        epoch: int | None = None,
        named: Callable[[LogState, str], bool] | None = None,
    ) -> Publication:
        """Send an object as `send_object` does, and check its size. Times are by the log's clock."""
        publication = cls(log, [send_object(log.storage, name, fill, log.clock.now_ms())], epoch, named)
        with publication.undone():
            publication.check()
        return publication

    @contextlib.contextmanager
    def undone(self) -> Iterator[None]:
        """Return a context manager that deletes the objects after an error: no record can name them yet."""
        try:
            yield
        except BaseException:
            abandon(self._objects, self._storage)
            raise

    def check(self) -> None:
        """Check that the storage has the objects whole. Raises `ObjectNotFound` for a missing object.

        A wrong size raises `CorruptFile` for a job, `StorageUnavailable` for a writer. The objects of an overdue job
        may be missing: `record` refuses them.
        """
        for sent in self._objects:
            try:
                size = self._storage.head(sent.name).size_bytes
            except ObjectNotFound:
                if self._epoch is None and self.is_overdue:
                    return
                raise
            if self._epoch is not None and size != sent.size_bytes:
                raise StorageUnavailable(
                    f"{self._storage.uri}: {sent.name} has {size:,} bytes after its upload, not {sent.size_bytes:,}"
                )
            problem = "object has another size than was written"
            CorruptFile.unless_equal(sent.name, problem, sent.size_bytes, size)

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
        now_ms = self.log.clock.now_ms()
        return max((abs(now_ms - sent.began_ms) for sent in self._objects), default=0) / 1000

    def record(self, what: str, make: Make, holder: Callable[[LogState], object] = lambda state: "others") -> LogState:
        """Append the record that `make` returns (None: others were first). Return the log's state.

        `holder` returns the object that the log has in place of these; None: none. Raises the errors of
        `StorageLog.append` and `make`. If it is too late it raises `JobOverdue` for a job, `StorageUnavailable` for a
        writer.
        """

        def made_in_time(state: LogState) -> LogRecord | None:
            record = make(state)
            if record is None:
                return None
            adds = record.add or record.catalogs or record.ranges
            if adds and self.is_overdue:
                raise self._overdue(what)
            return record

        try:
            state = self.log.append(what, self._epoch, made_in_time)
        except TieredIndexError as error:
            is_over = self._epoch is None and not isinstance(error, StorageError | DiskFull | InvalidArgument)
            if is_over or isinstance(error, WriterFenced):
                # no later record can name the objects; after `InvalidArgument` the caller may try another record
                self.resolve(self.log.state)
            raise
        if holder(state) is not None:  # otherwise an earlier record of unknown outcome may name the objects
            self.resolve(state)
        return state

    def resolve(self, state: LogState) -> None:
        """Delete the objects that `state` does not name. Call it only if no later record can name them."""
        left = [sent for sent in self._objects if not self._named(state, sent.name)]
        abandon(left, self._storage)

    def _overdue(self, what: str) -> TieredIndexError:
        where, hours = self._storage.uri, self._age_s / 3600
        if self._epoch is None:
            return JobOverdue(
                f"{where}: {what} began {hours:.1f} hours ago and is too late to publish: its objects may be swept as "
                f"orphans after {MAX_AGE_S // 3600} hours. Nothing was published: divide the work, or use more workers"
            )
        return StorageUnavailable(
            f"{where}: {self.sent.name} was uploaded {hours:.1f} hours ago, but no record names it yet. It may be "
            f"swept as an orphan, so it will be sent again"
        )


class Unpublished(Generic[K, D]):
    """A writer's sent objects that are not known to be in the log, by a key, each with its description for a record.

    An object of an earlier try is published under its name while it is whole and in time. Otherwise it is sent again,
    and the old one is not deleted, because a record may still name it.
    """

    def __init__(self) -> None:
        self._sent: dict[K, tuple[D, Publication]] = {}

    def sent(
        self, key: K, send: Callable[[], tuple[D, Publication]], is_same: Callable[[D], bool] = lambda _: True
    ) -> tuple[D, Publication]:
        """Return what an earlier try sent, if `is_same` says that it is still to be sent, or what `send` sends now.

        Raises the errors of `send`, `is_same` and `Publication.check`.
        """
        known = self._sent.get(key)
        if known is not None and not known[1].is_overdue and is_same(known[0]):
            with contextlib.suppress(ObjectNotFound):
                known[1].check()
                return known
        self._sent[key] = known = send()
        return known

    def get(self, key: K) -> tuple[D, Publication] | None:
        """Return what was sent; None: nothing."""
        return self._sent.get(key)

    def forget(self, key: K) -> None:
        """Forget what was sent, because the log has it, or will never have it."""
        self._sent.pop(key, None)


def abandon(objects: Iterable[SentObject], storage: Storage) -> None:
    """Delete objects that no record will name. After an error `orphans` deletes them later."""
    with contextlib.suppress(StorageError, DiskFull):  # an orphan only costs space
        storage.delete_many([sent.name for sent in objects])


def stored_file(
    name: str, trailer: Trailer, size_bytes: int, published_ms: int, origin: Origin = "writer"
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
        if (expected := getattr(stored, name)) != (present := getattr(other, name)):
            return f"{name} {present!r}, the log says {expected!r}"
    return None
