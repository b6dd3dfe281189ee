"""A batch of Arrow columns was not copied. If the caller changed their memory later, acknowledged entries changed in
the engine until they were flushed.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pyarrow as pa
import pytest

from tiered_index import KeyedIndexItem, Lookup, column

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

    check()
    service.flush()
    check()
    service.seal()
    service.run_lifecycle()
    check()
