"""Probes of `SqliteStorage`: the database itself, a clock that interrupts, a moment between two transactions."""

import sqlite3
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from pathlib import Path

import pytest

from tiered_index.clock import ManualClock
from tiered_index.storage.sqlite.storage import SqliteStorage

FAR_FUTURE_MS = 1 << 60


class HookedClock(ManualClock):
    """Calls `hook` with 1, 2, ... at each reading of the time.

    A put reads it once per transaction, and once for the name.
    """

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


def after_batch(storage: SqliteStorage, nth: int, act: Callable[[], object], monkeypatch: pytest.MonkeyPatch) -> None:
    """Call `act` once, between transaction `nth` of a put and the next one."""
    write_batch = storage._bodies._write_batch
    done = 0

    def hooked(doing: str, draft: int | None, data: memoryview, starts: range) -> int:
        nonlocal done
        body = write_batch(doing, draft, data, starts)
        done += 1
        if done == nth:
            act()
        return body

    monkeypatch.setattr(storage._bodies, "_write_batch", hooked)
