"""Loads the compiled core, and the fastest CRC32 and compression that are installed.

The core has two modules: `tiered_index.base._core` has loops over entries, `tiered_index.base._views` has lookups in
files. For each loop there is NumPy code that returns the same bytes. It is used if the core could not be built, for
example without a C compiler. The log says so once per process; as a warning if the package was shipped in a zip file.
"""

from __future__ import annotations

import gzip
import importlib
import logging
import zlib
from typing import TYPE_CHECKING, Any

crc32: Callable[..., int]
GzipFile: Callable[..., Any]
"""As `gzip.GzipFile`; `gzip_error` is one more error of damaged files."""
gzip_error: Any
_compress: Callable[..., bytes]
_inflater: Callable[..., Any]
try:  # 10 and 5 times as fast as zlib's from some hundred bytes on, and 3 times as fast to decompress
    from isal import igzip, isal_zlib

    crc32, _compress, GzipFile, gzip_error = isal_zlib.crc32, isal_zlib.compress, igzip.IGzipFile, isal_zlib.error
    _inflater = isal_zlib.decompressobj
except ImportError:
    crc32, _compress, GzipFile, gzip_error = zlib.crc32, zlib.compress, gzip.GzipFile, zlib.error
    _inflater = zlib.decompressobj

if TYPE_CHECKING:
    from collections.abc import Callable
    from types import ModuleType

__all__ = ["GzipFile", "compiled", "compiled_views", "compressed", "crc32", "gzip_error", "inflater"]

_log = logging.getLogger(__name__)
_core: ModuleType | None
_views: ModuleType

# the revision of the core that this package needs
_REVISION = 30


def _loaded(name: str) -> ModuleType:
    """Return a compiled module of this package. Raises `ImportError`."""
    loader: Any = globals().get("__loader__")
    if hasattr(loader, "archive"):
        from tiered_index.base import zipped

        return zipped.load(loader, name)
    # by name: tools that check imports see only Python modules
    return importlib.import_module(name)


try:
    _core, _views = map(_loaded, ("tiered_index.base._core", "tiered_index.base._views"))
    if (revisions := {getattr(module, "REVISION", 1) for module in (_core, _views)}) != {_REVISION}:
        raise ImportError(f"it is of revision {min(revisions)}, not {_REVISION}: install the package again")
except ImportError as error:
    _core = None
    # a package that is shipped should have the core, too
    level = logging.WARNING if hasattr(globals().get("__loader__"), "archive") else logging.INFO
    _log.log(level, "the compiled core is missing, and NumPy does its work more slowly: %s", error)


def inflater(wbits: int, window: bytes = b"") -> Any:
    """Return an object as of `zlib.decompressobj`, which may raise `gzip_error`, too. `window` is its dictionary."""
    return _inflater(wbits, window) if window else _inflater(wbits)


def compressed(data: bytes) -> bytes:
    """Return data in zlib's format, compressed by the fastest level: others save a tenth of the bytes. Any thread."""
    return _compress(data, 1)


def compiled() -> ModuleType | None:
    """Return the module of the compiled loops; None: use NumPy. Any thread."""
    return _core


def compiled_views() -> ModuleType | None:
    """Return the module of the compiled lookups; None exactly if `compiled` returns None. Any thread."""
    return None if _core is None else _views
