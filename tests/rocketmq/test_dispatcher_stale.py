"""Old bytes that a broker left after it truncated its log: they prove nothing, and do not complete half of a new
message.
"""

from __future__ import annotations

import pytest

from tests.rocketmq.followed import SEGMENT, Followed, SteppedDispatcher, rounds
from tiered_index.rocketmq.follow import dispatcher as dispatching
from tiered_index.rocketmq.follow.dispatcher import RewrittenOffsets
from tiered_index.rocketmq.log.commitlog import CommitLogReader
from tiered_index.rocketmq.log.segments import End

JUNK = b"\x07junk of a torn message"


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


def found(followed: Followed) -> tuple[int, int]:
    """Return the number of entries of the new key and of the old one."""
    topics = ("orders", "payments")
    new, old = (sum(len(followed.index.query(topic, key)) for topic in topics) for key in ("key-new", "key-old"))
    return new, old


@pytest.mark.parametrize("old", [b"key-old", b"key-\0\0\0"])
def test_half_a_message_that_old_bytes_complete_is_not_put(followed, old):
    start, _, whole = half_over_old(followed, old)
    dispatcher = followed.dispatcher()
    done = dispatcher.run_once()
    assert (done.messages, done.end, done.state) == (5, start, End.TORN)
    # a message with holes is known to be incomplete
    assert (done.caught_up, done.torn) == (False, None) or b"\0" in old
    followed.segment(0).write_bytes(whole)
    assert sum(done.messages for done in rounds(dispatcher)) == 1
    assert found(followed) == (1, 0)
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
    assert found(followed) == (1, 0)
    assert [done.caught_up for done in rounds(dispatcher)][-1]
    followed.check()


def test_a_message_whose_bytes_change_at_every_look_waits(followed):
    start, half, whole = half_over_old(followed)
    dispatcher = followed.dispatcher()
    for number in range(4):
        changing = half.replace(b"key-old", b"key-ol%d" % number) + JUNK
        followed.segment(0).write_bytes(changing.ljust(SEGMENT, b"\0"))
        assert (dispatcher.run_once().caught_up, dispatcher.position) == (False, start)
    followed.segment(0).write_bytes(whole)
    assert sum(done.messages for done in rounds(dispatcher)) == 1
    assert found(followed) == (1, 0)


def test_a_message_completed_while_it_is_put_is_noticed(followed, monkeypatch):
    """The fingerprint covers the bytes whose keys were put. A fingerprint of later bytes would always match."""
    start, _, whole = half_over_old(followed)
    dispatcher = followed.dispatcher(skip_missing=True)
    dispatcher.run_once()
    real = SteppedDispatcher._remembered

    def finished(*given):
        followed.segment(0).write_bytes(whole)
        return real(*given)

    monkeypatch.setattr(SteppedDispatcher, "_remembered", finished)
    assert dispatcher.run_once().messages == 1
    monkeypatch.undo()
    assert found(followed) == (0, 1)
    careful = followed.dispatcher()
    careful.position, careful.fingerprints = dispatcher.position, dispatcher.fingerprints
    with pytest.raises(RewrittenOffsets) as caught:
        careful.run_once()
    assert (caught.value.begin, caught.value.end) == (start, followed.writer.next_offset)
    assert [loss.kind for loss in dispatcher.run_once().losses] == ["rewritten"]
    list(rounds(dispatcher))
    assert found(followed)[0] == 1


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


def test_a_newer_message_after_a_chunk_proves_the_last_one(followed, monkeypatch):
    """The follower does not read a log twice if it was written long ago."""
    followed.write(40)
    again = []
    real = dispatching.stable_part
    monkeypatch.setattr(
        dispatching, "stable_part", lambda *given: again.append(given[2].covers(given[1])) or real(*given)
    )
    reader = CommitLogReader(followed.path / "commitlog", chunk_bytes=1_500)
    assert followed.dispatcher(reader=reader).run_once().messages == 40
    assert len(again) > 4
    assert all(again[:-2])


# how the follower reports them


@pytest.mark.parametrize("cut", [30, 120])
def test_half_a_message_and_older_bytes_are_distinguished(followed, cut):
    offsets = followed.write(20)
    whole = followed.segment(0).read_bytes()
    half = whole[: offsets[-1] + cut].ljust(SEGMENT, b"\0")
    followed.segment(0).write_bytes(half)
    *_, done = rounds(followed.dispatcher())
    assert (done.torn.what, done.torn.begin) == ("half a message", offsets[-1])
    old = whole[: offsets[10]] + whole[offsets[10] + 7 : offsets[12]]
    followed.segment(0).write_bytes(old.ljust(SEGMENT, b"\0"))
    *_, done = rounds(followed.dispatcher(restart=True))
    assert (done.state, done.torn.what, done.torn.begin) == (End.TORN, "older bytes", offsets[10])
