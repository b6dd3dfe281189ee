"""`TimeRangeSkipList` under threads that insert, remove and scan with the switch interval lowered.

`tests/property/test_skiplist.py` checks that scans miss nothing. Here, a scan's nodes are in order, and each was in the
list at some moment of the scan. A scan that begins after a removal never yields the removed node. At the end the list
is whole.
"""

from __future__ import annotations

import random

import pytest

from tests.property.test_skiplist import check_reach
from tests.stress.crew import Crew
from tiered_index.service.read.skiplist import TimeRangeSkipList

SPAN = 80


class Interval:
    """A handle."""

    def __init__(self, number: int, begin: int, end: int) -> None:
        self.number, self.begin, self.end = number, begin, end


def churn(crew, tested, rng, remaining, gone, changes):
    """Insert and remove nodes at random, some with long ranges."""
    mine = []
    for number in range(changes):
        if crew.stop.is_set():
            return
        if len(mine) < 30 and rng.random() < 0.55:
            begin = rng.randrange(SPAN)
            handle = Interval(number, begin, begin + rng.choice((0, 1, 5, 2 * SPAN)))
            mine.append(tested.insert(handle.begin, handle.end, handle))
        elif mine:
            node = mine.pop(rng.randrange(len(mine)))
            tested.remove(node)
            gone.append(node)
    remaining += mine


def scan(crew, tested, rng, steady, gone):
    while not crew.stop.is_set():
        low = rng.randrange(-3, SPAN + 3)
        high = low + rng.choice((0, 1, 7, 3 * SPAN))
        seen, last, removed = [], None, set(gone)
        for node in tested.overlapping(low, high):
            handle = node.value
            assert node not in removed, "it was removed before the scan began"
            assert handle.begin <= high and handle.end >= low, "not overlapping"
            assert last is None or node.key > last, f"out of order or twice: {node.key} after {last}"
            last = node.key
            seen.append(handle)
        missing = {handle for handle in steady if handle.begin <= high and handle.end >= low} - set(seen)
        assert not missing, f"[{low}, {high}] misses {[handle.number for handle in missing]}"


def check_at_rest(tested, nodes):
    expected = sorted(nodes, key=lambda node: node.key)
    assert tested.overlapping(-(2**61), 2**61) == expected
    for low in range(-3, 3 * SPAN, 7):
        for high in (low, low + 9, low + 400):
            assert list(tested.overlapping(low, high)) == [n for n in expected if n.begin <= high and n.end >= low]
    check_reach(tested)


@pytest.mark.parametrize("seed", range(2))
def test_scans_are_in_order_and_complete_beside_changes(eager_switches, seed):
    rng = random.Random(seed)
    tested = TimeRangeSkipList(random.Random(seed))
    steady, nodes, gone = [], [], []
    for begin in range(0, SPAN, 4):
        handle = Interval(-begin - 1, begin, begin + rng.choice((0, 2, SPAN)))
        steady.append(handle)
        nodes.append(tested.insert(handle.begin, handle.end, handle))
    crew = Crew(seed)
    for number in range(2):
        crew.begin(f"scan-{number}", scan, crew, tested, random.Random(10 * seed + number), frozenset(steady), gone)
    own = [random.Random(50 * seed + n) for n in range(3)]
    crew.wait_for([crew.begin("change", churn, crew, tested, chance, nodes, gone, 2500) for chance in own])
    crew.finish()
    check_at_rest(tested, nodes)
