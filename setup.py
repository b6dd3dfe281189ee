"""What pyproject.toml can't say: the version has the commit, which a wheel holds as text."""

from __future__ import annotations

import os
import runpy
from pathlib import Path

from setuptools import setup
from setuptools.command.build_py import build_py

_SOURCE = Path(__file__).parent / "tiered_index" / "_version.py"
_read = runpy.run_path(str(_SOURCE))
# an image is built without the repository, and is told the commit
_COMMIT = os.environ.get("TIERED_INDEX_COMMIT", "")
_VERSION = f"{_read['RELEASE']}+g{_COMMIT[:12]}" if _COMMIT else _read["__version__"]


class BuildWithVersion(build_py):
    """Writes the version into the built package."""

    def run(self) -> None:
        """Build, then replace the module that looks for a repository."""
        super().run()
        if not self.editable_mode:
            built = Path(self.build_lib) / "tiered_index" / "_version.py"
            built.write_text(f'"""The version of this program."""\n\n__version__ = "{_VERSION}"\n')


setup(version=_VERSION, cmdclass={"build_py": BuildWithVersion})
