"""The storage's log. Only its records say which objects belong to the index. Put-if-absent decides their order.

- A process that loses a number to another reads that record, makes its own again, and tries the next number.
- A writer that finds a higher epoch is fenced and stops.
- Each record has the digest of the record before. So a process that continues from a record that it has read notices
  that the storage was restored, or that two histories were mixed.
- A checkpoint is a stored state, written after every record while it is small. It is a cache: a missing or damaged one
  costs requests, never data. A record is valid even if its checkpoint can't be written. The newest two are kept.

Threads: any; `Checkpoints.write` one at a time. A lock that readers never hold serialises appends of one process.
"""

from __future__ import annotations

import contextlib
import itertools
import logging
import secrets
import threading
from collections.abc import Callable, Container, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache, partial
from typing import Any, TypeVar

from tiered_index.base.call import active_context
from tiered_index.base.clock import Clock
from tiered_index.base.locks import call_lock
from tiered_index.base.threads import side_by_side
from tiered_index.errors import (
    BudgetExceeded,
    CorruptFile,
    DiskFull,
    InvalidArgument,
    NotAnIndex,
    ObjectExists,
    ObjectNotFound,
    StorageBehind,
    StorageError,
    StorageUnavailable,
    WriterFenced,
)
from tiered_index.format.names import (
    CHECKPOINT_PREFIX,
    DATA_PREFIX,
    LOG_PREFIX,
    checkpoint_name,
    checkpoint_of,
    epoch_name,
    is_foreign,
    log_name,
    number_of,
)
from tiered_index.format.topic_documents import NO_DOCUMENTS, Documents, missing_documents
from tiered_index.service.log.identity import Identity
from tiered_index.service.log.range_objects import whole_record, whole_state
from tiered_index.service.log.records import IndexDescriptor, LogRecord, StoredObject, digest_of, max_positions
from tiered_index.service.log.state import LogReplay, LogState
from tiered_index.service.root.seen import SeenFile
from tiered_index.storage.base import ObjectInfo, Storage, list_whole

# a smaller checkpoint (up to about 30,000 objects) is written after every record, so that a reader opens with 3
# requests; a larger one after so many records
_SMALL_BYTES, _RECORDS_OF_LARGE = 2 << 20, 32
# records that an opening reads at the same time
_READ_AT_ONCE = 32
_KEPT = 2
_SWEPT_AT_ONCE = 8
# most checkpoints to check that are older than the digests in the newest one
_CHECKED = 2
LAST = "\x7f"
"""Sorts after every name: with it as `known`, a listing that ends early is one that does no harm."""
# who deleted a listed checkpoint has written a newer one: listing again costs less than reading the whole log
_LISTINGS = 3
T = TypeVar("T")
_log = logging.getLogger(__name__)


def own_objects(
    storage: Storage,
    prefix: str,
    *,
    start_after: str = "",
    known: str = "",
    foreign: Callable[[ObjectInfo], object] | None = None,
) -> Iterator[ObjectInfo]:
    """Yield the objects of `list_whole` without foreign objects. `foreign` gets these; None: warn once about each."""
    for info in list_whole(storage, prefix, start_after=start_after, known=known):
        if not is_foreign(info.name):
            yield info
        elif foreign is not None:
            foreign(info)
        else:
            _warn_of_foreign(storage.uri, info.name)


def has_hole(listed: Sequence[ObjectInfo], first: int) -> bool:
    """Return whether a listing of the log from record `first` lacks one before its last.

    List once more then. A listing beside appends may have a later record without an earlier one.
    """
    return bool(listed) and number_of(listed[-1].name) != first + len(listed) - 1


def read_again(read: Callable[[], T]) -> T:
    """Return the result of `read`. If it finds damage, call it once more, because the transfer may have failed."""
    try:
        return read()
    except CorruptFile:
        return read()


@lru_cache
def _warn_of_foreign(uri: str, name: str) -> None:
    _log.warning("%s in %s is not an object of an index: it is ignored", name, uri)


@dataclass(frozen=True, slots=True, order=True)
class _ListedCheckpoint:
    number: int
    digest: str  # the digest in its name
    name: str
    size_bytes: int
    modified_ms: int


@dataclass(eq=False)
class Checkpoints:
    """The checkpoints of one log, one for each `every` records (None: see `_SMALL_BYTES`)."""

    storage: Storage
    every: int | None = None
    listed: list[_ListedCheckpoint] = field(default_factory=list)
    """The checkpoints as listed, by number."""
    read_ms: int | None = None
    """Time of the checkpoint that was read, by the storage's clock; 0: there is another one with its number."""
    _number: int = 0  # of the newest known checkpoint
    _size_bytes: int = 0  # its size
    # numbers of checkpoints that this process read or wrote
    _known: list[int] = field(default_factory=list)
    # records before this one have no checkpoints other than listed ones
    _swept: int = 0

    def look(self) -> None:
        """List the checkpoints: a request. One that is left out costs time, and no more."""
        self.listed = sorted(
            _ListedCheckpoint(*checkpoint_of(info.name), info.name, info.size_bytes, info.modified_ms)
            for info in own_objects(self.storage, CHECKPOINT_PREFIX, known=LAST)
        )

    def states(self) -> Iterator[LogState]:
        """Yield the states of listed checkpoints that verify, the newest first, then an empty state. Each costs a GET.

        If one is missing, they are listed again, a few times.
        """
        tried: set[str] = set()
        listings_left = _LISTINGS - 1
        while newest := next((listed for listed in reversed(self.listed) if listed.name not in tried), None):
            try:
                state = self.state_of(newest.name)
                CorruptFile.unless_equal(
                    newest.name, "the number differs from the checkpoint name", newest.number, state.number
                )
                if not state.digest.startswith(newest.digest):
                    raise CorruptFile(newest.name, "the checkpoint's digest differs from its name")
            except ObjectNotFound:
                if listings_left:
                    listings_left -= 1
                    self.look()
                    continue
            except CorruptFile as error:
                _log.warning("ignoring a checkpoint: %s", error)
            else:
                self._number, self._size_bytes = newest.number, newest.size_bytes
                self._known, self._swept = [newest.number], newest.number
                is_alone = sum(other.number == newest.number for other in self.listed) == 1
                self.read_ms = newest.modified_ms if is_alone else 0
                yield state
            tried.add(newest.name)
        self._number, self._size_bytes, self._known, self._swept, self.read_ms = 0, 0, [], 0, None
        yield LogState()

    def state_of(self, name: str) -> LogState:
        """Return the state in a checkpoint: one GET. Raises `CorruptFile` and storage errors.

        Tables of replaced ranges that are objects of their own cost a GET each.
        """
        return whole_state(self.storage, LogState.decode(self.storage.get(name), name))

    def newer(self, number: int) -> list[str]:
        """Return the names of the listed checkpoints that are newer than record `number`."""
        return [checkpoint.name for checkpoint in self.listed if checkpoint.number > number]

    def drop_newer(self, number: int) -> None:
        """Delete checkpoints newer than record `number`, the end of a restored log."""
        if newer := self.newer(number):
            self.storage.delete_many(newer)
            self.listed = [checkpoint for checkpoint in self.listed if checkpoint.number <= number]

    def foreign(self, state: LogState) -> list[_ListedCheckpoint]:
        """Return the listed checkpoints that certainly belong to another history than `state`."""
        return [
            checkpoint
            for checkpoint in self.listed
            if checkpoint.number <= state.number and state.digest_at(checkpoint.number) not in ("", checkpoint.digest)
        ]

    def unknown(self, state: LogState) -> list[_ListedCheckpoint]:
        """Return the listed checkpoints that may belong to another history: older than the digests in `state`."""
        return [
            checkpoint
            for checkpoint in self.listed
            if checkpoint.number <= state.number and not state.digest_at(checkpoint.number)
        ]

    @property
    def _is_large(self) -> bool:
        return self._size_bytes >= _SMALL_BYTES

    def write(self, state: LogState) -> None:
        """Store `state`, if due. An error is logged; the next record tries again."""
        if state.number - self._number < (self.every or (_RECORDS_OF_LARGE if self._is_large else 1)):
            return
        data = state.encode()
        try:
            self.storage.put(checkpoint_name(state.number, state.digest), data)
            self._number, self._size_bytes = state.number, len(data)
            self._known.append(state.number)
            self._sweep(state)
        except (StorageError, DiskFull) as error:
            _log.warning(
                "cannot write checkpoint %d or delete older ones; the next checkpoint tries again: %s",
                state.number,
                error,
            )

    def _sweep(self, state: LogState) -> None:
        """Delete checkpoints older than the newest two, also those that other processes wrote.

        Checkpoints of another history are kept, because they prove it.
        """
        newest, over = self._known[-_KEPT:], self._known[:-_KEPT]
        old = [checkpoint for checkpoint in self.listed if checkpoint.number < newest[0]]
        at_once = 1 if self._is_large else _SWEPT_AT_ONCE
        if len(newest) < _KEPT or len({checkpoint.number for checkpoint in old}.union(over)) < at_once:
            return
        names = {checkpoint.name for checkpoint in old} - {
            checkpoint.name for checkpoint in (*self.foreign(state), *self.unknown(state))
        }
        for number in range(self._swept, newest[0]):
            if digest := state.digest_at(number):
                names.add(checkpoint_name(number, digest))
        self.storage.delete_many(sorted(names))
        self.listed = [checkpoint for checkpoint in self.listed if checkpoint.name not in names]
        self._known, self._swept = newest, newest[0]


# time between listings of a log that is used several times a second: only a listing notices another log, and holes
LIST_EVERY_S = 30.0
_LISTED = 1000
# an append that lost a number tries the next one, since each loss shows that another process made progress. It gives up
# only after so long and so many losses: a host that was suspended for an hour may have lost one number in that time.
_RACES_S, _RACES = 60.0, 100

Make = Callable[[LogState], LogRecord | None]


class StorageLog:
    """The log, for one process. A writer's log belongs to a root, which has `seen` records of it."""

    def __init__(
        self,
        storage: Storage,
        clock: Clock,
        *,
        checkpoint_every: int | None = None,
        root_id: str = "",
        seen: SeenFile | None = None,
    ) -> None:
        self.storage = storage
        self.clock = clock
        self.state = LogState()  # the state after the newest record read
        self.advanced: Callable[[], object] = lambda: None
        """Called after `state` has become a later one, so that lookups see it and its files."""
        self.documents: Callable[[], Documents] = lambda: NO_DOCUMENTS
        """Returns the documents of the writer's topics. Each of its records has those that the log lacks."""
        self._checkpoints = Checkpoints(storage, checkpoint_every)
        # the newest record that was read, as it was listed: a replaced one has another size or time
        self._newest: ObjectInfo | None = None
        self._writes = False
        # least time between listings before an append; 0: each append lists the log
        self.lists_every_s = 0.0
        self._listed_s = 0.0
        # by record, the ids of files whose objects it removed, and the files that it published
        self._read_files: dict[int, tuple[set[str], dict[str, StoredObject]]] = {}
        self._settled = 0  # the newest record known to be durable
        self.identity = Identity(storage.uri, self.record, self._gone, root_id=root_id, seen=seen)
        self.append_lock = threading.RLock()
        self._advance_lock = call_lock()

    def open(self, *, checks: bool = True) -> LogState:
        """Read the newest checkpoint, then the records after it: 3 requests and one per record.

        If the context has threads, the log is listed while the checkpoint is read. Raises `NotAnIndex`, and if `checks`
        the errors of `check_unmixed`.
        """
        self._checkpoints.look()
        states = self._checkpoints.states()
        state, listed = self._read_at_once(states)
        while True:
            try:
                number = self._advance_by(state, self._records(self._listed_after(state, listed)))
                break
            except StorageBehind as error:
                if not state.number:
                    raise
                # a checkpoint is only a cache
                _log.warning("ignoring checkpoint %d, which is not of this log: %s", state.number, error)
                state, listed = next(states), None
        if not number:
            raise NotAnIndex(f"{self.storage.uri} holds no tiered index (no {LOG_PREFIX} records)")
        if checks:
            self.check_unmixed()
        return self.state

    def _read_at_once(self, states: Iterator[LogState]) -> tuple[LogState, list[ObjectInfo] | None]:
        """Return the state of the newest listed checkpoint, and the records from it on if they were listed, too."""
        last = self._checkpoints.listed[-1].number if self._checkpoints.listed else 0
        if not last or active_context().submit is None:
            return next(states), None
        parts: list[Callable[[], Any]] = [partial(next, states), partial(self._list_from, last)]
        state, listed = side_by_side(parts)
        return state, listed if state.number == last else None

    def refresh(self, *, by_number: bool = False) -> LogState:
        """Advance to the log's end, and return the state there. `by_number` and the errors are those of `read`.

        After a storage error or a spent budget, it keeps the records read.
        """
        self._advance_by(self.state, self.read(self.state, by_number=by_number))
        return self.state

    def read(self, after: LogState, *, by_number: bool = False) -> Iterator[LogRecord]:
        """Return the records after the state `after`: a listing now, and then a GET for each record.

        `by_number`: no listing, but one more GET, which finds no record. It does not notice a hole or another log, so
        call it without at intervals. If the context has threads, records that were listed are read side by side.

        Raises `CorruptFile` if a record is missing, `StorageBehind` if the newest record of `after` is missing or has
        been replaced, `StorageUnavailable` if there is no log, for example because a disk is not mounted, and the
        errors of the storage.
        """
        if by_number:
            return self._records_from(after.number + 1)
        infos = self._listed_after(after)
        if infos and self._writes:
            # otherwise records of another log could be read as this one's
            self.check_end(after)
        return self._records(infos)

    def _records_from(self, first: int) -> Iterator[LogRecord]:
        with contextlib.suppress(ObjectNotFound):
            for number in itertools.count(first):
                yield self.record(number)

    @property
    def has_seen(self) -> bool:
        """Whether this log belongs to a root that has seen records of it."""
        return self.identity.seen_number > 0

    @property
    def known_number(self) -> int:
        """The number of the newest record that this process or its root knows; 0: none."""
        return max(self.state.number, self.identity.seen_number)

    def check_unmixed(self, *, again: bool = False) -> None:
        """Raise `StorageBehind` if a listed checkpoint belongs to another history of the index. Usually no request.

        `open` does this. Omit it only if something else decides which history is right. `again`: list them again.
        """
        if again:
            self._checkpoints.look()
        strays, state = self._checkpoints.foreign(self.state), self.state
        if strays:
            # list again, because a writer may have deleted them meanwhile
            self._checkpoints.look()
            strays = self._checkpoints.foreign(state)
        unknown = self._checkpoints.unknown(state)[-_CHECKED:]
        if strays := [*strays, *(checkpoint for checkpoint in unknown if not self._is_followed(checkpoint))]:
            raise self.identity.mixed(state, max(strays))

    def mixed(self) -> StorageBehind | None:
        """Return the error of `check_unmixed` after a warning: a root continues with its own history."""
        try:
            self.check_unmixed()
        except StorageBehind as error:
            _log.warning("a root continues with its own history: %s", error)
            return error
        return None

    def _is_followed(self, checkpoint: _ListedCheckpoint) -> bool:
        """Return whether the log continues from the record of a checkpoint, up to the place of the next checkpoint."""
        behind = self._checkpoints.every or (_RECORDS_OF_LARGE if checkpoint.size_bytes >= _SMALL_BYTES else 1)
        return self.identity.is_followed(checkpoint, behind)

    def rely(self) -> None:
        """Make the known records durable in the storage, and their position durable in the root.

        Call it before you delete local files, or treat them as published, because of a record. Raises the errors of the
        storage and of the root's disk.
        """
        state = self.state
        if not state.number:
            return
        self.identity.check_attempts(state)
        self._settle(state.number)
        self.identity.note(state)

    def _settle(self, number: int) -> None:
        """Make record `number` durable: another process's put, or a failed put of this one, may not be."""
        if number > self._settled:
            self.storage.settle(log_name(number))
            self._settled = number

    def _list_from(self, last: int) -> list[ObjectInfo]:
        """List record `last` and the records after it."""
        start_after = log_name(last - 1) if last > 1 else ""
        return [*own_objects(self.storage, LOG_PREFIX, start_after=start_after, known=log_name(last))]

    def _listed_after(
        self, state: LogState, listed: list[ObjectInfo] | None = None, *, is_checked: bool = False
    ) -> list[ObjectInfo]:
        """Return the listed records after `state`. Raises the errors of `read`.

        `listed`: what `_list_from` returned, if it was called already. `is_checked`: `check_end` was called just now.
        """
        last = state.number
        # a listing, because a missing record need not be the end; it includes the last known record, because without
        # that an empty storage looks like one without news
        begun_s = self.clock.monotonic_s()
        infos = self._list_from(last) if listed is None else listed
        if has_hole(infos, last or 1):
            infos = self._list_from(last)
        self._listed_s = begun_s
        if last:
            if not infos or infos[0].name != log_name(last):
                raise self._gone(last)
            newest = infos.pop(0)
            if not (is_checked or self._is_unchanged(newest)):
                self.check_end(state)
            self._newest = newest
        for expected, info in enumerate(infos, last + 1):
            CorruptFile.unless_equal(info.name, "the log has a hole before this record", expected, number_of(info.name))
        return infos

    def _is_unchanged(self, newest: ObjectInfo) -> bool:
        """Return whether the listing of the newest record that was read shows that it has not been replaced.

        Otherwise it was younger than the checkpoint that was read, or this process appended it: another index may have
        a record with its number.
        """
        if self._newest is None:
            return self._checkpoints.read_ms is None or newest.modified_ms <= self._checkpoints.read_ms
        return self._newest == newest

    def _records(self, infos: list[ObjectInfo]) -> Iterator[LogRecord]:
        """Yield the listed records, read side by side if the context has threads."""
        at_once = 1 if active_context().submit is None else _READ_AT_ONCE
        for begin in range(0, len(infos), at_once):
            some = infos[begin : begin + at_once]
            records = side_by_side([partial(self._record_or_error, info) for info in some])
            for info, record in zip(some, records, strict=True):
                if isinstance(record, ObjectNotFound):
                    raise CorruptFile(info.name, "record is listed, but the storage does not have it") from record
                if isinstance(record, Exception):
                    raise record
                yield record
                self._newest = info

    def _record_or_error(self, info: ObjectInfo) -> LogRecord | Exception:
        """Return a listed record, or its error, because the records before it are good."""
        try:
            return self.record(number_of(info.name))
        except (StorageError, BudgetExceeded, CorruptFile) as error:
            return error

    def _advance_by(self, state: LogState, records: Iterator[LogRecord]) -> int:
        """Apply records to `state`, advance to the result, also after an error, and return its number."""
        replay = LogReplay(state)
        try:
            for record in records:
                replay.add(record, log_name(replay.number + 1))
        except (StorageError, BudgetExceeded):
            self.advance(replay.state())
            raise
        self.advance(replay.state())
        return replay.number

    def _gone(self, number: int) -> StorageUnavailable | CorruptFile:
        numbers = [number_of(info.name) for info in own_objects(self.storage, LOG_PREFIX)]
        if not numbers:
            return StorageUnavailable(
                f"{self.storage.uri}: log record {number} is missing: is this another storage, and is it mounted?"
            )
        name = f"{self.storage.uri}/{log_name(number)}"
        if numbers[-1] >= number:
            return CorruptFile(name, f"the record is missing, although the log has record {numbers[-1]}")
        return self.identity.cut_off(number, numbers[-1])

    def create(self, descriptor: IndexDescriptor) -> LogState:
        """Append record 1 unless there is one. Return the state, with the descriptor of the stored record."""

        def make(state: LogState) -> LogRecord | None:
            return None if state.number else LogRecord(0, "create", 0, "", 0, genesis=descriptor)

        return self.append("the first record", None, make)

    def claim_epoch(self) -> int:
        """Claim the next writer epoch and append its fence record. From then on every older writer is fenced.

        Call `write_checkpoint` then. If the context has threads, the fence waits for writes that are side by side.
        """
        attempt, self._writes = secrets.token_hex(8), True
        state = self.refresh()
        if self.identity.root_id:
            self.identity.check_attempts(state)

        def claimed() -> int:
            epoch, begun_s = state.epoch + 1, self.clock.monotonic_s()
            while not self._puts_epoch(epoch, attempt):
                epoch += 1
                if self._gives_up(losses := epoch - state.epoch - 1, begun_s):
                    raise StorageUnavailable(
                        f"{self.storage.uri}: other writers claimed the last {losses} epochs first; try again"
                    )
            return epoch

        def noted() -> None:
            # in this order: after a power cut, the root must not know a record that the storage has lost
            self._settle(state.number)
            self.identity.note(state, attempt)

        parts: list[Callable[[], Any]] = [claimed, noted]
        epoch: int = side_by_side(parts)[0]
        fence = LogRecord(0, "fence", epoch, "", 0)
        self.append("fence", epoch, lambda _: fence, attempt=attempt, writes_checkpoint=False)
        return epoch

    def write_checkpoint(self) -> None:
        """Write a checkpoint of the present state, if it is due. An error is logged."""
        with self.append_lock:
            self._checkpoints.write(self.state)

    def _gives_up(self, losses: int, begun_s: float) -> bool:
        """Return whether an append or a claim that began at `begun_s` and lost so many numbers has to end."""
        return losses >= _RACES and self.clock.monotonic_s() - begun_s >= _RACES_S

    def _puts_epoch(self, epoch: int, attempt: str) -> bool:
        """Put the object of an epoch. Return False if another writer has it."""
        try:
            self.storage.put_if_absent(epoch_name(epoch), attempt.encode())
        except ObjectExists:
            # a retried request may find the object of its own first try
            if self.storage.get(epoch_name(epoch)) != attempt.encode():
                return False
            self.storage.settle(epoch_name(epoch))
        return True

    def append_positions(self, epoch: int, positions: dict[str, int]) -> LogState:
        """Append a record of source positions, if they are beyond the log's."""

        def make(state: LogState) -> LogRecord | None:
            if max_positions(state.positions, positions) == state.positions:
                return None
            return LogRecord(0, "positions", epoch, "", 0, positions=positions)

        return self.append("source positions", epoch, make) if make(self.state) is not None else self.state

    def record(self, number: int) -> LogRecord:
        """Return record `number`: a request. Raises `CorruptFile`, and the errors of the storage."""
        return whole_record(self.storage, LogRecord.decode(self.storage.get(log_name(number)), log_name(number)))

    def removed_files(self, state: LogState, after: int = 0) -> set[str]:
        """Return the ids of files whose objects records after number `after` removed. Raises storage errors.

        Records are chosen by number, because hosts' clocks differ. Each record is read once.
        """
        for number in range(state.number, after, -1):
            if number not in self._read_files:
                record = self.record(number)
                removed = {name.split("/")[1] for name in record.remove if name.startswith(DATA_PREFIX)}
                added = {made.file_id: made for made in record.add if made.shard is None}
                self._read_files[number] = removed, added
        return set().union(*(self._read_files[number][0] for number in range(after + 1, state.number + 1)))

    def published_file(self, file_id: str) -> StoredObject | None:
        """Return a file as a record published it; None: no record that `removed_files` has read did."""
        return next((added[file_id] for _, (_, added) in sorted(self._read_files.items()) if file_id in added), None)

    def numbers_since(self, last: int, since_ms: int) -> Iterator[int]:
        """Yield the numbers, from `last` down, of records put since `since_ms` (by the storage's clock).

        It costs a listing per 1,000 records. A record that is missing in a listing counts as put since then.
        """
        while last > 0:
            after = max(0, last - _LISTED)
            start_after = log_name(after) if after else ""
            listed = own_objects(self.storage, LOG_PREFIX, start_after=start_after, known=LAST)
            ages = ((number_of(info.name), info.modified_ms) for info in listed)
            put_ms = dict(itertools.takewhile(lambda age: age[0] <= last, ages))  # noqa: B023 - read within the round
            young = [number for number in range(after + 1, last + 1) if put_ms.get(number, since_ms) >= since_ms]
            yield from reversed(young)
            if len(young) < last - after:
                return
            last = after

    def append(
        self, what: str, epoch: int | None, make: Make, *, attempt: str = "", writes_checkpoint: bool = True
    ) -> LogState:
        """Append the record that `make` returns for the state at the log's end, unless it is None. Return the state.

        `epoch` is the writer's; None for jobs (merge, erase), which are never fenced. `attempt` names the record among
        those of other processes (default: at random). Raises:

        - `WriterFenced` if the log has a higher epoch.
        - `StorageUnavailable` if the outcome is unknown. In a repeated call, `make` sees the record if it is there.
        - `StorageBehind` if the known end is missing or has been replaced.
        - `InvalidArgument` for a record that readers would refuse.

        After any error that is neither a `StorageError` nor a `DiskFull` the record is certainly not in the log.
        """
        attempt = attempt or secrets.token_hex(8)
        with self.append_lock:
            self._writes = True
            self._read_before_append()
            state, root_id = self.state, self.identity.root_id if epoch is not None else ""
            # so that at most the newest record of a log is not durable
            self._settle(state.number)
            # otherwise a reader would use them for the records that follow
            self._checkpoints.drop_newer(state.number)
            begun_s = self.clock.monotonic_s()
            for losses in itertools.count(1):
                if root_id:
                    self.identity.check_attempts(state)
                if epoch is not None and state.epoch > epoch:
                    raise fenced(self.storage.uri, state.epoch, epoch)
                made = make(state)
                if made is None:
                    return state
                if root_id and (documents := missing_documents(self.documents(), state.documents)):
                    made = replace(made, documents=documents)
                made = replace(made, number=state.number + 1, attempt=attempt, created_ms=self.clock.now_ms())
                record, data = _as_read(replace(made, previous=state.digest, root=root_id))
                after = state.apply(record, log_name(record.number))
                if root_id:
                    # before the record, because an unknown record of this root shows that the root is an older copy
                    self.identity.note(state, attempt)
                winner = self._put(record, data)
                if winner.attempt == attempt:
                    break
                state = state.apply(winner, log_name(winner.number))
                self.advance(state)
                if self._gives_up(losses, begun_s):
                    raise StorageUnavailable(
                        f"{self.storage.uri}: other processes took the last {losses} log numbers first while appending "
                        f"{what}; try again"
                    )
            self.advance(after)
            if writes_checkpoint:
                self._checkpoints.write(self.state)
            return self.state

    def _read_before_append(self) -> None:
        """Read new records, and check that the known end is that of this log.

        A listing costs as much as a put. Between listings it is enough that the second record behind the end does not
        exist: then no record is missing, and the put notices one. If a checkpoint is newer than the known end, the
        log is listed.
        """
        state = self.state
        self.check_end()
        is_listed = self.clock.monotonic_s() - self._listed_s < self.lists_every_s
        if state.number and is_listed and not self._checkpoints.newer(state.number):
            try:
                self.storage.head(log_name(state.number + 2))
            except ObjectNotFound:
                return
        self._advance_by(state, self._records(self._listed_after(state, is_checked=True)))

    def _put(self, record: LogRecord, data: bytes) -> LogRecord:
        """Put a record. Return it, or an earlier one with its number. Raises only `StorageError` and `DiskFull`."""
        name = log_name(record.number)
        try:
            try:
                self.storage.put_if_absent(name, data)
            except ObjectExists:
                winner = read_again(partial(self.record, record.number))
                if winner.attempt == record.attempt:
                    self._settle(record.number)  # the put of an earlier request, which may not be durable
                return winner
        except (CorruptFile, InvalidArgument) as error:
            raise StorageUnavailable(
                f"{self.storage.uri}: the outcome of the put of {name} is unknown: {error}"
            ) from error
        self._settled = record.number
        return record

    def check_end(self, state: LogState | None = None) -> None:
        """Raise `StorageBehind` if the newest record is missing or differs, `StorageUnavailable` without a log."""
        state = state or self.state
        if not state.number:
            return
        try:
            digest = digest_of(self.storage.get(log_name(state.number)))
            if digest != state.digest:
                # perhaps damaged on the way
                digest = self.record(state.number).digest
        except ObjectNotFound as error:
            raise self._gone(state.number) from error
        self.identity.check_same(state.number, state.digest, digest)

    def advance(self, state: LogState) -> None:
        """Set the state to a later state of this log. Ignore an earlier one."""
        with self._advance_lock:
            if state.number <= self.state.number:
                return
            self.state = state
        # without the lock: this takes locks of others, and of two threads each shows the newest state
        self.advanced()


def _as_read(record: LogRecord) -> tuple[LogRecord, bytes]:
    """Return a record as it is read, and its bytes. Raises `InvalidArgument` for one that readers would refuse.

    Records are never deleted, so such a record would make the index unreadable.
    """
    try:
        data = record.encode()
        read = LogRecord.decode(data, log_name(record.number))
        # a copy's record has a part of its ranges in objects
        return replace(read, expired=record.expired, range_tables=record.range_tables), data
    except (CorruptFile, TypeError, ValueError, OverflowError) as error:
        raise InvalidArgument(f"refusing to write an invalid record: {error}") from error


def publishing(
    epoch: int,
    add: tuple[StoredObject, ...],
    *,
    positions: dict[str, int],
    put_before_ms: int = 0,
    removed: Callable[[LogState], Container[str]] = lambda state: (),
) -> Make:
    """Return a `Make` that adds objects, except those whose files the state has, or `removed` names.

    `positions` and `put_before_ms` are as in `LogRecord`.
    """

    def make(state: LogState) -> LogRecord | None:
        fresh = tuple(o for o in add if state.object_of(o.file_id) is None and o.file_id not in removed(state))
        if not fresh:
            return None
        return LogRecord(0, "publish", epoch, "", 0, fresh, positions=positions, put_before_ms=put_before_ms)

    return make


def fenced(uri: str, newer: int, epoch: int) -> WriterFenced:
    """Return the error for a writer of `epoch` that found a newer one."""
    return WriterFenced(
        f"{uri}: a newer writer (epoch {newer}) has taken over from this one (epoch {epoch}), which "
        "publishes nothing more and keeps its local files: stop one of the two"
    )
