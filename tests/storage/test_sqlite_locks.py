"""Locks and connections of a database file: every wait has a bound, and nothing stays open."""

import sqlite3
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from tests.storage.sqlite_probes import HookedClock, connections, open_files, raw
from tiered_index.errors import IndexClosed, ObjectNotFound, StorageMisconfigured, StorageUnavailable
from tiered_index.storage.sqlite import SqliteStorage, translate


def test_a_locked_database_is_unavailable_for_writers_and_readable(storage: SqliteStorage, path: Path) -> None:
    storage.put("object", b"old")
    with SqliteStorage(path, busy_timeout_s=0.3) as waiting, raw(path) as other:
        other.execute("BEGIN IMMEDIATE")
        began_s = time.monotonic()
        for write in (lambda: waiting.put("object", b"new"), lambda: waiting.put_if_absent("b", b"")):
            with pytest.raises(StorageUnavailable, match=r"locked.*objects\.db|objects\.db.*locked"):
                write()
        assert time.monotonic() - began_s >= 0.6  # each waited; this test would hang if a wait had no end
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


def test_a_closed_storage_has_no_open_file(path: Path) -> None:
    entered, release = threading.Event(), threading.Event()

    def wait(_: int) -> None:
        entered.set()
        assert release.wait(30)

    with SqliteStorage(path, clock=HookedClock(wait)) as storage, ThreadPoolExecutor(2) as pool:
        writing = pool.submit(storage.put, "object", b"x")
        assert entered.wait(30)
        closing = pool.submit(storage.close)
        release.set()
        closing.result(30)
        writing.result(30)
    assert open_files(path) == 0
    for call in (lambda: storage.get("object"), lambda: storage.put("object", b""), lambda: list(storage.list())):
        with pytest.raises(IndexClosed, match="closed"):
            call()


def test_a_commit_waits_for_the_disk(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    opened = connections(monkeypatch)
    with SqliteStorage(path) as storage:
        storage.put("object", b"x")
        for name, value in (("synchronous", 2), ("journal_mode", "wal")):  # 2: FULL
            assert opened[-1].execute(f"PRAGMA {name}").fetchone() == (value,)


def test_a_listing_blocks_no_writer(storage: SqliteStorage, path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tiered_index.storage.sqlite.PAGE", 2)
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


@pytest.mark.parametrize("code", ["SQLITE_IOERR_SHMMAP", "SQLITE_IOERR_LOCK"])
def test_a_disk_without_locks_or_maps_is_named(path: Path, code: str) -> None:
    error = sqlite3.OperationalError("disk I/O error")
    error.sqlite_errorname = code
    translated = translate(error, doing="writing 'a'", path=path)
    assert isinstance(translated, StorageMisconfigured) and translated.exit_code == 2
    assert f"the file system of {path.parent} has no file locks, shared maps" in str(translated)
    error.sqlite_errorname = "SQLITE_IOERR_READ"
    assert isinstance(translate(error, doing="writing 'a'", path=path), StorageUnavailable)


def test_a_read_beside_writers_is_of_one_state(path: Path, small_rows: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Another process may replace the object between any statements of a read."""
    opened, old, new = connections(monkeypatch), b"a" * (3 * small_rows), b"b" * (5 * small_rows)
    with SqliteStorage(path) as writer, SqliteStorage(path) as reader:
        writer.put("object", old)
        others = len(opened)
        assert reader.get("object") == old
        (connection,) = opened[others:]

        def replace(statement: str) -> None:
            if "FROM chunks" in statement:
                writer.put("object", new)

        connection.set_trace_callback(replace)
        assert reader.get("object") == old
        connection.set_trace_callback(None)
        assert reader.get("object") == new
