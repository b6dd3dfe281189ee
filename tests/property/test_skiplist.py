"""`TimeRangeSkipList` against a sorted list, and between the bytecodes of another call: a scan is in order, and misses
no handle that stays in the list.
"""

import random
import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st
from sortedcontainers import SortedKeyList

from tiered_index.service.read.files import skiplist
from tiered_index.service.read.files.skiplist import TimeRangeSkipList

_BOUND = st.integers(-8, 8)
_STEP = st.one_of(
    st.tuples(st.just("insert"), _BOUND, st.integers(0, 12)),
    st.tuples(st.just("remove"), st.integers(0, 10**6), st.just(0)),
    st.tuples(st.just("replace"), st.integers(0, 10**6), st.integers(0, 5)),
    st.tuples(st.just("extend"), st.integers(0, 10**6), st.integers(0, 9)),
    st.tuples(st.just("scan"), _BOUND, st.integers(0, 12)),
)


class _Oracle:
    """All nodes in order of begin descending, then age."""

    def __init__(self) -> None:
        self.rows = SortedKeyList(key=lambda row: (-row[0], row[2]))
        self.age = 0

    def insert(self, begin, end, node):
        self.rows.add((begin, end, self.age, node))
        self.age += 1

    def overlapping(self, begin, end):
        return [node for low, high, _, node in self.rows if low <= end and high >= begin]


@given(st.lists(_STEP, max_size=60), st.integers(0, 2**32))
def test_it_yields_what_a_sorted_list_yields(steps, seed):
    tested, oracle = TimeRangeSkipList(random.Random(seed)), _Oracle()
    for kind, first, second in steps:
        if kind == "insert":
            oracle.insert(first, first + second, tested.insert(first, first + second, object()))
        elif kind == "scan":
            assert list(tested.overlapping(first, first + second)) == oracle.overlapping(first, first + second)
        elif oracle.rows:
            begin, end, age, node = oracle.rows[first % len(oracle.rows)]
            if kind == "extend":
                oracle.rows.remove((begin, end, age, node))
                oracle.rows.add((begin, end + second, age, node))
                tested.extend(node, end + second)
                continue
            if kind == "replace":
                oracle.insert(begin - second, end + second, tested.insert(begin - second, end + second, node.value))
            oracle.rows.remove((begin, end, age, node))
            tested.remove(node)
        assert list(tested.overlapping(-100, 100)) == [row[3] for row in oracle.rows]
    for low in range(-9, 22, 3):
        for high in range(low, 22, 3):
            assert list(tested.overlapping(low, high)) == oracle.overlapping(low, high)


def test_a_node_is_removed_once_and_an_interval_does_not_end_before_it_begins():
    tested = TimeRangeSkipList()
    node = tested.insert(1, 2, "x")
    tested.remove(node)
    with pytest.raises(KeyError):
        tested.remove(node)
    with pytest.raises(ValueError, match="ends before"):
        tested.insert(2, 1, "x")
    assert list(tested.overlapping(-100, 100)) == []


class _Interleaving:
    """Runs one call and, at its n-th bytecode in the list's module, another: at every place of a thread switch."""

    def __init__(self, at, other):
        self.at, self.other, self.count = at, other, 0

    def run(self, call):
        before = sys.gettrace()
        sys.settrace(self._enter)
        try:
            return call()
        finally:
            sys.settrace(before)

    def _enter(self, frame, event, arg):
        if not frame.f_code.co_filename.endswith("service/read/files/skiplist.py"):
            return None
        frame.f_trace_opcodes = True
        return self._step

    def _step(self, frame, event, arg):
        if event == "opcode":
            self.count += 1
            if self.count == self.at:
                self.other()
        return self._step


@pytest.fixture
def few_levels(monkeypatch):
    monkeypatch.setattr(skiplist, "_MAX_LEVEL", 3)  # fewer bytecodes to try


class _Tall(random.Random):
    """Gives every second node a further level, so that links skip nodes also in a small list."""

    def random(self):
        return super().random() / 2


def _small_list(seed):
    """Make steady handles among passing ones, and the changes to try."""
    rng = random.Random(seed)
    tested, steady, passing = TimeRangeSkipList(_Tall(seed)), {}, []
    for i in range(9):
        begin = rng.randrange(12)
        end = begin + rng.choice((0, 1, 30))
        node = tested.insert(begin, end, i)
        if rng.random() < 0.6:
            steady[i] = (begin, end)
            keep = node
        else:
            passing.append(node)
    return tested, steady, passing, keep, rng


def _changes(tested, passing, steady_node, rng):
    begin = rng.randrange(12)
    end = begin + rng.choice((0, 1, 30))
    leaving = rng.choice(passing) if passing else None

    def replace():
        tested.insert(steady_node.begin, steady_node.end, steady_node.value)
        tested.remove(steady_node)

    def extend():
        tested.extend(steady_node, steady_node.end + 9)

    yield lambda: tested.insert(begin, end, "new")
    yield extend
    if leaving is not None:
        yield lambda: tested.remove(leaving)
    yield replace


def _missed(nodes, steady, low, high):
    return {i for i, (begin, end) in steady.items() if begin <= high and end >= low} - {node.value for node in nodes}


def _races(seed, step, make_race):
    """Run a race at every `step`-th bytecode of each change, until the change has no more."""
    for change in range(4):
        # all bytecodes between the seeds
        race, at = None, 1 + seed % step
        while race is None or race.count >= race.at:
            tested, steady, passing, keep, rng = _small_list(seed)
            changes = list(_changes(tested, passing, keep, rng))
            race, missed = make_race(at, tested, changes[change % len(changes)], steady, rng)
            assert not missed, f"change {change} at bytecode {at}"
            at += step
        assert race.count > 10, "the tracer sees no bytecode of the list"


@pytest.mark.parametrize("seed", range(12))
def test_a_change_at_any_bytecode_of_a_scan_hides_nothing(few_levels, seed):
    def scan_beside(at, tested, change, steady, rng):
        low = rng.choice((0, 5, 13, 25))
        high = low + rng.choice((0, 3, 20))
        race = _Interleaving(at, change)
        nodes = race.run(lambda: list(tested.overlapping(low, high)))
        keys = [node.key for node in nodes]
        assert keys == sorted(set(keys)), "out of order, or twice"
        return race, _missed(nodes, steady, low, high)

    _races(seed, 1, scan_beside)


# of the last ones, a link to a removed node skips a long interval
@pytest.mark.parametrize("seed", [*range(8), 17, 24, 36, 40])
def test_a_scan_at_any_bytecode_of_a_change_misses_nothing(few_levels, seed):
    def change_beside(at, tested, change, steady, rng):
        seen = []

        def look():
            seen.extend((low, list(tested.overlapping(low, low + 2))) for low in (0, 6, 13, 30))

        race = _Interleaving(at, look)
        race.run(change)
        return race, [missed for low, nodes in seen if (missed := _missed(nodes, steady, low, low + 2))]

    _races(seed, 7, change_beside)
