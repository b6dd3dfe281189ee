"""Both sides range by range: what differs is told, whatever is there more than once. No Spark."""

from __future__ import annotations

from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from tiered_index.format.layout import PRESETS
from tiered_index.spark.audit.differences import Differences
from tiered_index.spark.audit.entries import Part, identity_dtype, value_dtype
from tiered_index.spark.audit.matching import DIGEST, _compared, _cut, compare_range
from tiered_index.spark.audit.pairing import KINDS, Hidden, Told, _Values, cut, ordered, pack, pair
from tiered_index.spark.audit.ranges import Blocks, Ranges


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


def test_what_the_index_has_more_often_is_counted() -> None:
    source = digests([1, 1, 2, 3])
    assert compare_range(source, digests([1, 2, 3, 3, 3, 2, 9, 9]))[3] == 1 + 2 + 1
    assert compare_range(source, digests([3, 1, 2, 1]))[3] == 0
    assert Differences({}, (), 0, 4, 4, repeated=4).remarks[0].startswith("4 entries of the index are there more than")


def test_an_entry_under_another_topic_differs() -> None:
    index = digests([1, 2, 3, 4])
    index["topic"][2] = 5
    assert compare_range(digests([1, 2, 3, 4]), index)[2].tolist() == [3]


def cut_ranges(digests_of_sides: tuple[list[Any], list[Any]], ranges: Ranges) -> list[Blocks]:
    """Return what tasks would meet of one partition."""
    met: dict[int, Blocks] = {}
    for side, parts in enumerate(digests_of_sides):
        for part in parts:
            numbers, blocks = _cut([part], ranges)
            for number, block in zip(numbers.tolist(), blocks, strict=True):
                met.setdefault(number, Blocks(number, ([], []))).sides[side].append(block.as_py())
    return [met[number] for number in sorted(met)]


def test_what_is_cut_is_compared_whole_and_ranges_that_differ_are_told() -> None:
    rng = np.random.default_rng(8)
    same = rng.integers(0, 2**64, 5_000, np.uint64)
    alone = rng.integers(0, 2**64, 10, np.uint64)
    source = np.array_split(digests(np.concatenate([same, alone])), 3)
    found = _compared(iter(cut_ranges((source, np.array_split(digests(same[::-1]), 2)), Ranges(6, 1))), frozenset())
    assert (found.source, found.index) == (5_010, 5_000)
    differing = set((alone >> np.uint64(58)).tolist())
    both = np.concatenate([same, same, alone]) >> np.uint64(58)
    assert found.differing == {number: int((both == number).sum()) for number in differing}


SCHEMA = PRESETS["native"].schema
IDENTITY, VALUE = identity_dtype(SCHEMA), value_dtype(SCHEMA)
Entry = tuple[bytes, bytes, str | None, str | None, str | None]


def by_hand(source: list[Entry], index: list[Entry], spans: list[Any], base: int) -> list[tuple[Any, ...]]:
    """Return each difference, as the pages say it: (kind, identity, said, said topic, held, held topic, object)."""
    told = []
    for identity in sorted({entry[0] for entry in source + index}):
        sides: tuple[dict[bytes, Any], dict[bytes, Any]] = ({}, {})
        for side, some in zip(sides, (source, index), strict=True):
            for entry in some:
                if entry[0] == identity:
                    side.setdefault(entry[1], []).append(entry)
        said: list[tuple[bytes, str | None]] = []
        held: list[tuple[bytes, str | None, str]] = []
        for value in sorted({*sides[0], *sides[1]}):
            mine, theirs = sides[0].get(value, []), sides[1].get(value, [])
            topics, others = {entry[2] for entry in mine}, {entry[2] for entry in theirs} - {None}
            both = zip((min, max), (others, others), (topics, topics), strict=True) if mine and others else ()
            wrong = [end(found) for end, found, known in both if end(found) != end(known)]
            if mine and (not theirs or wrong):
                said.append((value, min(topics) if theirs else None))
            if theirs and (not mine or wrong):
                held.append((value, wrong[0] if mine else None, min(entry[4] for entry in theirs)))
        for place in range(max(len(said), len(held))):
            one = said[place] if place < len(said) else None
            other = held[place] if place < len(held) else None
            kind = "extra" if one is None else "missing" if other is None else "wrong"
            if one is not None and other is None:
                key_hash, second = (
                    int(np.frombuffer(cell, kind)[0][name])
                    for cell, kind, name in ((identity, IDENTITY, "key_hash"), (one[0], VALUE, "second"))
                )
                if any(first <= second <= last and low <= key_hash % base < high for first, last, low, high in spans):
                    kind = "unproven"
            told.append((kind, identity, *(one or (None, None)), *(other or (None, None, None))))
    return told


@pytest.mark.parametrize("seed", range(4))
def test_what_differs_is_laid_side_by_side(seed: int) -> None:
    """Few identities and values, each often more than once, under topics that a table may lack."""
    rng = np.random.default_rng(seed)

    def some(count: int, *, stored: bool) -> list[Part]:
        columns = {name: rng.integers(0, 6, count).astype(IDENTITY[name]) for name in IDENTITY.names or ()}
        columns |= {"queue_id": np.zeros(count), "offset": np.zeros(count), "fingerprint": np.zeros(count)}
        columns |= {"second": rng.integers(0, 4, count), "size": rng.integers(0, 2, count)}
        names = pa.array(np.where(rng.random(count) < 0.3, "b", "a")).dictionary_encode()
        if stored:
            return [Part(1, columns, None if rng.random() < 0.2 else names, None, f"object {rng.integers(3)}")]
        keys = pa.array([f"key {one}" for one in columns["key_hash"]])
        return [Part(0, columns, names, keys)]

    sides = ([some(9, stored=False)[0] for _ in range(3)], [some(7, stored=True)[0] for _ in range(4)])
    met: dict[int, Blocks] = {}
    entries: tuple[list[Entry], list[Entry]] = ([], [])
    for side, parts in enumerate(sides):
        batches = [pack(part, SCHEMA) for part in parts]
        for row in (row for batch in batches for row in batch.to_pylist()):
            entries[side].append(tuple(row[name] for name in ("identity", "value", "topic", "key", "object")))
        numbers, blocks = cut(batches, Ranges(2, 1))
        for number, block in zip(numbers.tolist(), blocks, strict=True):
            met.setdefault(number, Blocks(number, ([], []))).sides[side].append(block)
    spans = [(1, 2, 0, 3)]
    hidden = Hidden({}, frozenset(), 4, "abs")
    told = Told(1_000)
    for one in met.values():
        told.take(_Values.of(one), hidden, spans, SCHEMA)
    expected = by_hand(*entries, spans, 4)
    kinds = (*KINDS, "unproven")
    assert told.counts == [sum(row[0] == kind for row in expected) for kind in kinds] and sum(told.counts[:3]) > 5
    columns = ["identity", "said", "said_topic", "held", "held_topic", "object"]
    for kind, table in zip(kinds, told.listed, strict=False):
        rows = [tuple(row[name] for name in columns) for row in table.sort_by("identity").to_pylist()]
        assert sorted(map(repr, rows)) == sorted(repr(row[1:]) for row in expected if row[0] == kind)
    few = Told(3)
    for one in met.values():
        few.add(pair(iter([one]), frozenset(), hidden, SCHEMA, 3))
    assert few.listed[1].to_pylist() == told.listed[1].slice(0, 3).to_pylist()
    assert few.listed[2].to_pylist() == told.listed[2].slice(0, 3).to_pylist()


@pytest.mark.parametrize("values", [1, 3, 500, 2**63])
def test_rows_are_ordered_as_a_stable_sort_does(values: int) -> None:
    """From all rows alike, by groups of some and pairs, to all rows apart."""
    rng = np.random.default_rng(values)
    main = np.concatenate([rng.integers(0, values, 1_000, np.uint64)] * 2)
    words = [*rng.integers(0, 2, (3, len(main)), np.uint64), main]
    assert (ordered(words) == np.lexsort(words)).all()
    assert len(ordered([word[:0] for word in words])) == 0
