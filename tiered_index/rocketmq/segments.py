"""The files of a folder that are named by the 20 digits of their first byte's offset: commit log segments, consume queue files.

Files are read by `pread` and never mapped: one that the broker cuts short or deletes meanwhile is an error, not a signal. Nothing is kept
open, so that the broker's deletions free their room. Safe under threads.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from tiered_index.errors import StorageMisconfigured, StorageUnavailable

__all__ = ["NAME_DIGITS", "Segment", "list_segments", "local_errors", "pread", "segment_name"]

NAME_DIGITS = 20


@dataclass(frozen=True, slots=True)
class Segment:
    """One file: bytes [start, start + file_size) of its log, of which [start, end) are its own."""

    path: Path
    start: int
    file_size: int
    end: int
    """Where the next file begins or should: after a file that was cut short, further than its bytes reach."""

    @property
    def is_closed(self) -> bool:
        """Whether something is known to be written behind it, whatever the folder says now."""
        return False

    def read(self, size_bytes: int, position: int) -> bytes:
        """Return up to `size_bytes` bytes at `position`, fewer only at the end of the file. Raises as `pread`."""
        return pread(self.path, size_bytes, position)


def segment_name(start: int) -> str:
    """Return the name of the file whose first byte has the offset `start`."""
    return f"{start:0{NAME_DIGITS}d}"


@contextmanager
def local_errors(path: Path) -> Iterator[None]:
    """Turn what the system says of a file into typed errors; `FileNotFoundError` passes, for the caller knows what it means."""
    try:
        yield
    except FileNotFoundError:
        raise
    except (PermissionError, NotADirectoryError, IsADirectoryError) as error:
        raise StorageMisconfigured(f"{path} can't be read: {error.strerror}") from error
    except OSError as error:
        raise StorageUnavailable(f"{path} can't be read: {error.strerror or error}") from error


def list_segments(folder: Path) -> tuple[Segment, ...]:
    """Return the files of a folder in order; other names, and folders, are nobody's business here. A missing folder is empty.

    Raises `StorageMisconfigured` where it may not be read.
    """
    found: list[tuple[int, int, Path]] = []
    with local_errors(folder):
        try:
            entries = list(os.scandir(folder))
        except FileNotFoundError:
            return ()
        for entry in entries:
            if len(entry.name) == NAME_DIGITS and entry.name.isdecimal() and entry.name.isascii():
                try:
                    if entry.is_file():
                        found.append((int(entry.name), entry.stat().st_size, Path(entry.path)))
                except FileNotFoundError:
                    continue  # deleted since the folder was read
    found.sort()
    whole = max((size for _, size, _ in found), default=0)
    following_starts = [start for start, _, _ in found[1:]] + [2**63 - 1]
    files = zip(found, following_starts, strict=False)  # an empty folder has nothing, and nothing follows
    return tuple(Segment(path, start, size, min(start + whole, following)) for (start, size, path), following in files)


def pread(path: Path, size_bytes: int, position: int) -> bytes:
    """Return up to `size_bytes` bytes at `position`, fewer only at the end of the file.

    Raises `FileNotFoundError` where it is gone, else `StorageMisconfigured` or `StorageUnavailable`.
    """
    with local_errors(path):
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        try:
            parts = []
            while size_bytes > 0 and (part := os.pread(descriptor, min(size_bytes, 1 << 30), position)):
                parts.append(part)
                position += len(part)
                size_bytes -= len(part)
        finally:
            os.close(descriptor)
    return parts[0] if len(parts) == 1 else b"".join(parts)
