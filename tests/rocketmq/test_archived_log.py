"""Archived segments read as a log have the same entries as the broker's files.

Reads check each piece, need bounded memory, and name damage.
"""

import pytest

from tests.rocketmq.archived_store import log_of, open_index
from tests.support.cold_index import Recorder
from tests.support.damage import flip_object
from tests.support.log_records import segments_of
from tests.support.store_writer import StoreWriter
from tiered_index.connectors.rocketmq.archive.archive import ArchivedLog, SegmentArchiver
from tiered_index.connectors.rocketmq.log.commitlog import CommitLogReader
from tiered_index.errors import CorruptFile
from tiered_index.format.segments import archived as layout
from tiered_index.service.read.segments.archive import SegmentArchive
from tiered_index.storage.memory import MemoryStorage

# large segments, so that a chunk can be smaller than a piece
PIECE_BYTES = 1 << 20
SEGMENT = 5 * PIECE_BYTES - 77
BEGIN_MS = 1_700_000_000_000


@pytest.fixture(scope="module")
def store(tmp_path_factory):
    folder = tmp_path_factory.mktemp("store")
    with StoreWriter(folder, segment_bytes=SEGMENT) as writer:
        for n in range(900):
            body = bytes([n % 251]) * (3_000 + 37 * (n % 300))
            writer.put("orders", n % 3, body, keys=[f"k-{n}", f"g-{n % 7}"], store_ms=BEGIN_MS + n * 1000)
    return folder


@pytest.fixture
def archived(store, tmp_path, monkeypatch):
    """The archive of the closed segments, in a storage that records ranges."""
    monkeypatch.setattr(layout, "PIECE_BYTES", PIECE_BYTES)
    monkeypatch.setattr(layout.segment_object_bytes, "__defaults__", (PIECE_BYTES,))
    storage = Recorder(MemoryStorage())
    with open_index(tmp_path / "root", storage) as index:
        assert SegmentArchiver(index, "a-store", store / "commitlog").run_once() >= 1
    state = log_of(storage).state
    archive = SegmentArchive(storage, lambda: state, lambda: state)
    return archive, segments_of(state)[0]


def rows(reader, start, end, **how):
    """Return the entries within [start, end) of a log."""
    entries = []
    for batch in reader.batches(start, **how):
        entries += [row for row in batch.columns.to_pylist() if row["offset"] < end]
        if batch.end >= end:
            break
    return entries


def test_the_same_entries_as_from_the_files_each_piece_fetched_once(store, archived):
    archive, segment = archived
    expected = rows(CommitLogReader(store / "commitlog", check_crc=True), segment.start, segment.end)
    assert len(expected) > 500
    storage = archive.storage
    archive.table(segment)
    for chunk in (1 << 24, PIECE_BYTES // 3):
        storage.reset()
        assert rows(ArchivedLog(archive, segment, chunk_bytes=chunk), segment.start, segment.end) == expected
        assert storage.asked_bytes == segment.size_bytes  # reads each byte once
        assert max(read.length for read in storage.reads) <= max(PIECE_BYTES, min(chunk, segment.size_bytes))
    assert len(storage.reads) == 5


def test_a_changed_piece_is_named_or_skipped_with_all_its_messages(store, archived):
    archive, segment = archived
    expected = rows(CommitLogReader(store / "commitlog", check_crc=True), segment.start, segment.end)
    flip_object(archive.storage, segment.name, segment.object_bytes - 3)
    with pytest.raises(CorruptFile, match="tail"):
        ArchivedLog(archive, segment)
    flip_object(archive.storage, segment.name, segment.object_bytes - 3)
    flip_object(archive.storage, segment.name, 2 * PIECE_BYTES + 5)
    with pytest.raises(CorruptFile, match="piece of an archived segment") as caught:
        rows(ArchivedLog(archive, segment), segment.start, segment.end)
    assert (caught.value.file, caught.value.offset) == (segment.name, 2 * PIECE_BYTES)
    log = ArchivedLog(archive, segment, skip_corrupt=True)
    low, high = segment.start + 2 * PIECE_BYTES, segment.start + 3 * PIECE_BYTES
    entries = rows(log, segment.start, segment.end, skip_corrupt=True)
    whole = [row for row in expected if row["offset"] >= high or row["offset"] + row["size"] <= low]
    assert [row for row in entries if row["offset"] >= high or row["offset"] + row["size"] <= low] == whole
    assert len(expected) - 300 < len(whole) < len(expected)
    assert [(piece.begin, piece.end, piece.file) for piece in log.damaged] == [(low, high, segment.name)]
