"""Storages and roots that are restored, cloned, mixed or half synced: no durable entry is lost without an error."""

from __future__ import annotations

import os
import re
import shutil
import socket
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import tiered_index
from tests.integration.cli.command_lines import run_here
from tests.support.damage import flip
from tests.support.disk_faults import FaultDisk
from tests.support.log_records import publish
from tests.support.pending import merge_all
from tests.support.storage_faults import FaultStorage
from tiered_index import IndexConfig, IndexReader, IndexService, Retention, erase, expire
from tiered_index.clock import ManualClock
from tiered_index.errors import (
    InvalidArgument,
    LockHeld,
    RootBehind,
    StorageBehind,
    StorageMisconfigured,
    StorageUnavailable,
    TieredIndexError,
    WriterFenced,
)
from tiered_index.service import anew
from tiered_index.service.anew import BegunAnew, begin_anew
from tiered_index.service.jobs.copying import Copier
from tiered_index.service.jobs.repair import Repairs
from tiered_index.service.jobs.verify import check_index
from tiered_index.service.jobs.verify_report import Report
from tiered_index.service.log.log import StorageLog
from tiered_index.service.log.records import StoredObject
from tiered_index.service.root import Root
from tiered_index.service.root.seen import SeenFile
from tiered_index.storage.base import Storage
from tiered_index.storage.disk import Disk
from tiered_index.storage.local.storage import LocalStorage
from tiered_index.storage.memory import MemoryStorage
from tiered_index.storage.opening import open_storage

NOW_MS = 1_700_000_000_000


class Life:
    """One index below a folder: the entries of each history of its root, and copies of root and storage."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.clock = folder, ManualClock(NOW_MS)
        self.put = 0

    @property
    def root(self) -> Path:
        return self.folder / "root"

    @property
    def uri(self) -> str:
        return f"file://{self.folder}/storage"

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

    def found(self, asked: IndexService | IndexReader | None = None) -> set[int]:
        if asked is not None:
            result = asked.query("t", "k", max_count=10_000)
            assert result.status == "complete"
            return {item.offset for item in result}
        with IndexReader.open(f"file://{self.folder}/storage") as reader:
            return self.found(reader)

    def begin_anew(self) -> BegunAnew:
        config = IndexConfig(root=self.root, storage=self.uri, slots=7, items=1000, background=False, query_threads=2)
        return begin_anew(config, clock=self.clock)

    def reopened(self, root: Path | None = None, **settings: Any) -> set[int]:
        """Return the findings of a writer that opens the root, and close it again."""
        with self.open(root, **settings) as index:
            return self.found(index)

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


def files_of(life: Life) -> list[Path]:
    """Return all files and folders, without the locks of roots."""
    return sorted(path for path in life.folder.rglob("*") if path.name != "lock")


@pytest.fixture
def life(tmp_path: Path) -> Life:
    return Life(tmp_path)


class _Forgetful(FaultDisk):
    """A folder sync that fails drops its changes: no later one writes them."""

    failing: str | None = None

    def sync_folder(self, folder: Path) -> None:
        if self.failing is not None and folder.name == self.failing:
            self.failing = None
            self._take(lambda change: hasattr(change, "touches") and change.touches(folder))
            raise OSError(5, "the sync failed")
        super().sync_folder(folder)


@pytest.mark.parametrize("again", ["next round", "next start"])
def test_a_record_whose_folder_sync_failed_is_published_when_durable(life: Life, again: str) -> None:
    disk = _Forgetful()
    storage = LocalStorage(life.folder / "storage", disk=disk)
    index = life.open(storage_backend=storage, disk=disk, local_keep_s=0)
    life.ingest(index, 20, upload=False)
    index.seal()
    disk.failing = "log%"
    with pytest.raises(StorageUnavailable):
        index.run_lifecycle()
    assert disk.failing is None
    if again == "next start":
        index.abandon()
        index = life.open(storage_backend=storage, disk=disk, local_keep_s=0)
    else:
        index.run_lifecycle()
    life.clock.advance(10)
    index.run_lifecycle()
    index.abandon()
    disk.lose_unsynced()
    assert len(life.reopened(storage_backend=LocalStorage(life.folder / "storage"), local_keep_s=0)) == 20


def test_each_record_names_its_predecessor_and_its_root(life: Life) -> None:
    with life.open() as index:
        life.ingest(index, 3, upload=True)
        state = StorageLog(index.storage, life.clock).open()
        records = [StorageLog(index.storage, life.clock).record(n) for n in range(1, state.number + 1)]
    assert [one.previous for one in records[1:]] == [one.digest for one in records[:-1]]
    assert state.roots == {records[-1].root: (state.number, records[-1].attempt)}
    seen = SeenFile(Root(life.root, Disk())).read()
    assert seen is not None
    assert (seen.number, seen.digest) == (state.number, records[-1].digest)


def test_a_reader_that_was_open_notices_an_older_root(life: Life) -> None:
    life.write(100, upload=False)
    life.keep("root")
    life.write(200, upload=True)
    with IndexReader.open(root=life.root, clock=life.clock) as reader:
        assert life.found(reader) == entries((1, 300))
        life.restore("root")
        life.clock.advance(100)
        with pytest.raises(RootBehind, match="tiered-index recover"):
            life.found(reader)


def test_a_root_whose_last_append_had_no_answer_is_no_older_copy(life: Life) -> None:
    faulty = FaultStorage(MemoryStorage(clock=life.clock))
    index = life.open(storage_backend=faulty)
    life.ingest(index, 10, upload=False)
    index.seal()
    faulty.fail("put_if_absent", name_prefix="log/", when="after")
    with pytest.raises(StorageUnavailable):
        index.run_lifecycle()
    index.abandon()
    assert life.reopened(storage_backend=faulty) == set(range(1, 11))


@pytest.mark.parametrize("broken_off", ["put_batch", "before the marker"])
def test_recover_continues_after_an_interrupt(life: Life, monkeypatch: pytest.MonkeyPatch, broken_off: str) -> None:
    _the_storage(life)
    with monkeypatch.context() as broken, pytest.raises(ZeroDivisionError):
        if broken_off == "put_batch":
            broken.setattr(IndexService, "put_batch", lambda *_: 1 / 0)
        else:
            broken.setattr(Root, "write_file", lambda *_: 1 / 0)
        life.begin_anew()
    with pytest.raises(RootBehind, match="interrupted"):
        life.open()
    with pytest.raises(TieredIndexError, match="set aside"), IndexReader.open(root=life.root) as reader:
        life.found(reader)
    done = life.begin_anew()
    assert (done.sent, done.entries, done.stored, done.kept) == (2, 50, 1, {})
    life.publish_all()
    assert life.found() == entries((1, 80))


def test_recover_compares_the_log_although_the_index_starts_without_its_storage(life: Life) -> None:
    life.write(30, upload=True)
    life.keep("storage")
    life.write(40, upload=True)
    life.write(10, upload=False)
    life.restore("storage")
    faulty = FaultStorage(LocalStorage(life.folder / "storage"))
    faulty.fail("list", name_prefix="checkpoint/")
    config = IndexConfig(root=life.root, slots=7, items=1000, background=False, query_threads=2)
    done = begin_anew(config, clock=life.clock, storage=faulty)
    assert (done.sent, done.entries, done.stored, done.kept) == (2, 50, 1, {})
    life.publish_all()
    assert life.found() == set(range(1, 81))


def test_recover_repeats_the_erasures_that_a_restored_storage_lacks(life: Life) -> None:
    """Otherwise it would bring erased entries back, also those that only the root has."""
    for _ in range(2):
        life.write(1, upload=True)
    life.keep("storage")
    with life.open(refresh_interval_s=0) as index:
        for key in ("k", "other"):
            index.put("t", 0, key, 100, 1, NOW_MS)
        index.seal()
        index.run_lifecycle()
        uri, later_ms = f"file://{life.folder}/storage", NOW_MS + 10**6
        assert erase(uri, "t", keys="k", before_ms=later_ms, yes=True, clock=life.clock).status == "hidden"
        for _ in range(2):
            index.run_lifecycle()
        assert life.found(index) == set()
    life.restore("storage")
    assert len(life.found()) == 2
    assert life.begin_anew().entries == 2
    life.publish_all()
    assert life.found() == life.reopened() == set()
    with IndexReader.open(uri) as reader:
        assert [item.offset for item in reader.query("t", "other")] == [100]


def test_recover_says_that_the_storage_lacks_an_expiry_that_replaced_an_erasure(life: Life) -> None:
    life.write(3, upload=True)
    life.keep("storage")
    uri = f"file://{life.folder}/storage"
    erase(uri, "t", keys="k", before_ms=NOW_MS + 10_000, yes=True, clock=life.clock)
    life.clock.advance(10 * 86400)
    assert expire(uri, Retention(age_s=86400), yes=True, clock=life.clock).expired.tombstones == ()
    life.write(1, upload=True)
    life.restore("storage")
    told = run_here("recover", "--root", life.root)
    assert told.code == 0 and "the storage lacks an expiry that the root knows" in told.out
    assert life.found() == {1, 2, 3}


def test_recover_says_that_it_can_not_repeat_erasures(life: Life) -> None:
    life.write(3, upload=True)
    life.keep("storage")
    life.write(1, upload=True)
    life.restore("storage")
    (life.root / "log").write_bytes(b"damaged")
    begun = life.begin_anew()
    assert list(begun.kept) == ["log"] and begun.left is not None
    assert (begun.left / "log").read_bytes() == b"damaged"


def test_files_that_recover_has_sent_are_deleted_also_after_a_crash(
    life: Life, monkeypatch: pytest.MonkeyPatch
) -> None:
    life.write(10, upload=False)
    life.keep("root")
    life.write(10, upload=True)
    life.restore("root")
    with monkeypatch.context() as broken, pytest.raises(ZeroDivisionError):
        broken.setattr(anew, "shutil", SimpleNamespace(rmtree=lambda *_, **__: 1 / 0))
        life.begin_anew()
    assert life.reopened() == set(range(1, 21))
    assert not [path for path in life.root.iterdir() if path.name.startswith(("aside", "sent"))]


def test_recover_keeps_unreadable_files(life: Life) -> None:
    life.write(10, upload=False)
    life.keep("root")
    life.write(10, upload=True)
    life.restore("root")
    (path,) = (life.root / "unsealed").glob("*.index")
    data = bytearray(path.read_bytes())
    data[200:300] = bytes(100)
    path.write_bytes(data)
    done = life.begin_anew()
    assert list(done.kept) == [path.stem]
    assert done.left is not None
    assert (done.left / "unsealed" / path.name).read_bytes() == data
    assert life.reopened() == set(range(1, 21))


def test_recover_sends_topics_that_arrow_cannot_store(life: Life, monkeypatch: pytest.MonkeyPatch) -> None:
    """A topic that an earlier version stored may have half a surrogate pair."""
    monkeypatch.setattr("tiered_index.service.read.rows.check_text", lambda name, text: text)
    monkeypatch.setattr("tiered_index.service.write.validation.check_text", lambda name, text: text)
    with life.open() as index:
        index.put("\ud800", 0, "k", 1, 1, NOW_MS)
        life.ingest(index, 9, upload=True)
    life.keep("storage")
    with life.open() as index:
        index.put("\ud800", 0, "k", 2, 1, NOW_MS)
        life.ingest(index, 5, upload=True)
        index.put("\ud800", 0, "k", 3, 1, NOW_MS)
        life.ingest(index, 5, upload=False)
    life.restore("storage")
    done = life.begin_anew()
    assert (done.sent, done.entries, done.stored, done.kept) == (2, 12, 1, {})
    with life.open() as index:
        assert life.found(index) == set(range(1, 20))
        assert {topic.topic for topic in index.topics()} >= {"\ud800"}


def test_recover_keeps_a_file_that_the_index_refuses(life: Life, monkeypatch: pytest.MonkeyPatch) -> None:
    life.write(10, upload=True)
    life.keep("storage")
    with life.open() as index:
        life.ingest(index, 5, upload=True)
        life.ingest(index, 5, upload=False)
    life.restore("storage")
    put_batch = IndexService.put_batch

    def refuse_first(index: IndexService, columns: Any) -> int:
        if 11 in columns["offset"].to_pylist():
            raise InvalidArgument("a row is not valid")
        return put_batch(index, columns)

    monkeypatch.setattr(IndexService, "put_batch", refuse_first)
    done = life.begin_anew()
    assert (done.sent, done.entries, list(done.kept.values())) == (1, 5, ["a row is not valid"])
    assert done.left is not None
    assert life.reopened() == {*range(1, 11), *range(16, 21)}


def test_a_reader_reports_another_history_and_opens_it_again(life: Life) -> None:
    life.write(10, upload=True)
    life.keep("storage", "root")
    life.write(10, upload=True)
    storage = LocalStorage(life.folder / "storage")
    with IndexReader.open(f"file://{life.folder}/storage", clock=life.clock, refresh_interval_s=1) as reader:
        assert len(life.found(reader)) == 20
        life.restore("storage", "root")
        life.put = 100
        life.write(10, upload=True)
        assert StorageLog(storage, life.clock).open().number == reader.log_state.number
        life.clock.advance(5)
        with pytest.raises(TieredIndexError, match="another"):
            life.found(reader)
        life.clock.advance(5)
        assert life.found(reader) == {*range(1, 11), *range(101, 111)}


def test_a_lock_file_that_was_deleted_lets_no_second_writer_in(life: Life) -> None:
    with life.open() as index:
        (life.root / "lock").unlink()
        with pytest.raises(LockHeld):
            life.open()
        life.ingest(index, 3, upload=True)
    assert len(life.reopened()) == 3


def test_a_running_writer_and_a_copy_are_no_findings(life: Life) -> None:
    life.write(10, upload=True)
    with life.open() as index:
        life.ingest(index, 20, upload=True)
        assert run_here("verify", "--root", life.root).code == 0
        assert run_here("orphans", "--root", life.root).code == 0
    copied = f"file://{life.folder}/copied"
    assert run_here("copy", "--storage", life.uri, "--to", copied).code == 0
    # a copy has its own log
    assert not run_here("verify", "--root", life.root, "--storage", copied, "--json").document["findings"]


@pytest.mark.parametrize("known", ["by an option", "by the environment"])
def test_jobs_refuse_a_storage_and_a_root_of_two_indexes(life: Life, tmp_path: Path, known: str) -> None:
    """Otherwise they would change an index that the operator does not mean, and leave the root's index unchanged."""
    life.write(10, upload=True)
    lost = life.folder / "root" / "unsealed"
    with life.open() as index:
        life.ingest(index, 5, upload=False)
    (file,) = lost.glob("*.journal")
    for path in lost.iterdir():
        path.unlink()
    other = Life(tmp_path / "other")
    other.write(20, upload=True)
    uri = f"file://{other.folder}/storage"
    where = ["--root", str(life.root), *(["--storage", uri] if known == "by an option" else [])]
    environment = {"TIERED_INDEX_STORAGE": uri} if known == "by the environment" else {}
    names = sorted((other.folder / "storage").rglob("*"))
    jobs = ("orphans --yes", "expire --set retention.age_s=10000d --yes", "merge", "erase --topic t --key k --yes")
    for job in (*jobs, f"recover --lost {file.stem}", f"copy --to file://{tmp_path}/copy"):
        refused = run_here(*job.split(), *where, "--json", environment=environment)
        assert (job, refused.code, refused.error["type"]) == (job, 2, "NotAnIndex")
    assert sorted((other.folder / "storage").rglob("*")) == names


def test_a_flush_into_a_folder_that_was_replaced_confirms_nothing_there(life: Life) -> None:
    index = life.open()
    life.ingest(index, 15, upload=False)
    shutil.move(life.root / "unsealed", life.folder / "moved")
    shutil.copytree(life.folder / "moved", life.root / "unsealed")
    with pytest.raises(StorageUnavailable, match="another file replaced it"):
        life.ingest(index, 5, upload=False)
    index.flush()  # into a file of the folder that is there now
    index.abandon()
    with IndexReader.open(root=life.root) as reader:
        assert len(life.found(reader)) == 20


@pytest.mark.parametrize("gone", ["root", "unsealed"])
def test_a_flush_into_a_root_that_was_deleted_confirms_nothing(life: Life, gone: str) -> None:
    index = life.open()
    life.ingest(index, 3, upload=False)
    shutil.rmtree(life.root if gone == "root" else life.root / "unsealed")
    with pytest.raises(StorageUnavailable):
        life.ingest(index, 3, upload=False)
    index.abandon()


@pytest.mark.parametrize("name", ["unsealed", "compacted", "uploaded", "*.journal"])
def test_a_link_in_the_place_of_a_folder_or_a_file_is_refused_by_readers_too(life: Life, name: str) -> None:
    life.write(3, upload=False)
    (path,) = life.root.rglob(name)
    path.rename(life.folder / "elsewhere")
    path.symlink_to(life.folder / "elsewhere")
    with pytest.raises(StorageMisconfigured, match="symbolic link"), IndexReader.open(root=life.root) as reader:
        life.found(reader)
    with pytest.raises(StorageMisconfigured, match="symbolic link"):
        life.open()


def test_a_copy_stops_if_its_source_has_another_history(life: Life) -> None:
    life.write(10, upload=True)
    life.keep("storage", "root")
    life.write(10, upload=True)
    source, target = LocalStorage(life.folder / "storage"), LocalStorage(life.folder / "target")
    following = Copier(source, target, life.clock)
    following.open()
    following.run_once()
    life.restore("storage", "root")
    life.write(10, upload=True)
    for copier in (following, Copier(source, target, life.clock)):
        with pytest.raises(StorageBehind):
            copier.open() if copier is not following else copier.run_once()
    # the command does not try again
    done = run_here("copy", "--from", source.uri, "--to", target.uri, "--follow", "--json")
    assert (done.code, done.error["type"]) == (StorageBehind.exit_code, "StorageBehind")
    fresh = MemoryStorage(clock=life.clock)
    copier = Copier(source, fresh, life.clock)
    copier.open()
    copier.run_once()
    copier.run_once()
    life.write(1, upload=True)
    copier.run_once()


@pytest.mark.parametrize("host", [socket.gethostname(), "another"])
def test_a_clone_waits_for_the_lease(life: Life, monkeypatch: pytest.MonkeyPatch, host: str) -> None:
    with life.open(lease_ttl_s=30) as first:
        life.ingest(first, 10, upload=False)
        shutil.copytree(life.root, life.folder / "clone")
        monkeypatch.setattr("socket.gethostname", lambda: host)
        with pytest.raises(LockHeld):
            life.open(life.folder / "clone")


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


@pytest.mark.parametrize("is_same", [True, False], ids=["same", "others"])
def test_a_file_that_another_publishes_meanwhile_is_compared(life: Life, is_same: bool) -> None:
    stored, copy, storage = as_many_in_a_copy(life, is_same=is_same)
    copy.seal()
    with pytest.raises(StorageUnavailable):
        copy.run_lifecycle()
    storage.clear()
    storage.put(stored.name, LocalStorage(life.folder / "storage").get(stored.name))
    publish(StorageLog(storage, life.clock), copy.log_state.epoch, (stored,))
    if is_same:
        copy.run_lifecycle()
        assert [handle.place for handle in copy.files()] == ["uploaded"]
    else:
        with pytest.raises(RootBehind, match="another file with this id"):
            copy.run_lifecycle()
        assert life.found(copy) >= entries((21, 25))
    copy.abandon()


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
            return self.life.found(index)

    def merge(self, source: str, target: str, how: str) -> None:
        """Sync one site over the other one, which then has both histories."""
        if how == "keeping times":
            places = self.life.folder / source, self.life.folder / target
            shutil.copytree(*places, copy_function=shutil.copy2, dirs_exist_ok=True)
        else:
            _sync(self.storage(source), self.storage(target), replaces=how != "leaving what is there")


def _read(storage: Storage, life: Life) -> set[int]:
    with IndexReader.open(storage_backend=storage, clock=life.clock) as reader:
        return life.found(reader)


@pytest.mark.parametrize("rounds", [(3, 1), (1, 3), (1, 1)], ids=["longer", "shorter", "equal"])
@pytest.mark.parametrize(
    ("scheme", "how", "first"),
    [
        ("file", "keeping times", "a"),
        ("file", "keeping times", "b"),
        ("file", "with new times", "a"),
        ("memory", "leaving what is there", "a"),
        ("memory", "with new times", "b"),
        pytest.param("sqlite", "with new times", "b", marks=pytest.mark.long),
    ],
)
def test_a_fresh_reader_and_a_new_writer_refuse_two_merged_histories(
    life: Life, scheme: str, how: str, first: str, rounds: tuple[int, int]
) -> None:
    sites = Sites(life, scheme)
    found = {}
    for name in sorted("ab", key=lambda name: name != first):
        found[name] = sites.write(name, rounds[name == "b"], 100 if name == "a" else 500)
    sites.merge("b", "a", how)
    with pytest.raises(StorageBehind, match="two histories") as caught:
        _read(sites.storage("a"), life)
    assert caught.value.expected and caught.value.found
    with pytest.raises(StorageBehind, match="two histories"):
        life.open(life.folder / "new", storage_backend=sites.storage("a"))
    with pytest.raises(StorageBehind, match="two histories"):
        StorageLog(sites.storage("a"), life.clock).open()
    # a copy uses the history of the newest checkpoint, which one of the roots has, too
    saved = MemoryStorage(clock=life.clock)
    copier = Copier(sites.storage("a"), saved, life.clock)
    copier.open()
    copier.run_once()
    assert _read(saved, life) in found.values()


def test_a_reader_of_all_records_refuses_two_merged_histories(life: Life) -> None:
    sites = Sites(life, "memory")
    for name, rounds in (("a", 2), ("b", 1)):
        sites.write(name, rounds, 100)
    sites.merge("b", "a", "with new times")
    storage = sites.storage("a")
    storage.delete_many([info.name for info in storage.list("checkpoint/")])
    with pytest.raises(StorageBehind, match="two histories"):
        _read(storage, life)


@pytest.mark.parametrize("rounds", [(2, 1), (1, 2)], ids=["a broken log", "a whole log"])
def test_verify_says_which_log_is_whole_and_repairs_its_checkpoints(life: Life, rounds: tuple[int, int]) -> None:
    sites = Sites(life, "file")
    sites.write("b", rounds[1], 500)
    sites.write("a", rounds[0], 100)
    sites.merge("b", "a", "keeping times")
    report = Report()
    config = IndexConfig(storage=sites.storage("a").uri)
    check_index(config, report, lambda *_: None, lambda *_: None, deep=False)
    parts = {one.part for one in report.findings}
    if rounds == (2, 1):
        assert "log" in parts
        return
    assert parts == {"checkpoint"}
    log = StorageLog(sites.storage("a"), life.clock)
    log.open(checks=False)
    Repairs(sites.storage("a"), log).run(report, yes=True)
    assert _read(sites.storage("a"), life) == {*range(1, 11), *range(500, 520)}


def entries(*ranges: tuple[int, int]) -> set[int]:
    """Return the numbers of inclusive ranges."""
    return {number for first, last in ranges for number in range(first, last + 1)}


def _the_storage(life: Life, keep_s: float = 3600) -> set[int]:
    life.write(30, upload=True, local_keep_s=keep_s)
    life.keep("storage")
    with life.open(local_keep_s=keep_s) as index:
        life.ingest(index, 40, upload=True)
        life.ingest(index, 10, upload=False)
    life.restore("storage")
    return entries((1, 30))


def _the_storage_and_another_root_went_on(life: Life) -> set[int]:
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
    return entries((1, 10), (101, 110))


def _the_root(life: Life, *, then_merge: bool = False) -> set[int]:
    life.write(100, upload=False)
    life.keep("root")
    life.write(200, upload=True)
    if then_merge:
        life.clock.advance(10 * 86400)
        assert merge_all(LocalStorage(life.folder / "storage"), life.clock).tables == 1
    life.restore("root")
    return entries((1, 300))


def _the_root_and_an_object_is_lost(life: Life, damage: Callable[[Path], object]) -> None:
    life.write(100, upload=True)
    life.keep("root")
    life.write(10, upload=True)
    life.restore("root")
    (copy,) = (life.root / "uploaded").glob("*.index")
    (path,) = [path for path in (life.folder / "storage" / "data%").rglob("*.index") if copy.stem in str(path)]
    damage(path)


def _the_root_and_the_storage_was_away(life: Life) -> set[int]:
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
    return entries((1, 30))


def _a_clone_took_the_lease(life: Life) -> set[int]:
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
    return entries((1, 10), (101, 107))


def _a_clone_that_ran_at_the_same_time(life: Life, monkeypatch: pytest.MonkeyPatch) -> set[int]:
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
    assert life.found(clone) >= entries((101, 105))
    life.ingest(first, 5, upload=True)
    first.close()
    clone.abandon()
    life.root.rename(life.folder / "first")
    (life.folder / "clone").rename(life.root)
    return entries((1, 15), (106, 110))


def _a_file_that_had_grown(life: Life) -> set[int]:
    index = life.open()
    life.ingest(index, 10, upload=False)
    life.keep("root")
    life.ingest(index, 5, upload=False)
    index.abandon()
    life.root.rename(life.folder / "grown")
    shutil.copytree(life.folder / "root.kept", life.root)
    life.end_lease()
    life.publish_all()
    for path in (life.folder / "grown" / "unsealed").iterdir():
        shutil.copy(path, life.root / "unsealed")
    return entries((1, 10))


def _an_earlier_file(life: Life, own: int) -> set[int]:
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
    return entries((1, 15))


def _a_file_of_as_many_entries(life: Life, place: str, *, is_same: bool) -> set[int]:
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
    return entries((1, 15))


def _another_history_over_it(life: Life, rounds: tuple[int, int]) -> None:
    """The storage of another site, which continued from the same state, was synced over the storage without deletes."""
    sites = Sites(life, "file")
    sites.write("b", rounds[1], 500)
    sites.write("a", rounds[0], 100)
    sites.merge("b", "a", "keeping times")
    (life.folder / "a").rename(life.folder / "storage")


RESTORES: dict[str, Callable[[Life, pytest.MonkeyPatch], set[int] | None]] = {
    "the storage": lambda life, _: _the_storage(life),
    "the storage, files were retired": lambda life, _: _the_storage(life, 0),
    "the storage, another root went on": lambda life, _: _the_storage_and_another_root_went_on(life),
    "the root": lambda life, _: _the_root(life),
    "the root, its file was merged": lambda life, _: _the_root(life, then_merge=True),
    "the root, an object is lost": lambda life, _: _the_root_and_an_object_is_lost(life, Path.unlink),
    "the root, an object is damaged": lambda life, _: _the_root_and_an_object_is_lost(
        life, lambda path: flip(path, path.stat().st_size // 2)
    ),
    "the root, the storage was away": lambda life, _: _the_root_and_the_storage_was_away(life),
    "a clone, which took the lease": lambda life, _: _a_clone_took_the_lease(life),
    "a clone that ran at the same time": _a_clone_that_ran_at_the_same_time,
    "a file that had grown": lambda life, _: _a_file_that_had_grown(life),
    "an earlier file": lambda life, _: _an_earlier_file(life, 0),
    "an earlier file that went on": lambda life, _: _an_earlier_file(life, 3),
    "a file, unsealed, the same": lambda life, _: _a_file_of_as_many_entries(life, "unsealed", is_same=True),
    "a file, compacted, the same": lambda life, _: _a_file_of_as_many_entries(life, "compacted", is_same=True),
    "a file, unsealed, as many": lambda life, _: _a_file_of_as_many_entries(life, "unsealed", is_same=False),
    "a file, compacted, as many": lambda life, _: _a_file_of_as_many_entries(life, "compacted", is_same=False),
    "a shorter history over it": lambda life, _: _another_history_over_it(life, (2, 1)),
    "a longer history over it": lambda life, _: _another_history_over_it(life, (1, 2)),
}
"""What puts a root and its storage out of step. Each returns the entries that the storage then has; None: a reader of
the storage alone is refused.
"""

OUTCOMES = """
| restored                          | writer  | its words       | beside  | sent      | at  | kept                   |
| the storage                       | Storage | earlier state   | Storage | 2, 50, 1  | 30  | 1-80                   |
| the storage, files were retired   | Storage | earlier state   | Storage | 1, 10, 0  | 30  | 1-30, 71-80            |
| the storage, another root went on | Storage | another history | Storage | 1, 10, 1  | 110 | 1-20, 101-110          |
| the root                          | Root    | a backup        | Root    | 1, 100, 0 | 300 | 1-300                  |
| the root, its file was merged     | Root    | a backup        | Root    | 1, 100, 0 | 300 | 1-300                  |
| the root, an object is lost       | Root    | a backup        | Root    | 1, 100, 0 | 110 | 1-110                  |
| the root, an object is damaged    | Root    | a backup        | Root    | 1, 100, 0 | 110 | 1-110                  |
| the root, the storage was away    | Root    | a backup        | Root    | 2, 15, 0  | 30  | 1-30, 101-105          |
| a clone, which took the lease     | Root    | a clone         | Root    | 1, 15, 0  | 107 | 1-15, 101-107          |
| a clone that ran at the same time | Root    | a clone         | Root    | 1, 15, 0  | 110 | 1-15, 101-110          |
| a file that had grown             | Root    | another file    |         | 1, 15, 1  | 10  | 1-15                   |
| an earlier file                   |         |                 |         |           |     | 1-15                   |
| an earlier file that went on      | Root    | another file    |         | 1, 13, 0  | 15  | 1-15, 21-23            |
| a file, unsealed, the same        |         |                 |         |           |     | 1-15                   |
| a file, compacted, the same       |         |                 |         |           |     | 1-15                   |
| a file, unsealed, as many         | Root    | another file    |         | 1, 15, 0  | 15  | 1-15, 21-25            |
| a file, compacted, as many        | Root    | another file    |         | 1, 15, 0  | 15  | 1-15, 21-25            |
| a shorter history over it         |         |                 |         |           |     | 1-10, 100-119          |
| a longer history over it          | Storage | another history | Storage | 1, 10, 1  | 519 | 1-10, 100-109, 500-519 |
"""
ROWS = {
    row[0]: row[1:]
    for line in OUTCOMES.strip().splitlines()[1:]
    for row in [[cell.strip() for cell in line.strip(" |").split("|")]]
}


@dataclass(frozen=True)
class Outcome:
    """A row of the table: what is said of a restore, and what is kept.

    - `writer`: the error of an opening of the root, `StorageBehind` or `RootBehind`, with its `words`; empty: it opens,
      and has the entries `kept`.
    - `beside`: the error of readers and of jobs that know the root, and the finding of `verify`; empty: none.
    - `recover` reports the numbers of files and entries that it `sent`, and of files that the storage has. Sources then
      continue behind the position `at`, and the storage has the entries `kept` as soon as they are uploaded.
    """

    writer: str
    words: str
    beside: str
    sent: str
    at: str
    kept: str


def test_one_module_judges_restores() -> None:
    package = Path(tiered_index.__file__).parent
    made = {
        path.name for path in package.rglob("*.py") if re.search(r"(?<!class )(Storage|Root)Behind\(", path.read_text())
    }
    assert made == {"identity.py"}


def test_each_restore_has_a_row() -> None:
    assert list(ROWS) == list(RESTORES)


@pytest.mark.parametrize("restored", RESTORES)
def test_what_was_restored_is_said_and_its_entries_are_kept(
    life: Life, monkeypatch: pytest.MonkeyPatch, restored: str
) -> None:
    outcome = Outcome(*ROWS[restored])
    kept = entries(*(tuple(map(int, one.split("-"))) for one in outcome.kept.split(", ")))
    writer = {"Storage": StorageBehind, "Root": RootBehind}.get(outcome.writer)
    stored = RESTORES[restored](life, monkeypatch)
    if writer is None:
        assert life.reopened() == kept
        assert not list((life.root / "unsealed").glob("*.journal"))
        return
    before = files_of(life)
    if not outcome.beside:
        # the opening has claimed the storage before it compared files
        before = [path for path in before if path.suffix in (".index", ".journal")]
    with pytest.raises(writer, match=outcome.words) as caught:
        life.open()
    assert "tiered-index recover" in str(caught.value)
    if outcome.beside:
        with pytest.raises(TieredIndexError), IndexReader.open(life.uri, root=life.root, clock=life.clock) as reader:
            life.found(reader)
        for job in ("merge", "orphans --yes", "erase --topic t --key k --yes", "expire --set retention.age_s=9d --yes"):
            refused = run_here(*job.split(), "--root", life.root, "--storage", life.uri, "--json")
            assert (job, refused.code, refused.error["type"]) == (job, 4, f"{outcome.beside}Behind")
        told = run_here("verify", "--deep", "--repair", "--yes", "--root", life.root, "--storage", life.uri, "--json")
        findings = [one for one in told.document["findings"] if "tiered-index recover" in one["problem"]]
        assert told.code == 1 and findings[0]["part"] == "log"
    assert set(before) <= set(files_of(life)) if not outcome.beside else files_of(life) == before
    if stored is not None:
        assert life.found() == stored
    else:
        with pytest.raises(TieredIndexError):
            life.found()
    done = life.begin_anew()
    assert ((done.sent, done.entries, done.stored), done.kept) == (tuple(map(int, outcome.sent.split(", "))), {})
    with life.open() as index:
        assert index.durable_position("s") == int(outcome.at)
    life.publish_all()
    if stored is not None:
        assert life.found() == kept
    else:
        with life.open() as index:
            assert {item.offset for item in index.query("t", "k", max_count=1000, allow_partial=True)} == kept
    assert not [path for path in life.root.iterdir() if path.name.startswith(("aside", "sent"))]
