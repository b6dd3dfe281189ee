"""The end of a commit log, found without a walk: it equals the end that a walk finds, for logs of any shape."""

from __future__ import annotations

import random

import pytest

from tests.rocketmq import messages
from tests.support.store_writer import StoreWriter
from tiered_index.rocketmq.log.commitlog import CommitLogReader
from tiered_index.rocketmq.log.segments import segment_name
from tiered_index.rocketmq.log.store import StoreDirectory

SEGMENT = 1 << 19


def walked(store):
    reader = CommitLogReader(store.commitlog)
    last = list(reader.batches())[-1]
    times = [message.store_ms for message in reader.messages()]
    return last.end, times[-1]


@pytest.mark.parametrize("seed", range(4))
def test_the_end_is_where_a_walk_ends(tmp_path, seed):
    rng = random.Random(seed)
    store = None
    with StoreWriter(tmp_path, segment_bytes=SEGMENT) as writer:
        for number in range(60):
            for _ in range(rng.choice((1, 1, 30))):
                body = rng.randbytes(rng.choice((0, 10, 500, 5_000, 100_000)))
                writer.put("orders", 0, body, keys=f"k{number}", store_ms=messages.NOW_MS + rng.randrange(10**6))
            writer.flush()
            store = store or StoreDirectory.open(tmp_path)
            if number % 6 == 0:
                assert store.log_end() == walked(store)
    assert len(list((tmp_path / "commitlog").iterdir())) > 2


def test_a_large_segment_that_has_just_begun(tmp_path):
    with StoreWriter(tmp_path, segment_bytes=1 << 28) as writer:
        for number in range(20):
            writer.put("orders", 0, b"x" * 900, keys="k", store_ms=number)
        writer.flush()
        assert StoreDirectory.open(tmp_path).log_end() == (writer.next_offset, 19)


def test_torn_and_empty_ends(tmp_path):
    (tmp_path / "commitlog").mkdir()
    store = StoreDirectory.open(tmp_path)
    assert store.log_end() is None
    path = tmp_path / "commitlog" / segment_name(SEGMENT)
    path.write_bytes(bytes(SEGMENT))
    assert store.log_end() == (SEGMENT, None)
    log = messages.log(40, SEGMENT)
    data = messages.joined(log)
    path.write_bytes(data[:-3].ljust(SEGMENT, b"\0"))
    assert store.log_end() == (log[-1].physical_offset, log[-2].store_ms)
    path.write_bytes((data + messages.blank(SEGMENT - len(data))).ljust(SEGMENT, b"\0"))
    assert store.log_end() == (2 * SEGMENT, log[-1].store_ms)
    (tmp_path / "commitlog" / segment_name(2 * SEGMENT)).write_bytes(bytes(SEGMENT))  # made in advance
    assert store.log_end() == (2 * SEGMENT, log[-1].store_ms)


def test_a_body_of_zeros_hides_at_most_what_is_behind_it(tmp_path):
    with StoreWriter(tmp_path, segment_bytes=SEGMENT) as writer:
        first = writer.put("orders", 0, b"x" * 3_000, store_ms=5)
        writer.put("orders", 0, bytes(300_000), store_ms=6)
        last = writer.put("orders", 0, b"y", store_ms=7)
    end = StoreDirectory.open(tmp_path).log_end()
    assert end is not None
    assert first.offset + first.size <= end.offset <= last.offset + last.size
