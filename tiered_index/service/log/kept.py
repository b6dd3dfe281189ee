"""`root/log`: a state of the storage's log, at least as new as the root's last deletion of a file. SPEC.md section 8.

With it a reader of the root needs no storage: a file that is neither in the root nor in this state does not exist. If
the state can't be written before a deletion, the root has none. A crash leaves the earlier state or the new one.
Threads: any.
"""

from __future__ import annotations

import contextlib
import logging
import threading

from tiered_index.errors import CorruptFile, TieredIndexError
from tiered_index.service.log.state import LogState
from tiered_index.service.root import Root

LOG = "log"
_log = logging.getLogger(__name__)


class KeptLog:
    """The kept log of one root. Only the holder of the root's lock may call `keep`."""

    def __init__(self, root: Root) -> None:
        self._root = root
        self.path = root.path / LOG
        self._lock = threading.RLock()
        self._number = 0
        self._data: bytes | None = None  # of the last file that was read
        self._read: LogState | None = None

    def keep(self, state: LogState) -> None:
        """Keep a state durably, if it is newer than the kept one. Call it before a deletion."""
        with self._lock:
            if state.number <= self._number:
                return
            try:
                self._root.write_file(self.path, [state.encode(whole=True)], f"writing {self.path}")
            except TieredIndexError as error:
                _log.warning("can't write the root's copy of the log; readers of this root need the storage: %s", error)
                # a disk that refuses this deletion refuses others, too
                with contextlib.suppress(OSError):
                    self._root.disk.unlink(self.path)
                    self._root.disk.sync_folder(self._root.path)
            self._number = state.number

    def read(self) -> LogState | None:
        """Return the kept state, the same object while the file is unchanged. None: no state can be read.

        A warning names damage.
        """
        try:
            data = self.path.read_bytes()
        except OSError:
            return None
        # a rename replaces the file, so these bytes are one whole state
        if data != self._data:
            try:
                self._read = LogState.decode(data, str(self.path))
            except CorruptFile as error:
                self._read = None
                _log.warning("the storage's log that is kept in the root can't be used: %s", error)
            self._data = data
        return self._read
