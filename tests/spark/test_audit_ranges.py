"""Both sides of an audit: it names the differences, also those between repeated entries."""

from __future__ import annotations

import itertools
from types import SimpleNamespace
from typing import Any

import numpy as np
import pyarrow as pa

from tiered_index.format.layout import PRESETS
from tiered_index.format.slots import SlotMap
from tiered_index.retention import Expired
from tiered_index.spark.audit.differences import (
    _ROWS,
    KINDS,
    Differences,
    _difference,
    _pairs,
    _rows,
    _told,
    _values,
    may_hold,
)
from tiered_index.spark.audit.entries import ALL_TIME, Part, Picked, identity_dtype, value_dtype
from tiered_index.tombstones import Tombstone

SCHEMA = PRESETS["native"].schema
IDENTITY, VALUE = identity_dtype(SCHEMA), value_dtype(SCHEMA)
Entry = tuple[bytes, bytes, str | None, str | None, str | None]


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
            wrong = [end(topics_found) for end, topics_found, known in both if end(topics_found) != end(known)]
            if mine and (not theirs or wrong):
                said.append((value, min(topics) if theirs else None))
            if theirs and (not mine or wrong):
                held.append((value, wrong[0] if mine else None, min(entry[4] for entry in theirs)))
        for said_value, held_value in itertools.zip_longest(said, held):
            kind = "extra" if said_value is None else "missing" if held_value is None else "wrong"
            if said_value is not None and held_value is None:
                key_hash = int(np.frombuffer(identity, IDENTITY)[0]["key_hash"])
                second = int(np.frombuffer(said_value[0], VALUE)[0]["second"])
                if any(first <= second <= last and low <= key_hash % base < high for first, last, low, high in spans):
                    kind = "unproven"
            told.append((kind, identity, *(said_value or (None, None)), *(held_value or (None, None, None))))
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
        return Part(0, columns, names, pa.array([f"key {key_hash}" for key_hash in columns["key_hash"]]))

    parts = [some(9, stored=False) for _ in range(9)] + [some(7, stored=True) for _ in range(12)]
    rows = pa.Table.from_batches(list(_rows(parts, SCHEMA)))
    entries: tuple[list[Entry], list[Entry]] = ([], [])
    for row in rows.to_pylist():
        entries[row.pop("side")].append(tuple(row.values()))
    # an object with slots 0 to 2 of 4, and seconds 1 and 2
    damaged: Any = [SimpleNamespace(second_min=1, second_max=2, shard=slots_of(SlotMap(4), 0, 3))]
    frame = spark.createDataFrame(rows.to_pandas().where(lambda cells: cells.notna(), None), _ROWS)
    told = _told(_pairs(_values(frame)), damaged, "abs", SCHEMA).collect()
    told_rows = []
    for row in told:
        difference = _difference(row, SCHEMA)
        assert difference.key in (None, f"key {difference.key_hash}") and (
            difference.expected is None or difference.key is not None
        )
        # PySpark 4.0 returns cells of bytes as `bytearray`
        sides = row.said, row.held
        said, held = ((None, None) if side is None else (bytes(side.value), side.wrong) for side in sides)
        told_rows.append((row.kind, bytes(row.identity), *said, *held, difference.object))
    expected = by_hand(*entries, [(1, 2, 0, 3)], 4)
    assert sorted(map(repr, told_rows)) == sorted(map(repr, expected))
    assert {*KINDS, "unproven"} == {row[0] for row in expected}


def test_of_both_hash_rules_either_slot_may_be_in_a_damaged_object() -> None:
    damaged: Any = [SimpleNamespace(second_min=0, second_max=9, shard=slots_of(SlotMap(64), 3, 4))]
    hashes, seconds = np.array([3, 2**31 - 3, 5]), np.array([9, 0, 5])
    assert may_hold(damaged, "both", hashes, seconds).tolist() == [True, True, False]
    assert may_hold(damaged, "abs", hashes, seconds).tolist() == [True, False, False]
    assert not may_hold(damaged, "both", hashes, seconds + 10).any()
    # -2^31 has the hash 0 by either rule; an object that is no shard has all slots
    damaged[0].shard = slots_of(SlotMap(64), 0, 1)
    assert may_hold(damaged, "both", np.array([0]), np.array([0])).all()
    damaged[0].shard = None
    assert may_hold(damaged, "both", hashes, seconds).all()


def slots_of(slots: SlotMap, low: int, high: int) -> Any:
    """Return a shard with a range of slots."""
    return SimpleNamespace(slots=slots, slot_low=low, slot_high=high)


def test_of_both_hash_rules_erased_keys_are_left_out_by_their_stored_hashes() -> None:
    """Other hashes are compared: the smaller one of two that a key may have."""
    is_folded = False
    for key in (f"message-{number}" for number in range(20)):
        stone = Tombstone.of("t", 10_000, key=key)
        picked = Picked(*ALL_TIME, "both", Expired(tombstones=(stone,)))
        for stored_hash in stone.hashes:
            stored, numbers = np.array([stored_hash], np.int32), np.ones(1, np.int64)
            columns: Any = {"stored_hash": stored, "key_hash": picked.as_compared(stored), "second": numbers}
            columns |= {"topic_id": numbers, "queue_id": numbers, "fingerprint": np.array([stone.fingerprint])}
            is_folded = is_folded or columns["key_hash"][0] not in stone.hashes
            assert not len(picked.rows(columns, {1: "t"})) and len(picked.rows(columns, {1: "u"}))
    assert is_folded
