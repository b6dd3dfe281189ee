"""Messages by their place, with offset message ids, local and archived; and the display of bodies."""

from __future__ import annotations

import os

import pytest

from tests.rocketmq.answered import BEGIN_OF_LAST, lay_archived, same, settled, source_of
from tests.rocketmq.messages import V6, keyed, message, write_log
from tests.support.stored_messages import compress
from tiered_index.errors import InvalidArgument
from tiered_index.format.archived import PIECE_BYTES
from tiered_index.rocketmq.archive.messages import RocketmqMessages
from tiered_index.rocketmq.log.layout import STORE_V6
from tiered_index.rocketmq.log.message import show_body


def test_every_message_by_its_id_local_and_archived(index, store):
    messages = settled(index, store)
    for source, state in (
        (RocketmqMessages(store), "local"),
        (RocketmqMessages(None, index.segment_archive), "archived"),
    ):
        for wanted in messages:
            fetched = source.by_msg_id(wanted.offset_msg_id)
            if state == "archived" and wanted.physical_offset >= BEGIN_OF_LAST:
                assert (fetched.state, fetched.message) == ("missing", None)
                assert fetched.problem == "no archived segment holds it, and no store directory was given"
                continue
            assert (fetched.state, fetched.item) == (state, None)
            assert same(fetched, wanted)
            assert same(source.at(wanted.physical_offset), wanted)
            assert same(source.at(wanted.physical_offset, wanted.size), wanted)


def test_a_large_archived_message_of_unknown_size_takes_two_requests(tmp_path, index, storage):
    big = message(0, body=os.urandom(100_000))
    source = lay_archived(index, tmp_path / "big", big, keyed(big.size, 1), segment_bytes=200_000)
    source.at(0)  # from here on, the source has the table of its segment
    before = storage.calls("get_range")
    fetched = source.at(0)
    assert (fetched.state, fetched.message) == ("archived", big)
    assert storage.calls("get_range") - before == fetched.requests == 2
    # reads whole pieces, and the first one twice
    assert fetched.bytes == (1 << 14) + -(-big.size // PIECE_BYTES) * PIECE_BYTES
    assert source.at(big.size).requests == 1


def test_ids_of_other_brokers_and_of_no_message(index, store):
    messages = settled(index, store)
    wanted = messages[3]
    source = source_of(index, store)
    other = message(wanted.physical_offset).offset_msg_id  # the same offset in another broker's log
    fetched = source.by_msg_id(other)
    assert fetched.state == "missing"
    assert "was stored by 127.0.0.1:10911, not by 10.1.2.3:10911" in fetched.problem
    inside = source.at(wanted.physical_offset + 1)
    assert (inside.state, inside.message) == ("missing", None)
    far = source.at(10**15)
    assert "after the end of the log" in far.problem
    for bad in ("", "xyz", "7F00000100002A9F", "7F00000100002A9FFFFFFFFFFFFFFFFF"):
        with pytest.raises(InvalidArgument):
            source.by_msg_id(bad)
    with pytest.raises(InvalidArgument):
        source.at(-1)


def test_ids_of_ipv6_brokers(tmp_path):
    one = message(0, sys_flag=STORE_V6, properties=b"UNIQ_KEY\x01u\x02")
    write_log(tmp_path / "small" / "commitlog", 2_000, {0: one.encode()})
    fetched = RocketmqMessages(tmp_path / "small").by_msg_id(one.offset_msg_id)
    assert len(one.offset_msg_id) == 56
    assert same(fetched, one)
    assert fetched.message.to_dict()["store_host"] == f"[{V6.ip}]:{V6.port}"


# bodies


@pytest.mark.parametrize(
    ("body", "wanted", "shown"),
    [
        (b'{"a": [1, "\xc3\xa9"]}', "json", {"body": {"a": [1, "é"]}, "body_format": "json"}),
        (b'{"a": 1}', "text", {"body": '{"a": 1}', "body_format": "text"}),
        (b"plain", "json", {"body": "plain", "body_format": "text"}),
        (b"NaN", "json", {"body": "NaN", "body_format": "text"}),
        (b'{"x": 1e308}', "json", {"body": {"x": 1e308}, "body_format": "json"}),
        (b'{"x": -1e999}', "json", {"body": '{"x": -1e999}', "body_format": "text"}),
        (b"[" * 100_000, "json", {"body": "[" * 100_000, "body_format": "text"}),
        (b"\xff\xfe", "json", {"body": "fffe", "body_format": "hex"}),
        (b"a\0b", "text", {"body": "610062", "body_format": "hex"}),
        (b"plain", "hex", {"body": "706c61696e", "body_format": "hex"}),
        (b"", "text", {"body": "", "body_format": "text"}),
        (b"plain", "none", {}),
    ],
)
def test_bodies_are_shown_as_asked_where_they_can_be(body, wanted, shown):
    assert show_body(message(body=body), wanted) == shown


@pytest.mark.parametrize("codec", ["zlib", "lz4", "zstd"])
def test_compressed_bodies_are_shown_plain(codec):
    packed, flag = compress(b"text " * 100, codec)
    one = message(body=packed, sys_flag=flag)
    assert (one.to_dict()["body"], one.to_dict()["compression"]) == ("text " * 100, codec)
    broken = show_body(message(body=packed[:-5], sys_flag=flag), "text")
    assert (broken["body"], broken["body_format"]) == (packed[:-5].hex(), "hex")
    assert broken["body_problem"]
