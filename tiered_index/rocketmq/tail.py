"""The last message of a batch: where it is, and whether the broker has finished it.

A broker copies a message into its mapping from front to back while others read. What is cut within body or lengths shows itself; a message
cut within its properties has right lengths and a right body, and ends in zeros. So a last message with nothing behind it counts only when
its body has its CRC and its properties don't end in a zero, which no property does. Stateless.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pyarrow.compute as pc

from tiered_index.errors import CorruptFile
from tiered_index.rocketmq.index_columns import IndexBatch
from tiered_index.rocketmq.layout import BLANK_BYTES
from tiered_index.rocketmq.message import decode_message
from tiered_index.rocketmq.walking import End, walk
from tiered_index.rocketmq.witnesses import stored_bytes

__all__ = ["last_message", "settled"]


def last_message(folder: Path, batch: IndexBatch) -> tuple[int, bytes] | None:
    """Return offset and stored bytes of the last message of a batch that has some, None where it is deleted meanwhile."""
    offsets = batch.columns.column("offset")
    # the last row is of the last message that has keys; behind it are only messages without
    begin = offsets[-1].as_py() if len(offsets) else batch.begin
    data = stored_bytes(folder, begin, batch.end - begin)
    if data is None or len(data) < batch.end - begin:
        return None
    positions = walk(data).positions
    if not len(positions):  # rewritten since it was read
        return None
    last = int(positions[-1])
    return begin + last, data[last:]


def settled(folder: Path, batch: IndexBatch) -> IndexBatch:
    """Return the batch without its last message where that is being written just now."""
    if not batch.messages or any(stored_bytes(folder, batch.end, BLANK_BYTES) or b""):
        return batch
    last = last_message(folder, batch)
    if last is None:
        return batch
    offset, data = last
    try:
        message = decode_message(data, file=str(folder), physical_offset=offset)
    except CorruptFile:
        visible = len(batch.columns) > 0 and batch.columns.column("offset")[-1].as_py() == offset
    else:
        if not message.raw_properties.endswith(b"\0"):
            return batch
        visible = message.is_visible
    columns = batch.columns.filter(pc.less(batch.columns.column("offset"), offset))
    return replace(
        batch, columns=columns, end=offset, messages=batch.messages - 1, hidden=batch.hidden - (0 if visible else min(1, batch.hidden)),
        state=End.TORN, last_store_ms=None,
    )  # fmt: skip
