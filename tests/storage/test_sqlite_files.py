"""Wrong files, full disks, missing permissions: refused with the file's name, and left unchanged; rows; URIs."""

import errno
import os
import random
import shutil
import tempfile
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.storage.sqlite_probes import check_sound, connections, count, raw
from tiered_index.errors import (
    CorruptFile,
    DiskFull,
    ObjectExists,
    StorageMisconfigured,
    StorageUnavailable,
    UnsupportedVersion,
)
from tiered_index.storage import sqlite
from tiered_index.storage.opening import open_storage
from tiered_index.storage.sqlite import APPLICATION_ID, SqliteStorage


def write_by_parts(storage: SqliteStorage, name: str, data: bytes) -> None:
    with storage.open_writer(name) as writer:
        for start in range(0, len(data), 1 << 20):
            writer.write(data[start : start + (1 << 20)])


def test_a_full_disk_refuses_whole_and_the_next_put_works(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # 8 MiB: SQLite then answers as it does to ENOSPC
    monkeypatch.setattr(sqlite, "PRAGMAS", (*sqlite.PRAGMAS, "max_page_count=500"))
    with SqliteStorage(path) as storage:
        storage.put("object", b"old")
        for write in (
            lambda: storage.put("object", bytes(10 << 20)),
            lambda: storage.put_if_absent("other", bytes(10 << 20)),
            lambda: write_by_parts(storage, "object", bytes(10 << 20)),
        ):
            with pytest.raises(DiskFull, match=r"objects\.db"):
                write()
            assert storage.get("object") == b"old"
            assert [info.name for info in storage.list()] == ["object"]
            assert count(path, "chunks") == 1
            storage.put("object", b"old")


class Failing:
    """The temporary file of a stream, whose reads fail or end early."""

    def __init__(self, short_by: int) -> None:
        self._short_by = short_by

    def seek(self, position: int) -> None:
        pass

    def read(self, most_bytes: int) -> bytes:
        if not self._short_by:
            raise OSError(errno.EIO, "Input/output error")
        return bytes(most_bytes - self._short_by)


def test_a_fault_of_the_temporary_file_leaves_the_old_object(storage: SqliteStorage, path: Path) -> None:
    storage.put("object", b"old")
    for content, message in ((Failing(0), "Input/output error"), (Failing(1), "gave 262143 of 262144 bytes")):
        with pytest.raises(StorageUnavailable, match=message):
            storage.insert("object", content, 9 << 20)
        assert storage.get("object") == b"old"
        assert count(path, "chunks") == 1


def test_no_database_of_ours_is_refused_and_left_as_it_was(tmp_path: Path) -> None:
    text, foreign, other = tmp_path / "text.db", tmp_path / "foreign.db", tmp_path / "other.db"
    text.write_bytes(b"certainly not a database\n" * 1000)
    with raw(foreign) as connection:
        connection.execute("CREATE TABLE precious (x)")
    with SqliteStorage(other) as storage:
        storage.put("object", b"x")
    with raw(other) as connection:
        connection.execute("PRAGMA user_version=1")
    for path, kind, says in (
        (text, StorageMisconfigured, "not a database"),
        (foreign, StorageMisconfigured, "another program"),
        (other, UnsupportedVersion, "build the index again"),
    ):
        before = path.read_bytes()
        with SqliteStorage(path) as storage:
            for call in (
                lambda: storage.get("a"),
                lambda: list(storage.list()),
                lambda: storage.put("a", b""),
                lambda: storage.put_if_absent("a", b""),
                lambda: storage.delete_many(["a"]),
                lambda: storage.purge(1),
            ):
                with pytest.raises(kind, match=says) as caught:
                    call()
                assert str(path) in str(caught.value)
        assert path.read_bytes() == before
    assert caught.value.expected == 2
    assert caught.value.found == 1


def test_an_empty_file_is_an_empty_storage_and_one_with_objects_identifies_itself(
    storage: SqliteStorage, path: Path
) -> None:
    path.touch()
    assert list(storage.list()) == []
    assert path.stat().st_size == 0
    storage.put("object", b"x")
    assert storage.get("object") == b"x"
    storage.close()
    header = path.read_bytes()[:100]
    assert header[68:72] == APPLICATION_ID.to_bytes(4, "big") == b"TIDX"
    assert header[60:64] == (2).to_bytes(4, "big")
    assert int.from_bytes(header[16:18], "big") == 16_384


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


def test_a_missing_table_and_values_of_another_kind_are_damage(storage: SqliteStorage, path: Path) -> None:
    for column in ("first", "size_bytes", "modified_ms"):
        for value in ("x", -1, 0.5, b"\xff"):
            storage.put("object", b"bytes")
            with raw(path) as connection:
                connection.execute(f"UPDATE objects SET {column} = ?", (value,))
                with pytest.raises(CorruptFile):
                    storage.get("object")
                connection.execute("DELETE FROM objects")
    storage.put("object", b"bytes")
    with raw(path) as connection:
        connection.execute("DROP TABLE chunks")
    with pytest.raises(CorruptFile, match="chunks"):
        storage.get("object")


def test_a_path_that_can_not_be_is_misconfigured(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    (tmp_path / "folder").mkdir()
    for path in (tmp_path / "missing" / "objects.db", tmp_path / "file" / "objects.db", tmp_path / "folder"):
        with SqliteStorage(path) as storage, pytest.raises(StorageMisconfigured, match=path.name):
            storage.put("object", b"x")
        # a long stream is in a temporary file in that folder meanwhile
        if path.name == "objects.db":
            with SqliteStorage(path) as storage, pytest.raises(StorageMisconfigured):
                write_by_parts(storage, "object", bytes(9 << 20))
    for path in (tmp_path / "missing" / "objects.db", tmp_path / "file" / "objects.db"):
        with SqliteStorage(path) as storage:
            assert list(storage.list()) == []
            storage.delete_many(["object"])
            assert storage.purge(1 << 60) == ()


@contextmanager
def unprivileged() -> Iterator[None]:
    """Become the user nobody for a moment if these tests run as root, who may do everything."""
    if os.geteuid():
        yield
        return
    os.seteuid(65534)
    try:
        yield
    finally:
        os.seteuid(0)


def test_a_forbidden_path_is_misconfigured() -> None:
    folder = Path(tempfile.mkdtemp())  # not pytest's folder, which other users may not enter
    path = folder / "objects.db"
    try:
        with SqliteStorage(path) as storage:
            storage.put("object", b"x")
            folder.chmod(0o755)
            path.chmod(0o444)
            for suffix in ("-wal", "-shm"):
                Path(f"{path}{suffix}").chmod(0o444)
            with unprivileged(), SqliteStorage(path) as forbidden:
                # a user without write permission may read a database beside its writer
                assert forbidden.get("object") == b"x"
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


def test_a_read_touches_only_the_rows_it_needs(storage, path, small_rows):
    data = random.Random(3).randbytes(5 * small_rows)
    storage.put("object", data)
    with raw(path) as connection:
        connection.execute("DELETE FROM chunks WHERE number = 3")
    assert storage.get_range("object", 0, 2 * small_rows) == data[: 2 * small_rows]
    assert storage.get_range("object", 3 * small_rows, 2 * small_rows) == data[3 * small_rows :]
    for start, length in ((2 * small_rows, 1), (2 * small_rows - 1, 2), (0, len(data)), (3 * small_rows - 1, 2)):
        with pytest.raises(CorruptFile, match=r"objects\.db"):
            storage.get_range("object", start, length)
    for value in ("x'00'", "'text'"):
        with raw(path) as connection:
            connection.execute(f"UPDATE chunks SET data = {value} WHERE number = 1")
        with pytest.raises(CorruptFile, match="length"):
            storage.get_range("object", 0, 1)


def test_many_objects_are_deleted_in_few_transactions(storage, path, monkeypatch):
    """Each transaction waits for the disk, and has the bytes of its objects in the log."""
    monkeypatch.setattr(sqlite, "MOST_BYTES", 1000)
    opened = connections(monkeypatch)
    for number in range(40):
        storage.put(f"object/{number:02}", bytes(100))
    storage.put("kept", b"x")
    statements = []
    for connection in opened:
        connection.set_trace_callback(statements.append)
    storage.delete_many(f"object/{number:02}" for number in range(50))
    assert statements.count("BEGIN IMMEDIATE") == 5
    assert [info.name for info in storage.list()] == ["kept"]
    check_sound(path)


def test_an_object_that_exists_is_refused_with_all_its_rows(storage, path, small_rows):
    storage.put_if_absent("object", b"winner")
    with pytest.raises(ObjectExists):
        storage.put_if_absent("object", bytes(40 * small_rows))
    assert storage.get("object") == b"winner"
    assert count(path, "chunks") == 1


PREFIXES = ["sqlite://", "sqlite:///", "sqlite:////", "sqlite://localhost", "sqlite://localhost/"]


def test_all_spellings_open_one_database(tmp_path):
    path = tmp_path / "x.db"
    for number, prefix in enumerate(PREFIXES):
        with open_storage(f"{prefix}{path}") as storage:
            assert [info.name for info in storage.list()] == [f"{n}" for n in range(number)]
            storage.put(f"{number}", b"x")
            assert storage.uri == open_storage(f"sqlite://{path}").uri
    assert path.is_file()


def test_a_uri_that_other_tools_take_for_a_relative_path_is_told(tmp_path, monkeypatch, caplog):
    monkeypatch.chdir(tmp_path)
    for uri in ("sqlite:///index.db", "sqlite:////index.db", f"sqlite://{tmp_path}/index.db", "sqlite:///none/x.db"):
        open_storage(uri).close()
    (warning,) = [record.getMessage() for record in caplog.records]
    assert warning.startswith(f"sqlite:///index.db is the file /index.db. Other tools take it for {tmp_path}/index.db")


RACERS = 8


def test_the_first_puts_of_many_find_one_database(tmp_path: Path) -> None:
    for attempt in range(20):
        uri = f"sqlite://{tmp_path}/{attempt}.db"
        barrier = threading.Barrier(RACERS)

        def race(racer: int, uri: str = uri, barrier: threading.Barrier = barrier) -> bool:
            with open_storage(uri) as storage:
                barrier.wait(30)
                try:
                    storage.put_if_absent("log/1", b"%d" % racer)
                except ObjectExists:
                    return False
                return True

        with ThreadPoolExecutor(RACERS) as pool:
            assert sum(pool.map(race, range(RACERS))) == 1
