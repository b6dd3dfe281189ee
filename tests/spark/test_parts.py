"""The parts of a build, without Spark: windows, plans, blocks, spools, shards of bounded pieces."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

from tests.spark.entries import BEGIN_MS, check_answers, messages
from tests.spark.in_process import GENESIS, gathered, opened, planned, shards_of, written
from tiered_index import IndexReader
from tiered_index.clock import ManualClock
from tiered_index.errors import InvalidArgument
from tiered_index.format.hashing import key_hash
from tiered_index.format.shard import entry_checksum
from tiered_index.service.log.records import QUARANTINE_S
from tiered_index.spark.writing.build import publish_tables
from tiered_index.spark.writing.plan import BuildPlan, WindowScale, window_seconds
from tiered_index.spark.writing.shards import Spool, narrowed, widened
from tiered_index.storage.memory import MemoryStorage

ITEM = GENESIS.layout.schema.item


@pytest.mark.parametrize(
    ("text", "seconds"), [("1h", 3600), ("1d", 86400), ("90s", 90), ("15 m", 900), (7, 7), ("30D", 30 * 86400)]
)
def test_lengths_of_windows(text, seconds):
    assert window_seconds(text) == seconds


@pytest.mark.parametrize("text", ["", "d", "-1d", "1.5h", "0s", "1y", "999999999d", None])
def test_invalid_lengths(text):
    with pytest.raises(InvalidArgument, match="a window is like"):
        window_seconds(text)


def test_windows_of_right_and_wrong_clocks():
    scale = WindowScale(3600, 10_000, 20_000)
    begins, wrong = scale.begins(np.array([0, 9_999, 10_000, 14_399, 14_400, 20_000, 20_001, 253_402_300_799]))
    assert wrong.tolist() == [True, True, False, False, False, False, True, True]
    assert begins.tolist() == [0, 0, 7200, 10_800, 14_400, 18_000, 0, 253_402_300_799 // QUARANTINE_S * QUARANTINE_S]
    # few windows at any second; the difference from a window's begin fits 32 bits
    assert 253_402_300_799 // QUARANTINE_S < 118


def test_every_entry_has_one_piece_within_its_shard_and_its_partition():
    table = messages(4_000, days=5)
    plan: BuildPlan = planned(table, shards=3)
    assert plan.entries == 4_000 and plan.shards == 5 * 3
    assert (np.diff(plan.partition_of_piece) >= 0).all() and plan.partition_of_piece[0] == 0
    edges = [table.base_slots(n, 1) for table in plan.tables[:1] for n in range(table.pieces)]
    assert edges[0][0] == 0 and edges[-1][1] == 64 and all(a[1] == b[0] for a, b in itertools.pairwise(edges))
    seconds = table["timestamp_ms"].to_numpy() // 1000
    hashes = np.array(
        [key_hash(t, k) for t, k in zip(table["topic"].to_pylist(), table["key"].to_pylist(), strict=True)], np.int32
    )
    pieces, begins = plan.pieces_of(seconds, hashes)
    for piece, begin, second, hash32 in list(
        zip(pieces.tolist(), begins.tolist(), seconds.tolist(), hashes.tolist(), strict=True)
    )[::97]:
        mine = plan.tables[plan.table_of(piece)]
        assert mine.window.begin_s == begin <= second < begin + 86400
        low, high = mine.base_slots(piece - mine.first_piece, 1)
        assert low <= hash32 % 64 < high
    with pytest.raises(InvalidArgument, match="changed while it was read"):
        plan.pieces_of(seconds + 86400 * 400, hashes)


NUMBERS = [
    *((f">i{size}", -(1 << 8 * size - 1), (1 << 8 * size - 1) - 1) for size in (4, 8)),
    *((f">u{size}", 0, (1 << 8 * size) - 1) for size in (1, 2, 4, 8)),
]


@pytest.mark.parametrize("span", [0, 1, 255, 256, 2**16, 2**24 + 1, 2**32, 2**40, 2**48, 2**56, 2**64 - 1])
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


def test_small_windows_share_partitions_and_large_ones_do_not():
    table = messages(3_000, days=30)
    assert planned(table, shards="auto").partitions == 1
    assert planned(table, shards="auto").shards == 30


def test_blocks_carry_every_entry_once_and_their_checksum():
    table = messages(2_000)
    plan = planned(table)
    total, checksum, expected = 0, 0, 0
    for blocks in gathered(table, plan).values():
        for row in blocks.to_pylist():
            items = widened(row["items"], row["widths"], row["least"], ITEM)
            begin = plan.tables[plan.table_of(row["piece"])].window.begin_s
            total += len(items)
            checksum += entry_checksum(items, items["time_diff_s"].astype(np.int64) + begin)
            expected += int.from_bytes(row["checksum"], "big")
    assert total == 2_000 and (checksum - expected) % 2**64 == 0


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


@pytest.mark.parametrize(("span", "most"), [(1, 10), (1000, 37), (86_400, 200), (2**31 - 1, 100)])
def test_a_spool_returns_all_items_newest_first_in_bounded_parts(span, most):
    rng = np.random.default_rng(span)
    items = np.zeros(1_000, ITEM)
    items["time_diff_s"] = rng.integers(0, span, 1_000)
    items["offset"] = np.arange(1_000)
    items["time_diff_s"][:300] = span // 2  # one second that is too large for a piece
    spool = Spool(ITEM, most)
    for part in np.array_split(items, 7):
        spool.add(part)
    numbers, parts = zip(*((number, part.copy()) for number, part in spool.parts()), strict=True)
    assert numbers == tuple(range(len(parts)))
    spool.close()
    back = np.concatenate([part["offset"].astype(np.int64) for part in parts])
    assert sorted(back.tolist()) == list(range(1_000))
    for newer, older in itertools.pairwise(parts):
        assert newer["time_diff_s"].min() > older["time_diff_s"].max()
    assert all(len(part) <= most or len(np.unique(part["time_diff_s"])) == 1 for part in parts)
