"""An index on a memory storage, and a disk that syncs nothing."""

import itertools

import pytest

from tests.support.disk_faults import FaultDisk
from tests.support.merging import Merging
from tests.support.storage_faults import FaultStorage
from tiered_index import IndexService
from tiered_index.base.clock import ManualClock
from tiered_index.storage.memory import MemoryStorage

NOW_MS = 1_700_000_000_000


@pytest.fixture
def clock():
    return ManualClock(NOW_MS)


@pytest.fixture
def storage(clock):
    return MemoryStorage(clock=clock)


@pytest.fixture
def faulty(storage):
    return FaultStorage(storage)


@pytest.fixture
def open_index(tmp_path, clock, storage):
    """Return a function that opens an index at `root` (a name) with small geometry. At the end all are abandoned."""
    opened = []
    numbers = itertools.count()

    def make(root=None, **settings):
        chosen = {"slots": 7, "items": 20, "background": False, "query_threads": 2, "clock": clock, **settings}
        backend, disk = chosen.pop("storage_backend", storage), chosen.pop("disk", None) or FaultDisk()
        folder = tmp_path / (root or f"root{next(numbers)}")
        chosen = {name: value for name, value in chosen.items() if value is not ...}
        opened.append(IndexService.open(root=folder, storage_backend=backend, disk=disk, **chosen))
        return opened[-1]

    yield make
    for service in opened:
        service.abandon()


@pytest.fixture
def index(open_index):
    return open_index()


@pytest.fixture
def merging(tmp_path):
    """Return a function that makes a `Merging` of such settings, in its own folder. At the end all are closed."""
    lives = []

    def make(storage=None, **settings):
        lives.append(Merging(tmp_path / f"life{len(lives)}", storage, **settings))
        return lives[-1]

    yield make
    for life in lives:
        life.close()


@pytest.fixture
def life(merging):
    return merging()
