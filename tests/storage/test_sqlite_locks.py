"""Locks and connections of a database file: every wait has a bound, and nothing stays open."""

import contextlib
import os
import sqlite3
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from pathlib import Path

import pytest

from tests.storage.sqlite_probes import HookedClock, raw
from tiered_index.errors import IndexClosed, ObjectNotFound, StorageMisconfigured, StorageUnavailable
from tiered_index.storage.sqlite import connections
from tiered_index.storage.sqlite.storage import SqliteStorage


def test_a_locked_database_is_unavailable_for_writers_and_readable(storage: SqliteStorage, path: Path) -> None:
    storage.put("object", b"old")
    with SqliteStorage(path, busy_timeout_s=0.3) as waiting, raw(path) as other:
        other.execute("BEGIN IMMEDIATE")
        began_s = time.monotonic()
        for write in (
            lambda: waiting.put("object", b"new"),
            lambda: waiting.put_if_absent("b", b""),
            lambda: waiting.begin_upload("c"),
        ):
            with pytest.raises(StorageUnavailable, match=r"locked.*objects\.db|objects\.db.*locked"):
                write()
        assert time.monotonic() - began_s >= 0.9  # each waited; this test would hang if a wait had no end
        assert waiting.get("object") == b"old"
        assert [info.name for info in waiting.list()] == ["object"]
        other.execute("COMMIT")
        waiting.put("object", b"new")
        assert waiting.get("object") == b"new"


def test_threads_wait_for_one_another_within_the_bound(path: Path) -> None:
    inside, release = threading.Event(), threading.Event()

    def hold(nth: int) -> None:
        if nth == 1:
            inside.set()
            assert release.wait(30)

    with SqliteStorage(path, busy_timeout_s=0.3, clock=HookedClock(hold)) as storage:
        thread = threading.Thread(target=lambda: storage.put("slow", b"x"))
        thread.start()
        assert inside.wait(30)
        with pytest.raises(StorageUnavailable, match="other threads"):
            storage.put("impatient", b"x")
        release.set()
        thread.join(30)
        storage.put("impatient", b"x")
        assert [info.name for info in storage.list()] == ["impatient", "slow"]


def test_passing_faults_are_repeated_a_bounded_number_of_times(path: Path) -> None:
    waits: list[float] = []
    pool = connections.ConnectionPool(path, 60, sleep=waits.append)
    calls = 0

    def busy_until(succeeds_at: int) -> Callable[[sqlite3.Connection], str]:
        def act(connection: sqlite3.Connection) -> str:
            nonlocal calls
            calls += 1
            connection.execute("CREATE TABLE t (x)")
            if calls < succeeds_at:
                error = sqlite3.OperationalError("database is locked")
                error.sqlite_errorcode = sqlite3.SQLITE_BUSY_RECOVERY
                raise error
            return "done"

        return act

    with closing(pool):
        assert pool.write("acting", busy_until(4)) == "done"
        assert len(waits) == 3
        assert all(0 <= wait <= 0.25 for wait in waits)
        pool.write("undoing", lambda connection: connection.execute("DROP TABLE t"))
        calls = 0
        with pytest.raises(StorageUnavailable, match="locked"):
            pool.write("acting", busy_until(1000))
        assert calls == 8
        table = "SELECT name FROM sqlite_master WHERE name = 't'"
        assert pool.read("looking", lambda c: c.execute(table).fetchall(), list) == []


def _open_files(path: Path) -> int:
    links = (Path(f"/proc/self/fd/{name}") for name in os.listdir("/proc/self/fd"))
    found = 0
    for link in links:
        with contextlib.suppress(FileNotFoundError):  # closed meanwhile
            found += str(path) in str(link.readlink())
    return found


def test_connections_are_few_and_closed(path: Path) -> None:
    threads = 40
    barrier = threading.Barrier(threads)
    with SqliteStorage(path) as storage:
        storage.put("object", b"x")

        def read(connection: sqlite3.Connection) -> None:
            barrier.wait(30)

        after: list[int] = []
        for _ in range(3):
            with ThreadPoolExecutor(threads) as pool:
                list(pool.map(lambda _: storage._pool.read("reading", read, lambda: None), range(threads)))
            after.append(_open_files(path))
        # 40 databases and 40 logs at the peak; SQLite keeps a closed database's descriptor for the next one while
        # others have locks
        assert threads < after[0] < 2 * threads
        assert after == [after[0]] * 3
        entered, release = threading.Event(), threading.Event()

        def wait(connection: sqlite3.Connection) -> str:
            entered.set()
            assert release.wait(30)
            return str(connection.execute("SELECT name FROM objects").fetchone()[0])

        with ThreadPoolExecutor(1) as pool:
            lent = pool.submit(lambda: storage._pool.read("reading", wait, lambda: ""))
            assert entered.wait(30)
            storage.close()
            assert _open_files(path)
            release.set()
            assert lent.result(30) == "object"
        assert _open_files(path) == 0
    for call in (lambda: storage.get("object"), lambda: storage.put("object", b""), lambda: list(storage.list())):
        with pytest.raises(IndexClosed, match="closed"):
            call()


def test_a_commit_waits_for_the_disk(storage: SqliteStorage) -> None:
    storage.put("object", b"x")
    for name, value in (("synchronous", 2), ("journal_mode", "wal")):  # 2: FULL
        asked = storage._pool.read("looking", lambda c, name=name: c.execute(f"PRAGMA {name}").fetchone(), tuple)
        assert asked == (value,)


def test_a_listing_blocks_no_writer(storage: SqliteStorage, path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tiered_index.storage.sqlite.storage.PAGE", 2)
    for name in "abcdef":
        storage.put(name, b"x")
    listing = storage.list()
    assert next(listing).name == "a"
    storage.delete_many(["c", "e"])
    storage.put("g", b"x")
    with raw(path) as connection:
        assert connection.execute("PRAGMA wal_checkpoint(TRUNCATE)").fetchone()[0] == 0  # not busy: no snapshot is held
    assert [info.name for info in listing] == ["b", "d", "f", "g"]


def test_a_file_that_was_replaced_is_noticed(storage: SqliteStorage, path: Path, tmp_path: Path) -> None:
    storage.put("object", b"first")
    with SqliteStorage(tmp_path / "other.db") as other:
        other.put("elsewhere", b"second")
    for suffix in ("", "-wal", "-shm"):
        Path(f"{path}{suffix}").unlink(missing_ok=True)
    assert list(storage.list()) == []
    with pytest.raises(ObjectNotFound):
        storage.get("object")
    assert not path.exists()  # reading makes nothing
    (tmp_path / "other.db").rename(path)
    assert storage.get("elsewhere") == b"second"
    storage.put("object", b"third")
    with SqliteStorage(path) as another:
        assert [info.name for info in another.list()] == ["elsewhere", "object"]


@pytest.mark.parametrize(
    ("code", "ability"), [(sqlite3.SQLITE_IOERR_SHMMAP, "shared maps"), (sqlite3.SQLITE_IOERR_LOCK, "file locks")]
)
def test_a_disk_without_locks_or_maps_is_named(path: Path, code: int, ability: str) -> None:
    error = sqlite3.OperationalError("disk I/O error")
    error.sqlite_errorcode = code
    found = connections.translate(error, doing="writing 'a'", path=path)
    assert isinstance(found, StorageMisconfigured) and found.exit_code == 2
    assert f"the file system of {path.parent} has no {ability}" in str(found)
    error.sqlite_errorcode = sqlite3.SQLITE_IOERR_READ
    assert isinstance(connections.translate(error, doing="writing 'a'", path=path), StorageUnavailable)
