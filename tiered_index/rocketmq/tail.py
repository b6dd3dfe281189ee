"""The end of a log that is being written: which messages of a batch are whole. Stateless.

A broker copies messages into its mapping from front to back while others read page by page. So what was read near the end can have holes
of zeros, also before bytes that were written later, and within properties nothing shows that. But whatever was seen proves that all before
it is written by then: a batch that isn't known to be older than its reading is read a second time, up to the last message that the first
reading saw. That one counts when the next message's head, or the segment's blank, was behind it before (other bytes may be older than it:
brokers zero nothing), or when its body has its CRC and its properties have no zero.
"""

from __future__ import annotations

import zlib
from dataclasses import replace
from pathlib import Path

import numpy as np

from tiered_index.errors import CorruptFile
from tiered_index.rocketmq.index_columns import IndexBatch, decode_index_columns
from tiered_index.rocketmq.layout import BLANK_BYTES
from tiered_index.rocketmq.message import decode_message
from tiered_index.rocketmq.segments import list_segments
from tiered_index.rocketmq.walking import End, candidates, walk
from tiered_index.rocketmq.witnesses import Witness, stored_bytes

__all__ = ["last_message", "proven_end", "settled", "witnesses_of"]

_PAGE = 4_096
_HEAD_BYTES = 36
# of a message, up to its physical offset
_PIECES = 8
_PIECE_BYTES = 1 << 16
# a batch has several witnesses, so that a log that was rewritten within it isn't read again from the batch's begin


def last_message(folder: Path, batch: IndexBatch) -> tuple[int, bytes] | None:
    """Return offset and stored bytes of the last message of a batch that has some, None where it is deleted meanwhile."""
    begin = batch.begin + _last_row(batch)
    data = stored_bytes(folder, begin, batch.end - begin)
    if data is None or len(data) < batch.end - begin:
        return None
    last = _last_position(data)
    return begin + last, data[last:]


def witnesses_of(folder: Path, batch: IndexBatch) -> list[Witness]:
    """Return the witnesses of a batch that has messages, together with all its bytes; none where it is deleted meanwhile."""
    found = last_message(folder, batch)
    if found is None:
        return []
    newest = Witness.of(batch.end, *found, batch.messages)
    size = batch.end - batch.begin
    data = stored_bytes(folder, batch.begin, size) or b""
    if len(data) < size:
        return [newest]
    pieces = min(_PIECES, size // _PIECE_BYTES)
    rows = {int(np.searchsorted(batch.positions, size * piece // pieces)) for piece in range(1, pieces)}
    made: list[Witness] = []
    begin, done = 0, 0
    for row in sorted(row for row in rows if 0 < row < batch.messages):
        one, end = int(batch.positions[row - 1]), int(batch.positions[row])
        witness = Witness.of(batch.begin + end, batch.begin + one, data[one:end], row - done)
        made.append(witness._replace(begin=batch.begin + begin, stretch=zlib.crc32(memoryview(data)[begin:end])))
        begin, done = end, row
    return [*made, newest._replace(messages=batch.messages - done, begin=batch.begin + begin, stretch=zlib.crc32(memoryview(data)[begin:]))]


def _last_row(batch: IndexBatch) -> int:
    """Return where the last message that has keys begins, counted from the batch's begin; behind it are only messages without."""
    offsets = batch.columns.column("offset")
    return offsets[-1].as_py() - batch.begin if len(offsets) else 0


def _last_position(data: bytes) -> int:
    positions = walk(data).positions
    return int(positions[-1]) if len(positions) else 0  # none: rewritten since it was read


def proven_end(folder: Path, position: int, chunk_bytes: int) -> int:
    """Return an offset up to which the log is certainly written: a chunk on, or the segment's end; `position` where nobody knows."""
    for segment in list_segments(folder):
        if segment.start <= position < segment.end:
            ahead = min(position + chunk_bytes, segment.end)
            return ahead if any(stored_bytes(folder, ahead, _PAGE) or b"") else position
    return position


def settled(folder: Path, batch: IndexBatch, proven: int) -> IndexBatch:
    """Return the batch with whole messages only; what lies before `proven` was written before it was read."""
    if not batch.messages or batch.end <= proven:
        return batch
    # in this order: what is seen behind the batch proves that the reading after it sees all of it
    continued = _goes_on(folder, batch.end)
    data = stored_bytes(folder, batch.begin, batch.end - batch.begin) or b""
    again = decode_index_columns(data, batch.begin, file=str(folder))
    if continued or again.end < batch.end:
        return replace(again, state=batch.state, damage=batch.damage, skipped=batch.skipped)
    # judged by the bytes that were decoded: a third reading may find finished what they have only half
    row = _last_row(again)
    last = row + _last_position(data[row:])
    if _is_whole(folder, batch.begin + last, data[last:]):
        return replace(again, state=batch.state, damage=batch.damage, skipped=batch.skipped)
    before = decode_index_columns(data[:last], batch.begin, file=str(folder))
    return replace(before, state=End.TORN, damage=None, skipped=batch.skipped)


def _goes_on(folder: Path, offset: int) -> bool:
    """Return whether a message or the final blank begins at an offset, by its size, magic and physical offset."""
    segment = next((one for one in list_segments(folder) if one.start <= offset < one.end), None)
    head = stored_bytes(folder, offset, _HEAD_BYTES) or b""
    if segment is None or len(head) < BLANK_BYTES:
        return False
    return next(candidates(head, 0, offset, segment_bytes=segment.end - offset), None) == 0


def _is_whole(folder: Path, offset: int, data: bytes) -> bool:
    try:
        message = decode_message(data, file=str(folder), physical_offset=offset)
    except CorruptFile:
        return False
    return b"\0" not in message.raw_properties
