"""The storage's log. Its records alone say which objects exist, and put-if-absent decides their order.

A process that loses a number reads the winner, checks its own record again, and tries the next number. A writer that
meets a higher epoch is fenced and stops. Each record names the digest of the one before: a process that continues from
a record that it has read notices that the storage was restored, or that two histories were mixed. A checkpoint is a
stored state, a cache: one that is gone or damaged costs requests, never data, and one that can't be written doesn't
fail its record. The newest two are kept.

Threads: every method from any thread, `Checkpoints.write` from one at a time; appends of one process are serialised by
a lock, which is never held by readers.
"""

from __future__ import annotations

import contextlib
import itertools
import logging
import secrets
import threading
from collections import deque
from collections.abc import Callable, Container, Iterator
from dataclasses import dataclass, field, replace
from functools import lru_cache, partial
from typing import Any

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
from tiered_index.service.threads import side_by_side
from tiered_index.storage.base import ObjectInfo, Storage
from tiered_index.storage.context import active_context

# a state of up to this size, of some 10,000 objects, is stored whole after every record: a reader then opens by 3
# requests. After one of a larger state, checkpoints have the changes since
_WHOLE_BYTES = 2 << 20
# of a whole checkpoint, what changes since may have; and records behind it. Fewer than a state knows the digests of
_CHANGES_SHARE, _MOST_RECORDS = 8, 256
# versions before stored a large state after so many bytes of it a record, and 32 records at most
_BYTES_A_RECORD, _MOST_RECORDS_BEFORE = 6 << 20, 32
_KEPT = 2
_SWEPT_AT_ONCE = 8
# of the checkpoints that are older than the records that the newest one knows
_CHECKED = 2
_LISTINGS = 3
_log = logging.getLogger(__name__)


def own_objects(storage: Storage, prefix: str, *, start_after: str = "") -> Iterator[ObjectInfo]:
    """Yield what `storage.list` does, without objects that no index makes; of each of these it warns once."""
    for info in storage.list(prefix, start_after=start_after):
        if is_foreign(info.name):
            _warn_of_foreign(storage.uri, info.name)
        else:
            yield info


@lru_cache
def _warn_of_foreign(uri: str, name: str) -> None:
    _log.warning("%s in %s is not an object of an index: it is ignored", name, uri)


@dataclass(frozen=True, slots=True, order=True)
class _ListedCheckpoint:
    number: int
    digest: str  # of its record, as its name has it; empty: an earlier version wrote it
    name: str
    size_bytes: int
    modified_ms: int


@dataclass(eq=False)
class Checkpoints:
    """The checkpoints of one log, one `every` so many records; None: one a record. That of a large state has the
    changes since a whole one.
    """

    storage: Storage
    every: int | None = None
    listed: list[_ListedCheckpoint] = field(default_factory=list)
    """By number."""
    read_ms: int | None = None
    """When it was written, by the storage's clock; 0: there is another one of its number."""
    _number: int = 0  # of the newest one known
    _base: CheckpointBase | None = None  # the newest whole one known
    summary: Summary = field(init=False)
    # those that were read or written here: number, and the name of the whole one
    _known: list[tuple[int, str]] = field(default_factory=list)
    # records before this one have no checkpoints, except for listed ones
    _swept: int = 0

    def __post_init__(self) -> None:
        self.summary = Summary(self.storage)

    def look(self) -> None:
        """List them: a request."""
        found = list(own_objects(self.storage, CHECKPOINT_PREFIX))
        self.listed = sorted(
            _ListedCheckpoint(*checkpoint_of(info.name), info.name, info.size_bytes, info.modified_ms)
            for info in found
            if not is_summary(info.name)
        )
        self.summary.listed = [info for info in found if is_summary(info.name)]

    def states(self) -> Iterator[LogState]:
        """Yield the states of the listed ones that verify, the newest first, then that of an empty log: a GET each.
        Where one is gone they are listed again, some times.
        """
        tried: set[str] = set()
        listings_left = _LISTINGS - 1
        while one := next((one for one in reversed(self.listed) if one.name not in tried), None):
            try:
                if (whole := base_of(one.name)) and whole not in {other.name for other in self.listed}:
                    raise CorruptFile(one.name, "has the changes since a checkpoint that is gone")
                base, state = self._read(one.name)
                CorruptFile.unless_equal(
                    one.name, "checkpoint has another number than its name", one.number, state.number
                )
                if not state.digest.startswith(one.digest):
                    raise CorruptFile(one.name, "checkpoint has another digest than its name")
            except ObjectNotFound:
                if listings_left:
                    listings_left -= 1
                    self.look()
                    continue
            except CorruptFile as error:
                _log.warning("checkpoint passed over: %s", error)
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
        """Return the state in a stored checkpoint: a GET, two if it has the changes since another one. Raises
        `CorruptFile`, as the storage.
        """
        return self._read(name)[1]

    def _read(self, name: str) -> tuple[CheckpointBase, LogState]:
        """Return the state in a checkpoint, and the whole one that it is or has the changes since."""
        whole = base_of(name) or name
        data, *changes = side_by_side([partial(self.storage.get, one) for one in dict.fromkeys((whole, name))])
        state = LogState.decode(data, whole)
        base = _base(whole, state, len(data))
        return base, LogState.decode(changes[0], name, state) if changes else state

    def has_newer(self, number: int) -> bool:
        """Return whether one was listed, or a summary, that is newer than record `number`."""
        return any(one.number > number for one in self.listed) or bool(self.summary.newer(number))

    def drop_newer(self, number: int) -> None:
        """Delete what is newer than the log's end, record `number`: the log was restored, and reaches it again."""
        if newer := [one for one in self.listed if one.number > number]:
            self.storage.delete_many([one.name for one in newer])
            self.listed = [one for one in self.listed if one.number <= number]
        if summaries := self.summary.newer(number):
            self.storage.delete_many(summaries)
            self.summary.listed = [info for info in self.summary.listed if info.name not in summaries]

    def foreign(self, state: LogState) -> list[_ListedCheckpoint]:
        """Return the listed ones that are certainly of another history than `state`."""
        return [
            one
            for one in self.listed
            if one.digest and one.number <= state.number and state.digest_at(one.number) not in ("", one.digest)
        ]

    def unknown(self, state: LogState) -> list[_ListedCheckpoint]:
        """Return the listed ones that may be of another history: `state` doesn't know records that old."""
        return [
            one for one in self.listed if one.digest and one.number <= state.number and not state.digest_at(one.number)
        ]

    def records_behind(self, size_bytes: int) -> int:
        """Return how many records a checkpoint of this size and the next one are apart, at most."""
        return self.every or min(_MOST_RECORDS_BEFORE, 1 + size_bytes // _BYTES_A_RECORD)

    def write(self, state: LogState) -> None:
        """Store `state`, or its changes, where it is time to; where that fails, the next record's will be stored."""
        if state.number - self._number < (self.every or 1):
            return
        base, data = self._base, self._changes(state)
        name = checkpoint_name(state.number, state.digest, base.name if base is not None and data else "")
        if base is None or not data:
            data = state.encode()
            base = _base(name, state, len(data))
        try:
            self.storage.put(name, data)
            self._number, self._base = state.number, base
            self._known.append((state.number, base.name))
            self._sweep(state)
        except (StorageError, DiskFull) as error:
            _log.warning(
                "checkpoint %d not written or older ones not swept, the next one will do it: %s", state.number, error
            )

    def _changes(self, state: LogState) -> bytes:
        """Return the bytes of a checkpoint with the changes since the whole one; none where it is time for another."""
        base = self._base
        if base is None or base.size_bytes < _WHOLE_BYTES or state.number - base.number >= _MOST_RECORDS:
            return b""
        digest = state.digest_at(base.number)
        if not digest or base.name != checkpoint_name(base.number, digest):
            return b""  # it is of another history, or of a version that knew no digests
        data = state.encode_since(base)
        return data if len(data) * _CHANGES_SHARE <= base.size_bytes else b""

    def _sweep(self, state: LogState) -> None:
        """Delete what is older than the newest two that are known to be there, and no base of these, also what other
        processes wrote since this one listed them. Those of another history stay: they tell of it.
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


def _base(name: str, state: LogState, size_bytes: int) -> CheckpointBase:
    objects, archive = tuple(state.objects.values()), tuple(state.archive.values())
    return CheckpointBase(name, state.number, state.digest, size_bytes, objects, archive)


# how often a log that is read or written several times a second is listed: a listing notices another log, and holes
LIST_EVERY_S = 30.0
_LISTED = 1000
# numbers that may be lost to other writers in one append before it gives up
_MAX_RACES = 1000
# of a writer's own, by which it tells its records from those of a clone of its root
_ATTEMPTS_KEPT = 1000
WAY_ON = "run `tiered-index recover --root ROOT`, which sends the entries that the storage lacks"

Make = Callable[[LogState], LogRecord | None]


class StorageLog:
    """One process's view of the log; a writer's is that of a root, which has `seen` records of it."""

    def __init__(
        self,
        storage: Storage,
        clock: Clock,
        *,
        checkpoint_every: int | None = None,
        root_id: str = "",
        seen: SeenFile | None = None,
    ) -> None:
        self._storage = storage
        self.clock = clock
        self.state = LogState()  # as far as the log was read
        self._checkpoints = Checkpoints(storage, checkpoint_every)
        # the newest record that was read, as it was listed: one that was replaced since has another size or time
        self._listed: ObjectInfo | None = None
        self._writes = False
        # 0: each append lists the log before
        self.lists_every_s = 0.0
        self._listed_s = 0.0
        self.summary_data: bytes | None = None
        """The newest summary, if `open` read it."""
        self._removed: dict[int, set[str]] = {}  # ids of files that lost an object, by record
        self._settled = 0  # the newest record that is known to be durable
        self._root_id, self._seen = root_id, seen
        self._attempts = deque([seen.last.attempt] if seen is not None else [], maxlen=_ATTEMPTS_KEPT)
        self._append_lock = threading.Lock()
        self._summary_lock = threading.Lock()
        self._advance_lock = threading.Lock()

    def open(self, *, checks: bool = True, with_summary: bool = False) -> LogState:
        """Read the newest checkpoint, then the records behind it: 3 requests and one a record. With threads of the
        context the log is listed while the checkpoint is read, and a small summary is read if it is wanted. Raises
        `NotAnIndex`; unless not `checks`, as `check_unmixed`.
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
                # a checkpoint is a cache: the log decides
                _log.warning("checkpoint %d is not of this log, and is passed over: %s", state.number, error)
                state, infos = next(states), None
        if not number:
            raise NotAnIndex(f"{self._storage.uri} holds no tiered index (no {LOG_PREFIX} records)")
        if checks:
            self.check_unmixed()
        return self.state

    def _read_at_once(
        self, states: Iterator[LogState], *, with_summary: bool
    ) -> tuple[LogState, list[ObjectInfo] | None]:
        """Return the state of the newest listed checkpoint, and the records behind it if they were listed meanwhile."""
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
            return self._storage.get(name)
        except (StorageError, CorruptFile) as error:
            _log.warning("summary passed over: %s", error)
            return None

    def _list_from(self, last: int) -> list[ObjectInfo]:
        """Return record `last`, and those behind it, as they are listed."""
        return [*own_objects(self._storage, LOG_PREFIX, start_after=log_name(last - 1) if last > 1 else "")]

    def refresh(self) -> LogState:
        """Read the records behind the last one known: one request, one more for each; a writer looks at that one, too.
        After an error of the storage, or a spent budget, what was read is kept. Raises `CorruptFile` where a record is
        missing.
        """
        self._read_on(self.state)
        return self.state

    def read_next(self) -> LogState:
        """Read the records that follow by their numbers: a GET each, and one that finds none. It notices no hole and no
        other log: call `refresh` now and then. Raises as `refresh`.
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
        """The newest summary, as it was listed."""
        return self._checkpoints.summary.newest

    @property
    def has_seen(self) -> bool:
        """Whether this log is written for a root that has seen records of it."""
        return self._seen is not None and self._seen.last.number > 0

    def check_unmixed(self) -> None:
        """Raise `StorageBehind` where a listed checkpoint is of another history of this index. No request as a rule.

        `open` does this. Leave it out only where something else says which history is right.
        """
        strays = self._strays()
        if strays:
            raise self._mixed(strays[-1])

    def _strays(self) -> list[_ListedCheckpoint]:
        found, state = self._checkpoints.foreign(self.state), self.state
        if found:
            # a writer may have deleted them since, before it went on
            self._checkpoints.look()
            found = self._checkpoints.foreign(state)
        unknown = self._checkpoints.unknown(state)[-_CHECKED:]
        return sorted([*found, *(one for one in unknown if not self._is_followed(one))])

    def _is_followed(self, one: _ListedCheckpoint) -> bool:
        """Return whether the log continues from the record of a checkpoint, as far as the next one would have been."""
        last = one.number + self._checkpoints.records_behind(one.size_bytes)
        try:
            before = self.record(one.number)
            if not before.digest.startswith(one.digest):
                return False
            for number in range(one.number + 1, last + 1):
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
            f"{self._storage.uri}/{stray.name}",
            f"two histories of this index are mixed here, as after a sync without deletes: this checkpoint and that of "
            f"record {self.state.number} name different records {number}. Entries of one may be missing. Restore one "
            f"history whole, or `tiered-index copy` the newest one into an empty place. Where `tiered-index verify` "
            f"reports checkpoints alone, the log is whole: delete those, or run `verify --deep --repair --yes`",
            expected=self.state.digest_at(number) or None,
            found=stray.digest,
        )

    def check_root(self) -> None:
        """Check the log that was read against its root, by a request at most. Raises `StorageBehind` where it is
        not the log that the root has seen, `RootBehind` where the root has written records that it doesn't know.
        """
        if self._seen is not None:
            self.check_seen(self._seen.last)
            self._check_attempts(self.state)

    def check_seen(self, seen: Seen, *, deep: bool = True) -> None:
        """Check the log that was read against what a root has `seen`. Raises `StorageBehind`; `deep`: by a request
        where it has gone on since.
        """
        state = self.state
        if state.number < seen.number:
            raise StorageBehind(
                f"{self._storage.uri}/{log_name(state.number)}",
                f"the log ends here, but its root has seen record {seen.number}: the storage was restored to an "
                f"earlier state. Nothing local was deleted; {WAY_ON}",
                expected=seen.number,
                found=state.number,
            )
        if seen.digest and (deep or state.number == seen.number):
            try:
                # the record behind it names it; one of an older version doesn't
                found = state.digest if state.number == seen.number else self.record(seen.number + 1).previous
                found = found or self.record(seen.number).digest
            except ObjectNotFound as error:
                raise self._gone(seen.number) from error
            if found != seen.digest:
                raise self._another(seen.number, seen.digest, found)

    def check_own(
        self, root_id: str, seen: Seen | None, attempts: Container[str] = (), state: LogState | None = None
    ) -> None:
        """Raise `RootBehind` where a root has written records that it has not `seen`, by none of its `attempts`:
        somebody else has its identity, or it is an older copy. Read what it has seen behind the log: a running writer
        notes each of its attempts before.
        """
        seen = seen or Seen()
        own = (state or self.state).roots.get(root_id)
        if own is None or own[0] <= seen.number or own[1] == seen.attempt or own[1] in attempts:
            return
        raise RootBehind(
            f"{self._storage.uri}/{log_name(own[0])}",
            f"this root wrote it, but has seen the log only up to record {seen.number}: the root was restored from a "
            f"backup, or is a clone of one that went on. Nothing was changed; {WAY_ON}",
            expected=seen.number,
            found=own[0],
        )

    def _check_attempts(self, state: LogState) -> None:
        """As `check_own`, of the root that this log is written for."""
        if self._seen is not None:
            self.check_own(self._root_id, self._seen.last, self._attempts, state)

    def _another(self, number: int, expected: str, found: str) -> StorageBehind:
        return StorageBehind(
            f"{self._storage.uri}/{log_name(number)}",
            f"this record differs from the one seen under its number: the storage was restored, or it "
            f"holds another history of the index. Nothing local was deleted; {WAY_ON}",
            expected=expected,
            found=found,
        )

    def rely(self) -> None:
        """Make what is known of the log durable, in the storage and in the root. Call it before anything local is
        deleted, or taken for published, because of a record. Raises as the storage and the root's disk.
        """
        state = self.state
        if not state.number:
            return
        self._check_attempts(state)
        self._settle(state.number)
        if self._seen is not None:
            self._seen.note(state.number, state.digest)

    def _settle(self, number: int) -> None:
        """Make record `number` durable: the put of somebody else, or one of ours that failed, may not have been."""
        if number > self._settled:
            self._storage.settle(log_name(number))
            self._settled = number

    def _read_on(self, state: LogState, listed: list[ObjectInfo] | None = None, *, is_end_checked: bool = False) -> int:
        """Read what follows `state`, maybe `listed` already, and go there, as far as it can be read; return the number
        reached. `is_end_checked`: the caller calls `check_end` next.
        """
        return self._replay(state, self._listed_records(state, listed, is_end_checked=is_end_checked))

    def _listed_records(
        self, state: LogState, listed: list[ObjectInfo] | None, *, is_end_checked: bool
    ) -> Iterator[LogRecord]:
        infos = self._records_behind(state, listed, is_end_checked=is_end_checked)
        if infos and self._writes:
            self.check_end(state)  # or records of another log would be taken for this one's
        for info in infos:
            try:
                yield self.record(number_of(info.name))
            except ObjectNotFound as error:
                raise CorruptFile(info.name, "record is listed, but the storage does not have it") from error
            self._listed = info

    def _replay(self, state: LogState, records: Iterator[LogRecord]) -> int:
        """Go to what follows `state`, as far as it can be read; return the number reached."""
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
        """Return the records behind `state`, as they are listed. Raises `CorruptFile` where one is missing among them,
        `StorageBehind` where the state's own is gone or another, `StorageUnavailable` where there is no log at all, as
        where a disk isn't mounted.
        """
        last = state.number
        # a listing, since the first record that isn't there need not be the end; from the last known one on, which
        # tells an empty storage from one that has nothing new
        begun_s = self.clock.monotonic_s()
        infos = self._list_from(last) if listed is None else listed
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
        """Raise `StorageBehind` where the record that was read last is another one now, or a checkpoint of it is older
        than it is.
        """
        if self._listed is None:
            is_same = self._checkpoints.read_ms is None or info.modified_ms <= self._checkpoints.read_ms
        else:
            # a record that this process has appended since is read, too: another index may have one of its number
            is_same = self._listed == info
        if not is_same and state.digest:
            found = digest_of(self._storage.get(info.name))
            if found != state.digest:
                raise self._another(state.number, state.digest, found)
        self._listed = info

    def _gone(self, number: int) -> StorageUnavailable | CorruptFile:
        numbers = [number_of(info.name) for info in own_objects(self._storage, LOG_PREFIX)]
        if not numbers:
            return StorageUnavailable(
                f"{self._storage.uri}: the log's record {number} is gone: is this another storage, and is it mounted?"
            )
        name = f"{self._storage.uri}/{log_name(number)}"
        if numbers[-1] >= number:
            return CorruptFile(name, f"the record is gone, though the log has record {numbers[-1]}")
        return StorageBehind(
            name,
            f"the record is gone, and the log ends before it: the storage was restored to an earlier state. A "
            f"reader opens it again; for a root {WAY_ON}",
            expected=number,
            found=numbers[-1],
        )

    def create(self, descriptor: IndexDescriptor) -> LogState:
        """Write record 1 unless there is one; return the state, with the descriptor of the record that is there."""
        return self.begin(LogRecord(1, "create", 0, secrets.token_hex(8), self.clock.now_ms(), genesis=descriptor))

    def begin(self, record: LogRecord) -> LogState:
        """As `create`, with all that record 1 is to say. Raises `InvalidArgument` as `append`."""
        record, data = _as_read(record)
        with self._append_lock:
            try:
                self._storage.put_if_absent(log_name(1), data)
            except ObjectExists:
                return self.open()
            self._settled = 1
            self.advance(LogState().apply(record, log_name(1)))
            self._checkpoints.write(self.state)
            return self.state

    def claim_epoch(self) -> int:
        """Take the next writer epoch and append its fence; from then on every older writer is fenced."""
        attempt, self._writes = secrets.token_hex(8), True
        epoch = self.refresh().epoch + 1
        for _ in range(_MAX_RACES):
            try:
                self._storage.put_if_absent(epoch_name(epoch), attempt.encode())
            except ObjectExists:
                # a retried request may have met its own first success
                if self._storage.get(epoch_name(epoch)) != attempt.encode():
                    epoch += 1
                    continue
                self._storage.settle(epoch_name(epoch))
            break
        else:
            raise StorageUnavailable(f"{self._storage.uri}: {_MAX_RACES} epochs were claimed by others")
        self.append("fence", epoch, lambda state: LogRecord(0, "fence", epoch, "", 0))
        return epoch

    def append_positions(self, epoch: int, positions: dict[str, int]) -> LogState:
        """Append a record of source positions, where the log doesn't reach them yet."""

        def make(state: LogState) -> LogRecord | None:
            if max_positions(state.positions, positions) == state.positions:
                return None
            return LogRecord(0, "positions", epoch, "", 0, positions=positions)

        return self.append("source positions", epoch, make) if make(self.state) is not None else self.state

    def record(self, number: int) -> LogRecord:
        """Return record `number`: a request. Raises `CorruptFile`, what the storage raises."""
        return LogRecord.decode(self._storage.get(log_name(number)), log_name(number))

    def removed_files(self, state: LogState, after: int = 0) -> set[str]:
        """Return ids of files that have lost an object by records behind number `after`: hosts' clocks differ. Reads
        each record once. Raises as the storage.
        """
        for number in range(state.number, after, -1):
            if number not in self._removed:
                removed = self.record(number).remove
                self._removed[number] = {name.split("/")[1] for name in removed if name.startswith(DATA_PREFIX)}
        return set().union(*(self._removed[number] for number in range(after + 1, state.number + 1)))

    def numbers_since(self, last: int, since_ms: int) -> Iterator[int]:
        """Yield the numbers, from `last` down, of records put since `since_ms` (storage's clock); a listing a 1,000. A
        record that a listing leaves out counts as put since then, and one that it has twice counts once.
        """
        while last > 0:
            after = max(0, last - _LISTED)
            listed = own_objects(self._storage, LOG_PREFIX, start_after=log_name(after) if after else "")
            ages = ((number_of(info.name), info.modified_ms) for info in listed)
            put_ms = dict(itertools.takewhile(lambda age: age[0] <= last, ages))  # noqa: B023 - read within the round
            young = [number for number in range(after + 1, last + 1) if put_ms.get(number, since_ms) >= since_ms]
            yield from reversed(young)
            if len(young) < last - after:
                return
            last = after

    def append(self, what: str, epoch: int | None, make: Make) -> LogState:
        """Append what `make` returns for the state at the log's end, unless it is None. `epoch` is the writer's; None
        for jobs (merge, erase), which no writer fences. Raises `WriterFenced` where the log has a higher epoch,
        `StorageUnavailable` where the outcome is unknown: a repeated call finds its own record, `InvalidArgument` for a
        record that readers would refuse. After any error that is no `StorageError` the record is certainly not there.
        """
        state, is_put = self._append(what, epoch, make)
        # a job that finds its record may be the second try of one that ended between the record and the summary
        if is_put or epoch is None:
            # other appends don't wait for it, but its caller does: after an erasure no filter tells of what was erased
            with self._summary_lock:
                self._checkpoints.summary.renew(self.state)
        return state

    def _append(self, what: str, epoch: int | None, make: Make) -> tuple[LogState, bool]:
        """As `append`, without the summary; and whether a record was put."""
        with self._append_lock:
            attempt, self._writes = secrets.token_hex(8), True
            self._read_before_append()
            self.check_end()
            state, root_id = self.state, self._root_id if epoch is not None else ""
            # so that only the newest record of a log may ever not be durable
            self._settle(state.number)
            # or a reader would take them for states of the records that follow
            self._checkpoints.drop_newer(state.number)
            for _ in range(_MAX_RACES):
                if root_id:
                    self._check_attempts(state)
                if epoch is not None and state.epoch > epoch:
                    raise fenced(self._storage.uri, state.epoch, epoch)
                made = make(state)
                if made is None:
                    return state, False
                made = replace(made, number=state.number + 1, attempt=attempt, created_ms=self.clock.now_ms())
                record, data = _as_read(replace(made, previous=state.digest, root=root_id))
                after = state.apply(record, log_name(record.number))
                if root_id and self._seen is not None:
                    # first: a record of this root's that it doesn't know of means that the root is an older copy
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
        raise StorageUnavailable(f"{self._storage.uri}: lost {_MAX_RACES} log numbers in a row while appending {what}")

    def _read_before_append(self) -> None:
        """Read the log on, `check_end` follows. A listing costs as much as a put. Between two of them it is enough that
        the second record behind the end is not there: then there is no hole, and the put finds a first one. A newer
        checkpoint tells of a record that is not read yet, unless the log was restored: only a listing decides.
        """
        number, is_listed = self.state.number, self.clock.monotonic_s() - self._listed_s < self.lists_every_s
        if number and is_listed and not self._checkpoints.has_newer(number):
            try:
                self._storage.head(log_name(number + 2))
            except ObjectNotFound:
                return
        self._read_on(self.state, is_end_checked=True)

    def _put(self, record: LogRecord, data: bytes) -> LogRecord:
        """Return the record under the number of `record`: it, or an earlier one. Raises only `StorageError`."""
        name = log_name(record.number)
        try:
            try:
                self._storage.put_if_absent(name, data)
            except ObjectExists:
                winner = self._reread(record.number)
                if winner.attempt == record.attempt:
                    self._settle(record.number)  # an earlier request's, which may not be durable
                return winner
        except (CorruptFile, InvalidArgument) as error:
            raise StorageUnavailable(
                f"{self._storage.uri}: whether {name} is the record that was put is not known: {error}"
            ) from error
        self._settled = record.number
        return record

    def _reread(self, number: int) -> LogRecord:
        """Return a record; damage on the way, which a second request does not meet, is not damage of the object."""
        try:
            return self.record(number)
        except CorruptFile:
            return self.record(number)

    def check_end(self, state: LogState | None = None) -> None:
        """Raise `StorageBehind` where the newest record is gone or another, `StorageUnavailable` where there is no log,
        as where a disk isn't mounted.
        """
        state = state or self.state
        if not state.number:
            return
        try:
            found = self._reread(state.number).digest
        except ObjectNotFound as error:
            raise self._gone(state.number) from error
        if state.digest not in ("", found):
            raise self._another(state.number, state.digest, found)
        # a checkpoint of an older version doesn't say it
        self.advance(replace(state, digest=found, chain=found[:DIGEST_DIGITS]))

    def advance(self, state: LogState) -> None:
        """Go to a state of this log, where it is later."""
        with self._advance_lock:
            known = self.state
            if state.number > known.number or (state.number == known.number and state.digest and not known.digest):
                self.state = state


def _as_read(record: LogRecord) -> tuple[LogRecord, bytes]:
    """Return a record as it is read, and its bytes. Raises `InvalidArgument` for one that readers would refuse: no
    index could be opened any more, since records are never deleted.
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
    removed: Callable[[LogState], Container[str]] = lambda state: (),
) -> Make:
    """Return a `Make` that adds objects as far as the state doesn't have them, nor their files are among `removed`."""

    def make(state: LogState) -> LogRecord | None:
        fresh = tuple(o for o in add if state.object_of(o.file_id) is None and o.file_id not in removed(state))
        return LogRecord(0, "publish", epoch, "", 0, fresh, positions=positions) if fresh else None

    return make


def fenced(uri: str, newer: int, epoch: int) -> WriterFenced:
    """Return the error of a writer of `epoch` that met a newer one."""
    return WriterFenced(
        f"{uri}: a newer writer (epoch {newer}) has taken over from this one (epoch {epoch}); "
        "nothing more is published by it, its local files are kept"
    )
