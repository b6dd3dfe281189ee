"""Processes beside a test, and checks of a database that several of them used."""

import os
import sqlite3
import subprocess
import sys
from collections.abc import Iterator
from contextlib import closing, contextmanager, suppress
from pathlib import Path

from tiered_index.storage.sqlite import CHUNK_BYTES

PATIENCE_S = 60


@contextmanager
def child(script: str, *arguments: object) -> Iterator[subprocess.Popen[str]]:
    """Run `script` in a separate process, which ends at the latest with the block."""
    command = [sys.executable, "-c", script, *map(str, arguments)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        try:
            yield process
        finally:
            process.kill()
            process.wait(PATIENCE_S)


def output(process: subprocess.Popen[str], said: str = "") -> str:
    """Send `said`, and return the output of the process until it ends without an error."""
    out, _ = process.communicate(said, timeout=PATIENCE_S)
    assert process.returncode == 0
    return out


def check_sound(path: Path, chunk_bytes: int = CHUNK_BYTES) -> None:
    """Check that SQLite finds nothing wrong, and that every row belongs to an object."""
    with closing(sqlite3.connect(path)) as connection:
        assert connection.execute("PRAGMA integrity_check").fetchall() == [("ok",)]
        rows = [number for (number,) in connection.execute("SELECT number FROM chunks ORDER BY number")]
        objects = connection.execute("SELECT first, size_bytes FROM objects ORDER BY first").fetchall()
    assert rows == [first + nth for first, size in objects for nth in range(-(-size // chunk_bytes))]


def open_files(path: Path) -> int:
    """Return the number of this process's descriptors of files at, beside or below `path`."""
    found = 0
    for name in os.listdir("/proc/self/fd"):
        with suppress(FileNotFoundError):  # closed meanwhile
            found += str(path) in str(Path(f"/proc/self/fd/{name}").readlink())
    return found
