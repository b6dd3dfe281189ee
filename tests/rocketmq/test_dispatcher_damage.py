"""Damage and holes within a live log: the follower puts all messages before them. It names each once it can't be a
write in progress.
"""

from __future__ import annotations

import pytest

from tests.rocketmq.followed import SEGMENT, rounds
from tiered_index.errors import CorruptFile
from tiered_index.rocketmq.log.commitlog import CommitLogReader
from tiered_index.rocketmq.log.segments import End
from tiered_index.rocketmq.log.store import LogEnd, StoreDirectory


def test_a_torn_message_that_stays_is_damage_once_the_log_continues(followed):
    offsets = followed.write(100)
    last = max(offset for offset in offsets if offset < SEGMENT)
    followed.overwrite(last + 60, bytes(SEGMENT - last - 60))
    dispatcher = followed.dispatcher()
    assert (dispatcher.run_once().caught_up, dispatcher.position) == (False, last)
    with pytest.raises(CorruptFile) as caught:
        dispatcher.run_once()
    assert (caught.value.file, caught.value.offset) == (str(followed.segment(0)), last)
    followed.index.flush()
    assert followed.index.durable_position(StoreDirectory.open(followed.path).source) == last
    skipping = followed.dispatcher(skip_corrupt=True)
    done = skipping.run_once()
    assert [(loss.kind, loss.begin, loss.end) for loss in done.losses] == [("corrupt", last, SEGMENT)]
    assert skipping.run_once().losses == ()
    followed.check()


@pytest.mark.parametrize("at", [0, 4, 30, 84])
def test_damage_in_the_middle_stops_before_it_and_nothing_before_it_is_lost(followed, at):
    offsets = followed.write(30)
    followed.overwrite(offsets[10] + at, b"\xee" * 8)
    dispatcher = followed.dispatcher()
    assert dispatcher.run_once().messages == 10
    for _ in range(2):
        with pytest.raises(CorruptFile):
            dispatcher.run_once()
        assert dispatcher.position == offsets[10]
    (loss,) = followed.dispatcher(skip_corrupt=True).run_once().losses
    assert (loss.kind, loss.begin, loss.end, loss.messages) == ("corrupt", offsets[10], offsets[11], None)
    followed.check()


@pytest.mark.parametrize("holes", [1, 15])
def test_a_hole_before_something_readable_is_damage_from_the_second_look_on(followed, holes):
    offsets = followed.write(40)
    begin, end = offsets[10], offsets[10 + holes]
    followed.overwrite(begin, bytes(end - begin))
    dispatcher = followed.dispatcher()
    done = dispatcher.run_once()
    assert (done.messages, done.state, done.caught_up, done.losses) == (10, End.OPEN, False, ())
    for _ in range(2):
        with pytest.raises(CorruptFile, match=f"zeros .*{end}") as caught:
            dispatcher.run_once()
        assert (caught.value.file, caught.value.offset) == (str(followed.segment(0)), begin)
    assert dispatcher.position == begin
    followed.index.flush()
    losses = [loss for done in rounds(followed.dispatcher(skip_corrupt=True)) for loss in done.losses]
    assert [(loss.kind, loss.begin, loss.end) for loss in losses] == [("corrupt", begin, end)]
    for number, offset in enumerate(offsets):
        found = followed.index.query("orders" if number % 3 else "payments", f"own-{number}")
        assert [item.offset for item in found] == ([] if begin <= offset < end else [offset])


def test_a_hole_that_is_filled_at_the_second_look_was_being_written(followed):
    offsets = followed.write(40)
    whole = followed.segment(0).read_bytes()
    followed.overwrite(offsets[10], bytes(50))
    dispatcher = followed.dispatcher(skip_corrupt=True)
    assert dispatcher.run_once().caught_up is False
    followed.segment(0).write_bytes(whole)
    assert [(done.messages, done.losses) for done in rounds(dispatcher)] == [(30, ())]
    followed.check()


def test_a_hole_that_hides_the_end_of_the_log_is_named_by_consume_queues(followed, monkeypatch):
    offsets = followed.write(40)
    followed.overwrite(offsets[10], bytes(500))
    monkeypatch.setattr(StoreDirectory, "log_end", lambda _: LogEnd(offsets[10], None))
    dispatcher = followed.dispatcher()
    assert dispatcher.run_once().caught_up is False
    with pytest.raises(CorruptFile, match="zeros"):
        dispatcher.run_once()


def test_something_behind_zeros_that_nobody_can_read_is_searched_for_once(followed, monkeypatch):
    followed.write(10)
    end = followed.writer.next_offset
    monkeypatch.setattr(StoreDirectory, "log_end", lambda _: LogEnd(end + 120, None))  # an estimate
    searched = []
    real = CommitLogReader._readable_behind
    monkeypatch.setattr(CommitLogReader, "_readable_behind", lambda *given: searched.append(given) or real(*given))
    dispatcher = followed.dispatcher()
    assert [done.caught_up for done in rounds(dispatcher)] == [False, True]
    assert [dispatcher.run_once().caught_up for _ in range(3)] == [True] * 3
    assert len(searched) == 1
    followed.write(3)
    assert dispatcher.run_once().messages == 3
