"""Many messages at once: their headers by one gather, then, length by length, where topics, bodies and properties lie. Pure.

Every length is checked before it is used as a position, in the order in which a single decode checks it.
"""

from __future__ import annotations

import zlib

import numpy as np
import numpy.typing as npt

from tiered_index.rocketmq.layout import BORN_V6, MAGIC_V2, STORE_V6, header_dtype
from tiered_index.rocketmq.message import BODY_CRC_MASK, Buffer, problem_of_values
from tiered_index.rocketmq.property_columns import spans
from tiered_index.types import MAX_TIMESTAMP_MS

__all__ = ["MessageColumns"]

Int64 = npt.NDArray[np.int64]


class MessageColumns:
    """The fixed parts of messages, and where their variable parts lie. `count` shrinks to what stands before the first bad message.

    `head` has the fixed parts in native byte order; `ends`, `body_at`, `topic_at`, `topic_end` and `properties_at` (each `count`) are
    positions in the data. Nothing is raised: whoever wants to know what is wrong with message `count` decodes it alone.
    """

    def __init__(self, raw: npt.NDArray[np.uint8], positions: Int64, start_offset: int) -> None:
        self.raw, self.positions = raw, positions
        self.count = len(positions)
        self.head = self._gather()
        self._cut((self.head["physical_offset"] != positions + start_offset) | (self.head["queue_id"] < 0)
                  | (self.head["store_ms"] < 0) | (self.head["store_ms"] > MAX_TIMESTAMP_MS))  # fmt: skip
        self._place()

    def _cut(self, bad: npt.NDArray[np.bool_]) -> None:
        """Let the messages end before the first bad one; `bad` covers at least the first `count`."""
        wrong = bad[: self.count]
        if wrong.any():
            self.count = int(wrong.argmax())

    def _gather(self) -> npt.NDArray[np.void]:
        """Return the fixed parts, in native byte order and with hosts left out."""
        plain = header_dtype(0)
        names = ["size", "queue_id", "physical_offset", "sys_flag", "store_ms", "body_length", "magic", "body_crc"]
        head = np.empty(self.count, [(name, plain[name].newbyteorder("=")) for name in names])
        # every stored message is longer than the shortest header; longer headers are gathered again, where they fit
        rows = self._rows(self.positions, plain)
        for name in names:
            head[name] = rows[name]
        for hosts in (BORN_V6, STORE_V6, BORN_V6 | STORE_V6):
            which = np.flatnonzero(head["sys_flag"] & (BORN_V6 | STORE_V6) == hosts)
            if len(which):
                dtype = header_dtype(hosts)
                fits = head["size"][which] >= dtype.itemsize + 3
                self._cut(_mask(len(head), which[~fits]))
                which = which[fits]
                rows = self._rows(self.positions[which], dtype)
                for name in ("store_ms", "body_length"):
                    head[name][which] = rows[name]
        return head

    def _rows(self, positions: Int64, dtype: np.dtype[np.void]) -> npt.NDArray[np.void]:
        # a view of the bytes that has a row at every position: the gather copies each message's fixed part once
        windows = np.ndarray((max(len(self.raw) - dtype.itemsize + 1, 0),), f"V{dtype.itemsize}", self.raw, strides=(1,))
        return windows[positions].view(dtype)

    def _place(self) -> None:
        """Find topics and properties; lengths are 64-bit here, so that no sum of two overflows."""
        positions = self.positions[: self.count]
        sys_flag = self.head["sys_flag"][: self.count]
        self.ends = ends = positions + self.head["size"][: self.count]
        body_length = self.head["body_length"][: self.count].astype(np.int64)
        longer = ((sys_flag & BORN_V6) != 0).astype(np.int64) + ((sys_flag & STORE_V6) != 0)
        self.body_at = positions + header_dtype(0).itemsize + 12 * longer
        long = self.head["magic"][: self.count] == MAGIC_V2
        length_at = self.body_at + body_length
        self.topic_at = length_at + 1 + long
        self._cut((body_length < 0) | (self.topic_at + 2 > ends))
        self._narrow()
        at, long = length_at[: self.count], long[: self.count]
        length = self.raw[at].view(np.int8).astype(np.int64)
        if long.any():
            length[long] = length[long] << 8 | self.raw[at[long] + 1]
        self.topic_end = self.topic_at + length
        self._cut((length < 0) | (self.topic_end + 2 > self.ends))
        self._narrow()
        properties = self.raw[self.topic_end].view(np.int8).astype(np.int64) << 8 | self.raw[self.topic_end + 1]
        self.properties_at = self.topic_end + 2
        self._cut(self.properties_at + properties != self.ends)
        self._narrow()

    def _narrow(self) -> None:
        for name in ("body_at", "topic_at", "topic_end", "properties_at", "ends"):
            if hasattr(self, name):
                setattr(self, name, getattr(self, name)[: self.count])

    def check_bodies(self, data: Buffer) -> None:
        """Compare every body with its CRC."""
        view, crc32 = memoryview(data), zlib.crc32
        begins, ends = self.body_at.tolist(), (self.body_at + self.head["body_length"][: self.count]).tolist()
        # one call a body and nothing else in the loop: slicing takes longer than the CRC of a few hundred bytes
        found = np.array([crc32(view[begin:end]) for begin, end in zip(begins, ends, strict=True)], np.uint32)
        self._cut((found & BODY_CRC_MASK) != self.head["body_crc"][: self.count])
        self._narrow()

    def topics(self) -> tuple[list[str], npt.NDArray[np.int32]]:
        """Return the distinct topics, and which one each message has; messages end before the first whose topic is none."""
        encoded = spans(self.raw, self.topic_at, self.topic_end).dictionary_encode()
        index = encoded.indices.to_numpy(zero_copy_only=False)
        topics: list[str] = []
        for place, raw in enumerate(encoded.dictionary.to_pylist()):
            try:
                topic = raw.decode()
                bad = problem_of_values(topic, 0, 0) is not None
            except UnicodeDecodeError:
                topic, bad = "", True
            topics.append(topic)
            if bad:
                self._cut(index == place)
        self._narrow()
        used = topics[: int(index[: self.count].max()) + 1] if self.count else []
        return used, index[: self.count]


def _mask(count: int, which: Int64) -> npt.NDArray[np.bool_]:
    mask = np.zeros(count, np.bool_)
    mask[which] = True
    return mask
