"""A rewritten place: the present message is the answer, even if the entry of the earlier one is newer."""

from __future__ import annotations

import pytest

from tests.rocketmq.answered import lay, lay_archived, source_of, stored_bytes
from tests.rocketmq.archived_store import put
from tests.rocketmq.followed import Followed, cut_log, rounds
from tests.rocketmq.messages import NOW_MS, message
from tiered_index.rocketmq.archive.messages import RocketmqMessages
from tiered_index.rocketmq.log.message import Message

KEY = "order-4711"
PROPERTIES = f"KEYS\x01{KEY}\x02".encode()


def there(offset: int, late_s: int, body: bytes = b"body") -> Message:
    return message(offset, properties=PROPERTIES, body=body, store_ms=NOW_MS + 1000 * late_s)


def ask(index, source, **options):
    return index.messages("TopicA", KEY, source=source, **options)


def entries(index, *messages: Message) -> None:
    for one in messages:
        put(index, one)


@pytest.fixture(params=["local", "archived"])
def place(request, tmp_path, index):
    """Return a function that makes a log with some messages, and its source: the store, or the archived segment."""

    def laid(*messages: Message):
        if request.param == "local":
            return RocketmqMessages(lay(tmp_path / "laid", *messages))
        return lay_archived(index, tmp_path / "laid", *messages)

    return laid


@pytest.mark.parametrize("body", [b"body", b"", b"a longer body " * 9])
@pytest.mark.parametrize("late_s", [1, 2, 3_000])
def test_the_message_of_an_earlier_time_is_found(index, place, late_s, body):
    first = there(0, 0)
    now = there(first.size, -late_s - 5, body)
    before = there(first.size, late_s)
    entries(index, first, before, now)
    answer = ask(index, place(first, now))
    assert stored_bytes(answer) == [first.encode(), now.encode()]  # in answer order
    seconds = [fetched.item.timestamp_ms // 1000 for fetched in answer.messages]
    assert seconds == [first.store_ms // 1000, now.store_ms // 1000]
    assert (answer.status, answer.collisions) == ("complete", 0)


def test_a_range_that_the_message_is_not_of_has_none(index, place):
    before, now = there(0, 100), there(0, 0)
    entries(index, before, now)
    source = place(now)
    (fetched,) = ask(index, source, begin_ms=NOW_MS + 1_000).messages
    assert (fetched.state, fetched.message) == ("missing", None)
    assert "another message is there" in fetched.problem
    assert stored_bytes(ask(index, source, end_ms=NOW_MS)) == [now.encode()]
    assert stored_bytes(ask(index, source, begin_ms=NOW_MS)) == [now.encode()]


def test_a_message_without_an_entry_is_missing(index, place):
    """A damaged store time makes the message look like another one."""
    put(index, there(0, 100))
    put(index, there(500, 0))
    (fetched, other) = ask(index, place(there(0, 0))).messages
    assert (fetched.state, fetched.message, other.state) == ("missing", None, "missing")


def test_another_size_in_the_same_second_is_found_with_a_remark(index, place):
    """Of two entries of one place and second, the index keeps one."""
    before, now = there(0, 0, b"long body"), there(0, 0)
    entries(index, before, now)
    (fetched,) = ask(index, place(now)).messages
    assert fetched.message.encode() == now.encode()
    assert "another message is there" in fetched.problem


def test_an_archived_copy_that_agrees_comes_before_a_local_one_that_does_not(tmp_path, index):
    before, now = there(0, 0, b"long body"), there(0, 0)
    put(index, before)
    lay_archived(index, tmp_path / "laid", before)
    (fetched,) = ask(index, source_of(index, lay(tmp_path / "laid", now))).messages
    assert (fetched.state, fetched.message.encode()) == ("archived", before.encode())


def test_messages_of_other_keys_and_queues_are_not_returned(index, place):
    entries(index, there(0, 100), there(0, 0))
    other = message(0, properties=b"KEYS\x01order-4712\x02", store_ms=NOW_MS)
    (fetched,) = ask(index, place(other)).messages
    assert (fetched.state, fetched.message) == ("missing", None)


def test_a_tail_that_was_rewritten_under_a_clock_that_was_set_back(tmp_path):
    made = Followed(tmp_path)
    made.write(10)
    (offset,) = made.write(1, keys=KEY, body=b"before")
    dispatcher = made.dispatcher(skip_missing=True)
    dispatcher.run_once()
    cut_log(made.path, offset)
    made.writer = made.open_writer()
    made.number -= 601  # 12 seconds earlier: messages are a fiftieth of a second apart
    assert made.write(1, keys=KEY, body=b"now") == [offset]
    assert [loss.kind for loss in dispatcher.run_once().losses] == ["rewritten"]
    list(rounds(dispatcher))
    answers = [made.index.messages(topic, KEY, source=RocketmqMessages(made.path)) for topic in ("orders", "payments")]
    found = [fetched for answer in answers for fetched in answer.messages if fetched.message is not None]
    assert [fetched.message.body() for fetched in found] == [b"now"]
    made.index.abandon()
