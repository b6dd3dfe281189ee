"""Hypothesis profiles, by `HYPOTHESIS_PROFILE`: `default` keeps `make test` short, `thorough` is that of `make
test-all`, `soak` is for long runs. One S3 server a process. No test's own process waits for the disk.
"""

from __future__ import annotations

import functools
import gc
import logging
import os
import signal
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from hypothesis import HealthCheck, settings

from tests.support import spark_java

if TYPE_CHECKING:
    from tests.support.s3_server import S3Server

_CHECKS = [
    HealthCheck.too_slow,
    HealthCheck.data_too_large,
    HealthCheck.filter_too_much,
    HealthCheck.function_scoped_fixture,
]

settings.register_profile("common", deadline=None, suppress_health_check=_CHECKS, print_blob=True)
_COMMON = settings.get_profile("common")
settings.register_profile("default", _COMMON, max_examples=50, derandomize=True)
settings.register_profile("thorough", _COMMON, max_examples=200, derandomize=True)
settings.register_profile("soak", _COMMON, max_examples=2000)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "default"))
# a shell's job in the background ignores Ctrl-C, and so would every program that a test starts and interrupts
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)
# of Spark's sessions in tests, and in the programs and commands that these start
os.environ.setdefault("SPARK_SUBMIT_OPTS", spark_java.options())


def _sync_nothing(descriptor: int) -> None:
    """Check the descriptor, and wait for no disk: a test cuts no real power. `FaultDisk` simulates what a power cut
    leaves, and `tests/unit/storage/test_disk.py` proves that the real disk asks the system. Processes that tests start
    sync as ever.
    """
    os.fstat(descriptor)


# tens of thousands of real syncs took a quarter of the suite's time
os.fsync = os.fdatasync = _sync_nothing


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Put tests of Spark first. Workers of pytest-xdist begin with neighbours and take over what another has last, so
    that one worker has all of these tests, and the only Java.
    """
    items.sort(key=lambda item: Path(__file__).parent / "spark" not in item.path.parents)


def pytest_collection_finish() -> None:
    """Leave thousands of collected tests to themselves: no later collection of garbage looks at them."""
    gc.collect()
    gc.freeze()


@pytest.fixture(autouse=True)
def logging_as_it_was() -> Iterator[None]:
    """Put back the loggers that a command line sets up for its process: other tests look at their records."""
    loggers = [logging.getLogger(name) for name in ("tiered_index", "tiered_index.storage.retry")]
    before = [(one.level, one.propagate, list(one.handlers), list(one.filters)) for one in loggers]
    yield
    for logger, (level, propagate, handlers, filters) in zip(loggers, before, strict=True):
        logger.setLevel(level)  # which also clears what its children have cached
        logger.propagate, logger.handlers[:], logger.filters[:] = propagate, handlers, filters


@pytest.fixture(scope="session")
def server() -> Iterator[S3Server]:
    """An S3 server, one a test process, started when the first test asks for it; tests have buckets of their own."""
    import botocore.session

    from tests.support.s3_server import s3_server

    # hundreds of tests make clients: the descriptions of the services, some MB of JSON, are parsed once
    botocore.session.create_loader = functools.cache(botocore.session.create_loader)
    with s3_server() as running:
        yield running


@pytest.fixture
def s3_environment(server: S3Server, monkeypatch: pytest.MonkeyPatch) -> S3Server:
    server.let_in(monkeypatch)
    return server


@pytest.fixture
def eager_switches() -> Iterator[None]:
    """Switch threads a hundred times as often as usual."""
    before = sys.getswitchinterval()
    sys.setswitchinterval(5e-5)
    yield
    sys.setswitchinterval(before)
