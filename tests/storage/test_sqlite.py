"""What a database file does that the contract does not ask of every storage: rows, drafts, locks, and every kind of wrong file."""

from __future__ import annotations

import os
import random
import shutil
import sqlite3
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, contextmanager
from pathlib import Path

import pytest

from tiered_index.clock import ManualClock
from tiered_index.errors import (
    CorruptFile,
    DiskFull,
    InvalidArgument,
    ObjectExists,
    ObjectNotFound,
    StorageMisconfigured,
    StorageUnavailable,
    UnsupportedVersion,
)
from tiered_index.storage import sqlite_bodies, sqlite_connections
from tiered_index.storage.base import ByteRange
from tiered_index.storage.sqlite import SqliteStorage
from tiered_index.storage.sqlite_schema import APPLICATION_ID, CHUNK_BYTES

FAR_FUTURE_MS = 1 << 60


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "objects.db"


@pytest.fixture
def storage(path: Path) -> Iterator[SqliteStorage]:
    with SqliteStorage(path) as storage:
        yield storage


@pytest.fixture
def small_rows(monkeypatch: pytest.MonkeyPatch) -> int:
    """Let rows hold 1,000 bytes and transactions two rows, so that small objects have many of both; return a row's size."""
    monkeypatch.setattr(sqlite_bodies, "CHUNK_BYTES", 1000)
    monkeypatch.setattr(sqlite_bodies, "_ROWS_A_TRANSACTION", 2)
    return 1000


class HookedClock(ManualClock):
    """Calls `hook` with 1, 2, ... whenever the time is asked for, which a put does once a transaction and once for the name."""

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


# Rows.


def test_ranges_across_rows_and_transactions(storage: SqliteStorage, path: Path, small_rows: int) -> None:
    data = random.Random(1).randbytes(7 * small_rows + 123)
    storage.put("object", data)
    assert count(path, "chunks") == 8
    edges = [at + d for at in range(0, len(data), small_rows) for d in (-1, 0, 1)] + [len(data) - 1]
    ranges = [ByteRange(a, b - a) for a in edges for b in edges if 0 <= a < b]
    assert storage.get_ranges("object", ranges) == [data[r.start : r.start + r.length] for r in ranges]
    assert storage.get_suffix("object", 1500) == (data[-1500:], len(data))
    assert storage.get("object") == data


def test_an_object_has_rows_of_a_mebibyte(storage: SqliteStorage, path: Path) -> None:
    data = random.Random(2).randbytes(2 * CHUNK_BYTES + 1)
    storage.put("object", data)
    with raw(path) as connection:
        assert connection.execute("SELECT length(data) FROM chunks ORDER BY id").fetchall() == [(CHUNK_BYTES,), (CHUNK_BYTES,), (1,)]
    assert storage.get("object") == data


def test_a_read_touches_only_the_rows_it_needs(storage: SqliteStorage, path: Path, small_rows: int) -> None:
    data = random.Random(3).randbytes(5 * small_rows)
    storage.put("object", data)
    with raw(path) as connection:
        connection.execute("DELETE FROM chunks WHERE id = (SELECT chunk FROM pieces WHERE start = ?)", (2 * small_rows,))
    assert storage.get_range("object", 0, 2 * small_rows) == data[: 2 * small_rows]
    assert storage.get_range("object", 3 * small_rows, 2 * small_rows) == data[3 * small_rows :]
    for start, length in ((2 * small_rows, 1), (2 * small_rows - 1, 2), (0, len(data)), (3 * small_rows - 1, 2)):
        with pytest.raises(CorruptFile, match=r"objects\.db"):
            storage.get_range("object", start, length)
    with raw(path) as connection:
        connection.execute("DELETE FROM pieces WHERE start = ?", (2 * small_rows,))
    with pytest.raises(CorruptFile, match="missing"):
        storage.get("object")
    with raw(path) as connection:
        connection.execute("UPDATE chunks SET data = x'00' WHERE id = (SELECT chunk FROM pieces WHERE start = 0)")
    with pytest.raises(CorruptFile, match="length"):
        storage.get_range("object", 0, 1)


def test_completing_an_upload_writes_no_row_again(storage: SqliteStorage, path: Path, small_rows: int) -> None:
    data = random.Random(4).randbytes(6 * small_rows + 7)
    handle = storage.begin_upload("object")
    pieces = {2: data[2500:5000], 1: data[:2500], 9: data[5000:]}
    parts = [storage.upload_part(handle, number, piece) for number, piece in pieces.items()]
    with raw(path) as connection:
        before = connection.execute("SELECT id FROM chunks ORDER BY id").fetchall()
    storage.complete_upload(handle, parts)
    with raw(path) as connection:
        assert connection.execute("SELECT id FROM chunks ORDER BY id").fetchall() == before
    assert storage.get("object") == data
    for start in range(0, len(data) - 600, 300):
        assert storage.get_range("object", start, 600) == data[start : start + 600]


def test_what_is_replaced_aborted_or_deleted_leaves_no_rows(storage: SqliteStorage, path: Path, small_rows: int) -> None:
    big = bytes(9 * small_rows)
    for data in (big, b"small", big, b"", big):
        storage.put("object", data)
        assert storage.get("object") == data
    aborted, completed = storage.begin_upload("object"), storage.begin_upload("object")
    storage.upload_part(aborted, 1, big)
    storage.upload_part(completed, 2, big)
    storage.upload_part(completed, 2, big)
    part = storage.upload_part(completed, 1, b"one")
    storage.abort_upload(aborted)
    storage.complete_upload(completed, [part])
    with pytest.raises(ObjectExists):
        storage.put_if_absent("object", big)
    assert storage.get("object") == b"one"
    assert [count(path, table) for table in ("chunks", "pieces", "drafts", "uploads", "parts")] == [1, 1, 0, 0, 0]
    storage.delete("object")
    assert [count(path, table) for table in ("chunks", "pieces", "drafts")] == [0, 0, 0]


def test_room_of_deleted_objects_is_used_again(storage: SqliteStorage, path: Path) -> None:
    data = bytes(3 * CHUNK_BYTES)
    sizes = []
    for _ in range(6):
        storage.put("object", data)
        storage.delete("object")
        with raw(path) as connection:
            sizes.append(connection.execute("PRAGMA page_count").fetchone()[0])
    assert sizes[-1] <= sizes[1]


# Drafts.


def test_a_big_object_is_invisible_until_its_last_transaction(path: Path, small_rows: int) -> None:
    seen: list[tuple[bytes, list[str], int]] = []
    with SqliteStorage(path) as reader:

        def look(_: int) -> None:
            seen.append((reader.get("object"), [info.name for info in reader.list()], count(path, "chunks")))

        with SqliteStorage(path) as storage:
            storage.put("object", b"old")
        with SqliteStorage(path, clock=HookedClock(look)) as storage:
            storage.put("object", bytes(7 * small_rows))
        assert reader.get("object") == bytes(7 * small_rows)
    assert {(data, tuple(names)) for data, names, _ in seen} == {(b"old", ("object",))}
    assert sorted({chunks for *_, chunks in seen}) == [1, 3, 5, 7]  # transactions that were committed while it was invisible


def after_batch(storage: SqliteStorage, nth: int, act: Callable[[], object], monkeypatch: pytest.MonkeyPatch) -> None:
    """Let `act` happen once, between transaction `nth` of a put and the next one."""
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


def test_what_a_losing_put_wrote_is_removed(storage: SqliteStorage, path: Path, small_rows: int, monkeypatch: pytest.MonkeyPatch) -> None:
    with SqliteStorage(path) as winner:
        after_batch(storage, 2, lambda: winner.put_if_absent("object", b"winner"), monkeypatch)
        with pytest.raises(ObjectExists):
            storage.put_if_absent("object", bytes(40 * small_rows))
        assert winner.get("object") == b"winner"
    assert [count(path, table) for table in ("chunks", "drafts")] == [1, 0]


def test_a_sweep_takes_old_drafts_and_leaves_young_ones_and_objects(storage: SqliteStorage, path: Path, small_rows: int) -> None:
    storage.put("object", bytes(3 * small_rows))
    handle = storage.begin_upload("uploading")
    part = storage.upload_part(handle, 1, bytes(300 * small_rows))
    with raw(path) as connection:
        for body, touched_ms, rows in ((1001, 5_000, 300), (1002, 6_000, 1), (1003, 4_999, 0)):
            connection.execute("INSERT INTO drafts VALUES (?, ?)", (body, touched_ms))
            for row in range(rows):
                chunk = connection.execute("INSERT INTO chunks (data) VALUES (x'00')").lastrowid
                connection.execute("INSERT INTO pieces VALUES (?, ?, 1, ?)", (body, row, chunk))
    storage.abort_uploads("some/prefix", older_than_ms=FAR_FUTURE_MS)
    storage.abort_uploads(older_than_ms=4_999)
    assert count(path, "drafts") == 3
    storage.abort_uploads(older_than_ms=6_000)
    with raw(path) as connection:
        assert connection.execute("SELECT body FROM drafts").fetchall() == [(1002,)]
    assert count(path, "chunks") == 3 + 300 + 1
    storage.complete_upload(handle, [part])
    assert len(storage.get("uploading")) == 300 * small_rows
    assert storage.get("object") == bytes(3 * small_rows)


@pytest.mark.parametrize("rows", [8, 40])
@pytest.mark.parametrize("nth", [1, 3])
def test_a_writer_whose_draft_was_swept_publishes_nothing(
    storage: SqliteStorage, path: Path, small_rows: int, nth: int, rows: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A sweep with too young an age costs the writer its put; it never leaves an object with holes."""
    storage.put("object", b"old")
    with SqliteStorage(path) as sweeper:
        after_batch(storage, nth, lambda: sweeper.abort_uploads(older_than_ms=FAR_FUTURE_MS), monkeypatch)
        with pytest.raises(StorageUnavailable, match="swept"):
            storage.put("object", bytes(rows * small_rows))
        assert sweeper.get("object") == b"old"
    assert [count(path, table) for table in ("chunks", "pieces", "drafts")] == [1, 1, 0]


def test_a_writer_meets_a_sweep_that_is_half_done(
    storage: SqliteStorage, path: Path, small_rows: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Removal takes several transactions; the first one must already end the draft, or its writer would name what is left."""

    def sweep_some() -> None:
        with raw(path) as connection:
            (body,) = connection.execute("SELECT body FROM drafts").fetchone()
        assert storage._pool.write("removing", lambda connection: storage._bodies._remove_some(connection, body)) is True

    after_batch(storage, 6, sweep_some, monkeypatch)
    with pytest.raises(StorageUnavailable, match="swept"):
        storage.put("object", bytes(20 * small_rows))
    with pytest.raises(ObjectNotFound):
        storage.get("object")
    assert count(path, "chunks") == 0


def test_a_part_that_comes_too_late_is_refused_and_leaves_no_rows(
    storage: SqliteStorage, path: Path, small_rows: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The upload goes while its part is being written, so only the check beside the part's row can notice."""
    handle = storage.begin_upload("object")
    with SqliteStorage(path) as other:
        after_batch(storage, 2, lambda: other.abort_upload(handle), monkeypatch)
        with pytest.raises(ObjectNotFound):
            storage.upload_part(handle, 1, bytes(20 * small_rows))
    assert [count(path, table) for table in ("chunks", "pieces", "drafts", "parts")] == [0, 0, 0, 0]


# Locks.


def test_a_locked_database_is_unavailable_for_writers_and_readable(storage: SqliteStorage, path: Path) -> None:
    storage.put("object", b"old")
    with SqliteStorage(path, busy_timeout_s=0.3) as waiting, raw(path) as other:
        other.execute("BEGIN IMMEDIATE")
        began_s = time.monotonic()
        for write in (lambda: waiting.put("object", b"new"), lambda: waiting.put_if_absent("b", b""), lambda: waiting.begin_upload("c")):
            with pytest.raises(StorageUnavailable, match=r"locked.*objects\.db|objects\.db.*locked"):
                write()
        assert 0.9 <= time.monotonic() - began_s < 10
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
    pool = sqlite_connections.ConnectionPool(path, 60, sleep=waits.append)
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
        assert pool.read("looking", lambda c: c.execute("SELECT name FROM sqlite_master WHERE name = 't'").fetchall(), list) == []


# Connections.


def _open_files(path: Path) -> int:
    links = (Path(f"/proc/self/fd/{name}") for name in os.listdir("/proc/self/fd"))
    return sum(str(path) in str(link.readlink()) for link in links if link.is_symlink())


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
        # 40 databases and 40 logs at the peak; SQLite keeps a closed database's descriptor for the next one while others have locks
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
        with pytest.raises(InvalidArgument, match="closed"):
            call()


def test_a_commit_waits_for_the_disk(storage: SqliteStorage) -> None:
    storage.put("object", b"x")
    settings = storage._pool.read(
        "looking", lambda c: [c.execute(f"PRAGMA {name}").fetchone()[0] for name in ("synchronous", "journal_mode")], list
    )
    assert settings == [2, "wal"]  # 2: FULL


def test_a_listing_keeps_nobody_from_writing(storage: SqliteStorage, path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tiered_index.storage.sqlite._PAGE", 2)
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


# Wrong files and full disks.


def test_a_full_disk_refuses_whole_and_the_next_put_works(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    plain = sqlite_connections.adopt

    def adopt(connection: sqlite3.Connection) -> None:
        plain(connection)
        connection.execute("PRAGMA max_page_count=2000")  # 31 MiB: SQLite then answers as it does to ENOSPC

    monkeypatch.setattr(sqlite_connections, "adopt", adopt)
    with SqliteStorage(path) as storage:
        storage.put("object", b"old")
        for write in (
            lambda: storage.put("object", bytes(40 << 20)),
            lambda: storage.put_if_absent("other", bytes(40 << 20)),
            lambda: storage.upload_part(storage.begin_upload("object"), 1, bytes(40 << 20)),
        ):
            with pytest.raises(DiskFull, match=r"objects\.db"):
                write()
            assert storage.get("object") == b"old"
            assert [info.name for info in storage.list()] == ["object"]
            assert count(path, "drafts") == 0
            storage.put("object", b"old")


def test_no_database_of_ours_is_refused_and_left_as_it_was(tmp_path: Path) -> None:
    text, foreign, later = tmp_path / "text.db", tmp_path / "foreign.db", tmp_path / "later.db"
    text.write_bytes(b"certainly not a database\n" * 1000)
    with raw(foreign) as connection:
        connection.execute("CREATE TABLE precious (x)")
    with SqliteStorage(later) as storage:
        storage.put("object", b"x")
    with raw(later) as connection:
        connection.execute("PRAGMA user_version=2")
    for path, kind, says in (
        (text, StorageMisconfigured, "not a database"),
        (foreign, StorageMisconfigured, "another program"),
        (later, UnsupportedVersion, "another version"),
    ):
        before = path.read_bytes()
        with SqliteStorage(path) as storage:
            for call in (
                lambda: storage.get("a"),
                lambda: list(storage.list()),
                lambda: storage.put("a", b""),
                lambda: storage.put_if_absent("a", b""),
                lambda: storage.begin_upload("a"),
                lambda: storage.delete("a"),
                lambda: storage.abort_uploads(older_than_ms=1),
            ):
                with pytest.raises(kind, match=says) as caught:
                    call()
                assert str(path) in str(caught.value)
        assert path.read_bytes() == before
    assert caught.value.expected == 1
    assert caught.value.found == 2


def test_the_file_says_what_it_is(storage: SqliteStorage, path: Path) -> None:
    storage.put("object", b"x")
    storage.close()
    header = path.read_bytes()[:100]
    assert header[68:72] == APPLICATION_ID.to_bytes(4, "big") == b"TIDX"
    assert header[60:64] == (1).to_bytes(4, "big")
    assert int.from_bytes(header[16:18], "big") == 16_384


def test_an_empty_file_is_an_empty_storage(storage: SqliteStorage, path: Path) -> None:
    path.touch()
    assert list(storage.list()) == []
    assert path.stat().st_size == 0
    storage.put("object", b"x")
    assert storage.get("object") == b"x"


def test_damage_is_named(storage: SqliteStorage, path: Path) -> None:
    storage.put("object", b"x" * 100)
    storage.close()
    with raw(path) as connection:
        root = connection.execute("SELECT rootpage FROM sqlite_master WHERE name = 'objects'").fetchone()[0]
    with path.open("r+b") as file:
        file.seek((root - 1) * 16_384)
        file.write(b"\xff" * 16_384)
    with SqliteStorage(path) as damaged:
        for call in (lambda: damaged.get("object"), lambda: list(damaged.list()), lambda: damaged.put("object", b"")):
            with pytest.raises(CorruptFile) as caught:
                call()
            assert caught.value.file == str(path)


def test_a_missing_table_is_damage(storage: SqliteStorage, path: Path) -> None:
    storage.put("object", b"x")
    with raw(path) as connection:
        connection.execute("DROP TABLE pieces")
    with pytest.raises(CorruptFile, match="pieces"):
        storage.get("object")


def test_a_path_that_can_not_be_is_misconfigured(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    (tmp_path / "folder").mkdir()
    for path in (tmp_path / "missing" / "objects.db", tmp_path / "file" / "objects.db", tmp_path / "folder"):
        with SqliteStorage(path) as storage, pytest.raises(StorageMisconfigured, match=path.name):
            storage.put("object", b"x")
    for path in (tmp_path / "missing" / "objects.db", tmp_path / "file" / "objects.db"):
        with SqliteStorage(path) as storage:
            assert list(storage.list()) == []
            storage.delete("object")
            assert storage.abort_uploads(older_than_ms=FAR_FUTURE_MS) == 0


@contextmanager
def unprivileged() -> Iterator[None]:
    """Be nobody for a moment, where these tests run as root, to whom nothing is forbidden."""
    if os.geteuid():
        yield
        return
    os.seteuid(65534)
    try:
        yield
    finally:
        os.seteuid(0)


def test_what_is_forbidden_is_misconfigured() -> None:
    folder = Path(tempfile.mkdtemp())  # not pytest's, which nobody else may enter
    path = folder / "objects.db"
    try:
        with SqliteStorage(path) as storage:
            storage.put("object", b"x")
            folder.chmod(0o755)
            path.chmod(0o444)
            for suffix in ("-wal", "-shm"):
                Path(f"{path}{suffix}").chmod(0o444)
            with unprivileged(), SqliteStorage(path) as forbidden:
                assert forbidden.get("object") == b"x"  # beside its writer, a database may be read by who may not write it
                with pytest.raises(StorageMisconfigured, match=r"objects\.db.*permissions"):
                    forbidden.put("object", b"y")
                with SqliteStorage(folder / "new.db") as new, pytest.raises(StorageMisconfigured, match=r"new\.db"):
                    new.put("object", b"y")
            folder.chmod(0o700 if not os.geteuid() else 0o000)
            with unprivileged(), SqliteStorage(path) as hidden:
                for call in (lambda: hidden.get("object"), lambda: hidden.put("object", b"y")):
                    with pytest.raises(StorageMisconfigured, match="permissions"):
                        call()
    finally:
        folder.chmod(0o700)
        shutil.rmtree(folder)
