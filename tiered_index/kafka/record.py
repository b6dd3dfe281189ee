"""The type of Kafka's records. Pure."""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum

__all__ = ["KafkaRecord", "TimestampType"]


class TimestampType(IntEnum):
    """The clock of a record's time, by Kafka's numbers."""

    NONE = 0
    CREATE = 1
    LOG_APPEND = 2


@dataclass(frozen=True, slots=True)
class KafkaRecord:
    """One record and its place. A `value` of None is a tombstone. A header's name may occur several times.

    `timestamp_ms` is None if the record has no time (`TimestampType.NONE`).
    """

    topic: str
    partition: int
    offset: int
    key: bytes | None
    value: bytes | None
    headers: tuple[tuple[str, bytes | None], ...] = ()
    timestamp_ms: int | None = None
    timestamp_type: TimestampType = TimestampType.NONE

    @property
    def size(self) -> int:
        """The bytes of key, value and headers."""
        size = len(self.key or b"") + len(self.value or b"")
        return size + sum(len(name.encode()) + len(value or b"") for name, value in self.headers)
