"""Writes one consume queue, for the store writer: entries gathered in memory, files of a fixed size filled with zeros. One thread."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

from tiered_index.rocketmq.consumequeue import ENTRY_BYTES, pack_entry
from tiered_index.rocketmq.segments import segment_name
from tiered_index.storage.disk import Disk

__all__ = ["QueueWriter", "open_sized"]


def open_sized(disk: Disk, path: Path, size_bytes: int) -> int:
    """Open a file for writing, which is made `size_bytes` long where it is missing; return its descriptor."""
    try:
        descriptor = disk.create(path)
    except FileExistsError:
        return disk.open_rw(path)
    disk.truncate(descriptor, size_bytes)
    return descriptor


@dataclass(slots=True)
class QueueWriter:
    """The queue in `folder`, with `entries_per_file` entries a file."""

    folder: Path
    entries_per_file: int
    disk: Disk
    next: int = 0
    """The queue offset of the next entry."""
    pending: list[bytes] = field(default_factory=list)

    def append(self, offset: int, size: int, tags_code: int) -> None:
        """Add an entry; `flush` writes it."""
        self.pending.append(pack_entry(offset, size, tags_code))
        self.next += 1

    def flush(self) -> None:
        """Write what was added; raises `OSError` as the disk does, and what wasn't written stays to be written again."""
        if self.pending:
            self.folder.mkdir(parents=True, exist_ok=True)
        file_bytes = self.entries_per_file * ENTRY_BYTES
        while self.pending:
            entry = self.next - len(self.pending)
            place = entry % self.entries_per_file
            part = self.pending[: self.entries_per_file - place]
            descriptor = open_sized(self.disk, self.folder / segment_name(entry // self.entries_per_file * file_bytes), file_bytes)
            try:
                self.disk.pwrite(descriptor, b"".join(part), place * ENTRY_BYTES)
            finally:
                self.disk.close(descriptor)
            del self.pending[: len(part)]
