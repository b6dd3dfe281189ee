"""Messages and logs for tests: a test chooses any field, and the others have usual values."""

from pathlib import Path

from tests.support.stored_messages import message_size
from tiered_index.connectors.rocketmq.log.layout import BLANK, BORN_V6, MAGIC_V1, MAGIC_V2, STORE_V6, Host
from tiered_index.connectors.rocketmq.log.message import Message, body_crc
from tiered_index.connectors.rocketmq.log.segments import segment_name

V4 = Host("10.1.2.3", 10911)
V6 = Host("2001:db8::1:2", 10911)
NOW_MS = 1_700_000_000_000


def message(
    offset: int = 0,
    *,
    topic: str = "TopicA",
    queue_id: int = 1,
    properties: bytes = b"",
    body: bytes = b"body",
    sys_flag: int = 0,
    store_ms: int = NOW_MS,
    magic: int | None = None,
) -> Message:
    if magic is None:
        magic = MAGIC_V1 if len(topic.encode()) < 128 else MAGIC_V2
    return Message(
        topic=topic,
        queue_id=queue_id,
        queue_offset=7,
        physical_offset=offset,
        size=message_size(sys_flag, magic, len(topic.encode()), len(body), len(properties)),
        magic=magic,
        body_crc=body_crc(body),
        flag=5,
        sys_flag=sys_flag,
        born_ms=NOW_MS - 1,
        born_host=V6 if sys_flag & BORN_V6 else V4,
        store_ms=store_ms,
        store_host=V6 if sys_flag & STORE_V6 else V4,
        reconsume_times=2,
        prepared_offset=9,
        raw_body=body,
        raw_properties=properties,
    )


def keyed(offset: int, number: int, **fields) -> Message:
    """Return a message with a unique key, one key and tags."""
    properties = f"KEYS\x01order-{number}\x02UNIQ_KEY\x01{number:032X}\x02TAGS\x01TagA\x02".encode()
    return message(offset, properties=properties, store_ms=NOW_MS + number, **fields)


def log(count: int, start: int = 0, first: int = 0, **fields) -> list[Message]:
    """Return messages that follow each other from an offset."""
    made: list[Message] = []
    for number in range(first, first + count):
        made.append(keyed(start, number, **fields))
        start += made[-1].size
    return made


def joined(messages: list[Message]) -> bytes:
    return b"".join(record.encode() for record in messages)


def blank(left: int) -> bytes:
    return (left.to_bytes(4, "big") + BLANK.to_bytes(4, "big")).ljust(left, b"\0")


def write_log(folder: Path, segment_bytes: int, segments: dict[int, bytes]) -> Path:
    """Write segments (start -> content) into a commit log folder, each filled up with zeros; return the folder."""
    folder.mkdir(parents=True, exist_ok=True)
    for start, content in segments.items():
        (folder / segment_name(start)).write_bytes(content.ljust(segment_bytes, b"\0"))
    return folder


def full(messages: list[Message], segment_bytes: int) -> bytes:
    """Return a whole segment: the messages, and a blank after them."""
    content = joined(messages)
    return content + blank(segment_bytes - len(content))
