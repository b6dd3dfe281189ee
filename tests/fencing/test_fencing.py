"""One writer per index, in several processes, on every shared storage: S3 (a stand-in), a folder, a database file."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.fencing.scenarios import FencingScenarios
from tests.support.s3_server import S3Server
from tiered_index.storage.base import Storage
from tiered_index.storage.opening import open_storage


@pytest.fixture(params=["s3", "file", "sqlite"])
def uri(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    if request.param == "file":
        return f"file://{tmp_path / 'store'}"
    if request.param == "sqlite":
        return f"sqlite://{tmp_path / 'store.db'}"
    server: S3Server = request.getfixturevalue("s3_environment")
    return f"s3://{server.new_bucket()}/index?endpoint_url={server.endpoint_url}"


@pytest.fixture
def storage(uri: str) -> Iterator[Storage]:
    with open_storage(uri) as opened:
        yield opened


class TestFencing(FencingScenarios):
    """The scenarios of every storage. `tests/real_s3` runs them on a real server."""
