"""A Spark session for callers that have none, with this package shipped to its executors. Driver only.

Workers run the driver's interpreter unless `PYSPARK_PYTHON` or `spark.pyspark.python` says otherwise; it needs what the
package depends on. The package's modules go to every Python worker as one zip file, before any copy of its own.
"""

from __future__ import annotations

import atexit
import os
import re
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

import tiered_index
from tiered_index.errors import ConfigError

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

__all__ = ["check_java", "open_session", "pack_package", "ship_package"]

_OLDEST_JAVA = 17
_ADVICE = "install Java 17 or 21 (Debian: openjdk-17-jre-headless or openjdk-21-jre-headless) or set JAVA_HOME to it"
_SETTINGS = {
    # rows are handed to Python in batches of this many, or of maxBytesPerBatch: ten times the default saves a fifth of
    # the time
    "spark.sql.execution.arrow.maxRecordsPerBatch": "100000",
    # a line that overwrites itself is for terminals; the commands show progress of their own
    "spark.ui.showConsoleProgress": "false",
}


def open_session(
    master: str | None = None, *, app_name: str = "tiered_index", settings: Mapping[str, str] | None = None
) -> SparkSession:
    """Return the running Spark session, or start one, with Spark's `settings`; `master` None: as configured, else all
    cores.

    Raises `ConfigError` where PySpark (the extra ``spark``) or Java is missing or too old.
    """
    try:
        from pyspark.errors import PySparkException
        from pyspark.sql import SparkSession
    except ImportError as error:
        raise ConfigError("PySpark is not installed: pip install 'tiered_index[spark]'") from error

    if SparkSession.getActiveSession() is None:
        check_java()
    os.environ.setdefault("PYSPARK_PYTHON", (settings or {}).get("spark.pyspark.python", sys.executable))
    builder = SparkSession.builder.appName(app_name)
    if master is not None:
        builder = builder.master(master)
    for name, value in {**_SETTINGS, **(settings or {})}.items():
        builder = builder.config(name, value)
    try:
        return builder.getOrCreate()
    except PySparkException as error:
        raise ConfigError(f"Spark does not start: {error}") from error


def check_java() -> None:
    """Raise `ConfigError` unless the Java that Spark would start is there and not too old."""
    home = os.environ.get("JAVA_HOME")
    java = str(Path(home) / "bin" / "java") if home else "java"
    if shutil.which(java) is None:
        raise ConfigError(f"Spark needs Java, and there is no {java}: {_ADVICE}")
    try:
        answer = subprocess.run([java, "-version"], capture_output=True, text=True, timeout=60, check=False)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise ConfigError(f"Spark needs Java, and {java} does not run ({error}): {_ADVICE}") from error
    text = answer.stderr + answer.stdout
    found = re.search(r'version "(?:1\.)?([0-9]+)', text)
    if found is None:
        raise ConfigError(f"Spark needs Java, and {java} -version says {text[:200]!r}: {_ADVICE}")
    if int(found[1]) < _OLDEST_JAVA:
        raise ConfigError(f"Spark needs Java 17 or 21, and {java} is Java {found[1]}: {_ADVICE}")


def pack_package(target: Path) -> Path:
    """Write the package as a zip file of its modules, the same bytes for the same modules; return `target`."""
    folder = Path(tiered_index.__file__).parent
    with zipfile.ZipFile(target, "w", zipfile.ZIP_DEFLATED) as packed:
        for module in sorted(folder.rglob("*.py")):
            # a fixed time of change: the default of ZipInfo
            info = zipfile.ZipInfo(f"{folder.name}/{module.relative_to(folder).as_posix()}")
            packed.writestr(info, module.read_bytes())
    return target


def ship_package(spark: SparkSession) -> None:
    """Send the package to the executors of a session, those to come among them. Once a session is enough."""
    folder = tempfile.mkdtemp(prefix="tiered-index-")
    # executors fetch the file from the driver when they start, so it stays until the driver ends
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    spark.sparkContext.addPyFile(str(pack_package(Path(folder) / "tiered_index.zip")))
