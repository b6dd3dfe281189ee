"""A store that its broker closed is complete: no process writes its last message any more, whatever zeros its
properties have.
"""

from __future__ import annotations

from tests.rocketmq.followed import Followed, rounds
from tiered_index.rocketmq.follow import dispatcher as dispatching
from tiered_index.rocketmq.log.segments import End
from tiered_index.rocketmq.log.store import StoreDirectory

ZEROS = "KEYS\x01zeros\x02note\x01a\0\0b\x02"


def last_message(followed: Followed) -> int:
    followed.write(5)
    offset = followed.writer.put("orders", 1, b"body", properties=ZEROS, store_ms=1_700_000_001_000).offset
    followed.writer.flush()
    return offset


def test_the_last_message_of_a_closed_store_is_taken_with_zeros_in_its_properties(followed):
    offset = last_message(followed)
    dispatcher = followed.dispatcher()
    *_, done = rounds(dispatcher)
    assert (done.messages, done.state, done.end) == (5, End.TORN, offset)  # it may still be incomplete
    followed.writer.close()
    *_, done = rounds(dispatcher)
    assert (done.messages, done.state, done.torn) == (1, End.OPEN, None)
    assert [item.offset for item in followed.index.query("orders", "zeros")] == [offset]
    followed.check()


def test_a_broker_that_starts_while_the_log_is_read_may_be_writing(followed, monkeypatch):
    offset = last_message(followed)
    followed.writer.close()
    real = dispatching.CommitLogReader.batches

    def starting(*given, **named):
        for read in real(*given, **named):
            (followed.path / "abort").touch()
            yield read

    monkeypatch.setattr(dispatching.CommitLogReader, "batches", starting)
    *_, done = rounds(followed.dispatcher())
    assert (done.messages, done.state, done.end) == (5, End.TORN, offset)


def test_closed_is_a_checkpoint_and_no_mark_of_an_unclean_end(followed):
    store = StoreDirectory.open(followed.path)
    assert not store.is_closed
    followed.writer.close()
    assert store.is_closed
    # every broker that ended well leaves one: this is a partial copy of a live store
    (followed.path / "checkpoint").unlink()
    assert not store.is_closed
