"""Lists and reads the files of a commit log or consume queue, and finds the begins of messages in a segment.

The name of such a file is the 20-digit offset of its first byte. Files are read by `pread` and never mapped: a file
that the broker truncates or deletes meanwhile is an error, not a signal. No file stays open, so the broker's deletions
free disk space. A segment elsewhere (archived, or a copy) is read by a function. The walk from one message to the next
reads only size and magic; the decoder checks the contents. Any thread may call.
"""

from __future__ import annotations

import os
import re
import struct
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from enum import Enum
from pathlib import Path, PosixPath

import numpy as np
import numpy.typing as npt

from tiered_index.connectors.rocketmq.log.layout import (
    BLANK,
    BLANK_BYTES,
    MAGIC_V1,
    MAGIC_V2,
    MAGICS,
    MIN_MESSAGE_BYTES,
)
from tiered_index.connectors.rocketmq.log.message import Buffer
from tiered_index.errors import StorageMisconfigured, StorageUnavailable

NAME_DIGITS = 20


@dataclass(frozen=True)
class Segment:
    """One file. It has the bytes from `start` of its log; `end` is the start of the next file.

    After a file that was cut short, `end` is greater than `start + file_size`.
    """

    path: Path
    start: int
    file_size: int
    end: int
    # For a closed segment that is not a file of the log's folder: returns bytes, by (count, position)
    fetch: Callable[[int, int], bytes] | None = None

    @property
    def is_closed(self) -> bool:
        """Whether the segment is known to be complete, whatever files the folder has."""
        return self.fetch is not None

    def read(self, size_bytes: int, position: int) -> bytes:
        """Return up to `size_bytes` bytes at `position`, fewer only at the end. Raises as `pread` or `fetch`."""
        if self.fetch is None:
            return pread(self.path, size_bytes, position)
        size_bytes = min(size_bytes, self.file_size - position)
        return self.fetch(size_bytes, position) if size_bytes > 0 else b""


def segment_name(start: int) -> str:
    """Return the name of the file whose first byte has the offset `start`."""
    return f"{start:0{NAME_DIGITS}d}"


@contextmanager
def local_errors(path: Path) -> Iterator[None]:
    """Turn `OSError`s of a file into typed errors, except for `FileNotFoundError`, which the caller handles."""
    try:
        yield
    except FileNotFoundError:
        raise
    except (PermissionError, NotADirectoryError, IsADirectoryError) as error:
        raise StorageMisconfigured(f"{path} can't be read: {error.strerror}") from error
    except OSError as error:
        raise StorageUnavailable(f"{path} can't be read: {error.strerror or error}") from error


class LogFolder(PosixPath):
    """A folder of segments whose log continues in `others`: a broker's `storePathCommitLog` may have several disks."""

    others: tuple[Path, ...] = ()


def list_segments(folder: Path) -> tuple[Segment, ...]:
    """Return a folder's files by offset, none for a missing folder. Raises as `local_errors`.

    Those of a `LogFolder` are in all its folders.
    """
    placed_files: list[tuple[int, int, Path]] = []
    for place in (folder, *(folder.others if isinstance(folder, LogFolder) else ())):
        placed_files += _files_of(place)
    placed_files.sort()
    whole = max((size for _, size, _ in placed_files), default=0)
    following_starts = [start for start, _, _ in placed_files[1:]] + [2**63 - 1]
    files = zip(placed_files, following_starts, strict=False)  # an empty folder has one following start and no file
    return tuple(Segment(path, start, size, min(start + whole, following)) for (start, size, path), following in files)


def _files_of(folder: Path) -> list[tuple[int, int, Path]]:
    """Return the start, size and path of each file of a folder."""
    files: list[tuple[int, int, Path]] = []
    with local_errors(folder):
        try:
            entries = list(os.scandir(folder))
        except FileNotFoundError:
            return []
        for entry in entries:
            if len(entry.name) == NAME_DIGITS and entry.name.isdecimal() and entry.name.isascii():
                try:
                    if entry.is_file():
                        files.append((int(entry.name), entry.stat().st_size, Path(entry.path)))
                except FileNotFoundError:
                    continue  # deleted since the folder was read
    return files


def pread(path: Path, size_bytes: int, position: int) -> bytes:
    """Return up to `size_bytes` bytes at `position`, fewer only at the file's end. Raises as `local_errors`."""
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


def segment_at(segments: Iterable[Segment], offset: int) -> Segment | None:
    """Return the segment that holds commit log offset `offset`, or None."""
    return next((segment for segment in segments if segment.start <= offset < segment.end), None)


def stored_bytes(segments: Iterable[Segment], offset: int, size_bytes: int) -> bytes | None:
    """Return up to `size_bytes` of the log from `offset`, fewer at the segment's end; None without that segment."""
    if (segment := segment_at(segments, offset)) is None:
        return None
    try:
        return segment.read(min(size_bytes, segment.end - offset), offset - segment.start)
    except FileNotFoundError:
        return None


_ANY_MAGIC = re.compile(b"\xda\xa3\x20[\xa7\xab]|\xcb\xd4\x31\x94")
_size = struct.Struct(">i").unpack_from
_head = struct.Struct(">iI").unpack_from
_physical_offset = struct.Struct(">q").unpack_from

Positions = npt.NDArray[np.int64]


class End(Enum):
    """The bytes at which a walk stopped."""

    # The data ends, within or exactly after a message, before the segment: read more
    MORE = "more"
    # A blank, or the end of the segment exactly after a message
    SEGMENT = "segment"
    # Zeros: nothing is written here yet
    OPEN = "open"
    # Half a message that nothing readable follows: the end of a log that is being written. Only a reader of whole logs
    # sets it.
    TORN = "torn"
    # Anything else
    DAMAGED = "damaged"


@dataclass(frozen=True, slots=True)
class Walk:
    """Successive messages: `positions` (n, ascending) of their first bytes, and the end `stop` of the last one."""

    positions: Positions
    stop: int
    end: End
    # The problem at `stop` if the end is `DAMAGED`
    problem: str | None = None


def walk(data: Buffer, *, segment_bytes: int | None = None) -> Walk:
    """Find the successive messages from `data[0]`.

    `segment_bytes` is the position of the segment's end (None: the end of the data); the data may be shorter.
    """
    length = len(data)
    segment_end = length if segment_bytes is None else segment_bytes
    last = length - MIN_MESSAGE_BYTES
    hits: list[int] = []
    add = hits.append
    position = 0
    # Only sizes, for speed. Every step is forward, so the loop ends; bytes that are no message are removed after it.
    while position <= last:
        (size,) = _size(data, position)
        if size < MIN_MESSAGE_BYTES:
            break
        add(position)
        position += size
    positions = np.array(hits, np.int64)
    windows = np.ndarray((max(length - 7, 0),), "V8", data, strides=(1,))
    magics = windows[positions].view([("size", ">i4"), ("magic", ">u4")])["magic"]
    is_message = (magics == MAGIC_V1) | (magics == MAGIC_V2)
    if not is_message.all():
        positions = positions[: int(is_message.argmin())]
        position = hits[len(positions)]
    elif position > length:
        positions, position = positions[:-1], hits[-1]
    end, problem = _what_stands(data, position, segment_end)
    return Walk(positions, position, end, problem)


def _what_stands(data: Buffer, position: int, segment_end: int) -> tuple[End, str | None]:
    """Return the end of a walk at a position without a whole message, and its problem."""
    left = segment_end - position
    if left == 0:
        return End.SEGMENT, None
    if len(data) - position < BLANK_BYTES:
        if len(data) < segment_end:
            return End.MORE, None
        return End.DAMAGED, f"the segment ends {left} bytes after a message: too few for a blank"
    size, magic = _head(data, position)
    if magic in MAGICS:
        if not MIN_MESSAGE_BYTES <= size <= left:
            return End.DAMAGED, f"the message's size is wrong: {size}, with {left} bytes left in the segment"
        return (End.MORE, None) if len(data) < segment_end else (End.DAMAGED, "the segment ends within a message")
    if magic == BLANK:
        if size == left:
            return End.SEGMENT, None
        return End.DAMAGED, f"a blank of {size} bytes where {left} are left in the segment"
    if size == 0 and magic == 0:
        return End.OPEN, None
    return End.DAMAGED, f"no message or blank begins here: magic {magic:#010x}"


def candidates(data: Buffer, start_offset: int, *, segment_bytes: int | None = None) -> Iterator[int]:
    """Yield the positions at which a message, or the blank that ends the segment, seems to begin.

    Magic, size and physical offset must match (`start_offset` is that of `data[0]`), which excludes a copy of a message
    within a body. The caller checks the rest.
    """
    segment_end = len(data) if segment_bytes is None else segment_bytes
    for match in _ANY_MAGIC.finditer(data, 4):
        position = match.start() - 4
        size, magic = _head(data, position)
        if magic == BLANK:
            if size == segment_end - position:
                yield position
        elif (
            MIN_MESSAGE_BYTES <= size <= segment_end - position
            and position + 36 <= len(data)
            and _physical_offset(data, position + 28)[0] == start_offset + position
        ):
            yield position
