"""A kill or a power cut at any file system call, and a file system that fails at any: old or new, never half."""

import contextlib
import errno
import random
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.support.disk_faults import FaultDisk, SimulatedCrash
from tiered_index.errors import DiskFull, ObjectExists, ObjectNotFound, StorageMisconfigured, StorageUnavailable
from tiered_index.storage import base
from tiered_index.storage.base import Storage
from tiered_index.storage.local import LocalStorage

OLD, NEW = b"old" * 1000, b"new version" * 3000
FAR_FUTURE_MS = 1 << 60


@pytest.fixture(autouse=True)
def small_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(base, "PART_BYTES", 15_000)


def put(storage: Storage) -> None:
    storage.put("data/object", NEW)


def put_if_absent(storage: Storage) -> None:
    storage.put_if_absent("fresh/object", NEW)


def delete(storage: Storage) -> None:
    storage.delete_many(["data/object"])


def stream(storage: Storage) -> None:
    with storage.open_writer("data/object") as writer:
        for start in range(0, len(NEW), 20_000):
            writer.write(NEW[start : start + 20_000])


def abort(storage: Storage) -> None:
    writer = storage.open_writer("data/object")
    writer.write(NEW)
    writer.abort()


OPERATIONS: dict[str, tuple[Callable[[Storage], None], str, bytes | None, bytes | None]] = {
    "put": (put, "data/object", OLD, NEW),
    "put_if_absent": (put_if_absent, "fresh/object", None, NEW),
    "delete": (delete, "data/object", OLD, None),
    "stream": (stream, "data/object", OLD, NEW),
    "abort": (abort, "data/object", OLD, OLD),
}


def value(storage: Storage, name: str) -> bytes | None:
    try:
        return storage.get(name)
    except ObjectNotFound:
        return None


@pytest.mark.parametrize("acts", [False, True], ids=["before", "after"])
@pytest.mark.parametrize(("operation", "name", "old", "new"), OPERATIONS.values(), ids=OPERATIONS.keys())
def test_a_crash_or_a_power_cut_at_any_call_leaves_old_or_new(tmp_path, operation, name, old, new, acts):
    seen: set[bytes | None] = set()
    for nth in range(1, 200):
        folder = tmp_path / str(nth)
        LocalStorage(folder).put("data/object", OLD)
        LocalStorage(folder).put("data/other", b"kept")
        disk = FaultDisk()
        disk.crash(nth=nth, after=acts, torn=not acts)
        with contextlib.suppress(SimulatedCrash):
            operation(LocalStorage(folder, disk=disk))
        cut = tmp_path / f"{nth} cut"
        # what has returned is durable whatever a power cut leaves
        disk.copy(folder, cut).lose_unsynced(random.Random(nth) if disk.crashed else None)
        after = LocalStorage(folder)
        for left in (after, LocalStorage(cut)):
            stored = value(left, name)
            seen.add(stored)
            assert seen <= {old, new}
            expected = {"data/object": len(OLD), "data/other": 4, name: len(stored or b"")}
            if stored is None:
                del expected[name]
            assert {info.name: info.size_bytes for info in left.list()} == expected
        again = LocalStorage(shutil.copytree(folder, tmp_path / f"{nth} again"))
        with contextlib.suppress(ObjectExists):
            operation(again)  # whatever the crash left, the next process succeeds
        assert value(again, name) == new
        if not disk.crashed:
            # the power cut after the call
            assert stored == value(after, name) == new
            assert nth > 2, "the faults never struck"
            break
        # Everything that a crash leaves is found by age, and its removal harms nothing.
        stored = value(after, name)
        after.purge(FAR_FUTURE_MS)
        assert value(after, name) == stored
        hidden = [path for path in folder.rglob("*") if path.is_file() and any(".%" in part for part in path.parts)]
        assert hidden == []
    else:
        pytest.fail("the operation makes more calls than were tried")
    assert seen == {old, new} or (acts and seen == {new})  # a delete acts with its very first call


@pytest.mark.parametrize(
    ("number", "kind"),
    [
        (errno.ENOSPC, DiskFull),
        (errno.EDQUOT, DiskFull),
        (errno.EACCES, StorageMisconfigured),
        (errno.EROFS, StorageMisconfigured),
        (errno.EIO, StorageUnavailable),
    ],
    ids=lambda value: errno.errorcode.get(value, "") if isinstance(value, int) else value.__name__,
)
@pytest.mark.parametrize("operation", [put, put_if_absent, stream], ids=lambda operation: operation.__name__)
def test_a_failing_call_is_a_typed_error_and_leaves_no_rubbish(tmp_path, operation, number, kind):
    failures = 0
    for only in ("create", "pwrite", "sync", "sync_folder", "rename", "link"):
        for nth in range(1, 30):
            folder = tmp_path / f"{only}-{nth}"
            LocalStorage(folder).put("data/object", OLD)
            disk = FaultDisk()
            disk.fail(only, nth=nth, error=number)
            storage = LocalStorage(folder, disk=disk)
            try:
                operation(storage)
            except kind as error:
                failures += 1
                assert not isinstance(error, OSError)
            else:
                if disk.struck:
                    continue  # the sync of the root's parent, which may fail
                break
            assert list((folder / ".%work").iterdir()) == []
            assert value(LocalStorage(folder), "data/object") in {OLD, NEW}
            with contextlib.suppress(ObjectExists):
                operation(storage)
        else:
            pytest.fail("the operation makes more calls than were tried")
    assert failures >= 4


class Recorded(FaultDisk):
    """Notes the folders that are made and synced."""

    def __init__(self) -> None:
        super().__init__()
        self.unsynced: set[Path] = set()
        self.synced: list[Path] = []

    def make_folder(self, folder: Path) -> None:
        self.unsynced.add(folder)
        super().make_folder(folder)

    def sync_folder(self, folder: Path) -> None:
        self.unsynced = {path for path in self.unsynced if path.parent != folder}
        self.synced.append(folder)
        super().sync_folder(folder)


@pytest.mark.parametrize("exists", [False, True])
def test_the_name_of_every_folder_is_synced_also_if_another_process_made_it(tmp_path, exists):
    root, disk = tmp_path / "new" / "root", Recorded()
    if exists:
        (root / "data%").mkdir(parents=True)
    put(LocalStorage(root, disk=disk))
    assert disk.unsynced == set()
    assert {root.parent, root, root / "data%"} <= {*disk.synced}


@pytest.mark.parametrize("number", [errno.EACCES, errno.EINVAL, errno.EROFS])
def test_a_root_whose_parent_cannot_be_synced_is_used(tmp_path, number):
    (tmp_path / "root").mkdir()
    disk = FaultDisk()
    disk.fail("sync_folder", error=number)
    storage = LocalStorage(tmp_path / "root", disk=disk)
    put(storage)
    assert storage.get("data/object") == NEW
    assert disk.struck == 1


def test_a_losing_put_if_absent_writes_nothing(tmp_path):
    LocalStorage(tmp_path).put("a", b"x")
    disk = FaultDisk()
    with pytest.raises(ObjectExists):
        LocalStorage(tmp_path, disk=disk).put_if_absent("a", b"y")
    assert disk.calls() == 0


def test_an_object_that_appears_during_a_put_if_absent_is_kept(tmp_path):
    """The first check finds nothing. The step that gives the name decides."""
    disk = FaultDisk(watch=lambda call: LocalStorage(tmp_path).put("a", b"winner") if call == "sync" else None)
    with pytest.raises(ObjectExists):
        LocalStorage(tmp_path, disk=disk).put_if_absent("a", b"loser")
    assert LocalStorage(tmp_path).get("a") == b"winner"


def test_a_published_file_is_whole_after_a_power_cut(tmp_path):
    """A file of a root, such as a compacted one."""
    disk = FaultDisk()
    disk.write_file(tmp_path / "temporary", [OLD, NEW])
    disk.publish(tmp_path / "temporary", tmp_path / "target")
    disk.lose_unsynced()
    assert (tmp_path / "target").read_bytes() == OLD + NEW
