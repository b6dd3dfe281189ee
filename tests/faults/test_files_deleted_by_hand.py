"""If a user deletes a file from a root before its upload, lookups, `verify` and `recover` report it."""

from pathlib import Path
from typing import Any

import pytest

from tests.integration.cli.command_lines import run_here as run
from tests.support.disk_faults import FaultDisk
from tests.support.filled import merge_all
from tests.support.storage_faults import FaultStorage
from tiered_index import IndexReader, IndexService
from tiered_index.base.clock import ManualClock
from tiered_index.errors import CorruptFile, StorageUnavailable, TieredIndexError
from tiered_index.service.life import lifecycle
from tiered_index.service.root import Root
from tiered_index.service.root.files import LIST, FileList, ListedFile
from tiered_index.storage.disk import Disk
from tiered_index.storage.local import LocalStorage

NOW_MS = 1_700_000_000_000
HOUR_MS = 3_600_000


class Life:
    """A root with three files of ten entries, an hour each. The storage has none of them."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.root, self.clock = folder, folder / "root", ManualClock(NOW_MS)
        self.storage = FaultStorage(LocalStorage(folder / "storage"))
        self.place = ("--root", self.root, "--storage", f"file://{folder}/storage")
        with self.open() as index:
            self.index_id = index.index_id

    def open(self, **settings: Any) -> IndexService:
        chosen = {"slots": 7, "items": 1000, "background": False, "query_threads": 2, "clock": self.clock, **settings}
        return IndexService.open(root=self.root, storage_backend=self.storage, **chosen)

    def reader(self) -> IndexReader:
        return IndexReader.open(root=self.root, storage=f"file://{self.folder}/storage")

    def put(self, index: IndexService, hour: int) -> None:
        for number in range(10):
            index.put("t", 0, "k", hour * 10 + number, 1, NOW_MS + hour * HOUR_MS + number * 1000)
        index.flush()

    def fill(self, kind: str) -> list[str]:
        """Return the ids of the files, oldest first."""
        if kind == "compacted":
            self.storage.fail("put", times=None, name_prefix="data/")
        with self.open() as index:
            for hour in range(3):
                self.put(index, hour)
                if hour < 2:
                    index.seal()
                if kind == "compacted" and hour == 1:
                    with pytest.raises(StorageUnavailable):
                        index.run_lifecycle()
        self.storage.clear()
        return sorted(path.stem for state in ("unsealed", "compacted") for path in (self.root / state).glob("*.index"))

    def delete(self, file_id: str) -> None:
        for path in self.root.rglob(f"{file_id}*"):
            path.unlink()


@pytest.fixture
def life(tmp_path: Path) -> Life:
    return Life(tmp_path)


@pytest.mark.parametrize(("kind", "which"), [("unsealed", 0), ("unsealed", 2), ("compacted", 0)])
def test_lookups_miss_it_until_it_is_given_up(life: Life, kind: str, which: int) -> None:
    file_id = life.fill(kind)[which]
    with life.reader() as reader:
        assert len(reader.query("t", "k", max_count=100)) == 30
    life.delete(file_id)
    lookup = {"topic": "t", "key": "k", "max_count": 100}
    # the first start rewrites the list
    for _ in range(2):
        with life.open() as index, life.reader() as reader:
            for either in (index, reader):
                with pytest.raises(CorruptFile, match=f"recover --root {life.root} --lost {file_id}"):
                    either.query(**lookup)
                partial = either.query(**lookup, allow_partial=True)
                assert (partial.status, len(partial)) == ("partial", 20)
                assert [report.file for report in partial.failed] == [file_id]
            if which < 2:
                # the time of a sealed file is known
                third = {**lookup, "begin_ms": NOW_MS + 2 * HOUR_MS}
                assert len(index.query(**third)) == len(reader.query(**third)) == 10
            assert any(file_id in problem for problem in index.health()["problems"])
    with life.open() as index:
        life.put(index, 3)
    assert run("recover", *life.place).code == run("verify", *life.place).code + 3 == 4
    done = run("recover", *life.place, "--lost", file_id, "--json")
    (lost,) = done.document["lost"]
    assert (done.code, lost["file"], lost["entries"]) == (0, file_id, 10)
    with life.reader() as reader, life.open() as index:
        for either in (reader, index):
            answer = either.query(**lookup)
            assert (answer.status, len(answer), [loss.file for loss in answer.lost]) == ("complete", 30, [file_id])
        index.seal()
        index.run_lifecycle()
        assert index.health()["problems"] == []
    assert run("verify", *life.place).code == run("recover", *life.place).code == 0


def test_the_journal_of_a_deleted_file_shows_in_a_root_without_the_list_that_it_is_missing(life: Life) -> None:
    file_id = life.fill("unsealed")[0]
    (life.root / LIST).unlink()
    (life.root / "unsealed" / f"{file_id}.index").unlink()
    with life.reader() as reader:
        with pytest.raises(CorruptFile, match=file_id):
            reader.query("t", "k", max_count=100)
        partial = reader.query("t", "k", max_count=100, allow_partial=True)
    assert (partial.status, len(partial), [report.file for report in partial.failed]) == ("partial", 20, [file_id])


def test_a_compacted_file_that_is_deleted_under_its_writer_is_published(life: Life) -> None:
    with life.open() as index:
        life.put(index, 0)
        index.seal()
        life.storage.fail("put", name_prefix="data/")
        with pytest.raises(StorageUnavailable):
            index.run_lifecycle()
        (path,) = (life.root / "compacted").glob("*.index")
        path.unlink()
        life.put(index, 1)
        index.seal()
        for _ in range(2):
            index.run_lifecycle()
        assert len(index.log_state.files) == 2
        assert [file.place for file in index.files()] == ["storage", "uploaded"]
        assert len(index.query("t", "k", max_count=100)) == 20
        assert index.health()["problems"] == []


class RefusingDisk(FaultDisk):
    """The next `refusals` compacted files can't be made."""

    refusals, error = 0, OSError(5, "not yet")

    def create(self, path: Path) -> int:
        if path.parent.name == "compacted" and self.refusals:
            self.refusals -= 1
            raise self.error
        return super().create(path)


def test_a_step_that_fails_unexpectedly_holds_up_no_other_file(life: Life) -> None:
    disk = RefusingDisk()
    disk.error = ZeroDivisionError("division by zero")  # type: ignore[assignment]
    with life.open(disk=disk) as index:
        for hour in range(2):
            life.put(index, hour)
            index.seal()
        first, second = (file.file_id for file in index.files())
        for _ in range(2):
            disk.refusals = 1
            with pytest.raises(TieredIndexError, match=f"{first} failed: ZeroDivisionError: division by zero"):
                index.run_lifecycle()
            assert any(first in problem for problem in index.health()["problems"])
        assert second in index.log_state.files
        index.run_lifecycle()
        assert first in index.log_state.files
        assert index.health()["problems"] == []


@pytest.mark.parametrize("what", ["deleted", "not moved"])
def test_a_merged_file_whose_record_had_no_answer_holds_up_no_other_file(life: Life, what: str) -> None:
    """The writer keeps it for its source position, because an older file is not published yet."""
    disk = RefusingDisk()
    with life.open(disk=disk) as index:
        for hour in range(3):
            index.put("t", 0, "k", hour, 1, NOW_MS + hour * HOUR_MS, source="log", source_position=hour + 1)
            index.seal()
        _, second, _ = (file.file_id for file in index.files())
        disk.refusals = 1  # the first file waits
        life.storage.fail("put_if_absent", name_prefix="log/", when="after")
        with pytest.raises(StorageUnavailable):
            index.run_lifecycle()
        life.clock.advance(10_000)
        assert merge_all(life.storage, life.clock).sources == 1
        if what == "deleted":
            life.delete(second)
        else:
            disk.fail("rename")
        disk.refusals = 1
        with pytest.raises(StorageUnavailable):
            index.run_lifecycle()
        for _ in range(2):
            index.run_lifecycle()
        assert len(index.log_state.files) == 2 and second not in index.log_state.files
        assert index.health()["problems"] == [] and index.log_state.positions == {"log": 3}
        assert len(index.query("t", "k", max_count=100)) == 3


def test_a_list_that_cannot_be_written_says_nothing_wrong(tmp_path: Path) -> None:
    disk = FaultDisk()
    root = Root(tmp_path, disk)
    files = FileList(root)
    first, second = ListedFile("main", 1), ListedFile("main", 2, (3, 4))
    files.note(lambda: {"a": first})
    disk.fail("create", times=None)
    # the file that the list names exists
    files.note(lambda: {"a": first, "b": second})
    assert FileList(root).read() == {"a": first}
    # a file that the writer deletes must not be reported as missing, not even after a power cut
    files.note(lambda: {"b": second})
    assert not files.path.exists() and FileList(root).read() == {}
    disk.clear()
    disk.lose_unsynced()
    assert FileList(root).read() == {}
    files.note(lambda: {"b": second})
    assert FileList(root).read() == {"b": second}
    files.path.write_bytes(files.path.read_bytes().replace(b"2", b"5"))
    with pytest.raises(CorruptFile):
        FileList(root).read()


def test_a_list_of_two_damaged_copies_makes_lookups_fail_until_it_is_dropped(life: Life) -> None:
    first, *_ = life.fill("unsealed")
    listed = life.root / "files"
    listed.write_bytes(listed.read_bytes().replace(b'"count":10', b'"count":11'))
    life.delete(first)
    for _ in range(2):
        with life.open() as index, life.reader() as reader:
            for either in (index, reader):
                with pytest.raises(CorruptFile, match=f"do without it: `tiered-index recover --root {life.root}`"):
                    either.query("t", "k", max_count=100)
                partial = either.query("t", "k", max_count=100, allow_partial=True)
                assert (partial.status, len(partial)) == ("partial", 20)
                assert [report.file for report in partial.failed] == ["files"]
            # files appear and are deleted: the list stays the same
            index.seal()
            index.run_lifecycle()
            assert any("files" in problem for problem in index.health()["problems"])
    assert run("verify", *life.place).code == 1
    done = run("recover", *life.place, "--json")
    assert (done.code, done.document["status"]) == (0, "recovered")
    assert done.document["notes"][0].startswith(f"{listed} was damaged and is written again: files that were deleted")
    with life.open() as index, life.reader() as reader:
        assert index.query("t", "k").status == reader.query("t", "k").status == "complete"
    assert run("verify", *life.place).code == 0


@pytest.mark.parametrize("copy", [0, 1])
def test_verify_reports_one_damaged_copy_of_the_list_until_a_start_repairs_it(life: Life, copy: int) -> None:
    first, *_ = life.fill("unsealed")
    listed = life.root / "files"
    data = listed.read_bytes()
    for at in range(0, len(data) // 2, 7):
        damaged = bytearray(data)
        damaged[at + copy * len(data) // 2] ^= 1
        listed.write_bytes(damaged)
        assert first in FileList(Root(life.root, Disk())).read()
    outcome = run("verify", *life.place, "--json")
    (finding,) = outcome.document["findings"]
    assert (outcome.code, finding["file"], finding["part"]) == (1, str(listed), "files")
    with life.open():
        pass
    assert run("verify", *life.place).code == 0


def test_a_file_that_is_published_or_put_back_is_not_missed(life: Life) -> None:
    first, *_ = life.fill("unsealed")
    originals = {path: path.read_bytes() for path in life.root.rglob(f"{first}*")}
    life.delete(first)
    with life.open() as index, pytest.raises(CorruptFile):
        index.query("t", "k")
    for path, data in originals.items():
        path.write_bytes(data)
    listed = (life.root / "files").read_bytes()
    with life.open(local_keep_s=0) as index:
        assert len(index.query("t", "k", max_count=100)) == 30
        index.seal()
        index.run_lifecycle()
        life.clock.advance(10)
        index.run_lifecycle()
        assert not list((life.root / "uploaded").iterdir())
    assert FileList(Root(life.root, Disk())).read() == {}
    # as after a crash between the record and the list
    (life.root / "files").write_bytes(listed)
    assert run("verify", *life.place).code == 0
    with life.reader() as reader, life.open() as index:
        assert len(reader.query("t", "k", max_count=100)) == len(index.query("t", "k", max_count=100)) == 30
        assert FileList(Root(life.root, Disk())).read() == {}


def test_a_file_whose_moved_copy_could_not_be_opened_is_not_published_again(
    life: Life, monkeypatch: pytest.MonkeyPatch
) -> None:
    with life.open() as index:
        life.put(index, 0)
        index.seal()
        with monkeypatch.context() as patched:
            opened = lifecycle.open_local

            def fail(path: Path, *more: Any) -> Any:
                if path.parent.name == "uploaded":
                    raise StorageUnavailable("too many open files")
                return opened(path, *more)

            patched.setattr(lifecycle, "open_local", fail)
            with pytest.raises(StorageUnavailable):
                index.run_lifecycle()
        life.clock.advance(10_000)
        assert merge_all(life.storage, life.clock).sources == 1
        index.run_lifecycle()
        assert not index.log_state.files
        assert not list((life.root / "uploaded").iterdir())
        assert len(index.query("t", "k", max_count=100)) == 10


def test_the_rest_of_a_deletion_is_no_file_that_the_root_must_have(tmp_path):
    """A crash left it without its journal, and the next writer ended before it deleted it: readers ignore it."""
    life = Life(tmp_path)
    with life.open(local_keep_s=0) as index:
        life.put(index, 0)
        index.seal()
        (path,) = (life.root / "unsealed").glob("[0-9]*.index")
        entries = path.read_bytes()
        index.run_lifecycle()
    life.clock.advance(48 * 3600)
    assert merge_all(life.storage, life.clock).sources == 1
    path.write_bytes(entries)
    life.storage.fail("*", times=None)
    life.open().abandon()
    life.storage.clear()
    assert path.exists() and FileList(Root(life.root, Disk())).read() == {}
    with life.reader() as reader:
        assert len(reader.query("t", "k")) == 10


@pytest.mark.parametrize("place", ["unsealed", "compacted"])
def test_a_damaged_file_is_listed_again_after_the_list_is_lost(tmp_path, place):
    """Someone deletes it later, and its entries would be missing without a word."""
    life = Life(tmp_path)
    with life.open() as index:
        life.put(index, 0)
        if place == "compacted":
            index.seal()
            life.storage.fail("put", name_prefix="data/", times=None)
            with pytest.raises(StorageUnavailable):
                index.run_lifecycle()
        index.abandon()
    (path,) = (life.root / place).glob("[0-9]*.index")
    path.write_bytes(path.read_bytes()[:100])
    (life.root / "files").unlink()
    life.open().abandon()
    for name in (life.root / place).iterdir():
        name.unlink()
    with life.reader() as reader, pytest.raises(CorruptFile, match="lists this file"):
        reader.query("t", "k")
