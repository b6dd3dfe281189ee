"""Special properties of a folder: foreign files, and its own clean-up."""

import errno
import os
import shutil
from pathlib import Path

import pytest

from tiered_index.base.clock import ManualClock
from tiered_index.errors import StorageMisconfigured, StorageUnavailable
from tiered_index.storage.base import PART_BYTES
from tiered_index.storage.local import LocalStorage


def test_a_writer_whose_half_made_file_went_fails_and_the_next_one_goes_on(tmp_path: Path) -> None:
    with LocalStorage(tmp_path) as storage:
        for lost in (True, False):
            writer = storage.open_writer("a")
            writer.write(bytes(PART_BYTES + 1))
            assert len(storage.purge(0)) == 1
            if lost:
                shutil.rmtree(tmp_path / ".%work")
                with pytest.raises(StorageUnavailable):
                    writer.close()
                assert list(storage.list()) == []
            else:
                writer.close()
        assert storage.head("a").size_bytes == PART_BYTES + 1
        assert storage.purge(0) == ()


def test_only_old_half_made_work_is_swept(tmp_path: Path) -> None:
    clock = ManualClock()
    storage = LocalStorage(tmp_path, clock=clock)
    storage.put("a/b", b"x")
    now_ms = clock.now_ms()
    for name, age_s in (("old", 7200), ("young", -60)):
        # also files that are not ours, whose names are no objects
        for path in (
            tmp_path / ".%work" / f".tmp-{name}",
            tmp_path / f"with blank-{name}",
            tmp_path / "a%" / f"ü-{name}",
        ):
            path.write_bytes(b"half")
            os.utime(path, ns=((now_ms - age_s * 1000) * 1_000_000,) * 2)
    assert storage.purge(now_ms) == (".%work/.tmp-young",)
    assert [path.name for path in (tmp_path / ".%work").iterdir()] == [".tmp-young"]
    assert [info.name for info in storage.list()] == ["a/b"]
    assert len(list(tmp_path.rglob("*-old"))) == 2


def test_a_file_in_the_folders_place_is_a_set_up_error(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"x")
    storage = LocalStorage(tmp_path / "file")
    calls = (lambda: storage.put("a", b"x"), lambda: storage.get("a"), lambda: list(storage.list()))
    for call in (*calls, lambda: storage.head("a")):
        with pytest.raises(StorageMisconfigured):
            call()


def test_a_folder_is_deleted_with_its_last_object_and_made_again(tmp_path: Path) -> None:
    first, other = LocalStorage(tmp_path), LocalStorage(tmp_path)
    for name in ("lease/1/1", "lease/1/2", "data/a/1.index", "log/1"):
        first.put(name, b"x")
    other.delete_many(["lease/1/1", "data/a/1.index", "log/1"])
    assert {path.name for path in tmp_path.rglob("*%")} >= {"lease%", "1%", "data%", "log%"}
    assert not (tmp_path / "data%" / "a%").exists()
    other.delete_many(["lease/1/2"])
    assert list((tmp_path / "lease%").iterdir()) == []
    # the first one must not take the deleted folders as existing and durable
    first.put("lease/1/3", b"x")
    first.put_if_absent("data/a/2.index", b"x")
    assert [info.name for info in other.list()] == ["data/a/2.index", "lease/1/3"]
    other.delete_many(["data/a/never.index"])
    other.delete_many(["never/a/1"])


def test_a_folder_that_can_not_be_looked_at_is_a_typed_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    storage = LocalStorage(tmp_path)
    storage.put("data/object", b"x")

    def stale(path: Path) -> bool:
        raise OSError(errno.ESTALE, os.strerror(errno.ESTALE), str(path))

    monkeypatch.setattr(Path, "is_symlink", stale)
    for call in (
        lambda: storage.get("data/object"),
        lambda: storage.head("data/object"),
        lambda: storage.put("data/object", b"y"),
        lambda: storage.put_if_absent("data/other", b"y"),
        lambda: storage.delete_many(["data/object"]),
    ):
        with pytest.raises(StorageUnavailable, match="looking for 'data/"):
            call()
