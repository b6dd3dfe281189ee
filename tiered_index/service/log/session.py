"""A writer's session in the storage: the log, the claimed epoch, and the lease.

If a root starts while the storage is unavailable, the life cycle claims the epoch later. The lease only decides when
another host may claim; only the log's fences make this correct. It is a numbered object ``lease/EPOCH/N``; the
greatest name counts. It names the lock of its root: the holder of that lock takes over immediately, but a copy of
the root waits like any other root. Wall clocks of hosts do not count. Renewals age by the storage's clock. If
that clock was set back, the claimer watches the lease by its monotonic clock. Threads: the life cycle's, and the
opener's before.
"""

from __future__ import annotations

import contextlib
import logging
import os
import secrets
import socket
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Annotated, Literal

from msgspec import Meta, Struct
from msgspec.structs import replace

from tiered_index.base.clock import Clock
from tiered_index.base.documents import Milliseconds, decoded, encoded
from tiered_index.base.threads import side_by_side
from tiered_index.errors import (
    CorruptFile,
    DiskFull,
    LockHeld,
    NotAnIndex,
    ObjectNotFound,
    SchemaMismatch,
    StorageBehind,
    StorageError,
    StorageMisconfigured,
    StorageUnavailable,
    WriterFenced,
)
from tiered_index.format.names import LEASE_PREFIX, lease_name
from tiered_index.format.topic_documents import Documents
from tiered_index.service.log.expired import NOTHING, Expired
from tiered_index.service.log.log import LAST, StorageLog, fenced, own_objects
from tiered_index.service.log.records import IndexDescriptor, LogRecord, LostObject
from tiered_index.service.log.state import LogState
from tiered_index.storage.base import Storage
from tiered_index.storage.probe import check_storage, probe_put_if_absent

# time between reads of a watched lease
_LOOK_S = 2.0
_log = logging.getLogger(__name__)


class _StoredLease(Struct):
    """A lease as stored."""

    host: str
    pid: Annotated[int, Meta(ge=0, le=2**31 - 1)]
    released: bool
    place: str
    ttl_ms: Milliseconds


@dataclass(frozen=True)
class _NewestLease:
    """The newest lease, with its `name` and the time of its renewal by the storage's clock."""

    lease: _StoredLease
    name: str
    written_ms: int

    def age_ms(self, storage: Storage) -> int:
        """Return the time since the renewal by the storage's clock; negative if that clock was set back."""
        return storage.now_ms() - self.written_ms


WriterState = Literal["alive", "closed", "gone"]


@dataclass(frozen=True)
class WriterStatus:
    """The holder of an index's lease, or the last one.

    `state`: ``alive``: the lease is young by the clock of this machine or of the storage; ``closed``: it ended
    normally; ``gone``: the lease was not renewed within its time to live.
    `seen_ms`: the last renewal, in epoch milliseconds by the storage's clock.
    """

    state: WriterState
    host: str
    pid: int
    seen_ms: int


class LeaseWatch:
    """Decides whether the lease of an index lets another writer claim it. One thread."""

    def __init__(self, storage: Storage, clock: Clock) -> None:
        self._storage, self._clock = storage, clock
        # the watched renewal, and the begin of watching by the monotonic clock
        self._name, self._since_s = "", 0.0

    def check(self, place: str, *, waits: bool = False) -> None:
        """Raise `LockHeld` if the lease of another root is valid. `place` is that of the root's lock.

        `waits`: if the storage's clock was set back since the last renewal, wait until the lease is renewed or its time
        to live has passed.
        """
        while (left_s := self._left_s(place, waits)) > 0:
            threading.Event().wait(min(left_s, _LOOK_S))

    def _left_s(self, place: str, waits: bool) -> float:
        """Return the seconds to watch the lease; 0: it lets others claim. Raises `LockHeld`."""
        current = _current(self._storage)
        if current is None or current.lease.released or current.lease.place == place:
            return 0.0
        now_s = self._clock.monotonic_s()
        was_renewed = self._name not in ("", current.name)
        if self._name != current.name:
            self._name, self._since_s = current.name, now_s
        age_ms, watched_ms = current.age_ms(self._storage), (now_s - self._since_s) * 1000
        if max(age_ms, watched_ms) >= current.lease.ttl_ms:
            return 0.0
        left_s = (current.lease.ttl_ms - max(age_ms, watched_ms, 0)) / 1000
        if waits and not was_renewed and age_ms <= -current.lease.ttl_ms:
            return left_s
        take_over = "`tiered-index recover --take-over`, with --root and --storage, does not wait"
        if _has_ended(current):
            raise LockHeld(
                f"{self._storage.uri} has the lease of process {current.lease.pid} on {current.lease.host}, with "
                f"another root. This host has no such process now: it probably was killed. The lease ends in "
                f"{left_s:.0f} s; {take_over}",
                pid=current.lease.pid,
                host=current.lease.host,
            )
        raise LockHeld.by(
            self._storage.uri,
            current.lease.pid,
            current.lease.host,
            f" with another root; its lease ends in {left_s:.0f} s unless it is renewed. If that writer is gone, "
            f"{take_over}",
        )


def _has_ended(current: _NewestLease) -> bool:
    """Return whether the holder's host is this one, and has no such process. A container does not see all processes."""
    if current.lease.host != socket.gethostname():
        return False
    try:
        os.kill(current.lease.pid, 0)
    except ProcessLookupError:
        return True
    except (OSError, OverflowError):
        pass  # the process of another user
    return False


def writer_of(storage: Storage, clock: Clock) -> WriterStatus | None:
    """Return the last holder of the index's lease; None: there never was one. Raises `StorageError`.

    It costs at least two requests. The storage's time is asked for only if the lease is not young by `clock`, which is
    this machine's: in Google's and Azure's stores it takes a probe that a reader may not write.
    """
    current = _current(storage)
    if current is None:
        return None
    state: WriterState = "closed"
    if not current.lease.released:
        age_ms = clock.now_ms() - current.written_ms
        if abs(age_ms) >= current.lease.ttl_ms:
            with contextlib.suppress(StorageMisconfigured):
                age_ms = current.age_ms(storage)
        # a renewal in the storage's future proves nothing
        state = "alive" if abs(age_ms) < current.lease.ttl_ms else "gone"
    return WriterStatus(state, current.lease.host, current.lease.pid, current.written_ms)


def _current(storage: Storage) -> _NewestLease | None:
    """Return the newest lease; None: there is none, or it can't be read."""
    for _ in range(10):  # a renewal may delete a lease that was just listed
        listed = list(own_objects(storage, LEASE_PREFIX, known=LAST))
        if not listed:
            return None
        name = listed[-1].name
        try:
            return _NewestLease(decoded(storage.get(name), _StoredLease, name, "lease"), name, listed[-1].modified_ms)
        except ObjectNotFound:
            continue
        except CorruptFile as error:
            # the log's fences decide, so an unreadable lease must not lock out every writer
            _log.warning("ignoring %s, which is not a valid lease: %s", name, error)
            return None
    return None


@dataclass(eq=False)
class Lease:
    """One writer's lease. One thread."""

    storage: Storage
    epoch: int
    clock: Clock
    ttl_s: float
    place: str  # of the root's lock
    _number: int = 0
    _renewed_s: float = 0.0

    def __post_init__(self) -> None:
        self._write(released=False)

    @property
    def is_due(self) -> bool:
        """Whether a third of its time has passed."""
        return self.clock.monotonic_s() - self._renewed_s >= self.ttl_s / 3

    def renew(self) -> None:
        """Renew the lease if a third of its time has passed."""
        if self.is_due:
            self._write(released=False)

    def left_s(self) -> float:
        """Return the seconds until the lease ends; negative afterwards."""
        return self.ttl_s - (self.clock.monotonic_s() - self._renewed_s)

    def release(self) -> None:
        """Release the lease, so that another root can claim the index immediately."""
        self._write(released=True)

    def _write(self, *, released: bool) -> None:
        self._number += 1
        document = {
            "place": self.place,
            "host": socket.gethostname(),
            "pid": os.getpid(),
            "released": released,
            "ttl_ms": round(self.ttl_s * 1000),
        }
        self.storage.put(lease_name(self.epoch, self._number), encoded(document))
        if self._number == 2:
            # not with the first write, for which an opening waits: earlier leases do no harm
            own = lease_name(self.epoch, self._number)
            names = [info.name for info in own_objects(self.storage, LEASE_PREFIX, known=own)]
            self.storage.delete_many(name for name in names if name < own)
        elif self._number > 2:
            self.storage.delete_many([lease_name(self.epoch, self._number - 1)])
        self._renewed_s = self.clock.monotonic_s()


def check_descriptor(stored: IndexDescriptor, wanted: IndexDescriptor, where: str) -> None:
    """Raise `SchemaMismatch` or `NotAnIndex` if an index differs from the wanted one."""
    if wanted.index_id and stored.index_id != wanted.index_id:
        raise NotAnIndex(
            f"{where} holds index {stored.index_id}, not {wanted.index_id}: give a root and a storage of one index"
        )
    if stored.layout.schema != wanted.layout.schema:
        raise SchemaMismatch(
            f"{where} stores {_declared(stored)}, not {_declared(wanted)}: an index keeps the schema it was created "
            "with. Use another root and storage"
        )
    if stored.layout.preset != wanted.layout.preset or stored.layout.slots != wanted.layout.slots:
        raise SchemaMismatch(
            f"{where} was created with preset {stored.layout.preset.name} and {stored.layout.slots:,} slots, "
            f"not {wanted.layout.preset.name} and {wanted.layout.slots:,}: leave these settings out, or use another "
            "root and storage"
        )
    if stored.offset_space != wanted.offset_space:
        raise SchemaMismatch(
            f"{where} has offsets in {stored.offset_space!r}, not in {wanted.offset_space!r}: an index keeps the "
            "offset space it was created with. Use another root and storage"
        )


def _declared(descriptor: IndexDescriptor) -> str:
    schema = descriptor.layout.schema
    extra = ", ".join(f"{c.name}: {c.spoken_type}" for c in schema.extra)
    return f"{schema.name}({extra})"


# most ranges of one source, kind and topic in a log
_MOST_RANGES = 200


def _is_like(old: LostObject, new: LostObject) -> bool:
    a, b = old.range, new.range
    return a is not None and b is not None and (a.source, a.kind, a.topic, a.key) == (b.source, b.kind, b.topic, b.key)


def _holds(old: LostObject, new: LostObject) -> bool:
    """Return whether a known range has all of a new one. A range may be rewritten again, later."""
    a, b = old.range, new.range
    assert a is not None and b is not None
    is_inside = a.begin <= b.begin and b.end <= a.end
    return is_inside and (a.kind != "rewritten" or new.second_max <= old.second_max)


@dataclass(eq=False)
class StorageSession:
    """A writer's session: `join`, `claim`, then `renew` at intervals. `epoch` is 0 before the claim."""

    storage: Storage
    log: StorageLog
    clock: Clock
    lease_ttl_s: float
    describe: Callable[[IndexDescriptor | None], IndexDescriptor]
    """Takes the stored descriptor (None: a new index), and returns the descriptor that the index must have."""
    index_id: str = ""  # that of the root's index; empty if it has no index
    place: str = ""  # of the root's lock
    epoch: int = 0
    fenced: WriterFenced | None = None
    log_error: StorageError | DiskFull | None = None  # why the log could not be read
    mixed: StorageBehind | None = None  # the storage also has another history of the index
    kept_expired: Expired = NOTHING  # by the copy of the log in the root
    kept_positions: dict[str, int] = field(default_factory=dict)  # by the same copy
    kept_documents: Documents = field(default_factory=dict)  # by the same copy
    _lease: Lease | None = None
    _is_probed: bool = False
    _watch: LeaseWatch = field(init=False)

    def __post_init__(self) -> None:
        self._watch = LeaseWatch(self.storage, self.clock)

    @property
    def claimed(self) -> bool:
        """Whether this writer may publish."""
        return self.epoch > 0 and self.fenced is None

    @property
    def lease_left_s(self) -> float | None:
        """Seconds until the lease ends unless it is renewed; negative afterwards; None: this writer has none."""
        return self._lease.left_s() if self._lease is not None and self.fenced is None else None

    @property
    def expired(self) -> Expired:
        """The expired entries by the log, or by the root's copy of it if the log was not read."""
        return self.expired_by(self.log.state)

    def expired_by(self, state: LogState) -> Expired:
        """Return the expired entries by a state of the log, or by the root's copy of it if the log was not read."""
        return state.expired if state.number else self.kept_expired

    def join(self, *, begins_anew: bool = False) -> IndexDescriptor:
        """Open or create the index. Call it again if the storage was unavailable.

        `begins_anew`: accept the log even if two histories are mixed. Raises the errors of `check_descriptor`.
        """
        try:
            state = self.log.open(checks=False)
        except NotAnIndex:
            if self.index_id:
                raise
            check_storage(self.storage, self.clock)
            self._is_probed = True
            state = self.log.create(replace(self.describe(None), index_id=secrets.token_hex(8)))
        assert state.genesis is not None
        wanted = replace(self.describe(state.genesis), index_id=self.index_id)
        check_descriptor(state.genesis, wanted, self.storage.uri)
        if not self.log.has_seen and not begins_anew:
            self.log.check_unmixed()
        self.log.identity.check_root(self.log.state)
        self.mixed = self.log.mixed() if self.log.has_seen else None
        return state.genesis

    def claim(
        self, *, waits: bool = False, takes_over: bool = False, beside: Callable[[], object] = lambda: None
    ) -> None:
        """Become the index's writer. `waits`: see `LeaseWatch.check`. `takes_over`: ignore the lease of another writer.

        `beside` is called after the record, beside the writes of the lease and the checkpoint. Raises its errors,
        `LockHeld` (another writer has the lease), `WriterFenced` and `StorageError`.
        """
        if not takes_over:
            self._watch.check(self.place, waits=waits)
        if not self._is_probed:
            probe_put_if_absent(self.storage)
        epoch = self.log.claim_epoch()

        def lease() -> None:
            self._lease = Lease(self.storage, epoch, self.clock, self.lease_ttl_s, self.place)

        writes: list[Callable[[], object]] = [lease, self.log.write_checkpoint, beside]
        side_by_side(writes)
        self.epoch = epoch

    def refreshed(self) -> LogState:
        """Read new log records and return the state. Raises `WriterFenced` if a newer writer has taken over."""
        state = self.log.refresh()
        if state.epoch > self.epoch:
            raise fenced(self.storage.uri, state.epoch, self.epoch)
        return state

    def record_ranges(self, lost: Sequence[LostObject]) -> None:
        """Append a record of ranges that the log does not have. If a source has many, the newest one grows.

        Raises `WriterFenced` and `StorageUnavailable`.
        """
        self._check_claimed()

        def make(state: LogState) -> LogRecord | None:
            known = dict(state.lost)
            for part in lost:
                assert part.range is not None
                same = [old for old in known.values() if _is_like(old, part)]
                if any(_holds(old, part) for old in same):
                    continue
                grown = same[-1].joined(part) if len(same) >= _MOST_RANGES else part
                known[grown.name] = grown
            added = tuple([part for name, part in known.items() if state.lost.get(name) != part])
            return LogRecord(0, "ranges", self.epoch, "", 0, lost=added) if added else None

        self.log.append("skipped ranges", self.epoch, make)

    def publish_positions(self, positions: dict[str, int]) -> None:
        """Append a record of positions, unless the log has them. Raises as `record_ranges`."""
        self._check_claimed()
        self.log.append_positions(self.epoch, positions)

    def _check_claimed(self) -> None:
        if self.fenced is not None:
            raise self.fenced
        if not self.claimed:
            raise StorageUnavailable(f"{self.storage.uri}: the index is not claimed yet, so no record can be added")

    @property
    def is_renewal_due(self) -> bool:
        """Whether `renew` would renew the lease."""
        return self._lease is not None and self.fenced is None and self._lease.is_due

    def renew(self) -> None:
        """Renew the lease if it is due."""
        if self._lease is not None and self.fenced is None:
            self._lease.renew()

    def release(self) -> None:
        """Release the lease, so that another root can claim the index immediately."""
        lease, self._lease = self._lease, None
        if lease is not None and self.fenced is None:
            lease.release()
