"""The version of this package: the release, and the commit if it is known. Each file that it writes names it.

`setup.py` writes the version into a wheel. A clone reads the present commit from its repository. Any other source tree
has only the release.
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
    """Return the commit of a git folder, or an empty text. Raises `OSError` or `ValueError` for any other folder."""
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


__version__ = version_of(Path(__file__).parents[2])
