"""Jars of real brokers, which Maven fetches by a pom of this tree, once a version, into `build/brokers`, other versions
of PySpark, which pip installs there, and jars of Spark's connectors, which Spark fetches.

A pom has its version as the property `broker.version`. `REQUIRED` in the environment makes a test fail where it would
be skipped for want of Maven, Java, the jars or PySpark. As a program it prints the line that says what is missing here.
"""

from __future__ import annotations

import fcntl
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

import pytest

FOLDER = Path(__file__).parents[2] / "build" / "brokers"
REQUIRED = "TIERED_INDEX_TEST_REQUIRE_BROKERS"
_FETCH_S, _INSTALL_S = 300, 900
_MADE_OF = "made-of.txt"
_HERE = "{folder}"


def is_required() -> bool:
    """Return whether tests of brokers must run here."""
    return bool(os.environ.get(REQUIRED))


def missing_programs() -> str | None:
    """Return the line that says which program is missing here; None: there are all."""
    lacking = [name for name in ("mvn", "java") if shutil.which(name) is None]
    if not lacking:
        return None
    return f"real brokers need Maven and Java 17 (Debian: apt-get install maven); not found: {', '.join(lacking)}"


def class_path(pom: Path, name: str, version: str) -> str:
    """Return the class path of a broker's jars, and fetch them if they are not there.

    Skips the test if they can't be had, or fails it if `REQUIRED` is set.
    """
    folder = FOLDER / f"{name}-{version}"
    command = ["mvn", "-q", "-B", "-f", str(pom), f"-Dbroker.version={version}"]
    command += ["dependency:copy-dependencies", f"-DoutputDirectory={_HERE}"]
    _must_be_had(missing_programs() or _fetch(folder, pom.read_text(), command, _FETCH_S))
    return f"{folder}/*"


def pyspark_folder(version: str) -> Path:
    """Return a folder for PYTHONPATH with a PySpark of a version, and install it if it is not there.

    The other packages are those of the virtualenv. Skips the test if it can't be had, or fails it if `REQUIRED` is set.
    """
    folder, wanted = FOLDER / f"pyspark-{version}", f"pyspark=={version}"
    command = [sys.executable, "-m", "pip", "install", "-q", "--disable-pip-version-check", "--no-compile"]
    _must_be_had(_fetch(folder, wanted, [*command, "--target", _HERE, wanted], _INSTALL_S))
    return folder


# a session whose settings are arguments
_SESSION = """
import os, sys
folder, packages, jars = sys.argv[1:]
sys.path[:0] = [folder] if folder else []
from pyspark.sql import SparkSession
settings = {"spark.jars.packages": packages, "spark.jars.ivy": jars, "spark.ui.enabled": "false"}
SparkSession.builder.master("local[1]").config(map=settings).getOrCreate().stop()
"""


def jars_of(packages: str, version: str | None) -> Path:
    """Return the folder of `spark.jars.ivy` in which the jars of `spark.jars.packages` are, and fetch them.

    `version` is of PySpark; None: the virtualenv's. Skips the test if they can't be had, or fails it as above.
    """
    folder = FOLDER / f"jars-{packages.rpartition(':')[0].rpartition(':')[2]}-{version or 'newest'}"
    spark = "" if version is None else str(pyspark_folder(version))
    command = [sys.executable, "-c", _SESSION, spark, packages, _HERE]
    _must_be_had(missing_programs() or _fetch(folder, packages, command, _FETCH_S))
    return folder


def _must_be_had(problem: str | None) -> None:
    if problem is not None and is_required():
        pytest.fail(problem, pytrace=False)
    if problem is not None:
        pytest.skip(problem)


def _fetch(folder: Path, made_of: str, command: Sequence[str], within_s: int) -> str | None:
    """Fill a folder by a command, unless it was made of the same text; return why that failed."""
    FOLDER.mkdir(parents=True, exist_ok=True)
    with (FOLDER / f"{folder.name}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if (mark := folder / _MADE_OF).exists() and mark.read_text() == made_of:
            return None
        with tempfile.TemporaryDirectory(dir=FOLDER) as new:
            (filled := Path(new) / "filled").mkdir()
            here = [part.replace(_HERE, str(filled)) for part in command]
            try:
                done = subprocess.run(here, capture_output=True, text=True, timeout=within_s, check=False)
            except subprocess.TimeoutExpired:
                return f"{folder.name} was not fetched within {within_s} seconds"
            if done.returncode != 0:
                lines = (done.stdout + done.stderr).strip().splitlines()
                problem = next((line for line in lines if "ERROR" in line), "the command names no error")
                return f"{folder.name} can't be fetched: {problem}"
            (filled / _MADE_OF).write_text(made_of)
            shutil.rmtree(folder, ignore_errors=True)
            filled.rename(folder)
    return None


if __name__ == "__main__":
    print(missing_programs() or "")
