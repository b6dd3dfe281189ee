"""The lowest versions that pyproject.toml declares, as lines for pip.

    python -m tests.support.lowest > FILE          constraints: of the library, for `make test-lowest`
    python -m tests.support.lowest spark > FILE    requirements: of PySpark, for `make test-spark-oldest`

All other packages have the versions of requirements.lock.
"""

from __future__ import annotations

import re
import sys
import tomllib
from pathlib import Path
from typing import Any

from deploy.locked import needed, read_lock

TOP = Path(__file__).resolve().parents[2]
_OF_TESTS = ("pytest", "pytest-xdist", "hypothesis")


def _project() -> dict[str, Any]:
    project: dict[str, Any] = tomllib.loads((TOP / "pyproject.toml").read_text())["project"]
    return project


def _lowest(requirements: list[str]) -> dict[str, str]:
    """Return the lowest version of each package."""
    lowest = {}
    for requirement in requirements:
        match = re.match(r"([\w.-]+)(?:\[.*\])?\s*>=\s*([0-9.]+)", requirement)
        assert match is not None, f"{requirement} declares no lowest version"
        lowest[match[1]] = match[2]
    return lowest


def _locked() -> dict[str, str]:
    """Return the version of each package in requirements.lock."""
    return dict(re.findall(r"^([\w.-]+)==(\S+)", (TOP / "requirements.lock").read_text(), re.M))


def constraints() -> list[str]:
    """Return one line per package."""
    project, locked = _project(), _locked()
    versions = _lowest([*project["dependencies"], *project["optional-dependencies"]["fast"]])
    versions |= {name: locked[name] for name in _OF_TESTS}
    return [f"{name}=={version}" for name, version in versions.items()]


def requirements_of_spark() -> list[str]:
    """Return one line per package that the extras `fast` and `spark` need, and per package of tests."""
    locked = _locked()
    names = needed(read_lock((TOP / "requirements.lock").read_text()), ["fast", "spark"])
    lowest = _lowest(_project()["optional-dependencies"]["spark"])["pyspark"]
    return [f"{name}=={lowest if name == 'pyspark' else locked[name]}" for name in (*names, *_OF_TESTS)]


if __name__ == "__main__":
    print("\n".join(requirements_of_spark() if sys.argv[1:] == ["spark"] else constraints()))
