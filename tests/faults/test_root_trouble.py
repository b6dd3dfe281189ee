"""A root becomes unwritable or disappears under a running writer: errors are typed, answers are complete."""

from __future__ import annotations

import errno
import os
import shutil

import pytest

from tests.support.disk_faults import FaultDisk
from tiered_index import IndexReader
from tiered_index.errors import LockHeld, NotAnIndex, StorageMisconfigured, StorageUnavailable, TieredIndexError
from tiered_index.storage.disk import Disk


class Trouble:
    """One way in which a root fails; `disk` is the writer's disk. Calls that need the root raise `error`."""

    error: type[TieredIndexError] = StorageUnavailable
    says = ""

    def __init__(self, mounts):
        self.mounts = mounts
        self.disk = Disk()

    def begin(self, root):
        raise NotImplementedError

    def end(self, root):
        self.mounts.lift()


class ReadOnly(Trouble):
    error = StorageMisconfigured
    says = "[Rr]ead-only"

    def __init__(self, mounts):
        super().__init__(mounts)
        self.disk = FaultDisk()

    def begin(self, root):
        if not self.mounts.read_only(root):
            self.disk.fail(times=None, error=errno.EROFS)

    def end(self, root):
        super().end(root)
        self.disk.clear()


class Moved(Trouble):
    says = "No such file|is not the folder"

    def begin(self, root):
        root.rename(root.with_name("elsewhere"))

    def end(self, root):
        shutil.rmtree(root, ignore_errors=True)  # files that a writer started meanwhile made there
        root.with_name("elsewhere").rename(root)


class Replaced(Moved):
    """Another file system object has the root's name."""

    says = "Not a directory|is not the folder"

    def begin(self, root):
        super().begin(root)
        root.write_text("a file")

    def end(self, root):
        root.unlink()
        super().end(root)


class Covered(Moved):
    """An empty file system covers it, as if a disk was not mounted."""

    def begin(self, root):
        if not self.mounts.empty_over(root):
            super().begin(root)
            root.mkdir()

    def end(self, root):
        self.mounts.lift()
        if root.with_name("elsewhere").exists():
            super().end(root)


@pytest.fixture(params=[ReadOnly, Moved, Replaced, Covered], ids=lambda kind: kind.__name__.lower())
def trouble(request, mounts):
    return request.param(mounts)


@pytest.fixture
def world(make_world, trouble):
    """An index with a file in each state, and some entries in the buffer."""
    world = make_world()
    world.settings |= {"local_keep_s": 86400, "buffer_max_entries": 60}
    world.open(trouble.disk)
    world.do("9 publish 15 flush 4")
    return world


def test_the_writer_reports_it_and_continues_once_the_root_is_back(world, trouble):
    before = len(world.service.log_state.objects)
    trouble.begin(world.root)
    for _ in range(2):
        with pytest.raises(trouble.error, match=trouble.says):
            world.service.run_lifecycle()
        problems = world.service.health()["problems"]
        assert problems
        assert isinstance(trouble, ReadOnly) or any(problem.startswith("root: ") for problem in problems)
        world.check()  # mapped and buffered entries are still found
    assert len(world.service.log_state.objects) == before
    with pytest.raises(trouble.error, match=trouble.says):
        while True:  # an open file accepts more entries; the next file can't be begun
            world.do("3 flush")
    assert any(problem.startswith("flush: ") for problem in world.service.health()["problems"])
    world.do("2 check")
    trouble.end(world.root)
    world.heal()
    assert set(world.service.health()["files"]) == {"uploaded"}
    world.service.close()
    world.do("tidy open check")


def test_a_reader_of_the_root_gets_an_error_and_never_a_short_answer(world, trouble):
    world.flush()
    with IndexReader.open(root=world.root, storage_backend=world.storage, clock=world.clock) as reader:
        world.check(reader.query)
        trouble.begin(world.root)
        if isinstance(trouble, ReadOnly):
            world.check(reader.query)  # it only reads
        else:
            for _ in range(2):
                with pytest.raises(StorageUnavailable):
                    reader.query("orders", "a")
                with pytest.raises(StorageUnavailable):
                    reader.query("orders", "a", allow_partial=True)
        trouble.end(world.root)
        world.check(reader.query)


def files_of(world):
    return sorted(path for path in world.root.rglob("*") if path.suffix in (".index", ".journal"))


def test_a_writer_that_starts_then_is_refused_and_harms_nothing(world, trouble):
    world.do("flush abandon")
    before = files_of(world)
    trouble.begin(world.root)
    # for the lease, a root that looks new is another root
    with pytest.raises((trouble.error, LockHeld, NotAnIndex)) as refused:
        world.open(trouble.disk)
    assert len(list(world.storage.list("epoch/"))) == 1
    if isinstance(refused.value, LockHeld):
        assert refused.value.pid == os.getpid()
    trouble.end(world.root)
    assert files_of(world) == before
    world.open(trouble.disk)
    world.do("check 3 heal")


@pytest.mark.parametrize("error", [errno.EROFS, errno.EIO])
def test_objects_that_could_not_be_deleted_are_deleted_later(make_world, error):
    world, disk = make_world(), FaultDisk()
    world.open(disk)
    world.do("9 seal")
    (sealed, *_) = [file for file in world.service.files() if file.lane == "main"]
    disk.fail("unlink", times=None, error=error)
    for _ in range(3):
        with pytest.raises((StorageMisconfigured, StorageUnavailable), match="deleting"):
            world.service.run_lifecycle()
        assert any("deleting" in problem for problem in world.service.health()["problems"])
        world.check()
    assert sealed.path.exists()
    disk.clear()
    world.service.run_lifecycle()
    assert world.service.health()["problems"] == []
    assert not sealed.path.exists()
    assert not sealed.journal_path.exists()
    world.check()
    world.service.close()
    world.tidy()


@pytest.mark.parametrize("act", ["flush", "run_lifecycle"])
def test_nothing_is_written_into_another_index_in_its_place(make_world, act):
    world, other = make_world(), make_world()
    world.do("open 5 seal")
    world.root.rename(world.root.with_name("elsewhere"))
    other.root = world.root
    other.do("open 3 flush")
    files = sorted(other.root.rglob("*"))
    world.put(15)
    with pytest.raises(StorageUnavailable, match="opened"):
        getattr(world.service, act)()
    assert sorted(other.root.rglob("*")) == files
    other.check()
    other.service.close()
    shutil.rmtree(other.root)
    world.root.with_name("elsewhere").rename(world.root)
    world.heal()
