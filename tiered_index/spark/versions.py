"""The sessions and versions of Spark that jobs can run on, and the version of this package. Driver and executors."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

from tiered_index.base.version import RELEASE
from tiered_index.errors import ConfigError

OLDEST = (4, 0)
"""The first version that runs jobs and data sources."""
OLDEST_OF_STREAMS = (4, 1)
"""The first version whose streams pass batches of Arrow to a data source."""


def is_connect(spark: object) -> bool:
    """Return whether a session is one of Spark Connect, which has no Spark context."""
    return any(kind.__module__.startswith("pyspark.sql.connect.") for kind in type(spark).__mro__)


def check_classic(spark: object) -> None:
    """Raise `ConfigError` for a session of Spark Connect, and for an old Spark."""
    if is_connect(spark):
        raise ConfigError(
            "this is a session of Spark Connect, and a classic one is needed: run it as a job of the cluster "
            "(spark-submit, or tiered-index spark ...), or use the data source: register(spark), then spark.read and "
            "df.write of format tiered_index"
        )
    check_version("Spark", str(getattr(spark, "version", "")))
    if str(getattr(getattr(spark, "sparkContext", None), "master", "")).startswith("local"):
        check_workers(spark)


def check_workers(spark: object) -> None:
    """Raise `ConfigError` if the workers of the driver's host would run a Python that can't run this package.

    Without PYSPARK_PYTHON they run the `python3` of PATH. Another interpreter than the driver's is started once to ask.
    """
    if is_connect(spark) or os.environ.get("PYSPARK_PYTHON"):
        return
    name = str(spark.sparkContext.pythonExec)  # type: ignore[attr-defined]
    program = shutil.which(name)
    if program is not None and Path(program).parent == Path(sys.executable).parent:
        return
    program_text = "import sys; print(*sys.version_info[:2], sep='.'); import tiered_index"
    here, there, problem = "{}.{}".format(*sys.version_info[:2]), "", f"there is no {name}"
    if program is not None:
        done = subprocess.run([program, "-c", program_text], capture_output=True, text=True, timeout=60, check=False)
        there, problem = done.stdout.strip(), f"{program} can't import tiered_index"
        if done.returncode == 0 and there == here:
            return
    if there not in ("", here):
        problem = f"{program} is Python {there}, and this is {here}"
    raise ConfigError(
        f"Spark's workers can't run this package, since {problem}: set PYSPARK_PYTHON={sys.executable} before the "
        "session starts, or start it by tiered_index.spark.open_session"
    )


def check_version(what: str, version: str, least: tuple[int, int] = OLDEST) -> None:
    """Raise `ConfigError` if a version is older than `least`; a version without numbers passes."""
    numbers = re.match(r"(\d+)\.(\d+)", version)
    if numbers is not None and (int(numbers[1]), int(numbers[2])) < least:
        oldest = ".".join(map(str, least))
        needed = "streams into an index need" if least == OLDEST_OF_STREAMS else "this package needs"
        raise ConfigError(
            f"{what} {version} is too old: {needed} {oldest} or later, on driver and executors: "
            f"pip install 'pyspark[sql]>={oldest}', and a cluster of that version"
        )


class DriverVersion:
    """The version of this package on the driver, which tasks get. Executors with another one can't unpickle it."""

    def __reduce__(self) -> tuple[Callable[[str], DriverVersion], tuple[str]]:
        return same_version, (RELEASE,)


DRIVER_VERSION = DriverVersion()


def same_version(of_driver: str) -> DriverVersion:
    """Return `DRIVER_VERSION`, or raise `ConfigError` if the driver has another version of this package than here."""
    if of_driver != RELEASE:
        raise ConfigError(
            f"the driver has tiered-index {of_driver}, and an executor {RELEASE}: install one version on all hosts, or "
            "let the driver send its own by --ship (tiered_index.spark.session.ship_package)"
        )
    return DRIVER_VERSION
