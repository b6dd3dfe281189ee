"""Both sides of an audit: it names the differences, also those between repeated entries."""

from __future__ import annotations

import itertools
from types import SimpleNamespace
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from tiered_index.format.layout import PRESETS
from tiered_index.spark.audit.differences import (
    _ROWS,
    KINDS,
    Differences,
    Target,
    _difference,
    _pairs,
    _rows,
    _told,
    _values,
    may_hold,
)
from tiered_index.spark.audit.entries import Part, identity_dtype, value_dtype
from tiered_index.spark.audit.ranges import Ranges, sums_of

SCHEMA = PRESETS["native"].schema
IDENTITY, VALUE = identity_dtype(SCHEMA), value_dtype(SCHEMA)
NAMES = [(name, kind[name]) for kind in (IDENTITY, VALUE) for name in kind.names or ()]
Entry = tuple[bytes, bytes, str | None, str | None, str | None]


def drawn(rng: Any, count: int, side: int, topics: str = "ab") -> Part:
    """Return entries of ten days; `topics` are letters, none: unknown."""
    columns = {name: rng.integers(0, 2**31, count).astype(kind) for name, kind in NAMES}
    columns["second"] = rng.integers(0, 864_000, count)
    names = [topics[number % len(topics)] for number in range(count)] if topics else []
    return Part(side, columns, pa.array(names, pa.string()).dictionary_encode() if topics else None)


def taken(part: Part, places: Any, side: int) -> Part:
    columns = {name: values[places] for name, values in part.columns.items()}
    return Part(side, columns, None if part.topics is None else part.topics.take(pa.array(places)))


def added_up(ranges: Ranges, *parts: Part | str) -> Any:
    """Return the sums of both sides (i64, 2 x 3 x ranges), and the names of unread objects."""
    sums, unread = np.zeros((2, 3, len(ranges)), np.int64), []
    for row in (row for batch in sums_of(parts, ranges, NAMES) for row in batch.to_pylist()):
        if row["range"] < 0:
            unread.append(row["unread"])
        else:
            sums[row["side"], :, row["range"]] += [row["entries"], row["low"], row["high"]]
    return sums, unread


def test_ranges_differ_that_have_other_entries_whatever_their_order_and_batches() -> None:
    rng = np.random.default_rng(7)
    source = drawn(rng, 5_000, 0)
    ranges = Ranges.of([SimpleNamespace(second_min=0, second_max=863_999)], 1 << 20)  # type: ignore[list-item]
    assert 256 <= len(ranges) <= 1 << 16
    cut = np.array_split(rng.permutation(5_000), 3)
    same = [taken(source, places, 1) for places in cut]
    sums, unread = added_up(ranges, source, same[0], "an object", *same[1:])
    assert (sums[0] == sums[1]).all() and sums[0][0].sum() == 5_000 and unread == ["an object"]
    for name, value in (("size", 1), ("second", 86_400), ("fingerprint", 1)):
        other = taken(source, np.arange(5_000), 1)
        other.columns[name][7] += value
        sums, _ = added_up(ranges, source, other)
        differ = (sums[0] != sums[1]).any(axis=0)
        marked = ranges.marking(differ)
        # an entry with another second is in another range
        assert np.count_nonzero(differ) == (2 if name == "second" else 1)
        assert marked.differ(source.columns)[7] and marked.differ(other.columns)[7]
        seconds = [int(one.columns["second"][7]) for one in (source, other)]
        stored: Any = [SimpleNamespace(second_min=second, second_max=second) for second in seconds]
        assert all(map(marked.may_differ, stored))
        away = (seconds[0] + 432_000) % 864_000
        assert not marked.may_differ(SimpleNamespace(second_min=away, second_max=away))  # type: ignore[arg-type]
    for topics, changed in (("ba", True), ("", True)):
        other = Part(1, source.columns, drawn(rng, 5_000, 1, topics).topics)
        sums, _ = added_up(ranges, source, other)
        assert (sums[0] != sums[1]).any() == changed and (sums[0][0] == sums[1][0]).all()


@pytest.mark.parametrize("entries, count", [(0, 64), (1 << 20, 1 << 10), (10**9, 1 << 16)])
def test_the_number_of_ranges_is_bounded_and_each_entry_has_one(entries: int, count: int) -> None:
    ranges = Ranges.of([SimpleNamespace(second_min=5, second_max=9_000)], entries)  # type: ignore[list-item]
    assert count // 4 <= len(ranges) <= count * 4 and len(ranges) <= 1 << 16
    seconds, hashes = np.array([-(2**40), 5, 9_000, 2**40]), np.array([0, 2**31 - 1, 0, 2**31 - 1], np.int32)
    numbers = ranges.numbers({"second": seconds, "key_hash": hashes})
    assert numbers.min() >= 0 and numbers.max() == len(ranges) - 1 and numbers[0] < numbers[1] < numbers[2] < numbers[3]


def test_remarks_of_repeated_entries_and_of_nothing() -> None:
    assert Differences({}, (), 0, 4, 4, repeated=4).remarks[0].startswith("the index has 4 entries more than once")
    assert Differences({}, (), 0, 0, 0).remarks == ["nothing was compared: neither side has an entry within the bounds"]
    assert Differences({}, (), 0, 1, 1).remarks == []


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
    told = _told(_pairs(_values(frame)), damaged, 4, "abs", SCHEMA).collect()
    found = []
    for row in told:
        one = _difference(row, SCHEMA)
        assert one.key in (None, f"key {one.key_hash}") and (one.expected is None or one.key is not None)
        # PySpark 4.0 returns cells of bytes as `bytearray`
        sides = row.said, row.held
        said, held = ((None, None) if side is None else (bytes(side.value), side.wrong) for side in sides)
        found.append((row.kind, bytes(row.identity), *said, *held, one.object))
    expected = by_hand(*entries, [(1, 2, 0, 3)], 4)
    assert sorted(map(repr, found)) == sorted(map(repr, expected))
    assert {*KINDS, "unproven"} == {row[0] for row in expected}


def test_of_both_hash_rules_either_slot_may_be_in_a_damaged_object() -> None:
    stored: Any = SimpleNamespace(second_min=0, second_max=9)
    one = [Target(stored, 3, 4)]
    hashes, seconds = np.array([3, 2**31 - 3, 5]), np.array([9, 0, 5])
    assert may_hold(one, 64, "both", hashes, seconds).tolist() == [True, True, False]
    assert may_hold(one, 64, "abs", hashes, seconds).tolist() == [True, False, False]
    assert not may_hold(one, 64, "both", hashes, seconds + 10).any()
