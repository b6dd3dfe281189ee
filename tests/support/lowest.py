"""The lowest versions that pyproject.toml declares for the library, as constraints of pip.

    python -m tests.support.lowest > FILE

Packages that only tests need have the versions of requirements.lock. `make test-lowest` uses it.
"""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

TOP = Path(__file__).resolve().parents[2]
_OF_TESTS = ("pytest", "pytest-xdist", "hypothesis")


def constraints() -> list[str]:
    """Return one line per package."""
    project = tomllib.loads((TOP / "pyproject.toml").read_text())["project"]
    lines = []
    for requirement in [*project["dependencies"], *project["optional-dependencies"]["fast"]]:
        match = re.match(r"([\w.-]+)(?:\[.*\])?\s*>=\s*([0-9.]+)", requirement)
        assert match is not None, f"{requirement} declares no lowest version"
        lines.append(f"{match[1]}=={match[2]}")
    locked = re.findall(r"^([\w.-]+)(==\S+)", (TOP / "requirements.lock").read_text(), re.M)
    return lines + [name + version for name, version in locked if name in _OF_TESTS]


if __name__ == "__main__":
    print("\n".join(constraints()))
