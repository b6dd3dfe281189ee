"""The parts of a build, without Spark: windows, plans, blocks, spools, shards of bounded pieces."""

from __future__ import annotations

import pytest

from tests.spark.entries import BEGIN_MS, check_answers, messages
from tests.spark.in_process import opened, planned, shards_of, written
from tiered_index import IndexReader
from tiered_index.clock import ManualClock
from tiered_index.errors import InvalidArgument
from tiered_index.spark.writing.build import publish_tables
from tiered_index.spark.writing.plan import window_seconds
from tiered_index.storage.memory import MemoryStorage


@pytest.mark.parametrize(("text", "seconds"), [("1h", 3600), ("15 m", 900), (7, 7), ("30D", 30 * 86400)])
def test_lengths_of_windows(text, seconds):
    assert window_seconds(text) == seconds


@pytest.mark.parametrize("text", ["", "-1d", "1.5h", "0s", "1y", "999999999d", None])
def test_invalid_lengths(text):
    with pytest.raises(InvalidArgument, match="a window is like"):
        window_seconds(text)


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
