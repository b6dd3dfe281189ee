"""The server under test: the one that `make test-s3` starts, or the endpoint in TIERED_INDEX_TEST_S3_ENDPOINT."""

import os
import uuid
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import boto3
import pytest
from botocore.config import Config

from tests.real_s3.cluster import Cluster
from tests.real_s3.gate import Gate, gate
from tests.real_s3.packages import install
from tests.real_s3.sample import Sample
from tests.real_s3.server import ENDPOINT_VARIABLE, STATE_VARIABLE
from tiered_index.storage.opening import open_storage
from tiered_index.storage.s3.storage import S3Storage

BUCKET_VARIABLE = "TIERED_INDEX_TEST_S3_BUCKET"


@dataclass(frozen=True)
class Server:
    """The place of the tests: a bucket, and the server's processes if the tests may kill them."""

    endpoint_url: str
    bucket: str
    cluster: Cluster | None

    def uri(self, prefix: str, endpoint_url: str | None = None) -> str:
        return f"s3://{self.bucket}/{prefix}?endpoint_url={endpoint_url or self.endpoint_url}"


@pytest.fixture(scope="session")
def server() -> Iterator[Server]:
    endpoint_url = os.environ.get(ENDPOINT_VARIABLE)
    if not endpoint_url:
        pytest.fail(
            f"there is no S3 server to test against: run `make test-s3`, or set {ENDPOINT_VARIABLE} and the AWS_* "
            f"variables"
        )
    state, named = os.environ.get(STATE_VARIABLE), os.environ.get(BUCKET_VARIABLE)
    cluster = Cluster(install(), Path(state)) if state else None
    bucket = named or f"tiered-index-tests-{uuid.uuid4().hex[:12]}"
    client = boto3.client("s3", endpoint_url=endpoint_url, config=Config(s3={"addressing_style": "path"}))
    with pytest.MonkeyPatch.context() as patch:
        # these are the tests' own settings; tiered_index refuses an unknown variable TIERED_INDEX_*
        for name in list(os.environ):
            if name.startswith("TIERED_INDEX_"):
                patch.delenv(name)
        try:
            if not named:
                client.create_bucket(Bucket=bucket)
            yield Server(endpoint_url, bucket, cluster)
            # Every test deleted its own objects. Our own server is deleted as a whole; after a restart this would take
            # half a minute.
            if not named and cluster is None:
                client.delete_bucket(Bucket=bucket)
        finally:
            client.close()


@pytest.fixture(scope="session")
def sample() -> Sample:
    return Sample.generate()


@pytest.fixture
def place(server: Server) -> Iterator[str]:
    """A prefix for one test; all objects below it are deleted afterwards."""
    name = f"tiered-index-tests/{uuid.uuid4().hex}"
    yield name
    clear(server.uri(name))


def clear(uri: str) -> None:
    """Delete all objects and unfinished uploads."""
    with open_storage(uri) as storage:
        storage.purge(storage.now_ms() + 3_600_000)
        storage.delete_many([info.name for info in storage.list()])


@pytest.fixture
def uri(server: Server, place: str) -> str:
    return server.uri(place)


@pytest.fixture
def storage(uri: str) -> Iterator[S3Storage]:
    with open_storage(uri) as storage:
        yield storage


@pytest.fixture
def server_gate(server: Server) -> Iterator[Gate]:
    """A gate before the server, which can only read unencrypted requests."""
    if not server.endpoint_url.startswith("http://"):
        pytest.skip("a gate can't look into TLS")
    with gate(server.endpoint_url) as opened:
        yield opened


@pytest.fixture
def cluster(server: Server, place: str) -> Iterator[Cluster]:
    """The server's processes; they run again afterwards, before `place` is cleared."""
    if server.cluster is None:
        pytest.skip("the server is not ours to kill")
    yield server.cluster
    server.cluster.start()
