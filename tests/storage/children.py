"""Processes beside a test, and checks of a database that several of them used."""

import sqlite3
import subprocess
import sys
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path

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


def check_sound(path: Path) -> None:
    """Check that SQLite finds nothing wrong, and that every row belongs to a named body."""
    with closing(sqlite3.connect(path)) as connection:
        assert connection.execute("PRAGMA integrity_check").fetchall() == [("ok",)]
        orphans = (
            "SELECT count(*) FROM pieces WHERE body NOT IN"
            " (SELECT body FROM objects UNION SELECT body FROM parts UNION SELECT body FROM drafts)",
            "SELECT count(*) FROM chunks WHERE id NOT IN (SELECT chunk FROM pieces)",
            "SELECT count(*) FROM pieces WHERE chunk NOT IN (SELECT id FROM chunks)",
        )
        assert [connection.execute(query).fetchone()[0] for query in orphans] == [0, 0, 0]
