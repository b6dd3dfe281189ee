"""The end of a log that is being written: which messages of a batch are whole, and what a torn tail is. Stateless.

A broker copies messages into its mapping from front to back while others read page by page. So what was read near the
end can have holes of zeros, also before bytes that were written later, and nothing within properties shows a hole. But
once a byte was seen, everything before it is written: a batch that isn't known to be older than its reading is read a
second time, up to the last message that the first reading saw. That last message counts

- when the first reading saw behind it a message's head that isn't older, the segment's blank, or damage before a
  message that isn't older; or
- when its body has its CRC, its properties have no zero, and nothing is behind it; or the look before saw the same
  bytes.

The reason for "older": brokers zero nothing. A broker that truncates its log moves a position, and the bytes behind it
stay until they are written over. They prove nothing, and can complete half a message to one that looks whole, if its
lengths are those of the one before it. A message that looks whole so for two looks, or whose last bytes nothing
follows, is put. A later change of it is noticed, because its fingerprint is of the bytes put.

A torn tail is what is no whole message at the end of a live log. Telling it from damage takes a search through the rest
of the segment; as long as nothing there changes, the search would find the same and is not repeated.
"""

from __future__ import annotations

import contextlib
import zlib
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

import numpy as np

from tiered_index.errors import CorruptFile
from tiered_index.rocketmq.follow.witnesses import RangeFingerprint, stored_bytes
from tiered_index.rocketmq.log.columns import IndexBatch, decode_index_columns
from tiered_index.rocketmq.log.commitlog import CommitLogReader
from tiered_index.rocketmq.log.layout import BLANK, BLANK_BYTES, MAGIC_V1, MAGIC_V2, MIN_MESSAGE_BYTES, header_dtype
from tiered_index.rocketmq.log.message import decode_message
from tiered_index.rocketmq.log.segments import End, Segment, candidates, list_segments
from tiered_index.rocketmq.log.store import StoreDirectory

__all__ = [
    "EVERYTHING",
    "NOTHING",
    "LastRead",
    "Settled",
    "StableEnd",
    "TornTail",
    "is_followed",
    "proven_end",
    "settled",
    "torn_tail",
    "witnesses_of",
]

_BLANK = BLANK.to_bytes(4, "big")
_PAGE = 4_096
# How far behind a batch a message's head is looked for.
_AHEAD_BYTES = 1 << 16
_HEAD_BYTES = 1 << 7
_PIECES = 8
# A batch has several fingerprints, so that a log that was rewritten within it isn't read again from the batch's begin.
_PIECE_BYTES = 1 << 16
_FOR_EVER = 2**63 - 1


class StableEnd(NamedTuple):
    """The log was written up to `end`, as far as its messages aren't younger than `store_ms`.

    What is behind may be from before the log was truncated.
    """

    end: int
    store_ms: int

    def covers(self, batch: IndexBatch) -> bool:
        """Return whether a batch that was read after this was seen is whole."""
        return batch.end <= self.end and (batch.last_store_ms or 0) <= self.store_ms


NOTHING, EVERYTHING = StableEnd(-1, 0), StableEnd(_FOR_EVER, _FOR_EVER)


class LastRead(NamedTuple):
    """A last message that was seen once: its place, and the CRC-32 of its stored bytes."""

    offset: int
    crc: int


class Settled(NamedTuple):
    """What of a batch is whole, and the bytes that it was decoded from.

    Also the last message of the batch, where it needs another look.
    """

    batch: IndexBatch
    data: bytes
    again: LastRead | None = None


def witnesses_of(batch: IndexBatch, data: bytes) -> list[RangeFingerprint]:
    """Return the fingerprints of a batch and of what was skipped before it.

    `data` are the bytes that the batch was decoded from.
    """
    made = [RangeFingerprint.of_passed(passed) for passed in batch.passed if passed.size]
    if not batch.messages:
        return made
    size = batch.end - batch.begin
    positions = [*batch.positions.tolist(), size]
    pieces = max(1, min(_PIECES, size // _PIECE_BYTES))
    rows = {int(np.searchsorted(batch.positions, size * piece // pieces)) for piece in range(1, pieces)}
    view = memoryview(data)
    begin, done = 0, 0
    for row in sorted({row for row in rows if row > 0} | {batch.messages}):
        one, end = positions[row - 1], positions[row]
        witness = RangeFingerprint.of(batch.begin + end, batch.begin + one, data[one:end], row - done)
        made.append(witness._replace(begin=batch.begin + begin, stretch=zlib.crc32(view[begin:end])))
        begin, done = end, row
    return made


def proven_end(folder: Path, position: int, chunk_bytes: int, segments: tuple[Segment, ...] | None = None) -> StableEnd:
    """Return up to where the log is certainly written: a chunk on, or the segment's end; `NOTHING` where nobody knows.

    `segments` are those of the folder, where they are known.
    """
    segments = list_segments(folder) if segments is None else segments
    for segment in segments:
        if segment.start <= position < segment.end:
            ahead = min(position + chunk_bytes, segment.end)
            data = stored_bytes(folder, ahead, _AHEAD_BYTES, segments) or b""
            if ahead == segment.end:  # brokers that cut their log delete later segments
                return StableEnd(ahead, _FOR_EVER) if any(data[:_PAGE]) else NOTHING
            left = segment.end - ahead
            # what was stored before the messages here may be what a cut left
            store_ms = next(
                (
                    ms
                    for ms in (_store_ms(data, at) for at in candidates(data, 0, ahead, segment_bytes=left))
                    if ms is not None
                ),
                None,
            )
            return NOTHING if store_ms is None else StableEnd(ahead, store_ms)
    return NOTHING


def settled(folder: Path, batch: IndexBatch, data: bytes, proof: StableEnd, seen: LastRead | None = None) -> Settled:
    """Return the batch with whole messages only.

    `data` are the bytes it was decoded from, `seen` what the look before wanted to see again.

    `proof` is what was seen before they were read.
    """
    size = batch.end - batch.begin
    if not batch.messages or proof.covers(batch):
        return Settled(batch, data)
    # in this order: what is seen behind the batch proves that the reading after it sees all of it
    segments = list_segments(folder)
    behind = stored_bytes(folder, batch.end, _HEAD_BYTES, segments) or b""
    # damage is called so where messages that aren't older are behind it
    continued = batch.state is End.DAMAGED or _goes_on(segments, batch, behind)
    data = stored_bytes(folder, batch.begin, size, segments) or b""
    again = decode_index_columns(data, batch.begin, file=str(folder))
    whole = replace(again, state=batch.state, damage=batch.damage, skipped=batch.skipped, passed=batch.passed)
    if (continued and again.end == batch.end) or not again.messages:
        return Settled(whole, data)
    # judged by the bytes that were decoded: a third reading may find finished what they have only half
    last = int(again.positions[-1])
    message = data[last : again.end - batch.begin]
    now: LastRead | None = None
    if _is_whole(folder, batch.begin + last, message):
        now = LastRead(batch.begin + last, zlib.crc32(message))
        if now == seen or (again.end == batch.end and not any(behind[:BLANK_BYTES])):
            return Settled(whole, data)
    before = decode_index_columns(data[:last], batch.begin, file=str(folder))
    return Settled(replace(before, state=End.TORN, damage=None, skipped=batch.skipped, passed=batch.passed), data, now)


def _goes_on(segments: tuple[Segment, ...], batch: IndexBatch, behind: bytes) -> bool:
    """Return whether the bytes behind a batch begin with a message that isn't older, or with the final blank."""
    segment = next((one for one in segments if one.start <= batch.end < one.end), None)
    if segment is None or len(behind) < BLANK_BYTES:
        return False
    if next(candidates(behind, 0, batch.end, segment_bytes=segment.end - batch.end), None) != 0:
        return False
    store_ms = _store_ms(behind, 0)
    return store_ms is None or store_ms >= (batch.last_store_ms or 0)


def _store_ms(data: bytes, at: int) -> int | None:
    """Return the store timestamp of the message whose head is at a position.

    None for a blank, or where the data ends before it.
    """
    if len(data) - at < MIN_MESSAGE_BYTES or data[at + 4 : at + 8] == _BLANK:
        return None
    dtype = header_dtype(int.from_bytes(data[at + 36 : at + 40], "big", signed=True))
    return int(np.frombuffer(data, dtype, 1, at)["store_ms"][0]) if len(data) - at >= dtype.itemsize else None


def _is_whole(folder: Path, offset: int, data: bytes) -> bool:
    try:
        message = decode_message(data, file=str(folder), physical_offset=offset)
    except CorruptFile:
        return False
    return b"\0" not in message.raw_properties


_MAGICS = (MAGIC_V1.to_bytes(4, "big"), MAGIC_V2.to_bytes(4, "big"))
# A message's head up to its physical offset.
_TORN_HEAD_BYTES = 36
# Twice what brokers accept as a message; a larger size is taken to be wrong and not followed.
_MAX_BYTES = 1 << 23


class TornTail(NamedTuple):
    """Commit log offsets [begin, end) hold something that is no whole message.

    `seen` is what was seen of them and of what is behind.
    """

    begin: int
    end: int
    seen: tuple[object, ...] = ()
    # Whether a message begins there: half of one, or one whose body contradicts its CRC. Else they are bytes that a
    # broker left where it cut its log, and will write over: it zeroes nothing.
    is_half: bool = True

    @property
    def what(self) -> str:
        """What it is, in words."""
        return "half a message" if self.is_half else "older bytes"


def is_followed(store: StoreDirectory, torn: TornTail) -> bool:
    """Return whether a whole message begins exactly where the one that seems to be there ends.

    That is damage, where nobody writes here.
    """
    size = int.from_bytes((stored_bytes(store.commitlog, torn.begin, BLANK_BYTES) or b"")[:4], "big", signed=True)
    if not torn.is_half or size < MIN_MESSAGE_BYTES:
        return False
    try:
        CommitLogReader(store.commitlog).read(torn.begin + size)
    except CorruptFile:
        return False
    return True


def torn_tail(store: StoreDirectory, position: int) -> TornTail:
    """Look at what stands at a position where no whole message was found.

    Writing to a mapped file needn't change its time, so the bytes count as well: those of the message that seems to be
    there, and the end of the log.
    """
    segments = list_segments(store.commitlog)
    head = stored_bytes(store.commitlog, position, BLANK_BYTES, segments) or b""
    claimed = min(max(int.from_bytes(head[:4], "big", signed=True), 0), _MAX_BYTES)
    data = stored_bytes(store.commitlog, position, claimed + _PAGE, segments) or b""
    files = []
    for segment in segments[-3:]:
        with contextlib.suppress(OSError):  # deleted meanwhile
            files.append((segment.start, segment.file_size, segment.path.stat().st_mtime_ns))
    written = len(data.rstrip(b"\0"))
    is_half = written < _TORN_HEAD_BYTES or (
        data[4:8] in _MAGICS and int.from_bytes(data[28:_TORN_HEAD_BYTES], "big") == position
    )
    return TornTail(position, position + written, (zlib.crc32(data), len(data), store.log_end(), *files), is_half)
