"""A commit log on disk: whole, live, torn, damaged, truncated, with deleted segments.

Reads return every readable message, and report every unreadable range.
"""

from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest

from tests.rocketmq import messages
from tests.support.store_writer import StoreWriter
from tiered_index.errors import CorruptFile, InvalidArgument, StorageMisconfigured, StorageUnavailable
from tiered_index.rocketmq.log import commitlog, segments
from tiered_index.rocketmq.log.commitlog import CommitLogReader, MissingOffsets
from tiered_index.rocketmq.log.segments import End, list_segments, segment_name

SEGMENT = 4_000
CHUNKS = [1, 700, 1 << 20]


class Log:
    """Three segments: two full ones, and one that the broker is writing."""

    def __init__(self, folder: Path) -> None:
        self.parts = [messages.log(12, start, first) for start, first in ((0, 0), (SEGMENT, 12), (2 * SEGMENT, 24))]
        self.parts[2] = self.parts[2][:5]
        self.folder = messages.write_log(
            folder,
            SEGMENT,
            {
                0: messages.full(self.parts[0], SEGMENT),
                SEGMENT: messages.full(self.parts[1], SEGMENT),
                2 * SEGMENT: messages.joined(self.parts[2]),
            },
        )
        self.made = [one for part in self.parts for one in part]
        self.end = self.made[-1].physical_offset + self.made[-1].size

    def path(self, number: int) -> Path:
        return self.folder / segment_name(number * SEGMENT)

    def patch(self, offset: int, value: bytes) -> None:
        with self.path(offset // SEGMENT).open("rb+") as file:
            file.seek(offset % SEGMENT)
            file.write(value)

    def reader(self, chunk_bytes: int = 1 << 20, **options) -> CommitLogReader:
        return CommitLogReader(self.folder, chunk_bytes=chunk_bytes, **options)


@pytest.fixture
def log(tmp_path: Path) -> Log:
    return Log(tmp_path / "commitlog")


def offsets(batches):
    return sorted({offset for batch in batches for offset in batch.columns.column("offset").to_pylist()})


def of(made):
    return [one.physical_offset for one in made]


def until_error(iterator, error):
    """Return the items that an iterator yields before it raises, and its error."""
    found = []
    with pytest.raises(error) as caught:
        for one in iterator:
            found.append(one)
    return found, caught.value


def check_damage(log, reader, lost, place, problem=""):
    """Some messages are in a damaged place: reading stops before it, or skips it and reports the place."""
    first, behind = lost
    found, error = until_error(reader.batches(), CorruptFile)
    assert offsets(found) == of(log.made[:first])
    assert (error.file, error.offset) == (str(log.path(place[0] // SEGMENT)), place[0] % SEGMENT)
    assert problem in error.problem
    batches = list(reader.batches(skip_corrupt=True))
    assert offsets(batches) == of(log.made[:first] + log.made[behind:])
    (skipped,) = [one for batch in batches for one in batch.skipped]
    assert (skipped.begin, skipped.end, skipped.problem) == (*place, error.problem)
    assert batches[-1].end == log.end


@pytest.mark.parametrize("chunk_bytes", CHUNKS)
def test_reads_on_from_any_message(log, chunk_bytes):
    reader = log.reader(chunk_bytes)
    for number in (0, 1, 11, 12, 13, 28):
        batches = list(reader.batches(log.made[number].physical_offset))
        assert offsets(batches) == of(log.made[number:])
        assert (batches[-1].end, batches[-1].state) == (log.end, End.OPEN)
        ends = [log.made[number].physical_offset, *(batch.end for batch in batches)]
        assert ends == sorted(ends)
    assert list(reader.messages(log.made[13].physical_offset)) == log.made[13:]


def test_reads_on_from_a_blank_and_from_the_end(log):
    behind = log.made[11].physical_offset + log.made[11].size
    assert offsets(log.reader().batches(behind)) == of(log.made[12:])
    (last,) = log.reader().batches(log.end)
    assert (last.messages, last.begin, last.end, last.state) == (0, log.end, log.end, End.OPEN)


def test_follows_a_log_that_grows(log):
    reader = log.reader()
    position = list(reader.batches())[-1].end
    more = messages.log(3, position, 40)
    log.patch(position, messages.joined(more))
    batches = list(reader.batches(position))
    assert offsets(batches) == of(more)
    left = 3 * SEGMENT - batches[-1].end
    log.patch(batches[-1].end, messages.blank(left)[:8])
    (last,) = list(reader.batches(batches[-1].end))
    assert (last.end, last.state) == (3 * SEGMENT, End.SEGMENT)
    (log.folder / segment_name(3 * SEGMENT)).write_bytes(b"\0" * SEGMENT)
    (last,) = list(reader.batches(3 * SEGMENT))
    assert last.state is End.OPEN
    assert log.reader().begin_offset() == 0


def test_a_segment_made_in_advance_ends_nothing(log):
    (log.folder / segment_name(3 * SEGMENT)).write_bytes(b"\0" * SEGMENT)
    batches = list(log.reader().batches())
    assert offsets(batches) == of(log.made)
    assert (batches[-1].end, batches[-1].state) == (log.end, End.OPEN)


@pytest.mark.parametrize("chunk_bytes", CHUNKS)
@pytest.mark.parametrize("length", [1, 8, 50, 100])
def test_a_torn_end_is_the_end_for_now(log, chunk_bytes, length):
    (torn,) = messages.log(1, log.end, 50)
    log.patch(log.end, torn.encode()[:length])
    for skip in (False, True):
        batches = list(log.reader(chunk_bytes).batches(skip_corrupt=skip))
        assert offsets(batches) == of(log.made)
        assert batches[-1].end == log.end
        assert batches[-1].state is (End.OPEN if length == 1 else End.TORN)  # the first byte of a size is zero
        assert not batches[-1].skipped
    log.patch(log.end, torn.encode())
    assert offsets(log.reader(chunk_bytes).batches(log.end)) == [log.end]


@pytest.mark.parametrize("chunk_bytes", CHUNKS)
def test_a_file_cut_within_the_last_message(log, chunk_bytes):
    os.truncate(log.path(2), log.end - 2 * SEGMENT - 10)
    batches = list(log.reader(chunk_bytes).batches())
    assert offsets(batches) == of(log.made[:-1])
    assert (batches[-1].end, batches[-1].state) == (log.made[-1].physical_offset, End.TORN)


@pytest.mark.parametrize("chunk_bytes", CHUNKS)
@pytest.mark.parametrize(
    ("number", "at", "value"),
    [
        (0, 0, b"\xff"),
        (3, 0, b"\0" * 8),
        (3, 84, b"\x70"),
        (11, 0, b"\0" * 8),
        (11, 4, b"\1\2\3\4"),
        (12, 28, b"\x07"),
        (25, 0, b"\xff"),
        (25, 84, b"\x70"),
    ],
)
def test_damage_stops_before_it_or_is_skipped_and_named(log, chunk_bytes, number, at, value):
    damaged = log.made[number]
    log.patch(damaged.physical_offset + at, value)
    reader = log.reader(chunk_bytes)
    end = damaged.physical_offset + damaged.size
    check_damage(log, reader, (number, number + 1), (damaged.physical_offset, end))
    assert until_error(reader.messages(), CorruptFile)[0] == log.made[:number]
    assert list(reader.messages(skip_corrupt=True)) == log.made[:number] + log.made[number + 1 :]


def test_a_crc_is_checked_on_request(log):
    log.patch(log.made[3].physical_offset + 90, b"#")
    assert offsets(log.reader().batches()) == of(log.made)
    place = log.made[3].physical_offset, log.made[4].physical_offset
    check_damage(log, log.reader(check_crc=True), (3, 4), place, "CRC")
    assert list(log.reader().messages(skip_corrupt=True)) == log.made[:3] + log.made[4:]


def test_reading_does_not_continue_at_a_copy_of_a_message(log):
    """After damage, reading continues only at a message in its own place, even if a body has the bytes of another
    message.
    """
    inner = messages.message(0).encode()
    outer = messages.message(log.end, body=inner * 3)
    follower = messages.keyed(log.end + outer.size, 60)
    log.patch(log.end, messages.joined([outer, follower]))
    log.patch(log.end + 84, b"\x70")
    batches = list(log.reader(1).batches(skip_corrupt=True))
    assert offsets(batches)[-1] == follower.physical_offset
    (skipped,) = [one for batch in batches for one in batch.skipped]
    assert (skipped.begin, skipped.end) == (log.end, follower.physical_offset)


@pytest.mark.parametrize("chunk_bytes", CHUNKS)
def test_zeros_before_the_end_of_the_log_are_damage(log, chunk_bytes):
    begin = log.made[9].physical_offset
    log.patch(begin, b"\0" * (SEGMENT - begin))
    check_damage(log, log.reader(chunk_bytes), (9, 12), (begin, SEGMENT), "zeros")


@pytest.mark.parametrize("chunk_bytes", CHUNKS)
@pytest.mark.parametrize("whole", [False, True])
def test_a_cut_segment_before_the_end_of_the_log_is_damage(log, chunk_bytes, whole):
    """The segment was truncated within a message, or between two. The other segments show its size."""
    begin = log.made[20].physical_offset
    os.truncate(log.path(1), begin - SEGMENT + (0 if whole else 60))
    check_damage(log, log.reader(chunk_bytes), (20, 24), (begin, 2 * SEGMENT))


def test_deleted_segments_are_missed(log):
    log.path(0).unlink()
    reader = log.reader()
    assert offsets(reader.batches()) == of(log.made[12:])  # from the first segment that exists
    found, error = until_error(reader.batches(100), MissingOffsets)
    assert (found, error.begin, error.end) == ([], 100, SEGMENT)
    batches = list(reader.batches(100, skip_missing=True))
    assert offsets(batches) == of(log.made[12:])
    assert [(one.begin, one.end) for one in batches[0].skipped] == [(100, SEGMENT)]
    with pytest.raises(MissingOffsets, match="offsets 100 to 3,999"):
        reader.read(100)


def test_a_segment_missing_in_the_middle(log):
    log.path(1).unlink()
    found, error = until_error(log.reader().batches(), MissingOffsets)
    assert (offsets(found), error.begin, error.end) == (of(log.made[:12]), SEGMENT, 2 * SEGMENT)
    batches = list(log.reader().batches(skip_missing=True))
    assert offsets(batches) == of(log.made[:12] + log.made[24:])


def test_positions_behind_the_log_are_never_its_end(log):
    for skip in (False, True):
        found, error = until_error(log.reader().batches(3 * SEGMENT + 1, skip_missing=skip), MissingOffsets)
        assert (found, error.begin, error.end) == ([], 3 * SEGMENT, 3 * SEGMENT + 1)
    with pytest.raises(InvalidArgument):
        list(log.reader().batches(-1))


def test_a_segment_deleted_while_it_is_read(log, monkeypatch):
    real = segments.pread

    def delete_first(path, size, position):
        if path == log.path(1) and position > 0:
            path.unlink(missing_ok=True)
        return real(path, size, position)

    monkeypatch.setattr(segments, "pread", delete_first)
    found, error = until_error(log.reader(700).batches(), MissingOffsets)
    read = offsets(found)
    assert read == of(log.made[: len(read)])
    assert 12 < len(read) < 24
    assert (error.begin, error.end) == (log.made[len(read)].physical_offset, 2 * SEGMENT)


def test_a_message_completed_during_the_check_is_not_damage(log, monkeypatch):
    """The reader finds half a message. Before it looks for messages after that, the broker completes it, and writes two
    more.
    """
    more = messages.log(3, log.end, 70)
    log.patch(log.end, more[0].encode()[:30])
    real = CommitLogReader._readable_behind

    def meanwhile(reader, segment, at):
        log.patch(log.end, messages.joined(more))
        return real(reader, segment, at)

    monkeypatch.setattr(CommitLogReader, "_readable_behind", meanwhile)
    batches = list(log.reader().batches())
    assert offsets(batches) == of(log.made + more)
    assert batches[-1].state is End.OPEN


def test_single_messages(log):
    reader = log.reader()
    wanted = log.made[14]
    assert reader.read(wanted.physical_offset) == wanted
    assert reader.read(wanted.physical_offset, wanted.size) == wanted
    for size in (wanted.size - 1, wanted.size + 1, 10):
        with pytest.raises(CorruptFile):
            reader.read(wanted.physical_offset, size)
    with pytest.raises(CorruptFile):
        reader.read(wanted.physical_offset + 1)
    with pytest.raises(CorruptFile, match="wrong magic"):
        reader.read(log.end)
    with pytest.raises(MissingOffsets):
        reader.read(99 * SEGMENT)


def test_single_messages_list_the_folder_only_where_the_last_look_does_not_give_them(log, monkeypatch):
    reader, looks = log.reader(), []
    real = commitlog.list_segments
    monkeypatch.setattr(commitlog, "list_segments", lambda folder: looks.append(folder) or real(folder))
    for one in log.made:
        assert reader.read(one.physical_offset) == one
    assert len(looks) == 1
    more = messages.log(2, 3 * SEGMENT, 40)
    messages.write_log(log.folder, SEGMENT, {3 * SEGMENT: messages.joined(more)})
    assert [reader.read(one.physical_offset) for one in more] == more
    assert len(looks) == 2
    log.path(0).unlink()
    with pytest.raises(MissingOffsets, match="deleted before"):
        reader.read(0)
    with pytest.raises(CorruptFile, match="wrong magic"):
        reader.read(more[-1].physical_offset + more[-1].size)
    # the log is made again, of larger segments: the last listing of the folder is out of date
    log.path(0).write_bytes(messages.joined(messages.log(60)).ljust(4 * SEGMENT, b"\0"))
    for number in (1, 2, 3):
        log.path(number).unlink()
    assert reader.read(0) == messages.log(1)[0]
    assert reader.read(messages.log(60)[-1].physical_offset) == messages.log(60)[-1]


def test_messages_beside_a_writer_have_all_their_properties_or_wait(log, monkeypatch):
    """Reads take one page after another while the broker writes. The first read has holes of zeros, which only its
    content shows.
    """
    holes, real = [log.made[14], log.made[-3], log.made[-1]], segments.pread

    def with_holes(path, size_bytes, position):
        data = real(path, size_bytes, position)
        if size_bytes >= SEGMENT // 2:
            for one in holes:
                data = data.replace(one.uniq_key.encode(), one.uniq_key[:20].encode() + bytes(12))
        return data

    monkeypatch.setattr(segments, "pread", with_holes)
    assert list(log.reader().messages()) == log.made[:-1]
    holes.pop()
    assert list(log.reader().messages()) == log.made


def test_zeros_that_are_a_producers_are_read(log):
    odd = messages.message(log.end, properties=b"KEYS\x01a\0b\x02")
    after = messages.keyed(log.end + odd.size, 80)
    log.patch(log.end, odd.encode())
    assert list(log.reader().messages()) == log.made
    assert list(log.reader().messages(closed=True)) == [*log.made, odd]
    log.patch(after.physical_offset, after.encode())
    assert list(log.reader().messages()) == [*log.made, odd, after]


@pytest.mark.parametrize("content", [b"", messages.blank(SEGMENT), b"\0" * SEGMENT])
def test_logs_of_no_message(tmp_path, content):
    folder = messages.write_log(tmp_path / "log", 0, {0: content})
    (only,) = CommitLogReader(folder).batches()
    assert (only.messages, only.columns.num_rows) == (0, 0)
    if content:
        assert (only.end, only.state) == ((SEGMENT, End.SEGMENT) if content[4] else (0, End.OPEN))


def test_empty_and_missing_folders(tmp_path):
    for folder in (tmp_path, tmp_path / "missing"):
        reader = CommitLogReader(folder)
        for read in (reader.batches(), reader.batches(0), reader.messages()):
            assert list(read) == []
        assert reader.begin_offset() is None
        with pytest.raises(MissingOffsets):
            list(reader.batches(1))


def test_other_names_are_left_alone(log):
    (log.folder / "00000000000000008000.tmp").write_bytes(b"junk")
    (log.folder / "abc").write_bytes(b"junk")
    (log.folder / segment_name(50 * SEGMENT)).mkdir()
    assert [segment.start for segment in list_segments(log.folder)] == [0, SEGMENT, 2 * SEGMENT]
    assert offsets(log.reader().batches()) == of(log.made)


@pytest.mark.parametrize(
    ("number", "error"),
    [(errno.EACCES, StorageMisconfigured), (errno.EPERM, StorageMisconfigured), (errno.EIO, StorageUnavailable)],
)
def test_files_that_may_not_be_read(log, monkeypatch, number, error):
    real = os.open

    def refuse(path, flags, *more, **named):
        if str(path) == str(log.path(1)):
            raise OSError(number, os.strerror(number), str(path))
        return real(path, flags, *more, **named)

    monkeypatch.setattr(os, "open", refuse)
    for skip in (False, True):
        found, raised = until_error(log.reader().batches(skip_corrupt=skip, skip_missing=skip), error)
        assert offsets(found) == of(log.made[:12])
        assert str(log.path(1)) in str(raised)


def test_a_file_where_the_folder_should_be(tmp_path):
    (tmp_path / "commitlog").write_bytes(b"")
    with pytest.raises(StorageMisconfigured):
        CommitLogReader(tmp_path / "commitlog").segments()


def test_memory_is_bounded_by_the_chunk_whatever_sizes_say(tmp_path, monkeypatch):
    """A size that reaches nearly to the end of a large segment causes one read of that size. Chunks do not grow without
    bound.
    """
    segment = 1 << 20
    made = messages.log(3)
    lying = bytearray(messages.keyed(sum(one.size for one in made), 3).encode())
    lying[:4] = (segment - 5_000).to_bytes(4, "big")
    folder = messages.write_log(
        tmp_path / "log", segment, {0: messages.joined(made) + bytes(lying), segment: messages.blank(segment)}
    )
    sizes = []
    real = segments.pread
    monkeypatch.setattr(
        segments, "pread", lambda path, size, position: sizes.append(size) or real(path, size, position)
    )
    found, error = until_error(CommitLogReader(folder, chunk_bytes=4096).batches(), CorruptFile)
    assert offsets(found) == of(made)
    assert "is wrong" in str(error) or "add up" in str(error)
    assert max(sizes) <= segment
    assert len([size for size in sizes if size > 10_000]) <= 4


def test_many_damaged_messages_do_not_cost_a_chunk_each(tmp_path, monkeypatch):
    with StoreWriter(tmp_path / "store", segment_bytes=4 << 20) as writer:
        offsets = [
            writer.put("t", 0, b"b" * 1_000, keys=[f"k{n}"], store_ms=messages.NOW_MS + n).offset for n in range(2_000)
        ]
        end = writer.next_offset
    path = tmp_path / "store" / "commitlog" / segment_name(0)
    data = bytearray(path.read_bytes())
    damaged = offsets[50::100]
    for offset in damaged:
        data[offset + 200] ^= 1
    path.write_bytes(data)
    read: list[int] = []
    real = segments.pread
    monkeypatch.setattr(
        segments, "pread", lambda path, size, at: read.append(len(found := real(path, size, at))) or found
    )
    reader = CommitLogReader(path.parent, check_crc=True)
    batches = list(reader.batches(skip_corrupt=True))
    assert [skipped.begin for batch in batches for skipped in batch.skipped] == damaged
    assert sum(batch.messages for batch in batches) == len(offsets) - len(damaged)
    assert sum(read) < 10 * end
