"""Batches of head insertions equal a reference that inserts one entry at a time."""

import struct
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.support.compacted_files import unsealed_image
from tiered_index.errors import InvalidArgument
from tiered_index.format import unsealed as module
from tiered_index.format.layout import ROCKETMQ, Layout
from tiered_index.format.unsealed import UnsealedTable, entries_view, time_differences, walk_chains

BEGIN_MS = 1_700_000_000_000
rows = st.lists(
    st.tuples(st.one_of(st.integers(0, 60), st.integers(0, 2**31 - 1)), st.integers(-5_000, 2**33)),
    min_size=1,
    max_size=80,
)


class NaiveFile:
    """Insert entries one at a time, like RocketMQ's `putKey`."""

    def __init__(self, slots):
        self.heads = [0] * slots
        self.previous = []
        self.end_ms = 0

    def put(self, key_hash, timestamp_ms):
        slot = key_hash % len(self.heads)
        self.previous.append(self.heads[slot])
        self.heads[slot] = len(self.previous)
        self.end_ms = max(self.end_ms, timestamp_ms)

    def chain(self, slot):
        index = self.heads[slot]
        while index:
            yield index
            index = self.previous[index - 1]


def columns(count):
    return {name: np.arange(count) for name in ("topic_id", "queue_id", "offset", "size")}


def walked(image, table, hashes, wanted, limit):
    """Walk chains one by one. Return (entry, lookup) pairs in order of entry, or None as `walk_chains` does."""
    arrays = np.array(hashes, np.int32), np.array(wanted, np.int64)
    matched = walk_chains(image, table.layout, table.heads, *arrays, limit)
    return None if matched is None else sorted(zip(*(column.tolist() for column in matched), strict=True))


@pytest.mark.usefixtures("way")
@given(rows, st.integers(1, 50), st.lists(st.integers(0, 80)), st.integers(0, 3), st.integers(1, 90))
def test_batches_split_anywhere_equal_single_inserts(rows, slots, cuts, spare, chunk):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "_INSERT_CHUNK", chunk)  # chunks end anywhere
        check_inserts(rows, slots, cuts, spare)


def check_inserts(rows, slots, cuts, spare):
    layout = Layout(ROCKETMQ, ROCKETMQ.schema, slots, max(2, len(rows) + 1 + spare))
    naive = NaiveFile(slots)
    for key_hash, diff_ms in rows:
        naive.put(key_hash, BEGIN_MS + diff_ms)
    hashes = np.array([h for h, _ in rows], np.int32)
    times = np.array([BEGIN_MS + d for _, d in rows], np.int64)
    table, parts = UnsealedTable(layout, BEGIN_MS), []
    borders = [0, *sorted(min(cut, len(rows)) for cut in cuts), len(rows)]
    for low, high in pairwise(borders):
        before = (table.count, table.heads.copy(), table.slots_in_use, table.end_ms)
        batch = table.prepare(
            hashes[low:high], times[low:high], {n: c[low:high] for n, c in columns(len(rows)).items()}
        )
        assert (table.count, table.slots_in_use, table.end_ms) == (before[0], *before[2:])
        assert (table.heads == before[1]).all()
        table.commit(batch)
        parts.append(batch.entries.tobytes())
    entries = np.frombuffer(b"".join(parts), layout.schema.entry)
    assert entries["previous"].tolist() == naive.previous
    assert table.heads.tolist() == naive.heads
    assert table.slots_in_use == sum(head != 0 for head in naive.heads)
    assert (table.count, table.end_ms) == (len(rows), naive.end_ms)
    image = unsealed_image(table, entries)
    assert len(image) == layout.unsealed_size
    for key_hash in {h for h, _ in rows} | {7}:
        expected = [index for index in naive.chain(key_hash % slots) if rows[index - 1][0] == key_hash]
        assert walked(image, table, [key_hash], [0], len(rows) + 1) == [(index, 0) for index in reversed(expected)]
    assert entries_view(image, layout, len(rows)).tobytes() == entries.tobytes()
    loaded = UnsealedTable(layout, BEGIN_MS)
    loaded.load(entries, naive.end_ms)
    assert (loaded.heads == table.heads).all()
    assert loaded.header() == table.header()


@given(st.integers(0, 2**45), st.integers(0, 2**45))
def test_time_differences_truncate_toward_zero_and_wrap(timestamp_ms, begin_ms):
    difference = abs(timestamp_ms - begin_ms) // 1000 * (1 if timestamp_ms >= begin_ms else -1)
    (wrapped,) = struct.unpack(">i", struct.pack(">I", difference % 2**32))
    assert time_differences(np.array([timestamp_ms]), begin_ms).tolist() == [wrapped]


@pytest.mark.usefixtures("way")
def test_a_walk_gives_up_on_its_limit_and_on_chains_that_do_not_fall():
    layout = Layout(ROCKETMQ, ROCKETMQ.schema, 1, 6)
    table = UnsealedTable(layout, BEGIN_MS)
    batch = table.prepare(np.array([9] * 5, np.int32), np.full(5, BEGIN_MS), columns(5))
    table.commit(batch)
    assert walked(unsealed_image(table, batch.entries), table, [9], [0], 5) == [(n, 0) for n in (1, 2, 3, 4, 5)]
    assert walked(unsealed_image(table, batch.entries), table, [9], [0], 4) is None
    for wrong in (4, 5, 2**31 - 1, -1):
        damaged = batch.entries.copy()
        damaged["previous"][3] = wrong
        assert walked(unsealed_image(table, damaged), table, [9], [0], 99) is None


def test_refusals_change_nothing():
    layout = Layout(ROCKETMQ, ROCKETMQ.schema, 3, 4)
    table = UnsealedTable(layout, BEGIN_MS)
    first = table.prepare(np.array([1, 2], np.int32), np.full(2, BEGIN_MS), columns(2))
    table.commit(first)
    before = table.heads.copy()
    with pytest.raises(InvalidArgument, match=r"2 entries .*1 are free"):
        table.prepare(np.array([1, 2], np.int32), np.full(2, BEGIN_MS), columns(2))
    with pytest.raises(InvalidArgument, match=r"entry 1, .*next is 3"):
        table.commit(first)
    assert (table.heads == before).all()
    assert (table.count, table.free) == (2, 1)
