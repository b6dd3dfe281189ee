"""Faults of concurrent refreshes.

A refresh that had read the log before a file was published removed that file from the catalog again and deleted its
local copy. Two concurrent refreshes both removed the same file, and the second one's `KeyError` reached the caller.
"""

from __future__ import annotations

import contextlib
import threading

import pytest

from tests.support.log_records import publish
from tiered_index.clock import ManualClock
from tiered_index.service.log.log import StorageLog

NOW_MS = 1_700_000_000_000


@pytest.fixture
def index(open_index):
    service = open_index(local_keep_s=1e9)
    service.put("t", 0, "a", 1, 1, NOW_MS)
    service.seal()
    service.run_lifecycle()
    return service


def remove_objects(storage):
    """Let another process remove every object from the log and from the storage."""
    log = StorageLog(storage, ManualClock(NOW_MS))
    state = log.open()
    publish(log, state.epoch, remove=tuple(state.objects))
    for name in state.objects:
        storage.delete(name)


@pytest.mark.parametrize("nth", [1, 2])
def test_a_file_published_during_a_refresh_stays(index, beside, tmp_path, monkeypatch, nth):
    arrived, go_on = threading.Event(), threading.Event()
    real, calls = index._catalog.all, []

    def wait_then_list():
        if threading.current_thread() is not threading.main_thread() and not go_on.is_set():
            calls.append(None)
            if len(calls) == nth:
                arrived.set()
                go_on.wait(60)
        return real()

    monkeypatch.setattr(index._catalog, "all", wait_then_list)
    refresh = beside(index._lifecycle.refresh)
    assert arrived.wait(60)
    calls += [None] * nth  # only that call is delayed
    index.put("t", 0, "b", 2, 1, NOW_MS + 1000)
    index.seal()
    publishing = beside(index.run_lifecycle)
    publishing.ended(0.1)
    go_on.set()
    assert refresh.ended()
    assert publishing.ended()
    assert (refresh.error, publishing.error) == (None, None)
    for _ in range(2):
        for key, offset in (("a", 1), ("b", 2)):
            result = index.query("t", key)
            assert (result.status, [item.offset for item in result]) == ("complete", [offset])
        assert [handle.place for handle in index.files()] == ["uploaded"] * 2
        assert len(list((tmp_path / "root" / "uploaded").iterdir())) == 2
        index.run_lifecycle()


def test_two_lookups_that_miss_an_object_both_answer(open_index, storage, beside, monkeypatch):
    index = open_index(local_keep_s=0)
    index.put("t", 0, "a", 1, 1, NOW_MS)
    index.seal()
    index.run_lifecycle()
    assert [handle.place for handle in index.files()] == ["storage"]
    remove_objects(storage)
    meeting = threading.Barrier(2)
    real = index._catalog.all

    def list_together():
        found = real()
        with contextlib.suppress(threading.BrokenBarrierError):
            meeting.wait(0.1)  # if the two run one after the other, they can't meet
        return found

    monkeypatch.setattr(index._catalog, "all", list_together)
    lookups = [beside(lambda: index.query("t", "a")) for _ in range(2)]
    for lookup in lookups:
        assert lookup.ended()
        assert lookup.error is None
        assert (lookup.value.status, len(lookup.value)) == ("complete", 0)


def test_a_removed_objects_local_copy_is_deleted(index, storage, tmp_path):
    remove_objects(storage)
    index._lifecycle.refresh()
    index.run_lifecycle()
    assert not index.files()
    assert not list((tmp_path / "root" / "uploaded").iterdir())
