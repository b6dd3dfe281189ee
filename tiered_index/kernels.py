"""Whether loops are compiled: the door to `tiered_index.loops`, which needs numba (the extra ``fast``).

Numba takes half a second to load, and some seconds once on a machine, until its cache is filled. So a process begins
with NumPy, and once it has worked on as many rows as make up for the time, a thread loads the loops beside it: no call
waits for them, a short process never loads them. Where numba is missing or can't be used NumPy goes on.
"""

from __future__ import annotations

import importlib.util
import logging
import os
import threading
from typing import TYPE_CHECKING

try:  # 10 times as fast as zlib's from some hundred bytes on
    from isal.isal_zlib import crc32 as _crc32
except ImportError:
    from zlib import crc32 as _crc32

if TYPE_CHECKING:
    from collections.abc import Callable
    from types import ModuleType

__all__ = ["compiled", "compiled_for_one", "crc32", "load"]

crc32: Callable[..., int] = _crc32
# Rows of a batch for which NumPy is as good
_FEW = 1 << 7
# Rows after which loading has paid: NumPy takes about 0.1 us longer for each
_ENOUGH = 1 << 22
_log = logging.getLogger(__name__)
_lock = threading.Lock()
# held by `load`, lest a second caller goes on without what the first one loads
_loading = threading.Lock()


class _State:
    """What this process has: rows so far, whether somebody loads or has loaded, the thread that does where it was begun
    by a batch, and the module once it is there.
    """

    rows = 0
    begun = False
    thread: threading.Thread | None = None
    loops: ModuleType | None = None


def _forget_loading() -> None:
    """Begin anew in a forked child, which has no copy of the thread that was loading."""
    global _lock, _loading
    _lock, _loading = threading.Lock(), threading.Lock()
    _State.begun, _State.thread = _State.loops is not None, None


os.register_at_fork(after_in_child=_forget_loading)


def compiled(rows: int) -> ModuleType | None:
    """Return the module of compiled loops for a batch of `rows`; None: NumPy does it. Any thread."""
    return _counted(rows) if rows >= _FEW else None


def compiled_for_one(items: int) -> ModuleType | None:
    """Return the same for the search of one key in a packed run of `items`, however few: its time is that of the calls.
    Of usual runs, of 512 items, loops make up for their loading in some 16,000 searches.
    """
    return _State.loops if _State.begun else _counted(items // 2)


def _counted(rows: int) -> ModuleType | None:
    if not _State.begun:
        _State.rows += rows
        if _State.rows >= _ENOUGH and _begin():
            # no daemon: a process does not end within the compiler
            thread = threading.Thread(target=_load, name="tiered-index-kernels", daemon=False)
            try:
                thread.start()
                _State.thread = thread
            except RuntimeError as error:  # no more threads, or the process is ending
                _log.warning("loops are not compiled, NumPy goes on: %s", error)
    return _State.loops


def load() -> ModuleType | None:
    """Load the loops now, or wait until they are; return what there is. For tests and benchmarks."""
    with _loading:
        if _begin():
            _load()
        elif _State.thread is not None:
            _State.thread.join()
    return _State.loops


def _begin() -> bool:
    """Return whether the caller is the first, and there is something to load."""
    with _lock:
        first, _State.begun = not _State.begun, True
    return first and importlib.util.find_spec("numba") is not None


def _load() -> None:
    try:
        from tiered_index import loops
    except Exception as error:  # noqa: BLE001 - whatever numba does, NumPy goes on
        _log.warning("loops are not compiled, NumPy goes on: %s: %s", type(error).__name__, error)
    else:
        _State.loops = loops
