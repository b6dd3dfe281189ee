"""The door to the compiled core, `tiered_index._core`, and to the fastest CRC32 that is installed.

Each loop of the core stands beside NumPy code that returns the same bytes. NumPy does the work where the core could not
be built, as on a machine without a C compiler. The log says so once a process.
"""

from __future__ import annotations

import importlib
import logging
from typing import TYPE_CHECKING

try:  # 10 times as fast as zlib's from some hundred bytes on
    from isal.isal_zlib import crc32 as _crc32
except ImportError:
    from zlib import crc32 as _crc32

if TYPE_CHECKING:
    from collections.abc import Callable
    from types import ModuleType

__all__ = ["compiled", "crc32"]

crc32: Callable[..., int] = _crc32
_log = logging.getLogger(__name__)
_core: ModuleType | None

# of the core that this package calls
_REVISION = 4

try:
    # by name: checks of imports know modules of Python only
    _core = importlib.import_module("tiered_index._core")
    if (found := getattr(_core, "REVISION", 1)) != _REVISION:
        raise ImportError(f"it is of revision {found}, not {_REVISION}: install the package again")
except ImportError as error:
    _core = None
    _log.info("the compiled core is missing, and NumPy does its work more slowly: %s", error)


def compiled() -> ModuleType | None:
    """Return the compiled core; None: NumPy does the work. Any thread."""
    return _core
