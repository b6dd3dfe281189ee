"""Roots and storages that are restored, cloned, mixed or half synced."""

import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.support.damage import flip
from tests.support.filled import merge_all
from tests.support.storage_faults import FaultStorage
from tiered_index import IndexConfig, IndexReader, IndexService
from tiered_index.base.clock import ManualClock
from tiered_index.errors import RootBehind, StorageUnavailable, WriterFenced
from tiered_index.service.anew import BegunAnew, begin_anew
from tiered_index.service.log.log import StorageLog
from tiered_index.service.log.records import StoredObject
from tiered_index.storage.base import Storage
from tiered_index.storage.local import LocalStorage
from tiered_index.storage.memory import MemoryStorage
from tiered_index.storage.opening import open_storage

NOW_MS = 1_700_000_000_000


class Life:
    """One index below a folder: the entries of each history of its root, and copies of root and storage."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.clock = folder, ManualClock(NOW_MS)
        self.put, self.uri = 0, f"file://{folder}/storage"

    @property
    def root(self) -> Path:
        return self.folder / "root"

    def open(self, root: Path | None = None, **settings: Any) -> IndexService:
        chosen = {"slots": 7, "items": 1000, "background": False, "query_threads": 2, "clock": self.clock, **settings}
        storage = None if chosen.get("storage_backend") else self.uri
        return IndexService.open(root=root or self.root, storage=storage, **chosen)

    def ingest(self, index: IndexService, count: int, *, upload: bool) -> None:
        for _ in range(count):
            self.put += 1
            index.put("t", 0, "k", self.put, 1, NOW_MS + self.put * 1000, source="s", source_position=self.put)
        index.flush()
        if upload:
            index.seal()
            index.run_lifecycle()

    def write(self, count: int, *, upload: bool, **settings: Any) -> None:
        """Open the root, ingest and close it."""
        with self.open(**settings) as index:
            self.ingest(index, count, upload=upload)

    def offsets_found(self, opened: IndexService | IndexReader | None = None) -> set[int]:
        if opened is not None:
            result = opened.query("t", "k", max_count=10_000)
            assert result.status == "complete"
            return {item.offset for item in result}
        with IndexReader.open(self.uri) as reader:
            return self.offsets_found(reader)

    def begin_anew(self) -> BegunAnew:
        config = IndexConfig(root=self.root, storage=self.uri, slots=7, items=1000, background=False, query_threads=2)
        return begin_anew(config, clock=self.clock)

    def reopened(self, root: Path | None = None, **settings: Any) -> set[int]:
        """Return the findings of a writer that opens the root, and close it again."""
        with self.open(root, **settings) as index:
            return self.offsets_found(index)

    def publish_all(self) -> None:
        """Let a writer open the root and publish all its entries."""
        with self.open() as index:
            index.seal()
            index.run_lifecycle()

    def keep(self, *names: str) -> None:
        for name in names:
            shutil.copytree(self.folder / name, self.folder / f"{name}.kept")

    def restore(self, *names: str) -> None:
        for name in names:
            shutil.rmtree(self.folder / name)
            shutil.copytree(self.folder / f"{name}.kept", self.folder / name)

    def end_lease(self, storage: str = "storage") -> None:
        """Let the time to live of a lease pass, by the storage's clock."""
        for path in (self.folder / storage / "lease%").rglob("*"):
            os.utime(path, (0, 0))


def entries(*ranges: tuple[int, int]) -> set[int]:
    """Return the numbers of inclusive ranges."""
    return {number for first, last in ranges for number in range(first, last + 1)}


def leave_two_copies(life: Life) -> None:
    """Put ten entries into a file, and leave two copies of the root and of the storage."""
    first = life.open()
    life.ingest(first, 10, upload=False)
    life.keep("storage")
    first.abandon()
    shutil.copytree(life.root, life.folder / "copy")
    life.end_lease()


def as_many_in_a_copy(life: Life, *, is_same: bool) -> tuple[StoredObject, IndexService, FaultStorage]:
    """Publish fifteen entries in a file; return it, and a copy of the root with as many in its file of that id.

    The copy's storage lacks that file, and takes no other.
    """
    leave_two_copies(life)
    with life.open() as index:
        life.ingest(index, 5, upload=True)
        (stored,) = index.log_state.objects.values()
    before = FaultStorage(LocalStorage(life.folder / "storage.kept"))
    life.end_lease("storage.kept")
    before.fail("put", name_prefix="data/", times=None)
    life.put = 10 if is_same else 20
    copy = life.open(life.folder / "copy", storage_backend=before)
    life.ingest(copy, 5, upload=False)
    return stored, copy, before


def _sync(source: Storage, target: Storage, *, replaces: bool) -> None:
    """Copy objects as a tool that knows nothing of an index: without deletes, in the order of their names."""
    there = {info.name for info in target.list()}
    for info in source.list():
        if replaces or info.name not in there:
            target.put(info.name, source.get(info.name))


class Sites:
    """Two sites that continued from one state of an index, in storages of one kind."""

    def __init__(self, life: Life, scheme: str) -> None:
        self.life, self.scheme = life, scheme
        self._held = {name: MemoryStorage(clock=life.clock) for name in "ab"}
        life.write(10, upload=True, storage_backend=self.storage("a"))
        _sync(self.storage("a"), self.storage("b"), replaces=True)
        shutil.copytree(life.root, life.folder / "root.b")

    def storage(self, name: str) -> Storage:
        """Open the storage of a site."""
        place = self.life.folder / name
        uri = {"file": f"file://{place}", "sqlite": f"sqlite:///{place}.db"}.get(self.scheme)
        return self._held[name] if uri is None else open_storage(uri)

    def write(self, name: str, rounds: int, first: int) -> set[int]:
        """Publish `rounds` files of 10 entries; return all entries that the site then has."""
        self.life.clock.advance(10)
        self.life.put = first - 1
        root = self.life.root if name == "a" else self.life.folder / "root.b"
        with self.life.open(root, storage_backend=self.storage(name)) as index:
            for _ in range(rounds):
                self.life.ingest(index, 10, upload=True)
            return self.life.offsets_found(index)

    def merge(self, source: str, target: str, how: str) -> None:
        """Sync one site over the other one, which then has both histories."""
        if how == "keeping times":
            places = self.life.folder / source, self.life.folder / target
            shutil.copytree(*places, copy_function=shutil.copy2, dirs_exist_ok=True)
        else:
            _sync(self.storage(source), self.storage(target), replaces=how != "leaving what is there")


def read(storage: Storage, life: Life) -> set[int]:
    with IndexReader.open(storage_backend=storage, clock=life.clock) as reader:
        return life.offsets_found(reader)


def the_storage(life: Life, keep_s: float = 3600) -> None:
    life.write(30, upload=True, local_keep_s=keep_s)
    life.keep("storage")
    with life.open(local_keep_s=keep_s) as index:
        life.ingest(index, 40, upload=True)
        life.ingest(index, 10, upload=False)
    life.restore("storage")


def _the_storage_and_another_root_went_on(life: Life) -> None:
    life.write(10, upload=True)
    life.keep("storage", "root")
    life.write(10, upload=True)
    shutil.move(life.root, life.folder / "first")
    life.restore("storage")
    shutil.move(life.folder / "root.kept", life.root)
    life.put = 100
    life.write(10, upload=True)
    shutil.move(life.root, life.folder / "second")
    shutil.move(life.folder / "first", life.root)


def _the_root(life: Life, *, then_merge: bool = False) -> None:
    life.write(100, upload=False)
    life.keep("root")
    life.write(200, upload=True)
    if then_merge:
        life.clock.advance(10 * 86400)
        assert merge_all(LocalStorage(life.folder / "storage"), life.clock).tables == 1
    life.restore("root")


def _the_root_and_an_object_is_lost(life: Life, damage: Callable[[Path], object]) -> None:
    life.write(100, upload=True)
    life.keep("root")
    life.write(10, upload=True)
    life.restore("root")
    (copy,) = (life.root / "uploaded").glob("*.index")
    (path,) = [path for path in (life.folder / "storage" / "data%").rglob("*.index") if copy.stem in str(path)]
    damage(path)


def _the_root_and_the_storage_was_away(life: Life) -> None:
    """It adds to no published file."""
    life.write(10, upload=False)
    life.keep("root")
    life.write(20, upload=True)
    life.restore("root")
    storage = FaultStorage(LocalStorage(life.folder / "storage"))
    for operation in ("list", "get"):
        storage.fail(operation, times=None)
    life.put = 100
    index = life.open(storage_backend=storage)
    life.ingest(index, 5, upload=False)
    assert len(list((life.root / "unsealed").glob("*.journal"))) == 2
    storage.clear()
    with pytest.raises(RootBehind):
        index.run_lifecycle()
    index.abandon()


def _a_clone_took_the_lease(life: Life) -> None:
    first = life.open(lease_ttl_s=30)
    life.ingest(first, 10, upload=False)
    shutil.copytree(life.root, life.folder / "clone")
    life.end_lease()
    life.ingest(first, 5, upload=False)
    with life.open(life.folder / "clone") as clone:
        life.put = 100
        life.ingest(clone, 7, upload=True)
    first.seal()
    with pytest.raises((WriterFenced, RootBehind)):
        first.run_lifecycle()
    first.abandon()


def _a_clone_that_ran_at_the_same_time(life: Life, monkeypatch: pytest.MonkeyPatch) -> None:
    """A snapshot with its memory: both processes continue with one epoch, one lease and one start of the system."""
    first = life.open()
    life.ingest(first, 10, upload=False)
    shutil.copytree(life.root, life.folder / "clone")
    with monkeypatch.context() as cloned:
        cloned.setattr("tiered_index.service.root.RootLock.place", first._session.place)
        cloned.setattr(StorageLog, "claim_epoch", lambda log: first._session.epoch)
        clone = life.open(life.folder / "clone")
    assert clone._session.epoch == first._session.epoch
    life.ingest(first, 5, upload=True)
    life.put = 100
    life.ingest(clone, 5, upload=False)
    clone.seal()
    with pytest.raises(RootBehind):
        clone.run_lifecycle()
    assert life.offsets_found(clone) >= entries((101, 105))
    life.ingest(first, 5, upload=True)
    first.close()
    clone.abandon()
    life.root.rename(life.folder / "first")
    (life.folder / "clone").rename(life.root)


def _a_file_that_had_grown(life: Life, *, then_merge: bool = False, then_retire: bool = False) -> None:
    index = life.open()
    life.ingest(index, 10, upload=False)
    life.keep("root")
    life.ingest(index, 5, upload=False)
    index.abandon()
    life.root.rename(life.folder / "grown")
    shutil.copytree(life.folder / "root.kept", life.root)
    life.end_lease()
    life.publish_all()
    if then_merge:
        life.clock.advance(10 * 86400)
        assert merge_all(LocalStorage(life.folder / "storage"), life.clock).tables == 1
    if then_retire:
        assert life.reopened() == entries((1, 10))
    for path in (life.folder / "grown" / "unsealed").iterdir():
        shutil.copy(path, life.root / "unsealed")


def _an_earlier_file(life: Life, own: int) -> None:
    """The file of a copy of the root, which has `own` entries of its own."""
    leave_two_copies(life)
    life.write(5, upload=True)
    life.end_lease("storage.kept")
    with life.open(life.folder / "copy", storage_backend=LocalStorage(life.folder / "storage.kept")) as copy:
        life.put = 20
        life.ingest(copy, own, upload=False)
    for path in (life.root / "uploaded").iterdir():
        path.unlink()
    for path in (life.folder / "copy/unsealed").iterdir():
        shutil.copy(path, life.root / "unsealed")


def _a_file_of_as_many_entries(life: Life, place: str, *, is_same: bool) -> None:
    """Two copies of a root fill one file with as many entries each, and one of them publishes it."""
    stored, copy, _ = as_many_in_a_copy(life, is_same=is_same)
    if place == "compacted":
        copy.seal()
        with pytest.raises(StorageUnavailable):
            copy.run_lifecycle()
    copy.abandon()
    for path in (life.root / "uploaded").iterdir():
        path.unlink()
    for path in (life.folder / "copy" / place).glob(f"{stored.file_id}*"):
        shutil.copy(path, life.root / place)


def another_history(life: Life, rounds: tuple[int, int], how: str, first: str, scheme: str = "file") -> None:
    """Another site continued from the same state, and its storage was synced over this one without deletes.

    `rounds` are those of this site and of the other one; `first` wrote before the other ("a" is this one).
    """
    sites = Sites(life, scheme)
    for name in sorted("ab", key=lambda name: name != first):
        sites.write(name, rounds[name == "b"], 100 if name == "a" else 500)
    sites.merge("b", "a", how)
    life.uri = sites.storage("a").uri


Restore = Callable[[Life, pytest.MonkeyPatch], object]


_ROUNDS = {"shorter": (3, 1), "longer": (1, 3), "equal": (1, 1)}
# how a storage was synced over another one, which of both wrote first, and the kind of storage
_SYNCED = {
    "keeping times": ("keeping times", "a", "file"),
    "keeping times, older": ("keeping times", "b", "file"),
    "with new times": ("with new times", "a", "file"),
    "with new times, older": ("with new times", "b", "file"),
    "where it lacks": ("leaving what is there", "a", "file"),
    "in a database": ("with new times", "b", "sqlite"),
}


def _synced(rounds: tuple[int, int], how: str, first: str, scheme: str) -> Restore:
    return lambda life, _: another_history(life, rounds, how, first, scheme)


RESTORES: dict[str, Restore] = {
    "the storage": lambda life, _: the_storage(life),
    "the storage, files were retired": lambda life, _: the_storage(life, 0),
    "the storage, another went on": lambda life, _: _the_storage_and_another_root_went_on(life),
    "the root": lambda life, _: _the_root(life),
    "the root, its file was merged": lambda life, _: _the_root(life, then_merge=True),
    "the root, an object is lost": lambda life, _: _the_root_and_an_object_is_lost(life, Path.unlink),
    "the root, an object is damaged": lambda life, _: _the_root_and_an_object_is_lost(
        life, lambda path: flip(path, path.stat().st_size // 2)
    ),
    "the root, the storage was away": lambda life, _: _the_root_and_the_storage_was_away(life),
    "a clone, which took the lease": lambda life, _: _a_clone_took_the_lease(life),
    "a clone that ran meanwhile": _a_clone_that_ran_at_the_same_time,
    "a file that had grown": lambda life, _: _a_file_that_had_grown(life),
    "a grown file that was merged": lambda life, _: _a_file_that_had_grown(life, then_merge=True),
    "a grown file that was retired": lambda life, _: _a_file_that_had_grown(life, then_merge=True, then_retire=True),
    "an earlier file": lambda life, _: _an_earlier_file(life, 0),
    "an earlier file that went on": lambda life, _: _an_earlier_file(life, 3),
    "a file, unsealed, the same": lambda life, _: _a_file_of_as_many_entries(life, "unsealed", is_same=True),
    "a file, compacted, the same": lambda life, _: _a_file_of_as_many_entries(life, "compacted", is_same=True),
    "a file, unsealed, as many": lambda life, _: _a_file_of_as_many_entries(life, "unsealed", is_same=False),
    "a file, compacted, as many": lambda life, _: _a_file_of_as_many_entries(life, "compacted", is_same=False),
} | {
    f"{length}, {words}": _synced(rounds, *how) for words, how in _SYNCED.items() for length, rounds in _ROUNDS.items()
}
"""What puts a root and its storage out of step, by the words of a table."""
