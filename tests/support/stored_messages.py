"""The length and the properties of a message that a test stores as a broker does."""

from __future__ import annotations

from collections.abc import Mapping

from tiered_index.errors import InvalidArgument
from tiered_index.rocketmq.log import layout
from tiered_index.rocketmq.log.layout import NAME_END, VALUE_END


def format_properties(properties: Mapping[str, str]) -> str:
    """Return the stored text, each value ended (`MessageDecoder.messageProperties2String`)."""
    return "".join(f"{name}{NAME_END}{value}{VALUE_END}" for name, value in properties.items())


def message_size(sys_flag: int, magic: int, topic_bytes: int, body_bytes: int, properties_bytes: int) -> int:
    """Return a message's length in bytes. Raises `InvalidArgument` for lengths that have no room in their field."""
    if not topic_bytes <= (layout.MAX_TOPIC_V1_BYTES if magic == layout.MAGIC_V1 else 32_767):
        raise InvalidArgument(f"a topic of {topic_bytes:,} bytes doesn't fit this message version")
    if properties_bytes > layout.MAX_PROPERTIES_BYTES:
        raise InvalidArgument(f"properties of {properties_bytes:,} bytes are more than {layout.MAX_PROPERTIES_BYTES:,}")
    head = (
        layout.MIN_MESSAGE_BYTES
        + (magic == layout.MAGIC_V2)
        + 12 * bool(sys_flag & layout.BORN_V6)
        + 12 * bool(sys_flag & layout.STORE_V6)
    )
    return head + body_bytes + topic_bytes + properties_bytes
