"""A writer's standing in the storage: the log, the epoch it claimed, and its lease.

A root that already belongs to an index may start while the storage is down: the claim is then made by the life cycle, and until then
files wait locally. Threads: the life cycle's, and the opener's before that starts.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable

from tiered_index.clock import Clock
from tiered_index.errors import DiskFull, NotAnIndex, SchemaMismatch, StorageError, WriterFenced
from tiered_index.service.lease import Lease, check_lease
from tiered_index.service.log_records import Genesis
from tiered_index.service.storage_log import StorageLog
from tiered_index.storage.base import Storage
from tiered_index.storage.opening import probe_put_if_absent

__all__ = ["StorageSession", "check_genesis"]


def check_genesis(stored: Genesis, wanted: Genesis, where: str) -> None:
    """Raise `SchemaMismatch` or `NotAnIndex` where an index isn't the one that is wanted."""
    if wanted.index_id and stored.index_id != wanted.index_id:
        raise NotAnIndex(f"{where} holds index {stored.index_id}, not {wanted.index_id}")
    if stored.layout.schema != wanted.layout.schema:
        raise SchemaMismatch(f"{where} stores {_declared(stored)}, not {_declared(wanted)}: an index keeps the schema it was created with")
    if stored.layout.preset != wanted.layout.preset or stored.layout.slots != wanted.layout.slots:
        raise SchemaMismatch(
            f"{where} was created with preset {stored.layout.preset.name} and {stored.layout.slots:,} slots, "
            f"not {wanted.layout.preset.name} and {wanted.layout.slots:,}"
        )
    if stored.offset_space != wanted.offset_space:
        raise SchemaMismatch(
            f"{where} holds offsets in {stored.offset_space!r}, not in {wanted.offset_space!r}: an index keeps the offset space it was "
            "created with, so these need a root and a storage of their own"
        )


def _declared(genesis: Genesis) -> str:
    schema = genesis.layout.schema
    extra = ", ".join(f"{c.name}: {c.dtype}" for c in schema.extra)
    return f"{schema.name}({extra})"


class StorageSession:
    """`claim` once, then `renew` now and then; `epoch` is 0 until the claim succeeded."""

    def __init__(self, storage: Storage, log: StorageLog, clock: Clock, lease_ttl_s: float) -> None:
        self.storage = storage
        self.log = log
        self.epoch = 0
        self.fenced: WriterFenced | None = None
        self.log_error: StorageError | DiskFull | None = None  # why it isn't known what the storage holds, or None where it is
        self._clock = clock
        self._lease_ttl_s = lease_ttl_s
        self._lease: Lease | None = None
        self._asked: tuple[Genesis, Callable[[Genesis], Genesis]] | None = None

    @property
    def claimed(self) -> bool:
        """Whether this writer may publish."""
        return self.epoch > 0 and self.fenced is None

    def join(self, wanted: Genesis, adapt: Callable[[Genesis], Genesis]) -> Genesis:
        """Open the index in the storage, or create it as `wanted`; return what it is.

        `adapt` says what is wanted of an index that is there already. Raises `SchemaMismatch`, `NotAnIndex`, `StorageError`.
        """
        self._asked = wanted, adapt
        where = self.storage.uri
        try:
            state = self.log.open()
        except NotAnIndex:
            if wanted.index_id:
                raise
            probe_put_if_absent(self.storage)
            state = self.log.create(Genesis(secrets.token_hex(8), wanted.layout, wanted.offset_space))
        assert state.genesis is not None
        check_genesis(state.genesis, adapt(state.genesis), where)
        return state.genesis

    def join_again(self) -> None:
        """Join as before, after the storage was down. Errors as `join`."""
        assert self._asked is not None
        self.join(*self._asked)

    def claim(self, root_id: str) -> None:
        """Become the index's writer. Raises `LockHeld` where another root's lease is in force, `WriterFenced`, `StorageError`."""
        check_lease(self.storage, root_id, self._clock)
        probe_put_if_absent(self.storage)
        epoch = self.log.claim_epoch()
        self._lease = Lease(self.storage, epoch, root_id, self._clock, self._lease_ttl_s)
        self.epoch = epoch

    def renew(self) -> None:
        """Renew the lease where it is time to."""
        if self._lease is not None and self.fenced is None:
            self._lease.renew()

    def release(self) -> None:
        """Let another root claim the index at once."""
        lease, self._lease = self._lease, None
        if lease is not None and self.fenced is None:
            lease.release()
