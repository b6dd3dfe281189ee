"""Rows of 256 KiB, and big objects, which one transaction inserts."""

import random

import pytest

from tests.storage.children import check_sound
from tests.storage.sqlite_probes import HookedClock, count, raw
from tiered_index.errors import CorruptFile, ObjectExists
from tiered_index.storage import sqlite
from tiered_index.storage.sqlite import CHUNK_BYTES, SqliteStorage


def test_ranges_across_rows(storage, path, small_rows):
    data = random.Random(1).randbytes(7 * small_rows + 123)
    storage.put("object", data)
    assert count(path, "chunks") == 8
    edges = [at + d for at in range(0, len(data), small_rows) for d in (-1, 0, 1)] + [len(data) - 1]
    for begin, end in [(a, b) for a in edges for b in edges if 0 <= a < b]:
        assert storage.get_range("object", begin, end - begin) == data[begin:end]
    assert storage.get_suffix("object", 1500) == (data[-1500:], len(data))
    assert storage.get("object") == data


def test_an_object_has_rows_of_one_size(storage, path):
    data = random.Random(2).randbytes(2 * CHUNK_BYTES + 1)
    storage.put("object", data)
    with raw(path) as connection:
        rows = connection.execute("SELECT length(data) FROM chunks ORDER BY number").fetchall()
    assert rows == [(CHUNK_BYTES,), (CHUNK_BYTES,), (1,)]
    assert storage.get("object") == data


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


def test_room_of_deleted_objects_is_used_again(storage, path):
    data = bytes(3 * CHUNK_BYTES)
    sizes = []
    for _ in range(6):
        storage.put("object", data)
        storage.delete("object")
        with raw(path) as connection:
            sizes.append(connection.execute("PRAGMA page_count").fetchone()[0])
    assert sizes[-1] <= sizes[1]


def test_a_big_object_is_invisible_until_its_transaction_ends(path, small_rows):
    seen: list[tuple[bytes, list[str], int]] = []
    with SqliteStorage(path) as reader:

        def look(_: int) -> None:
            seen.append((reader.get("object"), [info.name for info in reader.list()], count(path, "chunks")))

        with SqliteStorage(path) as storage:
            storage.put("object", b"old")
        with SqliteStorage(path, clock=HookedClock(look)) as storage:
            storage.put("object", bytes(7 * small_rows))
        assert reader.get("object") == bytes(7 * small_rows)
    assert seen == [(b"old", ["object"], 1)]


def test_a_replaced_aborted_or_deleted_object_leaves_no_rows(storage, path, small_rows):
    big = bytes(9 * small_rows)
    for data in (big, b"small", big, b"", big):
        storage.put("object", data)
        assert storage.get("object") == data
    aborted, abandoned = storage.open_writer("object"), storage.open_writer("object")
    aborted.write(big)
    abandoned.write(big)
    aborted.abort()
    del abandoned
    storage.put("object", b"one")
    assert [count(path, table) for table in ("objects", "chunks")] == [1, 1]
    storage.delete("object")
    assert [count(path, table) for table in ("objects", "chunks")] == [0, 0]


def test_many_objects_are_deleted_in_few_transactions(storage, path, monkeypatch):
    """Each transaction waits for the disk, and has the bytes of its objects in the log."""
    monkeypatch.setattr(sqlite, "_MOST_BYTES", 1000)
    for number in range(40):
        storage.put(f"object/{number:02}", bytes(100))
    storage.put("kept", b"x")
    transactions = []
    transact = sqlite._Connection.transact
    monkeypatch.setattr(
        sqlite._Connection, "transact", lambda *call, **options: transactions.append(1) or transact(*call, **options)
    )
    storage.delete_many(f"object/{number:02}" for number in range(50))
    assert len(transactions) == 5
    assert [info.name for info in storage.list()] == ["kept"]
    check_sound(path)


def test_an_object_that_exists_is_refused_with_all_its_rows(storage, path, small_rows):
    storage.put_if_absent("object", b"winner")
    with pytest.raises(ObjectExists):
        storage.put_if_absent("object", bytes(40 * small_rows))
    assert storage.get("object") == b"winner"
    assert count(path, "chunks") == 1


def test_objects_side_by_side_keep_their_rows(storage, path, small_rows):
    """The numbers of deleted rows at the end are used again."""
    contents = {name: random.Random(name).randbytes(size) for name, size in (("a", 2500), ("b", 0), ("c", 3000))}
    for name, data in contents.items():
        storage.put(name, data)
    storage.delete_many(["c", "missing"])
    storage.put("d", contents["c"])
    storage.delete("a")
    storage.put("e", contents["a"])
    assert {info.name: storage.get(info.name) for info in storage.list()} == {
        "b": b"",
        "d": contents["c"],
        "e": contents["a"],
    }
    check_sound(path, small_rows)


@pytest.mark.parametrize("value", ["x", -1, 0.5, b"\xff"])
@pytest.mark.parametrize("column", ["first", "size_bytes", "modified_ms"])
def test_rows_with_values_of_another_kind_are_damage(storage, path, column, value):
    storage.put("object", b"bytes")
    with raw(path) as connection:
        connection.execute(f"UPDATE objects SET {column} = ?", (value,))
    with pytest.raises(CorruptFile):
        storage.get("object")
