"""The memory of Spark's workers.

Spark runs many tasks in one worker, in new threads, and glibc gives each thread an arena that keeps freed memory. Of
six merges of 8 million entries in one process, the first peaked at 629 MiB and the last at 831 MiB. With one arena they
peaked at 566 to 589 MiB. So a worker (Linux with glibc) has one arena, and returns free memory between tasks.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import sys
from collections.abc import Iterator

from tiered_index.base.process import give_back

# `M_ARENA_MAX` of malloc.h.
_M_ARENA_MAX = -8


def spare_collections() -> None:
    """Exclude modules from a worker's garbage collections. Idempotent.

    PySpark's workers collect after each task, which takes about 80 ms of CPU with this package's imports.
    """
    if _set_apart not in gc.callbacks:
        gc.callbacks.append(_set_apart)


def _set_apart(phase: str, about: dict[str, int]) -> None:
    # only when the worker's own loop collects: the task's objects are freed then; at the end of a process no one calls
    caller = sys._getframe().f_back
    if phase == "stop" and about["generation"] == 2 and caller is not None and caller.f_code.co_name == "manager":
        gc.freeze()


@contextlib.contextmanager
def between_tasks() -> Iterator[None]:
    """Return the free memory of earlier tasks to the system, and at the end that of this task."""
    spare_collections()
    limit = getattr(ctypes.CDLL(None), "mallopt", None)
    if limit is not None:
        limit(_M_ARENA_MAX, 1)
    give_back()
    try:
        yield
    finally:
        give_back()
