"""Loads the compiled modules of a package in a zip file, which Spark's executors get by `--ship`.

The system can load a compiled module only from a file, so the module is unpacked first. Only `kernels` uses this.
"""

from __future__ import annotations

import sys
import tempfile
from importlib import machinery, util
from pathlib import Path
from types import ModuleType
from zipimport import zipimporter


def load(archive: zipimporter, name: str) -> ModuleType:
    """Load module `name` (``package.module``) from a zip file. Raises `ImportError` if none fits this Python."""
    place = Path(archive.archive, *name.split("."))
    for suffix in machinery.EXTENSION_SUFFIXES:
        try:
            data = archive.get_data(f"{place}{suffix}")
            break
        except OSError:
            continue
    else:
        raise ImportError(f"{archive.archive} has no {name} for this Python, *{machinery.EXTENSION_SUFFIXES[0]}")
    # a loaded module no longer needs its file
    with tempfile.TemporaryDirectory(prefix="tiered-index-") as folder:
        path = Path(folder, place.name)
        try:
            path.write_bytes(data)
        except OSError as error:
            raise ImportError(f"{name} can't be unpacked: {error}") from error
        loader = machinery.ExtensionFileLoader(name, str(path))
        spec = util.spec_from_file_location(name, path, loader=loader)
        assert spec is not None
        module = sys.modules[name] = util.module_from_spec(spec)
        try:
            loader.exec_module(module)
        except BaseException:
            del sys.modules[name]
            raise
    return module
