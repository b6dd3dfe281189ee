"""What Python and Arrow allocate meanwhile."""

from __future__ import annotations

import tracemalloc
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pyarrow as pa


@contextmanager
def traced_memory() -> Iterator[Callable[[], tuple[int, int]]]:
    """Yield a function that returns the bytes that are held, and the most that were held at once, since then."""
    tracemalloc.start()
    try:
        yield tracemalloc.get_traced_memory
    finally:
        tracemalloc.stop()


@contextmanager
def arrow_memory() -> Iterator[pa.MemoryPool]:
    """Yield a pool that Arrow takes all its memory from until the block ends."""
    before = pa.default_memory_pool()
    pool = pa.proxy_memory_pool(before)
    pa.set_memory_pool(pool)
    try:
        yield pool
    finally:
        pa.set_memory_pool(before)
