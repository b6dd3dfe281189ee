"""States that carry over the lookups of the state before, and catalogs that look at changed files alone."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest

from tests.benchmarks.scale import synthetic_objects
from tests.support.cold_index import cold_index
from tests.support.log_records import publish
from tiered_index.clock import SystemClock
from tiered_index.config import IndexConfig
from tiered_index.service.catalog.catalog import Catalog
from tiered_index.service.files import window_table
from tiered_index.service.log.log import StorageLog
from tiered_index.service.log.records import IndexDescriptor, LogRecord
from tiered_index.service.log.state import LogState

LAYOUT = IndexConfig.load(environment=False, slots=64, items=100).geometry()
CARRIED = ("files", "tables", "newest_ms", "_by_file")


def begun() -> LogState:
    genesis = IndexDescriptor("0" * 32, LAYOUT, "x")
    return LogState().apply(LogRecord(1, "create", 0, "a", 0, genesis=genesis), "log/1")


def look(state: LogState) -> None:
    for name in CARRIED:
        getattr(state, name)


@pytest.mark.parametrize("seed", range(20))
def test_what_a_state_carries_over_is_what_it_would_find(seed):
    chance = random.Random(seed)
    # 200 shards and files; some of them are of one file
    stock = list(synthetic_objects(200, LAYOUT.slots))
    stock += [replace(one, name=f"{one.name}x", sequence=1) for one in chance.sample(stock, 3 * (seed % 2))]
    chance.shuffle(stock)
    state = begun()
    for number in range(2, 40):
        held = list(state.objects)
        remove = tuple(chance.sample(held, min(len(held), chance.choice((0, 0, 1, 4)))))
        add = tuple(stock.pop() for _ in range(min(len(stock), chance.choice((0, 1, 5)))))
        if chance.random() < 0.7:
            look(state)
        before, state = state, state.apply(LogRecord(number, "publish", 0, "a", 0, add, remove), f"log/{number}")
        fresh = replace(state)
        for name in CARRIED:
            assert getattr(state, name) == getattr(fresh, name), name
            assert list(getattr(state, name) or ()) == list(getattr(fresh, name) or ()) if name == "files" else True
        gone = {before.objects[name].file for name in remove}
        assert state.changed_since(before.number) == gone | {one.file for one in add}
        assert state.changed_since(1) is not None and state.changed_since(state.number) == frozenset()


def test_a_change_of_very_many_files_and_an_old_state_are_not_known():
    state = begun()
    for number in range(2, 80):
        state = state.apply(LogRecord(number, "positions", 0, "a", 0), f"log/{number}")
    assert state.changed_since(78) == frozenset()
    assert state.changed_since(2) is None
    assert LogState.decode(state.encode(), "c").changed_since(state.number - 1) is None
    many = tuple([replace(one, shard=None) for one in synthetic_objects(12_000, LAYOUT.slots)])
    grown = state.apply(LogRecord(80, "publish", 0, "a", 0, many), "log/80")
    assert grown.changed_since(79) is None


def test_a_refresh_looks_at_changed_files_alone(tmp_path, monkeypatch):
    made = cold_index(tmp_path / "root", files=12)
    log = StorageLog(made.inner, SystemClock())
    with made.reader() as reader:
        assert len(reader.query("t", "all", max_count=100).items) == 12
        looked: list[str] = []
        get = Catalog.get
        monkeypatch.setattr(Catalog, "get", lambda catalog, file: looked.append(file) or get(catalog, file))
        epoch = log.open().epoch
        gone = made.stored[3]
        publish(log, epoch, remove=[gone.name])
        reader.refresh()
        assert set(looked) == {gone.file_id}
        assert len(reader.query("t", "all", max_count=100).items) == 11
        again = replace(gone, name=gone.name)
        publish(log, epoch, (again,))
        reader.refresh()
        assert set(looked) == {gone.file_id}
        assert len(reader.query("t", "all", max_count=100).items) == 12


def test_a_catalog_after_changes_is_the_one_of_the_whole_state(tmp_path):
    made = cold_index(tmp_path / "root", files=8)
    log = StorageLog(made.inner, SystemClock())
    epoch = log.open().epoch
    with made.reader() as reader:
        for stored in made.stored[:5]:
            publish(log, epoch, remove=[stored.name])
            reader.refresh()
            publish(log, epoch, (stored,))
            reader.refresh()
            whole = Catalog()
            window_table.apply_log_state(whole, (), log.state, reader._views[0].cold, lambda _: None)
            assert {one.file_id for one in whole.all()} == {one.file_id for one in reader.files()}
