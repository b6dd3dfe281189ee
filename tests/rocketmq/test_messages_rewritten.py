"""A rewritten log: each present message is an answer once, by its own entry and in its order, however pages cut it."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from random import Random

import pytest

from tests.rocketmq.archived_store import lay, lay_archived, put, source_of
from tests.rocketmq.messages import NOW_MS, message
from tiered_index import Fetched, IndexService
from tiered_index.rocketmq.archive.messages import RocketmqMessages
from tiered_index.rocketmq.log.message import Message
from tiered_index.types import MAX_TIMESTAMP_MS

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
    found: list[Fetched] = []
    collisions, cursor = 0, None
    for _ in range(1_000):
        answer = index.messages("TopicA", KEY, max_count=max_count, cursor=cursor, source=source, **options)
        assert len(answer) <= max_count
        found += answer.messages
        collisions += answer.collisions
        cursor = answer.cursor
        assert answer.status == ("complete" if cursor is None else "truncated")
        if cursor is None:
            return found, collisions
        assert len(answer) == max_count
    raise AssertionError("no end")


def encoded(found: Iterable[Fetched]) -> list[bytes | None]:
    return [one.message.encode() if one.message else None for one in found]


def order(fetched: Fetched) -> tuple[int, int, int]:
    assert fetched.item is not None
    return -(fetched.item.timestamp_ms // 1000), -fetched.item.offset, fetched.item.queue_id


@dataclass
class Rewritten:
    """A log whose places were rewritten several times, and all its entries, some of them of messages that are no longer
    there.
    """

    live: list[Message] = field(default_factory=list)
    seconds: dict[int, set[int]] = field(default_factory=dict)
    """Seconds of the entries of each place."""

    @classmethod
    def make(cls, random: Random, index: IndexService, count: int = 14) -> Rewritten:
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
            made.seconds[offset] = {one.store_ms // 1000 for one in writings}
            written += writings
            offset += made.live[-1].size
        random.shuffle(written)
        for number, one in enumerate(written):
            put(index, one, [KEY])
            if number == len(written) // 2 and random.random() < 0.5:
                index.seal()
                index.run_lifecycle()
        return made

    def expected(self, begin: int, end: int) -> list[Message]:
        """Return the messages whose own entries are in a range of seconds, in order of the entries."""
        found = []
        for one in self.live:
            second = one.store_ms // 1000
            own = next((s for s in (second, second + 1, second - 1) if s in self.seconds[one.physical_offset]), None)
            if own is not None and begin <= own <= end and KEY in one.index_keys:
                found.append((-own, -one.physical_offset, one))
        return [one for *_, one in sorted(found, key=lambda three: three[:2])]


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
            asked = {"begin_ms": NOW_MS + 1000 * begin, "end_ms": NOW_MS + 1000 * end, "allow_partial": allow_partial}
            found, _ = pages(index, source, size, **asked)
            whole = encoded(one for one in found if one.message)
            assert whole == [one.encode() for one in expected], (begin, end, size)
            assert [order(one) for one in found] == sorted({order(one) for one in found})
            # missing messages are only at places that have no answer
            answered = {one.physical_offset for one in expected}
            assert not answered & {one.item.offset for one in found if one.message is None and one.item}
            assert {one.state for one in found if one.message is None} <= {"missing"}


def test_an_entry_of_an_archived_message_does_not_hide_the_present_one(tmp_path, index):
    """A page may have no room for two answers of one place. The next page has the rest, and counts each collision
    once.
    """
    size = there(0, 0).size
    other = {"properties": b"KEYS\x01order-4712\x02"}
    before = [there(number * size, 100 + number) for number in range(2)]
    now = [there(0, 50), there(size, 40), there(2 * size, 30, **other), there(3 * size, 20)]
    for one in (*before, *now):
        put(index, one, [KEY])
    lay_archived(index, tmp_path / "laid", *before)
    source = source_of(index, lay(tmp_path / "laid", *now))
    for max_count in PAGES:
        found, collisions = pages(index, source, max_count)
        assert encoded(found) == [one.encode() for one in (*before[::-1], now[0], now[1], now[3])]
        assert [one.state for one in found] == ["archived"] * 2 + ["local"] * 3
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
