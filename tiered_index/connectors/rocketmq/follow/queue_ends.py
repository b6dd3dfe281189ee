"""The last queue offset of each queue before a position of a log.

With the first ones after a gap they count the messages of the gap, because the offsets of a queue have no gaps.

Only the last messages of a batch are read, so queues may be missing, and the count may be too small. One thread.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

import numpy as np

from tiered_index.connectors.rocketmq.log.columns import IndexBatch, MessageColumns
from tiered_index.connectors.rocketmq.log.layout import MIN_MESSAGE_BYTES

Queue = tuple[str, int]
"""A topic, and the number of a queue in it."""
# so many messages of a batch are read, its last ones; the first ones after a gap
_LAST, _FIRST = 1_000, 20_000
_MOST_OFFSET = 2**62


@dataclass
class QueueEnds:
    """The last offset of queues before a `position` of the log."""

    position: int = 0
    offsets: dict[Queue, int] = field(default_factory=dict)

    def after(self, batch: IndexBatch) -> QueueEnds:
        """Return the last offsets before the end of the next batch of the log."""
        last = dict(_places(batch, slice(-_LAST, None)))
        # else messages that are not read here follow the known ones
        if batch.messages <= _LAST and batch.begin >= self.position and not batch.skipped:
            last = {**self.offsets, **last} if len(self.offsets) + len(last) <= _LAST else last
        return QueueEnds(batch.end, last)

    def lost_before(self, begin: int, batch: IndexBatch) -> int | None:
        """Return the least number of messages from offset `begin` of the log to a batch.

        All messages before `begin` were read. None: no queue has messages on both sides.
        """
        if begin < self.position:
            return None
        first = dict(reversed(list(_places(batch, slice(0, _FIRST)))))
        lost = [offset - self.offsets[queue] - 1 for queue, offset in first.items() if queue in self.offsets]
        # a topic that was created again counts from 0, and more messages than the gap can hold are damage
        most = (batch.begin - begin) // MIN_MESSAGE_BYTES
        return sum(count for count in lost if 0 < count <= most) if lost else None


def _places(batch: IndexBatch, rows: slice) -> Iterator[tuple[Queue, int]]:
    """Yield the queue and the queue offset of messages of a batch, without those of queues of batches."""
    columns = MessageColumns(np.frombuffer(batch.data, np.uint8), batch.positions[rows], batch.begin)
    topics, numbers = columns.topics()
    offsets = columns.queue_offsets()
    # nothing checks the queue offset of a message
    counted = columns.is_in_queue & ~columns.has_several & (offsets >= 0) & (offsets <= _MOST_OFFSET)
    places = zip(numbers.tolist(), columns.head["queue_id"].tolist(), offsets.tolist(), strict=True)
    for (number, queue_id, offset), is_counted in zip(places, counted.tolist(), strict=True):
        if is_counted:
            yield (topics[number], queue_id), offset
