"""One Spark session of two cores for all tests of this folder, and an S3 server that its tasks can reach."""

from __future__ import annotations

import os

import pyspark
import pytest
from pyspark.errors import PySparkException

from tests.spark.sessions import local_session
from tiered_index.errors import ConfigError

OLDEST_OF_STREAMS = (4, 1)


def pytest_collection_modifyitems(items):
    for item in items:
        if "/tests/spark/" in str(item.path).replace(os.sep, "/"):
            # py4j's own finalizers close its sockets
            item.add_marker(pytest.mark.filterwarnings("ignore::ResourceWarning"))


@pytest.hookimpl(wrapper=True)
def pytest_pyfunc_call(pyfuncitem):
    """Before Spark 4.1, let a test that is marked `streams` pass if its stream is refused, and only then."""
    numbers = tuple(map(int, pyspark.__version__.split(".")[:2]))
    if pyfuncitem.get_closest_marker("streams") is None or numbers >= OLDEST_OF_STREAMS:
        return (yield)
    refused = rf"\A[^\n]*PySpark {pyspark.__version__} is too old: streams into an index need 4\.1 or later"
    with pytest.raises((ConfigError, PySparkException), match=refused):
        yield
    return True


@pytest.fixture(scope="session")
def spark(tmp_path_factory):
    with local_session(tmp_path_factory.mktemp("spark")) as session:
        yield session


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
