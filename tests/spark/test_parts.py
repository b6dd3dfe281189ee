"""The parts of a build, without Spark: windows, plans, blocks, spools, shards of bounded pieces."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

from tests.spark.entries import BEGIN_MS, check_answers, messages
from tests.spark.in_process import GENESIS, opened, planned, shards_of, written
from tiered_index import IndexReader
from tiered_index.clock import ManualClock
from tiered_index.errors import InvalidArgument
from tiered_index.spark.writing.build import publish_tables
from tiered_index.spark.writing.plan import window_seconds
from tiered_index.spark.writing.shards import Spool
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


@pytest.mark.parametrize("span", [1, 7, 86_400, 2**21 + 1, 2**31 - 1])
def test_a_piece_that_is_too_large_is_cut_into_few_ranges_of_time(span):
    """Each range is older than the one before. Only a single second, or a 2^20th of a long window, has more items."""
    seconds = np.random.default_rng(span).integers(0, span, 5_000)
    seconds[:900] = span // 2
    items = np.zeros(len(seconds), GENESIS.layout.schema.item)
    items["time_diff_s"], items["offset"] = seconds, np.arange(len(seconds))
    spool = Spool(items.dtype, 400)
    for some in np.array_split(items, 7):
        spool.add(some)
    numbers, parts = zip(*spool.parts(), strict=True)
    spool.close()
    assert numbers == tuple(range(len(parts))) and len(parts) <= 2 * -(-len(items) // 400) + 1
    assert np.array_equal(np.sort(np.concatenate(parts), order="offset"), items)
    for newer, older in itertools.pairwise(parts):
        assert newer["time_diff_s"].min() > older["time_diff_s"].max()
    for part in parts:
        ages = seconds.max() - part["time_diff_s"].astype(np.int64)
        assert len(part) <= 400 or len(np.unique(ages // -(-span // 2**20))) == 1
