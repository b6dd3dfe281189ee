"""The storages below a storage, on every backend: each once, in order of name, beside other objects and with names that
interleave.
"""

import itertools
import uuid
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.measuring import measured
from tests.support.s3_server import S3Server
from tiered_index.storage.base import Storage
from tiered_index.storage.local import LocalStorage
from tiered_index.storage.memory import MemoryStorage
from tiered_index.storage.metering import MeteredStorage
from tiered_index.storage.opening import child_storages, open_storage
from tiered_index.storage.s3.options import S3Options
from tiered_index.storage.s3.storage import S3Storage
from tiered_index.storage.sqlite import SqliteStorage

NEIGHBOURS = (
    "a", "a-b", "a.b", "a0", "a0b", "a-", "a.", "aa", "A", "b", "0", "-", "_", "...", ".hidden", "a+b", "a=b", "a@b",
    "x" * 60,
)  # fmt: skip
# "-" and "." sort before "/", "0" right after it


@pytest.fixture(params=["memory", "folder", "database", "bucket"])
def store(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[MeteredStorage]:
    """A storage that reports all objects below a common first part of the names as one child."""
    if request.param == "bucket":
        server: S3Server = request.getfixturevalue("s3_environment")
        inner: Storage = S3Storage(server.new_bucket(), "some/prefix", S3Options(endpoint_url=server.endpoint_url))
    elif request.param == "folder":
        inner = MeteredStorage(LocalStorage(tmp_path / "objects"))  # as a wrapper: the test lists its own objects
    else:
        inner = MemoryStorage() if request.param == "memory" else SqliteStorage(tmp_path / "objects.db")
    with inner:
        yield MeteredStorage(inner)


def names(storage: Storage) -> list[str]:
    """Return the children's names, from which the URI is made."""
    return [child.uri.partition("?")[0].rpartition("/")[2] for child in child_storages(storage)]


def test_neighbours_of_the_slash(store: MeteredStorage) -> None:
    store.put("object", b"")
    assert names(store) == []
    for number, name in enumerate(NEIGHBOURS):
        store.put(f"{name}/log/{number}", name.encode())
        if number % 2:
            store.put(name, b"an object beside the folder")
    assert names(store) == sorted(NEIGHBOURS, key=lambda name: f"{name}/")
    for child in child_storages(store):
        (only,) = child.list()
        name = child.get(only.name).decode()
        assert only.name == f"log/{NEIGHBOURS.index(name)}"
        assert child.uri.partition("?")[0] == f"{store.uri.partition('?')[0]}/{name}"
        assert child.uri.partition("?")[2] == store.uri.partition("?")[2]
        child.put("written", b"w")
        assert store.get(f"{name}/written") == b"w"


def test_requests_go_with_pages_not_with_objects() -> None:
    memory, many = MemoryStorage(), MemoryStorage()
    for number in range(2_500):
        memory.put(f"b/{number:05}", b"")
        memory.put(f"z-{number:05}", b"")
        many.put(f"{number // 2:05}/{number}", b"")
    for name in ("a", "c", "d"):
        memory.put(f"{name}/x", b"")
    with measured() as usage:
        assert names(MeteredStorage(memory)) == ["a", "b", "c", "d"]
    # one page ends within "b", and after it come "c", "d" and 2,500 objects that are no children
    assert usage.requests_by_kind == {"list": 1 + 3}
    with measured() as usage:
        children = child_storages(MeteredStorage(many))
        assert [child.uri[-5:] for child in itertools.islice(children, 3)] == ["00000", "00001", "00002"]
        assert usage.requests == 1
    assert names(MeteredStorage(many)) == [f"{number:05}" for number in range(1_250)]


@pytest.mark.parametrize("length", [999, 1000, 1001, 2000])
def test_a_page_that_ends_at_the_end_of_a_child(length: int) -> None:
    memory = MemoryStorage()
    for name in (*(f"a/{number:05}" for number in range(length)), "a0/x", "b/x"):
        memory.put(name, b"")
    assert names(MeteredStorage(memory)) == ["a", "a0", "b"]


@pytest.mark.parametrize("backend", ["memory", "file"])
def test_storages_that_are_named_below_another(backend: str, tmp_path: Path) -> None:
    """A URI names a memory storage or a folder below another one."""
    base = f"memory://{uuid.uuid4().hex}" if backend == "memory" else f"file://{tmp_path}/a b"
    below = [name for name in NEIGHBOURS if backend == "memory" or not name.startswith(".")]
    for name in below:
        open_storage(f"{base}/{name}").put("log/1", name.encode())
    open_storage(f"{base}/deep/er").put("log/1", b"two levels down")
    parent = open_storage(base)
    parent.put("an/object", b"of the parent")
    parent.put("another", b"of the parent")
    children = {child.uri: child for child in child_storages(parent)}
    assert list(children) == [open_storage(f"{base}/{name}").uri for name in sorted([*below, "deep"])]
    for name in below:
        assert children[open_storage(f"{base}/{name}").uri].get("log/1") == name.encode()
    assert list(children[open_storage(f"{base}/deep").uri].list()) == []


def test_a_missing_folder_and_a_path_that_is_no_folder(tmp_path: Path) -> None:
    storage = LocalStorage(tmp_path / "none")
    assert list(storage.children()) == []
    assert not storage.folder.exists()
    storage.folder.mkdir()
    (storage.folder / "file").write_text("x")
    (storage.folder / "to-nowhere").symlink_to(tmp_path / "gone")
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    (storage.folder / "linked").symlink_to(elsewhere)
    (storage.folder / ".trash").mkdir()
    assert [child.folder.name for child in storage.children()] == ["linked"]
