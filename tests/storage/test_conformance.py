"""Every backend, and every wrapper of one, against the same contract."""

import os
import sys
import uuid
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.storage.conftest import WAYS
from tests.support.s3_server import S3Server
from tests.support.storage_faults import FaultStorage, LatencyStorage
from tests.support.unsynced_disk import UnsyncedDisk
from tiered_index.storage.base import Storage
from tiered_index.storage.local.storage import LocalStorage
from tiered_index.storage.memory import MemoryStorage
from tiered_index.storage.metering import MeteredStorage
from tiered_index.storage.opening import PrefixedStorage
from tiered_index.storage.s3 import light
from tiered_index.storage.s3.options import S3Options
from tiered_index.storage.s3.storage import S3Storage
from tiered_index.storage.sqlite.storage import SqliteStorage
from tiered_index.testing.storage_conformance import StorageConformance


class TestMemoryStorage(StorageConformance):
    @pytest.fixture
    def storage(self) -> Iterator[Storage]:
        name = uuid.uuid4().hex
        yield MemoryStorage(name)
        MemoryStorage.forget(name)

    @pytest.fixture
    def another(self, storage: Storage) -> Storage:
        return MemoryStorage(storage.uri.removeprefix("memory://"))


class TestLocalStorage(StorageConformance):
    @pytest.fixture
    def storage(self, tmp_path: Path) -> Storage:
        return LocalStorage(tmp_path / "made" / "by the first write", disk=UnsyncedDisk())

    @pytest.fixture
    def another(self, storage: Storage) -> Storage:
        assert isinstance(storage, LocalStorage)
        return LocalStorage(storage.folder, disk=UnsyncedDisk())


class TestSqliteStorage(StorageConformance):
    @pytest.fixture
    def storage(self, tmp_path: Path) -> Iterator[Storage]:
        with SqliteStorage(tmp_path / "made by the first write.db") as storage:
            yield storage

    @pytest.fixture
    def another(self, storage: Storage) -> Iterator[Storage]:
        assert isinstance(storage, SqliteStorage)
        with SqliteStorage(storage.path) as another:
            yield another


class TestS3Storage(StorageConformance):
    """Against moto's server, through plain boto3 and through obstore.

    The server has one constant date for every upload's start, so the listing by age is adapted. `another` reads as a
    process that has not loaded boto3. `storage` reads ranges through obstore after its first write.
    """

    def test_reads_take_the_way_that_is_set(
        self, storage: Storage, another: Storage, way: str, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        taken: list[str] = []
        for name in ("get", "listed"):
            real = getattr(light, name)
            monkeypatch.setattr(light, name, lambda *given, name=name, real=real: (taken.append(name), real(*given))[1])
        storage.put("folder/object", b"0123456789")
        for _ in range(2):  # the first GET of a process that writes uses boto3
            assert storage.get_range("folder/object", 2, 3) == b"234"
        assert taken == ["get"] * (way == "obstore")
        assert [info.name for info in another.list("folder/")] == ["folder/object"]
        assert (another.get("folder/object"), another.get_range("folder/object", 2, 3)) == (b"0123456789", b"234")
        assert taken[1:] == ["listed", "get", "get"] * (way == "obstore")

    def test_uploads_are_listed_by_prefix_and_age(self, storage: Storage, another: Storage) -> None:
        handles = [storage.begin_upload(name) for name in ("data/a", "data/b", "data/b", "other")]
        assert sorted(h.upload_id for h in another.list_uploads()) == sorted(h.upload_id for h in handles)
        listed = list(another.list_uploads("data/"))
        assert [handle.name for handle in listed] == ["data/a", "data/b", "data/b"]
        started = listed[0].started_ms
        assert list(storage.list_uploads("data/", older_than_ms=started)) == []
        assert len(list(storage.list_uploads("data/", older_than_ms=started + 1))) == 3
        assert another.abort_uploads("data/b") == 2
        assert [handle.name for handle in storage.list_uploads()] == ["data/a", "other"]

    many = 100

    def test_list_returns_the_objects_of_all_pages(self, storage: Storage) -> None:
        """With 20 names per page: thousands of objects take the server seconds."""
        assert isinstance(storage, S3Storage)
        pages: list[dict[str, object]] = []

        def ask_for_few(params: dict[str, object], **_: object) -> None:
            params["MaxKeys"] = 20
            pages.append(params)

        storage.client.meta.events.register("before-parameter-build.s3.ListObjectsV2", ask_for_few)
        super().test_list_returns_the_objects_of_all_pages(storage)
        assert len(pages) > 2 * self.many // 20

    @pytest.fixture(params=WAYS)
    def way(self, request: pytest.FixtureRequest) -> str:
        return str(request.param)

    @pytest.fixture
    def storage(self, s3_environment: S3Server, way: str) -> Iterator[Storage]:
        options = S3Options(
            endpoint_url=s3_environment.endpoint_url, max_attempts=3, backoff_s=0.01, lean_gets=way == "obstore"
        )
        with _opened(s3_environment.new_bucket(), options) as storage:
            yield storage

    @pytest.fixture
    def another(self, storage: Storage) -> Iterator[Storage]:
        assert isinstance(storage, S3Storage)
        assert isinstance(storage.options, S3Options)
        with _opened(storage.bucket, storage.options) as another:
            yield another


def _opened(bucket: str, options: S3Options) -> S3Storage:
    """Open a storage. If obstore may read, open it as a process that has not loaded boto3 and needs no proxy."""
    with pytest.MonkeyPatch.context() as patch:
        if options.lean_gets:
            patch.delitem(sys.modules, "botocore", raising=False)
            for name in [name for name in os.environ if name.lower().endswith("_proxy")]:
                patch.delenv(name)
        return S3Storage(bucket, "some/prefix", options)


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
