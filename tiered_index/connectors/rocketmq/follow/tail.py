"""Judges the end of a log that is being written: whole messages, torn tails, and messages that the broker cut off.

A broker copies messages into its mapping from front to back while others read page by page. Bytes that are read near
the end can therefore have holes of zeros, even before bytes that were written later. Nothing in properties shows a
hole. But once a byte was seen, everything before it is written. A batch that may be newer than its first reading is
read a second time, up to the last message that the first reading saw. That last message is accepted

- if the first reading saw one of these after it: a message's head that is not older, the segment's blank, or damage
  before a message that is not older; or
- if its body has its CRC, its properties have no zero, and nothing follows it or the previous round saw the same bytes.

The reason for "older": a broker that truncates its log moves a position and zeroes nothing. The bytes after it stay
until they are overwritten. They prove nothing: they can complete half a message to one that looks whole, if the message
before had the same lengths. A message that looks whole in two rounds, or that nothing follows, is put. A later change
of it is detected, because its fingerprint is of the bytes that were put.

Stateless except for `TruncatedTail`, which one thread uses.
"""

from __future__ import annotations

import contextlib
import zlib
from collections.abc import Sequence
from dataclasses import replace
from functools import cached_property, partial
from pathlib import Path
from typing import NamedTuple

import numpy as np
from msgspec import Struct

from tiered_index.base.documents import decoded
from tiered_index.connectors.rocketmq.follow.fingerprints import LogFingerprints, Verdict
from tiered_index.connectors.rocketmq.log.columns import IndexBatch, decode_index_columns
from tiered_index.connectors.rocketmq.log.commitlog import CommitLogReader
from tiered_index.connectors.rocketmq.log.layout import (
    BLANK_BYTES,
    BLANK_MAGIC,
    MAGICS,
    MIN_MESSAGE_BYTES,
    header_dtype,
)
from tiered_index.connectors.rocketmq.log.message import Buffer, Message, decode_message
from tiered_index.connectors.rocketmq.log.segments import (
    End,
    Segment,
    candidates,
    list_segments,
    segment_at,
    stored_bytes,
)
from tiered_index.connectors.rocketmq.log.store import SOURCE_PREFIX, StoreDirectory
from tiered_index.connectors.source import Torn
from tiered_index.errors import CorruptFile, StorageError, TieredIndexError
from tiered_index.service.root import FOLLOWERS
from tiered_index.storage.disk import Disk

_PAGE = 4_096
# Bytes after a batch that are searched for a message's head
_AHEAD_BYTES = 1 << 16
_HEAD_BYTES = 1 << 7
_FOR_EVER = 2**63 - 1


class StableEnd(NamedTuple):
    """The log is known to be written up to offset `end`, for messages not newer than `store_ms` (epoch ms).

    Bytes after it may be from before the log was truncated.
    """

    end: int
    store_ms: int

    def covers(self, batch: IndexBatch) -> bool:
        """Return whether a batch that was read after this end was found is complete."""
        return batch.end <= self.end and (batch.last_store_ms or 0) <= self.store_ms


NOTHING, EVERYTHING = StableEnd(-1, 0), StableEnd(_FOR_EVER, _FOR_EVER)


class LastRead(NamedTuple):
    """A last message that was read once: its offset, and the CRC-32 of its stored bytes."""

    offset: int
    crc: int


def stable_end(segments: Sequence[Segment], position: int, chunk_bytes: int) -> StableEnd:
    """Return the end of a chunk from `position`, or of the segment, if the log is certainly written up to it.

    Otherwise return `NOTHING`.
    """
    segment = segment_at(segments, position)
    if segment is None:
        return NOTHING
    ahead = min(position + chunk_bytes, segment.end)
    data = stored_bytes(segments, ahead, _AHEAD_BYTES) or b""
    if ahead == segment.end:  # brokers that cut their log delete later segments
        return StableEnd(ahead, _FOR_EVER) if any(data[:_PAGE]) else NOTHING
    # bytes older than the messages before them may remain from a cut
    for at in candidates(data, ahead, segment_bytes=segment.end - ahead):
        if (store_ms := store_ms_at(data, at)) is not None:
            return StableEnd(ahead, store_ms)
    return NOTHING


def stable_part(
    folder: Path, batch: IndexBatch, stable: StableEnd, last_read: LastRead | None = None
) -> tuple[IndexBatch, LastRead | None]:
    """Return the accepted messages of a batch, and its last message if it must be seen again.

    `stable` is the end that was found before the batch was read, `last_read` the last message of the previous round.
    """
    if not batch.messages or stable.covers(batch):
        return batch, None
    # The order matters: bytes seen after the batch prove that the next reading sees the whole batch
    segments = list_segments(folder)
    behind = stored_bytes(segments, batch.end, _HEAD_BYTES) or b""
    # `End.DAMAGED` means that messages which are not older follow
    continued = batch.state is End.DAMAGED or _goes_on(segments, batch, behind)
    data = stored_bytes(segments, batch.begin, batch.end - batch.begin) or b""
    decode = partial(decode_index_columns, start_offset=batch.begin, file=str(folder), selection=batch.selection)
    again = decode(data)
    again = replace(again, skipped=batch.skipped, non_messages=batch.non_messages)
    whole = replace(again, state=batch.state, damage=batch.damage)
    if (continued and again.end == batch.end) or not again.messages:
        return whole, None
    # Judge the decoded bytes: a third reading may see a message that they have only half
    last = int(again.positions[-1])
    message = data[last : again.end - batch.begin]
    now: LastRead | None = None
    if _is_whole(folder, batch.begin + last, message):
        now = LastRead(batch.begin + last, zlib.crc32(message))
        if now == last_read or (again.end == batch.end and not any(behind[:BLANK_BYTES])):
            return whole, None
    rest = decode(data[:last])
    return replace(rest, state=End.TORN, damage=None, skipped=batch.skipped, non_messages=batch.non_messages), now


def _goes_on(segments: Sequence[Segment], batch: IndexBatch, behind: bytes) -> bool:
    """Return whether a message that is not older, or the final blank, follows a batch."""
    segment = segment_at(segments, batch.end)
    if segment is None or len(behind) < BLANK_BYTES:
        return False
    if next(candidates(behind, batch.end, segment_bytes=segment.end - batch.end), None) != 0:
        return False
    store_ms = store_ms_at(behind, 0)
    return store_ms is None or store_ms >= (batch.last_store_ms or 0)


def store_ms_at(data: Buffer, at: int) -> int | None:
    """Return the store timestamp of the message at a position; None for a blank, or if the data is too short."""
    if len(data) - at < MIN_MESSAGE_BYTES or data[at + 4 : at + 8] == BLANK_MAGIC:
        return None
    dtype = header_dtype(int.from_bytes(data[at + 36 : at + 40], "big", signed=True))
    return int(np.frombuffer(data, dtype, 1, at)["store_ms"][0]) if len(data) - at >= dtype.itemsize else None


def _is_whole(folder: Path, offset: int, data: bytes) -> bool:
    try:
        message = decode_message(data, file=str(folder), physical_offset=offset)
    except CorruptFile:
        return False
    return b"\0" not in message.raw_properties


# A message's head up to its physical offset.
_TORN_HEAD_BYTES = 36
# Twice the greatest message of brokers; a larger size is taken to be wrong
_MAX_BYTES = 1 << 23


class TornTail(NamedTuple):
    """Commit log offsets [begin, end) at the end of a live log, without a whole message.

    To distinguish it from damage, the rest of the segment is searched. While `seen`, a summary of these bytes and of
    the log's end, is unchanged, the search is not repeated.
    """

    begin: int
    end: int
    seen: tuple[object, ...] = ()
    # Whether a message begins there: half of one, or one whose body contradicts its CRC. Otherwise the bytes remain
    # from a cut, and the broker will overwrite them.
    is_half: bool = True

    def shown(self) -> Torn:
        """Return the range, with a description of its bytes and of the broker's next step."""
        if self.is_half:
            return Torn(self.begin, self.end, "half a message", "the broker's recovery cuts it off")
        why = "the broker left them where it cut its log, and writes over them"
        return Torn(self.begin, self.end, "older bytes", why)


def is_followed(store: StoreDirectory, torn: TornTail) -> bool:
    """Return whether a whole message begins at the end of the torn one. In a log without a writer that is damage."""
    head = stored_bytes(list_segments(store.commitlog), torn.begin, BLANK_BYTES) or b""
    size = int.from_bytes(head[:4], "big", signed=True)
    if not torn.is_half or size < MIN_MESSAGE_BYTES:
        return False
    try:
        CommitLogReader(store.commitlog).read(torn.begin + size)
    except CorruptFile:
        return False
    return True


def torn_tail(store: StoreDirectory, position: int) -> TornTail:
    """Describe the bytes at a position without a whole message.

    A write to a mapped file may leave its time unchanged. `seen` therefore also has checksums of the bytes, and the end
    of the log.
    """
    segments = list_segments(store.commitlog)
    head = stored_bytes(segments, position, BLANK_BYTES) or b""
    claimed = min(max(int.from_bytes(head[:4], "big", signed=True), 0), _MAX_BYTES)
    data = stored_bytes(segments, position, claimed + _PAGE) or b""
    files = []
    for segment in segments[-3:]:
        with contextlib.suppress(OSError):  # deleted meanwhile
            files.append((segment.start, segment.file_size, segment.path.stat().st_mtime_ns))
    written = len(data.rstrip(b"\0"))
    is_half = written < _TORN_HEAD_BYTES or (
        int.from_bytes(data[4:8], "big") in MAGICS and int.from_bytes(data[28:_TORN_HEAD_BYTES], "big") == position
    )
    return TornTail(position, position + written, (zlib.crc32(data), len(data), store.log_end(), *files), is_half)


# Most bytes that are read to find the log's end
_FAR_BYTES = 1 << 26


class _Follower(Struct):
    source: str


class TruncatedTail:
    """Finds out which messages of a commit log the broker cut off.

    A broker that truncates its log only moves a position: the messages after it stay readable until they are
    overwritten. This class reads from the last message that a follower has put to the log's end. A message after that
    end that is older than the last one before it was cut off. It needs a follower's fingerprints in `root`, the root of
    an index, and a follower that has reached the cut.
    """

    def __init__(self, folder: Path, root: Path | None) -> None:
        self._folder = folder
        self._root = root

    def has(self, message: Message) -> bool:
        """Return whether a message that was read from the log is known to be after its end."""
        if not any(known.ranges[-1].end <= message.physical_offset for known in self._followers):
            return False
        return any(end <= message.physical_offset and message.store_ms < newest_ms for end, newest_ms in self._ends)

    def end_before(self, offset: int) -> int | None:
        """Return the known end of the log; None if it is unknown or a follower has put the message at `offset`.

        Later messages are written after that end.
        """
        if not any(known.ranges[-1].end <= offset for known in self._followers):
            return None
        return max((end for end, _ in self._ends), default=None)

    @cached_property
    def _followers(self) -> list[LogFingerprints]:
        followers = []
        for path in sorted((self._root / FOLLOWERS).glob("*.json")) if self._root is not None else ():
            # the follower itself reports a file that can't be read; here it is ignored
            with contextlib.suppress(OSError, TieredIndexError):
                source = decoded(path.read_bytes(), _Follower, str(path), "memory").source
                if source.startswith(SOURCE_PREFIX):
                    followers.append(LogFingerprints.load(path.parent.parent, source, Disk()))
        return [known for known in followers if known.ranges]

    @cached_property
    def _ends(self) -> list[tuple[int, int]]:
        """The log's end and the store timestamp of its last message, by each follower's fingerprints."""
        return [end for known in self._followers if (end := self._end(known)) is not None]

    def _end(self, known: LogFingerprints) -> tuple[int, int] | None:
        reader = CommitLogReader(self._folder)
        last = next((fingerprint for fingerprint in reversed(known.ranges) if fingerprint.messages), None)
        at = known.ranges[-1].end
        try:
            if last is None or known.ranges[-1].compare_last(reader.segments()) is not Verdict.SAME:
                return None  # another log, or a rewritten one
            newest_ms = reader.read(last.offset, last.size).store_ms
            for batch in reader.batches(at, newest_ms=newest_ms):
                newest_ms = newest_ms if batch.last_store_ms is None else batch.last_store_ms
                if batch.state in (End.OPEN, End.TORN):
                    return batch.end, newest_ms
                if batch.end - at > _FAR_BYTES:
                    return None
        except (CorruptFile, StorageError):
            return None  # damage is not the end
        return None
