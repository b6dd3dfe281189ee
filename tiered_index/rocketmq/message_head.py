"""What a message's head claims, checked before as much as it claims is read. Pure.

Four lying bytes could otherwise make a reader fetch, and hold, a whole segment. RocketMQ's bound of a message is set at the broker
(`maxMessageSize`, 4 MiB by default); `MAX_MESSAGE_BYTES` is 32 times that, and what claims more is damage.
"""

from __future__ import annotations

import struct
from typing import NamedTuple

import numpy as np

from tiered_index.errors import CorruptFile
from tiered_index.rocketmq.bodies import MAX_BODY_BYTES
from tiered_index.rocketmq.layout import (
    BORN_V6,
    MAGIC_V1,
    MAGIC_V2,
    MAX_PROPERTIES_BYTES,
    MAX_TOPIC_V1_BYTES,
    MIN_MESSAGE_BYTES,
    STORE_V6,
    header_dtype,
)
from tiered_index.rocketmq.message import Buffer

__all__ = ["HEAD_BYTES", "MAX_MESSAGE_BYTES", "Claim", "check_head", "check_tail"]

HEAD_BYTES = header_dtype(BORN_V6 | STORE_V6).itemsize
"""As much as any message's fixed part has."""
_MAX_TOPIC_BYTES = 32_767
MAX_MESSAGE_BYTES = MAX_BODY_BYTES + HEAD_BYTES + 2 + _MAX_TOPIC_BYTES + 2 + MAX_PROPERTIES_BYTES
"""The longest message that is read: a body of 128 MiB, and everything else as long as it can be."""
_size_and_magic = struct.Struct(">iI").unpack_from


class Claim(NamedTuple):
    """What a head says: the message's size, where the length of the topic stands, and how many bytes that length takes."""

    size: int
    tail_at: int
    length_bytes: int


def check_head(head: Buffer, left: int, *, file: str, file_offset: int, physical_offset: int) -> Claim:
    """Return what a head claims; `head` is a message's first `HEAD_BYTES` bytes, or all of the `left` ones that there are.

    Raises `CorruptFile` for `file` at `file_offset` where no message of at most `left` and `MAX_MESSAGE_BYTES` bytes can begin so.
    """

    def damage(problem: str, expected: object = None, found: object = None) -> CorruptFile:
        return CorruptFile(file, problem, offset=file_offset, expected=expected, found=found)

    if len(head) < MIN_MESSAGE_BYTES:
        raise damage("no whole message", f"{MIN_MESSAGE_BYTES} bytes or more", f"{len(head)} bytes")
    size, magic = _size_and_magic(head)
    if magic not in (MAGIC_V1, MAGIC_V2):
        raise damage("wrong magic of a message", f"{MAGIC_V1:#x} or {MAGIC_V2:#x}", f"{magic:#x}")
    most = min(left, MAX_MESSAGE_BYTES)
    if not MIN_MESSAGE_BYTES <= size <= most:
        raise damage("the message's size lies", f"{MIN_MESSAGE_BYTES} to {most} bytes", size)
    dtype = header_dtype(int.from_bytes(head[36:40], "big", signed=True))
    if size < dtype.itemsize + 3 or len(head) < dtype.itemsize:
        raise damage("the message's size lies", f"{dtype.itemsize + 3} bytes or more for its hosts", min(size, len(head)))
    fields = np.frombuffer(head[: dtype.itemsize], dtype)[0]
    if int(fields["physical_offset"]) != physical_offset:
        raise damage("the message belongs elsewhere", f"physical offset {physical_offset}", int(fields["physical_offset"]))
    length_bytes, topic_bytes = (1, MAX_TOPIC_V1_BYTES) if magic == MAGIC_V1 else (2, _MAX_TOPIC_BYTES)
    longest = size - dtype.itemsize - length_bytes - 2
    shortest = max(longest - topic_bytes - MAX_PROPERTIES_BYTES, 0)
    if not shortest <= int(fields["body_length"]) <= longest:
        raise damage("the body's length lies", f"{shortest} to {longest}", int(fields["body_length"]))
    return Claim(size, dtype.itemsize + int(fields["body_length"]), length_bytes)


def check_tail(claim: Claim, tail: Buffer, *, file: str, file_offset: int) -> None:
    """Raise `CorruptFile` where topic and properties aren't as long as the head left room for; `tail` begins at `claim.tail_at`."""
    room = claim.size - claim.tail_at
    properties_at = claim.length_bytes + int.from_bytes(tail[: claim.length_bytes], "big", signed=True) + 2
    if len(tail) < room or not claim.length_bytes + 2 <= properties_at <= room:
        raise CorruptFile(file, "the topic's length lies", offset=file_offset, expected=f"0 to {room - claim.length_bytes - 2}",
                          found=properties_at - claim.length_bytes - 2)  # fmt: skip
    length = int.from_bytes(tail[properties_at - 2 : properties_at], "big", signed=True)
    if properties_at + length != room:
        raise CorruptFile(file, "the lengths don't add up: length of the properties", offset=file_offset, expected=room - properties_at,
                          found=length)  # fmt: skip
