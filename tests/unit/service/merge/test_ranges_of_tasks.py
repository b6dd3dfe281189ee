"""The objects of each task of a merge: those that may have entries of its slots, found without comparing all pairs."""

import itertools

from hypothesis import given
from hypothesis import strategies as st

from tests.benchmarks.scale import synthetic_objects
from tests.support.changes import replace
from tiered_index.format.slots import SlotMap
from tiered_index.service.jobs.merge_plan import _by_range

BASE = 1000
PLAIN, *_ = [one for one in synthetic_objects(1000, BASE) if one.shard is None]
SHARD, *_ = [one for one in synthetic_objects(1000, BASE) if one.shard is not None]


@st.composite
def shards(draw):
    slots = draw(st.sampled_from([SlotMap(BASE), SlotMap(BASE, split=3), SlotMap(BASE, join=7)]))
    low, high = sorted(draw(st.lists(st.integers(0, BASE), min_size=2, max_size=2, unique=True)))
    low, high = slots.slots_of_base(low, high)
    return replace(SHARD, shard=replace(SHARD.shard, slots=slots, slot_low=low, slot_high=high))


@given(st.lists(shards() | st.just(PLAIN), max_size=8), st.sets(st.integers(1, BASE - 1), max_size=6).map(sorted))
def test_each_task_has_the_objects_that_overlap_its_slots(objects, inner):
    cuts = [0, *inner, BASE]
    expected = []
    for low, high in itertools.pairwise(cuts):
        has = []
        for one in objects:
            first, end = (0, 1) if one.shard is None else one.shard.slots.slots_of_base(low, high)
            if one.shard is None or (one.shard.slot_low < end and first < one.shard.slot_high):
                has.append(one)
        expected.append(has)
    assert _by_range(objects, cuts) == expected


def test_slots_are_computed_once_for_each_slot_map_and_task(monkeypatch):
    calls = []
    real = SlotMap.slots_of_base
    monkeypatch.setattr(SlotMap, "slots_of_base", lambda *args: calls.append(args) or real(*args))
    shards = [one for one in synthetic_objects(5000, BASE) if one.shard is not None]
    found = _by_range(shards, range(0, BASE + 1, 10))
    assert len(calls) == 100
    assert sum(map(len, found)) >= len(shards)
