"""Makes the project's data sources known to a Spark session."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

from tiered_index.errors import ConfigError

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

__all__ = ["register", "scans_are_apart", "warn_of_denials"]

_log = logging.getLogger(__name__)
_LEAST_FAILURES = 4
_PUSHDOWN = "spark.sql.python.filterPushdown.enabled"
_SOURCE = "org.apache.spark.sql.execution.datasources.v2.python.PythonDataSourceV2"


def register(spark: SparkSession) -> None:
    """Make the formats ``tiered_index`` and ``rocketmq_commitlog`` known to a session, with filters pushed. Idempotent.

    Raises `ConfigError` without PySpark 4.2. Logs a warning where a write could fail because Spark speculates.
    """
    try:
        from tiered_index.spark.datasource.entries import ApartEntrySource, EntrySource
        from tiered_index.spark.datasource.stream import MessageSource
    except ImportError as error:
        raise ConfigError(
            f"data sources need PySpark 4.2 or later: pip install 'tiered_index[spark]' ({error})"
        ) from error

    with _active(spark):
        spark.dataSource.register(ApartEntrySource if scans_are_apart(spark) else EntrySource)
        spark.dataSource.register(MessageSource)
    if spark.conf.isModifiable(_PUSHDOWN):
        spark.conf.set(_PUSHDOWN, "true")
    warn_of_denials(lambda name, default: str(spark.conf.get(name, default)))


@contextlib.contextmanager
def _active(spark: SparkSession) -> Iterator[None]:
    """Make a session the active one: Spark refuses a name that the active session knows already."""
    jvm: Any = getattr(spark, "_jvm", None)
    if jvm is None:
        yield  # of Spark Connect: there each session is asked by itself
        return
    sessions = jvm.org.apache.spark.sql.classic.SparkSession
    before = sessions.getActiveSession()
    sessions.setActiveSession(spark._jsparkSession)
    try:
        yield
    finally:
        sessions.setActiveSession(before.get()) if before.isDefined() else sessions.clearActiveSession()


def warn_of_denials(get: Callable[[str, str], str]) -> None:
    """Log a warning where speculation may fail a write; `get` reads the settings.

    Spark counts a speculated copy's denied commit as a failure of the task; the source can't prevent it.
    """
    failures = int(get("spark.task.maxFailures", str(_LEAST_FAILURES)))
    if get("spark.speculation", "false").lower() == "true" and failures < _LEAST_FAILURES:
        _log.warning(
            "spark.speculation is on and spark.task.maxFailures is %d: Spark counts speculated attempts that it denies "
            "their commit as failures, so writes to format tiered_index may fail, with nothing published; set it to %d "
            "or more, or speculation off",
            failures,
            _LEAST_FAILURES,
        )


def scans_are_apart(spark: SparkSession) -> bool:
    """Return whether this Spark keeps what a Python reader planned with the scan; up to 4.3.0, with the DataFrame.

    There the class of a loaded source has a method by which the last plan replaces the one before.
    """
    jvm: Any = getattr(spark, "_jvm", None)
    if jvm is None:
        return False  # Spark Connect doesn't show
    methods = jvm.java.lang.Thread.currentThread().getContextClassLoader().loadClass(_SOURCE).getMethods()
    return all(method.getName() != "setReadInfo" for method in methods)
