"""Probes of `SqliteStorage`: the database itself, and a clock that interrupts."""

import sqlite3
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from pathlib import Path

from tiered_index.clock import ManualClock


class HookedClock(ManualClock):
    """Calls `hook` with 1, 2, ... at each reading of the time. A put reads it once, before its transaction ends."""

    def __init__(self, hook: Callable[[int], None]) -> None:
        super().__init__()
        self._hook = hook
        self._asked = 0

    def now_ms(self) -> int:
        self._asked += 1
        self._hook(self._asked)
        return super().now_ms()


@contextmanager
def raw(path: Path) -> Iterator[sqlite3.Connection]:
    with closing(sqlite3.connect(path, isolation_level=None, timeout=10)) as connection:
        yield connection


def count(path: Path, table: str) -> int:
    with raw(path) as connection:
        return int(connection.execute(f"SELECT count(*) FROM {table}").fetchone()[0])
