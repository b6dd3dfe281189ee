"""Mounts file systems that are small, empty or read-only, if the system allows it, until the test ends."""

import contextlib
import errno
import os
import subprocess
from pathlib import Path
from typing import Self

from tests.support.disk_faults import FaultDisk
from tiered_index.storage.disk import Disk

_PAGE_BYTES = 4096


class Mounts:
    """Mounts file systems over folders.

    A call returns False if the system does not allow it; the test then needs another way.
    """

    def __init__(self) -> None:
        self._laid: list[Path] = []

    def empty_over(self, folder: Path, size: str = "1m") -> bool:
        """Mount an empty file system over `folder`. Only processes with open files of the old content can use them."""
        return self._lay(folder, "-t", "tmpfs", "-o", f"size={size},mode=0700", "tmpfs", folder)

    def read_only(self, folder: Path) -> bool:
        """Refuse writes to files in `folder` that are opened from now on."""
        return self._lay(folder, "--bind", folder, folder) and _mount("-o", "remount,ro,bind", folder)

    def lift(self) -> None:
        """Unmount all file systems, even those in use."""
        while self._laid:
            subprocess.run(["umount", "-l", str(self._laid.pop())], capture_output=True, check=True)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self.lift()

    def _lay(self, folder: Path, *arguments: str | Path) -> bool:
        done = _mount(*arguments)
        if done:
            self._laid.append(folder)
        return done


def _mount(*arguments: str | Path) -> bool:
    if os.geteuid() != 0:
        return False
    return subprocess.run(["mount", *map(str, arguments)], capture_output=True, check=False).returncode == 0


class SmallDisk:
    """A file system that can be filled.

    If it isn't `real`, a fault layer refuses calls as a full disk would: use `disk` for all writes.
    """

    def __init__(self, folder: Path, *, real: bool) -> None:
        self.folder = folder
        self.real = real
        self.disk = Disk() if real else FaultDisk()
        self._ballast = folder / "ballast"

    def fill(self, spare_pages: int = 0) -> None:
        """Take all space but some pages. Without a real disk, calls that need space fail after as many others."""
        if isinstance(self.disk, FaultDisk):
            for operation in ("allocate", "pwrite", "create"):
                self.disk.fail(operation, nth=1 + spare_pages, times=None, error=errno.ENOSPC)
            return
        with self._ballast.open("ab") as handle, contextlib.suppress(OSError):
            while True:
                os.write(handle.fileno(), bytes(_PAGE_BYTES))
        size_bytes = self._ballast.stat().st_size
        os.truncate(self._ballast, max(0, size_bytes - size_bytes % _PAGE_BYTES - spare_pages * _PAGE_BYTES))

    def free(self) -> None:
        """Free the space again."""
        if isinstance(self.disk, FaultDisk):
            self.disk.clear()
        else:
            self._ballast.unlink(missing_ok=True)
