"""The lease: decides when another host may claim the index. Correctness never depends on it, only the log's fences count.

Renewals are numbered objects ``lease/EPOCH/N``, the greatest name counts. A lease names the root it belongs to: whoever holds that root's
lock takes over at once; anyone else waits until it has expired or was released.
"""

from __future__ import annotations

import json
import logging
import os
import socket
from dataclasses import dataclass

from tiered_index.clock import Clock
from tiered_index.documents import MILLISECONDS, checked, flag, integer, load, record, text
from tiered_index.errors import CorruptFile, LockHeld, ObjectNotFound
from tiered_index.format.names import LEASE_PREFIX, lease_name
from tiered_index.storage.base import Storage

__all__ = ["Lease", "check_lease"]

_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class _Holder:
    root_id: str
    host: str
    pid: int
    expires_ms: int
    released: bool


_HOLDER = record(_Holder, root_id=text(), host=text(), pid=integer(0, 2**31 - 1), expires_ms=MILLISECONDS, released=flag)


def check_lease(storage: Storage, root_id: str, clock: Clock) -> None:
    """Raise `LockHeld` where a lease of another root is in force."""
    holder = _current(storage)
    if holder is None or holder.released or holder.root_id == root_id or holder.expires_ms <= clock.now_ms():
        return
    raise LockHeld(
        f"{storage.uri} is being written by process {holder.pid} on {holder.host}; its lease ends in "
        f"{(holder.expires_ms - clock.now_ms()) / 1000:.0f} s unless it is renewed",
        pid=holder.pid,
        host=holder.host,
    )


def _current(storage: Storage) -> _Holder | None:
    for _ in range(10):  # a renewal may delete what was just listed
        names = [info.name for info in storage.list(LEASE_PREFIX)]
        if not names:
            return None
        try:
            return checked(_HOLDER, load(storage.get(names[-1]), names[-1], "lease"), names[-1], "lease")
        except ObjectNotFound:
            continue
        except CorruptFile as error:
            # the lease is a courtesy, the log's fences decide: one that can't be read must not lock every writer out
            _log.warning("%s is not a lease and is passed over: %s", names[-1], error)
            return None
    return None


class Lease:
    """One writer's lease. One thread."""

    def __init__(self, storage: Storage, epoch: int, root_id: str, clock: Clock, ttl_s: float) -> None:
        self._storage = storage
        self._epoch = epoch
        self._root_id = root_id
        self._clock = clock
        self._ttl_s = ttl_s
        self._number = 0
        self._renewed_s = 0.0
        self._write(released=False)
        names = [info.name for info in storage.list(LEASE_PREFIX)]
        storage.delete_many(name for name in names if name < lease_name(epoch, 1))

    def renew(self) -> None:
        """Renew the lease where a third of its time has passed."""
        if self._clock.monotonic_s() - self._renewed_s >= self._ttl_s / 3:
            self._write(released=False)

    def release(self) -> None:
        """Let another root claim the index at once."""
        self._write(released=True)

    def _write(self, *, released: bool) -> None:
        self._number += 1
        document = {
            "root_id": self._root_id, "host": socket.gethostname(), "pid": os.getpid(), "released": released,
            "expires_ms": self._clock.now_ms() + round(self._ttl_s * 1000),
        }  # fmt: skip
        self._storage.put(lease_name(self._epoch, self._number), json.dumps(document).encode())
        if self._number > 1:
            self._storage.delete(lease_name(self._epoch, self._number - 1))
        self._renewed_s = self._clock.monotonic_s()
