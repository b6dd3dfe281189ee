"""A stretch of a commit log segment -> the columns that `IndexService.put_batch` takes, with no loop over messages but the walk. Pure.

First where messages begin (from consume queues, else by walking), then their headers by one gather of the fixed part, then topics and keys.
Every length is checked before it is used. Source: RocketMQ's `CommitLog.checkMessageAndReturnSize` and `IndexService.buildIndex`; unlike
the latter, prepared messages aren't indexed: no consumer ever sees them.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from tiered_index.errors import CorruptFile
from tiered_index.rocketmq.layout import TRANSACTION_MASK, TRANSACTION_PREPARED, TRANSACTION_ROLLBACK
from tiered_index.rocketmq.message import Buffer, decode_message
from tiered_index.rocketmq.message_columns import MessageColumns
from tiered_index.rocketmq.property_columns import key_columns
from tiered_index.rocketmq.walking import End, message_positions, walk

__all__ = ["IndexBatch", "Passed", "SkippedRange", "decode_index_columns"]

Int64 = npt.NDArray[np.int64]

_BLOCK = 16_384


@dataclass(frozen=True, slots=True)
class SkippedRange:
    """Commit log offsets [begin, end) that nobody can read, and why."""

    begin: int
    end: int
    problem: str
    file: str


class Passed(NamedTuple):
    """What stood at commit log offsets [begin, end), where a reader found no message: a segment's blank, or damage that it skipped."""

    begin: int
    end: int
    size: int
    crc: int
    """CRC-32 of the first `size` bytes."""
    whole: int | None
    """CRC-32 of all bytes; None for a blank, behind whose head there is nothing."""


@dataclass(frozen=True, slots=True, kw_only=True)
class IndexBatch:
    """The entries of the messages at commit log offsets [begin, end); `end` is where to continue."""

    columns: Any
    """A `pyarrow.RecordBatch`, one row per key: `topic` (dictionary), `queue_id` (i32), `key`, `offset` (i64), `size` (i32), `timestamp_ms`
    (i64). Order: by message; the keys of one message stand together, each once."""
    begin: int
    end: int
    messages: int
    """Messages in [begin, end), with keys or without."""
    hidden: int
    """Those among them that were prepared or rolled back, and so gave no row."""
    replaced_keys: int
    """Keys that were no UTF-8 and are indexed under the text that the broker makes of them."""
    last_store_ms: int | None
    """Store timestamp of the last message; None without messages."""
    state: End
    """What stands at `end`."""
    damage: CorruptFile | None
    """What is wrong at `end` where `state` is `End.DAMAGED`; not raised, so that what lies before it isn't lost."""
    skipped: tuple[SkippedRange, ...] = field(default=())
    """What a reader skipped before this batch."""
    passed: tuple[Passed, ...] = field(default=())
    """What stood before this batch where no message was read, also blanks, ascending."""
    positions: Int64 = field(default_factory=lambda: np.zeros(0, np.int64), compare=False, repr=False)
    """Where each message begins (`messages`), counted from `begin`."""


def decode_index_columns(
    data: Buffer, start_offset: int, positions: npt.ArrayLike | None = None, *, file: str = "segment", file_offset: int = 0,
    segment_bytes: int | None = None, check_crc: bool = False,
) -> IndexBatch:  # fmt: skip
    """Return the entries of the messages that begin at `data[0]` and follow each other, up to the first thing that is none.

    `start_offset` is the physical offset of `data[0]`, and `file_offset` its position in `file`, for error texts. `positions` (n, relative
    to `data`, ascending) are what consume queues say; gaps between them are walked. `segment_bytes` counts from `data[0]` to the segment's
    end where the data is only a part of it. `check_crc` checks every body, at the price of a loop. Never raises for any content of `data`.
    """
    if positions is None:
        found = walk(data, segment_bytes=segment_bytes)
    else:
        found = message_positions(data, positions, segment_bytes=segment_bytes)
    raw = np.frombuffer(data, np.uint8)
    blocks: list[_Block] = []
    count = 0
    # some thousand messages at a time: what they need stays within the cache
    for first in range(0, max(len(found.positions), 1), _BLOCK):
        positions = found.positions[first : first + _BLOCK]
        blocks.append(_decode_block(data, raw, positions, start_offset, check_crc))
        count += blocks[-1].count
        if blocks[-1].count < len(positions):
            break
    state, damage, stop = found.end, None, found.stop
    if count < len(found.positions):
        stop = int(found.positions[count])
        state, damage = End.DAMAGED, _what_is_wrong(data, stop, start_offset, file, file_offset)
    elif state is End.DAMAGED:
        damage = CorruptFile(file, str(found.problem), offset=file_offset + stop)
    return IndexBatch(
        columns=_record_batch(blocks), begin=start_offset, end=start_offset + stop, messages=count,
        hidden=sum(block.hidden for block in blocks), replaced_keys=sum(block.replaced for block in blocks),
        last_store_ms=next((block.last_store_ms for block in reversed(blocks) if block.count), None), state=state, damage=damage,
        positions=found.positions[:count],
    )  # fmt: skip


@dataclass(frozen=True, slots=True)
class _Block:
    """What `count` messages give: one row a key."""

    count: int
    hidden: int
    replaced: int
    last_store_ms: int | None
    topics: list[str]
    topic: npt.NDArray[np.int32]
    keys: Any
    numbers: npt.NDArray[np.void]
    """The rows' headers."""


def _decode_block(data: Buffer, raw: npt.NDArray[np.uint8], positions: Int64, start_offset: int, check_crc: bool) -> _Block:
    """Decode the messages at `positions` up to the first that is none."""
    fields = MessageColumns(raw, positions, start_offset)
    if check_crc:
        fields.check_bodies(data)
    topics, index = fields.topics()
    count = fields.count
    head = fields.head[:count]
    transaction = head["sys_flag"] & TRANSACTION_MASK
    hidden = (transaction == TRANSACTION_PREPARED) | (transaction == TRANSACTION_ROLLBACK)
    shown = np.flatnonzero(~hidden)
    keys = key_columns(data, fields.properties_at[shown], fields.ends[shown])
    row = shown[keys.message]
    last_ms = int(head["store_ms"][-1]) if count else None
    return _Block(count, count - len(shown), keys.replaced, last_ms, topics, index[row], keys.keys, head[row])


def _record_batch(blocks: list[_Block]) -> Any:
    """Join blocks; their topics get one dictionary."""
    place: dict[str, int] = {}
    topic = []
    for block in blocks:
        places = np.array([place.setdefault(name, len(place)) for name in block.topics], np.int32)
        topic.append(places[block.topic] if len(places) else block.topic)

    def column(name: str, kind: Any) -> Any:
        return pa.array(np.concatenate([block.numbers[name] for block in blocks]).astype(kind, copy=False))

    return pa.RecordBatch.from_arrays(
        [
            pa.DictionaryArray.from_arrays(pa.array(np.concatenate(topic)), pa.array(list(place), pa.string())),
            column("queue_id", np.int32), pa.concat_arrays([block.keys for block in blocks]), column("physical_offset", np.int64),
            column("size", np.int32), column("store_ms", np.int64),
        ],
        names=["topic", "queue_id", "key", "offset", "size", "timestamp_ms"],
    )  # fmt: skip


def _what_is_wrong(data: Buffer, position: int, start_offset: int, file: str, file_offset: int) -> CorruptFile:
    try:
        decode_message(data, position, file=file, file_offset=file_offset, physical_offset=start_offset + position)
    except CorruptFile as error:
        # the traceback would keep `data` for as long as the error is kept
        return error.with_traceback(None)
    return CorruptFile(file, "a message that contradicts itself", offset=file_offset + position)
