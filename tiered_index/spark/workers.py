"""The memory of Spark's workers.

Spark runs task after task in one worker, in new threads, and glibc gives each an arena that keeps what it freed: six
merges of 8 million entries in one process peaked at 629 MiB at first and 831 MiB at last, without further arenas at 566
to 589 MiB. So a worker (Linux with glibc) makes no further arenas, and returns free memory between tasks.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import sys
from collections.abc import Iterator

from tiered_index.heap import give_back

# `M_ARENA_MAX` of malloc.h.
_M_ARENA_MAX = -8


def spare_collections() -> None:
    """Have a worker's collections of garbage pass over what outlives tasks: its modules. Idempotent.

    PySpark's workers collect behind each task, some 80 ms of CPU with all that is imported here.
    """
    if _set_apart not in gc.callbacks:
        gc.callbacks.append(_set_apart)


def _set_apart(phase: str, about: dict[str, int]) -> None:
    # the task and its functions are gone where the worker's own loop collects; nobody calls when a process ends
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
