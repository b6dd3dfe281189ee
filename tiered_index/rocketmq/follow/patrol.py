"""What a follower checks of its log behind its position: a truncated tail at the end, and rewritten ranges before it.

A broker that truncates its log only moves a position. The bytes behind it stay until they are written over, and read
like any message. The follower remembers the last message that it put (`LogFingerprints`, in the index's root).
`TruncatedTail` reads the log from there to its end, a short way: a message behind that end which is older than the last
one before it was cut off. Nothing is known without the fingerprints, or where the follower has not reached the cut yet.
It looks once; one thread, one call.

`Scrubber` compares all that was read of the last segments with the fingerprints, some bytes a round, from the newest
range to the oldest, and begins again. Every round compares what was read last, and a start compares everything, but a
broker may truncate further back and write where no round looks; comparing everything at once takes seconds of reading.
"""

from __future__ import annotations

import zlib
from functools import cached_property
from pathlib import Path

from tiered_index.documents import checked, load, record, text
from tiered_index.errors import CorruptFile, StorageError, TieredIndexError
from tiered_index.rocketmq.follow.witnesses import LogFingerprints, RangeFingerprint, Verdict, stored_bytes
from tiered_index.rocketmq.log.commitlog import CommitLogReader
from tiered_index.rocketmq.log.message import Message
from tiered_index.rocketmq.log.segments import End, Segment
from tiered_index.rocketmq.log.store import SOURCE_PREFIX
from tiered_index.service.root.root import FOLLOWERS
from tiered_index.storage.disk import Disk

__all__ = ["PATROL_BYTES", "Scrubber", "TruncatedTail"]

# A follower that is further behind its log can't tell where it ends.
_FAR_BYTES = 1 << 26
_SOURCE = record(lambda source: str(source), source=text())


class TruncatedTail:
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
    def _trails(self) -> list[LogFingerprints]:
        trails = []
        for path in sorted((self._root / FOLLOWERS).glob("*.json")) if self._root is not None else ():
            try:
                source = checked(_SOURCE, load(path.read_bytes(), str(path), "memory"), str(path), "memory")
                trail = (
                    LogFingerprints.load(self._root, source, Disk())
                    if self._root is not None and source.startswith(SOURCE_PREFIX)
                    else None
                )
            except (OSError, TieredIndexError):
                continue  # the follower itself reports it; here it means that nothing is known
            if trail is not None and trail.witnesses:
                trails.append(trail)
        return trails

    @cached_property
    def _ends(self) -> list[tuple[int, int]]:
        """Where the log ends, and the store timestamp of its last message, by each follower's fingerprints."""
        return [end for trail in self._trails if (end := self._end(trail)) is not None]

    def _end(self, trail: LogFingerprints) -> tuple[int, int] | None:
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


# Read in one round: 2 GiB are compared once in some seven minutes of rounds every 0.2 s.
PATROL_BYTES = 1 << 20
_ABOVE = 2**63 - 1


class Scrubber:
    """Where it is. One thread."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        # The one whose byte range is being read, up to `_at`, with the CRC-32 `_crc`.
        self._witness: RangeFingerprint | None = None
        self._at, self._crc = 0, 0
        # Everything from here on is done.
        self._below = _ABOVE

    def step(self, trail: LogFingerprints, begin: int, segments: tuple[Segment, ...] | None = None) -> bool:
        """Compare some more of what the fingerprints cover behind offset `begin`; return whether it is changed.

        `segments` are those of the folder, where they are known.
        """
        if self._witness is None or self._witness not in trail.witnesses:  # it may have become one with another
            self._witness = self._next(trail, begin)
            if self._witness is None:
                return False
            self._at, self._crc = self._witness.begin, 0
        witness = self._witness
        if witness.begin < 0:
            return self._done(witness, witness.offset, changed=witness.look(self._folder, segments) is Verdict.CHANGED)
        data = stored_bytes(self._folder, self._at, min(PATROL_BYTES, witness.end - self._at), segments)
        if not data:  # deleted meanwhile, or cut short
            return self._done(witness, witness.begin, changed=data is not None)
        self._at, self._crc = self._at + len(data), zlib.crc32(data, self._crc)
        if self._at < witness.end:
            return False
        return self._done(witness, witness.begin, changed=self._crc != witness.stretch)

    def _next(self, trail: LogFingerprints, begin: int) -> RangeFingerprint | None:
        """Return the newest fingerprint that isn't done yet, the newest of all once those behind `begin` are."""
        ahead = [witness for witness in trail.witnesses if begin < witness.end <= self._below]
        self._below = _ABOVE if not ahead else self._below
        return next(reversed(ahead or trail.witnesses), None)

    def _done(self, witness: RangeFingerprint, below: int, *, changed: bool) -> bool:
        self._witness, self._below = None, min(below, witness.end - 1)
        return changed
