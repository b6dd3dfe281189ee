"""Returns freed memory to the operating system after large work.

glibc keeps the memory of freed arrays: eight merges grew a process from 90 to 440 MiB, with 32 MiB in use. Threads:
any. Imports nothing of the package.
"""

from __future__ import annotations

import ctypes
import sys


def give_back() -> None:
    """Return free memory to the system, in some milliseconds. Without `malloc_trim` only Arrow returns its memory."""
    arrow = sys.modules.get("pyarrow")
    if arrow is not None:
        arrow.default_memory_pool().release_unused()
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)
