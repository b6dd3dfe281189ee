"""One message: every kind comes back from its bytes, and whatever contradicts itself is damage with file and byte."""

from __future__ import annotations

import itertools
import random
import struct
import zlib

import pyarrow as pa
import pytest

from tests.rocketmq import messages
from tests.support.stored_messages import compress, message_size
from tiered_index.errors import CorruptFile, InvalidArgument
from tiered_index.rocketmq.log import message
from tiered_index.rocketmq.log.layout import (
    BORN_V6,
    MAGIC_V2,
    STORE_V6,
    TRANSACTION_COMMIT,
    TRANSACTION_PREPARED,
    TRANSACTION_ROLLBACK,
    Host,
    decode_offset_msg_id,
    offset_msg_id,
    pack_host,
)
from tiered_index.rocketmq.log.message import decode_message


@pytest.mark.parametrize(
    ("hosts", "topic", "body"),
    list(
        itertools.product(
            (0, BORN_V6, STORE_V6, BORN_V6 | STORE_V6), ("T", "t" * 127, "t" * 128, "主题"), (b"", b"body" * 50)
        )
    ),
)
def test_every_kind_comes_back(hosts, topic, body):
    made = messages.message(4096, topic=topic, body=body, sys_flag=hosts, properties=b"KEYS\x01a b\x02")
    data = b"before" + made.encode() + b"behind"
    assert decode_message(data, 6, physical_offset=4096) == made
    assert decode_message(memoryview(data), 6) == made
    assert len(made.encode()) == made.size


@pytest.mark.parametrize("name", ["zlib", "lz4", "zstd"])
def test_compressed_bodies(name):
    stored, flag = compress(b"plain text " * 1000, name)
    made = decode_message(messages.message(body=stored, sys_flag=flag).encode())
    assert made.compression == name
    assert made.body() == b"plain text " * 1000
    assert made.raw_body == stored
    with pytest.raises(CorruptFile, match="larger than 1,000 bytes"):
        made.body(max_bytes=1000)
    for broken in (stored[:-1], stored[: len(stored) // 2], stored[:1], b"\xff" + stored[1:]):
        with pytest.raises(CorruptFile, match=f"0A010203.*{name}"):
            messages.message(body=broken, sys_flag=flag).body()


@pytest.mark.parametrize(
    "body", [b"plain text " * 20_000, random.Random(1).randbytes(200_000), b"", b"x" * 65_536], ids=len
)
def test_blocks_of_lz4_are_independent(body):
    """RocketMQ's reader (lz4-java) refuses linked ones, which Arrow writes of a body above 64 KiB."""
    stored, flag = compress(body, "lz4")
    assert stored[:7] == bytes.fromhex("04224d18604082")  # 0x60: version 1, independent
    at, plain = 7, []
    while size := int.from_bytes(stored[at : at + 4], "little"):
        block = stored[at + 4 :][: size & 0x7FFFFFFF]
        if not size >> 31:
            left = min(65_536, len(body) - 65_536 * len(plain))
            block = pa.Codec("lz4_raw").decompress(block, left, asbytes=True)
        plain.append(block)
        at += 4 + (size & 0x7FFFFFFF)
    assert (b"".join(plain), at + 4) == (body, len(stored))
    assert all(len(block) == 65_536 for block in plain[:-1])
    assert messages.message(body=stored, sys_flag=flag).body() == body


def test_compression_of_old_clients_and_of_none():
    stored = zlib.compress(b"text")
    assert messages.message(body=stored, sys_flag=1).body() == b"text"
    assert messages.message(body=b"", sys_flag=1).body() == b""
    assert messages.message(body=stored, sys_flag=0x300).body() == stored  # a type without the flag says nothing
    with pytest.raises(CorruptFile, match="unknown compression type 5"):
        messages.message(body=stored, sys_flag=0x501).body()
    assert messages.message(sys_flag=0x501).compression == "unknown"
    with pytest.raises(InvalidArgument):
        compress(b"", "snappy")


def test_a_small_body_that_claims_to_be_huge_costs_no_memory():
    bomb = zlib.compress(b"\0" * (1 << 24))
    assert len(bomb) < 20_000
    with pytest.raises(CorruptFile, match="larger than 65,536 bytes"):
        message.decompress(bomb, 0x301, max_bytes=1 << 16)


def test_visibility():
    wanted = {0: True, TRANSACTION_COMMIT: True, TRANSACTION_PREPARED: False, TRANSACTION_ROLLBACK: False}
    assert {flag: messages.message(sys_flag=flag).is_visible for flag in wanted} == wanted


def test_ids_of_messages():
    assert offset_msg_id(Host("127.0.0.1", 10911), 431) == "7F00000100002A9F00000000000001AF"
    for host in (Host("127.0.0.1", 10911), Host("fe80::abcd", 1)):
        assert decode_offset_msg_id(offset_msg_id(host, 2**62)) == (host, 2**62)
        assert decode_offset_msg_id(offset_msg_id(host, 5).lower()) == (host, 5)
    for text in ("", "7F", "x" * 32, "7F00000100002A9F00000000000001A", " F00000100002A9F00000000000001AF", "é" * 32):
        with pytest.raises(InvalidArgument):
            decode_offset_msg_id(text)
    with pytest.raises(InvalidArgument):
        pack_host(Host("broker-a", 1))


GOOD = messages.message(1000, topic="TopicA", body=b"0123456789", properties=b"KEYS\x01a\x02")


def patched(position: int, value: bytes) -> bytes:
    data = bytearray(GOOD.encode())
    data[position : position + len(value)] = value
    return bytes(data)


def word(value: int) -> bytes:
    return struct.pack(">i", value)


@pytest.mark.parametrize(
    ("data", "problem"),
    [
        (b"", "no whole message"),
        (GOOD.encode()[:90], "no whole message"),
        (GOOD.encode()[:-1], "size is wrong"),
        (patched(0, word(-1)), "size is wrong"),
        (patched(0, word(0)), "size is wrong"),
        (patched(0, word(90)), "size is wrong"),
        (patched(0, word(2**31 - 1)), "size is wrong"),
        (patched(0, word(GOOD.size - 1)), "don't add up"),
        (patched(4, b"\0\0\0\0"), "wrong magic"),
        (patched(4, bytes.fromhex("cbd43194")), "wrong magic"),
        (patched(4, MAGIC_V2.to_bytes(4, "big")), "topic's length is wrong"),
        (patched(8, word(1)), "contradicts its CRC"),
        (patched(12, word(-1)), "queue id is negative"),
        (patched(28, struct.pack(">q", 1001)), "belongs elsewhere"),
        (patched(36, word(STORE_V6 | BORN_V6)), "is wrong|add up"),
        (patched(56, struct.pack(">q", -1)), "store timestamp"),
        (patched(56, struct.pack(">q", 2**62)), "store timestamp"),
        (patched(84, word(-1)), "body's length is wrong"),
        (patched(84, word(2**31 - 1)), "body's length is wrong"),
        (patched(84, word(9)), "topic's length is wrong|don't add up"),
        (patched(88, b"x"), "contradicts its CRC"),
        (patched(98, b"\xff"), "topic's length is wrong"),
        (patched(98, b"\x7f"), "topic's length is wrong"),
        (patched(99, b"\xc3\x28"), "not UTF-8"),
        (patched(99, b"      "), "invalid topic"),
        (patched(105, b"\xff\xff"), "don't add up"),
        (patched(105, b"\x7f\xff"), "don't add up"),
        (patched(106, b"\0"), "don't add up"),
    ],
)
def test_damage_names_file_and_byte(data, problem):
    with pytest.raises(CorruptFile, match=problem) as caught:
        decode_message(b"......" + data, 6, file="segment", file_offset=500, physical_offset=1000)
    assert (caught.value.file, caught.value.offset) == ("segment", 506)


def test_the_good_one_is_good():
    assert decode_message(GOOD.encode(), physical_offset=1000) == GOOD


def test_a_crc_is_checked_only_when_asked():
    assert decode_message(patched(8, word(1)), check_crc=False).body_crc == 1


def test_bytes_that_are_no_text_in_properties_do_no_harm():
    made = messages.message(properties=b"KEYS\x01\xff\xfe ok\x02\xc3\x01\xed\xa0\x80\x02")
    assert decode_message(made.encode()) == made
    assert made.index_keys == ("\ufffd\ufffd", "ok")
    assert made.encode() == made._replace().encode()


def test_lengths_without_room_are_refused():
    for arguments in ((0, 0xDAA320A7, 128, 0, 0), (0, MAGIC_V2, 32_768, 0, 0), (0, MAGIC_V2, 1, 0, 32_768)):
        with pytest.raises(InvalidArgument):
            message_size(*arguments)
