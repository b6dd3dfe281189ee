"""Every backend, and every wrapper of one, against the same contract."""

import runpy
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.storage.conftest import WAYS
from tests.storage.sqlite_probes import connections
from tests.support.s3_server import S3Server
from tests.support.storage_faults import FaultStorage, LatencyStorage
from tiered_index.errors import ObjectNotFound
from tiered_index.storage import obstores, sqlite
from tiered_index.storage.base import Storage
from tiered_index.storage.local import LocalStorage
from tiered_index.storage.memory import MemoryStorage
from tiered_index.storage.metering import MeteredStorage
from tiered_index.storage.opening import PrefixedStorage
from tiered_index.storage.s3.options import S3Options
from tiered_index.storage.s3.storage import S3Storage
from tiered_index.storage.sqlite import SqliteStorage
from tiered_index.testing.storage_conformance import StorageConformance

EXAMPLE = Path(__file__).parents[2] / "docs" / "examples" / "sql_storage.py"


class TestMemoryStorage(StorageConformance):
    has_etags = True

    @pytest.fixture
    def storage(self) -> Iterator[Storage]:
        name = uuid.uuid4().hex
        yield MemoryStorage(name)
        MemoryStorage.forget(name)

    @pytest.fixture
    def another(self, storage: Storage) -> Storage:
        return MemoryStorage(storage.uri.removeprefix("memory://"))


class TestLocalStorage(StorageConformance):
    has_etags = False

    @pytest.fixture
    def storage(self, tmp_path: Path) -> Storage:
        return LocalStorage(tmp_path / "made" / "by the first write")

    @pytest.fixture
    def another(self, storage: Storage) -> Storage:
        assert isinstance(storage, LocalStorage)
        return LocalStorage(storage.folder)


class TestSqliteStorage(StorageConformance):
    has_etags = False

    @pytest.fixture
    def storage(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Storage]:
        # a thousand syncs take long
        monkeypatch.setattr(sqlite, "PRAGMAS", (*sqlite.PRAGMAS, "synchronous=OFF"))
        with SqliteStorage(tmp_path / "made by the first write.db") as storage:
            yield storage

    @pytest.fixture
    def another(self, storage: Storage) -> Iterator[Storage]:
        assert isinstance(storage, SqliteStorage)
        with SqliteStorage(storage.path) as another:
            yield another


class TestS3Storage(StorageConformance):
    """Against moto's server, read through obstore and through boto3.

    The server has one constant date for every upload's start, so the listing by age is adapted.
    """

    def before_uploads_ms(self, storage: Storage) -> int:
        return 0

    many = 100
    has_etags = True

    def test_list_returns_the_objects_of_all_pages(self, storage: Storage, monkeypatch: pytest.MonkeyPatch) -> None:
        """With 20 names per page: thousands of objects take the server seconds."""
        assert isinstance(storage, S3Storage)
        pages: list[dict[str, object]] = []

        def ask_for_few(params: dict[str, object], **_: object) -> None:
            params["MaxKeys"] = 20
            pages.append(params)

        monkeypatch.setattr(obstores, "PAGE", 20)
        monkeypatch.setattr(obstores, "sending", lambda: pages.append({}))
        storage.client.meta.events.register("before-parameter-build.s3.ListObjectsV2", ask_for_few)
        super().test_list_returns_the_objects_of_all_pages(storage)
        assert len(pages) > 2 * self.many // 20

    @pytest.fixture(params=WAYS.values(), ids=WAYS.keys())
    def storage(self, s3_environment: S3Server, request: pytest.FixtureRequest) -> Iterator[Storage]:
        options = S3Options(
            endpoint_url=s3_environment.endpoint_url, max_attempts=3, backoff_s=0.01, client=request.param
        )
        with S3Storage(s3_environment.new_bucket(), "some/prefix", options) as storage:
            yield storage

    @pytest.fixture
    def another(self, storage: Storage) -> Iterator[Storage]:
        assert isinstance(storage, S3Storage)
        with S3Storage(storage.bucket, "some/prefix", storage.options) as another:
            yield another

    def test_a_prefix_shows_only_its_own_objects(self, storage: Storage) -> None:
        assert isinstance(storage, S3Storage)
        whole, longer, shorter = (
            S3Storage(storage.bucket, prefix, storage.options) for prefix in ("", "/index/one/", "index/on")
        )
        with whole, longer, shorter:
            longer.put("a", b"1")
            shorter.put("a", b"2")
            assert [info.name for info in longer.list()] == ["a"]
            shorter.delete_many(["a"])
            assert longer.get("a") == b"1"
            with pytest.raises(ObjectNotFound):
                shorter.get("a")
            assert [info.name for info in whole.list()] == ["index/one/a"]


@pytest.fixture(scope="module")
def shown() -> dict[str, Any]:
    lines = [line for line in EXAMPLE.read_text().splitlines() if line.strip()]
    assert len(lines) < 120, "docs/embedding.md promises about 100 lines"
    return runpy.run_path(str(EXAMPLE))


class TestSqlStorage(StorageConformance):
    """The storage that docs/examples shows to authors of storages."""

    racers, readers, many = 4, 4, 1_050

    @pytest.fixture
    def storage(self, shown: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Storage]:
        opened = connections(monkeypatch)
        with shown["SqlStorage"](tmp_path / "objects") as storage:
            # a thousand syncs take half a minute
            opened[-1].execute("PRAGMA synchronous=OFF")
            yield storage

    @pytest.fixture
    def another(self, shown: dict[str, Any], tmp_path: Path) -> Iterator[Storage]:
        with shown["SqlStorage"](tmp_path / "objects") as another:
            yield another


class TestWrappedStorage(StorageConformance):
    """All wrappers at once. None may have a visible effect."""

    longest_name = 512 - len("inner/prefix/")

    @pytest.fixture
    def storage(self) -> Storage:
        inner = MemoryStorage()
        inner.put("outside", b"not under the prefix")
        prefixed = PrefixedStorage(inner, "inner/prefix")
        slow = LatencyStorage(prefixed, seed=1, median_ms=1.0, sigma=0.1, sleep=lambda _: None)
        return MeteredStorage(FaultStorage(slow))

    @pytest.fixture
    def another(self, storage: Storage) -> Storage:
        return storage
