"""A certificate says `erased` only if no byte of the erased entries is left. The tests search every file for them."""

import os
import sqlite3
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.support.merging import BASE_MS, HOUR_MS, Merging
from tiered_index.service.jobs.erase import EraseRequest, Erasure, erase
from tiered_index.service.read.caches.disk import CacheFolder, DiskCache
from tiered_index.storage.base import PART_BYTES
from tiered_index.storage.disk import TEMPORARY_PREFIX
from tiered_index.storage.local import LocalStorage
from tiered_index.storage.sqlite import SqliteStorage


@pytest.fixture
def begin(tmp_path: Path) -> Iterator[Callable[..., Merging]]:
    """Return a function that begins an index below the test's folder. The index is dropped at the end."""
    begun: list[Merging] = []

    def make(storage: Any = None, **settings: Any) -> Merging:
        begun.append(Merging(tmp_path, storage, settings={"refresh_interval_s": 0, **settings}))
        return begun[-1]

    yield make
    for life in begun:
        life.close()
        life.storage.close()


def wipe(life: Merging, *keys: str, topic: str = "orders", before_ms: int | None = None, grace_s: float = 0) -> Erasure:
    request = EraseRequest(topic, keys, before_ms=before_ms)
    return erase(life.storage, life.log(), request, life.clock, yes=True, now=True, grace_s=grace_s, threads=1)


def fill(life: Merging) -> bytes:
    """Publish two files of one topic, and return bytes of the first one's entries."""
    for hour in range(2):
        life.put([(BASE_MS + hour * HOUR_MS + n * 1000, f"k{hour}-{n}") for n in range(400)], "orders")
        life.put([(BASE_MS + hour * HOUR_MS, "other")], "pay")
        life.publish()
    life.later()
    first = next(iter(life.state.objects.values()))
    middle = first.trailer_position // 2
    return life.storage.get_range(first.name, middle, 48)


def holding(folder: Path, secret: bytes) -> list[str]:
    """Return the files below a folder that contain these bytes."""
    return [str(path) for path in folder.rglob("*") if path.is_file() and secret in path.read_bytes()]


def test_an_unfinished_upload_is_waited_for(begin, tmp_path):
    storage = LocalStorage(tmp_path / "storage")
    life = begin(storage)
    secret = fill(life)
    writers = [storage.open_writer(name) for name in ("data/left/a.index", "segments/s/b.log")]
    for writer in writers:
        writer.write(secret.ljust(PART_BYTES + 1))
    done = wipe(life)
    assert (done.status, done.remaining) == ("pending", ())
    assert len(done.pending) == 2 and all(".%work/" in place for place in done.pending) and done.to_do
    assert holding(tmp_path / "storage", secret)
    for writer in writers:
        writer.abort()
    assert wipe(life).status == "erased"
    life.index.run_lifecycle()
    assert not holding(tmp_path, secret)


def test_a_half_made_file_of_a_killed_writer_is_waited_for_and_swept(begin, tmp_path):
    life = begin(LocalStorage(tmp_path / "storage"))
    secret = fill(life)
    left = tmp_path / "storage" / ".%work" / f"{TEMPORARY_PREFIX}1-0"
    left.write_bytes(secret)
    done = wipe(life)
    assert (done.status, done.pending) == ("pending", (f".%work/{left.name}",))
    os.utime(left, (BASE_MS // 1000 - 10**6,) * 2)
    assert wipe(life).status == "erased" and not left.exists()


def test_a_database_that_is_being_read_is_waited_for(begin, tmp_path):
    folder = tmp_path / "storage"
    folder.mkdir()
    path = folder / "objects.db"
    life = begin(SqliteStorage(path, busy_timeout_s=0.1))
    secret = fill(life)
    reader = sqlite3.connect(path, isolation_level=None)
    reader.execute("BEGIN")
    reader.execute("SELECT count(*) FROM objects").fetchone()
    done = wipe(life)
    assert (done.status, done.pending) == ("pending", (f"{path}-wal",)) and holding(folder, secret)
    reader.execute("ROLLBACK")
    done = wipe(life)
    assert (done.status, done.pending) == ("erased", ()) and not holding(folder, secret)
    reader.close()


@pytest.mark.parametrize("how", ["next round", "restart"])
def test_the_writers_cache_drops_erased_entries(begin, tmp_path, how):
    life = begin(cache_max_bytes=1 << 24)
    fill(life)
    gone, cache = set(life.state.objects), tmp_path / "root" / "cache"

    def cached() -> set[str]:
        return {path.stem.replace(",", "/") for path in cache.rglob("data,*") if path.suffix in {".trailer", ".filter"}}

    assert gone <= cached()
    if how == "restart":
        life.index.close()
    wipe(life)
    wipe(life, topic="pay")
    if how == "restart":
        life.index = life.open()
    else:
        life.index.run_lifecycle()
    assert cached() <= set(life.state.objects)


def test_a_reader_beside_a_writer_drops_nothing_of_its_cache(tmp_path):
    """It may know an older state of the log. The writer drops only entries of objects."""
    folder, names = CacheFolder(DiskCache(tmp_path, 1 << 20), "i"), ("data/a/1.index", "data/b/1.index")
    for name in names:
        folder.write(name, "trailer", b"abc")
    (tmp_path / "i" / "notes").write_bytes(b"mine")
    CacheFolder(DiskCache(tmp_path, 1 << 20, read_only=True), "i").forget_unnamed(set())
    assert [folder.read(name, "trailer", 3) for name in names] == [b"abc"] * 2
    folder.forget_unnamed({names[1]})
    assert [folder.read(name, "trailer", 3) for name in names] == [None, b"abc"]
    assert (tmp_path / "i" / "notes").exists()
