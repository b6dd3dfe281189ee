"""The lowest versions that pyproject.toml declares, as lines for pip.

`python -m tests.support.lowest > FILE` writes constraints for `make test-lowest`: the lowest versions of the library's
dependencies, of the service's and of PySpark, and the packages of tests as in requirements.lock.
"""

import re
import tomllib
from pathlib import Path
from typing import Any

TOP = Path(__file__).resolve().parents[2]
_OF_TESTS = ("pytest", "pytest-xdist", "hypothesis", "httpx", "cryptography", "duckdb", "moto")


def _lowest(requirements: list[str]) -> dict[str, str]:
    """Return the lowest version of each package."""
    lowest = {}
    for requirement in requirements:
        match = re.match(r"([\w.-]+)(?:\[.*\])?\s*>=\s*([0-9.]+)", requirement)
        assert match is not None, f"{requirement} declares no lowest version"
        lowest[match[1]] = match[2]
    return lowest


def constraints() -> list[str]:
    """Return one line per package."""
    project: dict[str, Any] = tomllib.loads((TOP / "pyproject.toml").read_text())["project"]
    locked = dict(re.findall(r"^([\w.-]+)==(\S+)", (TOP / "requirements.lock").read_text(), re.M))
    extras = project["optional-dependencies"]
    versions = _lowest([*project["dependencies"], *extras["fast"], *extras["server"], *extras["spark"]])
    versions |= {name: locked[name] for name in _OF_TESTS}
    return [f"{name}=={version}" for name, version in versions.items()]


if __name__ == "__main__":
    print("\n".join(constraints()))
