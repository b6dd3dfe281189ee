"""Spark sessions: open one, ship this package to its executors, register the data sources.

Workers run the driver's interpreter unless `PYSPARK_PYTHON` or `spark.pyspark.python` is set. Driver only.
"""

from __future__ import annotations

import atexit
import contextlib
import importlib
import logging
import os
import re
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable, Iterator, Mapping
from importlib.machinery import EXTENSION_SUFFIXES
from pathlib import Path
from typing import TYPE_CHECKING, Any

import tiered_index
from tiered_index.errors import ConfigError, install_hint
from tiered_index.spark.failures import show_sentences_first
from tiered_index.spark.versions import check_classic, check_version, check_workers

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

_OLDEST_JAVA = 17
_ADVICE = "install Java 17 or 21 (Debian: openjdk-17-jre-headless or openjdk-21-jre-headless) or set JAVA_HOME to it"
_SETTINGS = {
    # rows of a batch for Python, if they do not exceed maxBytesPerBatch: ten times the default saves a fifth of time
    "spark.sql.execution.arrow.maxRecordsPerBatch": "100000",
    # the commands show their own progress
    "spark.ui.showConsoleProgress": "false",
}
# Java's default collector takes a tenth more CPU time for a build, and Spark hangs if one of its threads had no memory
_JAVA = {"spark.driver.defaultJavaOptions": "-XX:+UseParallelGC -XX:+ExitOnOutOfMemoryError"}
_JAVA_VARIABLES = ("SPARK_SUBMIT_OPTS", "PYSPARK_SUBMIT_ARGS", "JAVA_TOOL_OPTIONS", "JDK_JAVA_OPTIONS", "_JAVA_OPTIONS")


def open_session(
    master: str | None = None, *, app_name: str = "tiered_index", settings: Mapping[str, str] | None = None
) -> SparkSession:
    """Return the running Spark session, or start one, with Spark's `settings`.

    `master` None: as configured, else all cores. Raises `ConfigError` if PySpark (the extra ``spark``) or Java is
    missing or too old.
    """
    check_pyspark()
    from pyspark.errors import PySparkException
    from pyspark.sql import SparkSession

    if SparkSession.getActiveSession() is None:
        check_java()
    os.environ.setdefault("PYSPARK_PYTHON", (settings or {}).get("spark.pyspark.python", sys.executable))
    builder = SparkSession.builder.appName(app_name)
    if master is not None:
        builder = builder.master(master)
    of_java = {} if _has_options_of_java(settings or {}) else _JAVA
    for name, value in {**_SETTINGS, **of_java, **(settings or {})}.items():
        builder = builder.config(name, value)
    try:
        return builder.getOrCreate()
    except PySparkException as error:
        raise ConfigError(f"Spark does not start: {error}") from error


def _has_options_of_java(settings: Mapping[str, str]) -> bool:
    """Return whether the user gives options to Java. They may choose a collector, and Java refuses two."""
    home = os.environ.get("SPARK_HOME") or importlib.import_module("pyspark").__path__[0]
    folder = Path(os.environ.get("SPARK_CONF_DIR") or Path(home) / "conf")
    texts = list(settings)
    for name in ("spark-defaults.conf", "spark-env.sh"):
        with contextlib.suppress(OSError):
            texts.append((folder / name).read_text(errors="replace"))
    if any(map(os.environ.get, _JAVA_VARIABLES)):
        return True
    return any(name in text for name in ("JavaOptions", *_JAVA_VARIABLES) for text in texts)


def check_pyspark() -> None:
    """Raise `ConfigError` if PySpark is missing or too old."""
    try:
        importlib.import_module("pyspark.sql")
    except ImportError as error:
        raise ConfigError(f"PySpark is not installed: {install_hint('spark')}") from error
    check_version("PySpark", str(getattr(importlib.import_module("pyspark"), "__version__", "")))


def check_java() -> None:
    """Raise `ConfigError` if the Java that Spark would start is missing or too old."""
    home = os.environ.get("JAVA_HOME")
    java = str(Path(home) / "bin" / "java") if home else "java"
    if shutil.which(java) is None:
        raise ConfigError(f"Spark needs Java, and there is no {java}: {_ADVICE}")
    try:
        answer = subprocess.run([java, "-version"], capture_output=True, text=True, timeout=60, check=False)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise ConfigError(f"Spark needs Java, and {java} does not run ({error}): {_ADVICE}") from error
    text = answer.stderr + answer.stdout
    version = re.search(r'version "(?:1\.)?([0-9]+)', text)
    if version is None:
        raise ConfigError(f"Spark needs Java, and {java} -version says {text[:200]!r}: {_ADVICE}")
    if int(version[1]) < _OLDEST_JAVA:
        raise ConfigError(f"Spark needs Java 17 or 21, and {java} is Java {version[1]}: {_ADVICE}")


def pack_package(target: Path) -> Path:
    """Write the package's modules as a zip file, with the same bytes for the same modules; return `target`.

    It includes compiled modules: an executor with the same Python and system uses them, others ignore them.
    """
    folder = Path(tiered_index.__file__).parent
    with zipfile.ZipFile(target, "w", zipfile.ZIP_DEFLATED) as packed:
        compiled = [path for suffix in EXTENSION_SUFFIXES for path in folder.rglob(f"*{suffix}")]
        for module in sorted({*folder.rglob("*.py"), *compiled}):
            # the default time of ZipInfo is constant
            info = zipfile.ZipInfo(f"{folder.name}/{module.relative_to(folder).as_posix()}")
            packed.writestr(info, module.read_bytes())
    return target


def ship_package(spark: SparkSession) -> None:
    """Send the package to the present and future executors of a session. Once for a session is enough.

    Raises `ConfigError` for a session of Spark Connect.
    """
    check_classic(spark)
    folder = tempfile.mkdtemp(prefix="tiered-index-")
    # executors fetch the file from the driver when they start, so it stays until the driver ends
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    spark.sparkContext.addPyFile(str(pack_package(Path(folder) / "tiered_index.zip")))


_log = logging.getLogger(__name__)
_LEAST_FAILURES = 4


def register(spark: SparkSession) -> None:
    """Register the formats ``tiered_index`` and ``rocketmq_commitlog`` and the table function ``tiered_index_lookup``.

    From then on the text of a task's error of this package starts with its sentence. Idempotent. Raises `ConfigError`
    if PySpark is missing or too old, or if Spark's workers can't run the package. Logs a warning if writes may fail
    because of Spark's speculation.
    """
    check_pyspark()
    check_workers(spark)
    from pyspark.sql.functions import udtf

    from tiered_index.spark.datasource.entries import EntrySource
    from tiered_index.spark.datasource.lookup_function import NAME, LookupFunction
    from tiered_index.spark.datasource.messages import CommitLogDataSource

    with _active(spark):
        spark.dataSource.register(EntrySource)
        spark.dataSource.register(CommitLogDataSource)
        function: Any = udtf(LookupFunction)
        spark.udtf.register(NAME, function)
    show_sentences_first(spark)
    warn_of_denials(lambda name, default: str(spark.conf.get(name, default)))


@contextlib.contextmanager
def _active(spark: SparkSession) -> Iterator[None]:
    """Make a session the active one during the block: Spark looks there whether a name is already registered."""
    jvm: Any = getattr(spark, "_jvm", None)
    if jvm is None:
        yield  # Spark Connect looks in the session itself
        return
    sessions = jvm.org.apache.spark.sql.classic.SparkSession
    before = sessions.getActiveSession()
    sessions.setActiveSession(spark._jsparkSession)
    try:
        yield
    finally:
        sessions.setActiveSession(before.get()) if before.isDefined() else sessions.clearActiveSession()


def warn_of_denials(get: Callable[[str, str], str]) -> None:
    """Log a warning if speculation may fail a write; `get` (name, default) reads the settings.

    Spark counts the denied commit of a speculated copy as a failure of the task; the source can't prevent it.
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
