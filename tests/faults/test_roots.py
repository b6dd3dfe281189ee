"""Roots that can't be written, disappear, are replaced, or were never roots: errors are typed, answers are complete.

Nothing is confirmed that is not durable, and no other folder changes.
"""

import errno
import os
import shutil
from dataclasses import dataclass

import pytest

from tests.faults.conftest import ASK
from tests.integration.cli.command_lines import run_here
from tests.support.disk_faults import FaultDisk
from tests.support.restores import Life
from tiered_index import IndexReader, KeyedIndexItem, column
from tiered_index.errors import (
    LockHeld,
    NotAnIndex,
    SchemaMismatch,
    StorageMisconfigured,
    StorageUnavailable,
    TieredIndexError,
    UnsupportedVersion,
)
from tiered_index.storage.disk import Disk
from tiered_index.storage.memory import MemoryStorage

NOW_MS = 1_700_000_000_000


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


@pytest.fixture(params=[ReadOnly, Moved, Covered], ids=lambda kind: kind.__name__.lower())
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


def test_writer_and_reader_report_it_and_continue_once_the_root_is_back(world, trouble):
    world.flush()
    before = len(world.service.log_state.objects)
    with IndexReader.open(root=world.root, storage_backend=world.storage, clock=world.clock) as reader:
        world.check(reader.query)
        trouble.begin(world.root)
        for _ in range(2):
            with pytest.raises(trouble.error, match=trouble.says):
                world.service.run_lifecycle()
            problems = world.service.health()["problems"]
            assert problems
            assert isinstance(trouble, ReadOnly) or any(problem.startswith("root: ") for problem in problems)
            world.check()  # mapped and buffered entries are still found
            if isinstance(trouble, ReadOnly):
                world.check(reader.query)  # it only reads
                continue
            for allowed in (False, True):
                with pytest.raises(StorageUnavailable):
                    reader.query("orders", "a", allow_partial=allowed)
        assert len(world.service.log_state.objects) == before
        with pytest.raises(trouble.error, match=trouble.says):
            while True:  # an open file accepts more entries; the next file can't be begun
                world.do("3 flush")
        assert any(problem.startswith("flush: ") for problem in world.service.health()["problems"])
        world.do("2 check")
        trouble.end(world.root)
        world.flush()
        world.check(reader.query)
    world.heal()
    assert set(world.service.health()["files"]) == {"uploaded"}
    world.service.close()
    world.do("tidy open check")


def test_a_writer_that_starts_then_is_refused_and_harms_nothing(world, trouble):
    def files():
        return sorted(path for path in world.root.rglob("*") if path.suffix in (".index", ".journal"))

    world.do("flush abandon")
    before = files()
    trouble.begin(world.root)
    # for the lease, a root that looks new is another root
    with pytest.raises((trouble.error, LockHeld, NotAnIndex)) as refused:
        world.open(trouble.disk)
    assert len(list(world.storage.list("epoch/"))) == 1
    if isinstance(refused.value, LockHeld):
        assert refused.value.pid == os.getpid()
    trouble.end(world.root)
    assert files() == before
    world.open(trouble.disk)
    world.do("check 3 heal")


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


def test_a_flush_into_a_folder_that_was_replaced_or_deleted_confirms_nothing_there(tmp_path):
    life = Life(tmp_path)
    index = life.open()
    life.ingest(index, 15, upload=False)
    shutil.move(life.root / "unsealed", life.folder / "moved")
    shutil.copytree(life.folder / "moved", life.root / "unsealed")
    with pytest.raises(StorageUnavailable, match="another file replaced it"):
        life.ingest(index, 5, upload=False)
    index.flush()  # into a file of the folder that is there now
    with IndexReader.open(root=life.root) as reader:
        assert len(life.offsets_found(reader)) == 20
    for gone in (life.root / "unsealed", life.root):
        shutil.rmtree(gone)
        with pytest.raises(StorageUnavailable):
            life.ingest(index, 3, upload=False)
    index.abandon()


@pytest.mark.parametrize("name", ["unsealed", "compacted", "uploaded", "*.journal"])
def test_a_link_in_the_place_of_a_folder_or_a_file_is_refused_by_readers_too(tmp_path, name):
    life = Life(tmp_path)
    life.write(3, upload=False)
    (path,) = life.root.rglob(name)
    path.rename(life.folder / "elsewhere")
    path.symlink_to(life.folder / "elsewhere")
    with pytest.raises(StorageMisconfigured, match="symbolic link"), IndexReader.open(root=life.root) as reader:
        life.offsets_found(reader)
    with pytest.raises(StorageMisconfigured, match="symbolic link"):
        life.open()


@pytest.mark.parametrize("known", ["by an option", "by the environment"])
def test_jobs_refuse_a_storage_and_a_root_of_two_indexes(tmp_path, known):
    """Otherwise they would change an index that the operator does not mean, and leave the root's index unchanged."""
    life, other = Life(tmp_path), Life(tmp_path / "other")
    life.write(10, upload=True)
    with life.open() as index:
        life.ingest(index, 5, upload=False)
    (file,) = (life.root / "unsealed").glob("*.journal")
    shutil.rmtree(life.root / "unsealed")
    (life.root / "unsealed").mkdir()
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


# Folders that are no roots, or have files of other roots


MARKERS = (b"", b"{}", b"[1]", b'{"tiered_index": 1}', b"\xff\xfe", b"{" * 100_000)
PLACES = [("tiered_index.json", marker) for marker in MARKERS]
PLACES += [(name, b"mine") for name in ("notes.txt", "unsealed/notes.txt", ".hidden", "store/a", "")]


@pytest.mark.parametrize(("name", "content"), PLACES, ids=range(len(PLACES)))
def test_somebody_elses_folder_or_file_is_refused_and_nothing_is_touched(make_world, name, content):
    """Also a root whose marker is invalid or of another version."""
    world = make_world()
    path = world.root / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content)
    before = sorted(world.root.rglob("*"))
    told = "version 1" if content == MARKERS[3] else "nothing was changed" if content == b"mine" and name else "root"
    error = UnsupportedVersion if content == MARKERS[3] else NotAnIndex
    with pytest.raises(error, match=told):
        world.open()
    with pytest.raises(error):
        IndexReader.open(root=world.root, storage_backend=world.storage)
    assert sorted(world.root.rglob("*")) == before and path.read_bytes() == content
    assert not list(world.storage.list())


@dataclass(frozen=True, kw_only=True)
class Wider(KeyedIndexItem):
    number: int = column(">u4")


OTHERS = {"rocketmq": {"preset": "rocketmq"}, "wider": {"item_type": Wider, "more": {"number": 5}}}


@pytest.mark.parametrize(("other", "state"), [("rocketmq", "unsealed"), ("wider", "unsealed"), ("wider", "compacted")])
def test_a_file_of_another_schema_is_named_kept_and_never_published(
    open_index, open_reader, leave_compacted, offsets, tmp_path, other, state
):
    with open_index() as service:
        service.put("t", 0, "k", 1, 1, NOW_MS)
    if state == "compacted":
        leave_compacted("other", storage_backend=MemoryStorage(), **OTHERS[other]).close()
    else:
        settings = {name: value for name, value in OTHERS[other].items() if name != "more"}
        stranger = open_index("other", storage_backend=MemoryStorage(), **settings)
        stranger.put("t", 0, "k", 1, 1, NOW_MS, **OTHERS[other].get("more", {}))
        stranger.close()
    copied = {}
    for path in (tmp_path / "other" / state).iterdir():
        shutil.copy(path, tmp_path / "root" / state)
        copied[tmp_path / "root" / state / path.name] = path.read_bytes()
    file_id = next(iter(copied)).stem
    for first in (2, 3):
        service, wanted = open_index(), list(reversed(range(1, first)))
        for either in (service, open_reader("root")):
            for ask in ASK.values():
                with pytest.raises(SchemaMismatch, match=file_id):
                    ask(either)
                result = ask(either, allow_partial=True)
                assert (result.status, [item.offset for item in result]) == ("partial", wanted)
                assert [report.file for report in result.failed] == [file_id]
        service.put("t", 0, "k", first, 1, NOW_MS + 1000 * first)
        service.seal()
        service.run_lifecycle()
        assert {path: path.read_bytes() for path in copied if path.exists()} == copied
        assert file_id not in {o.file_id for o in service.log_state.objects.values()}
        service.close()
        assert offsets(open_reader()) == list(range(1, first + 1))
