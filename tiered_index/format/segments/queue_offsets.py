"""Queue offsets of an archived segment: the places of each queue's messages in it. SPEC.md section 9. Pure.

The entries of a queue are in the order of the segment. They are cut into runs, in which queue offsets rise by one. Each
run has a checksum. The directory lists the runs by topic and queue.
"""

from __future__ import annotations

import struct
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from tiered_index.errors import CorruptFile

# The place of a message in the segment, its bytes, and its store timestamp.
ENTRY = np.dtype([("position", ">u4"), ("size", ">u4"), ("store_ms", ">i8")])
# Most entries of a run: a pull reads whole runs.
RUN_ENTRIES = 2048
_RUN = np.dtype([("queue_id", ">i4"), ("first", ">i8"), ("count", ">u4"), ("crc32", ">u4"), ("newest_ms", ">i8")])
_START = struct.Struct(">q")
_TOPIC = struct.Struct(">HI")
_END = struct.Struct(">II")


@dataclass(frozen=True, slots=True)
class QueueRun:
    """Entries of one queue in one segment, with the queue offsets [first, first + count)."""

    queue_id: int
    first: int
    count: int
    crc32: int
    # The greatest store timestamp of them.
    newest_ms: int
    # The place of the entries, in bytes from the end of the segment.
    begin: int

    @property
    def end(self) -> int:
        """The queue offset after the last entry."""
        return self.first + self.count


@dataclass(frozen=True, slots=True)
class QueueDirectory:
    """The runs of a segment by topic: in the order of queues, and within a queue in the order of the segment."""

    start: int
    topics: Mapping[str, tuple[QueueRun, ...]]
    entries_bytes: int


def encode_queues(
    start: int,
    topics: Sequence[str],
    topic: npt.NDArray[Any],
    queue_id: npt.NDArray[Any],
    queue_offset: npt.NDArray[Any],
    entries: npt.NDArray[np.void],
) -> bytes:
    """Return the entries and the directory, as bytes, of a segment that begins at offset `start` of its log.

    `topic` (i32, an index of `topics`), `queue_id` (i32), `queue_offset` (i64) and `entries` (`ENTRY`) describe the
    messages (n each), in the order of the segment.
    """
    order = np.lexsort((queue_id, topic))  # stable: the messages of a queue stay in order
    topic, queue_id, queue_offset, entries = topic[order], queue_id[order], queue_offset[order], entries[order]
    same = (topic[1:] == topic[:-1]) & (queue_id[1:] == queue_id[:-1]) & (queue_offset[1:] == queue_offset[:-1] + 1)
    breaks = np.flatnonzero(np.append(True, ~same)) if len(order) else np.zeros(0, np.int64)
    lengths = np.diff(np.append(breaks, len(order)))
    firsts = np.concatenate(
        [np.arange(b, b + n, RUN_ENTRIES) for b, n in zip(breaks.tolist(), lengths.tolist(), strict=True)]
        or [np.zeros(0, np.int64)]
    )
    runs = np.empty(len(firsts), _RUN)
    runs["queue_id"], runs["first"] = queue_id[firsts], queue_offset[firsts]
    runs["count"] = np.diff(np.append(firsts, len(order)))
    data = entries.astype(ENTRY, copy=False).tobytes()
    for row, (first, count) in enumerate(zip(firsts.tolist(), runs["count"].tolist(), strict=True)):
        begin, end = first * ENTRY.itemsize, (first + count) * ENTRY.itemsize
        runs["crc32"][row] = zlib.crc32(memoryview(data)[begin:end])
        runs["newest_ms"][row] = entries["store_ms"][first : first + count].max()
    of_topic = topic[firsts]
    directory = bytearray(_START.pack(start))
    for number, name in enumerate(topics):
        mine = runs[of_topic == number]
        if len(mine):
            encoded = name.encode()
            directory += _TOPIC.pack(len(encoded), len(mine)) + encoded + mine.tobytes()
    ending = len(directory).to_bytes(4, "big")
    return b"".join([data, directory, ending, zlib.crc32(ending, zlib.crc32(directory)).to_bytes(4, "big")])


def directory_bytes(data: bytes) -> int:
    """Return the bytes of the directory at the end of the queue offsets. `data` are some of their last bytes."""
    return _END.unpack(data[-_END.size :])[0] + _END.size if len(data) >= _END.size else _END.size


def decode_directory(data: bytes, queues_bytes: int, file: str) -> QueueDirectory:
    """Return the directory in `data`, the last bytes of queue offsets of `queues_bytes`. Raises `CorruptFile`."""
    length = directory_bytes(data)
    directory = data[-length : -_END.size]
    if (
        len(data) < length
        or zlib.crc32(data[-_END.size : -4], zlib.crc32(directory)) != _END.unpack(data[-_END.size :])[1]
    ):
        raise CorruptFile(file, "the directory of queue offsets does not match its CRC32")
    topics: dict[str, tuple[QueueRun, ...]] = {}
    begin = 0
    try:
        (start,) = _START.unpack_from(directory)
        at = _START.size
        while at < len(directory):
            name_bytes, count = _TOPIC.unpack_from(directory, at)
            at += _TOPIC.size
            name = directory[at : at + name_bytes].decode()
            at += name_bytes
            runs = []
            for queue_id, first, entries, crc32, newest_ms in np.frombuffer(directory, _RUN, count, at):
                runs.append(QueueRun(int(queue_id), int(first), int(entries), int(crc32), int(newest_ms), begin))
                begin += int(entries) * ENTRY.itemsize
            topics[name] = tuple(runs)
            at += count * _RUN.itemsize
    except (struct.error, ValueError) as error:
        raise CorruptFile(file, f"the directory of queue offsets can't be read: {error}") from error
    CorruptFile.unless_equal(
        file, "the size of the queue offsets differs from their directory", queues_bytes - length, begin
    )
    return QueueDirectory(start, topics, begin)


def decode_entries(data: bytes, run: QueueRun, segment_bytes: int, file: str) -> npt.NDArray[np.void]:
    """Return the entries (`ENTRY`, n) of a run. Raises `CorruptFile`."""
    if len(data) != run.count * ENTRY.itemsize or zlib.crc32(data) != run.crc32:
        raise CorruptFile(file, "a run of queue offsets does not match its CRC32", offset=run.begin)
    entries = np.frombuffer(data, ENTRY)
    if (entries["position"].astype(np.int64) + entries["size"] > segment_bytes).any():
        raise CorruptFile(file, "queue offsets name bytes behind the segment", offset=run.begin)
    return entries


def check_queues(data: bytes, start: int, segment_bytes: int, file: str) -> None:
    """Raise `CorruptFile` if the queue offsets `data` don't match their checksums or belong to another segment."""
    directory = decode_directory(data, len(data), file)
    CorruptFile.unless_equal(file, "queue offsets are of a segment that begins elsewhere", start, directory.start)
    for runs in directory.topics.values():
        for run in runs:
            decode_entries(data[run.begin : run.begin + run.count * ENTRY.itemsize], run, segment_bytes, file)
