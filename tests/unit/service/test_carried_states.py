"""A log state carries over the lookup tables of the state before. A catalog examines only changed files."""

import random

import pytest

from tests.benchmarks.scale import synthetic_objects
from tests.support.changes import replace
from tiered_index.config import IndexConfig
from tiered_index.service.log.records import IndexDescriptor, LogRecord, digest_of
from tiered_index.service.log.state import LogState

LAYOUT = IndexConfig.load(environment=False, slots=64, items=100).geometry()
CARRIED = ("files", "tables", "_newest_s")


def begun():
    genesis = IndexDescriptor("0" * 32, LAYOUT, "x")
    return LogState().apply(LogRecord(1, "create", 0, "a", 0, genesis=genesis, digest=digest_of(b"1")), "log/1")


def after(state, add=(), remove=(), history=""):
    number = state.number + 1
    record = LogRecord(number, "publish", 0, "a", 0, add, remove, digest=digest_of(f"{history}{number}".encode()))
    return state.apply(record, f"log/{number}")


def look(state):
    for name in CARRIED:
        getattr(state, name)


@pytest.mark.parametrize("seed", range(20))
def test_tables_that_a_state_carries_over_equal_fresh_ones(seed):
    chance = random.Random(seed)
    # 200 shards and files, and some files have a second object
    stock = list(synthetic_objects(200, LAYOUT.slots))
    stock += [replace(stored, name=f"{stored.name}x", sequence=1) for stored in chance.sample(stock, 3 * (seed % 2))]
    chance.shuffle(stock)
    first = state = begun()
    for _ in range(2, 40):
        held = list(state.objects)
        remove = tuple(chance.sample(held, min(len(held), chance.choice((0, 0, 1, 4)))))
        add = tuple(stock.pop() for _ in range(min(len(stock), chance.choice((0, 1, 5)))))
        if chance.random() < 0.7:
            look(state)
        before, state = state, after(state, add, remove)
        fresh = replace(state)
        for name in CARRIED:
            assert getattr(state, name) == getattr(fresh, name), name
            assert list(getattr(state, name) or ()) == list(getattr(fresh, name) or ()) if name == "files" else True
        gone = {before.objects[name].file for name in remove}
        assert state.changed_since(before) == gone | {stored.file for stored in add}
        assert state.changed_since(first) is not None and state.changed_since(state) == frozenset()


def test_an_object_that_appears_and_vanishes_in_one_step_leaves_its_files_other_one():
    original = next(stored for stored in synthetic_objects(9, LAYOUT.slots) if stored.shard is None)
    state = begun().apply(LogRecord(2, "publish", 0, "a", 0, (original,)), "log/2")
    look(state)
    twin = replace(original, name=f"{original.name}x")
    records = LogRecord(3, "publish", 0, "a", 0, (twin,)), LogRecord(4, "publish", 0, "a", 0, remove=(twin.name,))
    state = state.replayed([(record, f"log/{record.number}") for record in records])
    assert state.files == replace(state).files == {original.file_id: original}
