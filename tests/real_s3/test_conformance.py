"""The storage contract on a real server, and facts that only a real server shows."""

from collections.abc import Iterator

import pytest

from tests.storage.conftest import WAYS
from tiered_index.errors import StorageMisconfigured
from tiered_index.storage.base import Storage
from tiered_index.storage.opening import open_storage
from tiered_index.storage.s3.options import S3Options
from tiered_index.testing.storage_conformance import StorageConformance

pytestmark = pytest.mark.real_s3


class TestRealS3(StorageConformance):
    """Read through obstore, and through boto3."""

    @pytest.fixture(params=WAYS.values(), ids=WAYS.keys())
    def options(self, request: pytest.FixtureRequest) -> S3Options:
        return S3Options(client=request.param)

    @pytest.fixture
    def storage(self, uri: str, options: S3Options) -> Iterator[Storage]:
        with open_storage(uri, options=options) as storage:
            yield storage

    @pytest.fixture
    def another(self, uri: str, options: S3Options) -> Iterator[Storage]:
        with open_storage(uri, options=options) as another:
            yield another


def test_wrong_credentials_are_refused(uri: str, monkeypatch: pytest.MonkeyPatch) -> None:
    secret = "not-the-right-secret"
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", secret)
    with open_storage(uri) as storage:
        for call in (lambda: storage.get("a"), lambda: storage.put("a", b"x"), lambda: list(storage.list())):
            with pytest.raises(StorageMisconfigured) as caught:
                call()
            assert secret not in str(caught.value)
