"""One Spark session of two cores for all tests of this folder, and an S3 server that its tasks can reach."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

from tests.support.s3_server import CREDENTIALS

WORKERS = Path(__file__).parents[1] / "support" / "spark_workers"
"""A folder of PYTHONPATH. Spark forks workers from a process that has imported everything."""


def pytest_collection_modifyitems(items):
    for item in items:
        if "/tests/spark/" in str(item.path).replace(os.sep, "/"):
            # py4j's own finalizers close its sockets
            item.add_marker(pytest.mark.filterwarnings("ignore::ResourceWarning"))


@pytest.fixture(scope="session")
def spark(tmp_path_factory):
    from tiered_index.spark import open_session

    before = dict(os.environ)
    # workers have the environment in which Java started
    path = os.pathsep.join(filter(None, [str(WORKERS), before.get("PYTHONPATH")]))
    os.environ.update(CREDENTIALS, PYSPARK_PYTHON=sys.executable, PYTHONPATH=path)
    settings = {
        "spark.sql.shuffle.partitions": "2",
        "spark.driver.host": "127.0.0.1",
        "spark.local.dir": str(tmp_path_factory.mktemp("spark")),
    }
    session = open_session("local[2]", settings=settings)
    session.sparkContext.setLogLevel("OFF")
    yield session
    session.stop()
    os.environ.clear()
    os.environ.update(before)


@pytest.fixture(scope="module")
def s3(server):
    """The S3 server; the environment has the settings that its clients need."""
    with pytest.MonkeyPatch.context() as patched:
        for name, value in server.environment.items():
            patched.setenv(name, value)
        yield server


@pytest.fixture
def storage(tmp_path):
    return f"file://{tmp_path}/storage"


@pytest.fixture
def config():
    from tiered_index import IndexConfig

    return IndexConfig(slots=64, items=100_000)
