"""Rows of a mebibyte, and big objects, which are drafts until their last transaction."""

import random

import pytest

from tests.storage.sqlite_probes import FAR_FUTURE_MS, HookedClock, after_batch, count, raw
from tiered_index.errors import CorruptFile, ObjectExists, ObjectNotFound, StorageUnavailable
from tiered_index.storage.sqlite.connections import CHUNK_BYTES
from tiered_index.storage.sqlite.storage import SqliteStorage


def test_ranges_across_rows_and_transactions(storage, path, small_rows):
    data = random.Random(1).randbytes(7 * small_rows + 123)
    storage.put("object", data)
    assert count(path, "chunks") == 8
    edges = [at + d for at in range(0, len(data), small_rows) for d in (-1, 0, 1)] + [len(data) - 1]
    for begin, end in [(a, b) for a in edges for b in edges if 0 <= a < b]:
        assert storage.get_range("object", begin, end - begin) == data[begin:end]
    assert storage.get_suffix("object", 1500) == (data[-1500:], len(data))
    assert storage.get("object") == data


def test_an_object_has_rows_of_a_mebibyte(storage, path):
    data = random.Random(2).randbytes(2 * CHUNK_BYTES + 1)
    storage.put("object", data)
    with raw(path) as connection:
        rows = connection.execute("SELECT length(data) FROM chunks ORDER BY id").fetchall()
    assert rows == [(CHUNK_BYTES,), (CHUNK_BYTES,), (1,)]
    assert storage.get("object") == data


def test_a_read_touches_only_the_rows_it_needs(storage, path, small_rows):
    data = random.Random(3).randbytes(5 * small_rows)
    storage.put("object", data)
    with raw(path) as connection:
        third = "(SELECT chunk FROM pieces WHERE start = ?)"
        connection.execute(f"DELETE FROM chunks WHERE id = {third}", (2 * small_rows,))
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


def test_completing_an_upload_writes_no_row_again(storage, path, small_rows):
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


def test_a_replaced_aborted_or_deleted_object_leaves_no_rows(storage, path, small_rows):
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


def test_room_of_deleted_objects_is_used_again(storage, path):
    data = bytes(3 * CHUNK_BYTES)
    sizes = []
    for _ in range(6):
        storage.put("object", data)
        storage.delete("object")
        with raw(path) as connection:
            sizes.append(connection.execute("PRAGMA page_count").fetchone()[0])
    assert sizes[-1] <= sizes[1]


def test_a_big_object_is_invisible_until_its_last_transaction(path, small_rows):
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
    # transactions that were committed while it was invisible
    assert sorted({chunks for *_, chunks in seen}) == [1, 3, 5, 7]


def test_what_a_losing_put_wrote_is_removed(storage, path, small_rows, monkeypatch):
    with SqliteStorage(path) as winner:
        after_batch(storage, 2, lambda: winner.put_if_absent("object", b"winner"), monkeypatch)
        with pytest.raises(ObjectExists):
            storage.put_if_absent("object", bytes(40 * small_rows))
        assert winner.get("object") == b"winner"
    assert [count(path, table) for table in ("chunks", "drafts")] == [1, 0]


def test_a_sweep_takes_old_drafts_and_leaves_young_ones_and_objects(storage, path, small_rows):
    storage.put("object", bytes(3 * small_rows))
    handle = storage.begin_upload("uploading")
    part = storage.upload_part(handle, 1, bytes(300 * small_rows))
    with raw(path) as connection:
        for body, touched_ms, rows in ((1001, 5_000, 300), (1002, 6_000, 1), (1003, 4_999, 0)):
            connection.execute("INSERT INTO drafts VALUES (?, ?)", (body, touched_ms))
            for row in range(rows):
                chunk = connection.execute("INSERT INTO chunks (data) VALUES (x'00')").lastrowid
                connection.execute("INSERT INTO pieces VALUES (?, ?, 1, ?)", (body, row, chunk))
    storage.purge(4_999)
    assert count(path, "drafts") == 3
    storage.purge(6_000)
    with raw(path) as connection:
        assert connection.execute("SELECT body FROM drafts").fetchall() == [(1002,)]
    assert count(path, "chunks") == 3 + 300 + 1
    storage.complete_upload(handle, [part])
    assert len(storage.get("uploading")) == 300 * small_rows
    assert storage.get("object") == bytes(3 * small_rows)


@pytest.mark.parametrize("rows", [8, 40])
@pytest.mark.parametrize("nth", [1, 3])
def test_a_writer_whose_draft_was_swept_publishes_nothing(storage, path, small_rows, nth, rows, monkeypatch):
    """If a sweep's age is too small, the writer's put fails. The sweep never leaves an object with holes."""
    storage.put("object", b"old")
    with SqliteStorage(path) as sweeper:
        after_batch(storage, nth, lambda: sweeper.purge(FAR_FUTURE_MS), monkeypatch)
        with pytest.raises(StorageUnavailable, match="swept"):
            storage.put("object", bytes(rows * small_rows))
        assert sweeper.get("object") == b"old"
    assert [count(path, table) for table in ("chunks", "pieces", "drafts")] == [1, 1, 0]


def test_a_writer_finds_a_sweep_that_is_half_done(storage, path, small_rows, monkeypatch):
    """Removal takes several transactions. The first one must end the draft, or its writer would name the remaining
    rows.
    """

    def sweep_some() -> None:
        with raw(path) as connection:
            (body,) = connection.execute("SELECT body FROM drafts").fetchone()
        assert (
            storage._pool.write("removing", lambda connection: storage._bodies._remove_some(connection, body)) is True
        )

    after_batch(storage, 6, sweep_some, monkeypatch)
    with pytest.raises(StorageUnavailable, match="swept"):
        storage.put("object", bytes(20 * small_rows))
    with pytest.raises(ObjectNotFound):
        storage.get("object")
    assert count(path, "chunks") == 0


def test_a_part_that_comes_too_late_is_refused_and_leaves_no_rows(storage, path, small_rows, monkeypatch):
    """The upload is removed while its part is being written, so only the check beside the part's row can notice."""
    handle = storage.begin_upload("object")
    with SqliteStorage(path) as other:
        after_batch(storage, 2, lambda: other.abort_upload(handle), monkeypatch)
        with pytest.raises(ObjectNotFound):
            storage.upload_part(handle, 1, bytes(20 * small_rows))
    assert [count(path, table) for table in ("chunks", "pieces", "drafts", "parts")] == [0, 0, 0, 0]


@pytest.mark.parametrize("value", ["x", -1, 0.5, b"\xff"])
@pytest.mark.parametrize(
    ("table", "column"),
    [("objects", c) for c in ("body", "size_bytes", "modified_ms")]
    + [("pieces", c) for c in ("start", "size_bytes", "chunk")],
)
def test_rows_with_values_of_another_kind_are_damage(storage, path, table, column, value):
    storage.put("object", b"bytes")
    with raw(path) as connection:
        connection.execute(f"UPDATE {table} SET {column} = ?", (value,))
    with pytest.raises(CorruptFile):
        storage.get("object")
