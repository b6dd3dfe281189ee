"""What a broker cut off its log, as far as the memory of the log's follower tells.

A broker that cuts its log moves a position. What lies behind stays as it was until it is written over, and reads like any message. The
follower remembers the last message that it put (`Trail`, in the index's root): from there on the log is read to its end, a short way. A
message behind that end which is older than the last one before it was cut off. Without that memory nothing is known, nor where the follower
has not met the cut yet. For one thread and one call: it looks once.
"""

from __future__ import annotations

from functools import cached_property
from pathlib import Path

from tiered_index.documents import checked, load, record, text
from tiered_index.errors import CorruptFile, StorageError, TieredIndexError
from tiered_index.rocketmq.commitlog import CommitLogReader
from tiered_index.rocketmq.message import Message
from tiered_index.rocketmq.store import SOURCE_PREFIX
from tiered_index.rocketmq.walking import End
from tiered_index.rocketmq.witnesses import Trail, Verdict
from tiered_index.service.root.root import FOLLOWERS
from tiered_index.storage.disk import Disk

__all__ = ["CutOff"]

_FAR_BYTES = 1 << 26
# a follower that is further behind its log doesn't tell where it ends
_SOURCE = record(lambda source: str(source), source=text())


class CutOff:
    """Tells which messages of a commit log were cut off. `root` is that of an index that follows it."""

    def __init__(self, folder: Path, root: Path | None) -> None:
        self._folder = folder
        self._root = root

    def has(self, message: Message) -> bool:
        """Return whether a message that was read from the log is known to lie behind its end."""
        if not any(trail.witnesses[-1].end <= message.physical_offset for trail in self._trails):
            return False
        return any(end <= message.physical_offset and message.store_ms < newest_ms for end, newest_ms in self._ends)

    @cached_property
    def _trails(self) -> list[Trail]:
        trails = []
        for path in sorted((self._root / FOLLOWERS).glob("*.json")) if self._root is not None else ():
            try:
                source = checked(_SOURCE, load(path.read_bytes(), str(path), "memory"), str(path), "memory")
                trail = Trail.load(self._root, source, Disk()) if self._root is not None and source.startswith(SOURCE_PREFIX) else None
            except (OSError, TieredIndexError):
                continue  # the follower itself tells of it; here it means that nothing is known
            if trail is not None and trail.witnesses:
                trails.append(trail)
        return trails

    @cached_property
    def _ends(self) -> list[tuple[int, int]]:
        """Where the log ends, and the store timestamp of its last message, as each trail of this log tells."""
        return [end for trail in self._trails if (end := self._end(trail)) is not None]

    def _end(self, trail: Trail) -> tuple[int, int] | None:
        reader = CommitLogReader(self._folder)
        last = next((one for one in reversed(trail.witnesses) if one.messages), None)
        at = trail.witnesses[-1].end
        try:
            if last is None or trail.witnesses[-1].look(self._folder) is not Verdict.SAME:
                return None  # of another log, or of this one as it was
            newest_ms = reader.read(last.offset, last.size).store_ms
            for batch in reader.batches(at, newest_ms=newest_ms):
                newest_ms = newest_ms if batch.last_store_ms is None else batch.last_store_ms
                if batch.state in (End.OPEN, End.TORN):
                    return batch.end, newest_ms
                if batch.end - at > _FAR_BYTES:
                    return None
        except (CorruptFile, StorageError):
            return None  # damage is no end
        return None
