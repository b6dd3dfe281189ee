"""A rewritten log: each present message is an answer once, by its own entry and in its order, however pages cut it."""

from collections.abc import Iterable
from dataclasses import dataclass, field
from random import Random

import pytest

from tests.rocketmq.archived_store import lay, lay_archived, put, source_of
from tests.rocketmq.messages import NOW_MS, message
from tiered_index import Fetched, IndexService
from tiered_index.base.units import MAX_TIMESTAMP_MS
from tiered_index.connectors.rocketmq.archive.messages import RocketmqMessages
from tiered_index.connectors.rocketmq.log.message import Message

PAGES = [1, 2, 3, 5, 7, 64]
KEY = "order-4711"
PROPERTIES = f"KEYS\x01{KEY}\x02".encode()
NOW_S = NOW_MS // 1000


def there(offset: int, second: int, body: bytes = b"body", **fields) -> Message:
    return message(
        offset, **{"properties": PROPERTIES, "body": body, "store_ms": NOW_MS + 1000 * second + 500, **fields}
    )


def pages(index, source, max_count, **options) -> tuple[list[Fetched], int]:
    """Return the messages and collisions of all pages, which must be complete and come to an end."""
    messages: list[Fetched] = []
    collisions, cursor = 0, None
    for _ in range(1_000):
        answer = index.messages("TopicA", KEY, max_count=max_count, cursor=cursor, source=source, **options)
        assert len(answer) <= max_count
        messages += answer.messages
        collisions += answer.collisions
        cursor = answer.cursor
        assert answer.status == ("complete" if cursor is None else "truncated")
        if cursor is None:
            return messages, collisions
        assert len(answer) == max_count
    raise AssertionError("no end")


def encoded(fetched_messages: Iterable[Fetched]) -> list[bytes | None]:
    return [fetched.message.encode() if fetched.message else None for fetched in fetched_messages]


def order(fetched: Fetched) -> tuple[int, int, int]:
    assert fetched.item is not None
    return -(fetched.item.timestamp_ms // 1000), -fetched.item.offset, fetched.item.queue_id


@dataclass
class Rewritten:
    """A log whose places were rewritten several times, and all its entries, some of messages that are gone."""

    live: list[Message] = field(default_factory=list)
    seconds: dict[int, set[int]] = field(default_factory=dict)
    """Seconds of the entries of each place."""

    @classmethod
    def make(cls, random: Random, index: IndexService, count: int = 14) -> "Rewritten":
        made, written, offset = cls(), [], 0
        for number in range(count):
            rewritten = random.random() < 0.7
            body = b"body" * random.randint(1, 3)
            # a message of another key with an equal hash, for the index
            other = {"properties": b"KEYS\x01order-4712\x02"} if random.random() < 0.2 else {}
            made.live.append(there(offset, random.choice([number, -number, 30 + number, number]), body, **other))
            writings = [made.live[-1]] if random.random() < 0.9 else []
            for _ in range(random.choice([1, 1, 2, 3]) if rewritten else 0):
                near = (made.live[-1].store_ms - NOW_MS) // 1000 + random.choice([-1, 0, 1])
                second = random.choice([near, random.randint(-20, 60), number + 20])
                writings.append(there(offset, second, b"body" * random.randint(1, 3)))
            made.seconds[offset] = {record.store_ms // 1000 for record in writings}
            written += writings
            offset += made.live[-1].size
        random.shuffle(written)
        for number, record in enumerate(written):
            put(index, record, [KEY])
            if number == len(written) // 2 and random.random() < 0.5:
                index.seal()
                index.run_lifecycle()
        return made

    def expected(self, begin: int, end: int) -> list[Message]:
        """Return the messages whose own entries are in a range of seconds, in order of the entries."""
        placed = []
        for record in self.live:
            second = record.store_ms // 1000
            own = next((s for s in (second, second + 1, second - 1) if s in self.seconds[record.physical_offset]), None)
            if own is not None and begin <= own <= end and KEY in record.index_keys:
                placed.append((-own, -record.physical_offset, record))
        return [record for *_, record in sorted(placed, key=lambda three: three[:2])]


@pytest.mark.parametrize("state", ["local", "archived"])
@pytest.mark.parametrize("seed", range(6))
def test_every_message_is_answered_once_and_in_order_however_it_is_cut_into_pages(tmp_path, index, seed, state):
    random = Random(seed)
    made = Rewritten.make(random, index)
    source = RocketmqMessages(lay(tmp_path / "laid", *made.live))
    if state == "archived":
        source = lay_archived(index, tmp_path / "laid", *made.live)
    for begin, end in [(-100, 100), (0, 12), (random.randint(-20, 5), random.randint(6, 40)), (13, 60)]:
        expected = made.expected(NOW_S + begin, NOW_S + end)
        for size in PAGES:
            allow_partial = random.random() < 0.5
            limits = {"begin_ms": NOW_MS + 1000 * begin, "end_ms": NOW_MS + 1000 * end, "allow_partial": allow_partial}
            fetched_messages, _ = pages(index, source, size, **limits)
            whole = encoded(fetched for fetched in fetched_messages if fetched.message)
            assert whole == [record.encode() for record in expected], (begin, end, size)
            assert [order(fetched) for fetched in fetched_messages] == sorted(
                {order(fetched) for fetched in fetched_messages}
            )
            # missing messages are only at places that have no answer
            answered = {record.physical_offset for record in expected}
            assert not answered & {
                fetched.item.offset for fetched in fetched_messages if fetched.message is None and fetched.item
            }
            assert {fetched.state for fetched in fetched_messages if fetched.message is None} <= {"missing"}


def test_an_entry_of_an_archived_message_does_not_hide_the_present_one(tmp_path, index):
    """A page may have no room for two answers of one place. The next has the rest, and counts collisions once."""
    size = there(0, 0).size
    other = {"properties": b"KEYS\x01order-4712\x02"}
    before = [there(number * size, 100 + number) for number in range(2)]
    now = [there(0, 50), there(size, 40), there(2 * size, 30, **other), there(3 * size, 20)]
    for record in (*before, *now):
        put(index, record, [KEY])
    lay_archived(index, tmp_path / "laid", *before)
    source = source_of(index, lay(tmp_path / "laid", *now))
    for max_count in PAGES:
        fetched_messages, collisions = pages(index, source, max_count)
        assert encoded(fetched_messages) == [record.encode() for record in (*before[::-1], now[0], now[1], now[3])]
        assert [fetched.state for fetched in fetched_messages] == ["archived"] * 2 + ["local"] * 3
        assert collisions == 1


def test_another_size_in_the_same_second_is_found_with_a_remark(tmp_path, index):
    """Of two entries of one place and second, the index keeps one. An archived copy that agrees comes first."""
    before, now = there(0, 0, b"long body"), there(0, 0)
    put(index, before)
    put(index, now)
    store = lay(tmp_path / "laid", now)
    ((fetched,), _) = pages(index, RocketmqMessages(store), 3)
    assert fetched.message == now and "another message is there" in fetched.problem
    lay_archived(index, tmp_path / "archived", before)
    ((fetched,), _) = pages(index, source_of(index, store), 3)
    assert (fetched.state, fetched.message) == ("archived", before)


@pytest.mark.parametrize("store_ms", [0, MAX_TIMESTAMP_MS])
def test_the_first_and_the_last_time_there_are_can_be_asked_for(tmp_path, index, store_ms):
    put(index, there(0, 0))
    now = there(0, 0, store_ms=store_ms)
    source = RocketmqMessages(lay(tmp_path / "laid", now))
    ((fetched,), _) = pages(index, source, 3)
    assert (fetched.state, fetched.message) == ("missing", None)
    assert "another message is there" in (fetched.problem or "")
    index.put("TopicA", 1, KEY, 0, now.size, store_ms)
    assert encoded(pages(index, source, 3)[0]) == [now.encode()]
