"""Both sides of an audit: it names the differences, also those between repeated entries."""

from __future__ import annotations

import itertools
import pickle
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from tiered_index.format.layout import PRESETS
from tiered_index.spark.audit import digest_table, matching
from tiered_index.spark.audit.differences import _ROWS, KINDS, Differences, _difference, _pairs, _rows, _told, may_hold
from tiered_index.spark.audit.digest_table import DigestShape, DigestTable
from tiered_index.spark.audit.entries import Part, groups_of, identity_dtype, value_dtype
from tiered_index.spark.audit.matching import DIGEST, _blocks, _compared, _cut, _digests, compare_range
from tiered_index.spark.lookup.plan import Target


def digests(entries: Any, topic: int = 1) -> Any:
    made = np.empty(len(entries), DIGEST)
    made["entry"], made["topic"] = entries, topic
    return made


@pytest.mark.parametrize("topic", [1, 0], ids=["topics known", "no table of topics"])
def test_a_range_differs_where_one_side_has_what_the_other_lacks(topic: int) -> None:
    rng = np.random.default_rng(7)
    same = rng.integers(0, 2**64, 1_000, np.uint64)
    source = digests(np.concatenate([same, same[:50], [np.uint64(3)]]))
    index = digests(rng.permutation(np.concatenate([same, same[20:90], [np.uint64(9)]])), topic)
    assert compare_range(digests(same), digests(rng.permutation(same), topic))[:2] == (1_000, 1_000)
    assert not len(compare_range(digests(same), digests(rng.permutation(same), topic))[2])
    of_source, of_index, differing, _ = compare_range(source, index)
    assert (of_source, of_index, differing.tolist()) == (1_001, 1_001, [3, 9])


def test_repeated_entries_of_the_index_are_counted() -> None:
    source = digests([1, 1, 2, 3])
    assert compare_range(source, digests([1, 2, 3, 3, 3, 2, 9, 9]))[3] == 1 + 2 + 1
    assert compare_range(source, digests([3, 1, 2, 1]))[3] == 0
    assert Differences({}, (), 0, 4, 4, repeated=4).remarks[0].startswith("the index has 4 entries more than once")
    assert Differences({}, (), 0, 0, 0).remarks == ["nothing was compared: neither side has an entry within the bounds"]
    assert Differences({}, (), 0, 1, 1).remarks == []


def test_an_entry_under_another_topic_differs() -> None:
    index = digests([1, 2, 3, 4])
    index["topic"][2] = 5
    assert compare_range(digests([1, 2, 3, 4]), index)[2].tolist() == [3]


def test_an_entry_under_the_same_topics_on_both_sides_does_not_differ() -> None:
    """Topics whose hashes are equal may have equal entries."""
    bucket = 1 << 16
    rest = [digests([1 + bucket]), digests([1 + 2 * bucket])]
    source, index = (np.concatenate([digests([1, 2]), digests([1], topic=5), other]) for other in rest)
    assert compare_range(source, index)[2].tolist() == [1 + bucket, 1 + 2 * bucket]
    index["topic"][2] = 3
    assert compare_range(source, index)[2].tolist() == [1, 1 + bucket, 1 + 2 * bucket]


@pytest.mark.parametrize("most", [1 << 12, 0], ids=["few differ", "too many differ"])
def test_cut_digests_are_compared_whole_and_the_differing_ones_counted(
    monkeypatch: pytest.MonkeyPatch, most: int
) -> None:
    monkeypatch.setattr(digest_table, "_MOST_DIGESTS", most)
    rng = np.random.default_rng(8)
    same = rng.integers(0, 2**64, 5_000, np.uint64)
    alone = rng.integers(0, 2**64, 10, np.uint64)
    source = np.array_split(digests(np.concatenate([same, alone])), 3)
    index = np.array_split(digests(np.concatenate([same[::-1], same[3:4]])), 2)
    index[1]["topic"][-1] = 3
    sides = enumerate((source, index))
    cut = [_cut(part, side, origin, 6, 1) for side, parts in sides for origin, part in enumerate(parts)]
    blocks = pa.Table.from_batches(cut).sort_by("range")
    shape = DigestShape.of(6, 5_000)
    found = _compared(blocks.to_batches(max_chunksize=7), shape)
    assert (found.source, found.index, found.differing, found.repeated) == (5_010, 5_000, 11, 1)
    differing = np.append(alone, same[3])
    table = DigestTable(shape, found.blocks, None if found.whole is None else np.frombuffer(found.whole, np.uint64))
    assert table.may_hold(differing).all()
    if most:
        # the second half of the index has the digest under two topics
        assert (found.origins(0), found.origins(1)) == ([0, 2], [1])
        assert np.flatnonzero(table.may_hold(same)).tolist() == [3]
    else:
        assert found.origins(0) is found.origins(1) is found.whole is None
        assert np.count_nonzero(table.may_hold(same)) < 6


def test_the_result_of_a_partition_takes_few_bytes_for_each_differing_digest() -> None:
    """The driver holds the results of all partitions."""
    entries = np.random.default_rng(3).integers(0, 2**64, 20_000, np.uint64)
    cut = [_cut(part, 0, origin, 6, 1) for origin, part in enumerate(np.array_split(digests(entries), 10_000))]
    blocks = pa.Table.from_batches(cut).sort_by("range").to_batches()
    found = _compared(blocks, DigestShape.of(6, len(entries)))
    assert found.differing == len(entries) and found.origins(0) == list(range(10_000)) and found.origins(1) == []
    bare = pickle.dumps(replace(found, places=(b"", b"")))
    assert len(pickle.dumps(found)) - len(bare) <= 4 * 10_000 + 100


@pytest.mark.parametrize("range_bits, entries", [(0, 1), (6, 5_000), (11, 1 << 40)])
def test_a_table_holds_what_was_added_and_little_else(range_bits: int, entries: int) -> None:
    rng = np.random.default_rng(9)
    shape = DigestShape.of(range_bits, entries)
    added, others = (rng.integers(0, 2**64, count, np.uint64) for count in (3_000, 100_000))
    ranges = added >> np.uint64(64 - range_bits) if range_bits else np.zeros(len(added), np.uint64)
    blocks = [(number, shape.block(added[ranges == number])) for number in np.unique(ranges).tolist()]
    table = DigestTable(shape, blocks)
    assert table.may_hold(added).all()
    filled = 1 - np.exp(-2 * len(added) / shape.bits)
    assert np.count_nonzero(table.may_hold(others)) <= len(others) * filled**2 * 1.2 + 9
    assert sum(len(block) for _, block in blocks) <= 32 << 20
    assert not DigestTable(shape, []).may_hold(others).any()


SCHEMA = PRESETS["native"].schema
IDENTITY, VALUE = identity_dtype(SCHEMA), value_dtype(SCHEMA)
Entry = tuple[bytes, bytes, str | None, str | None, str | None]


@pytest.mark.parametrize("bits", [6, 17])
@pytest.mark.parametrize("held", [1, 5, 1_000])
def test_blocks_hold_every_entry_however_few_are_held(monkeypatch: pytest.MonkeyPatch, held: int, bits: int) -> None:
    monkeypatch.setattr(matching, "_HELD", held)
    rng = np.random.default_rng(2)
    kinds = [(name, dtype[name]) for dtype in (IDENTITY, VALUE) for name in dtype.names or ()]
    counts = enumerate((3, 4, 1, 9))
    parts = [
        Part(0, {n: rng.integers(0, 99, count).astype(k) for n, k in kinds}, None, origin=number // 2)
        for number, count in counts
    ]
    wanted = np.concatenate([_digests(part, SCHEMA) for part in parts])
    blocks = [row for batch in _blocks(parts, SCHEMA, bits, 1) for row in batch.to_pylist()]
    found = np.concatenate([np.frombuffer(row["digests"], DIGEST) for row in blocks])
    assert np.sort(found["entry"]).tolist() == np.sort(wanted["entry"]).tolist()
    for row in blocks:
        of_origin = np.concatenate([_digests(part, SCHEMA) for part in parts if part.origin == row["origin"]])
        assert np.isin(np.frombuffer(row["digests"], DIGEST)["entry"], of_origin["entry"]).all()
        assert set((np.frombuffer(row["digests"], DIGEST)["entry"] >> np.uint64(64 - bits)).tolist()) == {row["range"]}


def by_hand(source: list[Entry], index: list[Entry], spans: list[Any], base: int) -> list[tuple[Any, ...]]:
    """Return each difference in the pages' terms: (kind, identity, said, said topic, held, held topic, object)."""
    told = []
    for identity in sorted({entry[0] for entry in source + index}):
        sides = [[entry for entry in some if entry[0] == identity] for some in (source, index)]
        said: list[tuple[bytes, str | None]] = []
        held: list[tuple[bytes, str | None, str]] = []
        for value in sorted({entry[1] for side in sides for entry in side}):
            mine, theirs = ([entry for entry in side if entry[1] == value] for side in sides)
            topics, others = {entry[2] for entry in mine}, {entry[2] for entry in theirs} - {None}
            both = zip((min, max), (others, others), (topics, topics), strict=True) if mine and others else ()
            wrong = [end(found) for end, found, known in both if end(found) != end(known)]
            if mine and (not theirs or wrong):
                said.append((value, min(topics) if theirs else None))
            if theirs and (not mine or wrong):
                held.append((value, wrong[0] if mine else None, min(entry[4] for entry in theirs)))
        for one, other in itertools.zip_longest(said, held):
            kind = "extra" if one is None else "missing" if other is None else "wrong"
            if one is not None and other is None:
                key_hash = int(np.frombuffer(identity, IDENTITY)[0]["key_hash"])
                second = int(np.frombuffer(one[0], VALUE)[0]["second"])
                if any(first <= second <= last and low <= key_hash % base < high for first, last, low, high in spans):
                    kind = "unproven"
            told.append((kind, identity, *(one or (None, None)), *(other or (None, None, None))))
    return told


def test_differing_entries_are_paired(spark: Any) -> None:
    """There are few identities and values, most of them repeated, under topics that a table may lack."""
    rng = np.random.default_rng(1)

    def some(count: int, *, stored: bool) -> Part:
        columns = {name: rng.integers(0, 18, count).astype(IDENTITY[name]) for name in IDENTITY.names or ()}
        columns |= {"queue_id": np.zeros(count), "offset": np.zeros(count), "fingerprint": np.zeros(count)}
        columns |= {"second": rng.integers(0, 4, count), "size": rng.integers(0, 2, count)}
        names = pa.array(np.where(rng.random(count) < 0.3, "b", "a")).dictionary_encode()
        if stored:
            return Part(1, columns, None if rng.random() < 0.2 else names, None, f"object {rng.integers(3)}")
        return Part(0, columns, names, pa.array([f"key {one}" for one in columns["key_hash"]]))

    parts = [some(9, stored=False) for _ in range(9)] + [some(7, stored=True) for _ in range(12)]
    rows = pa.Table.from_batches(list(_rows(parts, SCHEMA)))
    entries: tuple[list[Entry], list[Entry]] = ([], [])
    for row in rows.to_pylist():
        entries[row.pop("side")].append(tuple(row.values()))
    # an object with slots 0 to 2 of 4, and seconds 1 and 2
    stored = SimpleNamespace(second_min=1, second_max=2)
    frame = spark.createDataFrame(rows.to_pandas().where(lambda cells: cells.notna(), None), _ROWS)
    damaged: Any = [Target(stored, 0, 3)]  # type: ignore[arg-type]
    told = _told(_pairs(frame), damaged, 4, "abs", SCHEMA).collect()
    found = []
    for row in told:
        one = _difference(row, SCHEMA)
        assert one.key in (None, f"key {one.key_hash}") and (one.expected is None or one.key is not None)
        said, held = ((None, None) if side is None else (side.value, side.wrong) for side in (row.said, row.held))
        found.append((row.kind, row.identity, *said, *held, one.object))
    expected = by_hand(*entries, [(1, 2, 0, 3)], 4)
    assert sorted(map(repr, found)) == sorted(map(repr, expected))
    assert {*KINDS, "unproven"} == {row[0] for row in expected}


@pytest.mark.parametrize("objects, groups", [(0, 0), (1, 1), (1_000, 500), (90_000, 4_096)])
def test_small_objects_share_groups_of_a_bounded_number(objects: int, groups: int) -> None:
    """The shuffle has a row for each group in each range."""
    stored: Any = [SimpleNamespace(second_min=n, count=1 << 16, size_bytes=1) for n in range(objects)]
    found = groups_of(stored)
    assert groups * 0.9 <= len(found) <= groups
    assert sorted(one.second_min for group in found for one in group) == list(range(objects))


def test_of_both_hash_rules_either_slot_may_be_in_a_damaged_object() -> None:
    stored: Any = SimpleNamespace(second_min=0, second_max=9)
    one = [Target(stored, 3, 4)]
    hashes, seconds = np.array([3, 2**31 - 3, 5]), np.array([9, 0, 5])
    assert may_hold(one, 64, "both", hashes, seconds).tolist() == [True, True, False]
    assert may_hold(one, 64, "abs", hashes, seconds).tolist() == [True, False, False]
    assert not may_hold(one, 64, "both", hashes, seconds + 10).any()
