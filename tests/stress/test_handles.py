"""After a close, no descriptor, mapping or thread is left, even without a garbage collection.

There are cycles of every kind over every storage. In some, one call of a writer or reader that could take or use a
handle fails.
"""

import contextlib
import errno
import fcntl
import gc
import io
import itertools
import logging
import mmap
import os
import shutil
import sqlite3
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from tests.stress.census import census
from tests.support.storage_faults import FaultStorage
from tests.support.unsynced_disk import UnsyncedDisk
from tiered_index import IndexReader, IndexService
from tiered_index.errors import BudgetExceeded, LockHeld, SchemaMismatch, StorageUnavailable, TieredIndexError
from tiered_index.storage.opening import open_storage

NOW_MS = int(time.time() * 1000)
BAD_CLOCK_MS = 1_000_000
SMALL: dict[str, Any] = {"slots": 7, "items": 10, "query_threads": 2}


class Place:
    """A root, a storage, and messages that differ from cycle to cycle."""

    def __init__(self, folder: Path, uri: str) -> None:
        self.folder = folder
        self.root = folder / "root"
        self.uri = uri
        self.offsets = itertools.count()

    def writer(self, **settings: Any) -> IndexService:
        options = {"root": self.root, "disk": UnsyncedDisk(), **SMALL, **settings}
        return IndexService.open(**({} if "storage_backend" in options else {"storage": self.uri}), **options)

    def faulty(self) -> FaultStorage:
        return FaultStorage(open_storage(self.uri))

    def put(self, service: IndexService, count: int) -> None:
        for offset in itertools.islice(self.offsets, count):
            at_ms = BAD_CLOCK_MS if offset % 9 == 4 else NOW_MS
            service.put("t", 0, f"k{offset % 3}", offset, 1, at_ms, "source", offset)


def a_writer_in_the_background(place: Place) -> None:
    with place.writer(flush_interval_s=0.001, lifecycle_interval_s=0.001, local_keep_s=0) as service:
        place.put(service, 25)
        service.seal()
        assert service.query("t", "k1").items


def rounds_of_the_life_cycle(place: Place) -> None:
    service = place.writer(background=False)
    for _ in range(2):
        place.put(service, 12)
        service.flush()
        service.run_lifecycle()
    place.put(service, 3)
    service.close()
    # by now some files are unsealed and some are uploaded: the next cycle recovers them


def opens_that_fail(place: Place) -> None:
    with place.writer(background=False) as service:
        place.put(service, 1)
        with pytest.raises(LockHeld):
            place.writer()
    with pytest.raises(SchemaMismatch):
        place.writer(slots=64)
    down = place.faulty()
    down.fail("*", times=None)
    with pytest.raises(StorageUnavailable):
        place.writer(root=place.folder / "another", storage_backend=down)
    with pytest.raises(StorageUnavailable):
        IndexReader.open(storage_backend=down)
    # a known root starts without its storage
    with place.writer(storage_backend=down, background=False) as service:
        place.put(service, 1)
        with pytest.raises(StorageUnavailable):
            service.run_lifecycle()


def lookups_that_time_out(place: Place) -> None:
    with place.writer(background=False, local_keep_s=0) as service:
        place.put(service, 12)
        service.seal()
        service.run_lifecycle()
    slow = place.faulty()
    with IndexReader.open(storage_backend=slow, query_threads=2) as cold:
        hang = slow.hang("*", name_prefix="data/", times=None)
        with pytest.raises(BudgetExceeded):
            cold.query("t", "k1", timeout_s=0.02)
        hang.release.set()


KINDS = (a_writer_in_the_background, rounds_of_the_life_cycle, opens_that_fail, lookups_that_time_out)


@pytest.fixture(autouse=True)
def no_logging() -> Iterator[None]:
    """Remove the handlers. A kept record would keep an error, whose trace keeps its objects."""
    logger = logging.getLogger("tiered_index")
    before = logger.handlers[:], logger.propagate
    logging.disable()
    yield
    logging.disable(logging.NOTSET)
    logger.handlers[:], logger.propagate = before


@pytest.fixture
def place(tmp_path: Path, request: pytest.FixtureRequest) -> Place:
    scheme = request.param
    folder = tmp_path / "place"
    folder.mkdir()
    if scheme == "s3":
        server = request.getfixturevalue("s3_environment")
        return Place(folder, f"s3://{server.new_bucket()}/index?endpoint_url={server.endpoint_url}")
    name = {"file": f"{folder}/store", "sqlite": f"/{folder}/store.db", "memory": tmp_path.name}[scheme]
    return Place(folder, f"{scheme}://{name}")


@contextlib.contextmanager
def no_collection() -> Iterator[None]:
    """Switch off the garbage collection: handles that only it would close are still open when the block ends."""
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


@pytest.mark.parametrize(
    "place",
    ["memory", *(pytest.param(scheme, marks=pytest.mark.long) for scheme in ("file", "sqlite", "s3"))],
    indirect=True,
)
def test_cycles_leave_nothing_open(place: Place) -> None:
    for cycle in KINDS:
        # made once and kept: modules, the client's session, the server's end of a connection; in the second cycle,
        # obstore reads and starts its threads
        for _ in range(2):
            cycle(place)
        with no_collection():
            before = census(place.folder, collect=False)
            for _ in range(2):
                cycle(place)
            after = census(place.folder, collect=False)
        assert (before.below, before.mappings, before.threads) == (0, 0, 0)
        # what an earlier test left may be closed meanwhile
        settled = replace(after, descriptors=max(after.descriptors, before.descriptors))
        assert settled == before, cycle.__name__


@pytest.mark.parametrize("place", ["file"], indirect=True)
def test_a_reader_beside_the_writer_lets_files_go_that_left_the_root(place: Place) -> None:
    with place.writer(background=False, local_keep_s=0) as service:
        with IndexReader.open(root=place.root, storage=place.uri, query_threads=2) as beside:
            for _ in range(3):
                place.put(service, 12)
                service.flush()
                assert beside.query("t", "k1").items and census(place.folder).mappings
                service.seal()
                service.run_lifecycle()
                assert beside.query("t", "k1").items and not census(place.folder).mappings


class FailingCall:
    """Makes the `nth` call that takes or uses a handle raise `error` in the block. `met` says whether there was one."""

    OF_THE_SYSTEM = (
        *("open", "fstat", "pread", "pwrite", "ftruncate", "posix_fallocate", "replace", "link", "unlink"),
        *("scandir", "listdir", "statvfs", "fsync"),
    )
    CALLS = (
        *((os, name) for name in OF_THE_SYSTEM),
        *((fcntl, "flock"), (mmap, "mmap"), (io, "open"), (sqlite3, "connect"), (threading.Thread, "start")),
    )

    def __init__(self, nth: int, error: Callable[[], BaseException]) -> None:
        self._left = nth
        self._error = error
        self._patched = pytest.MonkeyPatch()

    @property
    def met(self) -> bool:
        return self._left <= 0

    def _failing(self, real: Callable[..., Any], error: Callable[[], BaseException]) -> Callable[..., Any]:
        def call(*args: Any, **named: Any) -> Any:
            self._left -= 1
            if self._left == 0:
                raise error()
            return real(*args, **named)

        return call

    def __enter__(self) -> "FailingCall":
        for owner, name in self.CALLS:
            error = self._error
            if owner is threading.Thread:
                error = partial(RuntimeError, "can't start new thread")
            elif owner is sqlite3 and isinstance(error(), OSError):
                error = partial(sqlite3.OperationalError, "unable to open database file")
            self._patched.setattr(owner, name, self._failing(getattr(owner, name), error))
        return self

    def __exit__(self, *exc: object) -> None:
        self._patched.undo()


def a_life(place: Place) -> None:
    service = place.writer(background=False, local_keep_s=0)
    try:
        for _ in range(2):
            place.put(service, 8)
            service.flush()
            service.query("t", "k1")
        service.run_lifecycle()
        place.put(service, 3)
    finally:
        service.close()


def a_life_in_the_background(place: Place) -> None:
    place.writer(flush_interval_s=10**3, lifecycle_interval_s=10**3).close()


def reading(place: Place) -> None:
    with IndexReader.open(root=place.root, storage=place.uri, query_threads=2) as reader:
        reader.query("t", "k1")


LIVES = (a_life, a_life_in_the_background, reading)


def failing(place: Place, life: Callable[[Place], None], nth: int, error: Callable[[], BaseException]) -> bool:
    """Make one call of a life fail, and count before and after; return whether there was such a call."""
    before = census(place.folder, collect=False)
    with FailingCall(nth, error) as call:
        try:
            life(place)
        except (TieredIndexError, MemoryError, RuntimeError):
            pass  # the error is dropped: its trace would keep the objects that it names
    assert census(place.folder, collect=False) == before, f"{life.__name__}: call {nth} failed"
    assert (before.below, before.mappings, before.threads) == (0, 0, 0)
    return call.met


def every_call_fails(place: Place, error: Callable[[], BaseException], step: int) -> None:
    rounds_of_the_life_cycle(place)
    reading(place)
    as_it_was = place.folder.with_name("as-it-was")
    shutil.copytree(place.folder, as_it_was)
    with no_collection():
        for life in LIVES:
            for nth in itertools.count(1 + LIVES.index(life), step):
                if not failing(place, life, nth, error):
                    break
                life(place)  # the failed life does not hinder the next
                shutil.rmtree(place.folder)
                shutil.copytree(as_it_was, place.folder)


@pytest.mark.parametrize("step", [61, pytest.param(1, marks=pytest.mark.slow)])
@pytest.mark.parametrize("error", [partial(OSError, errno.EIO, "scripted"), MemoryError], ids=["disk", "memory"])
@pytest.mark.parametrize("place", ["file", "sqlite"], indirect=True)
def test_a_call_that_fails_leaves_nothing_open(place: Place, error: Callable[[], BaseException], step: int) -> None:
    every_call_fails(place, error, step)
