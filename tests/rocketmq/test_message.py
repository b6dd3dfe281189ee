"""One message: every kind decodes from its bytes to the same message. Every contradiction is damage, with file and
byte.
"""

import struct
import zlib

import pytest

from tests.rocketmq import messages
from tests.support.memory import traced_memory
from tests.support.stored_messages import compress
from tiered_index.connectors.rocketmq.log import layout
from tiered_index.connectors.rocketmq.log.columns import decode_index_columns
from tiered_index.connectors.rocketmq.log.layout import BORN_V6, STORE_V6, Host, index_keys, java_text, parse_properties
from tiered_index.connectors.rocketmq.log.message import decode_message, show_body
from tiered_index.connectors.rocketmq.log.segments import End
from tiered_index.errors import CorruptFile, InvalidArgument


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
        shown = show_body(messages.message(body=broken, sys_flag=flag), "text")
        assert (shown["body"], shown["body_format"], bool(shown["body_problem"])) == (broken.hex(), "hex", True)


def test_compression_of_old_clients_and_of_none():
    stored = zlib.compress(b"text")
    assert messages.message(body=stored, sys_flag=1).body() == b"text"
    assert messages.message(body=b"", sys_flag=1).body() == b""
    # the compression type counts only with the flag
    assert messages.message(body=stored, sys_flag=0x300).body() == stored
    with pytest.raises(CorruptFile, match="unknown compression type 5"):
        messages.message(body=stored, sys_flag=0x501).body()
    assert messages.message(sys_flag=0x501).compression == "unknown"


@pytest.mark.parametrize("name", ["zlib", "lz4", "zstd"])
def test_an_excerpt_decompresses_only_the_beginning(name):
    plain = b"text" * (1 << 22)
    stored, flag = compress(plain, name)
    bomb = messages.message(body=stored, sys_flag=flag)
    for body, most, size in ((stored, len(plain), len(plain)), (stored, 1000, 1001), (stored[:-1], len(plain), None)):
        with traced_memory() as traced:
            measured = messages.message(body=body, sys_flag=flag).plain_bytes(most)
            assert measured == size or (size is None and measured <= len(plain))
            shown = bomb.to_dict("excerpt", 10)
            assert traced()[1] < 3 << 20  # a small body that claims to be huge costs no memory
        assert (shown["body"], shown["body_format"]) == ("text" * 50, "text") and "body_problem" not in shown


def test_ids_of_messages():
    assert layout.offset_msg_id(Host("127.0.0.1", 10911), 431) == "7F00000100002A9F00000000000001AF"
    for host in (Host("127.0.0.1", 10911), Host("fe80::abcd", 1)):
        assert layout.decode_offset_msg_id(layout.offset_msg_id(host, 2**62)) == (host, 2**62)
        assert layout.decode_offset_msg_id(layout.offset_msg_id(host, 5).lower()) == (host, 5)
    for text in ("", "7F", "x" * 32, "7F00000100002A9F00000000000001A", " F00000100002A9F00000000000001AF", "é" * 32):
        with pytest.raises(InvalidArgument):
            layout.decode_offset_msg_id(text)
    with pytest.raises(InvalidArgument):
        layout.pack_host(Host("broker-a", 1))


GOOD = messages.message(1000, topic="TopicA", body=b"0123456789", properties=b"KEYS\x01a\x02")


def patched(position: int, value: bytes) -> bytes:
    data = bytearray(GOOD.encode())
    data[position : position + len(value)] = value
    return bytes(data)


def word(value: int) -> bytes:
    return struct.pack(">i", value)


DAMAGED = [
    (b"", "no whole message"),
    (GOOD.encode()[:90], "no whole message"),
    (GOOD.encode()[:-1], "size is wrong"),
    (patched(0, word(-1)), "size is wrong"),
    (patched(0, word(0)), "size is wrong"),
    (patched(0, word(90)), "size is wrong"),
    (patched(0, word(GOOD.size - 1)), "don't add up"),
    (patched(4, b"\0\0\0\0"), "wrong magic"),
    (patched(4, bytes.fromhex("cbd43194")), "wrong magic"),
    (patched(4, layout.MAGIC_V2.to_bytes(4, "big")), "topic's length is wrong"),
    (patched(8, word(1)), "contradicts its CRC"),
    (patched(12, word(-1)), "queue id is negative"),
    (patched(28, struct.pack(">q", 1001)), "belongs elsewhere"),
    (patched(36, word(STORE_V6 | BORN_V6)), "is wrong|add up|too short for its host addresses"),
    (patched(56, struct.pack(">q", 2**62)), "store timestamp"),
    (patched(84, word(-1)), "body's length is wrong"),
    (patched(84, word(2**31 - 1)), "body's length is wrong"),
    (patched(84, word(9)), "topic's length is wrong|don't add up"),
    (patched(88, b"x"), "contradicts its CRC"),
    (patched(98, b"\x7f"), "topic's length is wrong"),
    (patched(99, b"\xc3\x28"), "not UTF-8"),
    (patched(99, b"      "), "invalid topic"),
    (patched(105, b"\xff\xff"), "don't add up"),
    (patched(106, b"\0"), "don't add up"),
]


@pytest.mark.parametrize(("data", "problem"), DAMAGED)
def test_damage_names_file_and_byte(data, problem):
    with pytest.raises(CorruptFile, match=problem) as caught:
        decode_message(b"......" + data, 6, file="segment", file_offset=500, physical_offset=1000)
    assert (caught.value.file, caught.value.offset) == ("segment", 506)


BEFORE = messages.log(5, 1000 - 5 * messages.keyed(0, 0).size)
BEHIND = messages.log(3, 1000 + GOOD.size)
# zeros and a blank end a read
ENDS = (patched(0, word(0)), patched(4, bytes.fromhex("cbd43194")))


@pytest.mark.parametrize(("data", "problem"), [case for case in DAMAGED if len(case[0]) == GOOD.size])
def test_columns_stop_before_damage_and_say_what_a_single_decode_says(data, problem):
    begin = BEFORE[0].physical_offset
    raw = messages.joined(BEFORE) + data + messages.joined(BEHIND)
    batch = decode_index_columns(raw, begin, check_crc=True, file="segment", file_offset=begin)
    assert (batch.messages, batch.end) == (5, 1000)
    assert sorted(set(batch.columns.column("offset").to_pylist())) == [message.physical_offset for message in BEFORE]
    if data not in ENDS:
        assert (batch.state, batch.damage.file, batch.damage.offset) == (End.DAMAGED, "segment", 1000)
        if problem not in ("size is wrong", "wrong magic"):  # the walk finds those
            with pytest.raises(CorruptFile) as caught:
                decode_message(raw, 1000 - begin, file="segment", file_offset=begin, physical_offset=1000)
            assert str(caught.value) == str(batch.damage)


def test_a_crc_is_checked_only_when_asked():
    assert decode_message(patched(8, word(1)), check_crc=False).body_crc == 1


def test_bytes_that_are_no_text_in_properties_do_no_harm():
    made = messages.message(properties=b"KEYS\x01\xff\xfe ok\x02\xc3\x01\xed\xa0\x80\x02")
    assert decode_message(made.encode()) == made
    assert made.index_keys == ("\ufffd\ufffd", "ok")
    assert made.encode() == made._replace().encode()


# properties, keys and text, as the broker's Java code reads them


@pytest.mark.parametrize(
    ("stored", "utf16"),
    [  # the results of `new String(bytes, UTF_8)` of OpenJDK 17
        ("c3a9f09f9a80", "00e9d83dde80"),
        ("eda080", "fffd"),
        ("edb8f4f041e0e0", "fffdfffdfffd0041fffdfffd"),
        ("c09ff0f4eda0", "fffdfffdfffdfffdfffd"),
        ("f0edb8c39f80edc3", "fffdfffd00dffffdfffdfffd"),
        ("ffe48041edb8f0", "fffdfffd0041fffdfffd"),
    ],
)
def test_text_equals_java(stored, utf16):
    assert java_text(bytes.fromhex(stored)) == bytes.fromhex(utf16).decode("utf-16-be")


@pytest.mark.parametrize(
    ("text", "properties"),
    [
        ("", {}),
        ("no separators at all", {}),
        ("KEYS\x01a b", {"KEYS": "a b"}),  # older clients leave out the last separator
        ("KEYS\x01a\x02TAGS\x01t\x02", {"KEYS": "a", "TAGS": "t"}),
        ("KEYS\x01\x02TAGS\x01t\x02", {"TAGS": "t"}),
        ("\x01value\x02name\x02\x02\x01\x02a\x01b\x02", {"a": "b"}),
        ("a\x01b\x01c\x02", {"a": "b\x01c"}),
        ("a\x01first\x02b\x01x\x02a\x01last\x02a\x01\x02", {"a": "last", "b": "x"}),
        ("name only\x02a\x01b", {"a": "b"}),
    ],
)
def test_properties(text, properties):
    assert parse_properties(text) == properties


@pytest.mark.parametrize(
    ("properties", "keys"),
    [
        ({}, ()),
        ({"KEYS": "a b a"}, ("a", "b")),
        ({"KEYS": "  a   b ", "UNIQ_KEY": "u"}, ("u", "a", "b")),
        ({"KEYS": "u x", "UNIQ_KEY": "u"}, ("u", "x")),
        ({"KEYS": "  "}, ()),
        ({"KEYS": "a\tb\u00a0c"}, ("a\tb\u00a0c",)),
    ],
)
def test_keys(properties, keys):
    assert index_keys(properties) == keys
