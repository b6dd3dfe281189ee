"""A writer's standing in the storage: the log, the epoch it claimed, and its lease.

A root may start while the storage is down: the life cycle claims then. The lease, numbered objects ``lease/EPOCH/N`` of
which the greatest name counts, only decides when another host may claim; correctness depends on the log's fences alone.
It names its root and the start of its host's system: who holds that root's lock there takes over at once. A clone on
another host waits like any other root. Threads: the life cycle's, and the opener's before.
"""

from __future__ import annotations

import json
import logging
import os
import secrets
import socket
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from tiered_index.clock import Clock
from tiered_index.documents import MILLISECONDS, Optional, checked, flag, integer, load, record, text
from tiered_index.errors import (
    CorruptFile,
    DiskFull,
    LockHeld,
    NotAnIndex,
    ObjectNotFound,
    SchemaMismatch,
    StorageError,
    WriterFenced,
)
from tiered_index.format.names import LEASE_PREFIX, lease_name
from tiered_index.retention import NOTHING, Expired
from tiered_index.service.log.log import StorageLog, fenced, own_objects
from tiered_index.service.log.records import IndexDescriptor
from tiered_index.service.log.state import LogState
from tiered_index.storage.base import Storage
from tiered_index.storage.opening import probe_put_if_absent

_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class _Holder:
    root_id: str
    host: str
    pid: int
    expires_ms: int
    released: bool
    place: str


WriterState = Literal["alive", "closed", "gone"]


@dataclass(frozen=True)
class Writer:
    """Who holds an index's lease, or held it last: ``alive``; ``closed``: it ended in order; ``gone``: the lease ran
    out. `seen_ms`: when it was renewed last, epoch milliseconds by the storage's clock.
    """

    state: WriterState
    host: str
    pid: int
    seen_ms: int


_HOLDER = record(
    _Holder,
    root_id=text(),
    host=text(),
    pid=integer(0, 2**31 - 1),
    expires_ms=MILLISECONDS,
    released=flag,
    place=Optional(text(), ""),
)


def check_lease(storage: Storage, root_id: str, clock: Clock) -> None:
    """Raise `LockHeld` where a lease of another root is in force, or of a copy of this one on another host."""
    found = _current(storage)
    if found is None:
        return
    holder, _ = found
    is_own = holder.root_id == root_id and holder.place in ("", _place())
    if holder.released or is_own or holder.expires_ms <= clock.now_ms():
        return
    left_s = (holder.expires_ms - clock.now_ms()) / 1000
    lease = f" with another root; its lease ends in {left_s:.0f} s unless it is renewed"
    raise LockHeld.by(storage.uri, holder.pid, holder.host, lease)


def writer_of(storage: Storage, clock: Clock) -> Writer | None:
    """Return who last held the index's lease, None where nobody ever did. At least two requests; `StorageError`."""
    found = _current(storage)
    if found is None:
        return None
    holder, seen_ms = found
    state: WriterState = "closed" if holder.released else "alive" if holder.expires_ms > clock.now_ms() else "gone"
    return Writer(state, holder.host, holder.pid, seen_ms)


def _current(storage: Storage) -> tuple[_Holder, int] | None:
    """Return the lease that counts, and when it was written, by the storage's clock."""
    for _ in range(10):  # a renewal may delete what was just listed
        listed = list(own_objects(storage, LEASE_PREFIX))
        if not listed:
            return None
        name = listed[-1].name
        try:
            return checked(_HOLDER, load(storage.get(name), name, "lease"), name, "lease"), listed[-1].modified_ms
        except ObjectNotFound:
            continue
        except CorruptFile as error:
            # the lease is a courtesy, the log's fences decide: one that can't be read must not lock every writer out
            _log.warning("%s is not a lease and is passed over: %s", name, error)
            return None
    return None


def _place() -> str:
    """Return what tells this start of this host's system from others: a root's lock holds for the processes of one."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        boot = ""
    return f"{socket.gethostname()}/{boot}"


@dataclass(eq=False)
class Lease:
    """One writer's lease. One thread."""

    storage: Storage
    epoch: int
    root_id: str
    clock: Clock
    ttl_s: float
    _number: int = 0
    _renewed_s: float = 0.0

    def __post_init__(self) -> None:
        self._write(released=False)
        names = [info.name for info in own_objects(self.storage, LEASE_PREFIX)]
        self.storage.delete_many(name for name in names if name < lease_name(self.epoch, 1))

    def renew(self) -> None:
        """Renew the lease where a third of its time has passed."""
        if self.clock.monotonic_s() - self._renewed_s >= self.ttl_s / 3:
            self._write(released=False)

    def left_s(self) -> float:
        """Return the seconds until it ends, negative afterwards."""
        return self.ttl_s - (self.clock.monotonic_s() - self._renewed_s)

    def release(self) -> None:
        """Let another root claim the index at once."""
        self._write(released=True)

    def _write(self, *, released: bool) -> None:
        self._number += 1
        document = {
            "root_id": self.root_id,
            "place": _place(),
            "host": socket.gethostname(),
            "pid": os.getpid(),
            "released": released,
            "expires_ms": self.clock.now_ms() + round(self.ttl_s * 1000),
        }
        self.storage.put(lease_name(self.epoch, self._number), json.dumps(document).encode())
        if self._number > 1:
            self.storage.delete(lease_name(self.epoch, self._number - 1))
        self._renewed_s = self.clock.monotonic_s()


def check_descriptor(stored: IndexDescriptor, wanted: IndexDescriptor, where: str) -> None:
    """Raise `SchemaMismatch` or `NotAnIndex` where an index isn't the one that is wanted."""
    if wanted.index_id and stored.index_id != wanted.index_id:
        raise NotAnIndex(f"{where} holds index {stored.index_id}, not {wanted.index_id}")
    if stored.layout.schema != wanted.layout.schema:
        raise SchemaMismatch(
            f"{where} stores {_declared(stored)}, not {_declared(wanted)}: an index keeps the schema it was created "
            f"with"
        )
    if stored.layout.preset != wanted.layout.preset or stored.layout.slots != wanted.layout.slots:
        raise SchemaMismatch(
            f"{where} was created with preset {stored.layout.preset.name} and {stored.layout.slots:,} slots, "
            f"not {wanted.layout.preset.name} and {wanted.layout.slots:,}"
        )
    if stored.offset_space != wanted.offset_space:
        raise SchemaMismatch(
            f"{where} holds offsets in {stored.offset_space!r}, not in {wanted.offset_space!r}: an index keeps the "
            "offset space it was created with, so these need a root and a storage of their own"
        )


def _declared(descriptor: IndexDescriptor) -> str:
    schema = descriptor.layout.schema
    extra = ", ".join(f"{c.name}: {c.dtype}" for c in schema.extra)
    return f"{schema.name}({extra})"


@dataclass(eq=False)
class StorageSession:
    """`claim` once, then `renew` now and then; `epoch` is 0 until the claim succeeded."""

    storage: Storage
    log: StorageLog
    clock: Clock
    lease_ttl_s: float
    epoch: int = 0
    fenced: WriterFenced | None = None
    log_error: StorageError | DiskFull | None = None  # why it isn't known what the storage holds
    kept_expired: Expired = NOTHING  # what had expired by the log that is kept in the root
    _lease: Lease | None = None
    _asked: tuple[IndexDescriptor, Callable[[IndexDescriptor], IndexDescriptor]] | None = None

    @property
    def claimed(self) -> bool:
        """Whether this writer may publish."""
        return self.epoch > 0 and self.fenced is None

    @property
    def lease_left_s(self) -> float | None:
        """Seconds until the lease ends unless it is renewed, negative afterwards; None: this writer has none."""
        return self._lease.left_s() if self._lease is not None and self.fenced is None else None

    @property
    def expired(self) -> Expired:
        """What has expired, as far as the log was read, or else by the log that was kept."""
        state = self.log.state
        return state.expired if state.number else self.kept_expired

    def join(self, wanted: IndexDescriptor, adapt: Callable[[IndexDescriptor], IndexDescriptor]) -> IndexDescriptor:
        """Open or create the index; `adapt` returns what is wanted of a stored one. Raises as `check_descriptor`."""
        self._asked = wanted, adapt
        where = self.storage.uri
        try:
            state = self.log.open()
        except NotAnIndex:
            if wanted.index_id:
                raise
            probe_put_if_absent(self.storage)
            state = self.log.create(IndexDescriptor(secrets.token_hex(8), wanted.layout, wanted.offset_space))
        assert state.genesis is not None
        check_descriptor(state.genesis, adapt(state.genesis), where)
        self.log.check_root()
        return state.genesis

    def join_again(self) -> None:
        """Join as before, after the storage was down. Errors as `join`."""
        assert self._asked is not None
        self.join(*self._asked)

    def claim(self, root_id: str) -> None:
        """Become the index's writer. Raises `LockHeld` (another root has the lease), `WriterFenced`, `StorageError`."""
        check_lease(self.storage, root_id, self.clock)
        probe_put_if_absent(self.storage)
        epoch = self.log.claim_epoch()
        self._lease = Lease(self.storage, epoch, root_id, self.clock, self.lease_ttl_s)
        self.epoch = epoch

    def refreshed(self) -> LogState:
        """Read the log on and return its state. Raises `WriterFenced` where a newer writer has taken over."""
        state = self.log.refresh()
        if state.epoch > self.epoch:
            raise fenced(self.storage.uri, state.epoch, self.epoch)
        return state

    def renew(self) -> None:
        """Renew the lease where it is time to."""
        if self._lease is not None and self.fenced is None:
            self._lease.renew()

    def release(self) -> None:
        """Let another root claim the index at once."""
        lease, self._lease = self._lease, None
        if lease is not None and self.fenced is None:
            lease.release()
