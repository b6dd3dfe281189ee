"""Memory of a Python worker between tasks: no further arenas of the allocator for its threads, and what is free goes back to the system.

Spark runs task after task in one worker. glibc gives a thread an arena of its own, which keeps what the thread freed; threads of later
tasks don't meet the arenas that fit, so a worker would take more with every task (a merge of 8 million entries, run six times in one
process: 629 MiB at its peak at first, 831 at last; without further arenas 566 to 589, in no order). Linux with glibc, and Arrow's pool;
elsewhere nothing is done. The setting is the process's, from its first task on. Threads: any.
"""

from __future__ import annotations

import contextlib
import ctypes
from collections.abc import Iterator

import pyarrow as pa

__all__ = ["between_tasks", "give_back"]

_M_ARENA_MAX = -8
# of malloc.h


def give_back() -> None:
    """Return to the system what is free."""
    pa.default_memory_pool().release_unused()
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)


@contextlib.contextmanager
def between_tasks() -> Iterator[None]:
    """Give back what earlier tasks left, and at the end what this one freed: a task's peak is its own, an idle worker is small."""
    limit = getattr(ctypes.CDLL(None), "mallopt", None)
    if limit is not None:
        limit(_M_ARENA_MAX, 1)
    give_back()
    try:
        yield
    finally:
        give_back()
