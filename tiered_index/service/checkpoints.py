"""Checkpoints of the storage's log: stored states, so that whoever opens the log needs not read it from its beginning.

A checkpoint is a cache: one that is gone or damaged costs requests, never data, and one that can't be written doesn't fail its record. The
newest two are kept, older ones go several at a time. Which there are is known from the listing at opening and from what was written since.

Threads: `newest` from any; `write` from one at a time.
"""

from __future__ import annotations

import logging

from tiered_index.errors import CorruptFile, DiskFull, ObjectNotFound, StorageError
from tiered_index.format.names import CHECKPOINT_PREFIX, checkpoint_name, number_of
from tiered_index.service.log_records import LogState
from tiered_index.storage.base import Storage

__all__ = ["Checkpoints"]

_BYTES_A_RECORD = 1 << 20
# a state of up to this size is stored after every record, one of k times the size after every k-th
_MOST_RECORDS = 32
# behind a checkpoint, however large it is
_KEPT = 2
_SWEPT_AT_ONCE = 8
_LISTINGS = 3
_log = logging.getLogger(__name__)


class Checkpoints:
    """The checkpoints of one log. `every`: records between them; None: so many that a record costs about `_BYTES_A_RECORD` at most."""

    def __init__(self, storage: Storage, every: int | None = None) -> None:
        self._storage = storage
        self._every = every
        self._number = 0  # of the newest one known
        self._size_bytes = 0  # its size
        self._listed: list[int] = []
        self._written: list[int] = []

    def newest(self) -> LogState:
        """Return the state in the newest checkpoint that can be believed, or that of an empty log. Costs a listing and a GET.

        A writer may sweep them meanwhile: then newer ones are there, so they are listed again, a bounded number of times.
        """
        for listings_left in reversed(range(_LISTINGS)):
            self._listed = self._list()
            for number in reversed(self._listed):
                name = checkpoint_name(number)
                try:
                    data = self._storage.get(name)
                    state = LogState.decode(data, name)
                    if state.number != number:
                        raise CorruptFile(name, "checkpoint has another number than its name", expected=number, found=state.number)
                except CorruptFile as error:
                    _log.warning("checkpoint passed over: %s", error)
                except ObjectNotFound:
                    if listings_left:
                        break
                else:
                    self._number, self._size_bytes = number, len(data)
                    return state
            else:
                break
        return LogState()

    def write(self, state: LogState) -> None:
        """Store `state` where it is time to; where that fails, the next record's will be stored."""
        if state.number - self._number < self._gap():
            return
        data = state.encode()
        try:
            self._storage.put(checkpoint_name(state.number), data)
            self._number, self._size_bytes = state.number, len(data)
            self._written.append(state.number)
            self._sweep()
        except (StorageError, DiskFull) as error:
            _log.warning("checkpoint %d not written or older ones not swept, the next one will do it: %s", state.number, error)

    def _gap(self) -> int:
        return self._every or min(_MOST_RECORDS, 1 + self._size_bytes // _BYTES_A_RECORD)

    def _sweep(self) -> None:
        """Delete what is older than the newest two of those written here, which are known to be whole."""
        kept = self._written[-_KEPT:]
        old = [number for number in (*self._listed, *self._written) if number < kept[0]]
        if len(kept) < _KEPT or len(old) < _SWEPT_AT_ONCE:
            return
        self._storage.delete_many([checkpoint_name(number) for number in old])
        self._listed, self._written = [], kept

    def _list(self) -> list[int]:
        found = []
        for info in self._storage.list(CHECKPOINT_PREFIX):
            try:
                number = number_of(info.name)
            except CorruptFile:
                continue
            if info.name == checkpoint_name(number):
                found.append(number)
        return found
