"""Messages as answers, compared with a scan of the commit log: from the store or from archived segments, by key or by
place, within a budget, or with a reason for their absence.
"""

import shutil
import threading
from collections import Counter

import pytest

from tests.rocketmq import golden_store
from tests.rocketmq.archived_store import (
    BEGIN_OF_LAST,
    delete_segments,
    fetched_of,
    index_log,
    lay,
    lookups,
    one_message,
    open_index,
    put,
    same,
    scan,
    settled,
    source_of,
)
from tests.rocketmq.archived_store import stored_bytes as encoded
from tests.rocketmq.messages import NOW_MS, V6, joined, log, message, write_log
from tiered_index import Fetched, IndexReader
from tiered_index.base.call import remaining_s
from tiered_index.connectors.rocketmq.archive.archive import SegmentArchiver
from tiered_index.connectors.rocketmq.archive.messages import RocketmqMessages
from tiered_index.connectors.rocketmq.log import commitlog
from tiered_index.connectors.rocketmq.log.layout import STORE_V6
from tiered_index.connectors.rocketmq.log.message import show_body
from tiered_index.connectors.rocketmq.log.segments import segment_name
from tiered_index.errors import BudgetExceeded, InvalidArgument, ObjectRefused, StorageMisconfigured
from tiered_index.format.segments.archived import PIECE_BYTES
from tiered_index.service.read.answers.messages import MessagesResult


def test_an_archived_segment_that_is_refused_is_the_state_of_its_messages(index, store, storage):
    messages = settled(index, store)
    delete_segments(store, BEGIN_OF_LAST)
    with IndexReader.open(storage_backend=storage) as reader:
        source = RocketmqMessages(store, reader.segment_archive)
        storage.fail("get_range", times=None, name_prefix="segments/", error=ObjectRefused)
        seen = set()
        for topic, key in lookups(messages):
            answer = reader.messages(topic, key, max_count=1000, source=source)
            wanted = scan(messages, topic, key)
            states = ["refused" if m.physical_offset < BEGIN_OF_LAST else "local" for m in wanted]
            assert ([fetched.state for fetched in answer], answer.status) == (states, "complete")
            seen |= {*states}
        assert seen == {"refused", "local"}
        # a place alone is the whole question
        with pytest.raises(ObjectRefused):
            source.at(messages[0].physical_offset)


def test_deleted_segments_answer_from_the_archive_with_one_request_a_message_and_one_a_table(index, store, storage):
    messages = settled(index, store)
    delete_segments(store, BEGIN_OF_LAST)
    with IndexReader.open(storage_backend=storage, cache_slot_groups=False, filter_after_probes=10**6) as reader:
        source = RocketmqMessages(store, reader.segment_archive)
        archived, before = 0, storage.calls("get_range")
        for at in range(0, BEGIN_OF_LAST, golden_store.SEGMENT_BYTES):
            source.at(at)  # from here on, the source has the tables of all segments
        assert storage.calls("get_range") - before == 2 * BEGIN_OF_LAST // golden_store.SEGMENT_BYTES
        for topic, key in lookups(messages):
            wanted = scan(messages, topic, key)
            cold = sum(m.physical_offset < BEGIN_OF_LAST for m in wanted)
            reader.query(topic, key)  # from here on, the reader has the directory
            before = storage.calls("get_range")
            answer = reader.messages(topic, key, max_count=1000, source=source)
            assert encoded(answer) == [m.encode() for m in wanted]
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


def test_deleted_messages_are_expired_and_lost_ones_are_missing(index, store):
    """The broker deletes its oldest segments; one in the middle, or all, are gone for another reason."""
    messages = index_log(index, store)
    whole, store = store, shutil.copytree(store, store.parent / "deleted")
    delete_segments(store, 32_768)
    for source, said in (
        (source_of(index, store), "no archived segment holds it"),
        (RocketmqMessages(store), "no archive was given"),
    ):
        for topic, key in lookups(messages):
            messages_found = index.messages(topic, key, source=source).messages
            for fetched, wanted in zip(messages_found, scan(messages, topic, key), strict=True):
                if wanted.physical_offset < 32_768:
                    assert (fetched.state, fetched.message) == ("expired", None)
                    assert fetched.problem == f"the broker has deleted this part of its commit log, and {said}"
                else:
                    assert fetched.state == "local" and same(fetched, wanted)
    lost = next(m for m in messages if m.physical_offset >= 32_768 and m.is_visible and m.uniq_key)
    for gone, said in ((segment_name(32_768), "commit log offsets"), ("", "holds no segments")):
        (whole / "commitlog" / gone).rename(whole / f"gone {gone}")
        fetched = fetched_of(index, lost, source_of(index, whole))
        assert fetched.state == "missing" and said in fetched.problem


# keys of equal hash, several stores


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
        for stored_message in messages:
            put(index, stored_message)
        source, wanted = source_of(index, store), [m.encode() for m in scan(messages, "T", "order-BB")]
        answer = index.messages("T", "order-BB", source=source)
        assert (encoded(answer), answer.collisions, answer.status) == (wanted, 30, "complete")
        first = index.messages("T", "order-BB", max_count=3, source=source)
        rest = index.messages("T", "order-BB", cursor=first.cursor, source=source)
        assert (first.status, encoded(first) + encoded(rest)) == ("truncated", wanted)
        assert index.messages("T", "order-Aa", source=source).collisions == 10


def test_an_entry_of_another_topic_or_key_is_a_collision(tmp_path, index):
    store, wanted = one_message(tmp_path, index)
    put(index, wanted, ["stray"])
    index.put("Other", wanted.queue_id, wanted.uniq_key, wanted.physical_offset, wanted.size, wanted.store_ms)
    for topic, key in ((wanted.topic, "stray"), ("Other", wanted.uniq_key)):
        for source in (source_of(index, store), RocketmqMessages(None, index.segment_archive)):
            answer = index.messages(topic, key, source=source)
            assert (answer.messages, answer.collisions, answer.status) == ((), 1, "complete")


def test_two_stores_in_one_index_are_distinguished(tmp_path, index):
    stores = []
    for number in range(2):
        messages = log(3, first=10 * number)
        store = lay(tmp_path / f"store{number}", *messages)
        for stored_message in messages:
            put(index, stored_message)
        assert SegmentArchiver(index, f"broker-{number}", store / "commitlog").run_once() == 1
        stores.append((store, messages[1]))
    for number, (_, wanted) in enumerate(stores):
        for store, narrowed in ((None, None), *((store, None) for store, _ in stores), (None, f"broker-{number}")):
            source = RocketmqMessages(store, index.segment_archive, store_name=narrowed)
            answer = index.messages(wanted.topic, wanted.uniq_key, source=source)
            assert (encoded(answer), answer.collisions) == ([wanted.encode()], 0)
    other = RocketmqMessages(None, index.segment_archive, store_name="broker-1")
    assert fetched_of(index, stores[0][1], other).message is None


# by place


def test_ids_of_other_brokers_and_of_no_message(tmp_path, index, store):
    wanted = settled(index, store)[3]
    source = source_of(index, store)
    other = message(wanted.physical_offset).offset_msg_id  # the same offset in another broker's log
    fetched = source.by_msg_id(other)
    assert fetched.state == "missing"
    assert "was stored by 127.0.0.1:10911, not by 10.1.2.3:10911" in fetched.problem
    inside = source.at(wanted.physical_offset + 1)
    assert (inside.state, inside.message) == ("missing", None)
    assert "after the end of the log" in source.at(10**15).problem
    for bad in ("", "xyz", "7F00000100002A9F", "7F00000100002A9FFFFFFFFFFFFFFFFF"):
        with pytest.raises(InvalidArgument):
            source.by_msg_id(bad)
    with pytest.raises(InvalidArgument):
        source.at(-1)
    small = message(0, sys_flag=STORE_V6, properties=b"UNIQ_KEY\x01u\x02")
    write_log(tmp_path / "small" / "commitlog", 2_000, {0: small.encode()})
    fetched = RocketmqMessages(tmp_path / "small").by_msg_id(small.offset_msg_id)
    assert same(fetched, small) and len(small.offset_msg_id) == 56
    assert fetched.message.to_dict()["store_host"] == f"[{V6.ip}]:{V6.port}"


@pytest.mark.parametrize(
    ("body", "wanted", "shown"),
    [
        (b'{"a": [1, "\xc3\xa9"]}', "json", {"body": {"a": [1, "é"]}, "body_format": "json"}),
        (b"NaN", "json", {"body": "NaN", "body_format": "text"}),
        (b'{"x": -1e999}', "json", {"body": '{"x": -1e999}', "body_format": "text"}),
        (b"[" * 100_000, "json", {"body": "[" * 100_000, "body_format": "text"}),
        (b"\xff\xfe", "json", {"body": "fffe", "body_format": "hex"}),
        (b"a\0b", "text", {"body": "610062", "body_format": "hex"}),
        (b"plain", "hex", {"body": "706c61696e", "body_format": "hex"}),
        (b"plain", "none", {}),
    ],
)
def test_bodies_are_shown_as_asked_where_they_can_be(body, wanted, shown):
    assert show_body(message(body=body), wanted) == shown


# stores and storages that do not answer, or change during a lookup


def test_a_store_that_can_not_be_read_is_an_error_unless_the_archive_has_it(index, store, monkeypatch):
    messages = settled(index, store)
    wanted, late = (
        next(m for m in messages if m.physical_offset >= at and m.is_visible and m.uniq_key)
        for at in (0, BEGIN_OF_LAST)
    )
    source, listing = source_of(index, store), commitlog.list_segments

    def then_deleted(folder):
        listed = listing(folder)
        first.unlink(missing_ok=True)
        return listed

    first = store / "commitlog" / segment_name(0)
    whole = first.read_bytes()
    with monkeypatch.context() as deleting:
        deleting.setattr(commitlog, "list_segments", then_deleted)
        assert fetched_of(index, wanted, RocketmqMessages(store)).state == "expired"
        first.write_bytes(whole)
        fetched = fetched_of(index, wanted, source)
        assert fetched.state == "archived" and same(fetched, wanted)
    shutil.rmtree(store / "commitlog")
    (store / "commitlog").write_bytes(b"no folder")
    source = source_of(index, store)
    with pytest.raises(StorageMisconfigured, match="can't be read"):
        index.messages(late.topic, late.uniq_key, source=source)
    with pytest.raises(StorageMisconfigured):
        source.by_msg_id(late.offset_msg_id)
    fetched = fetched_of(index, wanted, source)
    assert fetched.state == "archived" and "can't be read" in fetched.problem


# budgets: reads of archived segments count as those of the index do, and the error has the messages that were found


@pytest.fixture
def spread(index, store):
    """A lookup with answers in several archived segments and in the store, and their offsets."""
    messages = settled(index, store)
    delete_segments(store, BEGIN_OF_LAST)

    def parts(lookup):
        offsets = [m.physical_offset for m in scan(messages, *lookup)]
        cold = {offset // 16_384 for offset in offsets if offset < BEGIN_OF_LAST}
        return len(cold), len(offsets) > sum(offset < BEGIN_OF_LAST for offset in offsets)

    lookup = max(lookups(messages), key=parts)
    return lookup, {m.physical_offset for m in scan(messages, *lookup)}


def look_up(storage, store, lookup, **limits):
    """Return the answer of a new reader, or its error, and the number of range requests to the storage."""
    with IndexReader.open(storage_backend=storage, refresh_interval_s=10**6, query_threads=1) as reader:
        before = storage.calls("get_range")
        source = RocketmqMessages(store, reader.segment_archive, threads=1)
        try:
            answer: MessagesResult | BudgetExceeded = reader.messages(*lookup, max_count=1000, source=source, **limits)
        except BudgetExceeded as error:
            answer = error
        return answer, storage.calls("get_range") - before


def check_sums(answer: MessagesResult) -> None:
    files = answer.explain.files
    assert sum(file.requests for file in files) == answer.explain.requests
    assert sum(file.bytes for file in files) == answer.explain.bytes
    assert sum(file.cost_usd for file in files) == pytest.approx(answer.explain.cost_usd)
    assert sum(file.requests for file in files if file.place == "messages") == answer.message_requests
    assert sum(file.bytes for file in files if file.place == "messages") == answer.message_bytes


def test_every_limit_holds_for_index_and_messages_together(spread, storage, store):
    lookup, wanted = spread
    whole, total = look_up(storage, store, lookup)
    assert whole.status == "complete"
    assert whole.explain.requests == total > whole.message_requests > 1
    check_sums(whole)
    matched = {file.file: file.matched for file in whole.explain.files if file.place == "messages"}
    assert matched == Counter(fetched.read_from for fetched in whole.messages if fetched.state == "archived")
    for limit in range(total + 1):
        for allow_partial in (False, True):
            answer, requests = look_up(storage, store, lookup, max_requests=limit, allow_partial=allow_partial)
            assert requests <= limit
            if limit == total:
                assert [fetched.to_dict() for fetched in answer.messages] == [
                    fetched.to_dict() for fetched in whole.messages
                ]
                continue
            assert isinstance(answer, BudgetExceeded) is not allow_partial
            if isinstance(answer, BudgetExceeded):
                assert "max_requests" in str(answer) and answer.failed == answer.result.failed
                answer = answer.result
            assert isinstance(answer, MessagesResult)
            assert (answer.status, answer.explain.requests) == ("partial", requests)
            assert answer.failed and all("max_requests" in report.error for report in answer.failed)
            check_sums(answer)
            # found messages are right, and the answer lists the others with the reason
            had = [fetched for fetched in answer.messages if fetched.message is not None]
            assert {fetched.message.physical_offset for fetched in had} <= wanted
            lacking = [fetched for fetched in answer.messages if fetched.message is None]
            assert all(fetched.state == "missing" and "max_requests" in fetched.problem for fetched in lacking)
            if limit >= total - whole.message_requests:
                assert len(answer.messages) == len(whole.messages)
                assert {fetched.item.offset for fetched in had} >= {
                    offset for offset in wanted if offset >= BEGIN_OF_LAST
                }
    again, _ = look_up(storage, store, lookup, max_bytes=whole.explain.bytes)
    assert again.status == "complete"
    short, _ = look_up(storage, store, lookup, max_bytes=whole.explain.bytes - 1)
    assert isinstance(short, BudgetExceeded) and "max_bytes" in str(short)
    assert short.result.explain.bytes < whole.explain.bytes


class Slow:
    """A source that answers the first call when the time is up. All its messages have other keys, so that there is
    always a next page.
    """

    calls = 0

    def fetch(self, items, topic, key):
        self.calls += 1
        while (left := remaining_s()) is not None and left > 0:
            threading.Event().wait(left)
        return [Fetched(item=item, state="local", carries_key=False) for item in items]


def test_the_time_is_of_all_pages_together(index):
    for number in range(200):
        index.put("t", 0, "k", number, 1, NOW_MS + number * 1000)
    # a busy machine may spend a short time before the first page
    for timeout_s in (0.5, 5.0, 50.0):
        source = Slow()
        with pytest.raises(BudgetExceeded, match="timeout_s") as caught:
            index.messages("t", "k", max_count=2, source=source, timeout_s=timeout_s)
        answer = caught.value.result
        if source.calls:
            break
    # the lookup does not read the second page
    assert (source.calls, answer.status, answer.collisions, answer.messages) == (1, "partial", 2, ())
    assert answer.failed
