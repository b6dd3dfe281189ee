"""Prints lines of requirements.lock. `deploy/install.sh` gives them to pip.

    python deploy/locked.py hashes EXTRA ...   the packages that these extras of pyproject.toml need, with their hashes
    python deploy/locked.py pins               every package with its version, without hashes, as constraints

Comments of the lock say which packages need a package ("via"): they lead from an extra to all that it needs.
"""

from __future__ import annotations

import re
import sys
import tomllib
from pathlib import Path

TOP = Path(__file__).resolve().parent.parent
_NAME = re.compile(r"[A-Za-z0-9._-]+")


def _normal(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def read_lock(text: str) -> dict[str, tuple[str, set[str]]]:
    """Return, by package, its lines without comments, and the packages that need it."""
    packages = {}
    for block in re.split(r"^(?=[A-Za-z0-9])", text, flags=re.M)[1:]:
        lines = block.splitlines()
        needed_by = {
            _normal(name)
            for line in lines
            if line.lstrip().startswith("#")
            for name in re.sub(r"\(.*\)|# +via|#", "", line).split()
        }
        name = _NAME.match(block)
        assert name is not None
        packages[_normal(name[0])] = "\n".join(line for line in lines if line.strip()[:1] not in ("#", "")), needed_by
    return packages


def needed(packages: dict[str, tuple[str, set[str]]], extras: list[str]) -> list[str]:
    """Return the names of all packages that tiered_index with `extras` needs."""
    project = tomllib.loads((TOP / "pyproject.toml").read_text())["project"]
    of_extras = [requirement for extra in extras for requirement in project["optional-dependencies"][extra]]
    requirements = [*project["dependencies"], *of_extras]
    names = {_normal(match[0]) for requirement in requirements if (match := _NAME.match(requirement))}
    while more := {name for name, (_, needed_by) in packages.items() if needed_by & names} - names:
        names |= more
    return sorted(names & packages.keys())


if __name__ == "__main__":
    locked = read_lock((TOP / "requirements.lock").read_text())
    if sys.argv[1] == "hashes":
        print(*(locked[name][0] for name in needed(locked, sys.argv[2:])), sep="\n")
    else:
        print(*(text.split(" \\")[0] for text, _ in locked.values()), sep="\n")
