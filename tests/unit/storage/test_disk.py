"""Each method of the real disk makes the system calls that it promises. Every other test uses a fake disk."""

import errno
import fcntl
import mmap
import os
import pickle
from pathlib import Path

import pytest

from tiered_index import IndexService
from tiered_index.cli.main import run
from tiered_index.errors import StorageMisconfigured, StorageUnavailable
from tiered_index.storage.disk import Disk
from tiered_index.storage.opening import open_storage


def test_syncs_reach_the_system(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    synced: list[tuple[str, Path]] = []

    def watched(name: str, descriptor: int) -> None:
        synced.append((name, Path(f"/proc/self/fd/{descriptor}").readlink()))

    for name in ("fsync", "fdatasync"):
        monkeypatch.setattr(os, name, lambda descriptor, name=name: watched(name, descriptor))
    disk = Disk()
    descriptor = disk.create(tmp_path / "file")
    disk.sync(descriptor)
    disk.close(descriptor)
    disk.sync_folder(tmp_path)
    assert synced == [("fdatasync", tmp_path / "file"), ("fsync", tmp_path)]


def test_reserved_space_is_really_taken(tmp_path: Path) -> None:
    disk = Disk()
    descriptor = disk.create(tmp_path / "file")
    disk.allocate(descriptor, 0)
    assert os.fstat(descriptor).st_size == 0
    disk.allocate(descriptor, 1 << 20)
    status = os.fstat(descriptor)
    disk.close(descriptor)
    assert status.st_size == 1 << 20
    assert status.st_blocks * 512 >= 1 << 20  # `st_blocks` counts units of 512 bytes on every file system


def test_a_short_write_continues_and_one_without_progress_is_an_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plain, disk, most = os.pwrite, Disk(), 0
    monkeypatch.setattr(
        os, "pwrite", lambda descriptor, data, position: plain(descriptor, bytes(data)[:most], position)
    )
    descriptor = disk.create(tmp_path / "file")
    with pytest.raises(OSError, match="no progress"):
        disk.pwrite(descriptor, b"x", 0)
    for most in (1, 7, 1000):
        disk.pwrite(descriptor, bytes(range(most % 10, 100)), 3)
        assert (tmp_path / "file").read_bytes()[: 103 - most % 10] == bytes(3) + bytes(range(most % 10, 100))
    disk.close(descriptor)


FAULTS = {
    "sync of folders": (os, "fsync", errno.EINVAL),
    "file locks": (fcntl, "flock", errno.ENOLCK),
    "shared maps": (mmap, "mmap", errno.ENODEV),
    "hard links": (os, "link", errno.EPERM),
}


@pytest.mark.parametrize("ability", FAULTS)
def test_a_disk_without_an_ability_is_refused_by_name_and_before_an_index_exists(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, ability: str
) -> None:
    module, name, number = FAULTS[ability]

    def fail(*arguments: object, **options: object) -> None:
        raise OSError(number, os.strerror(number))

    with monkeypatch.context() as patched, pytest.raises(StorageMisconfigured, match=ability) as caught:
        patched.setattr(module, name, fail)
        IndexService.open(root=tmp_path / "root", storage=f"file://{tmp_path}/cold", environment=False)
    assert caught.value.exit_code == pickle.loads(pickle.dumps(caught.value)).exit_code == 2
    assert "the file system of" in str(caught.value) and "docs/storages.md" in str(caught.value)
    assert not (tmp_path / "root" / "tiered_index.json").exists()
    assert not any((tmp_path / "cold" / "log%").glob("*"))


def test_a_passing_fault_of_a_disk_is_no_missing_ability(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*arguments: object) -> None:
        raise OSError(errno.EIO, "Input/output error")

    monkeypatch.setattr(os, "fsync", fail)
    with pytest.raises(StorageUnavailable):
        open_storage(f"file://{tmp_path}/cold").put("a", b"x")


@pytest.mark.parametrize(
    "arguments", [["query", "t", "k", "--root", "r"], ["ingest", "/dev/null", "--item-type", "m:C"]]
)
def test_a_deleted_working_directory_is_bad_usage(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], arguments: list[str]
) -> None:
    (gone := tmp_path / "gone").mkdir()
    monkeypatch.chdir(gone)
    gone.rmdir()
    with pytest.raises(SystemExit) as ended:
        run([*arguments, "--json"])
    assert ended.value.code == 2
    assert "working directory was deleted" in capsys.readouterr().err
