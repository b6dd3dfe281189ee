"""Probes of `SqliteStorage`: the database itself, its connections, and a clock that interrupts."""

import os
import sqlite3
import subprocess
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager, suppress
from pathlib import Path

import pytest

from tiered_index.base.clock import ManualClock
from tiered_index.storage.sqlite import CHUNK_BYTES

PATIENCE_S = 60


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


def connections(monkeypatch: pytest.MonkeyPatch) -> list[sqlite3.Connection]:
    """Return a list that gets each connection that is opened from now on."""
    opened: list[sqlite3.Connection] = []
    connect = sqlite3.connect

    def connect_and_tell(*place: object, **settings: object) -> sqlite3.Connection:
        opened.append(connect(*place, **settings))  # type: ignore[call-overload]
        return opened[-1]

    monkeypatch.setattr(sqlite3, "connect", connect_and_tell)
    return opened


def check_sound(path: Path, chunk_bytes: int = CHUNK_BYTES) -> None:
    """Check that SQLite finds nothing wrong, and that every row belongs to an object."""
    with raw(path) as connection:
        assert connection.execute("PRAGMA integrity_check").fetchall() == [("ok",)]
        rows = [number for (number,) in connection.execute("SELECT number FROM chunks ORDER BY number")]
        objects = connection.execute("SELECT first, size_bytes FROM objects ORDER BY first").fetchall()
    assert rows == [first + nth for first, size in objects for nth in range(-(-size // chunk_bytes))]


def open_files(path: Path) -> int:
    """Return the number of this process's descriptors of files at, beside or below `path`."""
    number_open = 0
    for name in os.listdir("/proc/self/fd"):
        with suppress(FileNotFoundError):  # closed meanwhile
            number_open += str(path) in str(Path(f"/proc/self/fd/{name}").readlink())
    return number_open


def output(process: subprocess.Popen[str], said: str = "") -> str:
    """Send `said`, and return the output of a process until it ends without an error."""
    out, err = process.communicate(said, timeout=PATIENCE_S)
    assert process.returncode == 0, err
    return out
