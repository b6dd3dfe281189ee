"""Archiving a store: each closed segment is uploaded once. Whatever the broker does meanwhile, no copy is wrong."""

from __future__ import annotations

import os
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest

from tests.rocketmq import golden_store
from tests.rocketmq.archived_store import open_index
from tests.rocketmq.messages import blank, full, joined, log, write_log
from tests.support.damage import flip
from tests.support.storage_faults import FaultStorage
from tiered_index import IndexService
from tiered_index.errors import CorruptFile, StorageUnavailable
from tiered_index.rocketmq.archive.archive import SegmentArchiver, closed_segments
from tiered_index.rocketmq.log.segments import segment_name

SEGMENT = 1_000


def three_segments(folder: Path) -> Path:
    """Two closed segments, and the one that the broker is writing."""
    segments = {}
    for start in (0, SEGMENT, 2 * SEGMENT):
        messages = log(3, start, first=start)
        segments[start] = joined(messages) if start == 2 * SEGMENT else full(messages, SEGMENT)
    return write_log(folder / "commitlog", SEGMENT, segments)


def starts(index: IndexService) -> list[int]:
    return [segment.start for segment in index.archived()]


def around_reads(index: IndexService, act: Callable[[int, Callable[[], bytes]], bytes]) -> Callable[..., object]:
    """Have `act` make each read of a segment, from the segment's start; return the index's former `archive`."""
    archive = index.archive

    def archiving(store, start, size_bytes, give, *times):
        return archive(store, start, size_bytes, lambda *place: act(start, partial(give, *place)), *times)

    index.archive = archiving  # type: ignore[method-assign]
    return archive


def stored(storage: FaultStorage) -> list[str]:
    return [info.name for info in storage.list("segments/")]


def test_the_golden_store_byte_for_byte(tmp_path, index, storage):
    store = golden_store.unpack(tmp_path / "store")
    archiver = SegmentArchiver(index, "broker a", store / "commitlog")
    assert archiver.run_once() == 5
    assert archiver.run_once() == 0
    kept = {segment.start: storage.get(segment.name)[: segment.size_bytes] for segment in index.archived("broker a")}
    assert kept == {start: data for start, data in golden_store.segments().items() if start < 81_920}
    names = stored(storage)
    # another archiver compares the segments, and uploads nothing
    assert SegmentArchiver(index, "broker a", store / "commitlog").run_once() == 0
    assert stored(storage) == names


def test_the_segment_being_written_waits_until_the_next_one_is_written_to(tmp_path, index):
    folder = three_segments(tmp_path)
    archiver = SegmentArchiver(index, "s", folder)
    assert archiver.run_once() == 2
    (folder / segment_name(3 * SEGMENT)).write_bytes(bytes(SEGMENT))  # made in advance, as the broker does
    (folder / segment_name(4 * SEGMENT)).write_bytes(b"")
    assert [s.start for s in closed_segments(folder)] == [0, SEGMENT]
    assert archiver.run_once() == 0
    path = folder / segment_name(2 * SEGMENT)
    messages = log(3, 2 * SEGMENT, first=2 * SEGMENT)
    path.write_bytes(full(messages, SEGMENT))
    (folder / segment_name(3 * SEGMENT)).write_bytes(joined(log(1, 3 * SEGMENT)).ljust(SEGMENT, b"\0"))
    assert archiver.run_once() == 1
    assert starts(index) == [0, SEGMENT, 2 * SEGMENT]


@pytest.mark.parametrize("segments", [{}, {0: b""}, {0: joined(log(2))}])
def test_a_store_without_closed_segments(tmp_path, index, segments):
    folder = write_log(tmp_path / "commitlog", SEGMENT, segments)
    assert SegmentArchiver(index, "s", folder).run_once() == 0
    assert SegmentArchiver(index, "s", tmp_path / "nothing").run_once() == 0
    assert index.archived() == ()


def test_a_segment_that_was_cut_short_is_named_and_the_others_go_up(tmp_path, index):
    folder = three_segments(tmp_path)
    os.truncate(folder / segment_name(0), SEGMENT - 1)
    archiver = SegmentArchiver(index, "s", folder)
    with pytest.raises(CorruptFile, match="cut short") as caught:
        archiver.run_once()
    assert caught.value.file.endswith(segment_name(0))
    assert starts(index) == [SEGMENT]


def test_skipped_segments_are_losses_until_they_change(tmp_path, index, storage):
    folder = three_segments(tmp_path)
    whole = (folder / segment_name(0)).read_bytes()
    os.truncate(folder / segment_name(0), SEGMENT - 1)
    archiver = SegmentArchiver(index, "s", folder, skip_corrupt=True)
    assert archiver.run_once() == 1
    (cut,) = archiver.losses
    assert (cut.kind, cut.begin, cut.end, cut.messages) == ("corrupt", 0, SEGMENT, None)
    assert "was cut short and is not archived" in cut.problem
    assert archiver.run_once() == 0
    os.truncate(folder / segment_name(0), SEGMENT - 2)
    assert archiver.run_once() == 0
    assert len(archiver.losses) == 2
    (folder / segment_name(0)).write_bytes(whole)
    assert archiver.run_once() == 1
    assert starts(index) == [0, SEGMENT]
    (folder / segment_name(SEGMENT)).write_bytes(whole)  # rewritten after it was archived
    assert archiver.run_once() == 0
    assert [(loss.begin, "it was rewritten" in loss.problem) for loss in archiver.losses[2:]] == [(SEGMENT, True)]
    calls = storage.calls("get"), storage.calls("list")
    for _ in range(3):
        assert archiver.run_once() == 0
    assert len(archiver.losses) == 3
    assert (storage.calls("get"), storage.calls("list")) == calls
    assert archiver.passed_over == (archiver.losses[2],)
    (folder / segment_name(SEGMENT)).unlink()
    assert archiver.run_once() == 0
    assert archiver.passed_over == ()


@pytest.mark.parametrize("fresh", [True, False])
@pytest.mark.parametrize("at", [10, SEGMENT - 1])
def test_a_segment_that_was_rewritten_is_named_and_the_others_go_up(tmp_path, index, fresh, at):
    folder = three_segments(tmp_path)
    archiver = SegmentArchiver(index, "s", folder)
    (folder / segment_name(SEGMENT)).rename(tmp_path / "later")
    assert archiver.run_once() == 1
    (tmp_path / "later").rename(folder / segment_name(SEGMENT))
    flip(folder / segment_name(0), at)
    if fresh:
        archiver = SegmentArchiver(index, "s", folder)
    for _ in range(2):
        with pytest.raises(CorruptFile, match=f"{segment_name(0)} of s: .*rewritten"):
            archiver.run_once()
    assert starts(index) == [0, SEGMENT]


def test_a_new_log_with_other_segments_is_refused(tmp_path, index):
    SegmentArchiver(index, "s", three_segments(tmp_path)).run_once()
    other = write_log(tmp_path / "other", 600, {start: full(log(2, start), 600) for start in (0, 600, 1200)})
    with pytest.raises(CorruptFile, match="another size"):
        SegmentArchiver(index, "s", other).run_once()
    assert SegmentArchiver(index, "t", other).run_once() == 2


@pytest.mark.parametrize("is_begun", [True, False])
def test_a_segment_deleted_while_it_is_read_leaves_nothing(tmp_path, storage, is_begun):
    size = 9 << 20
    folder = write_log(tmp_path / "commitlog", size, {0: full(log(3), size), size: joined(log(1, size))})
    with open_index(tmp_path / "root", storage) as index:
        archiver = SegmentArchiver(index, "s", folder)

        def deleting(_, read):
            data = read() if is_begun else b""
            (folder / segment_name(0)).unlink(missing_ok=True)
            return data or read()

        around_reads(index, deleting)
        assert archiver.run_once() == 0
        assert (stored(storage), index.archived()) == ([], ())


def test_a_segment_changed_while_it_is_read_is_read_again(tmp_path, index, storage):
    folder = three_segments(tmp_path)
    archiver = SegmentArchiver(index, "s", folder)
    path = folder / segment_name(0)

    def changing(start, read):
        if start == 0:
            os.utime(path, ns=(1, 1))
        return read()

    archive = around_reads(index, changing)
    with pytest.raises(StorageUnavailable, match="changed"):
        archiver.run_once()
    assert stored(storage) == []
    index.archive = archive
    assert archiver.run_once() == 2


def test_an_archiver_continues_where_it_was_stopped(tmp_path, storage):
    folder = three_segments(tmp_path)
    index = open_index(tmp_path / "root", storage)
    storage.fail("put_if_absent", nth=2, error=KeyboardInterrupt, name_prefix="log/")
    with pytest.raises(KeyboardInterrupt):
        SegmentArchiver(index, "s", folder).run_once()
    index.abandon()
    assert len(stored(storage)) == 2
    with open_index(tmp_path / "root", storage) as again:
        assert starts(again) == [0]
        assert SegmentArchiver(again, "s", folder).run_once() == 1
        assert sorted(segment.name for segment in again.archived()) == stored(storage)
        for segment in again.archived():
            assert storage.get(segment.name)[:SEGMENT] == (folder / segment_name(segment.start)).read_bytes()


def test_a_storage_that_is_down_is_reported_and_waited_for(tmp_path, index, storage):
    archiver = SegmentArchiver(index, "s", three_segments(tmp_path))
    storage.fail("list", name_prefix="log/")
    with pytest.raises(StorageUnavailable):
        archiver.run_once()
    assert archiver.run_once() == 2


def test_only_changed_files_are_read_again(tmp_path, index, storage):
    folder = three_segments(tmp_path)
    archiver = SegmentArchiver(index, "s", folder)
    archiver.run_once()
    lists = storage.calls("list")
    for path in folder.iterdir():
        path.chmod(0)  # changes the file's status, which also changes with a rewrite
    for path in folder.iterdir():
        path.chmod(0o644)
    assert archiver.run_once() == 0
    # the archiver compares each file with the end of the log
    assert storage.calls("list") == lists + 2
    assert archiver.run_once() == 0
    assert storage.calls("list") == lists + 2


def test_a_blank_alone_closes_a_segment_before_it(tmp_path, index):
    folder = write_log(tmp_path / "commitlog", SEGMENT, {0: full(log(3), SEGMENT), SEGMENT: blank(SEGMENT)})
    assert SegmentArchiver(index, "s", folder).run_once() == 1


@pytest.mark.parametrize("size", [6 << 20, 9 << 20])
def test_an_archiver_that_is_stopped_ends_within_a_segment(tmp_path, storage, size):
    contents = {number * size: full(log(2, number * size), size) for number in range(4)}
    folder = write_log(tmp_path / "commitlog", size, contents)
    with open_index(tmp_path / "root", storage) as index:
        archiver = SegmentArchiver(index, "s", folder)

        def stopping(start, read):
            data = read()
            if start == size:
                assert archiver.archived == 1  # counted while the round runs
                archiver.stop()
            return data

        archive = around_reads(index, stopping)
        whole = 2 if size < 8 << 20 else 1  # the archiver uploads a segment that it has read
        assert archiver.run_once() == archiver.archived == whole
        assert starts(index) == [number * size for number in range(whole)]
        assert len(stored(storage)) == whole
        assert archiver.run_once() == 0
        index.archive = archive  # type: ignore[method-assign]
        assert SegmentArchiver(index, "s", folder).run_once() == 3 - whole
