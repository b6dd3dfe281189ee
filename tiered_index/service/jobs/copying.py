"""Copies: makes another index of an index's state at one log position, in another storage, and keeps it up to date.

First the objects are copied, and each byte is checked. Then one log record names them all, so a target is either no
index or a complete one. The copy has its own index id, so that no writer's root belongs to both, and no epoch or lease.
Its source position ``copy:ID`` is the number of the last record of index ID that it has. A copy's record follows only
another copy's record, so a record of any other writer ends the copying permanently. A crash leaves objects that no
record names, and the next round uses them. So a copy is no `Job` (`job.py`): its objects keep the names that they have
in the source, and no attempt deletes what it sent, because another attempt may use it. Memory: some 250 bytes for each
object of a round. Threads: one for each `Copier`, and its pool.
"""

from __future__ import annotations

import contextlib
import itertools
import logging
import secrets
import threading
import zlib
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, fields, replace
from functools import partial
from typing import Any

from msgspec import structs

from tiered_index.base.clock import Clock, SystemClock
from tiered_index.errors import CorruptFile, InvalidArgument, NotAnIndex, ObjectNotFound, TieredIndexError
from tiered_index.format.names import log_name
from tiered_index.format.trailer import TAIL_SIZE
from tiered_index.format.verify import WINDOW_BYTES
from tiered_index.service.jobs.orphans import Orphans, sweep
from tiered_index.service.jobs.rewriting.whole import Named, defects_of, not_there, object_bytes
from tiered_index.service.log.log import StorageLog, read_again
from tiered_index.service.log.publication import MAX_AGE_S, JobOverdue
from tiered_index.service.log.records import ArchivedSegment, LogRecord, RetiredSegment, StoredCatalog, StoredObject
from tiered_index.service.log.state import LogState
from tiered_index.service.read.segments.segments import MissingCatalog, Segments, names_object
from tiered_index.service.root.seen import Seen
from tiered_index.storage.base import Storage, StorageOptions
from tiered_index.storage.opening import open_storage
from tiered_index.storage.probe import check_storage, probe_put_if_absent
from tiered_index.types import no_progress

_log = logging.getLogger(__name__)
_KIND = "copy"
_DIFFER = "two reads of the same bytes differ"
_SHORT = "a read of a window gave another number of bytes"
COPY_OF = "copy:"
"""Begin of the source position that names the source of a copy; the index's id follows."""
# rounds of a copy in which objects of the source were merged or expired before they were copied
_TRIES = 10
# fields of a state that a copy's record does not take over unchanged
_OWN = frozenset({"number", "epoch", "genesis", "roots", "digest"} | {"objects", "catalogs", "range_objects"})

# records of a copy that are looked at for the last removal, before their times are asked for
_LOOKED_AT = 100
# the time between sweeps of one that follows the source, and that may end between them
_SWEPT_S = 3600.0
# objects that are brought before the next ones are asked for
_AT_ONCE = 256


@dataclass(frozen=True, slots=True)
class CopyReport:
    """The result of a copy, or of one update of a standby. Counts are of objects, bytes and log records.

    - The target has everything up to record `source_number` of the source; `records` of these are new.
    - The target's log ends at `log_number`.
    - `sent` objects of `sent_bytes` bytes were copied. `kept` objects of `kept_bytes` bytes were already there from an
      earlier try.
    - `removed` are names that the target's log no longer has.
    - `as_of_ms` is the time at which the source's log was read, in epoch milliseconds by the copier's clock.
    - `problems` name damage of the source that the copy does not have.
    """

    as_of_ms: int
    source_number: int
    log_number: int
    records: int
    sent: int
    sent_bytes: int
    kept: int
    kept_bytes: int
    removed: tuple[str, ...]
    problems: tuple[str, ...] = ()


class CopyStopped(TieredIndexError):
    """`stop` was set. Nothing was published. Objects that were sent are kept for the next round."""


@dataclass(frozen=True, slots=True)
class _WholeObject:
    """A checked object in the target. `began_ms`: time of its sending, by this host's clock if it `was_sent`."""

    size_bytes: int
    began_ms: int
    was_sent: bool


@dataclass(eq=False)
class Copier:
    """Copies one index into another storage, a round at a time.

    `progress` gets the bytes copied since its last call, from any of `threads` threads.
    """

    source: Storage
    target: Storage
    clock: Clock
    threads: int = 4
    progress: Callable[[int], None] = no_progress
    stop: threading.Event = field(default_factory=threading.Event)
    # whether the target must already be a copy
    must_exist: bool = False
    # by name, the objects that the target has and no record names yet
    _whole: dict[str, _WholeObject] = field(default_factory=dict)
    # the source's record with which the target was last compared
    _compared: tuple[int, str] = (0, "")

    def __post_init__(self) -> None:
        self.log, self.copied = StorageLog(self.source, self.clock), StorageLog(self.target, self.clock)

    def open(self) -> LogState:
        """Read both logs, and return the source's state.

        Raises `NotAnIndex` for the source, `StorageMisconfigured`, and the errors of the storages. Raises
        `InvalidArgument` if the target is an index but not a copy of the source.
        """
        # unchecked: of a storage with two histories, the history of the newest checkpoint is copied
        state = self.log.open(checks=False)
        try:
            self._check_target(self.copied.open())
        except NotAnIndex as error:
            if self.must_exist:
                raise NotAnIndex(f"{error}, but --must-exist requires a copy: is it mounted?") from error
            check_storage(self.target, self.clock)
        else:
            probe_put_if_absent(self.target)
        return state

    def missing_bytes(self) -> int:
        """Return the bytes that the target lacks by the logs as read so far. No request."""
        state, copy_state = self.log.state, self.copied.state
        named = sum(map(object_bytes, _objects(_beyond(state, copy_state))))
        listed, known = (sum(catalog.object_bytes for catalog in s.catalogs.values()) for s in (state, copy_state))
        return named + max(listed - known, 0)

    def run_once(self) -> CopyReport:
        """Bring the target to the end of the source's log.

        Raises `CorruptFile` for a damaged or lost object of the source, `CopyStopped`, `InvalidArgument`, `JobOverdue`,
        and the errors of the storages. The target is then unchanged.
        """
        as_of_ms = self.clock.now_ms()
        state = self.log.refresh()
        if self.copied.state.number:
            self._check_target(self.copied.refresh())
        for _ in range(_TRIES):
            before = self.copied.state
            self._whole = {name: whole for name, whole in self._whole.items() if not self._may_be_swept(whole.began_ms)}
            lacking = (named for named in self._lacking(state, before) if named.name not in self._whole)
            waiting: list[Named] = []
            try:
                while waiting := list(itertools.islice(lacking, _AT_ONCE)):
                    self._send(waiting)
            except ObjectNotFound:
                # an object was merged or expired meanwhile, or the source has lost it
                as_of_ms = self.clock.now_ms()
                state = self.log.refresh()
                self._check_lost(waiting, state)
                continue
            except MissingCatalog as error:
                as_of_ms = self.clock.now_ms()
                state = self.log.refresh()
                if error.file in {**state.catalogs, **self.copied.state.catalogs}:
                    raise
                continue
            if not any(self._may_be_swept(whole.began_ms) for whole in self._whole.values()):
                break
        else:
            raise JobOverdue(
                f"{self.target.uri}: nothing was published, because objects were removed while they were copied, or "
                f"copying took more than {MAX_AGE_S // 3600} hours: try again"
            )
        after, key = self._publish(state), _key(state)
        sent = [whole.size_bytes for whole in self._whole.values() if whole.was_sent]
        sizes = [whole.size_bytes for whole in self._whole.values() if not whole.was_sent]
        self._whole.clear()
        return CopyReport(
            as_of_ms=as_of_ms,
            source_number=after.positions[key],
            log_number=after.number,
            records=after.positions[key] - before.positions.get(key, 0),
            sent=len(sent),
            sent_bytes=sum(sent),
            kept=len(sizes),
            kept_bytes=sum(sizes),
            removed=self._removed(before, after),
            problems=self._problems(),
        )

    def _removed(self, before: LogState, after: LogState) -> tuple[str, ...]:
        """Return the names that the target no longer has. A segment may have moved to a catalog."""
        segments = Segments(after, self.target)
        names = [named.name for named in _objects(_beyond(before, after))]
        return tuple([name for name in names if not segments.names_object(name)])

    def _problems(self) -> tuple[str, ...]:
        try:
            self.source.head(log_name(1))
        except ObjectNotFound:
            return (
                f"{self.source.uri}: the log's first records are gone. If a life-cycle rule of the bucket "
                f"deletes them, remove the rule, or the source is lost with its checkpoints. The copy has a log of "
                f"its own, and the state of the newest checkpoint, which can't be verified",
            )
        return ()

    def sweep(self, grace_s: float) -> Orphans:
        """Delete objects from the target that its log removed `grace_s` ago, or that no record has named for a day."""
        return sweep(self.target, self.copied, grace_s)

    def may_sweep(self, grace_s: float) -> bool:
        """Return whether the target has an object that its log removed `grace_s` ago, by a few requests.

        It looks at the last record that removed something, because a sweep deletes what earlier ones removed, too.
        """
        state, is_named = self.copied.state, names_object(self.target)
        # a rule of the bucket has deleted the record
        with contextlib.suppress(ObjectNotFound):
            for number in self._newest(state.number, grace_s):
                record = self.copied.record(number)
                names = (*record.remove, *(segment.name for segment in record.retire))
                if removed := sorted(name for name in names if not is_named(state, name)):
                    # a sweep that was interrupted has deleted those at one end
                    if all(self._is_gone(name) for name in {removed[0], removed[-1]}):
                        return False
                    removed_ms = self.target.head(log_name(number)).modified_ms
                    return self.target.now_ms() - removed_ms >= grace_s * 1000
        return False

    def _newest(self, last: int, grace_s: float) -> Iterator[int]:
        """Yield the numbers of records from the last one down, of at least the `grace_s` and an hour before it.

        A sweep at most an hour before the last record deleted what had been removed the `grace_s` before that sweep.
        """
        yield from range(last, max(1, last - _LOOKED_AT), -1)
        if last > _LOOKED_AT:
            since_ms = self.target.head(log_name(last)).modified_ms - round((grace_s + _SWEPT_S) * 1000)
            yield from self.copied.numbers_since(last - _LOOKED_AT, since_ms)

    def _is_gone(self, name: str) -> bool:
        try:
            self.target.head(name)
        except ObjectNotFound:
            return True
        return False

    # Objects in the target

    def _lacking(self, state: LogState, before: LogState) -> Iterator[Named]:
        """Yield the objects that `state` and its catalogs name, but `before`, a state of the target, does not."""
        yield from _objects(_beyond(state, before))
        if not state.catalogs.keys() <= before.catalogs.keys():
            yield from _listed_beyond(Segments(state, self.source), Segments(before, self.target))

    def _may_be_swept(self, began_ms: int) -> bool:
        """Return whether a sweep of the target may delete an object. A target without a log is never swept."""
        return abs(self.clock.now_ms() - began_ms) / 1000 >= MAX_AGE_S and self.copied.state.number > 0

    def _check_lost(self, parts: list[Named], state: LogState) -> None:
        is_named = names_object(self.source)
        for named in not_there(self.source, [named for named in parts if is_named(state, named.name)]):
            problem = "the log names this object, but the storage does not have it: run `verify --deep --repair`"
            raise CorruptFile(named.name, problem)

    # Sending

    def _send(self, parts: list[Named]) -> None:
        """Send objects to the target. Raises the errors of `run_once`, and `ObjectNotFound` for the source."""
        with ThreadPoolExecutor(self.threads, "tiered-index-copy") as pool, contextlib.ExitStack() as cancelling:
            cancelling.callback(pool.shutdown, wait=False, cancel_futures=True)
            for future in [pool.submit(self._bring, named) for named in parts]:
                future.result()

    def _bring(self, named: Named) -> None:
        """Use the object that an earlier try left in the target, or send it."""
        if self.stop.is_set():
            raise CopyStopped
        began_ms = self.clock.now_ms()
        left_ms = self._left_ms(named)
        if left_ms is None:
            read_again(partial(self._transfer, named))
        self._whole[named.name] = _WholeObject(
            object_bytes(named), began_ms if left_ms is None else left_ms, left_ms is None
        )
        self.progress(object_bytes(named))

    def _transfer(self, named: Named) -> None:
        """Send an object while it is checked. Windows that the check reads out of order, at the end, are read twice."""
        with self.target.open_writer(named.name) as stream:

            def send(start: int, window: bytes) -> None:
                if start == stream.size_bytes:
                    stream.write(window)

            sums, size = _check(self.source, named, send), object_bytes(named)
            while (start := stream.size_bytes) < size:
                window = self.source.get_range(named.name, start, min(WINDOW_BYTES, size - start))
                CorruptFile.unless_equal(named.name, _DIFFER, sums[start], zlib.crc32(window))
                stream.write(window)

    def _left_ms(self, named: Named) -> int | None:
        """Return the time of an object that an earlier try left in the target; None: it is missing or damaged."""
        try:
            info = self.target.head(named.name)
            if info.size_bytes != object_bytes(named) or self._may_be_swept(info.modified_ms):
                return None
            _check(self.target, named, lambda start, window: None)
        except (ObjectNotFound, CorruptFile):
            return None
        # it may be a different valid object: compare the tails, which have the checksums of everything else
        if self.source.get_suffix(named.name, TAIL_SIZE) != self.target.get_suffix(named.name, TAIL_SIZE):
            return None
        # the put of a killed copier, or one that failed, may not be durable
        self.target.settle(named.name)
        return info.modified_ms

    # The record

    def _publish(self, state: LogState) -> LogState:
        """Append the record after which the target's log names the objects of `state`. Return the target's state."""
        assert state.genesis is not None
        own = structs.replace(state.genesis, index_id=secrets.token_hex(8))

        def make(copy_state: LogState) -> LogRecord | None:
            if not copy_state.number:
                return replace(difference(copy_state, state, _key(state)), genesis=own)
            self._check_target(copy_state)
            if copy_state.positions[_key(state)] >= state.number:
                return None  # the record of an earlier try, or of another copier, is in the log
            return difference(copy_state, state, _key(state))

        return self.copied.append("a copy", None, make)

    def _check_target(self, copy_state: LogState) -> None:
        """Raise `InvalidArgument` unless the target is a copy of the source without other writes."""
        state = self.log.state
        assert state.genesis is not None and copy_state.genesis is not None
        if copy_state.genesis.index_id == state.genesis.index_id:
            raise InvalidArgument(f"{self.target.uri} is the source itself: give another storage")
        if _key(state) not in copy_state.positions:
            raise InvalidArgument(
                f"{self.target.uri} holds an index that is not a copy of {self.source.uri}: give a storage "
                f"without an index"
            )
        last = self.copied.record(copy_state.number)
        if last.kind != _KIND:
            raise InvalidArgument(
                f"{self.target.uri} was written to since it was copied (record {copy_state.number} of its "
                f"log), so it is now a separate index. It was not changed: copy into another storage"
            )
        at = copy_state.positions[_key(state)]
        if last.copied and at <= state.number and (at, last.copied) != self._compared:
            self.log.identity.check_seen(self.log.state, Seen(at, last.copied))
            self._compared = at, last.copied
        if at > state.number:
            raise InvalidArgument(
                f"{self.target.uri} is a copy up to record {at}, but the log of {self.source.uri} ends at "
                f"{state.number}: this is not the storage that was copied. Copy it into an empty prefix"
            )


def _key(state: LogState) -> str:
    """Return the name of the source position that names the source of a copy."""
    assert state.genesis is not None
    return COPY_OF + state.genesis.index_id


def _parts(state: LogState) -> dict[str, Named]:
    return {**state.objects, **state.catalogs, **state.range_objects}


def _objects(named: Mapping[str, Named]) -> list[Named]:
    """Return those that are objects: a record may carry a catalog in itself."""
    return [part for part in named.values() if not (isinstance(part, StoredCatalog) and part.data is not None)]


def _listed_beyond(ours: Segments, theirs: Segments) -> Iterator[ArchivedSegment]:
    """Yield the archived segments in catalogs of `ours` that `theirs` does not have, in order of their places.

    Both are read at the same time, so that memory does not grow with them.
    """
    others = iter(theirs)
    other = next(others, None)
    for segment in ours:
        while other is not None and other.place < segment.place:
            other = next(others, None)
        is_there = other is not None and (other.place, other.name) == (segment.place, segment.name)
        if not is_there:
            yield segment


def _beyond(state: LogState, other: LogState) -> dict[str, Named]:
    """Return the objects that `state` names but `other` does not."""
    known = _parts(other)
    return {name: named for name, named in _parts(state).items() if name not in known}


def difference(before: LogState, after: LogState, key: str) -> LogRecord:
    """Return the record that takes a copy from state `before` to `after`, a state of the source.

    It takes over all fields of a state. Raises `CorruptFile` if no record can do this, because `after` is not later.
    """
    members = {member.name: member for member in fields(LogRecord)}
    taken: dict[str, Any] = {}
    for member in fields(LogState):
        if member.name not in _OWN and member.name in members:
            value = getattr(after, member.name)
            taken[member.name] = tuple(value.values()) if members[member.name].default == () else value
    taken["positions"] = after.positions | {key: after.number}
    taken["copied"] = after.digest
    added = _beyond(after, before).values()
    record = LogRecord(
        before.number + 1,
        _KIND,
        0,
        "",
        0,
        genesis=None if before.number else after.genesis,
        add=tuple(named for named in added if isinstance(named, StoredObject)),
        catalogs=tuple(named for named in added if isinstance(named, StoredCatalog)),
        retire=_retired(before, after),
        ranges=tuple(after.range_objects.values()),
        remove=tuple(_beyond(before, after)),
        previous=before.digest,
        **taken,
    )
    reached = before.apply(record, "copy")
    expected = replace(
        after,
        number=record.number,
        epoch=before.epoch,
        genesis=reached.genesis,
        positions=taken["positions"],
        roots=before.roots,
    )
    if reached != expected:
        raise CorruptFile("copy", f"no record leads from record {before.number} of the copy to the source's state")
    return record


def _retired(before: LogState, after: LogState) -> tuple[RetiredSegment, ...]:
    """Return the segments that a copy's catalogs in records showed, and that those after it do not list."""
    segments, left = Segments(before), {row.name for stored in after.inline for row in Segments(after).rows(stored)}
    gone = [stored for stored in before.inline if stored.name not in after.catalogs]
    rows = (row for stored in gone for row in segments.rows(stored) if row.kind == "archived")
    return tuple(RetiredSegment(row.name, *row.place) for row in rows if row.name not in left)


def _check(storage: Storage, named: Named, seen: Callable[[int, bytes], None]) -> dict[int, int]:
    """Read a whole object in windows of 8 MiB, and check each byte. `seen(start, window)` gets all, in any order.

    Return the CRC32 of each window, by its start. Raises `CorruptFile` with the first defect, and storage errors.
    """
    sums: dict[int, int] = {}
    size = object_bytes(named)

    def once(start: int, window: bytes) -> None:
        CorruptFile.unless_equal(named.name, _SHORT, min(WINDOW_BYTES, size - start), len(window), offset=start)
        # a window may be read twice: both reads must have the same bytes
        crc32 = zlib.crc32(window)
        if start not in sums:
            sums[start] = crc32
            seen(start, window)
        CorruptFile.unless_equal(named.name, _DIFFER, sums[start], crc32)

    for defect in defects_of(storage, named, once):
        raise CorruptFile(named.name, f"{defect.part}: {defect.problem}", offset=defect.offset)
    return sums


def copy_index(
    source: str,
    target: str,
    *,
    threads: int = 4,
    s3: StorageOptions | None = None,
    clock: Clock | None = None,
    progress: Callable[[int], None] = no_progress,
) -> CopyReport:
    """Copy the present state of the index at the storage URI `source` to `target`. Return a report.

    `target` has no index, or an earlier copy of this one without other writes, which is updated. Call it again to
    continue an interrupted copy. `threads` objects are copied at a time; each thread calls `progress` with the bytes
    copied since its last call. Writers, merges, sweeps and readers of the source may run meanwhile. The copy is an
    index with an id of its own: a writer needs a new root for it. `s3` has the options of S3. `clock` replaces the
    clock in tests.

    Raises `InvalidArgument`, `NotAnIndex`, `CorruptFile` (nothing damaged is copied), `StorageUnavailable`,
    `StorageMisconfigured`. The target is then unchanged.
    """
    with contextlib.ExitStack() as closing:
        copied = closing.enter_context(open_storage(source, options=s3))
        into = closing.enter_context(open_storage(target, options=s3))
        copier = Copier(copied, into, clock or SystemClock(), threads, progress)
        copier.open()
        return copier.run_once()
