"""Which files the log has removed: what its state, which names only what exists, doesn't say. Threads: one.

Where to look is told by numbers of the log, never by times: clocks of different hosts differ, and are put right.
"""

from __future__ import annotations

from tiered_index.format.names import DATA_PREFIX
from tiered_index.service.log_records import LogState
from tiered_index.service.storage_log import StorageLog

__all__ = ["Removals"]


class Removals:
    """The files of which a record has removed an object. Each record is read once, at a request each."""

    def __init__(self, log: StorageLog) -> None:
        self._log = log
        self._first = self._last = 0  # records behind `_first` up to `_last` have been read
        self._files: set[str] = set()

    def files(self, state: LogState, after: int = 0) -> set[str]:
        """Return the ids of the files that records behind number `after`, up to `state`'s, have removed, and maybe older ones'.

        Raises what the storage raises; what was read before is not read again.
        """
        if after >= self._last:
            self._files = set()
            self._first = self._last = max(state.number, after)
        while self._last < state.number:
            self._read(self._last + 1)
            self._last += 1
        while self._first > after:
            self._read(self._first)
            self._first -= 1
        return self._files

    def _read(self, number: int) -> None:
        removed = self._log.record(number).remove
        self._files.update(name.split("/")[1] for name in removed if name.startswith(DATA_PREFIX))
