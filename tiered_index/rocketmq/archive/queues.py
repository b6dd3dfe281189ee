"""Makes the queue offsets that are archived with a segment of a commit log.

Memory: some 60 bytes a message.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np

from tiered_index.errors import CorruptFile
from tiered_index.format.queue_offsets import ENTRY, encode_queues
from tiered_index.rocketmq.log.columns import MessageColumns, Selection
from tiered_index.rocketmq.log.commitlog import CommitLogReader
from tiered_index.rocketmq.log.layout import TRANSACTION_MASK, TRANSACTION_PREPARED, TRANSACTION_ROLLBACK
from tiered_index.rocketmq.log.segments import Segment, segment_name

# Where the queue offset is in a message.
_QUEUE_OFFSET_AT = np.arange(20, 28)
# Selects no topic, so that no keys are decoded
_NO_KEYS = Selection(exclude=("*",))


def queue_offsets(start: int, size_bytes: int, read: Callable[[int, int], bytes]) -> bytes:
    """Return the encoded queue offsets of a segment that begins at `start`; empty if it is damaged.

    The offsets of a damaged segment would lack messages. `read(position, length)` returns bytes; its errors are raised.
    """
    name = Path(segment_name(start))
    segment = Segment(name, start, size_bytes, start + size_bytes, lambda length, position: read(position, length))
    log = CommitLogReader(name.parent, selection=_NO_KEYS, fixed=(segment,))
    names: dict[str, int] = {}
    topic, queue_id, queue_offset = ([np.zeros(0, kind)] for kind in (np.int32, np.int32, np.int64))
    entries = [np.zeros(0, ENTRY)]
    end = start
    try:
        for batch in log.batches(start):
            end = batch.end
            if not len(batch.positions):
                continue
            columns = MessageColumns(np.frombuffer(batch.data, np.uint8), batch.positions, batch.begin)
            topics, index = columns.topics()
            if columns.count < len(batch.positions):
                return b""
            head = columns.head
            transaction = head["sys_flag"] & TRANSACTION_MASK
            # the broker's queues have no other messages
            shown = (transaction != TRANSACTION_PREPARED) & (transaction != TRANSACTION_ROLLBACK)
            places = columns.positions[shown]
            topic.append(np.array([names.setdefault(name, len(names)) for name in topics], np.int32)[index[shown]])
            queue_id.append(head["queue_id"][shown].astype(np.int32))
            queue_offset.append(columns.raw[places[:, None] + _QUEUE_OFFSET_AT].view(">i8")[:, 0].astype(np.int64))
            found = np.empty(len(places), ENTRY)
            found["position"] = head["physical_offset"][shown] - start
            found["size"], found["store_ms"] = head["size"][shown], head["store_ms"][shown]
            entries.append(found)
    except CorruptFile:
        return b""
    if end < segment.end or size_bytes > 0xFFFFFFFF:
        return b""
    joined = (np.concatenate(parts) for parts in (topic, queue_id, queue_offset, entries))
    return encode_queues(start, list(names), *joined)
