"""The scrubber compares older ranges in small steps: it notices a deep cut while the follower runs."""

from __future__ import annotations

import sys

import pytest

from tests.rocketmq.followed import SEGMENT, Followed, SteppedDispatcher, rounds
from tests.support import damage
from tiered_index.rocketmq.follow import dispatcher as dispatching
from tiered_index.rocketmq.follow import fingerprints
from tiered_index.rocketmq.follow.dispatcher import RewrittenOffsets
from tiered_index.rocketmq.follow.fingerprints import Scrubber

STEP = 500
ROUNDS = 2 * SEGMENT // STEP + 40
"""Rounds for all of two segments, and one more for each fingerprint."""


@pytest.fixture
def dispatcher(followed, monkeypatch) -> SteppedDispatcher:
    """A dispatcher that compares the newest 600 bytes in every round, 500 older bytes in small steps, and everything
    only at a start.
    """
    monkeypatch.setattr(fingerprints, "NEAR_BYTES", 600)
    monkeypatch.setattr(fingerprints, "FAR_BYTES", 600)
    monkeypatch.setattr(dispatching, "FAR_BYTES", 600)
    monkeypatch.setattr(fingerprints, "SCRUB_BYTES", STEP)
    made = followed.dispatcher(skip_missing=True)
    while followed.writer.next_offset < 2 * SEGMENT - 800:
        followed.write(4, body=b"")
        list(rounds(made))
    return made


def flip(followed: Followed, offset: int) -> None:
    damage.flip(followed.segment(offset // SEGMENT), offset % SEGMENT)


def test_an_unchanged_log_is_compared_repeatedly_in_bounded_steps(followed, dispatcher, monkeypatch):
    read = []
    real = fingerprints.stored_bytes

    def note(*given):
        if sys._getframe(1).f_code is Scrubber.step.__code__:
            read.append(given[1:3])
        return real(*given)

    monkeypatch.setattr(fingerprints, "stored_bytes", note)
    for _ in range(3 * ROUNDS):
        assert dispatcher.run_once().losses == ()
    assert max(size for _, size in read) <= STEP
    begins = [offset for offset, _ in read].count(0)
    assert begins > 2
    covered = {at for offset, size in read for at in range(offset, offset + size)}
    # a blank has only its head
    assert {one.begin for one in dispatcher.fingerprints.ranges if one.begin >= 0} <= covered
    assert len(covered) >= dispatcher.position - 200  # except the blank between the segments


@pytest.mark.parametrize("at", [40, 3_000, SEGMENT + 100])
def test_a_byte_that_is_changed_far_back_is_noticed_without_a_start(followed, dispatcher, at):
    flip(followed, at)
    losses = [loss for _ in range(ROUNDS) for loss in dispatcher.run_once().losses]
    assert [loss.kind for loss in losses] == ["rewritten"]
    assert losses[0].begin <= at < losses[0].end


def test_a_deep_cut_is_written_over_and_its_messages_are_found(followed, dispatcher):
    """The broker is still far from the position, and the bytes before the position are those that were read."""
    offset = min(one.end for one in dispatcher.fingerprints.ranges if one.end > SEGMENT + 1_000)
    followed.come_again(offset)
    offsets = followed.write(3, body=b"x" * 41)
    (loss,) = [loss for _ in range(ROUNDS) for loss in dispatcher.run_once().losses]
    assert (loss.kind, loss.begin) == ("rewritten", offset)
    for number, place in zip(range(1_000, 1_003), offsets, strict=True):
        found = followed.index.query("orders" if number % 3 else "payments", f"own-{number}")
        assert [item.offset for item in found] == [place]


def test_without_skip_missing_it_stops_the_follower(followed, dispatcher):
    flip(followed, 40)
    careful = followed.dispatcher()
    careful.position, careful.fingerprints = dispatcher.position, dispatcher.fingerprints
    careful._scrubber.compare_all = False
    with pytest.raises(RewrittenOffsets) as caught:
        for _ in range(ROUNDS):
            careful.run_once()
    assert caught.value.begin == 0


def test_segments_that_are_deleted_meanwhile_are_nothing_changed(followed, dispatcher):
    followed.segment(0).unlink()
    assert all(dispatcher.run_once().losses == () for _ in range(ROUNDS))
