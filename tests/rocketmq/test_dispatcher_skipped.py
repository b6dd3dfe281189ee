"""The follower also remembers skipped ranges: if a broker truncates its log there and writes messages, the follower
finds them.
"""

from __future__ import annotations

import os
import random

import pytest

from tests.rocketmq.followed import SEGMENT, Followed, SteppedDispatcher, missing, rounds
from tiered_index.rocketmq.follow import fingerprints
from tiered_index.rocketmq.follow.dispatcher import RewrittenOffsets
from tiered_index.rocketmq.log import commitlog
from tiered_index.rocketmq.log.commitlog import CommitLogReader
from tiered_index.rocketmq.log.segments import End

ALL = {"skip_corrupt": True, "skip_missing": True}


def follow(followed: Followed, **options: bool) -> SteppedDispatcher:
    """Return a dispatcher as the command line makes it: it checks bodies."""
    return followed.dispatcher(**(options or ALL), reader=CommitLogReader(followed.path / "commitlog", check_crc=True))


def close_segment(followed: Followed, begin: int) -> None:
    """Write the final blank of the segment that has the offset `begin`."""
    left = SEGMENT - begin % SEGMENT
    followed.overwrite(begin, left.to_bytes(4, "big") + bytes.fromhex("cbd43194"))


def torn_before_the_blank(followed: Followed) -> int:
    """Write messages, and a last one that lacks a page although the blank after it is there; return its offset."""
    followed.write(20)
    (torn,) = followed.write(1, body=b"B" * (SEGMENT - followed.writer.next_offset - 300))
    close_segment(followed, followed.writer.next_offset)
    followed.overwrite(torn + 200, bytes(60))
    return torn


@pytest.mark.parametrize("restart", [False, True])
@pytest.mark.parametrize("written", [1, 3, 100])
def test_messages_written_over_a_skipped_range_are_read(followed, restart, written, monkeypatch):
    monkeypatch.setattr(commitlog, "_HEAD_OF_DAMAGE", 20)
    monkeypatch.setattr(commitlog, "_PIECE", 50)
    monkeypatch.setattr(fingerprints, "_READ_BYTES", 70)
    torn = torn_before_the_blank(followed)
    dispatcher = follow(followed)
    losses = [loss for done in rounds(dispatcher) for loss in done.losses]
    assert [(loss.kind, loss.begin) for loss in losses] == [("corrupt", torn)]
    assert dispatcher.position == SEGMENT
    for _ in range(3):
        assert dispatcher.run_once().losses == ()  # until something is written there, it is skipped once
    if restart:
        followed.index.flush()
        followed.crash_index()
        dispatcher = follow(followed)
    followed.come_again()
    assert followed.writer.next_offset == torn
    followed.write(written, body=b"y" * 30)
    losses = [loss for _ in range(3) for done in rounds(dispatcher) for loss in done.losses]
    assert [(loss.kind, loss.begin, loss.end) for loss in losses if loss.kind == "rewritten"] == [
        ("rewritten", torn, SEGMENT)
    ]
    assert missing(followed) == set()
    assert dispatcher.position in (followed.writer.next_offset, SEGMENT)


def test_without_skip_missing_it_stops_the_follower(followed):
    torn = torn_before_the_blank(followed)
    dispatcher = follow(followed, skip_corrupt=True)
    list(rounds(dispatcher))
    followed.come_again()
    followed.write(1, body=b"y" * 30)
    with pytest.raises(RewrittenOffsets) as caught:
        dispatcher.run_once()
    assert (caught.value.begin, caught.value.end, caught.value.messages) == (torn, SEGMENT, 0)


def test_a_broker_that_writes_while_damage_is_skipped(followed, monkeypatch):
    """The reader saw a readable message after the damage. The broker overwrote both before the reader got to it."""
    offsets = followed.write(12)
    followed.overwrite(offsets[10] + 100, bytes(30))
    real, done = CommitLogReader._judge, []

    def judging(*given):
        found = real(*given)
        if found[1] is not None and not done:
            done.append(True)
            followed.come_again()
            assert followed.writer.next_offset == offsets[10]
            followed.write(9, body=b"y" * 3)
        return found

    monkeypatch.setattr(CommitLogReader, "_judge", judging)
    dispatcher = follow(followed)
    for _ in range(3):
        list(rounds(dispatcher))
    assert done
    assert missing(followed) == set()
    assert dispatcher.position == followed.writer.next_offset


def test_a_message_that_is_completed_before_it_is_skipped_is_read(followed, monkeypatch):
    offsets = followed.write(12)
    whole = followed.segment(0).read_bytes()
    followed.overwrite(offsets[10] + 100, b"Z" * 8)
    real = CommitLogReader._read_damage

    def finishing(*given):
        followed.segment(0).write_bytes(whole)
        return real(*given)

    monkeypatch.setattr(CommitLogReader, "_read_damage", finishing)
    dispatcher = follow(followed)
    assert [(done.messages, done.losses) for done in rounds(dispatcher)] == [(12, ())]
    followed.check()


def test_messages_in_place_of_a_blank_that_was_lost_are_read(followed):
    """The follower read a blank that was not on the disk when the host crashed. The next message fits into its
    place.
    """
    followed.write(20)
    followed.write(1, body=b"B" * (SEGMENT - followed.writer.next_offset - 500))
    blank = followed.writer.next_offset
    close_segment(followed, blank)
    dispatcher = follow(followed, skip_missing=True)
    list(rounds(dispatcher))
    assert dispatcher.position == SEGMENT
    followed.overwrite(blank, bytes(8))
    followed.come_again()
    followed.write(1, body=b"")
    losses = [loss for _ in range(2) for done in rounds(dispatcher) for loss in done.losses]
    assert [(loss.kind, loss.begin, loss.end) for loss in losses] == [("rewritten", blank, SEGMENT)]
    assert missing(followed) == set()


@pytest.mark.parametrize("left", [0, 50, 4_000])
def test_a_truncated_segment_is_skipped_once(followed, left):
    followed.write(100)
    os.truncate(followed.segment(0), left)
    dispatcher = follow(followed)
    losses = [loss for done in rounds(dispatcher) for loss in done.losses]
    assert [(loss.kind, loss.end) for loss in losses] == [("corrupt", SEGMENT)]
    followed.index.flush()
    for again in (dispatcher, follow(followed)):
        assert [again.run_once().losses for _ in range(40)] == [()] * 40


def test_the_time_of_the_last_message_is_known_after_a_restart_behind_a_skipped_range(followed):
    torn_before_the_blank(followed)
    list(rounds(follow(followed)))
    followed.index.flush()
    followed.crash_index()
    again = follow(followed)
    last = max(message.store_ms for message in CommitLogReader(followed.path / "commitlog").messages(skip_corrupt=True))
    assert again._store_ms_of_last() == last


@pytest.mark.parametrize("seed", [0, 4, 5, *(pytest.param(seed, marks=pytest.mark.slow) for seed in (1, 2, 3))])
def test_a_host_that_loses_pages_while_the_follower_runs(tmp_path, seed):
    """After a crash, pages of the last segments are zeros. A follower that skips damage may read them before the broker
    truncates its log there.
    """
    rng = random.Random(seed)
    made = Followed(tmp_path)
    dispatcher = follow(made)
    for _ in range(12):
        for _ in range(rng.randrange(1, 5)):
            made.write(rng.randrange(1, 30))
            dispatcher.run_once()
        end = made.writer.next_offset
        for page in range(max(0, end - rng.choice((500, 3_000, 2 * SEGMENT))) // 512, end // 512 + 1):
            if rng.random() < 0.3 and made.segment(page * 512 // SEGMENT).exists():
                made.overwrite(page * 512, bytes(512) if rng.random() < 0.7 else rng.randbytes(512))
        for _ in range(rng.randrange(3)):
            dispatcher.run_once()
        if rng.random() < 0.3:
            made.index.flush()
            made.crash_index()
            dispatcher = follow(made)
        made.come_again()
    made.write(100)
    for _ in range(60):  # older ranges are compared only in some rounds
        done = dispatcher.run_once()
    assert done.state in (End.OPEN, End.TORN)
    assert dispatcher.position == made.writer.next_offset
    assert missing(made) == set()
    made.index.abandon()
