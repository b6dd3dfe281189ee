"""Functions of a loaded library that never return: a call of them waits as for a lock that nobody releases.

It writes over their machine code, so it is for a process of its own.
"""

import ctypes
import mmap
import platform
from typing import Any

# machine code that jumps to the address behind it
_JUMPS = {"x86_64": (b"\x48\xb8", b"\xff\xe0"), "aarch64": (b"\x50\x00\x00\x58\x00\x02\x1f\xd6", b"")}
_WRITABLE = 7


def can_block() -> bool:
    """Return whether this machine's code is known."""
    return platform.system() == "Linux" and platform.machine() in _JUMPS


def block(library: Any, function: str) -> None:
    """Let every later call of a function wait for ever, without Python's lock if the caller has released it."""
    libc, (load, jump) = ctypes.CDLL(None), _JUMPS[platform.machine()]
    at, pause = (ctypes.cast(each, ctypes.c_void_p).value or 0 for each in (getattr(library, function), libc.pause))
    pages = ctypes.c_void_p(at & -mmap.PAGESIZE), ctypes.c_size_t(2 * mmap.PAGESIZE)
    assert libc.mprotect(*pages, _WRITABLE) == 0
    code = load + pause.to_bytes(8, "little") + jump
    ctypes.memmove(at, code, len(code))
