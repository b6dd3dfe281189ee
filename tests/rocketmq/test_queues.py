"""Consume queues over several files, live, truncated and damaged."""

from pathlib import Path

import numpy as np
import pytest

from tests.support.damage import flipped
from tests.support.store_writer import pack_entry
from tiered_index.connectors.rocketmq.log.segments import segment_name
from tiered_index.connectors.rocketmq.log.store import (
    BATCH_ENTRY,
    ENTRY,
    ENTRY_BYTES,
    BatchConsumeQueue,
    ConsumeQueue,
    decode_entries,
    list_queues,
    offsets_named,
)
from tiered_index.errors import CorruptFile, InvalidArgument, StorageMisconfigured

PER_FILE = 10
FILE_BYTES = PER_FILE * ENTRY_BYTES


def write_queue(folder: Path, entries: list[tuple[int, int, int]], first: int = 0) -> ConsumeQueue:
    """Write entries from queue offset `first`, a multiple of a file's, into files of 10, filled up with zeros."""
    folder.mkdir(parents=True)
    for start in range(0, max(len(entries), 1), PER_FILE):
        content = b"".join(pack_entry(*entry) for entry in entries[start : start + PER_FILE])
        (folder / segment_name((first + start) * ENTRY_BYTES)).write_bytes(content.ljust(FILE_BYTES, b"\0"))
    return ConsumeQueue(folder.parent.name, int(folder.name), folder)


def entries(count: int, step: int = 100) -> list[tuple[int, int, int]]:
    return [(number * step, 90, -number) for number in range(count)]


@pytest.fixture
def queue(tmp_path: Path) -> ConsumeQueue:
    return write_queue(tmp_path / "T" / "3", entries(25))


def test_reads_across_files_of_which_the_oldest_may_be_deleted(queue, tmp_path):
    for begin in (0, 1, 9, 10, 11, 24, 25, 30, 1000):  # also behind the last entry
        for most in (1, 9, 11, 100):
            start, entries_read = queue.read(begin, most)
            assert (start, entries_read.tolist()) == (begin, entries(25)[begin : begin + most])
    queue = write_queue(tmp_path / "T" / "0", entries(15), first=40)
    assert queue.read()[0] == 40
    start, entries_read = queue.read(7)
    assert (start, entries_read["tags_code"].tolist()) == (40, [-number for number in range(15)])
    # the first entry at or behind a commit log offset
    for offset, wanted in ((0, 40), (1, 41), (100, 41), (999, 50), (1400, 54), (1401, 55)):
        assert queue.seek(offset) == wanted


@pytest.mark.parametrize("lost", [0, 10, 12, 23])
def test_the_end_of_a_queue_is_behind_its_last_entry(queue, lost):
    """A hole or a missing file is no end. If the broker is writing the queue, it ends after its last entry."""
    assert queue.end() == 25
    absent = ConsumeQueue("T", 9, queue.folder / "missing")
    assert (absent.end(), absent.seek(5), len(absent.read()[1]), absent.read()[1].dtype) == (0, 0, 0, ENTRY)
    path = queue.folder / segment_name(lost // PER_FILE * FILE_BYTES)
    data, at = path.read_bytes(), lost % PER_FILE * ENTRY_BYTES
    for length in (ENTRY_BYTES, FILE_BYTES - at):
        path.write_bytes(data[:at] + bytes(length) + data[at + length :])
        if lost == 23 and length > ENTRY_BYTES:
            assert queue.end() == 23
        elif queue.seek(2**63 - 1) != 25:
            with pytest.raises(CorruptFile, match="and entries after it"):
                queue.end()
    (queue.folder / segment_name(FILE_BYTES)).unlink()
    with pytest.raises(CorruptFile, match="between others is missing"):
        queue.end()


def test_a_negative_offset_is_damage(queue):
    path = queue.folder / segment_name(FILE_BYTES)
    path.write_bytes(flipped(path.read_bytes(), 2 * ENTRY_BYTES, 0xFF))
    with pytest.raises(CorruptFile, match="negative offset") as caught:
        queue.read()
    assert (caught.value.file, caught.value.offset) == (str(path), 2 * ENTRY_BYTES)
    with pytest.raises(InvalidArgument):
        queue.read(-1)
    with pytest.raises(InvalidArgument):
        queue.read(0, 0)
    assert decode_entries(b"".join(pack_entry(*entry) for entry in entries(3))[:-1]).tolist() == entries(2)


def test_queues_are_listed_and_one_that_cannot_be_read_names_nothing(tmp_path):
    for name in ("B/10", "B/9"):
        write_queue(tmp_path / "others" / name, entries(1))
    (tmp_path / "others" / "file").write_bytes(b"")
    (tmp_path / "others" / "B" / "not a queue").mkdir()
    assert [(queue.topic, queue.queue_id) for queue in list_queues(tmp_path / "others")] == [("B", 9), ("B", 10)]
    assert list_queues(tmp_path / "missing") == []
    with pytest.raises(StorageMisconfigured):
        list_queues(tmp_path / "others" / "file")
    tmp_path /= "named"
    path = write_queue(tmp_path / "A" / "1", entries(3)).folder / segment_name(0)
    write_queue(tmp_path / "A" / "0", entries(2))
    path.write_bytes(b"".join(pack_entry(offset, 10, 0) for offset in (50, 700, 20, 300, 10, 900, 40)))
    for begin in range(0, 1_000, 100):  # in no order
        named = offsets_named(tmp_path, begin, begin + 100).tolist()
        assert all(begin <= offset < begin + 100 for offset in named) and named == sorted(set(named))
    for content in (b"\xff" * FILE_BYTES, b"\x7f" * FILE_BYTES, b"\0\0\0\0\0\0\0\x05\0\0\0\x09" * 16 + b"\0" * 8, b"x"):
        path.write_bytes(content)
        assert set(offsets_named(tmp_path, 0, 2**62).tolist()) >= {0, 100}


def test_a_queue_of_batches(tmp_path):
    """An entry is a batch: each of its queue offsets leads to it, and the next batch begins behind its last message."""
    rows = [(0, 50, 0, 1, 0, 4), (50, 40, 0, 2, 4, 1), (90, 60, 0, 3, 5, 3)]
    written = np.array([(*row, b"") for row in rows], BATCH_ENTRY)
    (folder := tmp_path / "T" / "0").mkdir(parents=True)
    for number in (0, 1):
        name = segment_name(number * 2 * BATCH_ENTRY.itemsize)
        content = written[2 * number : 2 * number + 2].tobytes()
        (folder / name).write_bytes(content.ljust(2 * BATCH_ENTRY.itemsize, b"\0"))
    queue = BatchConsumeQueue("T", 0, folder)
    assert [queue.read(offset, 1)[0] for offset in range(8)] == [0, 0, 0, 0, 4, 5, 5, 5]
    assert [len(queue.read(offset)[1]) for offset in (0, 3, 4, 7, 8)] == [3, 3, 2, 1, 0]
    first, entries = queue.read(2)
    assert queue.offsets(first, entries).tolist() == [0, 4, 5, 8]
    assert (queue.end(), queue.seek(0), queue.seek(1), queue.seek(90), queue.seek(91)) == (8, 0, 4, 5, 8)
    assert queue.read()[0] == 0 and BatchConsumeQueue("T", 1, tmp_path / "none").end() == 0
