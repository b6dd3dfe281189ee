"""Fixtures of fault tests: worlds, small indexes, and disks and storages that are small, slow or missing."""

import itertools
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.faults.small_disk import Mounts, SmallDisk
from tests.reliability.world import World
from tests.support.disk_faults import FaultDisk
from tests.support.merging import Merging
from tests.support.storage_faults import FaultStorage
from tiered_index import IndexReader, IndexService, Lookup
from tiered_index.base.clock import ManualClock
from tiered_index.errors import StorageUnavailable
from tiered_index.storage.base import Storage
from tiered_index.storage.memory import MemoryStorage

NOW_MS = 1_700_000_000_000
SETTINGS = {"slots": 7, "items": 64, "background": False, "query_threads": 2}
ASK = {
    "query": lambda reader, **how: reader.query("t", "k", **how),
    "query_many": lambda reader, allow_partial=False, **how: reader.query_many(
        [Lookup(topic="t", key="k", **how)], allow_partial
    )[0],
}
"""A lookup of one key, alone and in a batch."""


@pytest.fixture
def offsets():
    """Return a function that returns the offsets of a whole answer, in rising order."""

    def look(reader):
        result = reader.query("t", "k", max_count=1000)
        assert result.status == "complete"
        return sorted(item.offset for item in result)

    return look


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
    """Put `count` messages to a new root, and leave them in one file that is compacted and not uploaded."""

    def make(root="root", *, count=1, more=None, storage_backend=storage, **settings):
        faulty = FaultStorage(storage_backend)
        service = open_index(root, storage_backend=faulty, **settings)
        for number in range(1, count + 1):
            service.put("t", 0, "k", number, 1, NOW_MS + number * 1000, **(more or {}))
        service.seal()
        faulty.fail("put", name_prefix="data/")
        with pytest.raises(StorageUnavailable):
            service.run_lifecycle()
        assert [handle.place for handle in service.files()] == ["compacted"]
        return service

    return make


@pytest.fixture
def make_world(tmp_path: Path) -> Iterator[Callable[..., World]]:
    made: list[World] = []
    numbers = itertools.count()

    def make(storage: Storage | None = None, folder: Path | None = None) -> World:
        made.append(World((folder or tmp_path) / str(next(numbers)), storage))
        made[-1].root.parent.mkdir()
        return made[-1]

    yield make
    for world in made:
        world.abandon()


@pytest.fixture
def make_life(source: Merging, tmp_path: Path) -> Iterator[Callable[[], Merging]]:
    """Return a function that copies the index `source` of the test's module."""
    made: list[Merging] = []

    def make() -> Merging:
        made.append(source.copied(tmp_path / str(len(made))))
        return made[-1]

    yield make
    for life in made:
        life.close()


@pytest.fixture
def published(make_world: Callable[..., World]) -> World:
    """A world with several published files, and a local one."""
    world = make_world()
    world.open(checkpoint_every=3)
    for _ in range(3):
        world.publish(6)
    world.put(3)
    world.flush()
    return world


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[SmallDisk]:
    """A file system of a few MiB, a real one where possible."""
    folder = tmp_path / "small"
    folder.mkdir()
    with Mounts() as mounts:
        yield SmallDisk(folder, real=mounts.empty_over(folder, size="6m"))


@pytest.fixture
def mounts() -> Iterator[Mounts]:
    with Mounts() as laid:
        yield laid
