"""The storages below a storage, on every backend: each once, in order of name, beside other objects and with names that
interleave.
"""

import itertools
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.support.measuring import measured
from tests.support.s3_server import S3Server
from tiered_index.storage.base import Storage
from tiered_index.storage.local.storage import LocalStorage
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


@pytest.fixture
def memory() -> Iterator[Storage]:
    yield MemoryStorage()


@pytest.fixture
def folder(tmp_path: Path) -> Iterator[Storage]:
    yield MeteredStorage(LocalStorage(tmp_path / "objects"))  # as a wrapper: the test lists its own objects


@pytest.fixture
def database(tmp_path: Path) -> Iterator[Storage]:
    with SqliteStorage(tmp_path / "objects.db") as storage:
        yield storage


@pytest.fixture
def bucket(s3_environment: S3Server) -> Iterator[Storage]:
    with S3Storage(
        s3_environment.new_bucket(), "some/prefix", S3Options(endpoint_url=s3_environment.endpoint_url)
    ) as storage:
        yield storage


@pytest.fixture(params=["memory", "folder", "database", "bucket"])
def store(request: pytest.FixtureRequest) -> MeteredStorage:
    """A storage that reports all objects below a common first part of the names as one child."""
    return MeteredStorage(request.getfixturevalue(request.param))


def names(storage: Storage) -> list[str]:
    """Return the children's names, from which the URI is made."""
    return [child.uri.partition("?")[0].rpartition("/")[2] for child in child_storages(storage)]


def test_nothing_has_no_children(store: MeteredStorage) -> None:
    assert names(store) == []
    store.put("object", b"")
    assert names(store) == []


def test_neighbours_of_the_slash(store: MeteredStorage) -> None:
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


def test_requests_go_with_pages_not_with_objects(memory: Storage) -> None:
    store = MeteredStorage(memory)
    for number in range(2_500):
        memory.put(f"b/{number:05}", b"")
        memory.put(f"z-{number:05}", b"")
    for name in ("a", "c", "d"):
        memory.put(f"{name}/x", b"")
    with measured() as usage:
        assert names(store) == ["a", "b", "c", "d"]
    # one page ends within "b", and after it come "c", "d" and 2,500 objects that are no children
    assert usage.requests_by_kind == {"list": 1 + 3}


def test_children_are_found_as_they_are_asked_for(memory: Storage) -> None:
    store = MeteredStorage(memory)
    for number in range(3_000):
        memory.put(f"{number // 2:05}/{number}", b"")
    with measured() as usage:
        assert [child.uri[-5:] for child in itertools.islice(child_storages(store), 3)] == ["00000", "00001", "00002"]
        assert usage.requests == 1
    assert names(store) == [f"{number:05}" for number in range(1_500)]


@pytest.mark.parametrize("length", [999, 1000, 1001, 1999, 2000, 2001])
def test_a_page_that_ends_at_the_end_of_a_child(memory: Storage, length: int) -> None:
    for number in range(length):
        memory.put(f"a/{number:05}", b"")
    memory.put("a0/x", b"")
    memory.put("b/x", b"")
    assert names(MeteredStorage(memory)) == ["a", "a0", "b"]


def uri_below(backend: str, folder: Path) -> Callable[[str], str]:
    base = f"memory://{uuid.uuid4().hex}" if backend == "memory" else f"file://{folder}/a b"
    return lambda name: f"{base}/{name}" if name else base


@pytest.mark.parametrize("backend", ["memory", "file"])
def test_storages_that_are_named_below_another(backend: str, tmp_path: Path) -> None:
    """A URI names a memory storage or a folder below another one."""
    uri = uri_below(backend, tmp_path)
    below = [name for name in NEIGHBOURS if backend == "memory" or not name.startswith(".")]
    for name in below:
        open_storage(uri(name)).put("log/1", name.encode())
    open_storage(uri("deep/er")).put("log/1", b"two levels down")
    parent = open_storage(uri(""))
    parent.put("an/object", b"of the parent")
    parent.put("another", b"of the parent")
    children = {child.uri: child for child in child_storages(parent)}
    expected = sorted([*below, "deep"])
    assert list(children) == [open_storage(uri(name)).uri for name in expected]
    for name in below:
        assert children[open_storage(uri(name)).uri].get("log/1") == name.encode()
    assert list(children[open_storage(uri("deep")).uri].list()) == []


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
