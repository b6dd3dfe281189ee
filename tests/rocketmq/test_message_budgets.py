"""Lookups of messages within a budget: reads of archived segments count as those of the index do, and the error has the
messages that were found.
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Sequence

import pytest

from tests.rocketmq.answered import BEGIN_OF_LAST, settled
from tests.rocketmq.archived_store import delete_segments, lookups, scan
from tiered_index import Fetched, IndexReader
from tiered_index.clock import SystemClock
from tiered_index.errors import BudgetExceeded, InvalidArgument, StorageUnavailable
from tiered_index.rocketmq.archive.messages import RocketmqMessages, messages_by_id
from tiered_index.service.jobs.catalogs import merge_catalogs
from tiered_index.service.log.log import StorageLog
from tiered_index.service.read.messages import MessagesResult
from tiered_index.storage.context import remaining_s
from tiered_index.types import IndexItem


@pytest.fixture
def archived(index, store):
    """Return the store's messages, a lookup with answers in several archived segments, and one that also has a local
    answer.
    """
    messages = settled(index, store)
    delete_segments(store, BEGIN_OF_LAST)

    def spread(lookup):
        offsets = [m.physical_offset for m in scan(messages, *lookup)]
        cold = {offset // 16_384 for offset in offsets if offset < BEGIN_OF_LAST}
        return len(cold), len(offsets) > sum(offset < BEGIN_OF_LAST for offset in offsets)

    return messages, max(lookups(messages), key=spread)


def requests(storage):
    return storage.calls("get_range") + storage.calls("get_suffix")


def ask(storage, store, lookup, **limits):
    """Return the answer of a new reader, or its error, and the number of range requests to the storage."""
    with IndexReader.open(storage_backend=storage, refresh_interval_s=10**6, query_threads=1) as reader:
        before = requests(storage)
        source = RocketmqMessages(store, reader.segment_archive, threads=1)
        try:
            answer: MessagesResult | BudgetExceeded = reader.messages(*lookup, max_count=1000, source=source, **limits)
        except BudgetExceeded as error:
            answer = error
        return answer, requests(storage) - before


def check_sums(answer: MessagesResult) -> None:
    files = answer.explain.files
    assert sum(file.requests for file in files) == answer.explain.requests
    assert sum(file.bytes for file in files) == answer.explain.bytes
    assert sum(file.cost_usd for file in files) == pytest.approx(answer.explain.cost_usd)
    assert sum(file.requests for file in files if file.place == "messages") == answer.message_requests
    assert sum(file.bytes for file in files if file.place == "messages") == answer.message_bytes


def test_every_limit_holds_for_index_and_messages_together(archived, storage, store):
    messages, lookup = archived
    wanted = {m.physical_offset for m in scan(messages, *lookup)}
    whole, total = ask(storage, store, lookup)
    assert whole.status == "complete"
    assert whole.explain.requests == total > whole.message_requests > 1
    check_sums(whole)
    fetched = {file.file: file.matched for file in whole.explain.files if file.place == "messages"}
    assert fetched == Counter(one.read_from for one in whole.messages if one.state == "archived")
    for limit in range(total + 1):
        for allow_partial in (False, True):
            answer, requests = ask(storage, store, lookup, max_requests=limit, allow_partial=allow_partial)
            assert requests <= limit
            if limit == total:
                assert [one.to_dict() for one in answer.messages] == [one.to_dict() for one in whole.messages]
                continue
            assert isinstance(answer, BudgetExceeded) is not allow_partial
            if isinstance(answer, BudgetExceeded):
                assert "max_requests" in str(answer)
                assert answer.failed == answer.result.failed
                answer = answer.result
            assert isinstance(answer, MessagesResult)
            assert (answer.status, answer.explain.requests) == ("partial", requests)
            assert answer.failed
            assert all("max_requests" in report.error for report in answer.failed)
            check_sums(answer)
            # found messages are right, and the answer lists the others with the reason
            had = [one for one in answer.messages if one.message is not None]
            assert {one.message.physical_offset for one in had} <= wanted
            assert all(
                one.state == "missing" and "max_requests" in one.problem
                for one in answer.messages
                if one.message is None
            )
            if limit >= total - whole.message_requests:
                assert len(answer.messages) == len(whole.messages)
                assert {one.item.offset for one in had} >= {offset for offset in wanted if offset >= BEGIN_OF_LAST}


def test_the_read_of_a_catalog_is_a_request_for_messages(archived, storage, store):
    _, lookup = archived
    before, _ = ask(storage, store, lookup)
    log = StorageLog(storage, SystemClock())
    log.open()
    assert merge_catalogs(log) == 1
    after, _ = ask(storage, store, lookup)
    check_sums(after)
    assert after.message_requests == before.message_requests + 1
    assert {file.place for file in after.explain.files} == {file.place for file in before.explain.files}
    assert [file for file in after.explain.files if file.outcome == "refreshed"] == []


def test_bytes_of_messages_count_too(archived, storage, store):
    _, lookup = archived
    whole, _ = ask(storage, store, lookup)
    again, _ = ask(storage, store, lookup, max_bytes=whole.explain.bytes)
    assert again.status == "complete"
    short, _ = ask(storage, store, lookup, max_bytes=whole.explain.bytes - 1)
    assert isinstance(short, BudgetExceeded)
    assert short.result.explain.bytes < whole.explain.bytes
    assert "max_bytes" in str(short)


def test_a_storage_that_fails_is_no_spent_budget(archived, storage, store):
    _, lookup = archived
    storage.fail("get_range", times=10**6)
    with IndexReader.open(storage_backend=storage) as reader, pytest.raises(StorageUnavailable):
        reader.messages(*lookup, source=RocketmqMessages(store, reader.segment_archive), max_requests=50)


def test_an_invalid_bound_is_refused(index, store):
    with pytest.raises(InvalidArgument):
        index.messages("t", "k", source=RocketmqMessages(store), max_requests=-1)


class Slow:
    """A source that answers the first call when the time is up. All its messages have other keys, so that there is
    always a next page.
    """

    def __init__(self) -> None:
        self.calls = 0

    def fetch(self, items: Sequence[IndexItem], topic: str, key: str) -> list[Fetched]:
        self.calls += 1
        while (left := remaining_s()) is not None and left > 0:
            threading.Event().wait(left)
        return [Fetched(item=item, state="local", carries_key=False) for item in items]


@pytest.mark.parametrize("allow_partial", [False, True])
def test_the_time_is_of_all_pages_together(index, allow_partial):
    for number in range(200):
        index.put("t", 0, "k", number, 1, 1_700_000_000_000 + number * 1000)
    # a busy machine may spend a short time before the first page
    for timeout_s in (0.5, 5.0, 50.0):
        source = Slow()
        how = {"source": source, "timeout_s": timeout_s, "allow_partial": allow_partial}
        if allow_partial:
            answer = index.messages("t", "k", max_count=2, **how)
        else:
            with pytest.raises(BudgetExceeded, match="timeout_s") as caught:
                index.messages("t", "k", max_count=2, **how)
            answer = caught.value.result
        if source.calls:
            break
    # the lookup does not read the second page
    assert (source.calls, answer.status, answer.collisions, answer.messages) == (1, "partial", 2, ())
    assert answer.failed


def test_a_place_that_is_read_for_an_unknown_unique_key_is_within_the_limits(index, storage, store):
    message = next(one for one in settled(index, store) if one.physical_offset < BEGIN_OF_LAST and one.is_visible)
    msg_id = message.to_dict("none")["msg_id"]
    with IndexReader.open(storage_backend=storage, refresh_interval_s=10**6, query_threads=1) as reader:
        source = RocketmqMessages(None, reader.segment_archive, threads=1)
        # the first lookup opens the files' directories
        needed = [reader.messages(message.topic, msg_id, source=source).explain.requests for _ in range(2)][1]
        with pytest.raises(BudgetExceeded):
            messages_by_id(reader, source, msg_id, message.topic, max_requests=needed)
        (found,) = messages_by_id(reader, source, msg_id, message.topic, max_requests=needed + 10).messages
        assert found.message.physical_offset == message.physical_offset
