"""The store's checkpoint: up to which store timestamps commit log, consume queues and classic index were flushed. Pure.

4,096 bytes; five i64, big-endian, then zeros. Source: RocketMQ's `StoreCheckpoint`.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass

from tiered_index.errors import CorruptFile

__all__ = ["CHECKPOINT_BYTES", "Checkpoint", "decode_checkpoint"]

CHECKPOINT_BYTES = 4_096
_FIELDS = struct.Struct(">5q")
_SAFETY_MS = 3_000


@dataclass(frozen=True, slots=True, kw_only=True)
class Checkpoint:
    """Times are epoch milliseconds of store time, inclusive; 0 means never flushed. Immutable."""

    commit_log_ms: int = 0
    consume_queue_ms: int = 0
    index_ms: int = 0
    """The end timestamp of the last classic index file that was full when it was flushed."""
    master_flushed_offset: int = 0
    confirmed_offset: int = 0

    def encode(self) -> bytes:
        """Return the file's bytes."""
        fields = (self.commit_log_ms, self.consume_queue_ms, self.index_ms, self.master_flushed_offset, self.confirmed_offset)
        return _FIELDS.pack(*fields).ljust(CHECKPOINT_BYTES, b"\0")

    @property
    def safe_ms(self) -> int:
        """Up to when commit log and consume queues are both flushed for certain: the smaller of the two less three seconds, at least 0."""
        return max(0, min(self.commit_log_ms, self.consume_queue_ms) - _SAFETY_MS)

    @property
    def safe_index_ms(self) -> int:
        """`safe_ms`, and not behind what the classic index has: from where a broker dispatches again after a crash."""
        return min(self.safe_ms, self.index_ms)


def decode_checkpoint(data: bytes, file: str = "checkpoint") -> Checkpoint:
    """Return what a checkpoint says; raises `CorruptFile` where it is cut short or holds a negative time."""
    if len(data) < _FIELDS.size:
        raise CorruptFile(file, "the checkpoint is cut short", offset=len(data), expected=CHECKPOINT_BYTES, found=len(data))
    fields = _FIELDS.unpack_from(data)
    for place, value in enumerate(fields[:3]):
        if value < 0:
            raise CorruptFile(file, "a negative time in the checkpoint", offset=8 * place, found=value)
    return Checkpoint(
        commit_log_ms=fields[0], consume_queue_ms=fields[1], index_ms=fields[2], master_flushed_offset=fields[3],
        confirmed_offset=fields[4],
    )  # fmt: skip
