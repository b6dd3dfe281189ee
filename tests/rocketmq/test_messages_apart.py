"""Keys of equal hash, and two stores in one index: an answer has only its own messages."""

from __future__ import annotations

from tests.rocketmq.answered import lay, one_message, source_of, stored_bytes
from tests.rocketmq.archived_store import open_index, put, scan
from tests.rocketmq.messages import NOW_MS, joined, log, message, write_log
from tiered_index.rocketmq.archive.archive import SegmentArchiver
from tiered_index.rocketmq.archive.messages import RocketmqMessages


def test_keys_of_equal_hash_are_distinguished(tmp_path, storage):
    """Preset rocketmq has no fingerprint: a lookup of either key finds the entries of both."""
    store = tmp_path / "small"
    messages, offset = [], 0
    for number in range(40):
        properties = f"KEYS\x01order-{('Aa', 'BB')[number % 4 == 3]}\x02".encode()
        messages.append(message(offset, topic="T", properties=properties, store_ms=NOW_MS + 1000 * number))
        offset += messages[-1].size
    write_log(store / "commitlog", 20_000, {0: joined(messages)})
    with open_index(tmp_path / "root", storage, preset="rocketmq", items=1_000) as index:
        for one in messages:
            put(index, one)
        index.seal()
        index.run_lifecycle()
        source = source_of(index, store)
        assert len(index.query("T", "order-BB")) == 40
        answer = index.messages("T", "order-BB", source=source)
        assert stored_bytes(answer) == [m.encode() for m in scan(messages, "T", "order-BB")]
        assert (len(answer), answer.collisions, answer.status) == (10, 30, "complete")
        first = index.messages("T", "order-BB", max_count=3, source=source)
        assert stored_bytes(first) == [m.encode() for m in scan(messages, "T", "order-BB")[:3]]
        assert first.status == "truncated"
        rest = index.messages("T", "order-BB", cursor=first.cursor, source=source)
        assert stored_bytes(rest) == [m.encode() for m in scan(messages, "T", "order-BB")[3:]]
        assert index.messages("T", "order-Aa", source=source).collisions == 10


def test_an_entry_of_another_topic_is_a_collision(tmp_path, index):
    store, wanted = one_message(tmp_path, index)
    put(index, wanted, ["stray"])
    index.put("Other", wanted.queue_id, wanted.uniq_key, wanted.physical_offset, wanted.size, wanted.store_ms)
    for topic, key in ((wanted.topic, "stray"), ("Other", wanted.uniq_key)):
        for source in (source_of(index, store), RocketmqMessages(None, index.segment_archive)):
            answer = index.messages(topic, key, source=source)
            assert (answer.messages, answer.collisions, answer.status) == ((), 1, "complete")


# several stores


def test_two_stores_in_one_index_are_distinguished(tmp_path, index):
    stores = []
    for number in range(2):
        messages = log(3, first=10 * number)
        store = lay(tmp_path / f"store{number}", *messages)
        for one in messages:
            put(index, one)
        assert SegmentArchiver(index, f"broker-{number}", store / "commitlog").run_once() == 1
        stores.append((store, messages))
    for archive_of, (_store, messages) in enumerate(stores):
        places = [(None, None), (stores[0][0], None), (stores[1][0], None), (None, f"broker-{archive_of}")]
        for store, narrowed in places:
            source = RocketmqMessages(store, index.segment_archive, store_name=narrowed)
            for wanted in messages:
                answer = index.messages(wanted.topic, wanted.uniq_key, source=source)
                assert stored_bytes(answer) == [wanted.encode()]
                assert answer.collisions == 0
    other = RocketmqMessages(None, index.segment_archive, store_name="broker-1")
    wanted = stores[0][1][0]
    answer = index.messages(wanted.topic, wanted.uniq_key, source=other)
    assert all(fetched.message is None for fetched in answer.messages)
