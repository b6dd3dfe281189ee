"""Adds the commit to the version, and writes it into wheels and source distributions."""

from __future__ import annotations

import os
import runpy
from pathlib import Path

from setuptools import setup
from setuptools.command.build_py import build_py
from setuptools.command.sdist import sdist

_SOURCE = Path(__file__).parent / "tiered_index" / "base" / "version.py"
_read = runpy.run_path(str(_SOURCE))
# an image build has no repository: it passes the commit
_COMMIT = os.environ.get("TIERED_INDEX_COMMIT", "")
_VERSION = f"{_read['RELEASE']}+g{_COMMIT[:12]}" if _COMMIT else _read["__version__"]


def _write_version(top: Path) -> None:
    """Replace the module that looks for a repository."""
    built = top / "tiered_index" / "base" / "version.py"
    # it may be a hard link to the source
    built.unlink()
    built.write_text(f'"""The version of this program."""\n\nRELEASE = __version__ = "{_VERSION}"\n')


class BuildWithVersion(build_py):
    """Writes the version into the built package."""

    def run(self) -> None:
        """Build, then write the version."""
        super().run()
        if not self.editable_mode:
            _write_version(Path(self.build_lib))


class SourceWithVersion(sdist):
    """Writes the version into the source distribution, which has no repository."""

    def make_release_tree(self, base_dir: str, files: list[str]) -> None:
        """Make the tree, then write the version."""
        super().make_release_tree(base_dir, files)
        _write_version(Path(base_dir))


setup(version=_VERSION, cmdclass={"build_py": BuildWithVersion, "sdist": SourceWithVersion})
