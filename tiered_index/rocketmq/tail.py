"""The end of a log that is being written: which messages of a batch are whole. Stateless.

A broker copies messages into its mapping from front to back while others read page by page. So what was read near the end can have holes
of zeros, also before bytes that were written later, and within properties nothing shows that. But whatever was seen proves that all before
it is written by then: a batch that isn't known to be older than its reading is read a second time, up to the last message that the first
reading saw. That one counts when something was behind it before, or when its body has its CRC and its properties have no zero.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from tiered_index.errors import CorruptFile
from tiered_index.rocketmq.index_columns import IndexBatch, decode_index_columns
from tiered_index.rocketmq.layout import BLANK_BYTES
from tiered_index.rocketmq.message import decode_message
from tiered_index.rocketmq.segments import list_segments
from tiered_index.rocketmq.walking import End, walk
from tiered_index.rocketmq.witnesses import stored_bytes

__all__ = ["last_message", "proven_end", "settled"]

_PAGE = 4_096


def last_message(folder: Path, batch: IndexBatch) -> tuple[int, bytes] | None:
    """Return offset and stored bytes of the last message of a batch that has some, None where it is deleted meanwhile."""
    begin = batch.begin + _last_row(batch)
    data = stored_bytes(folder, begin, batch.end - begin)
    if data is None or len(data) < batch.end - begin:
        return None
    last = _last_position(data)
    return begin + last, data[last:]


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
    continued = any(stored_bytes(folder, batch.end, BLANK_BYTES) or b"")
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


def _is_whole(folder: Path, offset: int, data: bytes) -> bool:
    try:
        message = decode_message(data, file=str(folder), physical_offset=offset)
    except CorruptFile:
        return False
    return b"\0" not in message.raw_properties
