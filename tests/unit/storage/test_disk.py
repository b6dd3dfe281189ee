"""Each method of the real disk makes the system calls that it promises. Every other test uses a fake disk."""

import os
from pathlib import Path

import pytest

from tiered_index.storage.disk import Disk


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


def test_an_existing_file_is_not_created_again(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"kept")
    with pytest.raises(FileExistsError):
        Disk().create(tmp_path / "file")
    assert (tmp_path / "file").read_bytes() == b"kept"


@pytest.mark.parametrize("most", [1, 7, 1000])
def test_a_short_write_continues(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, most: int) -> None:
    plain = os.pwrite
    monkeypatch.setattr(
        os, "pwrite", lambda descriptor, data, position: plain(descriptor, bytes(data)[:most], position)
    )
    disk = Disk()
    descriptor = disk.create(tmp_path / "file")
    disk.pwrite(descriptor, bytes(range(100)), 3)
    disk.close(descriptor)
    assert (tmp_path / "file").read_bytes() == bytes(3) + bytes(range(100))


def test_a_write_without_progress_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "pwrite", lambda descriptor, data, position: 0)
    disk = Disk()
    descriptor = disk.create(tmp_path / "file")
    with pytest.raises(OSError, match="no progress"):
        disk.pwrite(descriptor, b"x", 0)
    disk.close(descriptor)
