"""The end of a log that a broker is writing: a message counts once it is complete, with all its keys. Bytes that an
earlier log left there prove nothing, and damage is named once it can't be a write in progress.
"""

import pytest

from tests.rocketmq.followed import SEGMENT, Followed, missing, rounds
from tiered_index.connectors.rocketmq.follow import dispatcher as dispatching
from tiered_index.connectors.rocketmq.follow.dispatcher import RewrittenOffsets
from tiered_index.connectors.rocketmq.log import segments
from tiered_index.connectors.rocketmq.log.commitlog import CommitLogReader
from tiered_index.connectors.rocketmq.log.segments import End
from tiered_index.connectors.rocketmq.log.store import LogEnd, StoreDirectory
from tiered_index.errors import CorruptFile

JUNK = b"\x07junk of a torn message"
ZEROS = "KEYS\x01zeros\x02note\x01a\0\0b\x02"


# half a message


def test_a_message_cut_anywhere_waits_until_it_is_whole(followed):
    followed.write(5)
    (start,) = followed.write(1, keys="last-key", uniq_key="LAST")
    end = followed.writer.next_offset
    whole = followed.segment(0).read_bytes()
    dispatcher = followed.dispatcher()
    for cut in range(start, end):
        followed.segment(0).write_bytes(whole[:cut].ljust(SEGMENT, b"\0"))
        *_, done = rounds(dispatcher)  # two rounds if the queues name a message that isn't there
        assert (dispatcher.position, done.caught_up, done.losses) == (start, True, ()), cut
        assert done.state in (End.OPEN, End.TORN)
        if cut > start + 36:
            assert (done.torn.what, done.torn.begin) == ("half a message", start)
            assert start < done.torn.end <= end
        assert len(followed.index.query("payments", "last-key")) == len(followed.index.query("orders", "last-key")) == 0
    followed.segment(0).write_bytes(whole)
    (done,) = rounds(dispatcher)
    assert (done.messages, done.torn) == (1, None)
    followed.check()


@pytest.mark.parametrize("nth", range(1, 16))
@pytest.mark.parametrize("last_bytes", ["half a message", "damage", "damage that is overwritten"])
def test_a_broker_that_writes_at_any_read_of_the_follower_loses_it_no_message(followed, monkeypatch, last_bytes, nth):
    """The broker completes a message, or overwrites it and those behind it after a restart."""
    offsets = followed.write(12)
    whole = followed.segment(0).read_bytes()
    if last_bytes == "half a message":
        half = whole[: whole.index(b"UNIQ_KEY", offsets[-1]) + 20]
        followed.segment(0).write_bytes(half.ljust(SEGMENT, b"\0"))
    else:
        followed.overwrite(offsets[10] + 100, b"Z" * 8 if last_bytes == "damage" else bytes(30))
    real, reads = segments.pread, []

    def write(*place):
        reads.append(place)
        if len(reads) == nth and last_bytes == "damage that is overwritten":
            followed.come_again()
            assert followed.writer.next_offset == offsets[10]
            followed.write(9, body=b"y" * 3)
        elif len(reads) == nth:
            followed.segment(0).write_bytes(whole)
        return real(*place)

    monkeypatch.setattr(segments, "pread", write)
    reader = CommitLogReader(followed.path / "commitlog", check_crc=True)
    dispatcher = followed.dispatcher(skip_corrupt=True, skip_missing=True, reader=reader)
    for _ in range(4):
        list(rounds(dispatcher))
    assert len(reads) > nth
    assert missing(followed) == set()
    assert dispatcher.position == followed.writer.next_offset


@pytest.mark.parametrize("back", [1, 2, 5])
def test_a_message_read_with_holes_is_read_again(followed, monkeypatch, back):
    """Reads take one page after another while the broker writes. Bytes after a hole prove nothing about the hole."""
    offsets = followed.write(20)
    real, holes = segments.pread, []

    def with_a_hole(path, size_bytes, position):
        data = real(path, size_bytes, position)
        at = data.find(f"U{20 - back:030X}".encode())
        if at < 0 or size_bytes <= 1_000 or holes:
            return data
        holes.append(at)
        return data[: at + 20] + b"\0" * 6 + data[at + 26 :]

    monkeypatch.setattr(segments, "pread", with_a_hole)
    dispatcher = followed.dispatcher()
    list(rounds(dispatcher))
    assert holes and dispatcher.position == followed.writer.next_offset > offsets[-1]
    followed.check()


@pytest.mark.parametrize("behind", ["nothing", "message", "blank"])
def test_a_last_message_with_a_bad_body_counts_once_a_head_is_behind_it(followed, behind):
    followed.write(5)
    (start,) = followed.write(1, body=b"body of the last one")
    end = followed.writer.next_offset
    if behind == "message":
        followed.write(1)
    elif behind == "blank":
        followed.write(1, body=b"x" * 7_500)
        followed.segment(1).write_bytes(bytes(SEGMENT))
    followed.overwrite(followed.segment(0).read_bytes().index(b"body of the last"), b"BODY")
    done = followed.dispatcher().run_once()
    assert done.messages == {"nothing": 5, "message": 7, "blank": 6}[behind]
    if behind == "nothing":
        assert (done.state, done.end, done.torn.begin, done.torn.end) == (End.TORN, start, start, end)


def test_the_last_message_of_a_closed_store_is_taken_with_zeros_in_its_properties(followed, monkeypatch):
    """No process writes it any more, unless a broker starts meanwhile."""
    store = StoreDirectory.open(followed.path)
    followed.write(5)
    offset = followed.writer.put("orders", 1, b"body", properties=ZEROS, store_ms=1_700_000_001_000).offset
    followed.writer.flush()
    dispatcher = followed.dispatcher()
    *_, done = rounds(dispatcher)
    assert (done.messages, done.state, done.end) == (5, End.TORN, offset)  # it may still be incomplete
    assert not store.is_closed
    followed.writer.close()
    assert store.is_closed
    real = dispatching.CommitLogReader.batches

    def starting(*positional, **named):
        for read in real(*positional, **named):
            (followed.path / "abort").touch()
            yield read

    with monkeypatch.context() as started:
        started.setattr(dispatching.CommitLogReader, "batches", starting)
        *_, done = rounds(dispatcher)
    assert (done.messages, done.state, done.end) == (0, End.TORN, offset)
    (followed.path / "abort").unlink()
    *_, done = rounds(dispatcher)
    assert (done.messages, done.state, done.torn) == (1, End.OPEN, None)
    assert [item.offset for item in followed.index.query("orders", "zeros")] == [offset]
    followed.check()
    # every broker that ended well leaves a checkpoint: this is a partial copy of a live store
    (followed.path / "checkpoint").unlink()
    assert not store.is_closed


# old bytes that a broker left after it truncated its log


def half_over_old(followed: Followed, old: bytes = b"key-old") -> tuple[int, bytes, bytes]:
    """Write five messages, then a sixth over an old one of the same lengths, up to its key.

    Return its offset, the segment's bytes now, and those of the complete message.
    """
    followed.write(5)
    (start,) = followed.write(1, body=b"pay", keys="key-new")
    end = followed.writer.next_offset
    whole = followed.segment(0).read_bytes()[:end]
    half = whole.replace(b"key-new", old)
    followed.segment(0).write_bytes((half + JUNK).ljust(SEGMENT, b"\0"))
    return start, half, (whole + JUNK).ljust(SEGMENT, b"\0")


def entry_counts(followed: Followed) -> tuple[int, int]:
    """Return the number of entries of the new key and of the old one."""
    topics = ("orders", "payments")
    new, old = (sum(len(followed.index.query(topic, key)) for topic in topics) for key in ("key-new", "key-old"))
    return new, old


@pytest.mark.parametrize("old", [b"key-old", b"key-\0\0\0"])
def test_half_a_message_that_old_bytes_complete_is_not_put(followed, old):
    """It waits as long as its bytes change at every look."""
    start, half, whole = half_over_old(followed, old)
    dispatcher = followed.dispatcher()
    done = dispatcher.run_once()
    assert (done.messages, done.end, done.state) == (5, start, End.TORN)
    # a message with holes is known to be incomplete
    assert (done.caught_up, done.torn) == (False, None) or b"\0" in old
    for number in range(4):
        changing = half.replace(old, b"key-ol%d" % number) + JUNK
        followed.segment(0).write_bytes(changing.ljust(SEGMENT, b"\0"))
        assert (dispatcher.run_once().caught_up, dispatcher.position) == (False, start)
    followed.segment(0).write_bytes(whole)
    assert sum(done.messages for done in rounds(dispatcher)) == 1
    assert entry_counts(followed) == (1, 0)
    followed.check()


@pytest.mark.parametrize("writer_goes_on", [False, True])
def test_a_whole_message_before_old_bytes_is_put_at_the_second_look(followed, writer_goes_on):
    start, _, whole = half_over_old(followed)
    followed.segment(0).write_bytes(whole)
    dispatcher = followed.dispatcher()
    assert (dispatcher.run_once().end, dispatcher.position) == (start, start)
    if writer_goes_on:
        followed.write(1)
    done = dispatcher.run_once()
    assert (done.messages, done.end) == (1 + writer_goes_on, followed.writer.next_offset)
    assert entry_counts(followed) == (1, 0)
    assert [done.caught_up for done in rounds(dispatcher)][-1]
    followed.check()


def test_a_message_completed_while_it_is_put_is_noticed(followed, monkeypatch):
    """The fingerprint covers the bytes whose keys were put. A fingerprint of later bytes would always match."""
    start, _, whole = half_over_old(followed)
    dispatcher = followed.dispatcher(skip_missing=True)
    dispatcher.run_once()
    real = dispatching.stable_part

    def then_completed(*arguments):
        taken = real(*arguments)
        followed.segment(0).write_bytes(whole)
        return taken

    with monkeypatch.context() as completing:
        completing.setattr(dispatching, "stable_part", then_completed)
        assert dispatcher.run_once().messages == 1
    assert entry_counts(followed) == (0, 1)
    with pytest.raises(RewrittenOffsets) as caught:
        followed.sharing(dispatcher).run_once()
    assert (caught.value.begin, caught.value.end) == (start, followed.writer.next_offset)
    assert [loss.kind for loss in dispatcher.run_once().losses] == ["rewritten"]
    list(rounds(dispatcher))
    assert entry_counts(followed)[0] == 1


def test_older_messages_ahead_prove_nothing(followed):
    """Reads take one chunk after another. After the chunk, and one chunk later, are messages from before the cut."""
    start, half, _ = half_over_old(followed)
    followed.number = 0
    followed.write(30, body=b"")  # these have earlier times
    segment = followed.segment(0).read_bytes()
    followed.segment(0).write_bytes(half + segment[len(half) :])
    reader = CommitLogReader(followed.path / "commitlog", chunk_bytes=len(half) + 50)
    done = followed.dispatcher(reader=reader).run_once()
    assert (done.messages, done.end, done.caught_up) == (5, start, False)


@pytest.mark.parametrize("restart", [False, True])
def test_old_messages_behind_the_end_are_waited_for_and_not_skipped_to(followed, restart):
    offsets = followed.write(40)
    followed.come_again(offsets[10])
    dispatcher = followed.dispatcher(skip_corrupt=True)
    kinds = set()
    for number in range(12):
        followed.write(1, body=b"x" * 101)
        if restart:
            followed.index.flush()
            dispatcher = followed.dispatcher(skip_corrupt=True)
        *_, done = rounds(dispatcher)
        assert (done.caught_up, done.losses, done.end) == (True, (), followed.writer.next_offset), number
        assert done.state in (End.TORN, End.OPEN)  # old messages have zeros, too
        kinds.add(done.torn.what if done.state is End.TORN else done.torn)
    assert "older bytes" in kinds
    followed.write(60, body=b"x" * 101)
    assert [done.losses for done in rounds(dispatcher)] == [()]
    assert dispatcher.position == followed.writer.next_offset
    followed.check()


# damage and holes


@pytest.mark.parametrize(
    "damage", ["a torn end before the next segment", "before younger messages", "before an older one"]
)
def test_damage_stops_before_it_once_the_log_continues_and_nothing_before_it_is_lost(followed, damage):
    """Messages behind it that are younger in the end show that it is damage: times in a log may decrease a little."""
    if damage.startswith("a torn end"):
        bad, end = max(offset for offset in followed.write(100) if offset < SEGMENT), SEGMENT
        followed.overwrite(bad + 60, bytes(SEGMENT - bad - 60))
    else:
        followed.write(10)
        (bad,) = followed.write(1)
        back = 5 if "older" in damage else 0
        followed.number -= back
        (end,) = followed.write(1)
        followed.number += back
        followed.write(5)
        followed.overwrite(bad + 4, b"\xee" * 8)
    dispatcher = followed.dispatcher()
    assert (dispatcher.run_once().caught_up, dispatcher.position) == (False, bad)
    for _ in range(2):
        with pytest.raises(CorruptFile) as caught:
            dispatcher.run_once()
        assert (caught.value.file, caught.value.offset) == (str(followed.segment(0)), bad)
    followed.index.flush()
    assert followed.index.durable_position(dispatcher.store.source) == dispatcher.position == bad
    skipping = followed.dispatcher(skip_corrupt=True)
    losses = [loss for done in rounds(skipping) for loss in done.losses]
    assert [(loss.kind, loss.begin, loss.end, loss.messages) for loss in losses] == [("corrupt", bad, end, None)]
    followed.check()


@pytest.mark.parametrize("holes", [1, 15])
def test_a_hole_before_something_readable_is_damage_unless_it_is_filled_at_the_second_look(followed, holes):
    offsets = followed.write(40)
    whole = followed.segment(0).read_bytes()
    begin, end = offsets[10], offsets[10 + holes]
    followed.overwrite(begin, bytes(end - begin))
    dispatcher = followed.dispatcher()
    done = dispatcher.run_once()
    assert (done.messages, done.state, done.caught_up, done.losses) == (10, End.OPEN, False, ())
    if holes == 1:
        followed.segment(0).write_bytes(whole)
        assert [(done.messages, done.losses) for done in rounds(dispatcher)] == [(30, ())]
        return
    for _ in range(2):
        with pytest.raises(CorruptFile, match=f"zeros .*{end}") as caught:
            dispatcher.run_once()
        assert (caught.value.file, caught.value.offset) == (str(followed.segment(0)), begin)
    assert dispatcher.position == begin
    followed.index.flush()
    losses = [loss for done in rounds(followed.dispatcher(skip_corrupt=True)) for loss in done.losses]
    assert [(loss.kind, loss.begin, loss.end) for loss in losses] == [("corrupt", begin, end)]
    for number, offset in enumerate(offsets):
        answer = followed.index.query("orders" if number % 3 else "payments", f"own-{number}")
        assert [item.offset for item in answer] == ([] if begin <= offset < end else [offset])


def test_a_hole_that_hides_the_end_of_the_log_is_named_by_consume_queues(followed, monkeypatch):
    offsets = followed.write(40)
    followed.overwrite(offsets[10], bytes(500))
    monkeypatch.setattr(StoreDirectory, "log_end", lambda _: LogEnd(offsets[10], None))
    dispatcher = followed.dispatcher()
    assert dispatcher.run_once().caught_up is False
    with pytest.raises(CorruptFile, match="zeros"):
        dispatcher.run_once()
