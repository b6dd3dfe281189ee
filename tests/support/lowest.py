"""The lowest versions that pyproject.toml allows, as constraints of pip: `python -m tests.support.lowest`.

What the library needs at run time is held to its lowest version. Packages that only tests need, and packages that no
line of pyproject.toml names, are as in requirements.lock, unless a low version decides about them.
"""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

__all__ = ["constraints"]

TOP = Path(__file__).resolve().parents[2]
_RUNTIME_EXTRAS = ("fast", "server")
# these follow from a package that is held to its lowest version
_FOLLOWING = {"botocore", "s3transfer", "pydantic-core", "typing-inspection", "starlette", "llvmlite", "annotated-doc"}
_NAME = re.compile(r"[A-Za-z0-9._-]+")


def constraints() -> list[str]:
    """Return one line a package."""
    project = tomllib.loads((TOP / "pyproject.toml").read_text())["project"]
    extras = project["optional-dependencies"]
    lowest = {}
    for requirement in [*project["dependencies"], *(one for extra in _RUNTIME_EXTRAS for one in extras[extra])]:
        found = re.match(r"([A-Za-z0-9._-]+)(?:\[.*\])?\s*>=\s*([0-9.]+)", requirement)
        assert found is not None, f"{requirement} declares no lowest version"
        lowest[_normal(found[1])] = f"{found[1]}=={found[2]}"
    locked = [line for line in (TOP / "requirements.lock").read_text().splitlines() if line and line[0] != "#"]
    rest = [line for line in locked if _normal(_NAME.match(line)[0]) not in lowest.keys() | _FOLLOWING]  # type: ignore[index]
    return [*lowest.values(), *rest]


def _normal(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


if __name__ == "__main__":
    print("\n".join(constraints()))
