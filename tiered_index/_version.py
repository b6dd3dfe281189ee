"""The version of this program, with the commit where it is known: every file that it makes has it.

A wheel has it as text (`setup.py`). A clone reads the commit from its repository, so that it is always the present one.
A source tree without either has the release alone.
"""

from __future__ import annotations

from pathlib import Path

RELEASE = "0.1.0"
_DIGITS = 12


def version_of(top: Path) -> str:
    """Return the version of the source tree in folder `top`."""
    try:
        commit = _commit(top / ".git")
    except (OSError, ValueError):
        return RELEASE
    return f"{RELEASE}+g{commit[:_DIGITS]}" if set(commit) <= set("0123456789abcdef") and commit else RELEASE


def _commit(git: Path) -> str:
    """Return the commit of a repository; empty where it has none. Raises `OSError`, `ValueError` where it isn't one."""
    if git.is_file():  # of a work tree
        git = git.parent / git.read_text().removeprefix("gitdir:").strip()
    head = (git / "HEAD").read_text().strip()
    if not head.startswith("ref: "):
        return head
    name = head.removeprefix("ref: ")
    shared = git / "commondir"
    main = git / shared.read_text().strip() if shared.is_file() else git
    if (main / name).is_file():
        return (main / name).read_text().strip()
    lines = (main / "packed-refs").read_text().splitlines()
    return next((line.split()[0] for line in lines if line.endswith(f" {name}")), "")


__version__ = version_of(Path(__file__).parent.parent)
