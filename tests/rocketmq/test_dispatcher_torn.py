"""The end of a live log: the follower reports half a message there with its range. A round that follows a writer
ends.
"""

from __future__ import annotations

import os

import pytest

from tests.rocketmq.followed import SEGMENT, Followed, rounds
from tiered_index.errors import CorruptFile
from tiered_index.rocketmq.log.commitlog import CommitLogReader
from tiered_index.rocketmq.log.segments import End


def tear(followed: Followed, kept: int) -> tuple[int, bytes]:
    """Keep only the first bytes of the last message of the log; return its offset, and the segment's complete bytes."""
    (start,) = followed.write(1, body=b"b" * 40)
    whole = followed.segment(0).read_bytes()
    followed.segment(0).write_bytes(whole[: start + kept].ljust(SEGMENT, b"\0"))
    return start, whole


def test_a_torn_tail_has_a_range_and_is_searched_behind_only_when_something_changed(followed, monkeypatch):
    searched = []
    real = CommitLogReader._readable_behind
    monkeypatch.setattr(CommitLogReader, "_readable_behind", lambda *given: searched.append(given) or real(*given))
    followed.write(5)
    start, whole = tear(followed, 90)
    written = start + len(whole[start : start + 90].rstrip(b"\0"))
    dispatcher = followed.dispatcher()
    for _ in range(6):
        done = dispatcher.run_once()
        assert (done.state, done.caught_up, done.end) == (End.TORN, True, start)
        assert done.torn is not None and (done.torn.begin, done.torn.end) == (start, written)
    assert len(searched) == 2  # a second time because the broker may have been writing during the first
    status = followed.segment(0).stat()
    followed.segment(0).write_bytes(whole[: start + 100].ljust(SEGMENT, b"\0"))
    # as with a mapped file that is already dirty
    os.utime(followed.segment(0), ns=(status.st_atime_ns, status.st_mtime_ns))
    assert dispatcher.run_once().torn.end > written
    assert len(searched) == 3
    followed.segment(0).write_bytes(whole)
    os.utime(followed.segment(0), ns=(status.st_atime_ns, status.st_mtime_ns))
    (done,) = rounds(dispatcher)
    assert (done.messages, done.torn) == (1, None)
    followed.check()


def test_a_message_completed_just_after_it_was_called_torn_is_read(followed, monkeypatch):
    followed.write(5)
    _, whole = tear(followed, 60)
    real = CommitLogReader._readable_behind

    def finish(*given):
        found = real(*given)
        followed.segment(0).write_bytes(whole)
        return found

    monkeypatch.setattr(CommitLogReader, "_readable_behind", finish)
    dispatcher = followed.dispatcher()
    assert dispatcher.run_once().state is End.TORN
    assert dispatcher.run_once().messages == 1
    followed.check()


# a log that was truncated but not zeroed, read for the first time: old messages follow the written ones


@pytest.mark.parametrize("skip_corrupt", [False, True])
@pytest.mark.parametrize("restart", [False, True])
def test_old_messages_behind_the_end_are_waited_for_and_not_skipped_to(followed, skip_corrupt, restart):
    offsets = followed.write(40)
    followed.come_again(offsets[10])
    dispatcher = followed.dispatcher(skip_corrupt=skip_corrupt)
    states = set()
    for number in range(12):
        followed.write(1, body=b"x" * 101)
        if restart:
            followed.index.flush()
            dispatcher = followed.dispatcher(skip_corrupt=skip_corrupt)
        *_, done = rounds(dispatcher)
        assert (done.caught_up, done.losses, done.end) == (True, (), followed.writer.next_offset), number
        assert done.state in (End.TORN, End.OPEN)  # old messages have zeros, too
        assert (done.torn is not None) == (done.state is End.TORN)
        states.add(done.state)
    assert End.TORN in states
    followed.write(60, body=b"x" * 101)
    assert [done.losses for done in rounds(dispatcher)] == [()]
    assert dispatcher.position == followed.writer.next_offset
    followed.check()


def test_messages_behind_damage_that_are_younger_in_the_end_show_that_it_is_damage(followed):
    """Times in a log may decrease a little."""
    followed.write(10)
    (bad,) = followed.write(1)
    followed.number -= 5
    followed.write(1)
    followed.number += 5
    followed.write(5)
    followed.overwrite(bad + 4, b"\xee" * 4)
    dispatcher = followed.dispatcher()
    assert dispatcher.run_once().messages == 10
    with pytest.raises(CorruptFile):
        dispatcher.run_once()


@pytest.mark.parametrize("behind", ["message", "blank"])
def test_a_head_behind_a_batch_proves_its_last_message(followed, behind):
    followed.write(5)
    followed.write(1, body=b"body of the last one")
    if behind == "message":
        followed.write(1)
    else:
        followed.write(1, body=b"x" * 7_500)
        followed.segment(1).write_bytes(bytes(SEGMENT))
    followed.overwrite(followed.segment(0).read_bytes().index(b"body of the last"), b"BODY")
    assert followed.dispatcher().run_once().messages == (7 if behind == "message" else 6)


# rounds that end


def test_a_round_that_chases_a_writer_ends_after_some_time(followed):
    followed.write(400)
    times = iter(range(100))
    # each call of the clock advances it by a fifth of a second
    dispatcher = followed.dispatcher(now_s=lambda: next(times) / 5)
    done = dispatcher.run_once()
    assert (done.caught_up, 0 < done.messages < 400, done.end) == (False, True, dispatcher.position)
    assert done.messages + sum(later.messages for later in rounds(dispatcher)) == 400
    followed.check()


def test_a_round_ends_behind_the_batch_during_which_it_was_asked_to(followed):
    followed.write(400)
    asked = []
    dispatcher = followed.dispatcher(stopping=lambda: bool(asked))
    real = dispatcher._put

    def put(*given):
        asked.append(given)
        return real(*given)

    dispatcher._put = put
    done = dispatcher.run_once()
    assert (len(asked), done.caught_up, done.end) == (1, False, dispatcher.position)
    assert 0 < done.messages < 400
