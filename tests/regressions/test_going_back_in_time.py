"""Storages and roots that are restored, cloned, mixed or half synced: no durable entry is lost without an error."""

from __future__ import annotations

import os
import shutil
import socket
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

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

    def open(self, root: Path | None = None, **settings: Any) -> IndexService:
        chosen = {"slots": 7, "items": 1000, "background": False, "query_threads": 2, "clock": self.clock, **settings}
        storage = f"file://{self.folder}/storage"
        backend = chosen.get("storage_backend")
        return IndexService.open(root=root or self.root, storage=None if backend else storage, **chosen)

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
        config = IndexConfig(root=self.root, slots=7, items=1000, background=False, query_threads=2)
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


@pytest.mark.parametrize("uploaded", ["by log", "retired"])
def test_a_storage_that_is_behind_its_root_is_refused(life: Life, uploaded: str) -> None:
    keep_s = 0 if uploaded == "retired" else 3600
    life.write(30, upload=True, local_keep_s=keep_s)
    life.keep("storage")
    life.write(70, upload=True, local_keep_s=keep_s)
    before = StorageLog(LocalStorage(life.folder / "storage"), life.clock).open().number
    files = sorted(path.name for path in (life.root / "uploaded").iterdir())
    life.restore("storage")
    with pytest.raises(StorageBehind, match="tiered-index recover") as caught:
        life.open()
    assert (caught.value.expected, caught.value.found) == (before, 3)
    assert sorted(path.name for path in (life.root / "uploaded").iterdir()) == files
    with pytest.raises(TieredIndexError), IndexReader.open(root=life.root) as reader:
        life.found(reader)


def test_another_history_at_the_same_number_is_refused(life: Life) -> None:
    life.write(10, upload=True)
    life.keep("storage", "root")
    life.write(10, upload=True)
    shutil.move(life.root, life.folder / "first")
    life.restore("storage")
    shutil.move(life.folder / "root.kept", life.root)
    life.put = 10
    life.write(10, upload=True)
    with pytest.raises(StorageBehind, match="another"):
        life.open(life.folder / "first")
    assert life.reopened() == set(range(1, 21))


@pytest.mark.parametrize("then", ["nothing", "merge"])
def test_a_root_from_a_backup_is_refused(life: Life, then: str) -> None:
    life.write(100, upload=False)
    life.keep("root")
    life.write(200, upload=True)
    if then == "merge":
        life.clock.advance(10 * 86400)
        assert merge_all(LocalStorage(life.folder / "storage"), life.clock).tables == 1
    with IndexReader.open(root=life.root, clock=life.clock) as reader:
        assert life.found(reader) == set(range(1, 301))
        life.restore("root")
        with pytest.raises(RootBehind, match="tiered-index recover"):
            life.open()
        # its copy of the published file has fewer entries
        with pytest.raises(RootBehind, match="tiered-index recover"):
            IndexReader.open(root=life.root)
        life.clock.advance(100)
        with pytest.raises(RootBehind, match="tiered-index recover"):
            life.found(reader)
    report = Report()
    config = IndexConfig(root=life.root, storage=f"file://{life.folder}/storage")
    assert check_index(config, report, lambda *_: None, lambda *_: None, deep=False)[1] is False
    assert any("restored from a backup" in one.problem for one in report.findings)
    assert life.found() == set(range(1, 301))


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


@pytest.mark.parametrize("broken_off", [None, "put_batch", "before the marker"])
def test_recover_sends_files_that_a_restored_storage_lacks(
    life: Life, monkeypatch: pytest.MonkeyPatch, broken_off: str | None
) -> None:
    life.write(30, upload=True)
    life.keep("storage")
    with life.open() as index:
        life.ingest(index, 40, upload=True)
        life.ingest(index, 10, upload=False)
    life.restore("storage")
    if broken_off:
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
    assert (done.sent, done.entries, done.kept) == (2, 50, {})
    assert done.stored == 1
    with life.open() as index:
        assert index.durable_position("s") == 30
        assert life.found(index) == set(range(1, 81))
        index.seal()
        index.run_lifecycle()
    assert life.found() == set(range(1, 81))
    assert not [path for path in life.root.iterdir() if path.name.startswith("aside")]


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


def test_recover_of_a_root_from_a_backup_keeps_files_that_the_storage_lacks(life: Life) -> None:
    life.write(100, upload=False)
    life.keep("root")
    life.write(200, upload=True)
    life.restore("root")
    done = life.begin_anew()
    assert (done.sent, done.stored) == (1, 0)  # fewer entries than the file of this id in the storage
    with life.open() as index:
        assert index.durable_position("s") == 300
        life.ingest(index, 400, upload=True)
        assert life.found(index) == set(range(1, 701))
    assert life.found() == set(range(1, 701))


@pytest.mark.parametrize("damage", ["deleted", "flipped"])
def test_recover_sends_a_copy_of_an_object_that_the_storage_has_lost(life: Life, damage: str) -> None:
    """The copy in the root may be the last one, and `verify --repair` refuses a root that is behind."""
    life.write(100, upload=True)
    life.keep("root")
    life.write(10, upload=True)
    life.restore("root")
    first = _object_of_the_roots_file(life)
    if damage == "deleted":
        first.unlink()
    else:
        flip(first, first.stat().st_size // 2)
    done = life.begin_anew()
    assert (done.sent, done.entries, done.stored, done.kept) == (1, 100, 0, {})
    with life.open() as index:
        assert {item.offset for item in index.query("t", "k", max_count=1000, allow_partial=True)} >= set(range(1, 101))


def _object_of_the_roots_file(life: Life) -> Path:
    """Return the path of the object of the only file that the root has in `uploaded`."""
    (copy,) = (life.root / "uploaded").glob("*.index")
    (path,) = [path for path in (life.folder / "storage" / "data%").rglob("*.index") if copy.stem in str(path)]
    return path


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


@pytest.mark.parametrize("beside", [False, True])
def test_verify_tells_that_the_storage_is_behind_the_root(life: Life, beside: bool) -> None:
    life.write(10, upload=True)
    life.keep("storage")
    with life.open() as index:
        life.ingest(index, 20, upload=True)
        if beside:  # a running writer is no finding
            assert run_here("verify", "--root", life.root).code == 0
    copied = f"file://{life.folder}/copied"
    assert run_here("copy", "--storage", f"file://{life.folder}/storage", "--to", copied).code == 0
    # a copy has its own log
    told = run_here("verify", "--root", life.root, "--storage", copied, "--json")
    assert not told.document["findings"]
    life.restore("storage")
    names = sorted((life.folder / "storage").rglob("*"))
    for more in ((), ("--deep",), ("--deep", "--repair", "--yes")):
        told = run_here("verify", "--root", life.root, "--json", *more)
        (finding,) = told.document["findings"]
        assert told.code == 1 and finding["part"] == "log" and "tiered-index recover" in finding["problem"]
        assert not told.document.get("repairs")
    assert sorted((life.folder / "storage").rglob("*")) == names


def test_jobs_that_know_the_root_add_nothing_to_a_storage_that_is_behind_it(life: Life) -> None:
    life.write(10, upload=True)
    life.keep("storage")
    with life.open() as index:
        life.ingest(index, 20, upload=True)
        # beside a running writer, whose storage agrees with the root
        assert run_here("orphans", "--root", life.root).code == 0
    life.restore("storage")
    names = sorted((life.folder / "storage").rglob("*"))
    for job in ("orphans", "expire --set retention.age_s=10000d", "merge", "erase --topic t --key k"):
        more = [] if job == "merge" else ["--yes"]
        refused = run_here(*job.split(), *more, "--root", life.root, "--json")
        assert (job, refused.code, refused.error["type"]) == (job, 4, "StorageBehind")
    assert sorted((life.folder / "storage").rglob("*")) == names


@pytest.mark.parametrize(("restored", "error"), [("storage", "StorageBehind"), ("root", "RootBehind")])
def test_each_job_that_knows_a_root_says_what_was_restored_and_changes_nothing(
    life: Life, restored: str, error: str
) -> None:
    life.write(10, upload=True)
    life.keep(restored)
    life.write(20, upload=True)
    life.restore(restored)
    names = sorted(path for path in life.folder.rglob("*") if path.name != "lock")
    for job in ("orphans --yes", "merge", "erase --topic t --key k --yes"):
        refused = run_here(*job.split(), "--root", life.root, "--json")
        assert (job, refused.code, refused.error["type"]) == (job, 4, error)
    with pytest.raises(StorageBehind if restored == "storage" else RootBehind):
        life.open()
    assert sorted(path for path in life.folder.rglob("*") if path.name != "lock") == names


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
def test_a_clone_waits_for_the_lease_and_the_first_keeps_its_entries(
    life: Life, monkeypatch: pytest.MonkeyPatch, host: str
) -> None:
    first = life.open(lease_ttl_s=30)
    life.ingest(first, 10, upload=False)
    shutil.copytree(life.root, life.folder / "clone")
    monkeypatch.setattr("socket.gethostname", lambda: host)
    with pytest.raises(LockHeld):
        life.open(life.folder / "clone")
    life.end_lease()
    life.ingest(first, 5, upload=False)
    with life.open(life.folder / "clone") as clone:
        life.put = 100
        life.ingest(clone, 7, upload=True)
    first.seal()
    with pytest.raises((WriterFenced, RootBehind)):
        first.run_lifecycle()
    first.abandon()
    with pytest.raises(RootBehind):
        life.open()
    done = life.begin_anew()
    assert (done.sent, done.entries) == (1, 15)
    assert life.reopened() == {*range(1, 16), *range(101, 108)}


def test_an_older_root_that_starts_without_its_storage_adds_to_no_published_file(life: Life) -> None:
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
    life.begin_anew()
    assert life.reopened() == {*range(1, 31), *range(101, 106)}


def test_a_file_with_more_entries_than_the_published_one_of_its_id_is_not_dropped(life: Life) -> None:
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
    with pytest.raises(RootBehind, match="another file with this id"):
        life.open()
    assert life.begin_anew().entries == 15
    assert life.reopened() == set(range(1, 16))


def leave_two_copies(life: Life) -> None:
    """Put ten entries into a file, and leave two copies of the root and of the storage."""
    first = life.open()
    life.ingest(first, 10, upload=False)
    life.keep("storage")
    first.abandon()
    shutil.copytree(life.root, life.folder / "copy")
    life.end_lease()


@pytest.mark.parametrize("own", [0, 3], ids=["an earlier state", "a clone that diverged"])
def test_a_file_with_fewer_entries_is_dropped_if_the_published_one_has_them(life: Life, own: int) -> None:
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
    if own:
        with pytest.raises(RootBehind, match="another file with this id"):
            life.open()
        assert life.begin_anew().entries == 13
    with life.open() as index:
        assert life.found(index) == {*range(1, 16), *range(21, 21 + own)}
        assert bool(list((life.root / "unsealed").glob("*.journal"))) == bool(own)


@pytest.mark.parametrize("is_same", [True, False], ids=["same", "others"])
@pytest.mark.parametrize("place", ["unsealed", "compacted", "compacted while open"])
def test_a_file_counts_as_published_by_count_and_checksum(life: Life, place: str, is_same: bool) -> None:
    """Two copies of a root fill one file with as many entries each, and one of them publishes it."""
    leave_two_copies(life)
    with life.open() as index:
        life.ingest(index, 5, upload=True)
        (stored,) = index.log_state.objects.values()
    # the copy, with a storage that lacks that file
    before = FaultStorage(LocalStorage(life.folder / "storage.kept"))
    life.end_lease("storage.kept")
    before.fail("put", name_prefix="data/", times=None)
    life.put = 10 if is_same else 20
    copy = life.open(life.folder / "copy", storage_backend=before)
    life.ingest(copy, 5, upload=False)
    if place != "unsealed":
        copy.seal()
        with pytest.raises(StorageUnavailable):
            copy.run_lifecycle()
    if place == "compacted while open":
        before.clear()
        before.put(stored.name, LocalStorage(life.folder / "storage").get(stored.name))
        publish(StorageLog(before, life.clock), copy.log_state.epoch, (stored,))
        if is_same:
            copy.run_lifecycle()
            assert [handle.place for handle in copy.files()] == ["uploaded"]
        else:
            with pytest.raises(RootBehind, match="another file with this id"):
                copy.run_lifecycle()
            assert life.found(copy) >= set(range(21, 26))
        copy.abandon()
        return
    copy.abandon()
    for path in (life.root / "uploaded").iterdir():
        path.unlink()
    for path in (life.folder / "copy" / place).glob(f"{stored.file_id}*"):
        shutil.copy(path, life.root / place)
    if not is_same:
        with pytest.raises(RootBehind, match="another file with this id"):
            life.open()
        assert life.begin_anew().entries == 15
    life.publish_all()
    assert life.found() == set(range(1, 16)) | (set() if is_same else set(range(21, 26)))


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


@pytest.mark.parametrize("rounds", [(2, 1), (1, 2)], ids=["longer", "shorter"])
def test_the_roots_of_two_merged_histories_keep_their_entries(life: Life, rounds: tuple[int, int]) -> None:
    sites = Sites(life, "file")
    found = {"b": sites.write("b", rounds[1], 500), "a": sites.write("a", rounds[0], 100)}
    sites.merge("b", "a", "keeping times")
    longer, shorter = ("a", "b") if rounds == (2, 1) else ("b", "a")
    roots = {"a": life.root, "b": life.folder / "root.b"}
    assert life.reopened(roots[longer], storage_backend=sites.storage("a")) == found[longer]
    with pytest.raises(StorageBehind):
        life.open(roots[shorter], storage_backend=sites.storage("a"))
    config = IndexConfig(root=roots[shorter], slots=7, items=1000, background=False, query_threads=2)
    assert begin_anew(config, clock=life.clock, storage=sites.storage("a")).sent
    with life.open(roots[shorter], storage_backend=sites.storage("a")) as index:
        life.ingest(index, 1, upload=True)
        assert life.found(index) > found["a"] | found["b"]


def test_two_running_clones_of_a_machine_publish_one_history(life: Life, monkeypatch: pytest.MonkeyPatch) -> None:
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
    assert life.found(clone) >= set(range(101, 106))
    life.ingest(first, 5, upload=True)
    first.close()
    clone.abandon()
    (life.folder / "root").rename(life.folder / "first")
    (life.folder / "clone").rename(life.root)
    with pytest.raises(RootBehind):
        life.open()
    life.begin_anew()
    life.publish_all()
    assert life.found() == {*range(1, 16), *range(101, 111)}
