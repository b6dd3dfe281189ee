"""Measures the memory that Python and Arrow allocate in a block."""

import tracemalloc
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from unittest import mock

import pyarrow as pa


@contextmanager
def traced_memory() -> Iterator[Callable[[], tuple[int, int]]]:
    """Yield a function that returns the bytes allocated since then: those still held, and the peak."""
    tracemalloc.start()
    try:
        yield tracemalloc.get_traced_memory
    finally:
        tracemalloc.stop()


@contextmanager
def arrow_memory() -> Iterator[pa.MemoryPool]:
    """Yield a pool from which Arrow allocates all memory until the block ends."""
    before = pa.default_memory_pool()
    pool = pa.proxy_memory_pool(before)
    pa.set_memory_pool(pool)
    try:
        # Parquet files are read with the memory of the system
        with mock.patch.object(pa, "system_memory_pool", lambda: pool):
            yield pool
    finally:
        pa.set_memory_pool(before)
