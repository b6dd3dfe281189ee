"""A process that dies at any single file system call, and a file system that fails at any: old or new, never half."""

import contextlib
import errno
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tiered_index.errors import DiskFull, ObjectExists, ObjectNotFound, StorageMisconfigured, StorageUnavailable
from tiered_index.storage import base
from tiered_index.storage.base import Storage
from tiered_index.storage.disk import Disk
from tiered_index.storage.local.storage import LocalStorage

OLD, NEW = b"old" * 1000, b"new version" * 3000
PRIMITIVES = ("create", "pwrite", "sync", "sync_folder", "rename", "link", "unlink", "make_folder", "remove_folder")
FAR_FUTURE_MS = 1 << 60


class Crash(BaseException):
    """The process is gone. Nothing runs after it, not even a clean-up."""


class FaultyDisk(Disk):
    """Counts calls and strikes the nth: once with `error`, or by a crash, after which every call fails.

    `acts` lets the call act first, and `torn` writes half of a write.
    """

    def __init__(self, nth: int, *, acts: bool = False, error: int | None = None, only: str = "") -> None:
        self.calls: list[tuple[str, Any]] = []
        self._nth, self._acts, self._error, self._only = nth, acts, error, only
        self._count = 0
        self._dead = False

    def strike(self) -> None:
        if self._error is not None:
            raise OSError(self._error, os.strerror(self._error))
        self._dead = True
        raise Crash

    def around(self, name: str, act: Callable[..., Any], *arguments: Any) -> Any:
        if self._dead:
            raise Crash
        self.calls.append((name, arguments))
        if not self._only or self._only == name:
            self._count += 1
            if self._count == self._nth:
                if self._acts:
                    act(*arguments)
                elif name == "pwrite":
                    act(arguments[0], arguments[1][: len(arguments[1]) // 2], arguments[2])
                self.strike()
        return act(*arguments)


def _routed(name: str) -> Callable[..., Any]:
    plain = getattr(Disk, name)
    return lambda self, *arguments: self.around(name, lambda *given: plain(self, *given), *arguments)


for _name in PRIMITIVES:
    setattr(FaultyDisk, _name, _routed(_name))


def put(storage: Storage) -> None:
    storage.put("data/object", NEW)


def put_if_absent(storage: Storage) -> None:
    storage.put_if_absent("fresh/object", NEW)


def delete(storage: Storage) -> None:
    storage.delete("data/object")


def stream(storage: Storage) -> None:
    with storage.open_writer("data/object") as writer:
        for start in range(0, len(NEW), 20_000):
            writer.write(NEW[start : start + 20_000])


def abort(storage: Storage) -> None:
    writer = storage.open_writer("data/object")
    writer.write(NEW)
    writer.abort()


@pytest.fixture(autouse=True)
def small_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(base, "PART_BYTES", 15_000)


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
def test_a_crash_at_any_call_leaves_old_or_new(tmp_path, operation, name, old, new, acts):
    seen: set[bytes | None] = set()
    for nth in range(1, 200):
        folder = tmp_path / str(nth)
        LocalStorage(folder).put("data/object", OLD)
        LocalStorage(folder).put("data/other", b"kept")
        disk = FaultyDisk(nth, acts=acts)
        crashed = False
        try:
            operation(LocalStorage(folder, disk=disk))
        except Crash:
            crashed = True
        after = LocalStorage(folder)
        seen.add(value(after, name))
        assert seen <= {old, new}
        survivors = {"data/object": OLD, "data/other": b"kept"}
        survivors.pop(name, None)
        found = value(after, name)
        listed = {info.name: info.size_bytes for info in after.list()}
        expected = {n: len(data) for n, data in survivors.items()} | ({name: len(found)} if found is not None else {})
        assert listed == expected
        again = LocalStorage(shutil.copytree(folder, tmp_path / f"{nth} again"))
        with contextlib.suppress(ObjectExists):
            operation(again)  # whatever the crash left, the next process succeeds
        assert value(again, name) == new
        if not crashed:
            assert found == new
            assert nth > 2, "the faults never struck"
            break
        # Everything that a crash leaves is found by age, and its removal harms nothing.
        after.purge(FAR_FUTURE_MS)
        assert value(after, name) == found
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
            disk = FaultyDisk(nth, error=number, only=only)
            try:
                operation(LocalStorage(folder, disk=disk))
            except kind as error:
                failures += 1
                assert not isinstance(error, OSError)
            else:
                if disk._count >= nth:
                    continue  # the sync of the root's parent, which may fail
                break
            assert list((folder / ".%work").iterdir()) == []
            assert value(LocalStorage(folder), "data/object") in {OLD, NEW}
        else:
            pytest.fail("the operation makes more calls than were tried")
    assert failures >= 4


def test_a_file_system_without_hard_links_is_refused(tmp_path, monkeypatch):
    def fail(source, target):
        raise OSError(errno.EOPNOTSUPP, "Operation not supported")

    monkeypatch.setattr(os, "link", fail)
    with pytest.raises(StorageMisconfigured, match="hard links"):
        LocalStorage(tmp_path).put_if_absent("a", b"x")
    assert list(LocalStorage(tmp_path).list()) == []


@pytest.mark.parametrize("operation", [put, put_if_absent, stream], ids=lambda operation: operation.__name__)
def test_data_is_synced_before_it_is_named_and_every_new_name_after(tmp_path, operation):
    disk = FaultyDisk(0)
    root = tmp_path / "new" / "root"
    operation(LocalStorage(root, disk=disk))
    synced_files: set[Path] = set()
    unsynced_names: set[Path] = set()
    open_file: Path | None = None
    named = 0
    for name, arguments in disk.calls:
        if name == "create":
            open_file = arguments[0]
        elif name == "sync":
            assert open_file is not None
            synced_files.add(open_file)
        elif name in {"rename", "link"}:
            source, target = arguments
            named += 1
            assert source in synced_files or source.is_dir() or source.parent.name == ".%uploads"
            unsynced_names.add(target)
        elif name == "make_folder":
            unsynced_names.add(arguments[0])
        elif name == "sync_folder":
            unsynced_names = {path for path in unsynced_names if path.parent != arguments[0]}
    assert named
    assert unsynced_names == set()


def test_a_full_disk_refuses_whole_and_the_next_put_works(tmp_path):
    storage = LocalStorage(tmp_path, disk=FaultyDisk(1, error=errno.ENOSPC, only="pwrite"))
    with pytest.raises(DiskFull):
        storage.put("a", b"x" * 100)
    assert list(storage.list()) == []
    storage.put("a", b"y")
    assert storage.get("a") == b"y"


def test_a_losing_put_if_absent_writes_nothing(tmp_path):
    LocalStorage(tmp_path).put("a", b"x")
    disk = FaultyDisk(0)
    with pytest.raises(ObjectExists):
        LocalStorage(tmp_path, disk=disk).put_if_absent("a", b"y")
    assert disk.calls == []


def test_a_delete_is_durable_when_it_returns(tmp_path):
    for name in ("a/1", "a/2", "b/1"):
        LocalStorage(tmp_path).put(name, b"x")
    disk = FaultyDisk(0)
    LocalStorage(tmp_path, disk=disk).delete_many(["a/1", "a/2", "b/1"])
    names = [name for name, _ in disk.calls]
    assert names == ["unlink"] * 3 + ["sync_folder"] * 2
    removed_from = {arguments[0].parent for name, arguments in disk.calls if name == "unlink"}
    assert {arguments[0] for name, arguments in disk.calls if name == "sync_folder"} == removed_from


def test_an_object_that_appears_during_a_put_if_absent_is_kept(tmp_path):
    """The first check finds nothing. The step that gives the name decides."""

    class Meanwhile(Disk):
        def sync(self, descriptor: int) -> None:
            super().sync(descriptor)
            LocalStorage(tmp_path).put("a", b"winner")

    with pytest.raises(ObjectExists):
        LocalStorage(tmp_path, disk=Meanwhile()).put_if_absent("a", b"loser")
    assert LocalStorage(tmp_path).get("a") == b"winner"


def test_the_name_of_a_root_that_another_process_made_is_synced(tmp_path):
    (tmp_path / "root").mkdir()
    disk = FaultyDisk(0)
    put(LocalStorage(tmp_path / "root", disk=disk))
    assert ("sync_folder", (tmp_path,)) in disk.calls


@pytest.mark.parametrize("number", [errno.EACCES, errno.EINVAL, errno.EROFS])
def test_a_root_whose_parent_cannot_be_synced_is_used(tmp_path, number):
    (tmp_path / "root").mkdir()
    storage = LocalStorage(tmp_path / "root", disk=FaultyDisk(1, error=number, only="sync_folder"))
    put(storage)
    assert storage.get("data/object") == NEW


def test_one_sync_of_the_root_is_enough_for_all_folders_that_are_there(tmp_path):
    with LocalStorage(tmp_path / "s") as first:
        for name in ("a/1", "b/1", "c/1"):
            first.put(name, b"")
    disk = FaultyDisk(0)
    with LocalStorage(tmp_path / "s", disk=disk) as storage:
        for name in ("a/2", "b/2", "c/2"):
            storage.put(name, b"")
        assert disk.calls.count(("sync_folder", (tmp_path / "s",))) == 1
        # a folder that was not there is not durable by that sync
        storage.put("d/1", b"")
        assert disk.calls.count(("sync_folder", (tmp_path / "s",))) == 2
