"""A message as it is shown: every field JSON-ready, its body as text, JSON or hexadecimal digits. Pure."""

from __future__ import annotations

import json
from dataclasses import fields
from typing import Any, Literal

from tiered_index.errors import CorruptFile
from tiered_index.rocketmq.log.message import Message

__all__ = ["BodyFormat", "FoundRocketmqMessage", "show_body"]

BodyFormat = Literal["text", "json", "hex", "none"]


class FoundRocketmqMessage(Message):
    """A message out of a store, which says itself as a dict."""

    __slots__ = ()

    @classmethod
    def of(cls, message: Message) -> FoundRocketmqMessage:
        """Return `message` as one of these."""
        return cls(**{field.name: getattr(message, field.name) for field in fields(Message)})

    def to_dict(self, body: BodyFormat = "text") -> dict[str, Any]:
        """Return every field JSON-ready, the body as `show_body` does."""
        return {
            "topic": self.topic,
            "queue_id": self.queue_id,
            "queue_offset": self.queue_offset,
            "msg_id": self.offset_msg_id,
            "uniq_key": self.uniq_key,
            "keys": list(self.index_keys),
            "tags": self.tags,
            "properties": self.properties,
            "born_ms": self.born_ms,
            "born_host": str(self.born_host),
            "store_ms": self.store_ms,
            "store_host": str(self.store_host),
            "physical_offset": self.physical_offset,
            "size": self.size,
            "flag": self.flag,
            "sys_flag": self.sys_flag,
            "reconsume_times": self.reconsume_times,
            "prepared_offset": self.prepared_offset,
            "visible": self.is_visible,
            "compression": self.compression,
            "body_crc": self.body_crc,
            "body_bytes": len(self.raw_body),
            **show_body(self, body),
        }


def show_body(message: Message, wanted: BodyFormat) -> dict[str, Any]:
    """Return ``body`` and ``body_format``: what is no JSON is shown as text, what is no text as hexadecimal digits.

    A body that can't be decompressed is shown as stored, in hexadecimal digits, with ``body_problem``; "none" gives
    neither.
    """
    if wanted == "none":
        return {}
    try:
        plain = message.body()
    except CorruptFile as error:
        return {"body": message.raw_body.hex(), "body_format": "hex", "body_problem": str(error)}
    if wanted == "json":
        try:
            return {"body": json.loads(plain, parse_constant=_no_constant), "body_format": "json"}
        except (ValueError, RecursionError):
            pass  # shown as text
    if wanted != "hex" and b"\0" not in plain:
        try:
            return {"body": plain.decode(), "body_format": "text"}
        except UnicodeDecodeError:
            pass  # shown as digits
    return {"body": plain.hex(), "body_format": "hex"}


def _no_constant(name: str) -> Any:
    raise ValueError(f"{name} is no JSON")
