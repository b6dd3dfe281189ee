"""A local commit log whose reads are counted, as requests of a storage are: each look at the folder, each read of a file, and its bytes.

One thread.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field

from tiered_index.rocketmq.log.commitlog import CommitLogReader
from tiered_index.rocketmq.log.segments import Segment, list_segments, pread

__all__ = ["CountedLog", "FileReads"]


class FileReads:
    """A running count; failed reads count, without bytes. Local files have no price."""

    cost_usd = 0.0

    def __init__(self) -> None:
        self._requests: Counter[str] = Counter()
        self._bytes_read = 0

    @property
    def requests_by_kind(self) -> Mapping[str, int]:
        """How many looks at the folder (``list``) and reads of files (``read``)."""
        return self._requests

    @property
    def bytes_read(self) -> int:
        """What the files gave."""
        return self._bytes_read

    def asking(self, kind: str) -> None:
        """Count what is about to be asked."""
        self._requests[kind] += 1

    def got(self, size_bytes: int) -> None:
        """Count bytes."""
        self._bytes_read += size_bytes


@dataclass(frozen=True, slots=True)
class _CountedFile(Segment):
    reads: FileReads

    def read(self, size_bytes: int, position: int) -> bytes:
        self.reads.asking("read")
        data = pread(self.path, size_bytes, position)
        self.reads.got(len(data))
        return data


@dataclass(frozen=True, slots=True, kw_only=True)
class CountedLog(CommitLogReader):
    """Reads the segments in `folder`, counted in `reads`."""

    reads: FileReads = field(default_factory=FileReads)

    def segments(self) -> tuple[Segment, ...]:
        """Return the segments there are, oldest first."""
        self.reads.asking("list")
        return tuple(_CountedFile(one.path, one.start, one.file_size, one.end, self.reads) for one in list_segments(self.folder))
