"""Consume queues over several files, live, cut and damaged; the checkpoint."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from tests.rocketmq import messages
from tiered_index.errors import CorruptFile, InvalidArgument, StorageMisconfigured
from tiered_index.rocketmq.log import consumequeue
from tiered_index.rocketmq.log.commitlog import CommitLogReader
from tiered_index.rocketmq.log.consumequeue import (
    ENTRY,
    ENTRY_BYTES,
    ConsumeQueue,
    QueuePositions,
    decode_entries,
    list_queues,
    pack_entry,
)
from tiered_index.rocketmq.log.segments import pread, segment_name
from tiered_index.rocketmq.log.store import CHECKPOINT_BYTES, Checkpoint, decode_checkpoint

PER_FILE = 10
FILE_BYTES = PER_FILE * ENTRY_BYTES


def write_queue(folder: Path, entries: list[tuple[int, int, int]], first: int = 0) -> ConsumeQueue:
    """Write entries from queue offset `first`, a multiple of a file's, into files of 10, the last filled up with
    zeros.
    """
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


@pytest.mark.parametrize("begin", [0, 1, 9, 10, 11, 24])
@pytest.mark.parametrize("most", [1, 9, 11, 100])
def test_reads_across_files(queue, begin, most):
    start, found = queue.read(begin, most)
    assert (start, found.tolist()) == (begin, entries(25)[begin : begin + most])


@pytest.mark.parametrize("begin", [25, 29, 30, 1000])
def test_nothing_behind_the_last_entry(queue, begin):
    start, found = queue.read(begin)
    assert (start, len(found)) == (begin, 0)


def test_a_queue_whose_oldest_files_are_deleted(tmp_path):
    queue = write_queue(tmp_path / "T" / "0", entries(15), first=40)
    assert queue.read()[0] == 40
    start, found = queue.read(7)
    assert (start, found["tags_code"].tolist()) == (40, [-number for number in range(15)])
    assert (queue.seek(0), queue.seek(1), queue.seek(100), queue.seek(99_999)) == (40, 41, 41, 55)


def test_seek_finds_the_first_entry_at_or_behind(queue):
    for offset, wanted in ((0, 0), (1, 1), (100, 1), (999, 10), (2400, 24), (2401, 25)):
        assert queue.seek(offset) == wanted
    assert ConsumeQueue("T", 9, queue.folder / "missing").seek(5) == 0


def test_a_missing_queue_is_empty(tmp_path):
    start, found = ConsumeQueue("T", 0, tmp_path / "missing").read()
    assert (start, len(found), found.dtype) == (0, 0, ENTRY)
    assert list_queues(tmp_path / "missing") == []


def test_bytes_of_half_an_entry_are_left_out():
    data = b"".join(pack_entry(*entry) for entry in entries(3))
    assert decode_entries(data[:-1]).tolist() == entries(2)
    assert len(decode_entries(data[:19])) == 0


def test_a_negative_offset_is_damage(queue):
    path = queue.folder / segment_name(FILE_BYTES)
    data = bytearray(path.read_bytes())
    data[2 * ENTRY_BYTES] = 0xFF
    path.write_bytes(data)
    with pytest.raises(CorruptFile, match="negative offset") as caught:
        queue.read()
    assert (caught.value.file, caught.value.offset) == (str(path), 2 * ENTRY_BYTES)
    with pytest.raises(InvalidArgument):
        queue.read(-1)
    with pytest.raises(InvalidArgument):
        queue.read(0, 0)


def test_queues_are_listed_by_topic_and_number(tmp_path):
    for name in ("B/10", "B/9", "A/0"):
        write_queue(tmp_path / name, entries(1))
    (tmp_path / "file").write_bytes(b"")
    (tmp_path / "A" / "not a queue").mkdir()
    assert [(queue.topic, queue.queue_id) for queue in list_queues(tmp_path)] == [("A", 0), ("B", 9), ("B", 10)]
    with pytest.raises(StorageMisconfigured):
        list_queues(tmp_path / "file")


def test_positions_of_all_queues_together(tmp_path):
    write_queue(tmp_path / "A" / "0", [(offset, 10, 0) for offset in range(0, 500, 20)])
    write_queue(tmp_path / "A" / "1", [(offset, 10, 0) for offset in range(10, 500, 40)])
    wanted = np.array(sorted([*range(0, 500, 20), *range(10, 500, 40)]))
    positions = QueuePositions(tmp_path)
    for begin, end in ((0, 50), (50, 60), (55, 300), (300, 1000), (1000, 2000), (0, 100), (90, 100)):
        assert positions.between(begin, end).tolist() == wanted[(wanted >= begin) & (wanted < end)].tolist()


@pytest.fixture
def read(monkeypatch):
    """How many bytes each read of a queue file asked for."""
    sizes = []

    def counted(path, size_bytes, position):
        sizes.append(size_bytes)
        return pread(path, size_bytes, position)

    monkeypatch.setattr(consumequeue, "pread", counted)
    return sizes


def test_a_pass_reads_each_entry_once_however_it_is_cut(tmp_path, monkeypatch, read):
    monkeypatch.setattr(consumequeue, "_READ_AHEAD", 4)
    queues = [[(offset, 10, 0) for offset in range(queue * 10, 4_000, 40 + queue * 100)] for queue in range(4)]
    for number, held in enumerate(queues):
        write_queue(tmp_path / "A" / str(number), held)
    wanted = np.array(sorted({entry[0] for held in queues for entry in held}))
    count = sum(map(len, queues))
    for step in (1, 7, 90, 5_000):
        read.clear()
        positions = QueuePositions(tmp_path)
        found = [positions.between(begin, begin + step).tolist() for begin in range(0, 4_100, step)]
        assert [offset for part in found for offset in part] == wanted.tolist()
        again = [positions.between(4_100, end).tolist() for end in (4_200, 9_000)]
        assert again == [[], []]
        # the search for where to begin, in entries of their own
        sought = sum(size for size in read if size == ENTRY_BYTES)
        assert sum(read) - sought <= (count + 4 * PER_FILE) * ENTRY_BYTES
        assert sought <= 4 * 10 * ENTRY_BYTES


def test_at_the_end_of_a_log_the_queues_are_left_alone_until_it_has_gone_on(tmp_path, monkeypatch, read):
    monkeypatch.setattr(consumequeue, "_BYTES_BETWEEN_LISTINGS", 1_000)
    write_queue(tmp_path / "A" / "0", entries(5))
    positions = QueuePositions(tmp_path)
    assert positions.between(0, 500).tolist() == [0, 100, 200, 300, 400]
    assert positions.between(500, 900).tolist() == []
    write_queue(tmp_path / "A" / "1", [(offset, 10, 0) for offset in (950, 1_100)])
    read.clear()
    for begin in range(500, 1_000, 5):
        assert positions.between(begin, 2_000).tolist() == []
    assert read == []
    assert positions.between(1_000, 2_000).tolist() == [1_100]


def test_a_queue_whose_offsets_are_in_no_order_names_only_what_was_asked_for(tmp_path):
    write_queue(tmp_path / "A" / "0", [(offset, 10, 0) for offset in (50, 700, 20, 300, 10, 900, 40)])
    positions = QueuePositions(tmp_path)
    for begin in range(0, 1_000, 100):
        found = positions.between(begin, begin + 100)
        assert all(begin <= offset < begin + 100 for offset in found.tolist())
        assert (np.diff(found) > 0).all()


def test_a_queue_that_cannot_be_read_costs_only_the_walk(tmp_path):
    made = messages.log(20)
    folder = messages.write_log(tmp_path / "commitlog", 8_000, {0: messages.joined(made)})
    queue = write_queue(
        tmp_path / "consumequeue" / "TopicA" / "1", [(one.physical_offset, one.size, 0) for one in made]
    )
    path = queue.folder / segment_name(0)
    for content in (b"\xff" * FILE_BYTES, b"\x7f" * FILE_BYTES, b"\0\0\0\0\0\0\0\x05\0\0\0\x09" * 16 + b"\0" * 8, b"x"):
        path.write_bytes(content)
        reader = CommitLogReader(folder, chunk_bytes=1000, positions=QueuePositions(tmp_path / "consumequeue"))
        assert list(reader.messages()) == made


def test_a_checkpoint_comes_back():
    checkpoint = Checkpoint(
        commit_log_ms=9_000, consume_queue_ms=8_000, index_ms=4_000, master_flushed_offset=7, confirmed_offset=-1
    )
    data = checkpoint.encode()
    assert len(data) == CHECKPOINT_BYTES
    assert decode_checkpoint(data) == checkpoint
    assert (checkpoint.safe_ms, checkpoint.safe_index_ms) == (5_000, 4_000)
    assert (Checkpoint().safe_ms, Checkpoint(commit_log_ms=5, consume_queue_ms=5, index_ms=1).safe_index_ms) == (0, 0)


def test_damaged_checkpoints():
    with pytest.raises(CorruptFile, match="cut short") as caught:
        decode_checkpoint(b"\0" * 39, "store/checkpoint")
    assert caught.value.file == "store/checkpoint"
    with pytest.raises(CorruptFile, match="negative time"):
        decode_checkpoint(Checkpoint(index_ms=-1).encode())
