"""Four files that one RocketMQ service wrote: their intervals and their slots."""

from __future__ import annotations

import struct
from functools import cache

from tests.golden import naive
from tests.support.foreign_lookups import stored_ms
from tiered_index.format.foreign import ForeignCompacted, ForeignUnsealed
from tiered_index.format.layout import ROCKETMQ, Layout

BEGINS = [1_700_000_000_000 + 100_000 * number for number in range(4)]


@cache
def image(begin_ms, suffix):
    meta = naive.lines("tiered_service/meta.json")[0]
    layout = Layout(ROCKETMQ, ROCKETMQ.schema, meta["slots"], meta["items"])
    return ForeignUnsealed(naive.raw(f"tiered_service/files/{begin_ms}.{suffix}.bin"), layout, str(begin_ms))


def compacted(begin_ms):
    data = naive.raw(f"tiered_service/files/{begin_ms}.compacted.bin")
    read = lambda position, length: data[position : position + length]  # noqa: E731
    return ForeignCompacted.open(read, len(data), str(begin_ms)), read


def test_interval_comes_from_entries_because_java_recovery_destroys_the_header():
    for begin_ms in BEGINS:
        before, after = image(begin_ms, "unsealed"), image(begin_ms, "after_recover")
        assert before.header.end_ms == begin_ms + 99_500
        assert after.header.end_ms == begin_ms
        assert before.interval_ms == after.interval_ms == (begin_ms, begin_ms + 99_000)
        file, read = compacted(begin_ms)
        assert file.header.end_ms == begin_ms
        times = [time for items in file.items(read) for time in stored_ms(items, file.header.begin_ms).tolist()]
        assert (min(times), max(times)) == before.interval_ms


def test_slots_come_from_the_file_not_from_configuration():
    """RocketMQ reads 32-slot files with 64 slots after a change of configuration, and fails. The file itself states the
    number.
    """
    for begin_ms in BEGINS:
        file, _ = compacted(begin_ms)
        assert file.layout.slots == 32
        data = naive.raw(f"tiered_service/files/{begin_ms}.compacted.bin")
        assert (file.header.slots_in_use,) == struct.unpack_from(">i", data, 20)
