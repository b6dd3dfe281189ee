"""`TimeRangeSkipList` under threads that insert, remove and scan with the switch interval lowered.

Beside `tests/property/test_skiplist.py` (nothing is missed): what a scan yields is in order and was in the list at some
moment of it, a scan that begins after a removal never meets the node, and rest finds the list whole.
"""

from __future__ import annotations

import random
import threading

import pytest

from tests.stress.crew import Crew
from tiered_index.service.catalog.catalog import Catalog
from tiered_index.service.catalog.skiplist import TimeRangeSkipList

SPAN = 80


class Interval:
    """A handle."""

    def __init__(self, number: int, begin: int, end: int) -> None:
        self.number, self.begin, self.end = number, begin, end


def churn(crew, tested, rng, kept, changes):
    """Insert and remove at random, some of them far-reaching ones."""
    mine = []
    for number in range(changes):
        if crew.stop.is_set():
            return
        if len(mine) < 30 and rng.random() < 0.55:
            begin = rng.randrange(SPAN)
            handle = Interval(number, begin, begin + rng.choice((0, 1, 5, 2 * SPAN)))
            mine.append(tested.insert(handle.begin, handle.end, handle))
        elif mine:
            tested.remove(mine.pop(rng.randrange(len(mine))))
    kept += mine


def scan(crew, tested, rng, steady):
    while not crew.stop.is_set():
        low = rng.randrange(-3, SPAN + 3)
        high = low + rng.choice((0, 1, 7, 3 * SPAN))
        seen, last = [], None
        for node in tested.overlapping(low, high):
            handle = node.value
            assert handle.begin <= high and handle.end >= low, "not overlapping"
            assert last is None or node.key > last, f"out of order or twice: {node.key} after {last}"
            last = node.key
            seen.append(handle)
        missing = {h.number for h in steady if h.begin <= high and h.end >= low} - {
            h.number for h in seen if h in steady
        }
        assert not missing, f"[{low}, {high}] misses {missing}"


def check_at_rest(tested, nodes):
    expected = sorted(nodes, key=lambda node: node.key)
    assert tested.overlapping(-(2**61), 2**61) == expected
    for low in range(-3, 3 * SPAN, 7):
        for high in (low, low + 9, low + 400):
            assert list(tested.overlapping(low, high)) == [n for n in expected if n.begin <= high and n.end >= low]
    for node in [tested._head, *expected]:
        for level in range(len(node.links)):
            target, reach = node.links[level]
            ends, step = [], node
            while step is not target and (step := step.links[0][0]) is not None:
                ends.append(step.end)
            assert not ends or reach == max(ends), "at rest a link says exactly what it passes over"


@pytest.mark.parametrize("seed", range(2))
def test_scans_are_in_order_and_complete_beside_changes(eager_switches, seed):
    rng = random.Random(seed)
    tested = TimeRangeSkipList(random.Random(seed))
    steady = []
    nodes = []
    for begin in range(0, SPAN, 4):
        handle = Interval(-begin - 1, begin, begin + rng.choice((0, 2, SPAN)))
        steady.append(handle)
        nodes.append(tested.insert(handle.begin, handle.end, handle))
    crew = Crew(seed)
    for number in range(2):
        crew.begin(f"scan-{number}", scan, crew, tested, random.Random(10 * seed + number), frozenset(steady))
    changers = [
        crew.begin(f"change-{n}", churn, crew, tested, random.Random(50 * seed + n), nodes, 2500) for n in range(3)
    ]
    crew.wait_for(changers)
    crew.finish()
    check_at_rest(tested, nodes)


@pytest.mark.parametrize("seed", range(2))
def test_what_was_removed_before_a_scan_is_not_met_by_it(eager_switches, seed):
    """A scan knows what had gone when it began."""
    rng = random.Random(seed)
    tested, gone, lock = TimeRangeSkipList(random.Random(seed)), set(), threading.Lock()
    crew = Crew(seed)

    def change():
        mine = []
        for number in range(2000):
            if crew.stop.is_set():
                return
            begin = rng.randrange(SPAN)
            mine.append(tested.insert(begin, begin + rng.choice((0, 3, SPAN)), number))
            if len(mine) > 25:
                node = mine.pop(rng.randrange(len(mine)))
                tested.remove(node)
                with lock:
                    gone.add(id(node))
                    kept_alive.append(node)

    kept_alive = []  # so that no id is used again

    def look():
        while not crew.stop.is_set():
            with lock:
                before = set(gone)
            met = {id(node) for node in tested.overlapping(0, 3 * SPAN)} & before
            assert not met, f"{len(met)} nodes that had been removed"

    crew.begin("look-1", look)
    crew.begin("look-2", look)
    crew.wait_for([crew.begin("change", change)])
    crew.finish()


class File:
    """A file handle of a catalog; its successor has the same id and another place."""

    lane, is_local, sequence = "main", True, 0

    def __init__(self, file_id, place, second_min, second_max):
        self.file_id, self.place, self.second_min, self.second_max = file_id, place, second_min, second_max


def test_a_catalog_yields_each_file_once_in_every_moment_and_disposes_after_its_readers(eager_switches):
    """Files grow, are replaced state by state, and go; a reader meets each once and nothing it met is disposed of."""
    catalog, crew, disposed = Catalog(), Crew(3), set()
    begins = list(range(0, SPAN, 2))

    def live(first):
        rng = random.Random(first)
        for turn in range(120):
            for begin in begins[first::3]:
                if crew.stop.is_set():
                    return
                old = catalog.get(f"f{begin}")
                kind = rng.choice(("extend", "replace", "replace"))
                if kind == "extend":
                    old.second_min -= rng.randrange(2)
                    old.second_max += rng.randrange(3)
                    catalog.extend(old)
                else:
                    new = File(old.file_id, f"{turn}", old.second_min, old.second_max)
                    catalog.put(new, lambda gone=old: disposed.add(gone))
            catalog.reclaim()

    def look(number):
        rng = random.Random(number)
        while not crew.stop.is_set():
            with catalog.reading():
                low = rng.randrange(0, SPAN)
                found = catalog.overlapping(low, low + rng.choice((0, 5, SPAN)))
                ids = [handle.file_id for handle in found]
                assert len(ids) == len(set(ids))
                whole = {handle.file_id for handle in catalog.overlapping(-1000, 1000)}
                assert whole == {f"f{begin}" for begin in begins}, "a file is missing"
                assert not disposed & set(found), "disposed of under a reader"

    for begin in begins:
        catalog.put(File(f"f{begin}", "0", begin, begin + 1))
    for number in range(2):
        crew.begin(f"look-{number}", look, number)
    crew.wait_for([crew.begin(f"live-{first}", live, first) for first in range(3)])
    crew.finish()
    catalog.reclaim()
    assert not catalog._disposals
    assert len(disposed) > 1000
    assert not disposed & set(catalog.all())
