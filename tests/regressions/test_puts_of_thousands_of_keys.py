"""This was no fault, but had no test: a message may have more keys than a block of the write buffer has rows."""

from __future__ import annotations

import pytest

from tiered_index import Lookup
from tiered_index.service.write.buffer import ROWS

NOW_MS = 1_700_000_000_000


@pytest.mark.parametrize("count", [ROWS - 1, ROWS, ROWS + 1, 2 * ROWS + 1])
@pytest.mark.parametrize("before", [0, 1, ROWS], ids=lambda before: f"{before} before")
def test_a_message_of_many_keys_is_accepted_whole(open_index, count, before):
    service = open_index(items=3000, slots=1000)
    for number in range(min(before, 1)):
        service.put("t", 0, [f"b{key}" for key in range(before)], number, 1, NOW_MS)
    keys = [f"k{number}" for number in range(count)]
    service.put("t", 3, keys, 7, 9, NOW_MS + 1000, source="s", source_position=7)
    assert service.health()["buffered_entries"] == before + count

    def check():
        for key in (keys[0], keys[ROWS - 2], keys[-2], keys[-1]):
            assert [(item.queue_id, item.offset, item.size) for item in service.query("t", key)] == [(3, 7, 9)]
        found = service.query_many([Lookup(topic="t", key=key) for key in keys])
        assert [[item.offset for item in result] for result in found] == [[7]] * count
        assert len(service.query("t", f"k{count}")) == 0
        assert [len(service.query("t", f"b{key}")) for key in (0, before - 1) if before] == [1] * 2 * bool(before)

    check()
    service.flush()
    assert service.health()["buffered_entries"] == 0
    assert service.durable_position("s") == 7
    check()
    service.put("t", 3, "k0", 8, 9, NOW_MS + 1000)
    assert [item.offset for item in service.query("t", "k0")] == [8, 7]
