"""Decoding many messages at once equals decoding each by itself. It stops exactly before the first invalid one."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.rocketmq import messages
from tiered_index.connectors.rocketmq.log.columns import ALL_TOPICS, Selection, decode_index_columns
from tiered_index.connectors.rocketmq.log.layout import (
    BORN_V6,
    STORE_V6,
    TRANSACTION_MASK,
    TRANSACTION_PREPARED,
    tag_key,
)
from tiered_index.connectors.rocketmq.log.segments import End

NAMES = [b"KEYS\x01", b"UNIQ_KEY\x01", b"KEYS", b"UNIQ_KEY", b"TAGS\x01t\x02", b"TAGS\x01", b"KEYS\x01T#t\x02"]
KEYS = b"a|b|order-1|order-2|0123456789abcdefghi|0123456789-bcdefghi|01234567".split(b"|")
ENDS = [b"\x01", b"\x02", b"\x02", b" ", b"  "]
STRANGE = ["é".encode(), "🚀".encode(), b"\xff", b"\xed\xa0\x80", b"\0"]
PROPERTIES = st.lists(st.sampled_from(NAMES + ENDS + KEYS + STRANGE), max_size=14).map(b"".join)
FIELDS = st.fixed_dictionaries(
    {
        "topic": st.sampled_from(["A", "TopicB", "主题", "t" * 128, "TBW102", "rmq_sys_a", "RMQ_SYS_TRANS_HALF_TOPIC"]),
        "queue_id": st.integers(0, 9),
        "properties": PROPERTIES,
        "body": st.sampled_from([b"", b"body", b"\xda\xa3\x20\xa7" * 30]),
        "sys_flag": st.sampled_from([0, 0, 0, 4, 8, 12, BORN_V6, STORE_V6, BORN_V6 | STORE_V6 | 8]),
        "store_ms": st.integers(0, 2**40),
    }
)


def following(fields, start):
    made = []
    for changes in fields:
        made.append(messages.message(start, **changes))
        start += made[-1].size
    return made


SELECTIONS = st.one_of(
    st.just(ALL_TOPICS),
    st.builds(
        Selection,
        st.sampled_from([(), ("*",), ("Topic*", "主题"), ("TBW102",)]),
        st.sampled_from([(), ("A",), ("?",), ("*",)]),
        st.booleans(),
        st.booleans(),
    ),
)


def shown(message, selection):
    is_prepared = message.sys_flag & TRANSACTION_MASK == TRANSACTION_PREPARED
    return message.is_visible or (selection.prepared and is_prepared)


def rows_of(made, selection=ALL_TOPICS):
    return [
        (m.topic, m.queue_id, key, m.physical_offset, m.size, m.store_ms)
        for m in made
        if shown(m, selection) and selection.takes(m.topic)
        for key in dict.fromkeys([*m.index_keys, *([tag_key(m.tags)] if selection.tags and m.tags else [])])
    ]


def rows(batch):
    return list(zip(*(column.to_pylist() for column in batch.columns.columns), strict=True))


@given(st.lists(FIELDS, max_size=25), st.integers(0, 2**50), SELECTIONS)
def test_equals_decoding_one_by_one(fields, start, selection):
    made = following(fields, start)
    raw = messages.joined(made)
    batch = decode_index_columns(raw, start, check_crc=True, selection=selection)
    assert sorted(rows(batch)) == sorted(rows_of(made, selection))
    assert (batch.messages, batch.end, batch.state, batch.damage) == (len(made), start + len(raw), End.SEGMENT, None)
    assert batch.hidden == sum(not shown(message, selection) for message in made)
    assert batch.left_out == sum(shown(message, selection) and not selection.takes(message.topic) for message in made)
    assert batch.last_store_ms == (made[-1].store_ms if made else None)
    positions = batch.columns.column("offset").to_pylist()
    assert positions == sorted(positions)


def test_rocketmqs_own_topics_are_not_selected_by_default():
    """The rule is that of RocketMQ's `MessageStoreTopicFilter`, except for the names of cluster and broker."""
    own = "TBW102 SCHEDULE_TOPIC_XXXX BenchmarkTest RMQ_SYS_TRANS_HALF_TOPIC RMQ_SYS_TRACE_TOPIC SELF_TEST_TOPIC"
    own += " RMQ_SYS_TRANS_OP_HALF_TOPIC TRANS_CHECK_MAX_TIME_TOPIC OFFSET_MOVED_EVENT CHECKPOINT_TOPIC"
    own += " rmq_sys_wheel_timer rmq_sys_REVIVE_LOG_DefaultCluster %LMQ%queue"
    others = ["orders", "RMQ_SYS_orders", "%RETRY%group", "%DLQ%group"]
    assert [topic for topic in [*own.split(), *others] if Selection().takes(topic)] == others
    assert [topic for topic in own.split() if Selection(prepared=True).takes(topic)] == ["RMQ_SYS_TRANS_HALF_TOPIC"]
    chosen = Selection(topics=("order*", "TBW102"), exclude=("order-test",))
    assert [t for t in ["orders", "order-test", "Orders", "TBW102"] if chosen.takes(t)] == ["orders", "TBW102"]


def test_more_messages_than_a_block_make_no_difference():
    made = messages.log(17_000)
    halves = [
        decode_index_columns(messages.joined(part), part[0].physical_offset) for part in (made[:9_000], made[9_000:])
    ]
    assert rows(decode_index_columns(messages.joined(made), 0)) == [row for half in halves for row in rows(half)]


def test_very_many_keys_and_few_that_differ_in_one_byte():
    for keys in ([f"k{i % 3000}" for i in range(5000)], ["order-100", "order-101", "order-10000000", "order-10000001"]):
        made = messages.message(0, properties=f"KEYS\x01{' '.join(keys)}\x02".encode())
        after = messages.message(made.size, properties=b"KEYS\x01k1\x02")
        batch = decode_index_columns(messages.joined([made, after]), 0)
        assert batch.columns.column("key").to_pylist() == [*dict.fromkeys(keys), "k1"]


def test_keys_with_invalid_utf8_are_counted_and_replaced_as_by_the_broker():
    made = messages.message(0, properties=b"KEYS\x01\xff ok \xfe\x02UNIQ_KEY\x01\xed\xa0\x80\x02")
    batch = decode_index_columns(made.encode(), 0)
    assert batch.columns.column("key").to_pylist() == ["\ufffd", "ok"]
    assert batch.replaced_keys == 3
    assert rows(batch) == rows_of([made])


@pytest.mark.parametrize(
    ("tail", "segment_bytes", "state"),
    [
        (b"", 0, End.SEGMENT),
        (b"", 1, End.MORE),
        (messages.blank(8), 8, End.SEGMENT),
        (messages.blank(500)[:8], 500, End.SEGMENT),
        (messages.blank(500)[:7], 500, End.MORE),
        (messages.blank(500), 501, End.DAMAGED),
        (b"\0" * 7, 7, End.DAMAGED),
        (b"\0" * 7, 90, End.MORE),
        (b"\0" * 300, 1000, End.OPEN),
        (messages.message().encode()[:90], 90, End.DAMAGED),
        (messages.message().encode()[:90], 1000, End.MORE),
        (b"\0\0\0\x5b" + b"\0" * 200, 1000, End.DAMAGED),
    ],
)
def test_bytes_after_the_last_message(tail, segment_bytes, state):
    made = messages.log(2)
    length = sum(message.size for message in made)
    batch = decode_index_columns(messages.joined(made) + tail, 0, segment_bytes=length + segment_bytes)
    assert (batch.messages, batch.end, batch.state) == (2, length, state)
    assert (batch.damage is not None) is (state is End.DAMAGED)
