"""A commit log on disk: whole, live, torn, damaged, truncated, with deleted segments and false sizes.

Reads return every readable message, and report every unreadable range. Its end is found without a walk.
"""

import errno
import gc
import os
import random
import struct
from pathlib import Path

import pytest

from tests.rocketmq import messages
from tests.support.damage import flip
from tests.support.memory import traced_memory
from tests.support.store_writer import StoreWriter
from tiered_index.connectors.rocketmq.archive.archive import SegmentArchiver
from tiered_index.connectors.rocketmq.archive.messages import RocketmqMessages
from tiered_index.connectors.rocketmq.log import segments
from tiered_index.connectors.rocketmq.log.columns import decode_index_columns
from tiered_index.connectors.rocketmq.log.commitlog import CommitLogReader, MissingOffsets
from tiered_index.connectors.rocketmq.log.layout import STORE_V6
from tiered_index.connectors.rocketmq.log.message import MAX_MESSAGE_BYTES
from tiered_index.connectors.rocketmq.log.segments import End, list_segments, segment_name
from tiered_index.connectors.rocketmq.log.store import StoreDirectory
from tiered_index.errors import CorruptFile, InvalidArgument, StorageMisconfigured, StorageUnavailable

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
        self.made = [message for part in self.parts for message in part]
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
    return [message.physical_offset for message in made]


def until_error(iterator, error):
    """Return the items that an iterator yields before it raises, and its error."""
    items = []
    with pytest.raises(error) as caught:
        for item in iterator:
            items.append(item)
    return items, caught.value


def check_damage(log, reader, lost, place, problem=""):
    """Some messages are in a damaged place: reading stops before it, or skips it and reports the place."""
    first, behind = lost
    batches_before, error = until_error(reader.batches(), CorruptFile)
    assert offsets(batches_before) == of(log.made[:first])
    assert (error.file, error.offset) == (str(log.path(place[0] // SEGMENT)), place[0] % SEGMENT)
    assert problem in error.problem
    batches = list(reader.batches(skip_corrupt=True))
    assert offsets(batches) == of(log.made[:first] + log.made[behind:])
    (skipped,) = [skipped_range for batch in batches for skipped_range in batch.skipped]
    assert (skipped.begin, skipped.end, skipped.problem) == (*place, error.problem)
    assert batches[-1].end == log.end


def test_a_log_that_grows_is_read_on_from_its_blanks_and_its_end(log):
    """Also beside a segment that is made in advance, and up to a message that the file itself cuts short."""
    for begin in (log.made[11].physical_offset + log.made[11].size, log.made[12].physical_offset):
        assert list(log.reader(700).messages(begin)) == log.made[12:]
    advance = log.folder / segment_name(3 * SEGMENT)
    advance.write_bytes(b"\0" * SEGMENT)
    (last,) = log.reader().batches(log.end)
    assert (last.messages, last.begin, last.end, last.state) == (0, log.end, log.end, End.OPEN)
    more = messages.log(3, log.end, 40)
    log.patch(log.end, messages.joined(more))
    end = more[-1].physical_offset + more[-1].size
    log.patch(end, messages.blank(3 * SEGMENT - end)[:8])
    for begin in (end, 3 * SEGMENT):
        assert [(batch.end, batch.state) for batch in log.reader().batches(begin)] == [(3 * SEGMENT, End.OPEN)]
    advance.unlink()
    assert [(batch.end, batch.state) for batch in log.reader().batches(end)] == [(3 * SEGMENT, End.SEGMENT)]
    assert log.reader().begin_offset() == 0
    os.truncate(log.path(2), end - 2 * SEGMENT - 20)
    for skip in (False, True):
        *_, last = log.reader().batches(log.end, skip_corrupt=skip)
        assert (last.end, last.state, last.skipped) == (more[-1].physical_offset, End.TORN, ())


@pytest.mark.parametrize("chunk_bytes", CHUNKS)
@pytest.mark.parametrize(
    ("number", "at", "value"),
    [(0, 0, b"\xff"), (3, 84, b"\x70"), (11, 0, b"\0" * 8), (11, 4, b"\1\2\3\4"), (12, 28, b"\x07"), (25, 84, b"\x70")],
)
def test_damage_stops_before_it_or_is_skipped_and_named(log, chunk_bytes, number, at, value):
    damaged = log.made[number]
    log.patch(damaged.physical_offset + at, value)
    reader = log.reader(chunk_bytes)
    end = damaged.physical_offset + damaged.size
    check_damage(log, reader, (number, number + 1), (damaged.physical_offset, end))
    assert until_error(reader.messages(), CorruptFile)[0] == log.made[:number]
    assert list(reader.messages(skip_corrupt=True)) == log.made[:number] + log.made[number + 1 :]


def test_the_crc_of_a_body_is_checked_on_request_and_reading_does_not_continue_at_a_copy_of_a_message(log):
    """After damage, reading continues only at a message in its own place, even if a body has those of another."""
    outer = messages.message(log.end, body=messages.message(0).encode() * 3)
    follower = messages.keyed(log.end + outer.size, 60)
    log.patch(log.end, messages.joined([outer, follower]))
    log.patch(log.end + 90, b"#")
    assert offsets(log.reader().batches()) == of([*log.made, follower])
    log.made, log.end = [*log.made, outer, follower], follower.physical_offset + follower.size
    check_damage(log, log.reader(1, check_crc=True), (29, 30), (outer.physical_offset, follower.physical_offset), "CRC")
    assert list(log.reader().messages(skip_corrupt=True)) == [*log.made[:29], follower]


@pytest.mark.parametrize("chunk_bytes", CHUNKS)
@pytest.mark.parametrize("how", ["zeros", "cut within a message", "cut between two"])
def test_a_segment_that_ends_too_soon_before_the_end_of_the_log_is_damage(log, chunk_bytes, how):
    """The other segments show its size."""
    begin = log.made[20].physical_offset
    if how == "zeros":
        log.patch(begin, b"\0" * (2 * SEGMENT - begin))
    else:
        os.truncate(log.path(1), begin - SEGMENT + (60 if how == "cut within a message" else 0))
    check_damage(log, log.reader(chunk_bytes), (20, 24), (begin, 2 * SEGMENT), "zeros" if how == "zeros" else "")


def test_segments_that_are_gone_are_missed_and_are_never_the_end_of_the_log(log):
    for skip in (False, True):
        batches_before, error = until_error(log.reader().batches(3 * SEGMENT + 1, skip_missing=skip), MissingOffsets)
        assert (batches_before, error.begin, error.end) == ([], 3 * SEGMENT, 3 * SEGMENT + 1)
    with pytest.raises(InvalidArgument):
        list(log.reader().batches(-1))
    middle = log.path(1).rename(log.folder / "gone")
    # no broker deletes it before older ones, so only damage explains it
    for skip in (False, True):
        batches_before, error = until_error(log.reader().batches(skip_missing=skip), MissingOffsets)
        assert (offsets(batches_before), error.begin, error.end) == (of(log.made[:12]), SEGMENT, 2 * SEGMENT)
        assert error.is_between and "give the other folder of storePathCommitLog by --commitlog" in str(error)
    assert offsets(log.reader().batches(skip_corrupt=True)) == of(log.made[:12] + log.made[24:])
    middle.rename(log.path(1))
    log.path(0).unlink()
    assert offsets(log.reader().batches()) == of(log.made[12:])  # from the first segment that exists
    with pytest.raises(MissingOffsets, match="deleted before they were read: commit log offsets 100 to 3,999"):
        list(log.reader().batches(100))
    batches = list(log.reader().batches(100, skip_missing=True))
    assert offsets(batches) == of(log.made[12:])
    assert [(skipped_range.begin, skipped_range.end) for skipped_range in batches[0].skipped] == [(100, SEGMENT)]


def test_single_messages_also_of_segments_that_come_and_go(log):
    reader = log.reader()
    for message in log.made:
        assert reader.read(message.physical_offset) == reader.read(message.physical_offset, message.size) == message
    wanted = log.made[14]
    for place in [(wanted.physical_offset, wanted.size + more) for more in (-1, 1)] + [(wanted.physical_offset + 1,)]:
        with pytest.raises(CorruptFile):
            reader.read(*place)
    with pytest.raises(CorruptFile, match="wrong magic"):
        reader.read(log.end)
    with pytest.raises(MissingOffsets):
        reader.read(99 * SEGMENT)
    more = messages.log(2, 3 * SEGMENT, 40)
    messages.write_log(log.folder, SEGMENT, {3 * SEGMENT: messages.joined(more)})
    assert [reader.read(message.physical_offset) for message in more] == more
    log.path(0).unlink()
    with pytest.raises(MissingOffsets, match="deleted before"):
        reader.read(0)
    # the log is made again, of larger segments: the last listing of the folder is out of date
    log.path(0).write_bytes(messages.joined(messages.log(60)).ljust(4 * SEGMENT, b"\0"))
    for number in (1, 2, 3):
        log.path(number).unlink()
    assert reader.read(0) == messages.log(1)[0]
    assert reader.read(messages.log(60)[-1].physical_offset) == messages.log(60)[-1]


def test_messages_beside_a_writer_have_all_their_properties_or_wait(log, monkeypatch):
    """Reads take page after page while the broker writes. The first has holes of zeros, as only its content shows."""
    holes, real = [log.made[14], log.made[-3], log.made[-1]], segments.pread

    def with_holes(path, size_bytes, position):
        data = real(path, size_bytes, position)
        if size_bytes >= SEGMENT // 2:
            for message in holes:
                data = data.replace(message.uniq_key.encode(), message.uniq_key[:20].encode() + bytes(12))
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


def test_empty_logs_folders_without_segments_and_other_names(tmp_path, log):
    for content, end in (
        (b"", None),
        (messages.blank(SEGMENT), (SEGMENT, End.SEGMENT)),
        (b"\0" * SEGMENT, (0, End.OPEN)),
    ):
        (only,) = CommitLogReader(messages.write_log(tmp_path / "log", 0, {0: content})).batches()
        assert (only.messages, only.columns.num_rows) == (0, 0) and end in (None, (only.end, only.state))
    for folder in (tmp_path / "missing", tmp_path):
        reader = CommitLogReader(folder)
        assert [*reader.batches(), *reader.batches(0), *reader.messages()] == []
        assert reader.begin_offset() is None
        with pytest.raises(MissingOffsets):
            list(reader.batches(1))
    (tmp_path / "file").write_bytes(b"")
    with pytest.raises(StorageMisconfigured):
        CommitLogReader(tmp_path / "file").segments()
    (log.folder / "00000000000000008000.tmp").write_bytes(b"junk")
    (log.folder / "abc").write_bytes(b"junk")
    (log.folder / segment_name(50 * SEGMENT)).mkdir()
    assert [segment.start for segment in list_segments(log.folder)] == [0, SEGMENT, 2 * SEGMENT]


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
        batches_before, raised = until_error(log.reader().batches(skip_corrupt=skip, skip_missing=skip), error)
        assert offsets(batches_before) == of(log.made[:12])
        assert str(log.path(1)) in str(raised)


def test_many_damaged_messages_do_not_cost_a_chunk_each(tmp_path, monkeypatch):
    with StoreWriter(tmp_path / "store", segment_bytes=4 << 20) as writer:
        offsets = [
            writer.put("t", 0, b"b" * 1_000, keys=[f"k{n}"], store_ms=messages.NOW_MS + n).offset for n in range(2_000)
        ]
        end = writer.next_offset
    path = tmp_path / "store" / "commitlog" / segment_name(0)
    damaged = offsets[50::100]
    for offset in damaged:
        flip(path, offset + 200)
    read, real = list[int](), segments.pread
    monkeypatch.setattr(segments, "pread", lambda path, size, at: read.append(size) or real(path, size, at))
    batches = list(CommitLogReader(path.parent, check_crc=True).batches(skip_corrupt=True))
    assert [skipped.begin for batch in batches for skipped in batch.skipped] == damaged
    assert sum(batch.messages for batch in batches) == len(offsets) - len(damaged)
    assert sum(read) < 10 * end


# false sizes: one costs at most a chunk of memory, both to detect it and to keep its error


LARGE, CHUNK = 160 << 20, 1 << 22
BEFORE = messages.log(3)
AT = BEFORE[-1].physical_offset + BEFORE[-1].size


def head(size: int, *, offset: int = AT, body: int | None = None, sys_flag: int = 0) -> bytes:
    """Return the first bytes of a message that claims a size, by default with a body of that size."""
    made = messages.message(offset, sys_flag=sys_flag)
    data = bytearray(made.encode())
    data[:4] = struct.pack(">i", size)
    body_at = len(data) - len(made.raw_body) - 1 - len(made.topic) - 2
    data[body_at - 4 : body_at] = struct.pack(">i", size - (len(data) - len(made.raw_body)) if body is None else body)
    return bytes(data[:body_at])


LIES = {
    "more than any message has": head(MAX_MESSAGE_BYTES + 1),
    "half written": head(100 << 20),
    "half written, IPv6": head(100 << 20, sys_flag=STORE_V6),
    "a body that doesn't match": head(100 << 20, body=17),
    "a negative body": head(100 << 20, body=-1),
    "another place": head(100 << 20, offset=AT + 1),
}


@pytest.mark.parametrize("lie", LIES.values(), ids=LIES.keys())
def test_the_size_in_a_head_causes_no_read(tmp_path, monkeypatch, lie):
    sizes, real = [], segments.pread
    monkeypatch.setattr(segments, "pread", lambda path, size, at: sizes.append(size) or real(path, size, at))
    path = tmp_path / segment_name(0)
    path.write_bytes(messages.joined(BEFORE) + lie)
    os.truncate(path, LARGE)
    reader = CommitLogReader(tmp_path, chunk_bytes=CHUNK)
    for _ in range(2):
        batches = list(reader.batches())
        assert [(batch.messages, batch.end, batch.state) for batch in batches][-1] == (0, AT, End.TORN)
        assert sum(batch.messages for batch in batches) == len(BEFORE)
    assert max(sizes) <= CHUNK + 91
    sizes.clear()
    for size in (None, 100 << 20):
        with pytest.raises(CorruptFile):
            reader.read(AT, size)
    assert sum(sizes) < 1 << 19


@pytest.mark.parametrize("flags", [0, STORE_V6])
def test_a_message_longer_than_a_chunk_is_read(tmp_path, flags):
    big = messages.keyed(AT, 3, body=os.urandom(300_000), sys_flag=flags)
    messages.write_log(tmp_path, 400_000, {0: messages.joined([*BEFORE, big])})
    for chunk in (1, 92, 5_000, 1 << 20):
        reader = CommitLogReader(tmp_path, chunk_bytes=chunk)
        assert list(reader.messages()) == [*BEFORE, big]
        assert reader.read(AT) == reader.read(AT, big.size) == big


@pytest.mark.parametrize(
    ("at", "value", "said"), [(-9, b"\x80", "the topic's length is wrong"), (-2, b"\0\1", "lengths don't add up")]
)
def test_a_long_message_with_a_false_end_costs_no_read_and_its_error_keeps_no_bytes(tmp_path, at, value, said):
    big = messages.message(AT, body=bytes(4 << 20))
    data = bytearray(big.encode())
    data[at : at + len(value) or None] = value
    contents = {0: messages.joined(BEFORE) + bytes(data), 5 << 20: messages.message(5 << 20).encode()}
    messages.write_log(tmp_path, 5 << 20, contents)
    assert list(CommitLogReader(tmp_path).batches(5 << 20))  # with all imports
    with traced_memory() as memory:
        with pytest.raises(CorruptFile, match=said) as caught:
            CommitLogReader(tmp_path).read(AT)
        assert caught.value.offset == AT
        assert memory()[1] < 1 << 19
        with pytest.raises(CorruptFile, match=said) as caught:
            list(CommitLogReader(tmp_path).batches())
        damage = decode_index_columns(memoryview(data), AT).damage
        gc.collect()
        assert (caught.value.offset, damage.offset) == (AT, 0) and memory()[0] < 1 << 19


@pytest.mark.parametrize("lie", [head(250_000, offset=0, body=9), head(250_000, offset=5), head(299_999_999, offset=0)])
def test_a_false_archived_head_takes_one_request_besides_its_table(tmp_path, index, storage, lie):
    folder = messages.write_log(tmp_path / "log", 300_000, {0: lie, 300_000: messages.message(300_000).encode()})
    assert SegmentArchiver(index, "s", folder).run_once() == 1
    before = storage.calls("get_range")
    fetched = RocketmqMessages(None, index.segment_archive).at(0)
    assert (fetched.state, fetched.message, fetched.requests) == ("missing", None, 2)
    # that of the table is the other
    assert storage.calls("get_range") - before == 2
    assert fetched.bytes <= (1 << 14) + 200
    assert "is wrong" in str(fetched.problem) or "elsewhere" in str(fetched.problem)


# the end of a log, found without a walk


END_SEGMENT = 1 << 19


def walked(store):
    reader = CommitLogReader(store.commitlog)
    last = list(reader.batches())[-1]
    times = [message.store_ms for message in reader.messages()]
    return last.end, times[-1]


@pytest.mark.parametrize("seed", range(2))
def test_the_end_is_where_a_walk_ends(tmp_path, seed):
    rng = random.Random(seed)
    store = None
    with StoreWriter(tmp_path, segment_bytes=END_SEGMENT) as writer:
        for number in range(60):
            for _ in range(rng.choice((1, 1, 30))):
                body = rng.randbytes(rng.choice((0, 10, 500, 5_000, 100_000)))
                writer.put("orders", 0, body, keys=f"k{number}", store_ms=messages.NOW_MS + rng.randrange(10**6))
            writer.flush()
            store = store or StoreDirectory.open(tmp_path)
            if number % 6 == 0:
                assert store.log_end() == walked(store)
    assert len(list((tmp_path / "commitlog").iterdir())) > 2


def test_torn_and_empty_ends_and_zeros_that_hide_what_is_behind_them(tmp_path):
    with StoreWriter(tmp_path / "zeros", segment_bytes=END_SEGMENT) as writer:
        bodies = (b"x" * 3_000, bytes(300_000), b"y")
        first, _, last = [writer.put("orders", 0, body, store_ms=5) for body in bodies]
    end = StoreDirectory.open(tmp_path / "zeros").log_end()
    assert end is not None
    assert first.offset + first.size <= end.offset <= last.offset + last.size
    (tmp_path / "commitlog").mkdir()
    store = StoreDirectory.open(tmp_path)
    assert store.log_end() is None
    path = tmp_path / "commitlog" / segment_name(END_SEGMENT)
    path.write_bytes(bytes(END_SEGMENT))
    assert store.log_end() == (END_SEGMENT, None)
    path.write_bytes(messages.blank(END_SEGMENT))
    assert store.log_end() == (2 * END_SEGMENT, None)
    log = messages.log(40, END_SEGMENT)
    data = messages.joined(log)
    path.write_bytes(data[:-3].ljust(END_SEGMENT, b"\0"))
    assert store.log_end() == (log[-1].physical_offset, log[-2].store_ms)
    path.write_bytes((data + messages.blank(END_SEGMENT - len(data))).ljust(END_SEGMENT, b"\0"))
    assert store.log_end() == (2 * END_SEGMENT, log[-1].store_ms)
    (tmp_path / "commitlog" / segment_name(2 * END_SEGMENT)).write_bytes(bytes(END_SEGMENT))  # made in advance
    assert store.log_end() == (2 * END_SEGMENT, log[-1].store_ms)
