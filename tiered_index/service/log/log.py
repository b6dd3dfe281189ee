"""The storage's log. Only its records say which objects belong to the index. Put-if-absent decides their order.

- A process that loses a number to another reads that record, makes its own again, and tries the next number.
- A writer that finds a higher epoch is fenced and stops.
- Each record has the digest of the record before. So a process that continues from a record that it has read notices
  that the storage was restored, or that two histories were mixed.
- A checkpoint is a stored state. It is a cache: a missing or damaged one costs requests, never data. A record is valid
  even if its checkpoint can't be written. The newest two are kept.

Threads: any; `Checkpoints.write` one at a time. A lock that readers never hold serialises appends of one process.
"""

from __future__ import annotations

import contextlib
import itertools
import logging
import secrets
import threading
from collections import deque
from collections.abc import Callable, Container, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache, partial
from typing import Any, TypeVar

from tiered_index.clock import Clock
from tiered_index.errors import (
    BudgetExceeded,
    CorruptFile,
    DiskFull,
    InvalidArgument,
    NotAnIndex,
    ObjectExists,
    ObjectNotFound,
    RootBehind,
    StorageBehind,
    StorageError,
    StorageUnavailable,
    WriterFenced,
)
from tiered_index.format.names import (
    CHECKPOINT_PREFIX,
    DATA_PREFIX,
    DIGEST_DIGITS,
    LOG_PREFIX,
    base_of,
    checkpoint_name,
    checkpoint_of,
    epoch_name,
    is_foreign,
    is_summary,
    log_name,
    number_of,
)
from tiered_index.service.log.records import IndexDescriptor, LogRecord, StoredObject, digest_of, max_positions
from tiered_index.service.log.state import CheckpointBase, LogReplay, LogState
from tiered_index.service.log.summary import EAGER_BYTES, Summary
from tiered_index.service.root.seen import Seen, SeenFile
from tiered_index.storage.base import ObjectInfo, Storage
from tiered_index.storage.context import active_context
from tiered_index.storage.pools import side_by_side

# a state of up to this size (about 10,000 objects) is stored whole after every record, so that a reader opens with 3
# requests. Checkpoints after a larger one have only the changes since
_WHOLE_BYTES = 2 << 20
# earlier versions stored a large state after one record per this number of its bytes, at most 32 records
_BYTES_A_RECORD, _MOST_RECORDS_BEFORE = 6 << 20, 32
_KEPT = 2
_SWEPT_AT_ONCE = 8
# most checkpoints to check that are older than the digests in the newest one
_CHECKED = 2
_LISTINGS = 3
T = TypeVar("T")
_log = logging.getLogger(__name__)


def own_objects(
    storage: Storage, prefix: str, *, start_after: str = "", foreign: Callable[[ObjectInfo], object] | None = None
) -> Iterator[ObjectInfo]:
    """Yield the objects of `storage.list` without foreign objects. `foreign` gets these; None: warn once about each."""
    for info in storage.list(prefix, start_after=start_after):
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
    digest: str  # the digest in its name; empty: an earlier version wrote it
    name: str
    size_bytes: int
    modified_ms: int


@dataclass(eq=False)
class Checkpoints:
    """The checkpoints of one log, one for each `every` records (None: for each record).

    A checkpoint of a large state has only the changes since a whole one.
    """

    storage: Storage
    every: int | None = None
    listed: list[_ListedCheckpoint] = field(default_factory=list)
    """The checkpoints as listed, by number."""
    read_ms: int | None = None
    """Time of the checkpoint that was read, by the storage's clock; 0: there is another one with its number."""
    _number: int = 0  # of the newest known checkpoint
    _base: CheckpointBase | None = None  # the newest known whole checkpoint
    summary: Summary = field(init=False)
    # checkpoints that this process read or wrote: the number, and the name of the whole one
    _known: list[tuple[int, str]] = field(default_factory=list)
    # records before this one have no checkpoints other than listed ones
    _swept: int = 0

    def __post_init__(self) -> None:
        self.summary = Summary(self.storage)

    def look(self) -> None:
        """List the checkpoints and summaries: a request."""
        found = list(own_objects(self.storage, CHECKPOINT_PREFIX))
        self.listed = sorted(
            _ListedCheckpoint(*checkpoint_of(info.name), info.name, info.size_bytes, info.modified_ms)
            for info in found
            if not is_summary(info.name)
        )
        self.summary.listed = [info for info in found if is_summary(info.name)]

    def states(self) -> Iterator[LogState]:
        """Yield the states of listed checkpoints that verify, the newest first, then an empty state. Each costs a GET.

        If one is missing, they are listed again, a few times.
        """
        tried: set[str] = set()
        listings_left = _LISTINGS - 1
        while one := next((one for one in reversed(self.listed) if one.name not in tried), None):
            try:
                if (whole := base_of(one.name)) and whole not in {other.name for other in self.listed}:
                    raise CorruptFile(one.name, "its base checkpoint is missing")
                base, state = self._read(one.name)
                CorruptFile.unless_equal(
                    one.name, "the number differs from the checkpoint name", one.number, state.number
                )
                if not state.digest.startswith(one.digest):
                    raise CorruptFile(one.name, "the checkpoint's digest differs from its name")
            except ObjectNotFound:
                if listings_left:
                    listings_left -= 1
                    self.look()
                    continue
            except CorruptFile as error:
                _log.warning("ignoring a checkpoint: %s", error)
            else:
                self._number, self._base = one.number, base
                self._known, self._swept = [(one.number, base.name)], one.number
                is_alone = sum(other.number == one.number for other in self.listed) == 1
                self.read_ms = one.modified_ms if is_alone else 0
                yield state
            tried.add(one.name)
        self._number, self._base, self._known, self._swept, self.read_ms = 0, None, [], 0, None
        yield LogState()

    def state_of(self, name: str) -> LogState:
        """Return the state in a checkpoint: one GET, two if it has changes. Raises `CorruptFile`, storage errors."""
        return self._read(name)[1]

    def _read(self, name: str) -> tuple[CheckpointBase, LogState]:
        """Return a checkpoint's state, and its base: the whole checkpoint that it is, or that it has changes to."""
        whole = base_of(name) or name
        data, *changes = side_by_side([partial(self.storage.get, one) for one in dict.fromkeys((whole, name))])
        state = LogState.decode(data, whole)
        base = state.as_base(whole, len(data))
        return base, LogState.decode(changes[0], name, state) if changes else state

    def newer(self, number: int) -> list[str]:
        """Return the names of the listed checkpoints and summaries that are newer than record `number`."""
        return [one.name for one in self.listed if one.number > number] + self.summary.newer(number)

    def drop_newer(self, number: int) -> None:
        """Delete checkpoints and summaries newer than record `number`, the end of a restored log."""
        if newer := self.newer(number):
            self.storage.delete_many(newer)
            self.listed = [one for one in self.listed if one.number <= number]
            self.summary.listed = [info for info in self.summary.listed if info.name not in newer]

    def foreign(self, state: LogState) -> list[_ListedCheckpoint]:
        """Return the listed checkpoints that certainly belong to another history than `state`."""
        return [
            one
            for one in self.listed
            if one.digest and one.number <= state.number and state.digest_at(one.number) not in ("", one.digest)
        ]

    def unknown(self, state: LogState) -> list[_ListedCheckpoint]:
        """Return the listed checkpoints that may belong to another history: older than the digests in `state`."""
        return [
            one for one in self.listed if one.digest and one.number <= state.number and not state.digest_at(one.number)
        ]

    def write(self, state: LogState) -> None:
        """Store `state` or its changes, if due. An error is logged; the next record tries again."""
        if state.number - self._number < (self.every or 1):
            return
        base, data = self._base, self._changes(state)
        name = checkpoint_name(state.number, state.digest, base.name if base is not None and data else "")
        if base is None or not data:
            data = state.encode()
            base = state.as_base(name, len(data))
        try:
            self.storage.put(name, data)
            self._number, self._base = state.number, base
            self._known.append((state.number, base.name))
            self._sweep(state)
        except (StorageError, DiskFull) as error:
            _log.warning(
                "cannot write checkpoint %d or delete older ones; the next checkpoint tries again: %s",
                state.number,
                error,
            )

    def _changes(self, state: LogState) -> bytes:
        """Return the bytes of a checkpoint with changes; empty if it is time for a whole one."""
        base = self._base
        if base is None or base.size_bytes < _WHOLE_BYTES or base.name != checkpoint_name(base.number, base.digest):
            return b""  # a version that knew no digests wrote it
        try:
            self.storage.head(base.name)
        except ObjectNotFound:
            return b""  # another process has deleted it, with older checkpoints
        except StorageError:
            pass  # the write reports it
        return state.changes_since(base)

    def _sweep(self, state: LogState) -> None:
        """Delete checkpoints older than the newest two, except their bases, also those that other processes wrote.

        Checkpoints of another history are kept, because they prove it.
        """
        kept, over = self._known[-_KEPT:], self._known[:-_KEPT]
        first, bases = kept[0][0], {base for number, base in self._known if number != number_of(base)}
        needed = {base for _, base in kept}
        old = [one for one in self.listed if one.number < first and one.name not in needed]
        if len(kept) < _KEPT or len({one.number for one in old}.union(number for number, _ in over)) < _SWEPT_AT_ONCE:
            return
        names = {one.name for one in old} - {one.name for one in (*self.foreign(state), *self.unknown(state))}
        names.update(bases)
        for number in range(self._swept, first):
            if digest := state.digest_at(number):
                names.update(checkpoint_name(number, digest, base) for base in ("", *bases))
        self.storage.delete_many(sorted(names - needed))
        self.listed = [one for one in self.listed if one.name not in names - needed]
        self._known, self._swept = kept, first


# time between listings of a log that is used several times a second: only a listing notices another log, and holes
LIST_EVERY_S = 30.0
_LISTED = 1000
# most numbers that one append loses to others before it gives up
_MAX_RACES = 1000
# a writer's own attempts, by which it distinguishes its records from those of a clone of its root
_ATTEMPTS_KEPT = 1000
WAY_ON = "run `tiered-index recover --root ROOT`, which sends the entries that the storage lacks"

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
        self._checkpoints = Checkpoints(storage, checkpoint_every)
        # the listing of the newest record that was read: a replaced one has another size or time
        self._listed: ObjectInfo | None = None
        self._writes = False
        # least time between listings before an append; 0: each append lists the log
        self.lists_every_s = 0.0
        self._listed_s = 0.0
        self.summary_data: bytes | None = None
        """The newest summary, if `open` read it."""
        self._removed: dict[int, set[str]] = {}  # ids of files whose objects a record removed, by record
        self._settled = 0  # the newest record known to be durable
        self._root_id, self._seen = root_id, seen
        self._attempts = deque(seen.last.attempts if seen is not None else [], maxlen=_ATTEMPTS_KEPT)
        self._append_lock = threading.Lock()
        self._summary_lock = threading.Lock()
        self._advance_lock = threading.Lock()

    def open(self, *, checks: bool = True, with_summary: bool = False) -> LogState:
        """Read the newest checkpoint, then the records after it: 3 requests and one per record.

        If the context has threads, the log is listed while the checkpoint is read, together with a small summary if
        `with_summary`. Raises `NotAnIndex`, and if `checks` the errors of `check_unmixed`.
        """
        self._checkpoints.look()
        states = self._checkpoints.states()
        state, infos = self._read_at_once(states, with_summary=with_summary)
        while True:
            try:
                number = self._read_on(state, infos)
                break
            except StorageBehind as error:
                if not state.number:
                    raise
                # a checkpoint is only a cache
                _log.warning("ignoring checkpoint %d, which is not of this log: %s", state.number, error)
                state, infos = next(states), None
        if not number:
            raise NotAnIndex(f"{self.storage.uri} holds no tiered index (no {LOG_PREFIX} records)")
        if checks:
            self.check_unmixed()
        return self.state

    def _read_at_once(
        self, states: Iterator[LogState], *, with_summary: bool
    ) -> tuple[LogState, list[ObjectInfo] | None]:
        """Return the state of the newest listed checkpoint, and the records after it if they were listed, too."""
        checkpoints, summary = self._checkpoints, self._checkpoints.summary.newest
        last = checkpoints.listed[-1].number if checkpoints.listed else 0
        if not last or active_context().submit is None:
            return next(states), None
        parts: list[Callable[[], Any]] = [partial(next, states), partial(self._list_from, last)]
        if with_summary and summary is not None and summary.size_bytes <= EAGER_BYTES:
            parts.append(partial(self._read_summary, summary.name))
        state, infos, *read = side_by_side(parts)
        if read:
            self.summary_data = read[0]
        return state, infos if state.number == last else None

    def _read_summary(self, name: str) -> bytes | None:
        try:
            return self.storage.get(name)
        except (StorageError, CorruptFile) as error:
            _log.warning("ignoring a summary of directories: %s", error)
            return None

    def _list_from(self, last: int) -> list[ObjectInfo]:
        """List record `last` and the records after it."""
        return [*own_objects(self.storage, LOG_PREFIX, start_after=log_name(last - 1) if last > 1 else "")]

    def refresh(self) -> LogState:
        """Read the records after the last known one: one request, and one for each record.

        A writer also checks the last known record. After a storage error or a spent budget, it keeps the records read.
        Raises `CorruptFile` if a record is missing.
        """
        self._read_on(self.state)
        return self.state

    def read_next(self) -> LogState:
        """Read the next records by their numbers: a GET for each, and one that finds none.

        It does not notice a hole or another log, so call `refresh` at intervals. Raises the errors of `refresh`.
        """
        state = self.state
        self._replay(state, self._records_from(state.number + 1))
        return self.state

    def _records_from(self, first: int) -> Iterator[LogRecord]:
        with contextlib.suppress(ObjectNotFound):
            for number in itertools.count(first):
                yield self.record(number)

    @property
    def summary(self) -> ObjectInfo | None:
        """The newest listed summary."""
        return self._checkpoints.summary.newest

    @property
    def has_seen(self) -> bool:
        """Whether this log belongs to a root that has seen records of it."""
        return self._seen is not None and self._seen.last.number > 0

    @property
    def known_number(self) -> int:
        """The number of the newest record that this process or its root knows; 0: none."""
        return max(self.state.number, self._seen.last.number if self._seen is not None else 0)

    def check_unmixed(self) -> None:
        """Raise `StorageBehind` if a listed checkpoint belongs to another history of the index. Usually no request.

        `open` does this. Omit it only if something else decides which history is right.
        """
        found, state = self._checkpoints.foreign(self.state), self.state
        if found:
            # list again, because a writer may have deleted them meanwhile
            self._checkpoints.look()
            found = self._checkpoints.foreign(state)
        unknown = self._checkpoints.unknown(state)[-_CHECKED:]
        if found := [*found, *(one for one in unknown if not self._is_followed(one))]:
            raise self._mixed(max(found))

    def _is_followed(self, one: _ListedCheckpoint) -> bool:
        """Return whether the log continues from the record of a checkpoint, up to the place of the next checkpoint."""
        behind = self._checkpoints.every or min(_MOST_RECORDS_BEFORE, 1 + one.size_bytes // _BYTES_A_RECORD)
        try:
            before = self.record(one.number)
            if not before.digest.startswith(one.digest):
                return False
            for number in range(one.number + 1, one.number + behind + 1):
                after = self.record(number)
                if after.previous not in ("", before.digest):
                    return False
                before = after
        except (ObjectNotFound, CorruptFile) as error:
            _log.debug("%s can't be compared with the log: %s", one.name, error)
        return True

    def _mixed(self, stray: _ListedCheckpoint) -> StorageBehind:
        number = stray.number
        return StorageBehind(
            f"{self.storage.uri}/{stray.name}",
            f"two histories of this index are mixed here, as after a sync without deletes: this checkpoint and that of "
            f"record {self.state.number} have different digests of record {number}. Entries of one history may be "
            f"missing. Restore one whole history, or use `tiered-index copy` to copy the newest to empty storage. If "
            f"`tiered-index verify` reports only checkpoints, delete these, or run `verify --deep --repair --yes`",
            expected=self.state.digest_at(number) or None,
            found=stray.digest,
        )

    def check_root(self) -> None:
        """Compare the log that was read with its root, with at most one request.

        Raises `StorageBehind` if it is not the log that the root has seen. Raises `RootBehind` if it has records of
        this root that the root does not know.
        """
        if self._seen is not None:
            self.check_seen(self._seen.last)
            self._check_attempts(self.state)

    def check_seen(self, seen: Seen, *, deep: bool = True) -> None:
        """Compare the log that was read with the position that a root has `seen`. Raises `StorageBehind`.

        `deep`: use a request if the log has more records since.
        """
        state = self.state
        if state.number < seen.number:
            raise StorageBehind(
                f"{self.storage.uri}/{log_name(state.number)}",
                f"the log ends here, but its root has seen record {seen.number}: the storage was restored to an "
                f"earlier state. Nothing local was deleted; {WAY_ON}",
                expected=seen.number,
                found=state.number,
            )
        if seen.digest and (deep or state.number == seen.number):
            try:
                # the next record has its digest, unless an older version wrote it
                found = state.digest if state.number == seen.number else self.record(seen.number + 1).previous
                found = found or self.record(seen.number).digest
            except ObjectNotFound as error:
                raise self._gone(seen.number) from error
            if found != seen.digest:
                raise self._another(seen.number, seen.digest, found)

    def check_own(
        self, root_id: str, seen: Seen | None, attempts: Container[str] = (), state: LogState | None = None
    ) -> None:
        """Raise `RootBehind` if the log has records of a root that are not in its `seen` position or its `attempts`.

        Then the root is an older copy, or another root has its id. Read `seen` after the log, because a running writer
        notes each attempt before its record.
        """
        seen = seen or Seen()
        own = (state or self.state).roots.get(root_id)
        if own is None or own[0] <= seen.number or own[1] in seen.attempts or own[1] in attempts:
            return
        raise RootBehind(
            f"{self.storage.uri}/{log_name(own[0])}",
            f"this root wrote it, but has seen the log only up to record {seen.number}: the root was restored from a "
            f"backup, or is a clone of a root that is still in use. Nothing was changed; {WAY_ON}",
            expected=seen.number,
            found=own[0],
        )

    def _check_attempts(self, state: LogState) -> None:
        """Call `check_own` for the root of this log."""
        if self._seen is not None:
            self.check_own(self._root_id, self._seen.last, self._attempts, state)

    def _another(self, number: int, expected: str, found: str) -> StorageBehind:
        return StorageBehind(
            f"{self.storage.uri}/{log_name(number)}",
            f"this record differs from the one seen under its number: the storage was restored, or it "
            f"has another history of the index. Nothing local was deleted; {WAY_ON}",
            expected=expected,
            found=found,
        )

    def rely(self) -> None:
        """Make the known records durable in the storage, and their position durable in the root.

        Call it before you delete local files, or treat them as published, because of a record. Raises the errors of the
        storage and of the root's disk.
        """
        state = self.state
        if not state.number:
            return
        self._check_attempts(state)
        self._settle(state.number)
        if self._seen is not None:
            self._seen.note(state.number, state.digest)

    def _settle(self, number: int) -> None:
        """Make record `number` durable: another process's put, or a failed put of this one, may not be."""
        if number > self._settled:
            self.storage.settle(log_name(number))
            self._settled = number

    def _read_on(self, state: LogState, listed: list[ObjectInfo] | None = None, *, is_end_checked: bool = False) -> int:
        """Read the records after `state`, advance to their state, and return its number.

        `listed` has the records if they were listed already. `is_end_checked`: the caller calls `check_end` next.
        """
        infos = self._records_behind(state, listed, is_end_checked=is_end_checked)
        if infos and self._writes:
            self.check_end(state)  # otherwise records of another log could be read as this one's
        return self._replay(state, self._listed_records(infos))

    def _listed_records(self, infos: list[ObjectInfo]) -> Iterator[LogRecord]:
        for info in infos:
            try:
                yield self.record(number_of(info.name))
            except ObjectNotFound as error:
                raise CorruptFile(info.name, "record is listed, but the storage does not have it") from error
            self._listed = info

    def _replay(self, state: LogState, records: Iterator[LogRecord]) -> int:
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

    def _records_behind(
        self, state: LogState, listed: list[ObjectInfo] | None = None, *, is_end_checked: bool = False
    ) -> list[ObjectInfo]:
        """List the records after `state`.

        Raises `CorruptFile` if one is missing, and `StorageBehind` if the state's own record is missing or different.
        Raises `StorageUnavailable` if there is no log, for example because a disk is not mounted.
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
            own = infos.pop(0)
            if not is_end_checked:
                self._check_listed(own, state)
        for expected, info in enumerate(infos, last + 1):
            CorruptFile.unless_equal(info.name, "the log has a hole before this record", expected, number_of(info.name))
        return infos

    def _check_listed(self, info: ObjectInfo, state: LogState) -> None:
        """Raise `StorageBehind` if the newest record that was read has been replaced.

        It is read again only if its listing has changed, or if it is younger than the checkpoint that was read.
        """
        if self._listed is None:
            is_same = self._checkpoints.read_ms is None or info.modified_ms <= self._checkpoints.read_ms
        else:
            # a record that this process has appended is read, too, because another index may have one with its number
            is_same = self._listed == info
        if not is_same and state.digest:
            found = digest_of(self.storage.get(info.name))
            if found != state.digest:
                raise self._another(state.number, state.digest, found)
        self._listed = info

    def _gone(self, number: int) -> StorageUnavailable | CorruptFile:
        numbers = [number_of(info.name) for info in own_objects(self.storage, LOG_PREFIX)]
        if not numbers:
            return StorageUnavailable(
                f"{self.storage.uri}: log record {number} is missing: is this another storage, and is it mounted?"
            )
        name = f"{self.storage.uri}/{log_name(number)}"
        if numbers[-1] >= number:
            return CorruptFile(name, f"the record is missing, although the log has record {numbers[-1]}")
        return StorageBehind(
            name,
            f"the record is missing, and the log ends before it: the storage was restored to an earlier state. Open a "
            f"reader again; for a root, {WAY_ON}",
            expected=number,
            found=numbers[-1],
        )

    def create(self, descriptor: IndexDescriptor) -> LogState:
        """Write record 1 unless there is one. Return the state, with the descriptor of the stored record."""
        return self.begin(LogRecord(1, "create", 0, "", 0, genesis=descriptor))

    def begin(self, record: LogRecord) -> LogState:
        """Write `record` as record 1 unless there is one. Return the state. Raises `InvalidArgument` as `append`."""
        made = replace(record, attempt=secrets.token_hex(8), created_ms=self.clock.now_ms())
        record, data = _as_read(made)
        with self._append_lock:
            try:
                self.storage.put_if_absent(log_name(1), data)
            except ObjectExists:
                return self.open()
            self._settled = 1
            self.advance(LogState().apply(record, log_name(1)))
            self._checkpoints.write(self.state)
            return self.state

    def claim_epoch(self) -> int:
        """Claim the next writer epoch and append its fence record. From then on every older writer is fenced."""
        attempt, self._writes = secrets.token_hex(8), True
        epoch = self.refresh().epoch + 1
        for _ in range(_MAX_RACES):
            try:
                self.storage.put_if_absent(epoch_name(epoch), attempt.encode())
            except ObjectExists:
                # a retried request may find the object of its own first try
                if self.storage.get(epoch_name(epoch)) != attempt.encode():
                    epoch += 1
                    continue
                self.storage.settle(epoch_name(epoch))
            break
        else:
            raise StorageUnavailable(f"{self.storage.uri}: other writers claimed {_MAX_RACES} epochs; try again")
        self.append("fence", epoch, lambda state: LogRecord(0, "fence", epoch, "", 0))
        return epoch

    def append_positions(self, epoch: int, positions: dict[str, int]) -> LogState:
        """Append a record of source positions, if they are beyond the log's."""

        def make(state: LogState) -> LogRecord | None:
            if max_positions(state.positions, positions) == state.positions:
                return None
            return LogRecord(0, "positions", epoch, "", 0, positions=positions)

        return self.append("source positions", epoch, make) if make(self.state) is not None else self.state

    def record(self, number: int) -> LogRecord:
        """Return record `number`: a request. Raises `CorruptFile`, and the errors of the storage."""
        return LogRecord.decode(self.storage.get(log_name(number)), log_name(number))

    def removed_files(self, state: LogState, after: int = 0) -> set[str]:
        """Return the ids of files whose objects records after number `after` removed. Raises storage errors.

        Records are chosen by number, because hosts' clocks differ. Each record is read once.
        """
        for number in range(state.number, after, -1):
            if number not in self._removed:
                removed = self.record(number).remove
                self._removed[number] = {name.split("/")[1] for name in removed if name.startswith(DATA_PREFIX)}
        return set().union(*(self._removed[number] for number in range(after + 1, state.number + 1)))

    def numbers_since(self, last: int, since_ms: int) -> Iterator[int]:
        """Yield the numbers, from `last` down, of records put since `since_ms` (by the storage's clock).

        It costs a listing per 1,000 records. A record that is missing in a listing counts as put since then.
        """
        while last > 0:
            after = max(0, last - _LISTED)
            listed = own_objects(self.storage, LOG_PREFIX, start_after=log_name(after) if after else "")
            ages = ((number_of(info.name), info.modified_ms) for info in listed)
            put_ms = dict(itertools.takewhile(lambda age: age[0] <= last, ages))  # noqa: B023 - read within the round
            young = [number for number in range(after + 1, last + 1) if put_ms.get(number, since_ms) >= since_ms]
            yield from reversed(young)
            if len(young) < last - after:
                return
            last = after

    def append(self, what: str, epoch: int | None, make: Make) -> LogState:
        """Append the record that `make` returns for the state at the log's end, unless it is None. Return the state.

        `epoch` is the writer's; None for jobs (merge, erase), which are never fenced. Raises:

        - `WriterFenced` if the log has a higher epoch.
        - `StorageUnavailable` if the outcome is unknown. In a repeated call, `make` sees the record if it is there.
        - `InvalidArgument` for a record that readers would refuse.

        After any error that is neither a `StorageError` nor a `DiskFull` the record is certainly not in the log.
        """
        state, is_put = self._append(what, epoch, make)
        # also for a job that finds its record: its first try may have ended between the record and the summary
        if is_put or epoch is None:
            # the caller waits for this, so that after an erasure no filter has erased keys; other appends don't wait
            with self._summary_lock:
                self._checkpoints.summary.renew(self.state)
        return state

    def _append(self, what: str, epoch: int | None, make: Make) -> tuple[LogState, bool]:
        """Append without renewing the summary. Return the state, and whether a record was put."""
        with self._append_lock:
            attempt, self._writes = secrets.token_hex(8), True
            self._read_before_append()
            self.check_end()
            state, root_id = self.state, self._root_id if epoch is not None else ""
            # so that at most the newest record of a log is not durable
            self._settle(state.number)
            # otherwise a reader would use them for the records that follow
            self._checkpoints.drop_newer(state.number)
            for _ in range(_MAX_RACES):
                if root_id:
                    self._check_attempts(state)
                if epoch is not None and state.epoch > epoch:
                    raise fenced(self.storage.uri, state.epoch, epoch)
                made = make(state)
                if made is None:
                    return state, False
                made = replace(made, number=state.number + 1, attempt=attempt, created_ms=self.clock.now_ms())
                record, data = _as_read(replace(made, previous=state.digest, root=root_id))
                after = state.apply(record, log_name(record.number))
                if root_id and self._seen is not None:
                    # before the record, because an unknown record of this root shows that the root is an older copy
                    self._attempts.append(attempt)
                    self._seen.note(state.number, state.digest, attempt)
                winner = self._put(record, data)
                if winner.attempt != attempt:
                    state = state.apply(winner, log_name(winner.number))
                    self.advance(state)
                    continue
                self.advance(after)
                self._checkpoints.write(self.state)
                return self.state, True
        raise StorageUnavailable(
            f"{self.storage.uri}: other processes took {_MAX_RACES} log numbers while appending {what}; try again"
        )

    def _read_before_append(self) -> None:
        """Read new records before `check_end` and an append.

        A listing costs as much as a put. Between listings it is enough that the second record behind the end does not
        exist: then no record is missing, and the put notices one. If a checkpoint is newer than the known end, the
        log is listed.
        """
        number, is_listed = self.state.number, self.clock.monotonic_s() - self._listed_s < self.lists_every_s
        if number and is_listed and not self._checkpoints.newer(number):
            try:
                self.storage.head(log_name(number + 2))
            except ObjectNotFound:
                return
        self._read_on(self.state, is_end_checked=True)

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
            found = digest_of(self.storage.get(log_name(state.number)))
            if found != state.digest:
                # perhaps damaged on the way
                found = read_again(partial(self.record, state.number)).digest
        except ObjectNotFound as error:
            raise self._gone(state.number) from error
        if state.digest not in ("", found):
            raise self._another(state.number, state.digest, found)
        # a checkpoint of an older version lacks the digest
        self.advance(replace(state, digest=found, chain=found[:DIGEST_DIGITS]))

    def advance(self, state: LogState) -> None:
        """Set the state to a later state of this log. Ignore an earlier one."""
        with self._advance_lock:
            known = self.state
            if state.number > known.number or (state.number == known.number and state.digest and not known.digest):
                self.state = state


def _as_read(record: LogRecord) -> tuple[LogRecord, bytes]:
    """Return a record as it is read, and its bytes. Raises `InvalidArgument` for one that readers would refuse.

    Records are never deleted, so such a record would make the index unreadable.
    """
    try:
        data = record.encode()
        return LogRecord.decode(data, log_name(record.number)), data
    except (CorruptFile, TypeError) as error:
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
