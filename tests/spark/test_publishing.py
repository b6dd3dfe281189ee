"""Builds without Spark: windows, plans, shards of bounded pieces, and their publication.

The log decides the end of a build, and a sweep finds all leftovers. Builds also continue a source: one record has the
entries, and the position up to which the index then has the source.
"""

from __future__ import annotations

import errno
import itertools
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from tests.spark.entries import BEGIN_MS, DAY_MS, check, check_answers, messages, states, total, write_parquet
from tests.spark.in_process import GENESIS, count, left_over, opened, planned, shards_of, written
from tests.support.log_records import open_log
from tests.support.storage_faults import FaultStorage
from tiered_index import IndexReader
from tiered_index.base.clock import ManualClock
from tiered_index.errors import CorruptFile, InvalidArgument
from tiered_index.service.jobs.rewriting.merge_plan import window_seconds
from tiered_index.service.log.log import StorageLog
from tiered_index.service.log.publication import MAX_AGE_S, JobOverdue
from tiered_index.spark import SourceRange, build
from tiered_index.spark.writing import build as build_module
from tiered_index.spark.writing.build import check_windows, check_written, publish_batch, publish_tables
from tiered_index.spark.writing.positions import BatchContent, MicroBatch
from tiered_index.spark.writing.shards import Spool
from tiered_index.storage.memory import MemoryStorage


@pytest.mark.parametrize(
    ("text", "seconds"),
    [("1h", 3600), ("15 m", 900), (7, 7), ("30D", 30 * 86400)]
    + [(text, None) for text in ("", "-1d", "1.5h", "0s", "1y", "999999999d", None)],
)
def test_lengths_of_windows(text, seconds):
    with nullcontext() if seconds else pytest.raises(InvalidArgument, match="a window is like"):
        assert window_seconds(text) == seconds


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
        assert plan.shards < len(finished) < 100  # the hot key's piece is cut by time, into few parts
        assert max(shard.stored.count for shard in finished) < 3_000 * 0.2
    publish_tables(finished, "error", log)
    with IndexReader.open(storage_backend=storage, clock=clock) as reader:
        check_answers(reader, table)


@pytest.mark.parametrize("span", [7, 2**21 + 1, 2**31 - 1])
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


TABLE = messages(900, days=2)


@pytest.fixture
def clock():
    return ManualClock(BEGIN_MS + 10 * DAY_MS)


def built(storage, table=TABLE, **more):
    """Return the tables that the tasks of a build wrote."""
    return shards_of(written(table, planned(table), storage, **more))


def test_a_clock_that_was_set_back_hides_no_job_that_began_too_long_ago(clock):
    storage = MemoryStorage()
    opened(storage, clock)
    late = StorageLog(storage, ManualClock(clock.now_ms() - MAX_AGE_S * 1000))
    with pytest.raises(JobOverdue, match=r"build .*23\.0 hours ago"):
        publish_tables(built(storage), "error", late)
    assert count(storage, clock) == left_over(storage, clock) == 0


def test_two_builds_of_one_window_at_once(clock):
    storage = MemoryStorage()
    log = opened(storage, clock)
    plans = [planned(TABLE), planned(TABLE)]
    both = [shards_of(written(TABLE, plan, storage)) for plan in plans]
    for plan in plans:
        assert check_windows(log.state, plan, "error") == ()  # neither build sees the other
    publish_tables(both[0], "error", log)
    with pytest.raises(InvalidArgument, match="has a table already"):
        publish_tables(both[1], "error", StorageLog(storage, clock))
    assert count(storage, clock) == 900
    _, removed = publish_tables(both[1], "replace", log)
    assert (removed, count(storage, clock)) == (len(both[0]), 900)


def test_of_two_builds_that_continue_a_source_at_once_one_is_published(clock):
    storage = MemoryStorage()
    log = opened(storage, clock)
    late = StorageLog(storage, clock)
    late.open()
    publish_tables(built(storage, RANGE), "append", log, source_range=SourceRange("table", 0, 2))
    beaten_by = "table up to position 2, but this build begins at 0: another build"
    with pytest.raises(InvalidArgument, match=beaten_by):
        publish_tables(built(storage, NEXT), "append", late, source_range=SourceRange("table", 0, 1))
    assert (count(storage, clock), open_log(storage, clock).state.positions) == (300, {"table": 2})


def test_results_that_are_not_what_was_counted_are_not_published():
    storage = MemoryStorage()
    plan = planned(TABLE)
    results = written(TABLE, plan, storage)
    check_written(plan, results)
    with pytest.raises(InvalidArgument, match="changes"):
        check_written(plan, results[1:])
    with pytest.raises(CorruptFile, match="other entries"):
        check_written(plan, [replace(results[0], read_checksum=results[0].read_checksum ^ 1), *results[1:]])


def test_a_piece_on_disk_that_finds_no_room_is_no_shorter_one(monkeypatch):
    table, storage = messages(2_000), MemoryStorage()
    plan = planned(table, piece_items=60)

    def full_disk(*_, **__):
        return Path("/dev/full").open("w+b", buffering=0)

    monkeypatch.setattr("tempfile.TemporaryFile", full_disk)
    with pytest.raises(OSError, match="No space left") as caught:
        written(table, plan, storage)
    assert caught.value.errno == errno.ENOSPC
    assert not list(storage.list())


RANGE, NEXT = messages(300, days=1), messages(200, days=1, seed=2)


def test_builds_continue_a_source_from_the_position_of_the_index(spark, storage, config, tmp_path, monkeypatch):
    first, second = (write_parquet(t, tmp_path / f"{n}.parquet") for n, t in enumerate((RANGE, NEXT)))
    more = {"storage": storage, "config": config, "mode": "append"}
    with pytest.raises(InvalidArgument, match="table up to position 0, but this build begins at 2"):
        build(spark, second, source_range=SourceRange("table", 2, 3), **more)
    build(spark, first, source_range=SourceRange("table", 0, 2), **more)
    build(spark, second, source_range=SourceRange("table", 2, 5), **more)
    check(storage, RANGE, NEXT, keys=5)
    with IndexReader.open(storage) as reader:
        assert reader.log_state.positions == {"table": 5}
        assert reader.query("orders", "key-0").freshness[0].positions == {"table": 5}
    # a repeated build is refused before it reads the source
    monkeypatch.setattr(build_module, "entries_of", None)
    for again in (SourceRange("table", 0, 2), SourceRange("table", 2, 5), SourceRange("table", 4, 6)):
        with pytest.raises(InvalidArgument, match=f"table up to position 5, .* begins at {again.begin}"):
            build(spark, second, source_range=again, **more)
    assert (total(storage), states(storage).positions) == (500, {"table": 5})


class Killed(BaseException):
    """Ends the driver: no code runs after it."""


@pytest.mark.parametrize("mode", ["error", "append", "replace", "micro-batch"])
def test_a_driver_that_is_killed_at_any_call_leaves_the_old_state_or_the_new_one(clock, mode):
    """The entries and the position of the source are there, or neither. The same driver again does the rest."""

    def published(storage):
        log = StorageLog(storage, clock)
        if mode == "micro-batch":
            return publish_batch(shards, MicroBatch("table", 7, BatchContent(300, 1)), log)
        return publish_tables(shards, mode, log, source_range=SourceRange("table", 0, 7))

    for nth, when in itertools.product(range(1, 20), ("before", "after")):
        inner = MemoryStorage()
        log = opened(inner, clock)
        if mode != "error":
            publish_tables(built(inner, NEXT), "append", log)
        before, shards = count(inner, clock), built(inner, RANGE)
        struck = FaultStorage(inner)
        struck.fail("*", nth=nth, when=when, error=Killed)
        struck.fail("*", nth=nth + 1, times=None, error=Killed)
        try:
            published(struck)
            assert struck.calls() < nth, "no call was struck"
            break
        except Killed:
            pass
        is_new = open_log(inner, clock).state.positions == {"table": 7}
        after = 300 if mode in ("error", "replace") else before + 300
        assert count(inner, clock) == (after if is_new else before), (nth, when)
        published(inner)
        assert (count(inner, clock), open_log(inner, clock).state.positions) == (after, {"table": 7})
        left_over(inner, clock)
    assert nth > len(shards) + 4


@pytest.mark.parametrize(
    ("name", "begin", "end"),
    [
        *[("", 0, 1), ("t", -1, 1), ("t", 3, 3), ("t", 0, 2**63)],
        # no reader would accept these in a record of the log
        *[("t", 0, 1.5), ("t", False, 1)],
    ],
)
def test_invalid_ranges(name, begin, end):
    with pytest.raises(InvalidArgument, match=r"a range of a source has a name|must be an integer, not"):
        SourceRange(name, begin, end)
