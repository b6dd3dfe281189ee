"""Deletions of local files that must be durable; what can't be deleted now is tried again later. Threads: any."""

from __future__ import annotations

import threading
from pathlib import Path

from tiered_index.errors import TieredIndexError
from tiered_index.service.root import disk_error
from tiered_index.storage.disk import Disk

__all__ = ["Deletions"]


class Deletions:
    """What is to be deleted from one root. Only what is never made anew under its name may be given to it."""

    def __init__(self, disk: Disk) -> None:
        self._disk = disk
        self._lock = threading.Lock()
        self._undeleted: list[tuple[list[Path], TieredIndexError]] = []

    def unlink(self, paths: list[Path]) -> None:
        """Delete files in this order, each durably before the next: a power cut must not bring back what the log has forgotten by then.

        What can't be deleted now is left for `again`.
        """
        for number, path in enumerate(paths):
            try:
                self._disk.unlink(path)
                self._disk.sync_folder(path.parent)
            except OSError as error:
                with self._lock:
                    self._undeleted.append((paths[number:], disk_error(error, f"deleting {path}")))
                return

    def again(self) -> None:
        """Try again what could not be deleted."""
        with self._lock:
            undeleted, self._undeleted = self._undeleted, []
        for paths, _ in undeleted:
            self.unlink(paths)

    def errors(self) -> dict[str, TieredIndexError]:
        """Return why what is left could not be deleted, by file name."""
        with self._lock:
            return {paths[0].name: error for paths, error in self._undeleted}
