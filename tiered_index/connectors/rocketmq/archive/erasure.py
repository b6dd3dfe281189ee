"""Erases RocketMQ's messages in archived segments, and entries of an index with its archive (`erase_index`).

An erased message keeps its place, size, topic, queue and times. Its body becomes zeros and its properties (keys, tags
and all others) become value ends. `ERASED` in its sys flag, which RocketMQ ignores, marks it. It stays a valid message
whose body matches its CRC. An erasure by key compares keys and tags themselves, not their hashes. Threads: any.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from tiered_index.connectors.rocketmq.archive.archive import ArchivedLog
from tiered_index.connectors.rocketmq.log.columns import IndexBatch, MessageColumns
from tiered_index.connectors.rocketmq.log.layout import COMPRESSED, COMPRESSION_MASK, ERASED, VALUE_END
from tiered_index.connectors.rocketmq.log.message import body_crc
from tiered_index.connectors.rocketmq.log.property_columns import key_columns
from tiered_index.errors import CorruptFile, ObjectNotFound
from tiered_index.service.jobs.erase import EraseRequest
from tiered_index.service.jobs.segments.erase_segments import FoundMessages, Patch
from tiered_index.service.log.records import ArchivedSegment
from tiered_index.service.read.segments.archive import SegmentArchive
from tiered_index.types import inclusive

_BODY_CRC_AT = 8
SYS_FLAG_AT = 36
"""Position of the sys flag in a message."""


@dataclass(frozen=True)
class MessagesToErase:
    """A `FindMessages`: finds the messages of a request in archived segments.

    Only messages stored before the second of `before_ms` (epoch milliseconds) are found. `keyed` is True if the index
    has fingerprints: without them, the tombstones of a key also hide keys with an equal hash.
    """

    request: EraseRequest
    before_ms: int
    keyed: bool = True

    def __call__(self, archive: SegmentArchive, segment: ArchivedSegment) -> FoundMessages:
        """Return the messages of a segment to erase. Raises the storage's errors."""
        rows: list[npt.NDArray[np.int64]] = []
        collisions, problem = 0, None
        try:
            log = ArchivedLog(archive, segment, skip_corrupt=True)
            for batch in log.batches(skip_corrupt=True, skip_missing=True):
                # a damaged piece may be within the properties of a message that is valid otherwise
                around = [damage for damage in log.damaged if damage.begin < batch.end and batch.begin < damage.end]
                for skipped in (*batch.skipped, *around):
                    problem = f"{segment.name}: offsets {inclusive(skipped.begin, skipped.end)}: {skipped.problem}"
                rows_of_batch, alike = self._patches(batch, segment.start)
                rows.append(rows_of_batch)
                collisions += alike
        except (CorruptFile, ObjectNotFound) as error:
            problem = str(error)
        patches = MessagePatches(tuple(rows))
        return FoundMessages(patches.messages, patches, problem, collisions)

    def _patches(self, batch: IndexBatch, start: int) -> tuple[npt.NDArray[np.int64], int]:
        """Return rows of `MessagePatches`, and the number of entries with other keys that are also hidden."""
        columns, places = self._asked(batch)
        collisions = 0
        if self.request.keys:
            keys = key_columns(batch.data, columns.properties_at[places], columns.ends[places], tags=True)
            sought = pc.is_in(keys.keys, value_set=pa.array(self.request.keys, pa.large_string()))
            is_sought = sought.to_numpy(zero_copy_only=False)
            collisions = self.request.collisions(keys.keys, is_sought, keyed=self.keyed)
            places = places[np.unique(keys.message[is_sought])]
        return overwritten(columns, places, batch.begin - start), collisions

    def _asked(self, batch: IndexBatch) -> tuple[MessageColumns, npt.NDArray[Any]]:
        """Return the messages, and the indices of those that match the request, apart from its keys."""
        columns = batch.message_columns()
        topics, index = columns.topics()
        wanted = [place for place, topic in enumerate(topics) if topic == self.request.topic]
        head = columns.head
        is_requested = np.isin(index, wanted) & (head["store_ms"] // 1000 * 1000 < self.before_ms)
        is_requested &= head["sys_flag"] & ERASED == 0
        if self.request.queue_id is not None:
            is_requested &= head["queue_id"] == self.request.queue_id
        return columns, np.flatnonzero(is_requested)


def overwritten(columns: MessageColumns, places: npt.NDArray[Any], base: int) -> npt.NDArray[np.int64]:
    """Return a row of `MessagePatches` for each message at the indices `places` (i64, n).

    `base` is the position of the messages' data in the segment.
    """
    head = columns.head
    return np.column_stack(
        [
            base + columns.positions[places],
            head["sys_flag"][places] & ~(COMPRESSED | COMPRESSION_MASK) | ERASED,
            base + columns.body_at[places],
            head["body_length"][places],
            base + columns.properties_at[places],
            base + columns.ends[places],
        ]
    ).astype(np.int64)


@dataclass(frozen=True, slots=True, eq=False)
class MessagePatches:
    """The patches that erase messages. Each iteration makes them again, because a segment may have millions.

    `rows` (i64, n x 6 each) has a row for each message. Its columns: position of the message, new sys flag, position
    and length of the body, begin and end of the properties.
    """

    rows: tuple[npt.NDArray[np.int64], ...]

    @property
    def messages(self) -> int:
        """The number of messages."""
        return sum(map(len, self.rows))

    def __bool__(self) -> bool:
        return self.messages > 0

    def __iter__(self) -> Iterator[Patch]:
        for rows in self.rows:
            for at, flag, body_at, body_bytes, properties_at, end in rows.tolist():
                yield Patch(at + _BODY_CRC_AT, body_crc(bytes(body_bytes)).to_bytes(4, "big"))
                yield Patch(at + SYS_FLAG_AT, flag.to_bytes(4, "big", signed=True))
                if body_bytes:
                    yield Patch(body_at, b"\0", body_bytes)
                if end > properties_at:
                    yield Patch(properties_at, VALUE_END.encode(), end - properties_at)
