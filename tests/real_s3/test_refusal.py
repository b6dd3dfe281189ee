"""A server that answers 200 to every put-if-absent: it must be refused before anything is built on it."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import parse_qs, unquote, urlsplit

import pytest

from tests.storage.scripted_server import Answer, Request, error, scripted_server
from tiered_index import IndexService
from tiered_index.errors import StorageMisconfigured
from tiered_index.storage.s3.options import S3Options
from tiered_index.storage.s3.storage import S3Storage

pytestmark = pytest.mark.real_s3


class ForgetfulBucket:
    """The part of S3 that opening an index needs, without conditions."""

    def __init__(self) -> None:
        self.objects: dict[str, bytes] = {}
        self.put_names: list[str] = []
        self._lock = threading.Lock()

    def answer(self, request: Request) -> Answer:
        parts = urlsplit(request.path)
        name = unquote(parts.path).removeprefix("/bucket").removeprefix("/")
        with self._lock:
            if request.method == "PUT":
                self.objects[name] = request.body
                self.put_names.append(name)
                return Answer(200, headers={"ETag": '"etag"'})
            if request.method == "DELETE":
                self.objects.pop(name, None)
                return Answer(204)
            if not name:
                asked = parse_qs(parts.query)
                return self._listing(asked.get("prefix", [""])[0], asked.get("start-after", [""])[0])
            if name in self.objects:
                return Answer(200, self.objects[name])
            return error(404, "NoSuchKey")

    def _listing(self, prefix: str, start_after: str) -> Answer:
        found = sorted(name for name in self.objects if name.startswith(prefix) and name > start_after)
        items = "".join(
            f"<Contents><Key>{name}</Key><Size>{len(self.objects[name])}</Size><LastModified>2026-01-01T00:00:00Z</LastModified></Contents>"
            for name in found
        )
        return Answer(200, f"<ListBucketResult><IsTruncated>false</IsTruncated>{items}</ListBucketResult>".encode())


@pytest.fixture
def forgetful() -> Iterator[tuple[ForgetfulBucket, S3Storage]]:
    bucket = ForgetfulBucket()
    with scripted_server() as scripted:
        scripted.script = bucket.answer
        options = S3Options(endpoint_url=scripted.endpoint_url, max_attempts=1, transfer_attempts=1)
        with S3Storage("bucket", "", options) as storage:
            yield bucket, storage


def test_an_index_is_not_made_where_put_if_absent_is_ignored(
    server: object, forgetful: tuple[ForgetfulBucket, S3Storage], tmp_path: Path
) -> None:
    bucket, storage = forgetful
    with pytest.raises(StorageMisconfigured, match="put-if-absent"):
        IndexService.open(root=tmp_path / "root", storage_backend=storage, background=False)
    assert bucket.put_names
    assert all(name.startswith("probe/") for name in bucket.put_names)
    assert bucket.objects == {}


def test_an_index_is_not_written_where_put_if_absent_is_ignored(
    uri: str, storage: S3Storage, forgetful: tuple[ForgetfulBucket, S3Storage], tmp_path: Path
) -> None:
    """An index that came here from a good server: every claim probes again."""
    IndexService.open(root=tmp_path / "first", storage=uri, background=False, slots=7, items=100).close()
    bucket, elsewhere = forgetful
    for info in storage.list():
        bucket.objects[info.name] = storage.get(info.name)
    before = dict(bucket.objects)
    for root in ("first", "second"):
        with pytest.raises(StorageMisconfigured, match="put-if-absent"):
            IndexService.open(root=tmp_path / root, storage_backend=elsewhere, background=False)
        assert bucket.objects == before
