"""Loads the compiled modules of a package that is imported from a zip file, as Spark's executors get it by `--ship`.

The system maps a compiled module from a file of its own, so it is unpacked. Imported by `kernels` alone, where it is
needed.
"""

from __future__ import annotations

import sys
import tempfile
from importlib import machinery, util
from pathlib import Path
from types import ModuleType
from zipimport import zipimporter


def load(archive: zipimporter, name: str) -> ModuleType:
    """Return module `name` (``package.module``). Raises `ImportError`: no module there fits this Python and system."""
    place = Path(archive.archive, *name.split("."))
    for suffix in machinery.EXTENSION_SUFFIXES:
        try:
            data = archive.get_data(f"{place}{suffix}")
            break
        except OSError:
            continue
    else:
        raise ImportError(f"{archive.archive} has no {name} for this Python, *{machinery.EXTENSION_SUFFIXES[0]}")
    # a loaded module needs its file no more
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
