"""A chunk of the write buffer that was closed early kept the room of a full one: puts that alternated with lookups or
with flushes that failed held a hundred times the memory that the buffer's bound had been told of.
"""

from __future__ import annotations

import gc

import pytest

from tests.support.disk_faults import FaultDisk
from tests.support.memory import traced_memory
from tiered_index.errors import TieredIndexError
from tiered_index.format.schema import KEYED_SCHEMA
from tiered_index.service.answers.validation import TopicTable
from tiered_index.service.writing.buffer import WriteBuffer

NOW_MS = 1_700_000_000_000


@pytest.mark.parametrize("rows", [1, 3, 2000, 4096, 5000])
def test_a_closed_chunk_has_room_for_its_rows_alone(rows):
    topics = TopicTable()
    topics.give([(1, "t")])
    buffer = WriteBuffer(KEYED_SCHEMA, topics, 10**6, 10**9)
    keys = [f"k{number}" for number in range(rows)]
    buffer.append_rows(keys, (1, 2, 3, 4, NOW_MS // 1000), rows)
    assert buffer.close_chunk() == 1
    (chunk,) = buffer.begin_flush(10**6)
    data = chunk._content.rows.data
    assert len(data) == rows * buffer._codec.struct.size
    assert data.__sizeof__() <= 2 * len(data) + 64  # what is really held
    columns = chunk.columns()
    assert {name: columns[name].tolist() for name in ("queue_id", "offset", "size", "second")} == {
        "queue_id": [2] * rows,
        "offset": [3] * rows,
        "size": [4] * rows,
        "second": [NOW_MS // 1000] * rows,
    }


def test_puts_between_flushes_that_fail_hold_what_the_buffer_says(open_index):
    disk = FaultDisk()
    service = open_index(disk=disk)
    disk.fail("create", times=None)

    def put(first, last):
        for number in range(first, last):
            service.put("t", 0, "k", number, 1, NOW_MS)
            with pytest.raises(TieredIndexError):
                service.flush()

    put(0, 5)
    with traced_memory() as memory:
        put(5, 105)
        gc.collect()  # errors that pytest has looked at are held by cycles
        held, _ = memory()
    assert service.health()["buffered_entries"] == 105
    assert held < 2**20  # a hundred full blocks would be 13 MiB
    disk.clear()
    service.flush()
    assert len(service.query("t", "k", max_count=1000)) == 105
