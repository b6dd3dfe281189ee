"""A writer in a process of its own: `python -m tests.stress.writer ROOT STORAGE`.

It flushes five messages, says so, and closes when it is told anything.
"""

from __future__ import annotations

import sys

from tiered_index import IndexService

__all__ = ["FLUSHED", "put"]

FLUSHED = 5
NOW_MS = 1_700_000_000_000


def put(service: IndexService, begin: int, end: int) -> None:
    """Put messages `begin` .. `end` - 1 of one key."""
    for number in range(begin, end):
        service.put("t", 0, "k", number, 1, NOW_MS + number * 1000)


if __name__ == "__main__":
    with IndexService.open(root=sys.argv[1], storage=sys.argv[2], slots=7, items=16) as index:
        put(index, 0, FLUSHED)
        index.flush()
        print("flushed", flush=True)
        sys.stdin.readline()
