"""Links in roots and storages, and documents that name other places: nothing outside is made, changed or deleted.

A storage also never waits for a planted pipe.
"""

import contextlib
import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from tiered_index import IndexService
from tiered_index.errors import ObjectExists, StorageError, StorageMisconfigured, TieredIndexError
from tiered_index.storage.base import PART_BYTES
from tiered_index.storage.local import LocalStorage

NOW_MS = 1_700_000_000_000
PRECIOUS = b"precious " * 1000


def opened(folder: Path, **settings: object) -> IndexService:
    chosen = {"storage": f"file://{folder}/storage", "slots": 7, "items": 20, "background": False, **settings}
    return IndexService.open(root=folder / "root", **chosen)


def content(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in sorted(folder.rglob("*")) if path.is_file()}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A closed root with a file in each state."""
    with opened(tmp_path) as index:
        for number in range(3):
            index.put("t", 0, ["k"], number, 10, NOW_MS + number)
            if number < 2:
                index.seal()
                index.run_lifecycle()
        index.flush()
    return tmp_path


@pytest.fixture
def outside(tmp_path: Path) -> Path:
    """Another owner's folder, with names that our roots and storages also have."""
    outside = tmp_path / "outside"
    (outside / "below%").mkdir(parents=True)
    ours = ("000001700000000-0123456789ab.index", "lock", "object", "below%/object", "part-00001", "upload.json")
    for name in (".tmp-1", *ours):
        (outside / name).write_text('{"name": "data/x/object", "started_ms": 0}')
    os.utime(outside / ".tmp-1", (0, 0))
    return outside


def folder_as_link(name: str) -> Callable[[Path, Path], None]:
    def spoil(root: Path, outside: Path) -> None:
        shutil.rmtree(root / name, ignore_errors=True)
        (root / name).symlink_to(outside)

    return spoil


def file_as_link(pattern: str) -> Callable[[Path, Path], None]:
    """Move the file elsewhere, append bytes to it, and put a link in its place."""

    def spoil(root: Path, outside: Path) -> None:
        path = sorted(root.glob(pattern))[-1]
        (outside / path.name).write_bytes(path.read_bytes() + PRECIOUS)
        path.unlink()
        path.symlink_to(outside / path.name)

    return spoil


_SPOILED = {
    "lock": file_as_link("lock"),
    "journal": file_as_link("unsealed/*.journal"),
    "entries": file_as_link("unsealed/*.index"),
    **{name: folder_as_link(name) for name in ("unsealed", "compacted", "uploaded", "followers")},
}


@pytest.mark.parametrize("kind", _SPOILED)
def test_a_writer_that_opens_touches_nothing_outside(folder: Path, outside: Path, kind: str) -> None:
    _SPOILED[kind](folder / "root", outside)
    before = content(outside)
    try:
        with opened(folder) as index:
            index.put("t", 0, ["k"], 9, 10, NOW_MS)
            index.seal()
            index.run_lifecycle()
    except TieredIndexError as error:
        assert "link" in str(error)  # "a symbolic link", "Too many levels of symbolic links"
    else:
        assert kind == "entries"  # the writer does not use a link as a file
    assert content(outside) == before


@pytest.mark.parametrize("name", ["unsealed", "compacted", "uploaded"])
def test_a_folder_that_becomes_a_link_is_noticed(folder: Path, outside: Path, name: str) -> None:
    index = opened(folder)
    index.run_lifecycle()
    (folder / "root" / name).rename(folder / "away")
    (folder / "root" / name).symlink_to(outside)
    before = content(outside)
    with pytest.raises(TieredIndexError, match="symbolic link"):
        index.run_lifecycle()
    assert any("symbolic link" in problem for problem in index.health()["problems"])
    assert len(index.query("t", "k")) == 3
    assert content(outside) == before
    (folder / "root" / name).unlink()
    (folder / "away").rename(folder / "root" / name)
    index.run_lifecycle()
    assert index.health()["problems"] == []
    index.close()


def test_a_marker_that_names_another_place_makes_nothing_there(folder: Path) -> None:
    marker = folder / "root" / "tiered_index.json"
    for scheme, name in (("file", "elsewhere"), ("sqlite", "elsewhere.db")):
        document = json.loads(marker.read_text()) | {"storage": f"{scheme}://{folder}/{name}"}
        marker.write_text(json.dumps(document))
        with pytest.raises(TieredIndexError):
            opened(folder, storage=None)
        assert not (folder / name).exists()


def test_the_root_itself_may_be_a_link(folder: Path) -> None:
    (folder / "root").rename(folder / "disk")
    (folder / "root").symlink_to(folder / "disk")
    with opened(folder) as index:
        assert len(index.query("t", "k")) == 3
        index.seal()
        index.run_lifecycle()


FOREVER_MS = 2**42


@pytest.fixture
def storage(tmp_path: Path) -> LocalStorage:
    storage = LocalStorage(tmp_path / "storage")
    storage.put("data/x/kept", b"kept")
    return storage


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
