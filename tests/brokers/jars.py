"""Jars of real brokers, which Maven fetches by a pom of this tree, once a version, into `build/brokers`.

A pom has its broker's version as the property `broker.version`. `REQUIRED` in the environment makes a test fail where
it would be skipped for want of Maven, Java or the jars. As a program it prints the line that says what is missing here.
"""

from __future__ import annotations

import fcntl
import os
import shutil
import subprocess
import tempfile
from pathlib import Path

import pytest

FOLDER = Path(__file__).parents[2] / "build" / "brokers"
REQUIRED = "TIERED_INDEX_TEST_REQUIRE_BROKERS"
_POM = "pom.xml"
_FETCH_S = 300


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
    problem = missing_programs()
    if problem is None:
        folder = FOLDER / f"{name}-{version}"
        problem = _fetch(pom, folder, version)
        if problem is None:
            return f"{folder}/*"
    if is_required():
        pytest.fail(problem, pytrace=False)
    pytest.skip(problem)


def _fetch(pom: Path, folder: Path, version: str) -> str | None:
    """Fetch jars into a folder, unless they are there by the same pom; return why they can't be had."""
    FOLDER.mkdir(parents=True, exist_ok=True)
    with (FOLDER / f"{folder.name}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if (folder / _POM).exists() and (folder / _POM).read_bytes() == pom.read_bytes():
            return None
        with tempfile.TemporaryDirectory(dir=FOLDER) as fetched:
            command = ["mvn", "-q", "-B", "-f", str(pom), f"-Dbroker.version={version}"]
            command += ["dependency:copy-dependencies", f"-DoutputDirectory={fetched}/jars"]
            try:
                done = subprocess.run(command, capture_output=True, text=True, timeout=_FETCH_S, check=False)
            except subprocess.TimeoutExpired:
                return f"Maven did not fetch {folder.name} within {_FETCH_S} seconds"
            if done.returncode != 0:
                lines = (done.stdout + done.stderr).strip().splitlines()
                return f"Maven can't fetch {folder.name}: {lines[0] if lines else 'it says nothing'}"
            shutil.copy(pom, f"{fetched}/jars/{_POM}")
            shutil.rmtree(folder, ignore_errors=True)
            Path(f"{fetched}/jars").rename(folder)
    return None


if __name__ == "__main__":
    print(missing_programs() or "")
