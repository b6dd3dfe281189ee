"""The commit log's message, field by field, as RocketMQ's `MessageExtEncoder` lays it out. Big-endian. Pure.

```
 0 i32 total size           28 i64 physical offset       then  i64 store timestamp (ms)
 4 u32 magic                36 i32 sys flag                    store host, as the born host
 8 i32 CRC of the body      40 i64 born timestamp (ms)         i32 reconsume times
12 i32 queue id             48 born host: 4 or 16 bytes        i64 prepared transaction offset
16 i32 flag                    of address, i32 port            i32 body length, body
20 i64 queue offset                                            topic length (magic V1: i8, V2: i16), topic
                                                               i16 properties length, properties
```
Lengths are signed, as RocketMQ reads them; it writes no negative one. The body CRC is CRC-32 of the stored (compressed) body without its
highest bit. A segment ends with a blank: i32 bytes left, u32 magic `BLANK`, then anything. Behind the last message of a segment that is
being written lie zeros.
"""

from __future__ import annotations

import numpy as np

__all__ = [
    "BLANK",
    "BLANK_BYTES",
    "BORN_V6",
    "COMPRESSED",
    "COMPRESSION_LZ4",
    "COMPRESSION_MASK",
    "COMPRESSION_ZLIB",
    "COMPRESSION_ZSTD",
    "MAGIC_V1",
    "MAGIC_V2",
    "MAX_PROPERTIES_BYTES",
    "MAX_TOPIC_V1_BYTES",
    "MIN_MESSAGE_BYTES",
    "STORE_V6",
    "TRANSACTION_COMMIT",
    "TRANSACTION_MASK",
    "TRANSACTION_PREPARED",
    "TRANSACTION_ROLLBACK",
    "header_dtype",
]

MAGIC_V1 = 0xDAA320A7
"""A message whose topic has at most 127 bytes."""
MAGIC_V2 = 0xDAA320AB
"""A message whose topic length takes two bytes."""
BLANK = 0xCBD43194
"""The rest of the segment holds no message."""
BLANK_BYTES = 8
"""The broker leaves at least this much room behind the last message of a segment."""

COMPRESSED = 0x1
TRANSACTION_MASK = 0xC
TRANSACTION_PREPARED = 0x4
TRANSACTION_COMMIT = 0x8
TRANSACTION_ROLLBACK = 0xC
BORN_V6 = 0x10
STORE_V6 = 0x20
COMPRESSION_MASK = 0x700
COMPRESSION_LZ4 = 0x100
COMPRESSION_ZSTD = 0x200
COMPRESSION_ZLIB = 0x300

MAX_TOPIC_V1_BYTES = 127
MAX_PROPERTIES_BYTES = 32_767


def header_dtype(sys_flag: int) -> np.dtype[np.void]:
    """Return the packed record of everything up to and with the body length; its size depends on the two address bits of `sys_flag`."""
    born = "V20" if sys_flag & BORN_V6 else "V8"
    store = "V20" if sys_flag & STORE_V6 else "V8"
    return np.dtype([
        ("size", ">i4"), ("magic", ">u4"), ("body_crc", ">i4"), ("queue_id", ">i4"), ("flag", ">i4"), ("queue_offset", ">i8"),
        ("physical_offset", ">i8"), ("sys_flag", ">i4"), ("born_ms", ">i8"), ("born_host", born), ("store_ms", ">i8"),
        ("store_host", store), ("reconsume_times", ">i4"), ("prepared_offset", ">i8"), ("body_length", ">i4"),
    ])  # fmt: skip


MIN_MESSAGE_BYTES = header_dtype(0).itemsize + 1 + 2
"""A message of IPv4 hosts with empty body, topic and properties."""
