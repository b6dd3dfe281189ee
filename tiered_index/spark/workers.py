"""The memory of Spark's workers, and the text of their errors.

Spark runs many tasks in one worker, in new threads, and glibc gives each thread an arena that keeps freed memory. Of
six merges of 8 million entries in one process, the first peaked at 629 MiB and the last at 831 MiB. With one arena they
peaked at 566 to 589 MiB. So a worker (Linux with glibc) has one arena, and returns free memory between tasks.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import gc
import inspect
import os
import sys
from collections.abc import Callable, Iterator
from typing import Any, TypeVar

from tiered_index.errors import TieredIndexError
from tiered_index.heap import give_back

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
        with plain_errors():
            yield
    finally:
        give_back()


_C = TypeVar("_C", bound=type)
# methods of data sources and table functions that Spark calls
_CALLED = ("schema", "reader", "writer", "partitions", "read", "write", "commit", "analyze", "eval")


@contextlib.contextmanager
def plain_errors() -> Iterator[None]:
    """Let Spark show an error of this package without the worker's traceback, so that its sentence is the first line.

    A bug keeps its traceback.
    """
    try:
        yield
    except TieredIndexError:
        # Spark's worker reads it after an error, and ends
        os.environ["SPARK_HIDE_TRACEBACK"] = "1"
        raise


def plainly(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return the function, or generator function, with `plain_errors`."""

    def generate(*arguments: Any, **named: Any) -> Iterator[Any]:
        with plain_errors():
            yield from function(*arguments, **named)

    def call(*arguments: Any, **named: Any) -> Any:
        with plain_errors():
            return function(*arguments, **named)

    return functools.wraps(function)(generate if inspect.isgeneratorfunction(function) else call)


def without_tracebacks(kind: _C) -> _C:
    """Give the methods of a class that Spark calls `plain_errors`."""
    for name in _CALLED:
        if inspect.isfunction(method := vars(kind).get(name)):
            setattr(kind, name, plainly(method))
        elif isinstance(method, staticmethod):
            setattr(kind, name, staticmethod(plainly(method.__func__)))
    return kind
