"""Ranges of a store's log that were skipped or rewritten are in the storage's log: answers name what they may lack, and
entries of messages that the broker cut off are missing, not damaged.
"""

from __future__ import annotations

import pytest

from tests.rocketmq.followed import SEGMENT, Followed
from tests.rocketmq.messages import NOW_MS
from tests.rocketmq.remoting_client import HERE, by_key
from tests.support.damage import flip
from tiered_index import IndexReader
from tiered_index.cli.explaining import lost_text
from tiered_index.errors import CorruptFile
from tiered_index.follow import Follower
from tiered_index.rocketmq.archive.archive import SegmentArchiver
from tiered_index.rocketmq.archive.messages import RocketmqMessages
from tiered_index.rocketmq.follow.dispatcher import RewrittenOffsets
from tiered_index.rocketmq.remoting.broker import ReadOnlyBroker
from tiered_index.rocketmq.remoting.frames import Command, RequestCode

SKIPPING = {"skip_corrupt": True, "skip_missing": True}


def follow(followed: Followed, **options: bool) -> tuple[Follower, list[str]]:
    """Follow the store to its end, as a new process does; return the follower and its notes."""
    notes: list[str] = []
    dispatcher = followed.dispatcher(follow=False, clock=followed.clock, **(options or SKIPPING))
    with Follower(followed.index, dispatcher, follow=False, note=notes.append) as follower:
        follower.run()
    followed.index.flush()
    return follower, notes


def publish(followed: Followed) -> None:
    followed.index.seal()
    followed.index.run_lifecycle()


def cut_and_write_on(followed: Followed) -> list[int]:
    """Put messages with one key. After they are read, a broker cuts off two and writes on; return all offsets."""
    offsets = followed.write(3, keys="same", only_topic="orders")
    follow(followed)
    followed.come_again(cut=offsets[1])
    # the third message's offset is now within a longer one
    return [*offsets, *followed.write(1, body=b"L" * 2_000, keys="same", only_topic="orders")]


@pytest.mark.parametrize("place", ["store", "archive"])
def test_messages_that_the_broker_cut_off_are_missing_and_hide_no_others(followed, place):
    """The place of an entry is within another message: that was called damage, and a query was an error."""
    offsets = cut_and_write_on(followed)
    followed.clock.advance(60_000)
    follow(followed)
    publish(followed)
    store = followed.path
    if place == "archive":
        followed.write(100)
        follow(followed)
        SegmentArchiver(followed.index, str(store), store / "commitlog").run_once()
        store = None
    with IndexReader.open(storage_backend=followed.storage) as reader:
        answer = reader.messages("orders", "same", source=RocketmqMessages(store, reader.segment_archive))
        assert offsets[1] == offsets[3] and len(answer) == 4
        intact = [one.message for one in answer.messages if one.message is not None]
        assert {one.physical_offset for one in intact} == {offsets[0], offsets[3]}
        (gone,) = [one for one in answer.messages if one.item.offset == offsets[2]]
        assert (gone.state, gone.damaged, answer.status, answer.lost) == ("missing", False, "complete", ())
        assert "were cut off or rewritten" in gone.problem
        asked = Command(code=RequestCode.QUERY_MESSAGE, fields=by_key("orders", "same"))
        told = ReadOnlyBroker(reader, store=store).look_up(asked, HERE)
        assert (told.code, told.body) == (0, b"".join(one.encode() for one in intact))
        assert "not available" in told.remark and "missing" in told.remark and "damaged" not in told.remark


def test_a_message_written_after_the_cut_can_still_be_damaged(followed):
    cut_and_write_on(followed)
    follow(followed)
    followed.clock.advance(3_600_000)
    (later,) = followed.write(1, keys="late", only_topic="orders", body=b"body")
    follow(followed)
    flip(followed.segment(later // SEGMENT), later % SEGMENT + 100)
    (fetched,) = followed.index.messages("orders", "late", source=RocketmqMessages(followed.path)).messages
    assert fetched.damaged


def test_a_cut_is_recorded_once_by_a_run_that_does_not_skip_it(followed):
    offsets = cut_and_write_on(followed)
    before = followed.index.log_state.number
    for _ in range(2):
        with pytest.raises(RewrittenOffsets):
            follow(followed, skip_missing=False)
        assert followed.index.log_state.number == before + 1
    (one,) = followed.index.log_state.lost.values()
    assert (one.range.kind, one.range.begin <= offsets[1] < one.range.end) == ("rewritten", True)
    assert not one.lacks_entries
    source = RocketmqMessages(followed.path, followed.index.segment_archive)
    assert not any(one.damaged for one in followed.index.messages("orders", "same", source=source).messages)


@pytest.mark.parametrize("restart", [False, True])
def test_answers_name_a_gap_that_was_skipped(followed, restart):
    """They were `complete`, and `lost` was empty. Lookups of other times are not concerned."""
    followed.write(20)
    follow(followed)
    followed.write(300)
    end = followed.writer.next_offset
    last_ms = NOW_MS + 20 * 19
    for number in range(end // SEGMENT - 1):
        followed.segment(number).unlink()
    if restart:
        followed.crash_index()
    follower, notes = follow(followed)
    (loss,) = follower.losses
    assert (loss.kind, loss.is_least) == ("missing", True)
    assert f"at least {loss.messages:,} messages" in notes[0]
    publish(followed)
    with IndexReader.open(storage_backend=followed.storage) as reader:
        for lookups in (followed.index, reader):
            answer = lookups.query("orders", "own-100")
            assert (answer.status, len(answer)) == ("complete", 0)
            (lost,) = answer.lost
            assert (lost.file, lost.entries) == (f"rocketmq:{followed.path}", loss.messages)
            assert "deleted before they were read" in lost.reason and "at least" in lost_text(answer.lost)
            assert lost.begin_ms == last_ms // 1000 * 1000 and last_ms < lost.end_ms <= NOW_MS + 20 * 320
            assert lookups.messages("orders", "own-100", source=RocketmqMessages(followed.path)).lost == (lost,)
            for begin_ms, end_ms in ((None, lost.begin_ms - 1), (lost.end_ms + 1_000, None)):
                assert lookups.query("orders", "own-100", begin_ms, end_ms).lost == ()
            (many,) = lookups.query_many([("orders", "own-100")])
            assert many.lost == (lost,)
    number = followed.index.log_state.number
    follow(followed)
    assert followed.index.log_state.number == number


def test_damage_that_was_skipped_is_named_too(followed):
    offsets = followed.write(40)
    followed.overwrite(offsets[20], b"\xee" * 40)
    with pytest.raises(CorruptFile):
        follow(followed, skip_corrupt=False)
    follow(followed)
    (lost,) = followed.index.query("orders", "absent").lost
    assert "are damaged" in lost.reason and lost.begin_ms <= NOW_MS + 20 * 20 <= lost.end_ms + 999


def test_many_ranges_of_a_source_stay_few_in_the_log(followed, monkeypatch):
    from tiered_index.service.log import session

    monkeypatch.setattr(session, "_MOST_RANGES", 3)
    offsets = followed.write(300)
    for offset in offsets[5::30]:
        followed.overwrite(offset, b"\xee" * 40)
    follow(followed)
    ranges = [one.range for one in followed.index.log_state.lost.values()]
    assert len(ranges) == 3
    assert all(any(one.begin <= offset < one.end for one in ranges) for offset in offsets[5::30])


def test_a_storage_that_is_away_is_waited_for(tmp_path, monkeypatch):
    """The gap is recorded before the position moves past it: no later run would find it."""
    from tests.support.storage_faults import FaultStorage
    from tiered_index.errors import StorageUnavailable

    followed = Followed(tmp_path)
    followed.storage = FaultStorage(followed.storage)
    followed.index.abandon()
    followed.index = followed.open_index()
    offsets = followed.write(40)
    followed.overwrite(offsets[20], b"\xee" * 40)
    followed.storage.fail("put_if_absent", times=None, name_prefix="log/")
    dispatcher = followed.dispatcher(follow=False, **SKIPPING)
    with Follower(followed.index, dispatcher, follow=False, patience_s=0.0, note=lambda _: None) as follower:
        with pytest.raises(StorageUnavailable):
            follower.run()
    assert (followed.index.durable_position(dispatcher.store.source) or 0) <= offsets[20]
    followed.storage.clear()
    follow(followed)
    assert len(followed.index.query("orders", "absent").lost) == 1
    followed.index.abandon()
