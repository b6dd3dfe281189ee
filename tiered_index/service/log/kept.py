"""`root/log`: a state of the storage's log, at least as new as the root's last deletion of a file. SPEC.md section 8.

With it a reader of the root needs no storage: a file that is neither in the root nor in this state does not exist. If
the state can't be written before a deletion, the root has none. A large state is not written whole each time: then
`root/log` has the changes since the whole state in `root/log-whole`. A crash leaves the earlier state or the new one.
Threads: any.
"""

from __future__ import annotations

import contextlib
import logging
import secrets
import threading

from tiered_index.errors import CorruptFile, TieredIndexError
from tiered_index.service.log.state import CheckpointBase, LogState
from tiered_index.service.root import Root
from tiered_index.storage.disk import TEMPORARY_PREFIX

LOG, WHOLE = "log", "log-whole"
# a smaller state is written whole
_WHOLE_BYTES = 16 << 10
# a writer may replace changes by a whole state while a reader reads both files
_TRIES = 5
_log = logging.getLogger(__name__)


class KeptLog:
    """The kept log of one root. Only the holder of the root's lock may call `keep`."""

    def __init__(self, root: Root) -> None:
        self._root = root
        self.path, self._whole_path = root.path / LOG, root.path / WHOLE
        self._lock = threading.Lock()
        self._number = 0
        self._base: CheckpointBase | None = None  # the whole state that was written last
        self._is_aside = False  # whether it is in `log-whole`
        self._data: bytes | None = None  # of the last file that was read
        self._read: LogState | None = None

    def keep(self, state: LogState) -> None:
        """Keep a state durably, if it is newer than the kept one. Call it before a deletion."""
        with self._lock:
            if state.number <= self._number:
                return
            what = f"writing {self.path}"
            try:
                if changes := self._changes(state):
                    self._root.write_file(self.path, [changes], what)
                else:
                    self._base = None
                    data = state.encode()
                    self._root.write_file(self.path, [data], what)
                    self._base, self._is_aside = state.as_base(WHOLE, len(data)), False
            except TieredIndexError as error:
                _log.warning("can't write the root's copy of the log; readers of this root need the storage: %s", error)
                self._base = None
                # a disk that refuses this deletion refuses others, too
                with contextlib.suppress(OSError):
                    self._root.disk.unlink(self.path)
                    self._root.disk.sync_folder(self._root.path)
            self._number = state.number

    def _changes(self, state: LogState) -> bytes:
        """Return the changes since the whole state, and put that into `log-whole`. Empty: write a whole state."""
        if self._base is None or self._base.size_bytes < _WHOLE_BYTES:
            return b""
        changes = state.changes_since(self._base)
        if changes and not self._is_aside:
            # a second name, so that `log` always exists
            temporary = self._root.path / (TEMPORARY_PREFIX + secrets.token_hex(8))
            try:
                self._root.disk.link(self.path, temporary)
                self._root.disk.publish(temporary, self._whole_path)
            except OSError as error:
                _log.debug("can't link %s: %s", self.path, error)
                with contextlib.suppress(OSError):
                    self._root.disk.unlink(temporary)
                return b""
            self._is_aside = True
        return changes

    def read(self) -> LogState | None:
        """Return the kept state, the same object while the file is unchanged. None: no state can be read.

        A warning names damage.
        """
        for _ in range(_TRIES):
            try:
                data = self.path.read_bytes()
            except OSError:
                return None
            if data != self._data:
                try:
                    self._read = self._decode(data)
                except CorruptFile as error:
                    if self._has(data):
                        self._data, self._read = data, None
                        _log.warning("the storage's log that is kept in the root can't be used: %s", error)
                    continue
                self._data = data
            return self._read
        return None

    def _decode(self, data: bytes) -> LogState:
        try:
            return LogState.decode(data, str(self.path))
        except CorruptFile:
            # perhaps the file has changes since the whole state
            with contextlib.suppress(OSError):
                whole = LogState.decode(self._whole_path.read_bytes(), str(self._whole_path))
                return LogState.decode(data, str(self.path), whole)
            raise

    def _has(self, data: bytes) -> bool:
        """Return whether the file still has these bytes."""
        with contextlib.suppress(OSError):
            return self.path.read_bytes() == data
        return False
