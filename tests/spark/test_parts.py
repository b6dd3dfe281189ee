"""The parts of a build, without Spark: windows, plans, blocks, spools, shards of bounded pieces."""

from __future__ import annotations

import numpy as np
import pytest

from tests.spark.entries import BEGIN_MS, check_answers, messages
from tests.spark.in_process import GENESIS, opened, planned, shards_of, written
from tiered_index import IndexReader
from tiered_index.clock import ManualClock
from tiered_index.errors import InvalidArgument
from tiered_index.spark.writing.build import publish_tables
from tiered_index.spark.writing.plan import window_seconds
from tiered_index.spark.writing.shards import narrowed, widened
from tiered_index.storage.memory import MemoryStorage

ITEM = GENESIS.layout.schema.item


@pytest.mark.parametrize(("text", "seconds"), [("1h", 3600), ("15 m", 900), (7, 7), ("30D", 30 * 86400)])
def test_lengths_of_windows(text, seconds):
    assert window_seconds(text) == seconds


@pytest.mark.parametrize("text", ["", "-1d", "1.5h", "0s", "1y", "999999999d", None])
def test_invalid_lengths(text):
    with pytest.raises(InvalidArgument, match="a window is like"):
        window_seconds(text)


NUMBERS = [
    *((f">i{size}", -(1 << 8 * size - 1), (1 << 8 * size - 1) - 1) for size in (4, 8)),
    *((f">u{size}", 0, (1 << 8 * size) - 1) for size in (1, 2, 4, 8)),
]


@pytest.mark.parametrize("span", [0, 255, 256, 2**24 + 1, 2**56, 2**64 - 1])
def test_items_are_packed_into_few_bytes_and_unpacked_unchanged(span):
    """The test uses the least and the greatest numbers of their types, beside columns that are no integers."""
    dtype = np.dtype([("key_hash", ">i4"), *((kind, kind) for kind, _, _ in NUMBERS), ("f", ">f8"), ("s", "S3")])
    rng = np.random.default_rng(span)
    for at_end in (False, True):
        items, widths = np.zeros(50, dtype), [1]
        items["f"], items["s"] = rng.standard_normal(50), rng.integers(0, 256, (50, 3), np.uint8).view("S3")[:, 0]
        for kind, low, high in NUMBERS:
            reach = min(span, high - low)
            first = high - reach if at_end else low
            items[kind] = [first, first + reach, *(first + int(x * reach) for x in rng.random(48) * 0.99)]
            widths.append(next(size for size in range(9) if reach < 1 << 8 * size))
        columns = {name: items[name].astype(items[name].dtype.newbyteorder("=")) for name in dtype.names}
        records, told, least = narrowed(columns | {"second": np.zeros(50)}, dtype)
        assert list(told) == [*widths, 0, 0] and records.dtype.itemsize == sum(widths) + 11
        assert widened(records.tobytes(), told, least, dtype).tobytes() == items.tobytes()


@pytest.mark.parametrize("piece_items", [60, 10_000])
@pytest.mark.parametrize("shards", [1, 4])
def test_shards_answer_as_the_model_whatever_the_size_of_pieces(piece_items, shards):
    table = messages(3_000, days=2)
    plan, storage = planned(table, shards=shards, piece_items=piece_items), MemoryStorage()
    clock = ManualClock(BEGIN_MS)
    results = written(table, plan, storage, now_ms=BEGIN_MS)
    log = opened(storage, clock)
    finished = shards_of(results)
    assert sum(result.entries for result in results) == sum(shard.stored.count for shard in finished) == 3_000
    assert sum(result.read_checksum for result in results) % 2**64 == sum(shard.checksum for shard in finished) % 2**64
    if piece_items == 60:
        assert len(finished) > plan.shards  # the hot key's piece is cut by time
        assert max(shard.stored.count for shard in finished) < 3_000 * 0.2
    publish_tables(finished, "error", storage, log)
    with IndexReader.open(storage_backend=storage, clock=clock) as reader:
        check_answers(reader, table)
