"""Archiving beside a follower: the archiver uploads only segments that the follower has put. A rewritten segment
replaces its copy.
"""

from __future__ import annotations

import pytest

from tests.rocketmq.followed import SEGMENT, Followed, rounds
from tiered_index.errors import CorruptFile
from tiered_index.rocketmq.archive.archive import SegmentArchiver
from tiered_index.rocketmq.follow.dispatcher import Dispatcher

JUNK = b"\xee" * 40


def follow(followed: Followed, *, skip: bool = True) -> tuple[Dispatcher, SegmentArchiver]:
    dispatcher = followed.dispatcher(skip_corrupt=skip, skip_missing=skip, clock=followed.clock)
    return dispatcher, SegmentArchiver(followed.index, "s", followed.path / "commitlog", dispatcher=dispatcher)


def archived(followed: Followed) -> dict[int, bytes]:
    return {s.start // SEGMENT: followed.storage.get(s.name)[: s.size_bytes] for s in followed.index.archived("s")}


def local(followed: Followed, *numbers: int) -> dict[int, bytes]:
    return {number: followed.segment(number).read_bytes() for number in numbers}


def catch_up(followed: Followed, dispatcher: Dispatcher) -> None:
    for _ in range(3):
        list(rounds(dispatcher))
    followed.index.flush()
    dispatcher.run_once()


def come_again(followed: Followed) -> None:
    followed.come_again()
    followed.clock.advance(60_000)


def test_segments_that_the_follower_has_not_put_are_not_archived(followed):
    offsets = followed.write(100)
    followed.overwrite(offsets[10], JUNK)
    dispatcher, archiver = follow(followed, skip=False)
    dispatcher.run_once()
    with pytest.raises(CorruptFile):
        dispatcher.run_once()
    followed.index.flush()
    assert archiver.run_once() == 0
    come_again(followed)
    assert followed.writer.next_offset == offsets[10]
    followed.write(100)
    catch_up(followed, dispatcher)
    assert archiver.run_once() > 0
    assert archived(followed) == local(followed, *range(followed.writer.next_offset // SEGMENT))


def test_segments_with_undurable_entries_are_not_archived(followed):
    followed.write(100)
    dispatcher, archiver = follow(followed)
    list(rounds(dispatcher))
    assert dispatcher.settled_before == 0
    assert archiver.run_once() == 0
    followed.index.flush()
    assert dispatcher.settled_before == dispatcher.position
    assert archiver.run_once() == followed.writer.next_offset // SEGMENT


@pytest.mark.parametrize("restart", [False, True])
def test_a_rewritten_segment_replaces_its_copy(followed, restart):
    offsets = followed.write(100)
    followed.overwrite(offsets[10], JUNK)
    dispatcher, archiver = follow(followed)
    catch_up(followed, dispatcher)
    last = followed.writer.next_offset // SEGMENT
    assert archiver.run_once() == last
    assert archived(followed) == local(followed, *range(last))
    come_again(followed)
    followed.write(130)
    with pytest.raises(CorruptFile, match="it was rewritten"):  # until the follower has noticed
        archiver.run_once()
    assert [loss.kind for loss in dispatcher.run_once().losses] == ["rewritten"]
    assert dispatcher.settled_before <= offsets[10]
    assert archiver.run_once() == 0
    followed.clock.advance(1)
    if restart:
        followed.index.flush()
        followed.crash_index()
        dispatcher, archiver = follow(followed)
    catch_up(followed, dispatcher)
    last = followed.writer.next_offset // SEGMENT
    assert archiver.run_once() == last
    assert archived(followed) == local(followed, *range(last))
    assert archiver.run_once() == 0
    # a difference from a copy of the present log is damage, as before
    followed.clock.advance(60_000)
    followed.overwrite(3_000, JUNK)
    whole = archived(followed)
    for again in (archiver, follow(followed)[1]):
        with pytest.raises(CorruptFile, match="it was rewritten"):
            again.run_once()
    assert archived(followed) == whole


def test_a_skipped_segment_is_archived_once_it_is_known_to_be_rewritten(followed):
    offsets = followed.write(100)
    followed.overwrite(offsets[10], JUNK)
    dispatcher, archiver = follow(followed)
    archiver.skip_corrupt = True
    catch_up(followed, dispatcher)
    archiver.run_once()
    come_again(followed)
    followed.write(130)
    assert archiver.run_once() == 0
    assert {loss.begin for loss in archiver.passed_over} >= {0}
    catch_up(followed, dispatcher)
    archiver.run_once()
    assert archiver.passed_over == ()
    assert archived(followed)[0] == local(followed, 0)[0]
