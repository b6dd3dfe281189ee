"""A chunk of the write buffer that was closed early kept the space of a full one. Puts that alternated with lookups or
failed flushes held a hundred times the memory that the buffer's bound counted.
"""

from __future__ import annotations

import gc

import pytest

from tests.support.disk_faults import FaultDisk
from tests.support.memory import traced_memory
from tiered_index.errors import TieredIndexError

NOW_MS = 1_700_000_000_000


def test_puts_between_failed_flushes_hold_the_memory_that_the_buffer_counts(open_index):
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
        gc.collect()  # cycles hold errors that pytest has inspected
        held, _ = memory()
    assert service.health()["buffered_entries"] == 105
    assert held < 2**20  # a hundred full blocks would be 13 MiB
    disk.clear()
    service.flush()
    assert len(service.query("t", "k", max_count=1000)) == 105
