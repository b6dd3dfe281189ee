"""Arguments as callers have them: batches on memory that changes, columns without an order, and wrong lookups."""

import itertools
from dataclasses import dataclass

import numpy as np
import pyarrow as pa
import pytest

from tests.support.batches import batch
from tiered_index import IndexReader, KeyedIndexItem, Lookup, column
from tiered_index.errors import InvalidArgument
from tiered_index.service.write.buffer import ROWS as BLOCK_ROWS

NOW_MS = 1_700_000_000_000
ROWS = 10
NUMBERS = ("topic_id", "queue_id", "offset", "size", "timestamp_ms", "more", "half")


@dataclass(frozen=True, kw_only=True)
class Item(KeyedIndexItem):
    more: int = column(">i8")
    half: float = column(">f8")


def text_on(memory):
    """Return a column of one-letter texts on `memory`."""
    places = np.arange(len(memory) + 1, dtype=np.int64)
    return pa.LargeStringArray.from_buffers(len(memory), pa.py_buffer(places), pa.py_buffer(memory))


def chunked(columns):
    return {name: pa.chunked_array([values]) for name, values in columns.items()}


KINDS = {
    "arrays": dict,
    "chunked arrays": chunked,
    "dictionary topics": lambda columns: {**columns, "topic": columns["topic"].dictionary_encode()},
    "timestamps": lambda columns: {**columns, "timestamp_ms": columns["timestamp_ms"].view(pa.timestamp("ms"))},
    "record batch": pa.record_batch,
    "table": pa.table,
    "slices": lambda columns: pa.table(columns).slice(0, ROWS),
    "numpy": lambda columns: {**columns, **{name: columns[name].to_numpy(zero_copy_only=True) for name in NUMBERS}},
}


@pytest.mark.parametrize("kind", KINDS.values(), ids=list(KINDS))
def test_put_entries_stay_when_the_callers_memory_changes(open_index, kind):
    service = open_index(item_type=Item)
    memory = {
        "topic": np.full(ROWS, ord("t"), np.uint8),
        "key": np.arange(ord("a"), ord("a") + ROWS, dtype=np.uint8),
        "topic_id": np.full(ROWS, 5, np.int64),
        "queue_id": np.arange(ROWS, dtype=np.int64),
        "offset": np.arange(ROWS, dtype=np.int64) + 100,
        "size": np.arange(ROWS, dtype=np.int64) + 200,
        "timestamp_ms": NOW_MS + 1000 * np.arange(ROWS, dtype=np.int64),
        "more": np.arange(ROWS, dtype=np.int64) + 300,
        "half": np.arange(ROWS) / 2,
    }
    columns = {
        name: text_on(values) if name in ("topic", "key") else pa.array(values) for name, values in memory.items()
    }
    service.put_batch(kind(columns))
    for name, values in memory.items():
        values[:] = ord("z") if name in ("topic", "key") else 7
    assert columns["offset"].to_pylist() == [7] * ROWS  # it really is on that memory

    def check():
        keys = [chr(ord("a") + row) for row in range(ROWS)]
        many = service.query_many([Lookup(topic="t", key=key) for key in keys])
        for row, key in enumerate(keys):
            for result in (service.query("t", key), many[row]):
                (item,) = result
                assert (item.topic_id, item.queue_id, item.offset, item.size) == (5, row, 100 + row, 200 + row)
                assert (item.timestamp_ms, item.more, item.half) == (NOW_MS + 1000 * row, 300 + row, row / 2)
        assert len(service.query("t", "z")) == len(service.query("z", "z")) == 0

    for act in (service.flush, service.seal, service.run_lifecycle):
        check()
        act()
    check()


GOOD = {name: list(values) for name, values in batch(2, queue_id=[1, 2], key=["k", "l"], offset=[1, 2]).items()}
BAD = {
    "a set": lambda values: {values[0], values[0] * 2},
    "a text": lambda values: "kl",
    "bytes": lambda values: b"kl",
    "a dict": lambda values: dict.fromkeys(("k", "l"), values[0]),
}


@pytest.mark.parametrize("make", BAD.values(), ids=list(BAD))
def test_a_column_that_is_no_sequence_is_refused(open_index, make):
    """Rows would get values in a random order, or one letter each."""
    service = open_index()
    for name, values in GOOD.items():
        with pytest.raises(InvalidArgument, match=name):
            service.put_batch({**GOOD, name: make(values)})
        assert service.health()["buffered_entries"] == 0
    service.put_batch({name: tuple(values) for name, values in GOOD.items()})
    for key, queue_id, offset in (("k", 1, 1), ("l", 2, 2)):
        assert [(item.queue_id, item.offset) for item in service.query("t", key)] == [(queue_id, offset)]


@pytest.mark.parametrize("count", [BLOCK_ROWS - 1, BLOCK_ROWS, 2 * BLOCK_ROWS + 1])
@pytest.mark.parametrize("before", [0, 1, BLOCK_ROWS], ids=lambda before: f"{before} before")
def test_a_message_of_more_keys_than_a_block_of_the_buffer_is_accepted_whole(open_index, count, before):
    service = open_index(items=3000, slots=1000)
    if before:
        service.put("t", 0, [f"b{key}" for key in range(before)], 0, 1, NOW_MS)
    keys = [f"k{number}" for number in range(count)]
    service.put("t", 3, keys, 7, 9, NOW_MS + 1000, source="s", source_position=7)
    assert service.health()["buffered_entries"] == before + count
    for _ in range(2):
        results = service.query_many([Lookup(topic="t", key=key) for key in keys])
        assert [[(i.queue_id, i.offset, i.size) for i in result] for result in results] == [[(3, 7, 9)]] * count
        assert len(service.query("t", keys[-1])) == 1 and len(service.query("t", f"k{count}")) == 0
        assert [len(service.query("t", f"b{key}")) for key in (0, before - 1) if before] == [1] * 2 * bool(before)
        service.flush()
    assert service.durable_position("s") == 7


NESTED = [Lookup(topic=["t"], key="k")]
BAD_LOOKUPS = ([("t", 5)], [("t", "k", 5)], [Lookup(topic="t", key="k"), None], None, 5, NESTED, ["t"])


def test_arguments_of_a_wrong_kind_are_refused(open_index, storage):
    service = open_index()
    service.put("t", 0, "k", 1, 1, NOW_MS)
    service.flush()
    with IndexReader.open(root=service.config.root, storage_backend=storage) as reader:
        for index, lookups in itertools.product((service, reader), BAD_LOOKUPS):
            with pytest.raises(InvalidArgument):
                index.query_many(lookups)
        assert len(reader.query("t", "k")) == 1
    for source in ([], {}, None, 5):
        with pytest.raises(InvalidArgument):
            service.durable_position(source)


@pytest.mark.parametrize(
    ("field", "value", "said"),
    [
        ("topic", [], "topic must be text, not list"),
        ("topic", " ", "topic is empty"),
        ("key", 7, "a key must be text, not int"),
        ("key", "", "a key is empty"),
        ("begin_ms", True, "lookup 1: begin_ms must be an integer, not True"),
        ("begin_ms", 10**15, "lookup 1: begin_ms .* is after end_ms"),
        ("max_count", None, "lookup 1: max_count must be an integer, not None"),
        ("max_count", 0, "lookup 1: max_count must be at least 1, not 0"),
    ],
)
def test_a_wrong_lookup_of_a_batch_is_named(index, field, value, said):
    lookups = [Lookup("t", "k"), Lookup(**{"topic": "t", "key": "k", field: value})]
    with pytest.raises(InvalidArgument, match=said):
        index.query_many(lookups)


def test_an_argument_that_a_lookup_lacks_is_named_with_the_nearest_one(open_index):
    service = open_index()
    calls = {
        "query": lambda **wrong: service.query("t", "k", **wrong),
        "messages": lambda **wrong: service.messages("t", "k", source=None, **wrong),
        "topics": service.topics,
        "query_many": lambda **wrong: service.query_many([("t", "k")], **wrong),
    }
    for name, call in calls.items():
        near = "" if name == "query_many" else "; did you mean 'begin_ms'?"
        with pytest.raises(TypeError) as raised:
            call(begin=1)
        assert str(raised.value) == f"{name}() got an unexpected keyword argument 'begin'{near}"
