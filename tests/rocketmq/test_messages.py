"""Messages as answers, compared with a scan of the commit log. They come from the store or from archived segments, or
have a reason for their absence.
"""

from __future__ import annotations

import json
import zlib

import pytest

from tests.rocketmq import golden_store
from tests.rocketmq.answered import BEGIN_OF_LAST, same, settled, source_of, stored_bytes
from tests.rocketmq.archived_store import delete_segments, index_log, lookups, scan
from tiered_index import IndexReader
from tiered_index.errors import InvalidArgument
from tiered_index.format.archived import PIECE_BYTES
from tiered_index.rocketmq.archive.messages import RocketmqMessages
from tiered_index.rocketmq.log.segments import segment_name

# fields of our messages, and RocketMQ's names
FIELDS = {name: name for name in ("topic", "flag", "properties")} | {
    "queue_id": "queueId",
    "queue_offset": "queueOffset",
    "size": "totalSize",
    "sys_flag": "sysFlag",
    "body_crc": "bodyCrc",
    "born_ms": "bornTimestamp",
    "store_ms": "storeTimestamp",
    "reconsume_times": "reconsumeTimes",
    "prepared_offset": "preparedTransactionOffset",
    "msg_id": "msgId",
}


def test_every_golden_message_field_for_field(index, store):
    messages = index_log(index, store)
    source = source_of(index, store)
    expected = {one["offset"]: one for one in golden_store.expected()}
    seen = set()
    for topic, key in lookups(messages):
        answer = index.messages(topic, key, max_count=1000, source=source)
        assert (answer.status, answer.collisions) == ("complete", 0)
        assert stored_bytes(answer) == [m.encode() for m in scan(messages, topic, key)]
        assert {fetched.state for fetched in answer.messages} == {"local"}
        for fetched in answer.messages:
            shown = fetched.message.to_dict("hex")
            wanted = expected[shown["physical_offset"]]
            assert {ours: shown[ours] for ours in FIELDS} == {ours: wanted[theirs] for ours, theirs in FIELDS.items()}
            for name, theirs in (("born_host", "bornHost"), ("store_host", "storeHost")):
                assert shown[name] == str(golden_store.host(wanted[theirs]))
            for name, theirs in (("tags", "TAGS"), ("uniq_key", "UNIQ_KEY")):
                assert shown[name] == wanted["properties"].get(theirs)
            assert shown["keys"] == golden_store.keys(wanted)
            body = golden_store.body(wanted)
            assert shown["body"] == (zlib.decompress(body) if wanted["kind"] == "zlib" else body).hex()
            json.dumps(shown)
            seen.add(shown["physical_offset"])
    assert seen == {
        one["offset"] for one in golden_store.expected() if not golden_store.hidden(one) and golden_store.keys(one)
    }


def test_deleted_segments_answer_from_the_archive_with_one_request_a_message_and_one_a_table(index, store, storage):
    messages = settled(index, store)
    delete_segments(store, BEGIN_OF_LAST)
    with IndexReader.open(storage_backend=storage, block_cache_bytes=0, filter_after_probes=10**6) as reader:
        source = RocketmqMessages(store, reader.segment_archive)
        archived, tables = 0, storage.calls("get_suffix")
        for at in range(0, BEGIN_OF_LAST, golden_store.SEGMENT_BYTES):
            source.at(at)  # from here on, the source has the tables of all segments
        assert storage.calls("get_suffix") - tables == BEGIN_OF_LAST // golden_store.SEGMENT_BYTES
        for topic, key in lookups(messages):
            wanted = scan(messages, topic, key)
            cold = sum(m.physical_offset < BEGIN_OF_LAST for m in wanted)
            reader.query(topic, key)  # from here on, the reader has the directory
            before = storage.calls("get_range")
            answer = reader.messages(topic, key, max_count=1000, source=source)
            assert stored_bytes(answer) == [m.encode() for m in wanted]
            states = ["archived" if m.physical_offset < BEGIN_OF_LAST else "local" for m in wanted]
            assert [fetched.state for fetched in answer.messages] == states
            # one request reads neighbours in a segment
            assert answer.message_requests <= cold
            assert storage.calls("get_range") - before == answer.explain.requests == 1 + answer.message_requests
            if cold == 1:
                assert answer.message_requests == 1
                assert answer.message_bytes == PIECE_BYTES == golden_store.SEGMENT_BYTES
                archived += 1
        assert archived > 100
        assert storage.calls("get_suffix") - tables == BEGIN_OF_LAST // golden_store.SEGMENT_BYTES


def test_a_message_deleted_by_the_broker_before_it_was_archived_is_expired(index, store):
    messages = index_log(index, store)
    delete_segments(store, 32_768)
    states = set()
    for source, said in (
        (source_of(index, store), "no archived segment holds it"),
        (RocketmqMessages(store), "no archive was given"),
    ):
        for topic, key in lookups(messages):
            for fetched, wanted in zip(
                index.messages(topic, key, source=source).messages, scan(messages, topic, key), strict=True
            ):
                if wanted.physical_offset < 32_768:
                    assert (fetched.state, fetched.message) == ("expired", None)
                    assert fetched.problem == f"the broker has deleted this part of its commit log, and {said}"
                else:
                    assert fetched.state == "local"
                    assert same(fetched, wanted)
                states.add(fetched.state)
    assert states == {"expired", "local"}


@pytest.mark.parametrize(("gone", "said"), [(segment_name(32_768), "commit log offsets"), ("", "holds no segments")])
def test_what_the_log_lost_is_missing_not_expired(index, store, gone, said):
    messages = index_log(index, store)
    (store / "commitlog" / gone).rename(store / "gone")
    lost = next(m for m in messages if m.physical_offset >= 32_768 and m.is_visible and m.uniq_key)
    (fetched,) = index.messages(lost.topic, lost.uniq_key, source=source_of(index, store)).messages
    assert fetched.state == "missing"
    assert said in fetched.problem


def test_a_store_that_is_not_there_is_bad_usage(tmp_path):
    with pytest.raises(InvalidArgument, match="nothing"):
        RocketmqMessages(tmp_path / "nothing")
