"""The real file system without syncs, for tests without power cuts. Thousands of syncs would take minutes."""

from pathlib import Path

from tiered_index.storage.disk import Disk


class UnsyncedDisk(Disk):
    """The disk without syncs."""

    def sync(self, descriptor: int) -> None:
        """Do nothing."""

    def sync_folder(self, folder: Path) -> None:
        """Do nothing."""
