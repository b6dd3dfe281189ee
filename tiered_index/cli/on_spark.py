"""`tiered-index spark ...`: the commands that run on Spark, and their common parts.

A command imports PySpark only if it needs it.
"""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Any, TypeVar

from tiered_index.cli.options import SparkOptions
from tiered_index.cli.session import Session, open_stored_index, storage_uri
from tiered_index.config import IndexConfig
from tiered_index.connectors.options import pairs
from tiered_index.spark.addresses import StorageAddress

if TYPE_CHECKING:
    from pyspark.sql import SparkSession


_STDERR = 2
T = TypeVar("T")


def check_index(config: IndexConfig) -> None:
    """Raise the errors of a job that are known before Spark starts.

    `ConfigError` if executors can't reach the storage, `NotAnIndex`, the storage's errors.
    """
    from tiered_index.spark.session import check_pyspark

    check_pyspark()
    StorageAddress(storage_uri(config), config.s3)
    with open_stored_index(config):
        pass


def spark_of(session: Session, options: SparkOptions) -> SparkSession:
    """Return the session, whose web pages a note names; with `--ship` its executors get this package from the driver.

    Raises `ConfigError` if PySpark or Java is missing, or the session is one of Spark Connect.
    """
    from tiered_index.spark.session import open_session, ship_package
    from tiered_index.spark.versions import check_classic

    with _interrupts_after(), java_apart():
        spark = open_session(options.master, settings=pairs("--conf", options.conf))
        check_classic(spark)
        spark.sparkContext.setLogLevel("ERROR")
    # py4j logs every interrupt with a traceback
    logging.getLogger().addFilter(lambda record: record.module != "java_gateway")
    logging.getLogger("py4j").setLevel(logging.CRITICAL)
    if options.ship:
        ship_package(spark)
    context = spark.sparkContext
    pages = f"its progress is at {context.uiWebUrl}" if context.uiWebUrl else "it has no web pages"
    session.out.note(f"Spark application {context.applicationId} runs: {pages}")
    return spark


@contextlib.contextmanager
def java_apart() -> Iterator[None]:
    """Redirect the stderr of the Java process that this block starts to a temporary file, unless with -v.

    Java writes warnings and the stack traces of failed tasks there, and the command reports errors itself. The file is
    printed if the block fails.
    """
    if logging.getLogger("tiered_index").isEnabledFor(logging.INFO):
        yield
        return
    sys.stderr.flush()
    # without a name: the system deletes it with the last process that writes to it
    with tempfile.TemporaryFile() as said, contextlib.ExitStack() as after:
        stderr = os.dup(_STDERR)
        after.callback(os.close, stderr)
        after.callback(os.dup2, stderr, _STDERR)
        os.dup2(said.fileno(), _STDERR)
        try:
            yield
        except BaseException:
            said.seek(0)
            os.write(stderr, said.read())
            raise


@contextlib.contextmanager
def _interrupts_after() -> Iterator[None]:
    """Block SIGINT until the block has ended, and restore Python's handler.

    A Java process that is interrupted during its start would outlive this process. Spark's own handler cancels jobs in
    the middle of a request, which ends in tracebacks of both sides.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    # blocked by the system, because Spark's context replaces any handler
    blocked = signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGINT])
    before = signal.getsignal(signal.SIGINT)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)
        signal.pthread_sigmask(signal.SIG_SETMASK, blocked)


@contextlib.contextmanager
def interrupts_first() -> Iterator[None]:
    """Raise an interrupt of the block in place of the error of a clean-up, since it breaks the connection to Java."""
    try:
        yield
    except BaseException as error:
        behind: BaseException | None = error
        while isinstance(behind, Exception):
            behind = behind.__context__
        if behind is None:
            raise
        from pyspark.sql import SparkSession

        # Java's log would report the tasks that end with it
        with contextlib.suppress(Exception):
            if (spark := SparkSession.getActiveSession()) is not None:
                spark.sparkContext.setLogLevel("OFF")
        raise behind from None


def run_job(job: Callable[..., T], *arguments: Any, **options: Any) -> tuple[T, float]:
    """Run a job; return its result and the elapsed seconds."""
    begun_s = time.monotonic()
    with interrupts_first():
        result = job(*arguments, **options)
    return result, time.monotonic() - begun_s


def of_index(config: IndexConfig) -> dict[str, Any]:
    """Return the arguments of a job for the index of `config`. Raises as `storage_uri`."""
    return {"storage": storage_uri(config), "s3": config.s3, "prices": config.prices}


def spark_columns(columns: Mapping[str, str], constants: Mapping[str, str]) -> dict[str, Any]:
    """Return the argument `columns` of `build`: names, and constants as Spark literals. Needs a session."""
    from pyspark.sql import functions as F  # noqa: N812 - what everybody calls it

    return {
        **columns,
        **{name: F.lit(value if name in ("topic", "key") else int(value)) for name, value in constants.items()},
    }
