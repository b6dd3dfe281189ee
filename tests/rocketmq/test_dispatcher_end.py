"""The end of a log that a broker is writing: a message counts once it is complete, with all its keys."""

from __future__ import annotations

import pytest

from tests.rocketmq.followed import SEGMENT, rounds
from tiered_index.rocketmq.follow import tail
from tiered_index.rocketmq.log import segments
from tiered_index.rocketmq.log.commitlog import CommitLogReader
from tiered_index.rocketmq.log.segments import End


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
        assert len(followed.index.query("payments", "last-key")) == len(followed.index.query("orders", "last-key")) == 0
    followed.segment(0).write_bytes(whole)
    assert dispatcher.run_once().messages == 1
    followed.check()


@pytest.mark.parametrize("finished_at", range(1, 7))
def test_a_message_finished_between_two_looks_has_all_its_keys(followed, monkeypatch, finished_at):
    followed.write(5)
    (start,) = followed.write(1)
    whole = followed.segment(0).read_bytes()
    cut = whole.index(b"UNIQ_KEY", start) + 20
    followed.segment(0).write_bytes(whole[:cut].ljust(SEGMENT, b"\0"))
    dispatcher = followed.dispatcher()
    real, looks = tail.stored_bytes, []

    def look(*arguments):
        looks.append(arguments)
        if len(looks) == finished_at:
            followed.segment(0).write_bytes(whole)
        return real(*arguments)

    monkeypatch.setattr(tail, "stored_bytes", look)
    for _ in range(4):
        dispatcher.run_once()
        assert dispatcher.position in (start, followed.writer.next_offset)
    assert dispatcher.position == followed.writer.next_offset
    followed.check()


@pytest.mark.parametrize("back", [1, 2, 5])
def test_a_message_read_with_holes_is_read_again(followed, monkeypatch, back):
    """Reads take one page after another while the broker writes. Bytes after a hole prove nothing about the hole."""
    offsets = followed.write(20)
    real = segments.pread

    def with_a_hole(path, size_bytes, position):
        data = real(path, size_bytes, position)
        at = data.find(f"U{20 - back:030X}".encode())
        return data[: at + 20] + b"\0" * 6 + data[at + 26 :] if at >= 0 and size_bytes > 1_000 else data

    decode = CommitLogReader._decode

    def reading(*given):
        with monkeypatch.context() as read:
            read.setattr(segments, "pread", with_a_hole)
            return decode(*given)

    monkeypatch.setattr(CommitLogReader, "_decode", reading)
    dispatcher = followed.dispatcher()
    list(rounds(dispatcher))
    monkeypatch.undo()
    assert dispatcher.position == followed.writer.next_offset > offsets[-1]
    followed.check()


def test_a_last_message_with_a_bad_body_counts_once_another_is_behind_it(followed):
    followed.write(5)
    (start,) = followed.write(1, body=b"body of the last one")
    followed.overwrite(followed.segment(0).read_bytes().index(b"body of the last"), b"BODY")
    dispatcher = followed.dispatcher()
    done = dispatcher.run_once()
    assert (done.state, done.end, dispatcher.position) == (End.TORN, start, start)
    assert (done.torn.begin, done.torn.end) == (start, followed.writer.next_offset)
    followed.write(1)
    assert dispatcher.run_once().messages == 2


def test_a_broker_that_died_while_writing_continues_after_the_last_whole_message(followed):
    followed.write(20)
    dispatcher = followed.dispatcher()
    dispatcher.run_once()
    (start,) = followed.write(1)
    followed.overwrite(start + 60, bytes(SEGMENT - start - 60))
    assert dispatcher.run_once().state is End.TORN
    followed.writer = followed.open_writer()
    assert followed.writer.next_offset == start
    followed.write(30)
    assert sum(done.messages for done in rounds(dispatcher)) == 30
    followed.check()
