"""Decodes a byte range of a commit log segment into the columns for `IndexService.put_batch`. Pure.

The only loop over messages is the walk that finds their begins. Then one gather reads the headers; their lengths give
the positions of topics, bodies and properties; then topics and keys follow. Every length is checked before it is used
as a position. It follows RocketMQ's `CommitLog.checkMessageAndReturnSize` and `IndexService.buildIndex`. Unlike the
latter, it indexes prepared messages only if the `Selection` has them: no consumer sees them.
"""

from __future__ import annotations

import zlib
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from tiered_index.base.units import MAX_TIMESTAMP_MS
from tiered_index.connectors.rocketmq.log import layout
from tiered_index.connectors.rocketmq.log.layout import header_dtype
from tiered_index.connectors.rocketmq.log.message import BODY_CRC_MASK, Buffer, decode_message, problem_of_values
from tiered_index.connectors.rocketmq.log.property_columns import key_columns, spans
from tiered_index.connectors.rocketmq.log.segments import End, walk
from tiered_index.errors import CorruptFile


class MessageColumns:
    """The fixed parts of messages, and the positions of their variable parts, up to the first bad message.

    `head` (structured, n) has the fixed parts in native byte order; `positions`, `ends`, `body_at`, `topic_at`,
    `topic_end` and `properties_at` (i64, n) are positions in the data. Each check cuts all columns at the first message
    that fails it, so the remaining values are safe as positions. It never raises: decode the next message alone to get
    its error.
    """

    def __init__(self, raw: npt.NDArray[np.uint8], positions: Int64, start_offset: int) -> None:
        self.raw, self.positions = raw, positions
        self._gather()
        head = self.head
        self._cut(
            (head["physical_offset"] != self.positions + start_offset)
            | (head["queue_id"] < 0)
            | (head["store_ms"] < 0)
            | (head["store_ms"] > MAX_TIMESTAMP_MS)
        )
        self._place()

    @property
    def count(self) -> int:
        """Number of messages before the first bad one."""
        return len(self.positions)

    def _cut(self, bad: npt.NDArray[np.bool_]) -> None:
        """Cut all columns before the first bad message."""
        if bad.any():
            count = int(bad.argmax())
            for name, column in vars(self).items():
                if name != "raw":
                    setattr(self, name, column[:count])

    def _gather(self) -> None:
        """Read the fixed parts, hosts left out."""
        plain = header_dtype(0)
        names = ["size", "queue_id", "physical_offset", "sys_flag", "store_ms", "body_length", "magic", "body_crc"]
        head = np.empty(self.count, [(name, plain[name].newbyteorder("=")) for name in names])
        # every stored message is longer than the shortest header; longer headers are gathered again, where they fit
        rows = self._rows(self.positions, plain)
        for name in names:
            head[name] = rows[name]
        too_short = np.zeros(len(head), np.bool_)
        for hosts in (layout.BORN_V6, layout.STORE_V6, layout.BORN_V6 | layout.STORE_V6):
            which = np.flatnonzero(head["sys_flag"] & (layout.BORN_V6 | layout.STORE_V6) == hosts)
            if len(which):
                dtype = header_dtype(hosts)
                fits = head["size"][which] >= dtype.itemsize + 3
                too_short[which[~fits]] = True
                which = which[fits]
                rows = self._rows(self.positions[which], dtype)
                for name in ("store_ms", "body_length"):
                    head[name][which] = rows[name]
        self.head = head
        self._cut(too_short)

    def _rows(self, positions: Int64, dtype: np.dtype[np.void]) -> npt.NDArray[np.void]:
        # a view of the bytes that has a row at every position: the gather copies each message's fixed part once
        windows = np.ndarray(
            (max(len(self.raw) - dtype.itemsize + 1, 0),), f"V{dtype.itemsize}", self.raw, strides=(1,)
        )
        return windows[positions].view(dtype)

    def _place(self) -> None:
        """Find topics and properties; lengths are 64-bit here, so that no sum of two overflows."""
        sys_flag, raw = self.head["sys_flag"], self.raw
        self.ends = self.positions + self.head["size"]
        body_length = self.head["body_length"].astype(np.int64)
        longer = ((sys_flag & layout.BORN_V6) != 0).astype(np.int64) + ((sys_flag & layout.STORE_V6) != 0)
        self.body_at = self.positions + header_dtype(0).itemsize + 12 * longer
        long = self.head["magic"] == layout.MAGIC_V2
        length_at = self.body_at + body_length
        self.topic_at = length_at + 1 + long
        self._cut((body_length < 0) | (self.topic_at + 2 > self.ends))
        at, long = length_at[: self.count], long[: self.count]
        length = raw[at].view(np.int8).astype(np.int64)
        if long.any():
            length[long] = length[long] << 8 | raw[at[long] + 1]
        self.topic_end = self.topic_at + length
        self._cut((length < 0) | (self.topic_end + 2 > self.ends))
        properties = raw[self.topic_end].view(np.int8).astype(np.int64) << 8 | raw[self.topic_end + 1]
        self.properties_at = self.topic_end + 2
        self._cut(self.properties_at + properties != self.ends)

    def check_bodies(self, data: Buffer) -> None:
        """Compare every body with its CRC."""
        view, crc32 = memoryview(data), zlib.crc32
        begins, ends = self.body_at.tolist(), (self.body_at + self.head["body_length"]).tolist()
        # one call a body and nothing else in the loop: slicing takes longer than the CRC of a few hundred bytes
        computed = np.array([crc32(view[begin:end]) for begin, end in zip(begins, ends, strict=True)], np.uint32)
        self._cut((computed & BODY_CRC_MASK) != self.head["body_crc"])

    @property
    def is_in_queue(self) -> npt.NDArray[np.bool_]:
        """Whether each message has an entry in a queue (bool, n): all but prepared and rolled back ones."""
        transaction = self.head["sys_flag"] & layout.TRANSACTION_MASK
        return ~np.isin(transaction, (layout.TRANSACTION_PREPARED, layout.TRANSACTION_ROLLBACK))

    @property
    def has_several(self) -> npt.NDArray[np.bool_]:
        """Whether each message (bool, n) is a batch, which has several queue offsets."""
        return np.isin(self.head["sys_flag"] & layout.INNER_BATCH, layout.INNER_BATCH)

    def queue_offsets(self) -> Int64:
        """Return the queue offset of each message (i64, n)."""
        offsets: Int64 = self.raw[self.positions[:, None] + _QUEUE_OFFSET_AT].view(">i8")[:, 0].astype(np.int64)
        return offsets

    def topics(self) -> tuple[list[str], npt.NDArray[np.int32]]:
        """Return the distinct topics, and the index of each message's topic (i32, n), up to the first invalid topic."""
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
                self._cut(index[: self.count] == place)
        used = topics[: int(index[: self.count].max()) + 1] if self.count else []
        return used, index[: self.count]


Int64 = npt.NDArray[np.int64]

_BLOCK = 16_384
_QUEUE_OFFSET_AT = np.arange(20, 28)


@dataclass(frozen=True, slots=True)
class Selection:
    """The part of a log that is indexed: its topics, and whether tags and prepared messages are indexed too.

    `topics` and `exclude` are names or patterns (`fnmatchcase`). Without `topics`, all topics but RocketMQ's own are
    indexed, with `prepared` also its topic of prepared messages. A topic in `exclude` is never indexed.
    """

    topics: tuple[str, ...] = ()
    exclude: tuple[str, ...] = ()
    tags: bool = False
    prepared: bool = False

    def takes(self, topic: str) -> bool:
        """Return whether messages of a topic are indexed."""
        if any(fnmatchcase(topic, pattern) for pattern in self.exclude):
            return False
        if self.topics:
            return any(fnmatchcase(topic, pattern) for pattern in self.topics)
        return not layout.is_system_topic(topic) or (self.prepared and topic == layout.HALF_TOPIC)

    def __str__(self) -> str:
        flags = [f"--topics {pattern}" for pattern in self.topics] + [
            f"--exclude-topics {pattern}" for pattern in self.exclude
        ]
        flags += ["--index-tags"] * self.tags + ["--index-prepared"] * self.prepared
        return " ".join(flags) or "every topic but RocketMQ's own"


# Every topic, without tags and prepared messages
ALL_TOPICS = Selection(topics=("*",))


@dataclass(frozen=True, slots=True)
class SkippedRange:
    """Commit log offsets [begin, end) that can't be read, and the reason.

    `is_missing`: no file has them. `is_between`: files before and after them are there, so the broker did not delete
    them.
    """

    begin: int
    end: int
    problem: str
    file: str
    is_missing: bool = False
    is_between: bool = False


class NonMessage(NamedTuple):
    """Commit log offsets [begin, end) without messages: a segment's blank, or damage that a reader skipped."""

    begin: int
    end: int
    size: int
    # CRC-32 of the first `size` bytes.
    crc: int
    # CRC-32 of all bytes; None for a blank
    whole: int | None


@dataclass(frozen=True, slots=True, kw_only=True)
class IndexBatch:
    """The entries of the messages at commit log offsets [begin, end); `end` is where to continue."""

    # A `pyarrow.RecordBatch`, one row per key: `topic` (dictionary), `queue_id` (i32), `key`, `offset` (i64), `size`
    # (i32), `timestamp_ms` (i64). Ordered by message; each key of a message once.
    columns: Any
    begin: int
    end: int
    # Messages in [begin, end), with keys or without.
    messages: int
    # Messages without a row, because they were prepared or rolled back
    hidden: int
    # Messages without a row, because their topic is not selected
    left_out: int
    # Keys that were not UTF-8, and are indexed as the text that the broker makes of them
    replaced_keys: int
    # Store timestamp of the last message; None without messages.
    last_store_ms: int | None
    # The greatest store timestamp; it is not the last one if a broker's clock was set back. None without messages
    greatest_store_ms: int | None
    # The state of the log at `end`
    state: End
    # The error at `end` if `state` is `End.DAMAGED`; not raised, so that the messages before it are not lost
    damage: CorruptFile | None
    # Ranges that a reader skipped before this batch
    skipped: tuple[SkippedRange, ...] = field(default=())
    # Ranges without messages before this batch, also blanks, ascending
    non_messages: tuple[NonMessage, ...] = field(default=())
    # Position of each message (i64, `messages`), relative to `begin`
    positions: Int64 = field(default_factory=lambda: np.zeros(0, np.int64), compare=False, repr=False)
    # The bytes from `begin`, and perhaps more, that were decoded
    data: Buffer = field(default=b"", compare=False, repr=False)
    selection: Selection = ALL_TOPICS

    def message_columns(self) -> MessageColumns:
        """Return the columns of all messages in [begin, end), with entries or without."""
        return MessageColumns(np.frombuffer(self.data, np.uint8), self.positions, self.begin)


def decode_index_columns(
    data: Buffer,
    start_offset: int,
    *,
    file: str = "segment",
    file_offset: int = 0,
    segment_bytes: int | None = None,
    check_crc: bool = False,
    selection: Selection = ALL_TOPICS,
) -> IndexBatch:
    """Return the entries of the successive messages from `data[0]`, up to the first bytes that are no message.

    `start_offset` is the physical offset of `data[0]`, and `file_offset` its position in `file`, for error texts.
    `segment_bytes` is the distance from `data[0]` to the segment's end, if the data is only a part of it. `check_crc`
    checks every body, in a loop. Never raises for any content of `data`.
    """
    walked = walk(data, segment_bytes=segment_bytes)
    raw = np.frombuffer(data, np.uint8)
    blocks: list[_Block] = []
    count = 0
    # some thousand messages at a time, to stay within the processor's cache
    for first in range(0, max(len(walked.positions), 1), _BLOCK):
        positions = walked.positions[first : first + _BLOCK]
        blocks.append(_decode_block(data, raw, positions, start_offset, check_crc, selection))
        count += blocks[-1].messages
        if blocks[-1].messages < len(positions):
            break
    state, damage, stop = walked.end, None, walked.stop
    if count < len(walked.positions):
        stop = int(walked.positions[count])
        state, damage = End.DAMAGED, _what_is_wrong(data, stop, start_offset, file, file_offset)
    elif state is End.DAMAGED:
        damage = CorruptFile(file, str(walked.problem), offset=file_offset + stop)
    # their topics get one dictionary
    rows = pa.Table.from_batches([block.columns for block in blocks]).unify_dictionaries().combine_chunks()
    return IndexBatch(
        columns=rows.to_batches()[0] if len(rows) else blocks[0].columns,
        begin=start_offset,
        end=start_offset + stop,
        messages=count,
        hidden=sum(block.hidden for block in blocks),
        left_out=sum(block.left_out for block in blocks),
        replaced_keys=sum(block.replaced for block in blocks),
        last_store_ms=next((block.last_store_ms for block in reversed(blocks) if block.messages), None),
        greatest_store_ms=max((b.greatest_store_ms for b in blocks if b.greatest_store_ms is not None), default=None),
        state=state,
        damage=damage,
        positions=walked.positions[:count],
        data=data,
        selection=selection,
    )


class _Block(NamedTuple):
    """Some messages, and one row for each of their keys."""

    messages: int
    hidden: int
    left_out: int
    replaced: int
    last_store_ms: int | None
    greatest_store_ms: int | None
    columns: Any


def _decode_block(
    data: Buffer, raw: npt.NDArray[np.uint8], positions: Int64, start_offset: int, check_crc: bool, selection: Selection
) -> _Block:
    """Decode the messages at `positions`, up to the first invalid one."""
    fields = MessageColumns(raw, positions, start_offset)
    if check_crc:
        fields.check_bodies(data)
    topics, index = fields.topics()
    count, head = fields.count, fields.head
    transaction = head["sys_flag"] & layout.TRANSACTION_MASK
    visible = transaction != layout.TRANSACTION_ROLLBACK
    if not selection.prepared:
        visible &= transaction != layout.TRANSACTION_PREPARED
    taken = np.array([selection.takes(topic) for topic in topics], np.bool_)
    shown = np.flatnonzero(visible if taken.all() else visible & taken[index])
    hidden = count - int(visible.sum())
    keys = key_columns(data, fields.properties_at[shown], fields.ends[shown], tags=selection.tags)
    row = shown[keys.message]
    topic = pa.DictionaryArray.from_arrays(pa.array(index[row]), pa.array(topics, pa.string()))
    queue_id, *numbers = (pa.array(head[n][row]) for n in ("queue_id", "physical_offset", "size", "store_ms"))
    names = ["topic", "queue_id", "key", "offset", "size", "timestamp_ms"]
    columns = pa.RecordBatch.from_arrays([topic, queue_id, keys.keys, *numbers], names)
    last_ms, greatest_ms = (int(head["store_ms"][-1]), int(head["store_ms"].max())) if count else (None, None)
    return _Block(count, hidden, count - hidden - len(shown), keys.replaced, last_ms, greatest_ms, columns)


def _what_is_wrong(data: Buffer, position: int, start_offset: int, file: str, file_offset: int) -> CorruptFile:
    try:
        decode_message(data, position, file=file, file_offset=file_offset, physical_offset=start_offset + position)
    except CorruptFile as error:
        # the traceback would keep `data` in memory
        return error.with_traceback(None)
    return CorruptFile(file, "a message that contradicts itself", offset=file_offset + position)
