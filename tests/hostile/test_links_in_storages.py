"""Symbolic links and pipes planted in a storage's folder: the storage does not follow a link, and never waits for a
pipe.
"""

import contextlib
import os
from collections.abc import Callable
from pathlib import Path

import pytest

from tiered_index.errors import ObjectExists, StorageError, StorageMisconfigured
from tiered_index.storage.base import PART_BYTES
from tiered_index.storage.local.storage import LocalStorage

FOREVER_MS = 2**42


@pytest.fixture
def storage(tmp_path: Path) -> LocalStorage:
    storage = LocalStorage(tmp_path / "storage")
    storage.put("data/x/kept", b"kept")
    return storage


@pytest.fixture
def outside(tmp_path: Path) -> Path:
    """Another owner's folder, with names that our storage also has."""
    outside = tmp_path / "outside"
    (outside / "below%").mkdir(parents=True)
    for name in ("object", "below%/object", ".tmp-1", "part-00001", "upload.json"):
        (outside / name).write_text('{"name": "data/x/object", "started_ms": 0}')
    os.utime(outside / ".tmp-1", (0, 0))
    return outside


def content(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in sorted(folder.rglob("*")) if path.is_file()}


def write(storage: LocalStorage, name: str, data: bytes) -> None:
    with storage.open_writer(name) as writer:
        writer.write(data)


def every_call(storage: LocalStorage, name: str) -> list[Callable[[], object]]:
    return [
        lambda: storage.get(name),
        lambda: storage.get_range(name, 0, 1),
        lambda: storage.get_suffix(name, 1),
        lambda: storage.head(name),
        lambda: storage.put_if_absent(name, b"ours"),
        lambda: storage.put(name, b"ours"),
        lambda: write(storage, name, b"ours"),
        lambda: write(storage, name, bytes(PART_BYTES + 1)),
        lambda: storage.purge(FOREVER_MS),
        lambda: storage.delete_many([name]),
    ]


@pytest.mark.parametrize("folder", ["link%", "data%/link%", ".%work"])
def test_a_folder_that_is_a_link_is_refused(storage: LocalStorage, outside: Path, folder: str) -> None:
    name = {"link%": "link/object", "data%/link%": "data/link/below/object"}.get(folder, "data/x/object")
    before = content(outside)
    if (storage.folder / folder).exists():
        (storage.folder / folder).rmdir()
    (storage.folder / folder).symlink_to(outside)
    fresh = LocalStorage(storage.folder)
    refused = 0
    for act in every_call(fresh, name):
        try:
            act()
        except StorageMisconfigured as error:
            refused += "symbolic link" in str(error)
        except StorageError:
            pass
    assert refused >= 3
    assert content(outside) == before
    assert [info.name for info in fresh.list()] == ["data/x/kept"]


def test_a_link_is_not_a_half_made_file(storage: LocalStorage, outside: Path) -> None:
    before = content(outside)
    (storage.folder / ".%work/.tmp-linked").symlink_to(outside)
    for act in every_call(storage, "data/x/object"):
        with contextlib.suppress(StorageError):
            act()
    assert content(outside) == before


def test_a_link_is_not_an_object(storage: LocalStorage, outside: Path) -> None:
    before = content(outside)
    path = storage.folder / "data%" / "x%" / "object"
    path.symlink_to(outside / "object")
    name = "data/x/object"
    for act in every_call(storage, name)[:3]:
        with pytest.raises(StorageMisconfigured):
            act()
    with pytest.raises(StorageMisconfigured, match="regular file"):
        storage.head(name)
    with pytest.raises(ObjectExists):
        storage.put_if_absent(name, b"ours")
    assert [info.name for info in storage.list()] == ["data/x/kept"]
    storage.put(name, b"ours")
    assert storage.get(name) == b"ours"
    assert not path.is_symlink()
    path.unlink()
    path.symlink_to(outside / "object")
    storage.delete_many([name])
    assert not path.is_symlink()
    assert content(outside) == before


def test_a_pipe_is_not_waited_for(storage: LocalStorage) -> None:
    os.mkfifo(storage.folder / "data%" / "x%" / "object")
    for act in every_call(storage, "data/x/object")[:4]:
        with pytest.raises(StorageMisconfigured, match="regular file"):
            act()


def test_the_folder_itself_may_be_a_link(storage: LocalStorage, tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to(storage.folder)
    linked = LocalStorage(tmp_path / "link")
    linked.put("data/x/other", b"other")
    assert [info.name for info in linked.list()] == ["data/x/kept", "data/x/other"]
    assert linked.get("data/x/kept") == b"kept"
