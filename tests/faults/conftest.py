"""Fixtures of fault tests: worlds, and disks and storages that are small, slow or missing."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.faults.small_disk import Mounts, SmallDisk
from tests.reliability.world import World
from tests.support.merging import Merging
from tiered_index.storage.base import Storage

# short runs stop a process only at this moment: the log's code is the same on every storage, and processes on S3 are
# slow
_ANSWER = "before the answer to a record"
_STOPPED_SHORT = {"s3": ("before a record", _ANSWER), "sqlite": ("before a record",)}


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Leave the other moments of these storages, and the slowest processes on S3, to long runs."""
    for item in items:
        given = item.callspec.params if isinstance(item, pytest.Function) and hasattr(item, "callspec") else {}
        if "moment" in given and given["moment"] not in _STOPPED_SHORT.get(given.get("uri", ""), (given["moment"],)):
            item.add_marker(pytest.mark.slow)
        elif given.get("uri") == "s3" and (given.get("moment") == _ANSWER or item.name.startswith("test_processes[")):
            item.add_marker(pytest.mark.long)


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
