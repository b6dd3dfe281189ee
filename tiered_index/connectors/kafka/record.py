"""The type of Kafka's records. Pure."""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum
from typing import Any

from tiered_index.base.encoding import MAX_BODY_BYTES, BodyFormat, show_bytes
from tiered_index.format.keys.spelling import key_text

__all__ = ["KafkaRecord", "TimestampType", "key_text"]


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

    def to_dict(self, body: BodyFormat = "text", max_body_bytes: int = MAX_BODY_BYTES) -> dict[str, Any]:
        """Return the record JSON-ready: its value as the body, as `show_bytes` does; a tombstone has none. Key and
        headers are spelled as keys of the index. JSON behind Confluent's frame is the body, beside a `schema_id`.
        """
        return {
            "topic": self.topic,
            "partition": self.partition,
            "offset": self.offset,
            "size": self.size,
            "key": None if self.key is None else key_text(self.key),
            "headers": [[name, None if value is None else key_text(value)] for name, value in self.headers],
            "timestamp_ms": self.timestamp_ms,
            "timestamp_type": self.timestamp_type.name.lower(),
            "body_bytes": None if self.value is None else len(self.value),
            **({} if self.value is None else _shown(self.value, body)),
        }

    @property
    def texts(self) -> tuple[str, ...]:
        """Key and headers."""
        of_headers = [text for name, value in self.headers for text in (name, key_text(value or b""))]
        return (key_text(self.key or b""), *of_headers)

    def body(self, _: int) -> bytes:
        """Return the value; a tombstone's is empty."""
        return self.value or b""

    @property
    def size(self) -> int:
        """The bytes of key, value and headers."""
        size = len(self.key or b"") + len(self.value or b"")
        return size + sum(len(name.encode()) + len(value or b"") for name, value in self.headers)

    @property
    def compression(self) -> None:
        """None: the source's client unpacks it."""

    def plain_bytes(self, max_bytes: int) -> int:
        """Return `size`."""
        return self.size


# Confluent's serializers write a zero and the id of the schema before a document
_FRAME_BYTES = 5


def _shown(value: bytes, wanted: BodyFormat) -> dict[str, Any]:
    if wanted not in ("hex", "none") and value[:1] == b"\0" and value[_FRAME_BYTES : _FRAME_BYTES + 1] in (b"{", b"["):
        document = show_bytes(value[_FRAME_BYTES:], wanted)
        if document["body_format"] != "hex":
            return {"schema_id": int.from_bytes(value[1:_FRAME_BYTES], "big"), **document}
    return show_bytes(value, wanted)
