"""What a message's head claims, checked before as much as it claims is read. Pure.

Four lying bytes could otherwise make a reader fetch, and hold, a whole segment. RocketMQ's bound of a message is set at the broker
(`maxMessageSize`, 4 MiB by default); `MAX_MESSAGE_BYTES` is 32 times that, and what claims more is damage.
"""

from __future__ import annotations

import struct
from collections.abc import Callable
from functools import cache, partial
from typing import Any, NamedTuple

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

__all__ = ["HEAD_BYTES", "MAX_MESSAGE_BYTES", "Buffer", "Claim", "Head", "check_head", "check_tail", "decode_head"]

Buffer = bytes | bytearray | memoryview
"""Bytes to decode; nothing of them is kept beyond the call but copies."""
HEAD_BYTES = header_dtype(BORN_V6 | STORE_V6).itemsize
"""As much as any message's fixed part has."""
_MAX_TOPIC_BYTES = 32_767
MAX_MESSAGE_BYTES = MAX_BODY_BYTES + HEAD_BYTES + 2 + _MAX_TOPIC_BYTES + 2 + MAX_PROPERTIES_BYTES
"""The longest message that is read: a body of 128 MiB, and everything else as long as it can be."""
_size_and_magic = struct.Struct(">iI").unpack_from
_dtype_of = cache(header_dtype)


class Head(NamedTuple):
    """A message's fixed part: `fields` as `header_dtype` names them, where the body begins, how many bytes the topic's length takes."""

    size: int
    fields: Any
    body_at: int
    length_bytes: int


def decode_head(data: Buffer, most: int, damage: Callable[..., CorruptFile], physical_offset: int | None) -> Head:
    """Return the fixed part of the message that begins at `data[0]`; of its lengths only the size is checked.

    Raises what `damage` (as `CorruptFile`, from the problem on) makes of a message that has more than `most` bytes, another physical
    offset (None: any), or a head that is none.
    """
    if len(data) < MIN_MESSAGE_BYTES:
        raise damage("no whole message", expected=f"{MIN_MESSAGE_BYTES} bytes or more", found=f"{len(data)} bytes")
    size, magic = _size_and_magic(data)
    if magic not in (MAGIC_V1, MAGIC_V2):
        raise damage("wrong magic of a message", expected=f"{MAGIC_V1:#x} or {MAGIC_V2:#x}", found=f"{magic:#x}")
    if not MIN_MESSAGE_BYTES <= size <= most:
        raise damage("the message's size lies", expected=f"{MIN_MESSAGE_BYTES} to {most} bytes", found=size)
    dtype = _dtype_of(int.from_bytes(data[36:40], "big", signed=True))
    if size < dtype.itemsize + 3 or len(data) < dtype.itemsize:
        expected = f"{dtype.itemsize + 3} bytes or more for its hosts"
        raise damage("the message's size lies", expected=expected, found=min(size, len(data)))
    fields = np.frombuffer(data[: dtype.itemsize], dtype)[0]
    if physical_offset is not None and int(fields["physical_offset"]) != physical_offset:
        raise damage("the message belongs elsewhere", expected=f"physical offset {physical_offset}", found=int(fields["physical_offset"]))
    return Head(size, fields, dtype.itemsize, 1 if magic == MAGIC_V1 else 2)


class Claim(NamedTuple):
    """What a head says: the message's size, where the length of the topic stands, and how many bytes that length takes."""

    size: int
    tail_at: int
    length_bytes: int


def check_head(head: Buffer, left: int, *, file: str, file_offset: int, physical_offset: int) -> Claim:
    """Return what a head claims; `head` is a message's first `HEAD_BYTES` bytes, or all of the `left` ones that there are.

    Raises `CorruptFile` for `file` at `file_offset` where no message of at most `left` and `MAX_MESSAGE_BYTES` bytes can begin so.
    """
    damage = partial(CorruptFile, file, offset=file_offset)
    size, fields, body_at, length_bytes = decode_head(head, min(left, MAX_MESSAGE_BYTES), damage, physical_offset)
    longest = size - body_at - length_bytes - 2
    shortest = max(longest - (MAX_TOPIC_V1_BYTES if length_bytes == 1 else _MAX_TOPIC_BYTES) - MAX_PROPERTIES_BYTES, 0)
    if not shortest <= int(fields["body_length"]) <= longest:
        raise damage("the body's length lies", expected=f"{shortest} to {longest}", found=int(fields["body_length"]))
    return Claim(size, body_at + int(fields["body_length"]), length_bytes)


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
