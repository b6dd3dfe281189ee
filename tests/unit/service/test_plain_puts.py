"""A plain `put` is one step of the compiled core. It has the same checks and bounds as any other put.

A plain message has one or several keys. The source of its position, if it has one, is known in the open chunk.
"""

import itertools
import threading

import pytest

from tests.support.batches import batch
from tests.support.cases import each
from tests.support.core import compiled_core, using
from tiered_index.base.call import UNBOUNDED
from tiered_index.base.units import MAX_TIMESTAMP_MS
from tiered_index.errors import BackPressure, IndexClosed, OwnedBySource, TieredIndexError
from tiered_index.format.schema import KEYED_SCHEMA
from tiered_index.service.write.buffer import ROWS, WriteBuffer
from tiered_index.service.write.validation import TopicTable
from tiered_index.storage.memory import MemoryStorage
from tiered_index.types import MAX_KEY_UNITS

T = 1_700_000_000_000
PLAIN = ("t", 0, "k", 7, 1, T)


FIELDS = dict(zip(("topic", "queue_id", "keys", "offset", "size", "timestamp_ms"), PLAIN, strict=True))
ODD = each(
    topic=["new"],
    queue_id=(True, -1, 2**31),
    keys=("k" * MAX_KEY_UNITS, ["a", "b"], "\ud800", "", b"k"),
    offset=(2**63, -1, 2**200),
    size=(2**31, -1),
    timestamp_ms=(-1, MAX_TIMESTAMP_MS + 1, 2**64),
)
ODD.append({"offset": 2**63 - 1, "size": 2**31 - 1, "timestamp_ms": MAX_TIMESTAMP_MS})


@pytest.mark.parametrize("odd", ODD, ids=lambda odd: repr(odd)[:30])
def test_it_accepts_the_same_puts_as_the_general_way(open_index, odd):
    def outcome():
        index = open_index(storage_backend=MemoryStorage())
        index.put(*PLAIN)
        try:
            put = index.put(*(FIELDS | odd).values())
        except TieredIndexError as error:
            put = f"{type(error).__name__}: {error}"
        rows = [chunk.columns() for chunk in index._buffer.snapshot()]
        return put, [{name: values.tolist() for name, values in columns.items()} for columns in rows]

    with using(compiled_core()):
        of_core = outcome()
    with using(None):
        assert outcome() == of_core


def one_topic():
    topics = TopicTable()
    topics.give([(1, "t")])
    topics.assigned["t"] = 1
    return topics


def buffer(**bounds):
    limits = {"max_entries": 10**6, "max_bytes": 10**9, **bounds}
    return WriteBuffer(KEYED_SCHEMA, one_topic(), **limits)


@pytest.fixture(params=["compiled", "general"])
def core(request):
    with using(compiled_core() if request.param == "compiled" else None):
        yield


@pytest.mark.parametrize("keys", ["k", ["k"], ("k",)], ids=repr)
@pytest.mark.parametrize("bounds", [{"max_entries": 5}, {"max_bytes": 5 * 161}])
def test_it_keeps_to_the_bounds(bounds, keys):
    compiled_core()
    rows, plain = buffer(**bounds), (*PLAIN[:2], keys, *PLAIN[3:])
    rows.append_rows(["k"], (1, 0, 7, 1, T // 1000), 161)
    assert [rows.open.add(*plain) for _ in range(6)] == [1] * 4 + [0] * 2
    with pytest.raises(BackPressure):
        rows.append_rows(["k"], (1, 0, 7, 1, T // 1000), 161)
    assert (rows.size, rows.size_bytes) == (5, 5 * 161)


@pytest.mark.parametrize("bounds", [{"max_entries": 6}, {"max_bytes": 6 * 161}])
def test_a_message_of_several_keys_is_accepted_whole_or_refused_whole(bounds):
    compiled_core()
    rows, of_three = buffer(**bounds), ("t", 0, ["a", "b", "c"], 7, 1, T, "s", 9)
    rows.append_rows(["k"], (1, 0, 7, 1, T // 1000), 161, "s", 5)
    assert [rows.open.add(*of_three) for _ in range(2)] == [3, 0]
    assert (rows.open.rows.keys, rows.size_bytes) == (["k", "a", "b", "c"], 4 * 161)
    # the refused one left no position
    assert rows.open.marks.positions_at(4) == rows.open.marks.positions == {"s": 9}
    assert rows.open.marks.end_after(1) == 4 and rows.open.marks.end_after(4) is None


@pytest.mark.parametrize("keys", ["k", ["a", "b"]], ids=repr)
@pytest.mark.parametrize("of_source", [(), ("s", 6)], ids=repr)
def test_a_closed_chunk_accepts_nothing(keys, of_source):
    compiled_core()
    rows, plain = buffer(), (*PLAIN[:2], keys, *PLAIN[3:], *of_source)
    own = ["k"], (1, 0, 7, 1, T // 1000), 161, "s", 5
    rows.append_rows(*own)
    chunk = rows.open
    assert chunk.add(*plain)
    rows.close_chunk()
    assert not chunk.add(*plain)
    rows.append_rows(*own)
    chunk = rows.open
    rows.close()
    assert not chunk.add(*plain)
    with pytest.raises(IndexClosed):
        rows.append_rows(*own)
    rows.close_chunk()
    closed = rows.begin_flush(100)
    assert sum(flushed.count for flushed in closed) == 2 + (1 if keys == "k" else 2)
    assert [flushed.marks.positions for flushed in closed] == [{"s": 6 if of_source else 5}, {"s": 5}]


def test_a_source_is_plain_only_in_the_chunk_of_an_earlier_message_of_it():
    compiled_core()
    rows = buffer()
    rows.append_rows(["k"], (1, 0, 7, 1, T // 1000), 161, "s", 5)
    assert [rows.open.add(*PLAIN, source, 6) for source in ("s", "r", "s")] == [1, 0, 1]
    rows.close_chunk()
    rows.append_rows(["k"], (1, 0, 7, 1, T // 1000), 161)
    assert [rows.open.add(*PLAIN, *of_source) for of_source in ((), ("s", 7))] == [1, 0]


def test_a_position_never_goes_back(core, open_index):
    index = open_index()
    for position in (3, 7, 5, 7, 2):
        index.put("t", 0, ["a", "b"], position, 1, T, "s", position)
    index.flush()
    index.put("t", 0, "a", 4, 1, T, "s", 4)
    index.flush()
    assert index.durable_position("s") == 7


def test_a_position_is_that_of_whole_messages(core, open_index):
    """The first file ends with the last message that it has room for."""
    index = open_index("root", items=20)
    for position in range(1, 8):
        index.put("t", 0, ("a", "b", "c"), position, 1, T, "s", position)
    index.flush()
    assert [(file.count, file.journal.positions) for file in index._catalog.all()] == [(18, {"s": 6}), (3, {"s": 7})]


def test_a_source_that_the_index_follows_is_not_known_by_its_batches(core, open_index):
    index = open_index()
    index.put("u", 0, "k", 1, 1, T, "s", 1)
    index.put_source_batch(batch(1), "kafka:w/0", 8)
    for _ in range(2):
        with pytest.raises(OwnedBySource):
            index.put("u", 0, "k", 1, 1, T, "kafka:w/0", 9)
        index.put("u", 0, "k", 1, 1, T, "s", 2)
    index.flush()
    assert index.durable_positions() == {"s": 2, "kafka:w/0": 8}


class FilledAtOnce(WriteBuffer):
    """As soon as an open chunk appears, puts of other threads take all its room."""

    fills = False

    @property
    def open(self):
        return self._seen

    @open.setter
    def open(self, chunk):
        self._seen = chunk
        while self.fills and chunk.add(*PLAIN):
            pass


@pytest.mark.parametrize("keys", [1, ROWS - 1, ROWS, ROWS + 1])
def test_the_put_that_opens_a_chunk_has_its_room_before_others(keys):
    compiled_core()
    rows = FilledAtOnce(KEYED_SCHEMA, one_topic(), 10**6, 10**9)
    rows.fills = True
    rows.append_rows(["own"] * keys, (1, 0, 7, 1, T // 1000), 161 * keys)
    assert rows.open.rows.keys.count("own") == keys
    assert rows.size == max(keys, ROWS)


def test_no_put_is_lost_or_doubled_beside_others_and_flushes(open_index):
    index, each = open_index(), 1_500

    def put(queue):
        for number in range(each):
            of_source = (f"s{queue}", number) if queue else ()
            index.put("t", queue, "k" if number % 7 else ["k", "other"], number, 1, T, *of_source)

    threads = [threading.Thread(target=put, args=(queue,)) for queue in range(3)]
    for thread in threads:
        thread.start()
    while any(thread.is_alive() for thread in threads):
        index.flush()
        index.query("t", "k", max_count=1)
    for thread in threads:
        thread.join()
    answer = index.query("t", "k", max_count=10**5)
    assert sorted((item.queue_id, item.offset) for item in answer) == [(q, n) for q in range(3) for n in range(each)]
    index.flush()
    assert index.durable_positions() == {"s1": each - 1, "s2": each - 1}


def test_each_durable_position_has_its_entries_and_all_earlier_ones(open_index):
    index, done = open_index(slots=1_000, items=1_000_000), threading.Event()
    sources = ["r", "s", "t"]

    def put(source):
        for number in itertools.takewhile(lambda _: not done.is_set(), range(50_000)):
            index.put(source, 0, ["k", "other"][: 1 + number % 2], number, 1, T, source, number)

    threads = [threading.Thread(target=put, args=(source,)) for source in sources]
    for thread in threads:
        thread.start()
    positions, flushes = {}, 0
    while flushes < 10 or len(positions) < len(sources):
        index.flush()
        flushes += 1
        positions, stored = index.durable_positions(), dict.fromkeys(sources, 0)
        for file in index._catalog.all():
            for name, topic in file.topic_stats(UNBOUNDED):
                stored[name] += topic.entries
        # message n has one entry, or two if n is odd
        assert all(stored[name] >= 3 * (last + 1) // 2 for name, last in positions.items())
    done.set()
    for thread in threads:
        thread.join()
