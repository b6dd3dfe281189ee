"""Small indexes on a memory storage and on a disk without syncs, and calls in a thread beside the test."""

from __future__ import annotations

import pytest

from tests.support.disk_faults import FaultDisk
from tests.support.hanging import Beside
from tests.support.storage_faults import FaultStorage
from tiered_index import IndexReader, IndexService, Lookup
from tiered_index.clock import ManualClock
from tiered_index.errors import StorageUnavailable
from tiered_index.storage.memory import MemoryStorage

NOW_MS = 1_700_000_000_000
SETTINGS = {"slots": 7, "items": 64, "background": False, "query_threads": 2}


ASK = {
    "query": lambda asked, **how: asked.query("t", "k", **how),
    "query_many": lambda asked, allow_partial=False, **how: asked.query_many(
        [Lookup(topic="t", key="k", **how)], allow_partial
    )[0],
}
"""A lookup of one key, alone and in a batch."""


def offsets(asked):
    """Return the offsets of a whole answer, in rising order."""
    result = asked.query("t", "k", max_count=1000)
    assert result.status == "complete"
    return sorted(item.offset for item in result)


@pytest.fixture(params=ASK.values(), ids=ASK)
def ask(request):
    return request.param


@pytest.fixture
def beside():
    """Run a call in a thread of its own."""
    return Beside


@pytest.fixture
def clock():
    return ManualClock(NOW_MS)


@pytest.fixture
def storage():
    return MemoryStorage()


@pytest.fixture
def open_index(tmp_path, clock, storage):
    """Open a writer at `tmp_path / root`; all writers are dropped at the end."""
    opened = []

    def make(root="root", *, storage_backend=storage, disk=None, **settings):
        places = {"root": tmp_path / root, "storage_backend": storage_backend, "disk": disk or FaultDisk()}
        opened.append(IndexService.open(clock=clock, **places, **{**SETTINGS, **settings}))
        return opened[-1]

    yield make
    for service in opened:
        service.abandon()


@pytest.fixture
def open_reader(tmp_path, clock, storage):
    """Open a reader of the storage, or of `tmp_path / root` too; all readers are closed at the end."""
    opened = []

    def make(root=None, *, storage_backend=storage, **settings):
        folder = tmp_path / root if root is not None else None
        chosen = {"query_threads": 2, **settings}
        opened.append(IndexReader.open(root=folder, storage_backend=storage_backend, clock=clock, **chosen))
        return opened[-1]

    yield make
    for reader in opened:
        reader.close()


@pytest.fixture
def leave_compacted(open_index, storage):
    """Put `count` messages under key "k" to a new root, one per second, and leave them in one file that is compacted
    and not uploaded.
    """

    def make(root="root", *, count=1, begin_ms=NOW_MS, more=None, storage_backend=storage, **settings):
        faulty = FaultStorage(storage_backend)
        service = open_index(root, storage_backend=faulty, **settings)
        for number in range(1, count + 1):
            service.put("t", 0, "k", number, 1, begin_ms + number * 1000, **(more or {}))
        service.seal()
        faulty.fail("put", name_prefix="data/")
        with pytest.raises(StorageUnavailable):
            service.run_lifecycle()
        assert [handle.place for handle in service.files()] == ["compacted"]
        return service

    return make
