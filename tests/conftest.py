"""Hypothesis profiles, one S3 server per process, and no waits for the disk.

`HYPOTHESIS_PROFILE` chooses a profile. `default` keeps `make test` short, `make test-all` uses `thorough`, and `soak`
is for long runs.
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

from tests.support import core, spark_java

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
# a shell's background job ignores Ctrl-C, and so would each program that a test starts and interrupts
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)
# for Spark's sessions in tests, and in the programs and commands that tests start
os.environ.setdefault("SPARK_SUBMIT_OPTS", spark_java.options())


def _sync_nothing(descriptor: int) -> None:
    """Check the descriptor, and do not wait for the disk, because no test cuts real power.

    `FaultDisk` simulates the effects of a power cut. `tests/unit/storage/test_disk.py` proves that the real disk calls
    the system. Processes that tests start still sync.
    """
    os.fstat(descriptor)


# tens of thousands of real syncs took a quarter of the suite's time
os.fsync = os.fdatasync = _sync_nothing


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--numpy", action="store_true", help="use NumPy in place of the compiled core")


def pytest_configure(config: pytest.Config) -> None:
    """Use NumPy if asked to."""
    if config.getoption("--numpy"):
        core.use_numpy()


_WHOLE_FOLDERS = {"brokers": "not brokers", "real_s3": "not real_s3", "server/console": "not long"}
"""Folders whose tests all have a marker, and the part of `-m` that leaves them out."""


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Import no browser, broker or real server in a run without their tests."""
    left_out = _WHOLE_FOLDERS.get(collection_path.relative_to(Path(__file__).parent).as_posix())
    return True if left_out and left_out in config.option.markexpr else None


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Put tests of Spark first, so that one worker has all of them, and the only Java.

    Workers of pytest-xdist begin with neighbouring tests, and take over the last tests of other workers.
    """
    items.sort(key=lambda item: Path(__file__).parent / "spark" not in item.path.parents)


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Iterator[None]:
    """Collect tests without garbage collections, which took a quarter of that time."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.enable()


def pytest_collection_finish() -> None:
    """Freeze thousands of collected tests, so that no later garbage collection visits them."""
    gc.collect()
    gc.freeze()


@pytest.fixture(scope="session", autouse=True)
def _roots_of_commands(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Let a command without `--root` make its root in the tests' folders: it would outlive the storage of its test."""
    with pytest.MonkeyPatch.context() as patched:
        patched.setenv("XDG_STATE_HOME", str(tmp_path_factory.mktemp("state")))
        yield


@pytest.fixture(autouse=True)
def logging_as_it_was() -> Iterator[None]:
    """Restore the loggers that a command line sets up for its process, because other tests read their records."""
    loggers = [logging.getLogger(name) for name in ("tiered_index", "tiered_index.storage.retry")]
    before = [(logger.level, logger.propagate, list(logger.handlers), list(logger.filters)) for logger in loggers]
    yield
    for logger, (level, propagate, handlers, filters) in zip(loggers, before, strict=True):
        logger.setLevel(level)  # this also clears the levels that its children have cached
        logger.propagate, logger.handlers[:], logger.filters[:] = propagate, handlers, filters


@pytest.fixture(scope="session")
def server() -> Iterator[S3Server]:
    """An S3 server per test process. It starts when the first test needs it. Each test has its own buckets."""
    import botocore.session

    from tests.support.s3_server import s3_server

    # Hundreds of tests make clients. They share one parse of the services' descriptions, some MB of JSON.
    botocore.session.create_loader = functools.cache(botocore.session.create_loader)
    with s3_server() as running:
        yield running


@pytest.fixture
def s3_environment(server: S3Server, monkeypatch: pytest.MonkeyPatch) -> S3Server:
    server.let_in(monkeypatch)
    return server


@pytest.fixture
def eager_switches() -> Iterator[None]:
    """Switch threads five hundred times as often as usual."""
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    yield
    sys.setswitchinterval(before)
