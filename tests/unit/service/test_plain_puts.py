"""A plain `put` is one step of the compiled core. It has the same checks and bounds as any other put."""

import threading

import pytest

from tests.support.cases import each
from tests.support.core import compiled_core, using
from tiered_index.base.units import MAX_TIMESTAMP_MS
from tiered_index.errors import BackPressure, IndexClosed, TieredIndexError
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


@pytest.mark.parametrize("bounds", [{"max_entries": 5}, {"max_bytes": 5 * 161}])
def test_it_keeps_to_the_bounds(bounds):
    compiled_core()
    rows = buffer(**bounds)
    rows.append_rows(["k"], (1, 0, 7, 1, T // 1000), 161)
    assert [rows.open.add(*PLAIN) for _ in range(6)] == [True] * 4 + [False] * 2
    with pytest.raises(BackPressure):
        rows.append_rows(["k"], (1, 0, 7, 1, T // 1000), 161)
    assert (rows.size, rows.size_bytes) == (5, 5 * 161)


def test_a_closed_chunk_accepts_nothing():
    compiled_core()
    rows = buffer()
    rows.append_rows(["k"], (1, 0, 7, 1, T // 1000), 161)
    chunk = rows.open
    assert chunk.add(*PLAIN)
    rows.close_chunk()
    assert not chunk.add(*PLAIN)
    rows.append_rows(["k"], (1, 0, 7, 1, T // 1000), 161)
    chunk = rows.open
    rows.close()
    assert not chunk.add(*PLAIN)
    with pytest.raises(IndexClosed):
        rows.append_rows(["k"], (1, 0, 7, 1, T // 1000), 161)
    rows.close_chunk()
    assert sum(flushed.count for flushed in rows.begin_flush(100)) == 3


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
            index.put("t", queue, "k" if number % 7 else ["k", "other"], number, 1, T)

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
