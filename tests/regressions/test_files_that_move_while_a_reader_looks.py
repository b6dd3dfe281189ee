"""A reader listed a root again whenever a file had moved before it was opened, at most 20 times. Beside a fast writer
its lookups failed. Such a listing once stored the time of a journal's newest state with the view of an older one.
"""

from __future__ import annotations

import os
import threading

import pytest

from tests.support.storage_faults import FaultStorage
from tiered_index.errors import StorageUnavailable
from tiered_index.format.names import UPLOADED
from tiered_index.service.read import root_view
from tiered_index.storage.disk import Disk

NOW_MS = 1_700_000_000_000


def put(service, number):
    service.put("t", 0, "k", number, 1, NOW_MS + number * 1000)


def seen(result):
    return result.status, [item.offset for item in result]


@pytest.fixture
def grown(open_index, open_reader, ask):
    """A writer with message 0 in a compacted file and 1, 2 in an active one. Its reader has seen the active one
    without 2.
    """
    service = open_index()
    put(service, 0)
    service.seal()
    service.run_lifecycle()
    put(service, 1)
    service.flush()
    reader = open_reader("root")
    assert seen(ask(reader)) == ("complete", [1, 0])
    put(service, 2)
    service.flush()
    return service, reader


def test_a_file_that_is_gone_when_it_is_opened(grown, ask, monkeypatch):
    _, reader = grown
    reader._views[0]._root_view._opened = {}
    opened, armed = root_view.open_local, [True]

    def move_then_open(path):
        if armed:
            armed.clear()
            later = path.parent.parent / UPLOADED / path.name
            os.replace(path, later)
        return opened(path)

    monkeypatch.setattr(root_view, "open_local", move_then_open)
    for _ in range(3):
        assert seen(ask(reader)) == ("complete", [2, 1, 0])
    assert not armed


def test_a_file_that_is_retired_before_it_is_opened(open_index, open_reader, storage, ask, monkeypatch):
    faulty = FaultStorage(storage)
    service = open_index(storage_backend=faulty, local_keep_s=0)
    faulty.fail("put", name_prefix="data/")
    put(service, 1)
    service.flush()
    service.put("t", 0, "k", 0, 1, 5_000)  # written to a file of the other lane, because its clock is bad
    service.flush()
    reader = open_reader("root")
    assert seen(ask(reader)) == ("complete", [1, 0])
    quarantined = next(handle for handle in service.files() if handle.lane == "quarantine")
    appender = service._flusher.quarantine
    assert appender.active is quarantined
    appender.roll()
    with pytest.raises(Exception, match="scripted fault"):
        service.run_lifecycle()
    assert sorted(handle.place for handle in service.files()) == ["compacted", "unsealed"]
    put(service, 2)
    service.flush()
    opened, armed = root_view.open_local, [True]

    def move_then_open(path):
        if armed:
            armed.clear()
            service.run_lifecycle()
        return opened(path)

    monkeypatch.setattr(root_view, "open_local", move_then_open)
    for _ in range(3):
        assert seen(ask(reader)) == ("complete", [2, 1, 0])
    assert not armed
    assert sorted(handle.place for handle in service.files()) == ["storage", "unsealed"]


def test_files_that_always_move_before_they_are_opened(open_index, open_reader, storage, ask, monkeypatch):
    faulty = FaultStorage(storage)
    service = open_index(storage_backend=faulty, local_keep_s=0)
    names, count = Disk.names, 0

    def compact_one():
        nonlocal count
        put(service, count)
        count += 1
        service.seal()
        faulty.fail("put", name_prefix="data/")
        with pytest.raises(StorageUnavailable, match="scripted fault"):
            service.run_lifecycle()

    def list_then_move(disk, folder):
        found = names(disk, folder)
        if folder.name == "compacted":
            service.run_lifecycle()
            compact_one()
        return found

    compact_one()
    reader = open_reader("root")
    for _ in range(3):
        flushed = count
        with monkeypatch.context() as patched:
            patched.setattr(Disk, "names", list_then_move)
            status, offsets = seen(ask(reader))
        assert status == "complete"
        assert set(range(flushed)) <= set(offsets) <= set(range(count))


def test_a_look_beside_one_that_is_not_over(grown, ask, beside, monkeypatch):
    _, reader = grown
    names = Disk.names
    arrived, go_on = threading.Event(), threading.Event()

    def wait_then_list(disk, folder):
        if folder.name == "compacted" and threading.current_thread() is not threading.main_thread():
            arrived.set()
            assert go_on.wait(60)
        return names(disk, folder)

    monkeypatch.setattr(Disk, "names", wait_then_list)
    other = beside(lambda: ask(reader))
    assert arrived.wait(60)
    assert seen(ask(reader)) == ("complete", [2, 1, 0])
    go_on.set()
    assert other.ended()
    assert seen(other.value) == ("complete", [2, 1, 0])
